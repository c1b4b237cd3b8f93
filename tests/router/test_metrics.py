"""GET /metrics of a router, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from logitless.router.metrics import AllModels
from logitless.server.observing.metrics import response
from logitless.server.observing.record import Traffic

TRAFFIC = Traffic()
ONE = """\
# HELP llamacpp:prompt_tokens_total Prompt tokens evaluated.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total {tokens}
# HELP llamacpp:n_tokens_max The longest sequence so far.
# TYPE llamacpp:n_tokens_max counter
llamacpp:n_tokens_max {longest}
# HELP llamacpp:prompt_tokens_seconds Prompt tokens per second.
# TYPE llamacpp:prompt_tokens_seconds gauge
llamacpp:prompt_tokens_seconds {speed}
# HELP logitless:queue_seconds What a request waited for others.
# TYPE logitless:queue_seconds histogram
logitless:queue_seconds_bucket{{le="0.1"}} {tokens}
logitless:queue_seconds_bucket{{le="+Inf"}} {tokens}
logitless:queue_seconds_count {tokens}
logitless:queue_seconds_sum {speed}
"""


def read(texts: dict[str, str], traffic: Traffic = TRAFFIC) -> dict[str, float]:
    """Values by name and labels, from the text of all models."""
    body = response(AllModels(texts, 5, len(texts), traffic)).body
    assert isinstance(body, bytes)
    families = list(text_string_to_metric_families(body.decode()))
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    told = {sample.name + str(sorted(sample.labels.items())): sample.value for sample in samples}
    assert len(told) == len(samples)
    return told


def test_each_model_has_its_label_and_all_have_a_sum() -> None:
    a, b = ONE.format(tokens=3, longest=7, speed=0.5), ONE.format(tokens=4, longest=5, speed=0.25)
    quote = 'a "b"'
    told = read({"x/a": a, quote: b})
    for name, one, other, total in (
        ("llamacpp:prompt_tokens_total", 3, 4, 7),
        ("llamacpp:n_tokens_max_total", 7, 5, 7),
        ("logitless:queue_seconds_count", 3, 4, 7),
        ("logitless:queue_seconds_sum", 0.5, 0.25, 0.75),
    ):
        result = told[f"{name}[]"], told[f"{name}[('model', 'x/a')]"], told[f"{name}[('model', {quote!r})]"]
        assert result == (total, one, other)
    assert told["logitless:queue_seconds_bucket[('le', '0.1')]"] == 7
    assert told["logitless:queue_seconds_bucket[('le', '0.1'), ('model', 'x/a')]"] == 3
    assert told["llamacpp:prompt_tokens_seconds[('model', 'x/a')]"] == 0.5
    assert "llamacpp:prompt_tokens_seconds[]" not in told  # a rate: the models do not work at the same time
    assert (told["logitless:models[]"], told["logitless:models_loaded[]"]) == (5, 2)


def test_without_models() -> None:
    assert read({}) == {"logitless:models[]": 5, "logitless:models_loaded[]": 0}


OWN = """\
# HELP logitless:requests_total Requests that have ended.
# TYPE logitless:requests_total counter
logitless:requests_total{route="/x",model=""} 2
logitless:requests_total{route="/x",model="ft:a:1"} 3
# HELP vllm:num_requests_running Requests that run.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="a"} 1
# HELP vllm:kv_cache_usage_perc Share of the KV cache.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="a"} 0.5
"""


def test_finetunes_keep_their_names() -> None:
    told = read({"x/a": OWN, "b": OWN.replace("ft:a", "ft:b").replace('"a"', '"b"')})
    requests = "logitless:requests_total[('model', {!r}), ('route', '/x')]"
    assert [told[requests.format(name)] for name in ("x/a", "ft:a:1", "b", "ft:b:1")] == [2, 3, 2, 3]
    assert told["logitless:requests_total[('route', '/x')]"] == 10
    assert told["vllm:num_requests_running[]"] == 2
    assert told["vllm:num_requests_running[('model', 'x/a'), ('model_name', 'a')]"] == 1
    assert "vllm:kv_cache_usage_perc[]" not in told


def test_requests_of_the_router_itself() -> None:
    traffic = Traffic()
    traffic.requests["GET", "/models", "200", ""] = 4
    told = read({}, traffic)
    labels = "[('method', 'GET'), ('model', ''), ('route', '/models'), ('status', '200')]"
    assert told[f"logitless:router_requests_total{labels}"] == 4
