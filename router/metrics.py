"""GET /metrics of a router: the metrics of all running servers, and their sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from logitless.server.observing.metrics import names, traffic_metrics
from logitless.server.observing.record import Traffic

_Labels = tuple[tuple[str, str], ...]


class AllModels(Collector):
    """Each metric without a label `model`, of all models together, and with it, of one.

    Rates and averages have no sum."""

    def __init__(self, texts: Mapping[str, str], n_models: int, n_loaded: int, traffic: Traffic) -> None:
        """`texts`: the metrics of the running servers, by model; `traffic`: the router's own."""
        self._texts, self._n_models, self._n_loaded, self._traffic = texts, n_models, n_loaded, traffic

    def collect(self) -> Iterable[Metric]:
        yield _gauge("models", "Models that the router knows.", self._n_models)
        yield _gauge("models_loaded", "Models that are loaded.", self._n_loaded)
        yield from traffic_metrics(self._traffic, "router_")
        result: dict[str, Metric] = {}
        totals: dict[str, dict[tuple[str, _Labels], float]] = {}
        own, largest = names("own"), names("largest")
        for model, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                metric = result.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                sums = totals.setdefault(family.name, {})
                for sample in family.samples:
                    finetune = sample.labels.get("model")  # a model of the server's model
                    metric.add_sample(sample.name, {**sample.labels, "model": finetune or model}, sample.value)
                    if sample.name not in own:
                        shared = {k: v for k, v in sample.labels.items() if k not in ("model", "model_name")}
                        place = sample.name, tuple(shared.items())
                        before = sums.get(place, 0.0)
                        is_largest = sample.name.removesuffix("_total") in largest  # the parser adds it
                        sums[place] = max(before, sample.value) if is_largest else before + sample.value
        for name, metric in result.items():
            samples, metric.samples = metric.samples, []
            for (sample_name, labels), value in totals[name].items():
                metric.add_sample(sample_name, dict(labels), value)
            metric.samples += samples
            yield metric


def _gauge(name: str, text: str, value: float) -> Metric:
    metric = Metric(f"logitless:{name}", text, "gauge")
    metric.add_sample(metric.name, {}, value)
    return metric
