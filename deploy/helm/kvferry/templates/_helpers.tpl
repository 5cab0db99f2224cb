{{/* The commands of the reference image. */}}
{{- define "kvferry.serveCommand" -}}
[kvferry, serve]
{{- end }}
{{- define "kvferry.routerCommand" -}}
[kvferry, router]
{{- end }}

{{- define "kvferry.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kvferry.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvferry.labels" -}}
{{ include "kvferry.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvferry.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kvferry.nodeImage" -}}
{{ eq .Values.engine "vllm" | ternary .Values.vllm.image (include "kvferry.image" .) }}
{{- end }}

{{/* The port of a role in topology `pod`, where containers share an address, and the port of all pods otherwise. */}}
{{- define "kvferry.httpPort" -}}
{{- $ports := dict "prefill" 8100 "decode" 8200 "router" 8000 -}}
{{ eq .root.Values.topology "pod" | ternary (get $ports .role) 8000 }}
{{- end }}

{{- define "kvferry.scheme" -}}
{{ empty .Values.http.tlsSecretName | ternary "http" "https" }}
{{- end }}

{{/* vLLM answers /health as soon as it can take requests, and has no /ready. */}}
{{- define "kvferry.readinessPath" -}}
{{ and (eq .root.Values.engine "vllm") (ne .role "router") | ternary "/health" "/ready" }}
{{- end }}

{{/* Seconds until the kill. In topology `pod` the router, the decode node and the prefill node drain in this order. */}}
{{- define "kvferry.gracePeriod" -}}
{{- $drains := eq .Values.topology "pod" | ternary 3 1 -}}
{{ add (mul $drains (add .Values.drain.delaySeconds .Values.drain.timeoutSeconds)) .Values.drain.marginSeconds }}
{{- end }}

{{/* The transports whose bytes leave the pod, of which there are none in topology `pod` with shm. */}}
{{- define "kvferry.network" -}}
{{- $transport := .Values.transport -}}
{{- if eq $transport.name "auto" }}{{ $transport.network }}{{ else if ne $transport.name "shm" }}{{ $transport.name }}{{ end -}}
{{- end }}

{{/* A pod's name in DNS. Certificates name it, because its address changes with each restart. */}}
{{- define "kvferry.podHost" -}}
$(POD_NAME).{{ include "kvferry.fullname" .root }}-{{ .role }}.$(POD_NAMESPACE).svc.{{ .root.Values.clusterDomain }}
{{- end }}

{{- define "kvferry.networkOptions" -}}
{{- $transport := .root.Values.transport -}}
{{- $options := dict "bind_host" "$(POD_IP)" "port_range" $transport.portRange -}}
{{- $isTcp := eq (include "kvferry.network" .root) "tcp" -}}
{{- if and $isTcp $transport.tls.secretName -}}
  {{- $_ := set $options "tls" "on" -}}
  {{- $_ := set $options "tls_cert" "/etc/kvferry/transport/tls.crt" -}}
  {{- $_ := set $options "tls_key" "/etc/kvferry/transport/tls.key" -}}
  {{- $_ := set $options "tls_ca" "/etc/kvferry/transport/ca.crt" -}}
  {{- if $transport.tls.verifyHost -}}
    {{- $_ := set $options "advertise_host" (include "kvferry.podHost" .) -}}
  {{- else -}}
    {{- $_ := set $options "tls_verify_host" false -}}
  {{- end -}}
  {{- with $transport.tls.peerNames }}{{ $_ := set $options "tls_peer_names" (join "," .) }}{{ end -}}
{{- else -}}
  {{- $_ := set $options "allow_plaintext" $transport.allowPlaintext -}}
  {{- if $isTcp }}{{ $_ := set $options "tls" "off" }}{{ end -}}
{{- end -}}
{{ toJson $options }}
{{- end }}

{{/* kvferry's connector for one role, as one JSON object in vLLM's form. Both engines read it. */}}
{{- define "kvferry.transferConfig" -}}
{{- $root := .root -}}
{{- $transport := $root.Values.transport -}}
{{- $shm := dict "socket_dir" "/run/kvferry" -}}
{{- $options := dict -}}
{{- if eq $transport.name "shm" -}}
  {{- $options = $shm -}}
{{- else if eq $transport.name "auto" -}}
  {{- $network := include "kvferry.networkOptions" . | fromJson -}}
  {{- $options = dict "local_options" $shm "network" $transport.network "network_options" $network -}}
{{- else -}}
  {{- $options = include "kvferry.networkOptions" . | fromJson -}}
{{- end -}}
{{- $extra := dict "transport_options" (mergeOverwrite $options $transport.options) -}}
{{- $_ := set $extra "lease_s" $root.Values.handoff.leaseSeconds -}}
{{- $extra = mergeOverwrite $extra $root.Values.handoff.options -}}
{{- $config := dict "kv_connector_extra_config" $extra -}}
{{- $_ := set $config "kv_role" (eq .role "prefill" | ternary "kv_producer" "kv_consumer") -}}
{{- $_ := set $config "kv_load_failure_policy" $root.Values.handoff.loadFailurePolicy -}}
{{- if eq $root.Values.engine "vllm" -}}
  {{- $_ := set $extra "transport" $transport.name -}}
  {{- $_ := set $config "kv_connector" "KvferryConnector" -}}
  {{- $_ := set $config "kv_connector_module_path" "kvferry.connector.vllm" -}}
{{- else -}}
  {{- $_ := set $extra "trace" true -}}
  {{- $_ := set $config "kv_connector" $transport.name -}}
{{- end -}}
{{ toJson $config }}
{{- end }}

{{/* The options that nodes and router share: where to listen, HTTPS, and how long a drain takes. */}}
{{- define "kvferry.servingArgs" -}}
- --host=0.0.0.0
- --port={{ include "kvferry.httpPort" . }}
{{- with .root.Values.http.tlsSecretName }}
- --ssl-certfile=/etc/kvferry/http/tls.crt
- --ssl-keyfile=/etc/kvferry/http/tls.key
{{- end }}
{{- if and (eq .root.Values.engine "vllm") (ne .role "router") }}
- --shutdown-timeout={{ .root.Values.drain.timeoutSeconds }}
{{- else }}
- --drain-delay-s={{ .root.Values.drain.delaySeconds }}
- --drain-timeout-s={{ .root.Values.drain.timeoutSeconds }}
{{- if .root.Values.http.insecure }}
- --insecure-http
{{- end }}
{{- end }}
{{- end }}

{{/* One container of a node: (dict "root" $ "role" "prefill"). */}}
{{- define "kvferry.nodeContainer" -}}
{{- $root := .root -}}
{{- $values := get $root.Values .role -}}
{{- $isVllm := eq $root.Values.engine "vllm" -}}
- name: {{ .role }}
  image: {{ include "kvferry.nodeImage" $root | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  {{- if eq $root.Values.topology "pod" }}
  # A sidecar: it starts before the router, and gets SIGTERM after the router has ended, in reverse order.
  restartPolicy: Always
  {{- end }}
  command: {{ $isVllm | ternary (toJson $root.Values.vllm.command) (include "kvferry.serveCommand" $root) }}
  args:
    {{- include "kvferry.servingArgs" . | nindent 4 }}
    - {{ printf "--kv-transfer-config=%s" (include "kvferry.transferConfig" .) | squote }}
    {{- with $root.Values.model.path }}
    - {{ printf "--model=%s" . | quote }}
    {{- end }}
    {{- with $root.Values.model.servedName }}
    - {{ printf "--served-model-name=%s" . | quote }}
    {{- end }}
    {{- range $values.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  env:
    {{- include "kvferry.podEnv" . | nindent 4 }}
    {{- if $isVllm }}
    - {name: HOME, value: /var/cache/kvferry}
    - {name: KVFERRY_CACHE, value: /var/cache/kvferry}
    {{- end }}
    {{- with $root.Values.http.apiKey }}
    {{- if .secretName }}
    - name: {{ $isVllm | ternary "VLLM_API_KEY" "KVFERRY_API_KEY" }}
      valueFrom: {secretKeyRef: {name: {{ .secretName }}, key: {{ .secretKey }}}}
    {{- end }}
    {{- end }}
    {{- with $values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: {{ .role }}, containerPort: {{ include "kvferry.httpPort" . }}}
  {{- include "kvferry.probes" . | nindent 2 }}
  {{- if $isVllm }}
  # vLLM refuses requests at SIGTERM. The others take them for --drain-delay-s.
  lifecycle:
    preStop:
      exec: {command: [sleep, {{ $root.Values.drain.delaySeconds | quote }}]}
  {{- end }}
  resources:
    {{- toYaml $values.resources | nindent 4 }}
  securityContext:
    {{- toYaml $root.Values.securityContext | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: cache, mountPath: /var/cache/kvferry}
    - {name: sockets, mountPath: /run/kvferry}
    - {name: shared-memory, mountPath: /dev/shm}
    {{- if $root.Values.transport.tls.secretName }}
    - {name: transport-tls, mountPath: /etc/kvferry/transport, readOnly: true}
    {{- end }}
    {{- if $root.Values.http.tlsSecretName }}
    - {name: http-tls, mountPath: /etc/kvferry/http, readOnly: true}
    {{- end }}
    {{- if $root.Values.model.volume }}
    - {name: model, mountPath: /models, readOnly: true}
    {{- end }}
{{- end }}

{{/* The router's container. */}}
{{- define "kvferry.routerContainer" -}}
{{- $root := .root -}}
{{- $values := $root.Values.router -}}
- name: router
  image: {{ include "kvferry.image" $root | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: {{ include "kvferry.routerCommand" $root }}
  args:
    {{- include "kvferry.servingArgs" . | nindent 4 }}
    {{- include "kvferry.nodeAddresses" $root | nindent 4 }}
    {{- if $root.Values.http.tlsSecretName }}
    - --node-ca-certs=/etc/kvferry/http/ca.crt
    {{- end }}
    - --decode-alone={{ $values.decodeAlone }}
    {{- range $values.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  env:
    {{- include "kvferry.podEnv" . | nindent 4 }}
    {{- with $root.Values.http.apiKey }}
    {{- if .secretName }}
    {{- range list "KVFERRY_API_KEY" "KVFERRY_NODE_API_KEY" }}
    - name: {{ . }}
      valueFrom: {secretKeyRef: {name: {{ $root.Values.http.apiKey.secretName }}, key: {{ $root.Values.http.apiKey.secretKey }}}}
    {{- end }}
    {{- end }}
    {{- end }}
    {{- with $values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: router, containerPort: 8000}
  {{- include "kvferry.probes" . | nindent 2 }}
  resources:
    {{- toYaml $values.resources | nindent 4 }}
  securityContext:
    {{- toYaml $root.Values.securityContext | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    {{- if $root.Values.http.tlsSecretName }}
    - {name: http-tls, mountPath: /etc/kvferry/http, readOnly: true}
    {{- end }}
{{- end }}

{{/* The names of this pod, for `$(NAME)` in arguments. */}}
{{- define "kvferry.podEnv" -}}
{{- range $name, $path := dict "POD_IP" "status.podIP" "POD_NAME" "metadata.name" "POD_NAMESPACE" "metadata.namespace" }}
- name: {{ $name }}
  valueFrom: {fieldRef: {fieldPath: {{ $path }}}}
{{- end }}
{{- end }}

{{/* Where the router finds the nodes. */}}
{{- define "kvferry.nodeAddresses" -}}
{{- $root := . -}}
{{- $name := include "kvferry.fullname" . -}}
{{- $scheme := include "kvferry.scheme" . -}}
{{- range $role := list "prefill" "decode" }}
{{- $port := include "kvferry.httpPort" (dict "root" $root "role" $role) }}
{{- if eq $root.Values.topology "pod" }}
- --{{ $role }}={{ $scheme }}://localhost:{{ $port }}
{{- else }}
- --{{ $role }}={{ eq $scheme "https" | ternary "dns+https" "dns" }}://{{ $name }}-{{ $role }}-ready.{{ $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}:{{ $port }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvferry.probes" -}}
{{- $timeout := .root.Values.probes.timeoutSeconds -}}
{{- $scheme := include "kvferry.scheme" .root | upper -}}
{{- $port := .role -}}
{{- $ready := include "kvferry.readinessPath" . -}}
startupProbe:
  httpGet: {path: {{ eq .role "router" | ternary "/health" $ready }}, port: {{ $port }}, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: {{ $timeout }}
  failureThreshold: {{ divf (float64 .root.Values.probes.startupSeconds) 5 | ceil | int }}
livenessProbe:
  httpGet: {path: /health, port: {{ $port }}, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: {{ $timeout }}
  failureThreshold: 3
readinessProbe:
  httpGet: {path: {{ $ready }}, port: {{ $port }}, scheme: {{ $scheme }}}
  periodSeconds: 2
  timeoutSeconds: {{ $timeout }}
  failureThreshold: 2
{{- end }}

{{/* What all pods have: (dict "root" $ "kind" "prefill" "placement" $values). */}}
{{- define "kvferry.podSpec" -}}
{{- $root := .root -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "kvferry.gracePeriod" $root }}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .placement.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- else }}
{{- if and $root.Values.transport.socketHostPath (eq $root.Values.transport.name "shm") (ne .kind "router") }}
# Shared memory connects pods of one host only.
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "kvferry.selectorLabels" $root | nindent 12 }}
          matchExpressions:
            - {key: app.kubernetes.io/component, operator: In, values: [prefill, decode]}
{{- end }}
{{- end }}
volumes:
  - {name: tmp, emptyDir: {}}
  {{- if ne .kind "router" }}
  - name: cache
    {{- toYaml $root.Values.cacheVolume | nindent 4 }}
  - name: sockets
    {{- with $root.Values.transport.socketHostPath }}
    hostPath: {path: {{ . }}, type: Directory}
    {{- else }}
    emptyDir: {medium: Memory, sizeLimit: 1Mi}
    {{- end }}
  - {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: {{ $root.Values.vllm.sharedMemory }}}}
  {{- with $root.Values.model.volume }}
  - name: model
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.transport.tls.secretName }}
  - {name: transport-tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
  {{- end }}
  {{- end }}
  {{- with $root.Values.http.tlsSecretName }}
  - {name: http-tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
  {{- end }}
{{- end }}

{{- define "kvferry.podMetadata" -}}
labels:
  {{- include "kvferry.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .kind }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
