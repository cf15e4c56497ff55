{{- define "aliquot.labels" -}}
app.kubernetes.io/name: aliquot
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "aliquot.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "aliquot.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {name: {{ . | quote }}}
  {{- end }}
{{- end }}
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

{{/* Validations: of the labels (or annotations) of an object only ours are changed. Takes the field's name. */}}
{{- define "aliquot.onlyOurKeys" -}}
- expression: >-
    object.metadata.?{{ . }}.orValue({}).all(k, k.startsWith('aliquot.dev/') ||
    oldObject.metadata.?{{ . }}[?k] == object.metadata.?{{ . }}[?k]) &&
    oldObject.metadata.?{{ . }}.orValue({}).all(k, k.startsWith('aliquot.dev/') ||
    k in object.metadata.?{{ . }}.orValue({}))
  messageExpression: >-
    request.resource.resource + ' ' + request.name + ': of {{ . }} the controller may change only those that begin with aliquot.dev/'
{{- end }}

{{/* Milliseconds of a duration such as 1500ms, 30s, 5m or 1h. */}}
{{- define "aliquot.milliseconds" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- mul $number (get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) $unit) -}}
{{- end }}

{{/* Bytes of a quantity such as 512Mi or 1.5G; nothing for what is written otherwise. */}}
{{- define "aliquot.bytes" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9]+([.][0-9]+)?" $text -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := trimPrefix $number $text -}}
{{- if and $number (hasKey $units $unit) -}}
{{- mulf (float64 $number) (get $units $unit) | int64 -}}
{{- end -}}
{{- end }}

{{/* Where API servers call the webhook, without the path of a review. */}}
{{- define "aliquot.webhookURL" -}}
{{ .Values.webhook.url | trimSuffix "/" | trimSuffix "/mutate-pods" }}
{{- end }}

{{- /* Where our containers see the driver's root. What they mount is the directory that it is in: a driver container
mounts its root anew when it is replaced, and of that a mount of the root itself would show nothing. */}}
{{- define "aliquot.driverRoot" -}}
{{- if eq .driverRoot "/" }}/driver-root{{ else }}/driver-root/{{ base (clean .driverRoot) }}{{ end }}
{{- end }}

{{- define "aliquot.driverVolume" -}}
{{- $parent := dir (clean .driverRoot) -}}
hostPath: {path: {{ $parent | quote }}, type: {{ ternary "Directory" "DirectoryOrCreate" (eq $parent "/") }}}
{{- end }}
