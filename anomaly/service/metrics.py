"""What Prometheus may ask for: counts, times, the queue, and where scores lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from anomaly.service.record import Answer

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_QUANTILES = (0.5, 0.9, 0.99)
_LATEST = 1000  # scores of each model that the quantiles are of


class Metrics:
    """The service's figures, in a registry of their own.

    Args:
        waiting: gives the parts on their way, by model.
        bytes_held: gives the bytes of images that wait.
        drifted: says whether parts have drifted, by model.
    """

    def __init__(
        self,
        waiting: Callable[[], dict[str, int]],
        bytes_held: Callable[[], int],
        drifted: Callable[[], dict[str, bool]],
    ) -> None:
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
        self._registry.register(_Now(waiting, bytes_held, drifted, self._scores))

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
        waiting: Callable[[], dict[str, int]],
        bytes_held: Callable[[], int],
        drifted: Callable[[], dict[str, bool]],
        scores: dict[str, deque[float]],
    ) -> None:
        self._waiting, self._bytes_held = waiting, bytes_held
        self._drifted, self._scores = drifted, scores

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "anomaly_waiting_parts", "Parts that were taken and aren't answered", labels=["model"]
        )
        for model, count in self._waiting().items():
            waiting.add_metric([model], count)
        yield waiting
        yield GaugeMetricFamily(
            "anomaly_held_bytes", "Bytes of images that wait", value=self._bytes_held()
        )
        drifted = GaugeMetricFamily(
            "anomaly_drift_alarm", "1 once a model's parts have drifted", labels=["model"]
        )
        for model, alarm in self._drifted().items():
            drifted.add_metric([model], alarm)
        yield drifted
        quantiles = GaugeMetricFamily(
            "anomaly_score", f"Quantiles of the last {_LATEST} scores", labels=["model", "quantile"]
        )
        for model, scores in list(self._scores.items()):
            for quantile, value in zip(
                _QUANTILES, np.quantile(list(scores), _QUANTILES), strict=True
            ):
                quantiles.add_metric([model, str(quantile)], float(value))
        yield quantiles
