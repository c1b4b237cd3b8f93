"""GET /metrics of a server, as Prometheus and gateways read it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from logitless.server.observing.metrics import traffic_metrics
from logitless.server.observing.record import MAX_MODELS, OTHER, Traffic
from tests.helpers.http_fakes import FakeAdapters, Running, running

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


async def samples(server: Running) -> Samples:
    """Values by name and labels."""
    async with server.http.get(f"{server.url}/metrics") as reply:
        return parsed(await reply.text())


def parsed(text: str) -> Samples:
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    found: Samples = {}
    for family in families:
        assert family.documentation
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), (sample.name, labels)
            found[sample.name][labels] = sample.value
    return found


def one(found: Samples, name: str, **labels: str) -> float:
    return found[name][tuple(sorted(labels.items()))]


async def test_requests_by_route_status_and_reason() -> None:
    async with running(metrics=True, alias="tiny", api_keys=("k",)) as server:
        server.http.headers["Authorization"] = "Bearer k"
        await server.post("/v1/completions", {"prompt": "say:hi"})
        await server.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "n": 2})
        await server.post("/v1/completions", {"prompt": "step-boom"})
        await server.post("/v1/completions", {"prompt": 1.5})
        for path in ("/no/1", "/no/2", "/v1/completions/x"):
            await server.get(path)
        await server.get("/v1/models/a")
        await server.get("/v1/models/b")
        async with server.http.request("PATCH", f"{server.url}/v1/models") as reply:
            assert reply.status == 405
        await server.get("/health", headers={"Authorization": ""})
        found = await samples(server)
    route = {"route": "/v1/completions", "model": "tiny"}
    requests = "logitless:requests_total"
    assert one(found, requests, method="POST", status="200", **route) == 2
    assert one(found, requests, method="POST", status="500", **route) == 1
    assert one(found, requests, method="POST", status="400", route="/v1/completions", model="") == 1
    assert one(found, requests, method="GET", status="404", route="other", model="") == 3
    assert one(found, requests, method="GET", status="404", route="/v1/models/{id}", model="") == 2
    assert one(found, requests, method="other", status="405", route="other", model="") == 1
    reasons = {reason: one(found, "logitless:generations_total", finish_reason=reason, **route) for reason in REASONS}
    assert reasons == {"stop": 1, "length": 2, "error": 1}
    assert one(found, "logitless:request_seconds_count", model="tiny") == 3
    assert one(found, "logitless:request_seconds_bucket", le="+Inf", model="tiny") == 3
    assert one(found, "logitless:time_to_first_token_seconds_count") == 3
    assert one(found, "logitless:queue_seconds_count") == 3
    assert found["logitless:build_info"].popitem()[0][1:3] == (("model", "tiny"), ("type", "F32"))


REASONS = ("stop", "length", "error")


async def test_tokens_by_kind() -> None:
    async with running(metrics=True) as server:
        stats = server.scheduler.stats
        stats.prompt_tokens, stats.prompt_tokens_cached, stats.recomputed_tokens = 5, 7, 2
        stats.tokens_predicted, stats.draft_tokens, stats.draft_tokens_accepted = 11, 4, 3
        found = await samples(server)
    told = {labels[0][1]: value for labels, value in found["logitless:tokens_total"].items()}
    assert told == {"prompt": 5, "cached": 7, "recomputed": 2, "generated": 11, "draft": 4, "draft_accepted": 3}


async def test_the_gauges_that_gateways_read() -> None:
    """Names and labels that llm-d and the Gateway API Inference Extension ask vLLM for."""
    async with running(metrics=True, alias="tiny") as server:
        stats = server.scheduler.stats
        stats.requests_processing, stats.requests_deferred = 3, 2
        stats.kv_pages_used, stats.kv_pages_cached, stats.kv_pages_free = 30, 10, 50
        found = await samples(server)
        name = {"model_name": "tiny"}
        assert one(found, "vllm:num_requests_running", **name) == 3
        assert one(found, "vllm:num_requests_waiting", **name) == 2
        assert one(found, "vllm:kv_cache_usage_perc", **name) == 0.25
        assert "vllm:lora_requests_info" not in found
        assert "vllm:cache_config_info" not in found  # this server has no engine


class Registered(FakeAdapters):
    """An adapter with a name, and one without."""

    entries: Any = (SimpleNamespace(name=FakeAdapters.NAME, path="x.gguf"), SimpleNamespace(name="", path="/a/b.gguf"))


async def test_adapters_in_use() -> None:
    async with running(metrics=True, adapters=Registered()) as server:

        async def told() -> tuple[str, ...]:
            ((labels, at),) = (await samples(server))["vllm:lora_requests_info"].items()
            assert at > 1.7e9
            return tuple(dict(labels)[each] for each in ("max_lora", *STATES))

        assert await told() == ("16", "", "")
        for slot, lora in ((object(), ((0, 1.0),)), (None, ((1, 0.5), (0, 0.0))), (None, None)):
            sequence: Any = SimpleNamespace(slot=slot, request=SimpleNamespace(lora=lora))
            state: Any = SimpleNamespace(sequence=sequence)
            server.service._states[id(state)] = state
        assert await told() == ("16", Registered.NAME, "b")
        server.service._states.clear()


STATES = ("running_lora_adapters", "waiting_lora_adapters")


def test_labels_are_bounded() -> None:
    traffic = Traffic()
    for i in range(MAX_MODELS + 50):
        record: Any = SimpleNamespace(
            method=f"M{i}", route="", status=404, model=f"m{i}", reasons=["stop"], n_prompt=1, seconds=0.1
        )
        traffic.count(record)
    assert len(traffic.requests) == MAX_MODELS + 1
    assert {labels[:3] for labels in traffic.requests} == {(OTHER, OTHER, "404")}
    assert traffic.requests[OTHER, OTHER, "404", OTHER] == 50
    assert sum(len(metric.samples) for metric in traffic_metrics(traffic)) < 25 * (MAX_MODELS + 1)
