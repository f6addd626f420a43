"""The verbs that the operator needs of a cluster, over the `kubernetes` package.

`rights` lists what it may do. Everything travels as plain JSON. The package's own informers make
typed objects, which lose fields they don't know and can't be planned with as they are, so that
lists are kept by `Mirror`.
"""
