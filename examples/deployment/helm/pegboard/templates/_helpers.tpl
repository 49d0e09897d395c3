{{- define "pegboard.name" -}}
{{- if contains "pegboard" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-pegboard" (.Release.Name | trunc 41 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "pegboard.selector" -}}
app.kubernetes.io/name: pegboard
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pegboard.labels" -}}
{{ include "pegboard.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "pegboard.secret" -}}
{{- .Values.secret.existingSecret | default (include "pegboard.name" .) }}
{{- end }}

{{- define "pegboard.claim" -}}
spec:
  accessModes: [{{ .accessMode }}]
  {{- with .storageClass }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests:
      storage: {{ .size }}
{{- end }}
