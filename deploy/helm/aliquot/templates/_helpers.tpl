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

{{/* PriorityClass of the agents and their like ("node") or of the controllers ("controller"). Takes a list of the chart's
context and one of these words. */}}
{{- define "aliquot.priorityClass" -}}
{{- $root := index . 0 -}}
{{- $ofNode := eq (index . 1) "node" -}}
{{- $named := dig "priorityClassName" "" (ternary $root.Values.kubeletPlugin $root.Values.controller $ofNode) -}}
{{- if $named -}}
{{ $named }}
{{- else if eq (dig "classes" "system" ($root.Values.priority | default dict)) "own" -}}
{{ ternary "aliquot-node" "aliquot-controller" $ofNode }}
{{- else -}}
{{ ternary "system-node-critical" "system-cluster-critical" $ofNode }}
{{- end -}}
{{- end }}

{{/* What the chart's values say of an update of the controllers, filled up. */}}
{{- define "aliquot.controllerUpdate" -}}
{{- /* On the host's network both have the same ports, so that a new one finds no place on an old one's node. */ -}}
{{- $goesFirst := and .hostNetwork (gt (int .replicas) 1) -}}
{{- $update := .updateStrategy | default dict -}}
maxSurge: {{ dig "maxSurge" (ternary 0 1 $goesFirst) $update }}
maxUnavailable: {{ dig "maxUnavailable" (ternary 1 0 $goesFirst) $update }}
{{- end }}

{{/* The same of the agents, of which one number has to be 0. */}}
{{- define "aliquot.agentUpdate" -}}
{{- $update := .updateStrategy | default dict -}}
{{- $usual := ternary (list 0 1) (list 1 0) .hostNetwork -}}
{{- $surge := get $update "maxSurge" | toString -}}
{{- $unavailable := get $update "maxUnavailable" | toString -}}
{{- $zeros := list "0" "0%" -}}
{{- if and (not $surge) (not $unavailable) -}}
{{- $surge = index $usual 0 -}}
{{- $unavailable = index $usual 1 -}}
{{- else if not $surge -}}
{{- $surge = ternary (index $usual 0) 0 (has $unavailable $zeros) -}}
{{- else if not $unavailable -}}
{{- $unavailable = ternary 1 0 (has $surge $zeros) -}}
{{- end -}}
maxSurge: {{ $surge }}
maxUnavailable: {{ $unavailable }}
{{- end }}

{{/* Nodes that the agents' own affinity requires, if it does. */}}
{{- define "aliquot.requiredNodes" -}}
{{- dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" dict (.affinity | default dict) | toJson -}}
{{- end }}

{{/* Affinity of the agents and their like: theirs, and the labels of nodes with GPUs unless it requires nodes itself. */}}
{{- define "aliquot.agentAffinity" -}}
{{- $affinity := .affinity | default dict | deepCopy -}}
{{- $labelled := and (not (dig "allNodes" false .)) .gpuNodeLabels (not (include "aliquot.requiredNodes" . | fromJson)) -}}
{{- if $labelled -}}
{{- $terms := list -}}
{{- range .gpuNodeLabels -}}
{{- $parts := splitn "=" 2 . -}}
{{- $expression := dict "key" $parts._0 "operator" "Exists" -}}
{{- if contains "=" . -}}
{{- $expression = dict "key" $parts._0 "operator" "In" "values" (list $parts._1) -}}
{{- end -}}
{{- $terms = append $terms (dict "matchExpressions" (list $expression)) -}}
{{- end -}}
{{- $required := dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) -}}
{{- $affinity = set $affinity "nodeAffinity" (merge $required (get $affinity "nodeAffinity" | default dict)) -}}
{{- end -}}
{{- if $affinity -}}
{{- toYaml $affinity -}}
{{- end -}}
{{- end }}

{{- /* Whether metrics are for those alone who may read them. Values of releases before have none of this. */}}
{{- define "aliquot.guarded" -}}
{{- if dig "authentication" "enabled" true (.Values.metrics | default dict) }}true{{ end }}
{{- end }}

{{- /* Ports of such metrics. */}}
{{- define "aliquot.controllerMetricsPort" -}}
{{- dig "authentication" "controllerPort" 8444 (.Values.metrics | default dict) | int }}
{{- end }}
{{- define "aliquot.kubeletPluginMetricsPort" -}}
{{- dig "authentication" "kubeletPluginPort" 8445 (.Values.metrics | default dict) | int }}
{{- end }}

{{- /* The Secret with their certificate, if there is one. */}}
{{- define "aliquot.metricsSecret" -}}
{{- if include "aliquot.guarded" . }}{{ dig "authentication" "certificateSecret" "" (.Values.metrics | default dict) }}{{ end }}
{{- end }}

{{- /* Arguments for that certificate. */}}
{{- define "aliquot.metricsCertificate" -}}
- --metrics-tls-cert-file=/etc/aliquot/metrics/tls.crt
- --metrics-tls-key-file=/etc/aliquot/metrics/tls.key
{{- end }}
