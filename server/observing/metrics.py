"""GET /metrics: metrics by the names of llama-server, of vLLM where gateways read them, and by our own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from logitless.engine.adapters import MAX_RESIDENT, Adapters
from logitless.engine.async_engine import LoadedModel
from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.errors import NotSupported
from logitless.engine.stats import SchedulerStats, TrainingStats
from logitless.frontend.config import BUILD_INFO
from logitless.server.api.context import CONTEXT, STARTED, Context
from logitless.server.observing.record import TRAFFIC, Traffic

Stats = TypeVar("Stats")
Table = tuple[tuple[str, str, str, Callable[[Stats], float | None]], ...]


async def metrics(request: web.Request) -> web.Response:
    """The metrics as Prometheus text."""
    context = request.app[CONTEXT]
    if not context.config.metrics:
        raise NotSupported("this server has no metrics; start it with --metrics")
    _ = context.served
    return response(_Server(context, request.app[TRAFFIC]))


def response(collector: Collector) -> web.Response:
    """The metrics of a collector as Prometheus text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    text = generate_latest(registry).replace(b"n_tokens_max_total", b"n_tokens_max")  # a counter, but not named so
    headers = {"Content-Type": "text/plain; version=0.0.4", "Process-Start-Time-Unix": str(STARTED)}
    return web.Response(body=text, headers=headers)


_TYPES = {"counter": "counter", "gauge": "gauge", "largest": "counter", "own": "gauge"}  # by kind
# of several models counters and gauges are added up; of some the largest counts, and some are of one model only
_LLAMACPP: Table[SchedulerStats] = (  # name, kind, help, value
    ("prompt_tokens_total", "counter", "Prompt tokens evaluated, without cached ones.", lambda s: s.prompt_tokens),
    ("prompt_tokens_cached_total", "counter", "Prompt tokens from the prefix cache.", lambda s: s.prompt_tokens_cached),
    ("prompt_seconds_total", "counter", "Time spent on prompts.", lambda s: s.prompt_seconds),
    ("tokens_predicted_total", "counter", "Tokens generated.", lambda s: s.tokens_predicted),
    ("tokens_predicted_seconds_total", "counter", "Time spent on generation.", lambda s: s.predicted_seconds),
    ("n_decode_total", "counter", "Runs of the device.", lambda s: s.n_decode),
    ("n_tokens_max", "largest", "The longest sequence so far.", lambda s: s.n_tokens_max),
    ("spec_decode_num_drafts_total", "counter", "Drafts verified.", lambda s: s.drafts),
    ("spec_decode_num_draft_tokens_total", "counter", "Draft tokens verified.", lambda s: s.draft_tokens),
    ("spec_decode_num_accepted_tokens_total", "counter", "Draft tokens accepted.", lambda s: s.draft_tokens_accepted),
    ("requests_processing", "gauge", "Requests that run.", lambda s: s.requests_processing),
    ("requests_deferred", "gauge", "Requests that wait for a slot.", lambda s: s.requests_deferred),
    ("n_busy_slots_per_decode", "own", "Busy slots per device run.", lambda s: _per(s.busy_slots, s.n_decode)),
)
_RATES: Table[SchedulerStats] = (  # of the additions since the last look, as llama-server's
    ("prompt_tokens_seconds", "own", "Prompt tokens per second.", lambda s: _per(s.prompt_tokens, s.prompt_seconds)),
    (
        "predicted_tokens_seconds",
        "own",
        "Generated tokens per second.",
        lambda s: _per(s.tokens_decoded, s.predicted_seconds),
    ),
)
_OURS: Table[SchedulerStats] = (
    (
        "cache_hit_ratio",
        "own",
        "Share of prompt tokens taken from the cache.",
        lambda s: _per(s.prompt_tokens_cached, s.prompt_tokens_cached + s.prompt_tokens),
    ),
    (
        "draft_acceptance_ratio",
        "own",
        "Share of the guesses that came true.",
        lambda s: _per(s.draft_tokens_accepted, s.draft_tokens),
    ),
    ("recomputed_tokens_total", "counter", "Tokens evaluated again after a pause.", lambda s: s.recomputed_tokens),
    ("preemptions_total", "counter", "Sequences paused for lack of pages.", lambda s: s.preemptions),
    ("failed_steps_total", "counter", "Runs that the device refused.", lambda s: s.n_failed_steps),
    ("bytes_read_total", "counter", "Bytes that came back from the device.", lambda s: s.bytes_read),
    (
        "bytes_read_per_token",
        "own",
        "Bytes that came back per generated token.",
        lambda s: _per(s.bytes_read, s.tokens_predicted),
    ),
    ("bytes_written_total", "counter", "Bytes that went to the device.", lambda s: s.bytes_written),
    ("bytes_read_per_step", "own", "Bytes that came back per step.", lambda s: _per(s.bytes_read, s.n_decode)),
    ("bytes_written_per_step", "own", "Bytes that went there per step.", lambda s: _per(s.bytes_written, s.n_decode)),
    ("devices_lost_total", "counter", "Devices that were lost while serving.", lambda s: s.devices_lost),
    ("ops_rerouted", "gauge", "Ops that a device computes wrongly and another does.", lambda s: s.ops_rerouted),
    ("kv_pages_used", "gauge", "Pages of the KV cache in use, by sequences or prefixes.", lambda s: s.kv_pages_used),
    ("kv_pages_cached", "gauge", "Of these, pages that only keep a prefix.", lambda s: s.kv_pages_cached),
    ("kv_pages_free", "gauge", "Pages of the KV cache that are free.", lambda s: s.kv_pages_free),
    ("host_cache_bytes", "gauge", "Pages of the KV cache that host memory keeps.", lambda s: s.host_bytes),
    ("host_pages_saved_total", "counter", "Pages that went to host memory.", lambda s: s.host_pages_saved),
    ("host_pages_restored_total", "counter", "Pages that came back from there.", lambda s: s.host_pages_restored),
    ("disk_cache_bytes", "gauge", "Files of --cache-disk, of all processes.", lambda s: s.disk_bytes),
    ("disk_pages_saved_total", "counter", "Pages and states written there.", lambda s: s.disk_pages_saved),
    ("disk_pages_restored_total", "counter", "Pages and states found there.", lambda s: s.disk_pages_restored),
    ("disk_bytes_read_total", "counter", "Their bytes.", lambda s: s.disk_bytes_read),
    (
        "expert_hits_total",
        "counter",
        "Experts of steps that were on their device.",
        lambda s: s.experts.hits,
    ),
    ("expert_misses_total", "counter", "Experts of steps that were uploaded.", lambda s: s.experts.misses),
    ("expert_bytes_uploaded_total", "counter", "Their bytes.", lambda s: s.experts.nbytes),
)
_TRAINING: Table[TrainingStats] = (  # of servers with --data-dir
    ("training_jobs_running", "gauge", "Fine-tuning jobs that have the device.", lambda s: s.jobs_running),
    ("training_steps_total", "counter", "Optimizer steps.", lambda s: s.steps),
    ("training_tokens_total", "counter", "Tokens of the windows trained on, padding included.", lambda s: s.tokens),
    ("training_job_step", "own", "Steps that the last job has done.", lambda s: s.step),
    ("training_job_steps", "own", "Steps that it is to do.", lambda s: s.n_steps),
    ("training_loss", "own", "Training loss of its last step.", lambda s: s.loss),
    ("training_valid_loss", "own", "Loss of its last validation.", lambda s: s.valid_loss),
)


_VLLM: Table[SchedulerStats] = (
    ("num_requests_running", "gauge", "Requests that run.", lambda s: s.requests_processing),
    ("num_requests_waiting", "gauge", "Requests that wait for a slot.", lambda s: s.requests_deferred),
    ("kv_cache_usage_perc", "own", "Share of the KV cache that running requests use, 0 to 1.", lambda s: _usage(s)),
)
_VLLM_OWN = frozenset(("vllm:lora_requests_info", "vllm:cache_config_info"))
_TOKENS: tuple[tuple[str, Callable[[SchedulerStats], float]], ...] = (
    ("prompt", lambda s: s.prompt_tokens),
    ("cached", lambda s: s.prompt_tokens_cached),
    ("recomputed", lambda s: s.recomputed_tokens),
    ("generated", lambda s: s.tokens_predicted),
    ("draft", lambda s: s.draft_tokens),
    ("draft_accepted", lambda s: s.draft_tokens_accepted),
)


def names(kind: str) -> frozenset[str]:
    """The names of metrics of a kind."""
    tables = (
        *(("llamacpp", _LLAMACPP), ("llamacpp", _RATES)),
        *(("logitless", _OURS), ("logitless", _TRAINING), ("vllm", _VLLM)),
    )
    rows = frozenset(f"{prefix}:{row[0]}" for prefix, table in tables for row in table if row[1] == kind)
    return rows | _VLLM_OWN | {"logitless:build_info"} if kind == "own" else rows


class _Server(Collector):
    """Reads the counters where they are."""

    def __init__(self, context: Context, traffic: Traffic) -> None:
        self._context, self._traffic = context, traffic

    def collect(self) -> Iterable[Metric]:
        served, stats = self._context.served, self._context.served.scheduler.stats
        yield from _metrics_of("llamacpp", _LLAMACPP, stats)
        yield from _metrics_of("llamacpp", _RATES, _added(stats, self._context.last_metrics))
        self._context.last_metrics = replace(stats)
        if stats.accepted_at:
            yield _by_position(stats.accepted_at)
        yield from _metrics_of("logitless", _OURS, stats)
        if served.tuning is not None:
            yield from _metrics_of("logitless", _TRAINING, served.tuning.stats)
        latency = self._context.service.latency
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", latency.first_token),
            ("inter_token_seconds", "Between two tokens of one request.", latency.inter_token),
            ("queue_seconds", "Time that a request waited for others.", latency.queue),
            ("step_seconds", "One step of the engine.", latency.step),
        ):
            yield HistogramMetricFamily(f"logitless:{name}", text, histogram.cumulative(), histogram.total)
        yield _tokens(stats)
        yield from traffic_metrics(self._traffic)
        yield _build(self._context, served)
        yield from self._vllm(served, stats)

    def _vllm(self, served: LoadedModel, stats: SchedulerStats) -> Iterable[Metric]:
        """vLLM's names, with its label `model_name`."""
        model = self._context.config.model
        for metric in _metrics_of("vllm", _VLLM, stats):
            metric.samples = [sample._replace(labels={"model_name": model}) for sample in metric.samples]
            yield metric
        if served.engine is not None:
            sizes = {"block_size": str(BLOCK_SIZE), "num_gpu_blocks": str(served.engine.n_blocks)}
            yield _info("vllm:cache_config_info", "The KV cache.", {"model_name": model, **sizes}, 1)
        if served.adapters is not None and served.adapters.entries:
            running, waiting = self._context.service.adapters_in_use()
            named = {
                "max_lora": str(MAX_RESIDENT),
                "running_lora_adapters": _named(served.adapters, running),
                "waiting_lora_adapters": _named(served.adapters, waiting),
            }
            yield _info("vllm:lora_requests_info", "Adapters in use; the value is the time.", named, time.time())


def _named(adapters: Adapters, ids: Iterable[int]) -> str:
    entries = [adapters.entries[id] for id in sorted(ids)]
    return ",".join(entry.name or Path(entry.path).stem for entry in entries)


def _info(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    metric = GaugeMetricFamily(name, text, labels=list(labels))
    metric.add_metric(list(labels.values()), value)
    return metric


def _build(context: Context, served: LoadedModel) -> Metric:
    lines = {"version": version("logitless"), "build": BUILD_INFO, "model": context.config.model}
    if context.config.behind_router:
        lines["model"] = ""
    lines["type"] = served.info.ftype
    if served.engine is not None:
        lines |= {"architecture": served.engine.hparams.arch, "devices": ",".join(served.engine.devices)}
    return _info("logitless:build_info", "The program and its model.", lines, 1)


def _tokens(stats: SchedulerStats) -> Metric:
    metric = CounterMetricFamily("logitless:tokens", "Tokens by kind.", labels=["kind"])
    for kind, value in _TOKENS:
        metric.add_metric([kind], value(stats))
    return metric


def traffic_metrics(traffic: Traffic, own: str = "") -> Iterable[Metric]:
    """Requests, generations and latency by their labels; `own`: begins the names of a router's."""
    text = "Requests that have ended; status 499: the client left before the answer."
    requests = CounterMetricFamily(f"logitless:{own}requests", text, labels=["method", "route", "status", "model"])
    for labels, n in sorted(traffic.requests.items()):
        requests.add_metric(labels, n)
    yield requests
    text = "Generations that have ended: stop, length, error or abort."
    generations = CounterMetricFamily(f"logitless:{own}generations", text, labels=["route", "finish_reason", "model"])
    for reasons, n in sorted(traffic.generations.items()):
        generations.add_metric(reasons, n)
    yield generations
    text = "From a request's arrival to the end of its answer, of requests with tokens."
    latency = HistogramMetricFamily(f"logitless:{own}request_seconds", text, labels=["model"])
    for model, histogram in sorted(traffic.latency.items()):
        latency.add_metric([model], histogram.cumulative(), histogram.total)
    yield latency


def _metrics_of(prefix: str, table: Table[Stats], stats: Stats) -> Iterable[Metric]:
    for name, kind, text, value in table:
        family = name.removesuffix("_total") if kind == "counter" else name  # the client adds it to a counter's
        metric = Metric(f"{prefix}:{family}", text, _TYPES[kind])
        number = value(stats)
        if number is not None:  # not known yet
            metric.add_sample(f"{prefix}:{name}", {}, number)
        yield metric


def _added(stats: SchedulerStats, before: SchedulerStats) -> SchedulerStats:
    """Counters of the rates, minus `before`'s."""
    counted = ("prompt_tokens", "prompt_seconds", "tokens_decoded", "predicted_seconds")
    return SchedulerStats(**{name: getattr(stats, name) - getattr(before, name) for name in counted})


def _by_position(accepted_at: Sequence[int]) -> Metric:
    """Accepted draft tokens by their position in the draft."""
    name = "llamacpp:spec_decode_num_accepted_tokens_per_pos"
    metric = Metric(name, "Accepted draft tokens by position.", "counter")
    for position, n in enumerate(accepted_at):
        metric.add_sample(f"{name}_total", {"position": str(position)}, n)
    return metric


def _usage(stats: SchedulerStats) -> float:
    used = stats.kv_pages_used - stats.kv_pages_cached
    return _per(used, stats.kv_pages_used + stats.kv_pages_free)


def _per(value: float, whole: float) -> float:
    return value / whole if whole else 0.0
