{{- define "ullage.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "ullage.fullname" -}}
{{- $name := include "ullage.name" . -}}
{{- $whole := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{ default $whole .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "ullage.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "ullage.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "ullage.selector" -}}
app.kubernetes.io/name: {{ include "ullage.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "ullage.labels" -}}
{{ include "ullage.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: ullage
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /*
An image of the values, by its name there. `usual` is its name in imageRegistry. Without a registry,
a node would pull from Docker Hub, where anybody may publish an image of that name.
*/ -}}
{{- define "ullage.image" -}}
{{- $registry := .values.imageRegistry | trimSuffix "/" -}}
{{- $usual := ternary (printf "%s/%s" $registry .usual) "" (ne $registry "") -}}
{{- $repository := .image.repository | default $usual -}}
{{- if not $repository }}
{{- fail (printf "%s: no image is named; set imageRegistry to the registry and folder that have Ullage's images, such as --set imageRegistry=registry.example/ullage, or --set imageRegistry=localhost/ullage for those that make images made and that are loaded into the nodes; see docs/guide/images.md" .name) }}
{{- end }}
{{- if not (regexMatch "^(localhost|[^/]*[.:][^/]*)/." $repository) }}
{{- $field := ternary .name "imageRegistry" (ne .image.repository "") }}
{{- fail (printf "%s: %s names no registry, so nodes would ask Docker Hub for it; write the registry, too, such as registry.example/%s" $field $repository $repository) }}
{{- end }}
{{- $tagged := printf "%s:%s" $repository (.image.tag | default .chart.AppVersion) -}}
{{ ternary (printf "%s@%s" $tagged .image.digest) $tagged (ne .image.digest "") }}
{{- end }}

{{- define "ullage.operatorImage" -}}
{{ include "ullage.image" (dict "image" .Values.image "name" "image.repository" "usual" "operator" "values" .Values "chart" .Chart) }}
{{- end }}

{{- define "ullage.engineImage" -}}
{{ include "ullage.image" (dict "image" .Values.engineImage "name" "engineImage.repository" "usual" "engine" "values" .Values "chart" .Chart) }}
{{- end }}

{{- /* The image of engines with GPUs, or empty if it is engineImage. */ -}}
{{- define "ullage.cudaEngineImage" -}}
{{- if or .Values.imageRegistry .Values.cudaEngineImage.repository -}}
{{ include "ullage.image" (dict "image" .Values.cudaEngineImage "name" "cudaEngineImage.repository" "usual" "engine-cuda" "values" .Values "chart" .Chart) }}
{{- end }}
{{- end }}

{{- define "ullage.vllmEngineImage" -}}
{{- if .Values.vllmEngineImage.repository -}}
{{ include "ullage.image" (dict "image" .Values.vllmEngineImage "name" "vllmEngineImage.repository" "usual" "" "values" .Values "chart" .Chart) }}
{{- end }}
{{- end }}

{{- /* The routers' image: the operator's, unless routerImage names another. */ -}}
{{- define "ullage.routerImage" -}}
{{- $own := .Values.routerImage -}}
{{- $whole := merge (dict "repository" ($own.repository | default .Values.image.repository)) $own -}}
{{- $image := ternary $whole .Values.image (or $own.repository $own.tag $own.digest | empty | not) -}}
{{ include "ullage.image" (dict "image" $image "name" "routerImage.repository" "usual" "operator" "values" .Values "chart" .Chart) }}
{{- end }}

{{- /* The names of a list of objects, with commas between them. */ -}}
{{- define "ullage.names" -}}
{{- $names := list -}}
{{- range . }}{{ $names = append $names .name }}{{ end -}}
{{ join "," $names }}
{{- end }}

{{- /* The operator's rights where it serves. Tests compare them with the kinds that it makes. */ -}}
{{- define "ullage.rules" -}}
- apiGroups: [serving.ullage.dev]
  resources: [llmservices, llmservicebases]
  verbs: [get, list, watch]
- apiGroups: [serving.ullage.dev]
  resources: [llmservices/status]
  verbs: [patch]
- apiGroups: [serving.ullage.dev]
  resources: [llmservices/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, prometheusrules]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [list, create]
{{- end }}

{{- /* To see whether the node of a hanging pod still answers. Nodes belong to no namespace. */ -}}
{{- define "ullage.nodeRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [get]
{{- end }}

{{- /* Rights in the release's own namespace, without which no operator acts. */ -}}
{{- define "ullage.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "ullage.fullname" . | quote }}]
  verbs: [get, update]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
{{- end }}
