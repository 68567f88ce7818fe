{{- define "gradbus.labels" -}}
app.kubernetes.io/name: gradbus
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "gradbus.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "gradbus.labels" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- /* The component that listens: relay, controller, or none. */}}
{{- define "gradbus.listener" -}}
{{- if .Values.relay.enabled }}relay{{ else if and .Values.controller.enabled (not .Values.connect) }}controller{{ end }}
{{- end }}

{{- define "gradbus.image" -}}
{{- if not .repository -}}
{{- fail "gradbus: image.repository is empty: set it to your image of gradbus. No public registry has one; deploy/Containerfile builds it" -}}
{{- end -}}
{{ .repository }}:{{ .tag }}
{{- end }}

{{- /* A configuration in JSON: the user's settings, and what the chart fills in. None of the latter may be set twice. */}}
{{- define "gradbus.configuration" -}}
{{- range $section, $values := .own }}
{{- range $key, $_ := $values }}
{{- if hasKey (get $.settings $section | default dict) $key }}
{{- fail (printf "gradbus: %s.%s.%s is filled in by the chart: remove it from the values (docs/kubernetes.md names the value that decides it)" $.where $section $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- merge (dict) .own .settings | toPrettyJson }}
{{- end }}

{{- /* Section bus of a member that dials, in YAML. */}}
{{- define "gradbus.bus" -}}
job: {{ .job | quote }}
security: psk
key_file: /run/secrets/gradbus/job.key
{{- with .root.Values }}
{{- $listener := include "gradbus.listener" $.root }}
{{- if and (eq $listener "controller") (eq $.component "controller") }}
listen: ["tls/0.0.0.0:8443"]
tls_certificate: /run/secrets/gradbus/tls.crt
tls_key: /run/secrets/gradbus/tls.key
{{- if .secrets.member }}
tls_clients: true
tls_ca: /run/secrets/gradbus/ca.crt
{{- end }}
{{- else }}
{{- if not (or .connect $listener) }}
{{- fail (printf "gradbus: %s has nothing to dial: set relay.enabled or controller.enabled to true, or name endpoints in connect" $.component) }}
{{- end }}
{{- $service := (get . ($listener | default "relay")).service }}
connect: {{ .connect | default (list (printf "tls/%s-%s.%s.svc:%v" $.root.Release.Name $listener $.root.Release.Namespace $service.port)) | toJson }}
{{- if .secrets.ca }}
tls_ca: /run/secrets/gradbus/ca.crt
{{- end }}
{{- if .secrets.member }}
tls_certificate: /run/secrets/gradbus/member.crt
tls_key: /run/secrets/gradbus/member.key
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The volume of a component's secrets. The kubelet gives files to the group of fsGroup and lets it read them. */}}
{{- define "gradbus.secrets" -}}
{{- $secrets := .root.Values.secrets }}
{{- $listens := eq .component (include "gradbus.listener" .root) }}
- name: secrets
  projected:
    defaultMode: 0400
    sources:
      {{- if ne .component "relay" }}
      - secret:
          name: {{ $secrets.job }}
          items: [{key: job.key, path: job.key}]
      {{- end }}
      {{- if $listens }}
      - secret:
          name: {{ $secrets.tls }}
          items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
      {{- else if $secrets.member }}
      - secret:
          name: {{ $secrets.member }}
          items: [{key: tls.crt, path: member.crt}, {key: tls.key, path: member.key}]
      {{- end }}
      {{- if and $secrets.ca (or $secrets.member (not $listens)) }}
      - secret:
          name: {{ $secrets.ca }}
          items: [{key: ca.crt, path: ca.crt}]
      {{- end }}
{{- end }}

{{- /* What all pods have: rights, image secrets, scheduling, volumes. */}}
{{- define "gradbus.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values.scheduling }}
{{ toYaml . }}
{{- end }}
volumes:
  - name: configuration
    configMap: {name: {{ .configuration }}}
  {{- include "gradbus.secrets" . | trim | nindent 2 }}
  - name: tmp
    emptyDir: {sizeLimit: 1Gi}
{{- end }}

{{- define "gradbus.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
resources:
  {{- toYaml .values.resources | nindent 2 }}
volumeMounts:
  - {name: configuration, mountPath: /etc/gradbus, readOnly: true}
  - {name: secrets, mountPath: /run/secrets/gradbus, readOnly: true}
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{- /* Environment of all members. Key files are read with the mode that the kubelet gives them, in this folder only. */}}
{{- define "gradbus.environment" -}}
- {name: CREDENTIALS_DIRECTORY, value: /run/secrets/gradbus}
- {name: HOME, value: /tmp}
{{- end }}

{{- /* Probes of a member that trains, by its page of metrics: it answers from the start of the run to the end of the process. */}}
{{- define "gradbus.probes" -}}
startupProbe:
  httpGet: {path: /metrics, port: metrics}
  periodSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /metrics, port: metrics}
  periodSeconds: 30
  timeoutSeconds: 10
  failureThreshold: 6
{{- end }}

{{- define "gradbus.service" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "gradbus.metadata" . | nindent 2 }}
  {{- with .values.service.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  type: {{ .values.service.type }}
  selector:
    {{- include "gradbus.labels" . | nindent 4 }}
  ports:
    - {name: bus, port: {{ .values.service.port }}, targetPort: bus, protocol: TCP}
{{- end }}
