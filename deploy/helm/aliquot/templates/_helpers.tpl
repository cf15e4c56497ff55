{{- define "aliquot.labels" -}}
app.kubernetes.io/name: aliquot
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "aliquot.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "aliquot.controllerUser" -}}
system:serviceaccount:{{ .Release.Namespace }}:aliquot-controller
{{- end }}

{{- define "aliquot.pluginUser" -}}
system:serviceaccount:{{ .Release.Namespace }}:aliquot-kubelet-plugin
{{- end }}

{{- define "aliquot.uninstallUser" -}}
system:serviceaccount:{{ .Release.Namespace }}:aliquot-uninstall
{{- end }}
