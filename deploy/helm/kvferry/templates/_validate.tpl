{{/* Refuse values that cannot work together. The schema checks each value alone. */}}
{{- define "kvferry.validate" -}}
{{- $transport := .Values.transport -}}
{{- $network := include "kvferry.network" . -}}
{{- if and (eq .Values.engine "vllm") (not .Values.vllm.image) -}}
  {{- fail "vllm.image is empty: engine 'vllm' needs an image with vLLM and kvferry; docs/deploying.md has its Dockerfile" -}}
{{- end -}}
{{- if and (eq $transport.name "shm") (eq .Values.topology "separate") (not $transport.socketHostPath) -}}
  {{- fail "transport.name 'shm' connects no pods: set topology 'pod', or transport.socketHostPath for pods of one host" -}}
{{- end -}}
{{- if and (eq $network "tcp") (not $transport.tls.secretName) (not $transport.allowPlaintext) -}}
  {{- fail "transport.tls.secretName is empty: tcp encrypts between pods; name a secret with certificates, or set transport.allowPlaintext" -}}
{{- end -}}
{{- if and (eq $network "tcp") $transport.tls.secretName $transport.tls.verifyHost (eq .Values.topology "pod") -}}
  {{- fail "transport.tls.verifyHost: the pods of topology 'pod' have no names in DNS; set it to false, or use transport.name 'shm'" -}}
{{- end -}}
{{- if and (has $network (list "ucx" "nixl")) (not $transport.allowPlaintext) -}}
  {{- fail (printf "transport.allowPlaintext is false: %s neither encrypts nor authenticates; set it, and keep networkPolicy.enabled" $network) -}}
{{- end -}}
{{- if lt (int .Values.drain.timeoutSeconds) (int .Values.handoff.leaseSeconds) -}}
  {{- fail "drain.timeoutSeconds is less than handoff.leaseSeconds: a pod would leave before its offers are read; raise it" -}}
{{- end -}}
{{- range $kind := eq .Values.topology "pod" | ternary (list "pair") (list "prefill" "decode" "router") -}}
  {{- $values := get $.Values $kind -}}
  {{- $scaling := $values.autoscaling -}}
  {{- if and $scaling.enabled (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
    {{- fail (printf "%s.autoscaling.minReplicas is more than maxReplicas: %d and %d" $kind (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
  {{- end -}}
  {{- if and $scaling.enabled (gt (int $values.replicas) (int $scaling.maxReplicas)) -}}
    {{- fail (printf "%s.replicas is %d, more than autoscaling.maxReplicas, which is %d: raise the maximum, or lower replicas" $kind (int $values.replicas) (int $scaling.maxReplicas)) -}}
  {{- end -}}
{{- end -}}
{{- if and (not .Values.http.insecure) (not (and .Values.http.tlsSecretName .Values.http.apiKey.secretName)) -}}
  {{- fail "http.tlsSecretName or http.apiKey.secretName is empty: nodes and router need TLS and an API key; set http.insecure to do without" -}}
{{- end -}}
{{- end }}
