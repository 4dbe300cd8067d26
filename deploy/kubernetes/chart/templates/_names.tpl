{{- define "rapt.name" -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "rapt.clusterIPName" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}-cluster-ip
{{- end -}}

{{/* The names of both services, and those of server.httpHosts. */}}
{{- define "rapt.httpHosts" -}}
{{- $hosts := list -}}
{{- range $name := list (include "rapt.name" .) (include "rapt.clusterIPName" .) -}}
{{- $full := printf "%s.%s" $name $.Release.Namespace -}}
{{- $hosts = concat $hosts (list $name $full (printf "%s.svc" $full) (printf "%s.svc.cluster.local" $full)) -}}
{{- end -}}
{{- concat $hosts .Values.server.httpHosts | join "," -}}
{{- end -}}

{{- define "rapt.selector" -}}
app.kubernetes.io/name: rapt
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rapt.labels" -}}
{{ include "rapt.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* The memory bound of the server, in MiB. */}}
{{- define "rapt.memoryMiB" -}}
{{- $calls := div (mul .Values.server.maxOpenCalls 68) 1024 -}}
{{- $gpu := ternary (add .Values.gpu.memoryMiB .Values.gpu.hostMiB) 0 .Values.gpu.enabled -}}
{{- add .Values.server.memoryBudgetMiB .Values.server.kvCacheMiB 128 $calls 128 $gpu .Values.sharedMemoryMiB -}}
{{- end -}}

{{/* The compute threads and the network threads, which the server derives in the same way. */}}
{{- define "rapt.cores" -}}
{{- add .Values.server.threads (max 1 (div .Values.server.threads 4)) -}}
{{- end -}}

{{/*
With the autoscaler, the number of pods that run: without a number, Kubernetes would reduce it to 1 when the autoscaler
is switched on.
*/}}
{{- define "rapt.replicas" -}}
{{- if .Values.autoscaler.enabled -}}
{{- $running := lookup "apps/v1" "Deployment" .Release.Namespace (include "rapt.name" .) -}}
{{- max (dig "spec" "replicas" 0 $running) .Values.autoscaler.minReplicas -}}
{{- else -}}
{{- .Values.replicas -}}
{{- end -}}
{{- end -}}

{{/* Selects the metrics of the release's pods, for KEDA. */}}
{{- define "rapt.ofPods" -}}
{namespace="{{ .Release.Namespace }}",pod=~"{{ include "rapt.name" . }}-.*"}
{{- end -}}
