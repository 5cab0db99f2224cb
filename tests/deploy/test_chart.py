"""The Helm chart, rendered by Helm and checked without a cluster. `make tools` gets what these tests need."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.connector.stats import METRICS
from tests.support.deployments import (
    CHART,
    EXAMPLES,
    ROOT,
    Manifest,
    containers_of,
    helm,
    kubernetes_schemas,
    of_kind,
    render,
    run_helm,
)

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

pytestmark = pytest.mark.skipif(not helm() or not kubernetes_schemas(), reason="`make tools` was not run")

VALUES = sorted(EXAMPLES.glob("*.yaml"))
#: The oldest version that Chart.yaml admits, and the newest that the schemas know.
KUBERNETES = ("1.29", "1.37")
CRD_SCHEMAS = Path(__file__).parent / "crd_schemas"
PLAINTEXT = "transport.allowPlaintext=true"
INSECURE = "http.insecure=true"
IMAGE = "vllm.image=registry.example/vllm-kvferry:0.32.0"
#: Everything that is off by default.
ALL = (
    "engine=reference",
    PLAINTEXT,
    "serviceMonitor.enabled=true",
    "serviceMonitor.labels.release=prometheus",
    "prometheusRule.enabled=true",
    "prometheusRule.labels.release=prometheus",
    "dashboard.enabled=true",
    *(f"{kind}.autoscaling.enabled=true" for kind in ("prefill", "decode", "router", "pair")),
    "http.tlsSecretName=kvferry-http",
    "http.apiKey.secretName=kvferry-key",
    "networkPolicy.clients[0].ipBlock.cidr=10.0.0.0/8",
    "podAnnotations.note=text",
    "podLabels.team=inference",
    "model.servedName=model",
    "image.pullSecrets[0].name=registry",
    "runtimeClassName=nvidia",
    "priorityClassName=high",
    "prefill.nodeSelector.gpu=yes",
    "prefill.tolerations[0].key=gpu",
    "prefill.extraEnv[0].name=A",
    "prefill.extraEnv[0].value=b",
    "decode.extraArgs[0]=--threads=1",
)
#: Rendered once: everything on, in either topology, beside the examples.
RENDERED = {
    **{values.stem: ([values], ()) for values in VALUES},
    "all": ([], ALL),
    "all-pod": ([], (*ALL, "topology=pod", "transport.name=shm")),
    "default": ([], (IMAGE, PLAINTEXT, INSECURE)),
    "scaled": ([], (IMAGE, PLAINTEXT, INSECURE, "decode.autoscaling.enabled=true")),
    "auto": ([], (IMAGE, PLAINTEXT, INSECURE, "transport.name=auto", "transport.network=ucx")),
    "host": ([], (IMAGE, INSECURE, "transport.name=shm", "transport.socketHostPath=/var/lib/kvferry")),
}


@cache
def rendered(name: str) -> list[Manifest]:
    values, settings = RENDERED[name]
    return render(values, *settings)


@pytest.fixture(params=RENDERED)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(request.param)


def workloads(manifests: Sequence[Manifest]) -> list[Manifest]:
    return of_kind(manifests, "StatefulSet", "Deployment")


def selected(selector: dict[str, Any], manifests: Sequence[Manifest]) -> list[str]:
    """Return the workloads whose pods a selector chooses."""
    labels = selector.get("matchLabels", selector)
    return [
        each["metadata"]["name"]
        for each in workloads(manifests)
        if labels.items() <= each["spec"]["template"]["metadata"]["labels"].items()
    ]


def option(container: Manifest, name: str) -> str:
    """Return the value of one of a container's options."""
    (value,) = [word.partition("=")[2] for word in container["args"] if word.startswith(f"--{name}=")]
    return str(value)


# -- schemas ---------------------------------------------------------------------------------------


@cache
def validator_of(version: str, kind: str, api: str) -> Any:
    """Return the validator of a kind, which refuses fields that it does not know."""
    import referencing

    own = CRD_SCHEMAS / f"{kind.lower()}.json"
    if own.exists():
        return jsonschema.Draft202012Validator(json.loads(own.read_text()))
    api = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api)
    schemas = kubernetes_schemas()
    assert schemas is not None
    folder = f"kubernetes_validate/kubernetes-json-schema/v{version}.0-local-strict"
    schema, definitions = (
        referencing.Resource.from_contents(json.loads(schemas.read(f"{folder}/{name}.json")))
        for name in (f"{kind.lower()}-{api}", "_definitions")
    )
    registry = definitions @ (schema @ referencing.Registry())
    return jsonschema.Draft202012Validator(schema.contents, registry=registry)


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_valid_for_kubernetes(manifests: list[Manifest], version: str) -> None:
    for each in manifests:
        problems = list(validator_of(version, each["kind"], each["apiVersion"]).iter_errors(each))
        assert not problems, f"{each['kind']} {each['metadata']['name']}: {problems[0].message}"


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_pods_of_the_documents_are_valid_for_kubernetes(version: str) -> None:
    pages = (ROOT / "docs").glob("*.md")
    specs = [text for page in pages for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]
    assert specs
    for spec in map(yaml.safe_load, specs):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}, "spec": spec}
        assert not list(validator_of(version, "Pod", "v1").iter_errors(pod))


def test_helm_finds_nothing_to_complain_about() -> None:
    done = run_helm("lint", "--strict", CHART, "--set", IMAGE, "--set", PLAINTEXT, "--set", INSECURE)
    assert done.returncode == 0, done.stdout


def test_names_and_images_are_given_once(manifests: list[Manifest]) -> None:
    named = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(set(named)) == len(named)
    for workload in workloads(manifests):
        for container in containers_of(workload):
            assert re.fullmatch(r"\S+:\S+", container["image"])
            assert len(container["name"]) <= 15  # also a port's name


# -- what an operator relies on --------------------------------------------------------------------


def test_every_selector_chooses_the_pods_it_is_for(manifests: list[Manifest]) -> None:
    for each in workloads(manifests):
        assert selected(each["spec"]["selector"], manifests) == [each["metadata"]["name"]]
    for service in of_kind(manifests, "Service"):
        (target,) = selected(service["spec"]["selector"], manifests)
        (workload,) = [each for each in workloads(manifests) if each["metadata"]["name"] == target]
        ports = {port["name"] for container in containers_of(workload) for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        assert selected(budget["spec"]["selector"], manifests) == [budget["metadata"]["name"]]
    for policy in of_kind(manifests, "NetworkPolicy"):
        assert selected(policy["spec"]["podSelector"], manifests) == [policy["metadata"]["name"]]
    kinds = ("PodDisruptionBudget", "NetworkPolicy")
    assert all(len(of_kind(manifests, kind)) == len(workloads(manifests)) for kind in kinds)


def test_pods_run_without_privileges(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        spec = workload["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == 10001  # as in docker/Dockerfile
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec["automountServiceAccountToken"]
        assert not any(spec.get(key) for key in ("hostNetwork", "hostIPC", "hostPID"))
        for container in containers_of(workload):
            context = container["securityContext"]
            assert not context["allowPrivilegeEscalation"]
            assert context["readOnlyRootFilesystem"]
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_mounts_name_volumes_and_commands_name_mounts(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        volumes = {volume["name"] for volume in workload["spec"]["template"]["spec"]["volumes"]}
        for container in containers_of(workload):
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            paths = re.findall(r"/(?:etc|run|var|models)[\w/.-]*", " ".join(container["args"]))
            assert all(any(path.startswith(mount) for mount in mounts) for path in paths)


def drain_of(container: Manifest) -> tuple[int, int]:
    """Return how long a container drains, and how long it takes requests before that."""
    if "lifecycle" in container:
        delay = container["lifecycle"]["preStop"]["exec"]["command"][1]
        return int(option(container, "shutdown-timeout")), int(delay)
    return int(option(container, "drain-timeout-s")), int(option(container, "drain-delay-s"))


def test_a_pod_has_time_to_drain(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        spec = workload["spec"]["template"]["spec"]
        grace = spec["terminationGracePeriodSeconds"]
        drains, delays = [], []
        for container in containers_of(workload):
            drain, delay = drain_of(container)
            drains.append(drain)
            delays.append(delay)
            for word in container["args"]:
                if word.startswith("--kv-transfer-config="):
                    lease = json.loads(word.partition("=")[2])["kv_connector_extra_config"]["lease_s"]
                    assert drain >= lease
        # Sidecars drain after each other, and reference nodes take up to 10 s to close after the drain.
        assert grace >= sum(delays) + sum(drains) + 12


def test_the_pods_of_a_pair_stop_the_router_first() -> None:
    (workload,) = workloads(rendered("reference-shm-pod"))
    spec = workload["spec"]["template"]["spec"]
    # Sidecars get SIGTERM after the main container has ended, the last one first.
    assert [container["name"] for container in spec["containers"]] == ["router"]
    sidecars = [(each["name"], each["restartPolicy"]) for each in spec["initContainers"]]
    assert sidecars == [("prefill", "Always"), ("decode", "Always")]


def test_probes_ask_a_port_that_the_container_listens_on(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        for container in containers_of(workload):
            (port,) = container["ports"]
            assert option(container, "port") == str(port["containerPort"])
            assert container["livenessProbe"]["httpGet"]["path"] == "/health"
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert container[probe]["httpGet"]["port"] == port["name"]


def test_only_nodes_reach_the_ports_of_the_transport() -> None:
    for policy in of_kind(rendered("reference-tcp"), "NetworkPolicy"):
        name = policy["metadata"]["name"]
        for rule in policy["spec"]["ingress"]:
            if any(port.get("endPort") for port in rule["ports"]):
                (source,) = rule["from"]
                (expression,) = source["podSelector"]["matchExpressions"]
                assert expression["values"] == ["prefill", "decode"]
                assert rule["ports"] == [{"port": 5600, "endPort": 5631}]
                break
        else:
            assert name.endswith("-router")


@pytest.mark.parametrize(("name", "scheme"), [("all", "dns+https"), ("scaled", "dns")])
def test_the_router_looks_up_the_pods_that_are_ready(name: str, scheme: str) -> None:
    (router,) = [
        container
        for workload in workloads(rendered(name))
        for container in containers_of(workload)
        if container["name"] == "router"
    ]
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(rendered(name), "Service")}
    for role in ("prefill", "decode"):
        (host, port) = option(router, role).removeprefix(f"{scheme}://").split(":")
        service, *domain = host.split(".")
        assert domain[1:] == ["svc", "cluster", "local"]
        assert services[service]["clusterIP"] == "None"
        assert not services[service].get("publishNotReadyAddresses")
        assert selected(services[service]["selector"], rendered(name)) == [f"ferry-kvferry-{role}"]
        assert [str(each["port"]) for each in services[service]["ports"]] == [port]


@pytest.mark.parametrize("name", [None, "ours"])
def test_the_operator_gets_the_alerts_and_grafana_the_dashboard(name: str | None) -> None:
    """The alerts look for the job that the monitor's label makes."""
    manifests = rendered("all") if name is None else render([], *ALL, f"nameOverride={name}")
    (rule,) = of_kind(manifests, "PrometheusRule")
    shipped = (
        (CHART / "files" / "alerts.yml").read_text().replace('job="kvferry"', f'job="{name or "kvferry"}"')
    )
    assert rule["spec"] == yaml.safe_load(shipped)
    (monitor,) = of_kind(manifests, "ServiceMonitor")
    (service, *_) = of_kind(manifests, "Service")
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == (name or "kvferry")
    (shown,) = of_kind(manifests, "ConfigMap")
    assert json.loads(shown["data"]["kvferry.json"]) == json.loads(
        (CHART / "files" / "dashboard.json").read_text()
    )
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_scaling_uses_metrics_that_the_adapter_rules_make() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "helm" / "prometheus-adapter.yaml").read_text())["rules"][
        "custom"
    ]
    made = {
        re.sub(rule["name"]["matches"], rule["name"]["as"].replace("${1}", r"\1"), found[1]): found[1]
        for rule in rules
        if (found := re.match(r"^(\S+?)\{", rule["seriesQuery"]))
    }
    for name in ("all", "all-pod", "scaled"):
        for scaler in of_kind(rendered(name), "HorizontalPodAutoscaler"):
            target = scaler["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) in {
                (each["kind"], each["metadata"]["name"]) for each in workloads(rendered(name))
            }
            for metric in scaler["spec"]["metrics"]:
                if metric["type"] == "Pods":
                    assert metric["pods"]["metric"]["name"] in made
    documented = (ROOT / "docs" / "observing.md").read_text()
    for series in made.values():
        assert series.startswith("vllm:") or f"`{series}`" in documented or series in METRICS


def test_the_monitor_scrapes_every_container_once() -> None:
    for name in ("all", "all-pod"):
        (monitor,) = of_kind(rendered(name), "ServiceMonitor")
        wanted = monitor["spec"]["selector"]["matchLabels"]
        ports = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
        scraped = [
            (selected(service["spec"]["selector"], rendered(name))[0], port["name"])
            for service in of_kind(rendered(name), "Service")
            if wanted.items() <= service["metadata"]["labels"].items()
            for port in service["spec"]["ports"]
            if port["name"] in ports
        ]
        assert sorted(scraped) == sorted(
            (workload["metadata"]["name"], container["name"])
            for workload in workloads(rendered(name))
            for container in containers_of(workload)
        )


def test_nodes_run_vllm_by_default() -> None:
    nodes = [
        container
        for workload in workloads(rendered("default"))
        for container in containers_of(workload)
        if container["name"] != "router"
    ]
    assert len(nodes) == 2
    for node in nodes:
        assert f"vllm.image={node['image']}" == IMAGE
        assert json.loads(option(node, "kv-transfer-config"))["kv_connector"] == "KvferryConnector"


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ([PLAINTEXT], "http.tlsSecretName or http.apiKey.secretName is empty"),
        ([PLAINTEXT, "http.tlsSecretName=a"], "set http.insecure to do without"),
        ([], "transport.tls.secretName is empty"),
        (["transport.name=ucx"], "transport.allowPlaintext is false: ucx neither encrypts nor authenticates"),
        (["transport.name=shm"], "transport.name 'shm' connects no pods"),
        ([PLAINTEXT, "vllm.image="], "vllm.image is empty"),
        ([PLAINTEXT, "drain.timeoutSeconds=20"], "drain.timeoutSeconds is less than handoff.leaseSeconds"),
        (
            [PLAINTEXT, "decode.autoscaling.enabled=true", "decode.replicas=5"],
            "decode.replicas is 5, more than autoscaling.maxReplicas, which is 4",
        ),
        (
            [PLAINTEXT, "router.autoscaling.enabled=true", "router.autoscaling.minReplicas=5"],
            "router.autoscaling.minReplicas is more than maxReplicas: 5 and 4",
        ),
        ([PLAINTEXT, "router.discovery=static"], "'discovery' not allowed"),
        ([PLAINTEXT, "transport.tsl.secretName=a"], "'tsl' not allowed"),
        ([PLAINTEXT, "transport.name=zeromq"], "/transport/name"),
        ([PLAINTEXT, "prefill.autoscaling.minReplicas=none"], "/prefill/autoscaling/minReplicas"),
        ([PLAINTEXT, "drain.marginSeconds=1"], "/drain/marginSeconds"),
        ([PLAINTEXT, "transport.portRange=5600"], "/transport/portRange"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(settings: list[str], problem: str) -> None:
    done = run_helm(
        "template", "ferry", CHART, *(word for each in (IMAGE, *settings) for word in ("--set", each))
    )
    assert done.returncode != 0
    assert problem in done.stderr


def _leaves(values: dict[str, Any], *path: str) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if (
            isinstance(value, dict)
            and value
            and "SecurityContext" not in f"S{key[1:]}"
            and key != "cacheVolume"
        ):
            yield from _leaves(value, *path, key)
        else:
            yield (*path, key)


def test_the_schema_knows_every_value_and_no_other() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def properties(part: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        found: dict[str, Any] = part.get("properties", {})
        return found

    def leaves(part: dict[str, Any], *path: str) -> Iterator[tuple[str, ...]]:
        for key, value in properties(part).items():
            if properties(value) and key != "resources":
                yield from leaves(value, *path, key)
            else:
                yield (*path, key)

    assert {*leaves(schema)} - {("global",)} == {*_leaves(values)}
