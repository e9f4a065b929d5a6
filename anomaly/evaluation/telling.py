"""Models of several products × test images of one -> which products the images are taken for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from anomaly.datasets import Sample
from anomaly.model.prediction import Prediction
from anomaly.model.products import ProductSet
from anomaly.scorers.base import Progress


def taken_for(
    products: ProductSet,
    samples: Sequence[Sample],
    *,
    workers: int = 2,
    progress: Progress = lambda done, total: None,
) -> Counter[str]:
    """How many images are taken for each product where nobody says which one they show.

    Args:
        products: the models.
        samples: images; those that can't be used don't count.
        workers: decoding processes.
        progress: called with (done, total).
    """
    counts: Counter[str] = Counter()
    results = products.score_all([sample.source for sample in samples], workers=workers)
    for done, result in enumerate(results, 1):
        if isinstance(result, Prediction):
            counts[result.product] += 1
        progress(done, len(samples))
    return counts
