"""The verbs that the operator needs of a cluster, over the `kubernetes` package.

    tokenparallelservices             get list watch patch (finalizers)
    tokenparallelservices/status      patch
    pods, jobs                        get list watch create delete
    configmaps                        get list watch create patch delete
    secrets                           list watch create delete
    services, deployments, networkpolicies, poddisruptionbudgets, horizontalpodautoscalers
                                      get list watch create patch delete
    computedomains.resource.nvidia.com, where the cluster has them
                                      get list watch create patch
    nodes                             list watch
    events                            create
    leases (in the operator's own namespace)   get create update
    customresourcedefinitions         get create patch, for `tknp-operator crds --apply` alone

Everything travels as plain JSON. The package's own informers make typed objects, which lose fields
they don't know and can't be planned with as they are, so that lists are kept by `Mirror`.
"""
