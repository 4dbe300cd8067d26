{{- define "rapt.name" -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
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
{{- $calls := div (mul .Values.server.maxOpenCalls 64) 1024 -}}
{{- $gpu := ternary (add .Values.gpu.memoryMiB .Values.gpu.hostMiB) 0 .Values.gpu.enabled -}}
{{- add .Values.server.memoryBudgetMiB 128 $calls 128 $gpu -}}
{{- end -}}
