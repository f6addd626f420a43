{{- define "tknp.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tknp.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "tknp.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "tknp.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tknp.service" -}}
{{- default .Release.Name .Values.service.name | trunc 39 | trimSuffix "-" -}}
{{- end -}}

{{- define "tknp.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ include "tknp.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "tknp.operator.selector" -}}
app.kubernetes.io/name: {{ include "tknp.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "tknp.operator.image" -}}
{{- with .Values.operator.image }}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{ end -}}
{{- end -}}

{{- define "tknp.engine.image" -}}
{{- $cpu := eq "cpu" (dig "decode" "device" "cuda" .Values.service.spec) -}}
{{- with .Values.image }}{{ ternary .repository .cudaRepository $cpu }}:{{ default $.Chart.AppVersion .tag }}{{ end -}}
{{- end -}}

{{- define "tknp.operator.account" -}}
{{- if .Values.operator.serviceAccount.create -}}
{{- default (printf "%s-operator" (include "tknp.fullname" .)) .Values.operator.serviceAccount.name -}}
{{- else -}}
{{- .Values.operator.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "tknp.container.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "tknp.pod.security" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* "true" where `setting` is true, or null and the cluster serves monitoring.coreos.com */}}
{{- define "tknp.monitored" -}}
{{- $setting := index . 0 -}}
{{- $root := index . 1 -}}
{{- if kindIs "invalid" $setting -}}
{{- if $root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}true{{ end -}}
{{- else if $setting -}}true{{- end -}}
{{- end -}}

{{/* Rules across values, each with its remedy */}}
{{- define "tknp.check" -}}
{{- $v := .Values -}}
{{- if and (not $v.operator.serviceAccount.create) (not $v.operator.serviceAccount.name) $v.operator.enabled -}}
{{- fail "operator.serviceAccount.name is empty and create is false: name an account or set operator.serviceAccount.create" -}}
{{- end -}}
{{- if and $v.crds.upgrade (not $v.operator.enabled) -}}
{{- fail "crds.upgrade runs the operator's image: set operator.enabled, or apply charts/tknp/crds by hand" -}}
{{- end -}}
{{- if $v.service.enabled -}}
{{- if not $v.service.spec.model -}}
{{- fail "service.spec.model is missing: say where the model is, for a try model.source.builtin: smollm2 (values-cpu.yaml)" -}}
{{- end -}}
{{- if not $v.service.spec.decode -}}
{{- fail "service.spec.decode is missing: set at least service.spec.decode.nodes" -}}
{{- end -}}
{{- $d := $v.service.spec.decode -}}
{{- if not $d.nodes -}}
{{- fail "service.spec.decode.nodes is missing: say how many decode nodes the pool has" -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]" (include "tknp.service" .)) -}}
{{- fail (printf "the service would be called %s, and host names begin with a letter: set service.name" (include "tknp.service" .)) -}}
{{- end -}}
{{- if and (eq (int (default 1 $d.copies)) 2) (not $d.roles) (ne (mod (int $d.nodes) 2) 0) -}}
{{- fail (printf "service.spec.decode.copies=2 pairs nodes, and nodes=%v is odd: make it even" $d.nodes) -}}
{{- end -}}
{{- if and (ne $v.operator.watchNamespace "") (ne $v.operator.watchNamespace .Release.Namespace) -}}
{{- fail (printf "service.enabled makes the service in %s, but operator.watchNamespace=%s: install into that namespace or leave it empty" .Release.Namespace $v.operator.watchNamespace) -}}
{{- end -}}
{{- end -}}
{{- if and (not $v.networkPolicy.enabled) (or $v.networkPolicy.gatewayFrom $v.networkPolicy.metricsFrom) -}}
{{- fail "networkPolicy.gatewayFrom and metricsFrom restrict nothing while networkPolicy.enabled is false: set it true or leave them out" -}}
{{- end -}}
{{- if $v.load.enabled -}}
{{- range $key := list "target" "traceConfigMap" "resultsClaim" -}}
{{- if not (index $v.load $key) -}}
{{- fail (printf "load.%s is empty: a load test needs it, see docs/load-testing.md" $key) -}}
{{- end -}}
{{- end -}}
{{- if and $v.load.pool (not (hasPrefix "grpc://" $v.load.target)) -}}
{{- fail (printf "load.pool is for a coordinator's gRPC port, and load.target=%s: set grpc://%s-coordinator:50051 or leave load.pool out" $v.load.target $v.load.pool) -}}
{{- end -}}
{{- if and $v.load.tlsSecret (not $v.load.pool) -}}
{{- fail (printf "load.tlsSecret=%s is of a pool: set load.pool or leave load.tlsSecret out" $v.load.tlsSecret) -}}
{{- end -}}
{{- end -}}
{{- end -}}
