{{/* The release's name is the name of the headless Service and the beginning of the names of pods: penstock-0.penstock */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "penstock.scheme" -}}
{{ ternary "https" "http" (not (empty .Values.tlsSecret)) }}
{{- end }}

{{- define "penstock.refuse" -}}
{{- with .Values }}
{{- if not .image }}
{{- fail "image is empty. Build docker/Dockerfile, push it to your registry, and set image to its name there." }}
{{- end }}
{{- if not (or .sources .data) }}
{{- fail "There is nothing to serve. Set sources to URLs, or data to a volume with shards." }}
{{- end }}
{{- if not (or .tokensSecret .settings.insecure) }}
{{- fail "Callers need tokens. Set tokensSecret to a secret with the key tokens.json, or settings.insecure to true." }}
{{- end }}
{{- if and .prepare.workers (not .store) }}
{{- fail "prepare.workers needs a store, where the Job leaves what it makes. Set store to a URL." }}
{{- end }}
{{- if and .monitoring.enabled .tokensSecret (not .monitoring.tokenSecret) }}
{{- fail "Prometheus needs a token. Set monitoring.tokenSecret to a secret with the key token." }}
{{- end }}
{{- if and .autoscaling.maxReplicas (lt (int .autoscaling.maxReplicas) (int .replicas)) }}
{{- fail "autoscaling.maxReplicas is less than replicas, the number that it starts from. Raise it." }}
{{- end }}
{{- end }}
{{- end }}

{{/* What the pods of servers and of the Job have in common, less the cache */}}
{{- define "penstock.pod" -}}
serviceAccountName: {{ .Values.serviceAccount.name | default .Release.Name }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: tmp
    emptyDir: {}
  {{- with .Values.data }}
  - name: data
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Its context is the chart's, with the keys command and ownResources. prepare checks the settings of serve, and opens no secrets. */}}
{{- define "penstock.container" -}}
- name: penstock
  image: {{ .Values.image }}
  command: {{ toJson .command }}
  env:
    - name: PENSTOCK_DATA_DIR
      value: {{ join "\n" (concat (ternary (list "/data") list (not (empty .Values.data))) .Values.sources) | quote }}
    - name: PENSTOCK_CACHE_BYTES
      value: {{ mulf 0.8 (regexFind "[0-9]+" .Values.cache.size) }}{{ regexFind "[MGT]" .Values.cache.size }}
    {{- with .Values.store }}
    - name: PENSTOCK_STORE
      value: {{ . }}
    {{- end }}
    - name: PENSTOCK_DRAIN_SECONDS
      value: {{ quote .Values.drainSeconds }}
    {{- if .Values.tokensSecret }}
    - name: PENSTOCK_TOKENS
      value: /etc/penstock/tokens/tokens.json
    {{- end }}
    {{- if .Values.tlsSecret }}
    - name: PENSTOCK_TLS_CERT
      value: /etc/penstock/tls/tls.crt
    - name: PENSTOCK_TLS_KEY
      value: /etc/penstock/tls/tls.key
    {{- end }}
    {{- range $name, $value := .Values.settings }}
    - name: PENSTOCK_{{ upper $name }}
      {{- if kindIs "bool" $value }}
      value: {{ ternary "yes" "no" $value | quote }}
      {{- else if kindIs "string" $value }}
      value: {{ quote $value }}
      {{- else }}
      value: {{ toJson $value | quote }}
      {{- end }}
    {{- end }}
    {{- range $name, $value := .Values.env }}
    - name: {{ $name }}
      value: {{ quote $value }}
    {{- end }}
  {{- with .Values.credentialsSecret }}
  envFrom:
    - secretRef: {name: {{ . }}}
  {{- end }}
  resources: {{ toYaml (.ownResources | default .Values.resources) | nindent 4 }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
  volumeMounts:
    - name: cache
      mountPath: /var/cache/penstock
    - name: tmp
      mountPath: /tmp
    {{- if .Values.data }}
    - name: data
      mountPath: /data
      readOnly: true
    {{- end }}
{{- end }}
