"""What Prometheus may ask for: counts, times, the queue, and where scores lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from anomaly.service.record import Answer

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_QUANTILES = (0.5, 0.9, 0.99)
_LATEST = 1000  # scores of each model that the quantiles are of


@dataclass(frozen=True)
class Gauge:
    """A figure that is looked up when it is asked for.

    Attributes:
        name: in Prometheus, behind `anomaly_`.
        text: what it is.
        label: what its values differ in.
        values: gives them, by that label's value.
    """

    name: str
    text: str
    label: str
    values: Callable[[], Mapping[str, float]]


class Metrics:
    """The service's figures, in a registry of their own.

    Args:
        gauges: what is looked up.
        bytes_held: gives the bytes of images that wait.
    """

    def __init__(self, gauges: Sequence[Gauge], bytes_held: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._scores: dict[str, deque[float]] = {}
        self.parts = Counter(
            "anomaly_parts_total",
            "Parts that were answered and written down",
            ("model", "status", "verdict"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "anomaly_part_seconds",
            "From when a part was taken until its row was made",
            ("model",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.answers = Counter(
            "anomaly_http_answers_total",
            "Answers of the service by status code",
            ("code",),
            registry=self._registry,
        )
        self._registry.register(_Now(gauges, bytes_held, self._scores))

    def note(self, answer: Answer) -> None:
        """Count a part that was answered."""
        row = answer.row
        self.parts.labels(answer.model, row.status, row.verdict).inc()
        self.seconds.labels(answer.model).observe((row.milliseconds or 0.0) / 1000)
        if row.image_score is not None:
            latest = self._scores.setdefault(answer.model, deque(maxlen=_LATEST))
            latest.append(row.image_score)

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)


class _Now(Collector):
    """Figures that are looked up when they are asked for."""

    def __init__(
        self,
        gauges: Sequence[Gauge],
        bytes_held: Callable[[], int],
        scores: dict[str, deque[float]],
    ) -> None:
        self._gauges, self._bytes_held, self._scores = gauges, bytes_held, scores

    def collect(self) -> Iterator[Metric]:
        for gauge in self._gauges:
            family = GaugeMetricFamily(f"anomaly_{gauge.name}", gauge.text, labels=[gauge.label])
            for name, value in gauge.values().items():
                family.add_metric([name], value)
            yield family
        yield GaugeMetricFamily(
            "anomaly_held_bytes", "Bytes of images that wait", value=self._bytes_held()
        )
        quantiles = GaugeMetricFamily(
            "anomaly_score", f"Quantiles of the last {_LATEST} scores", labels=["model", "quantile"]
        )
        for model, scores in list(self._scores.items()):
            for quantile, value in zip(
                _QUANTILES, np.quantile(list(scores), _QUANTILES), strict=True
            ):
                quantiles.add_metric([model, str(quantile)], float(value))
        yield quantiles
