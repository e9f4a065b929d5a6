"""How often do intervals and bounds hold? Seeded draws of scores whose true figures are known.

    python -m benchmarks.coverage > docs/coverage.md

With --levels it prints the levels behind bounds that hold at all thresholds at once, computed
exactly; `anomaly/calibration/rates.py` keeps them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from anomaly.calibration.rates import rate_above, rate_of
from anomaly.calibration.thresholds import (
    Threshold,
    threshold_at,
    threshold_for_expected_rate,
    threshold_for_false_reject_rate,
)
from anomaly.evaluation.metrics import image_intervals

Floats = NDArray[np.float64]
# Good and defective images of a test split.
SPLITS = ((20, 20), (40, 40), (60, 80), (20, 63), (209, 63), (1000, 1000))
# Good images that thresholds come from, and defects whose recall is told.
CALIBRATIONS = ((20, 10), (40, 10), (60, 20), (209, 63), (1000, 100))


@dataclass(frozen=True)
class Law:
    """What good and defective images score."""

    name: str
    good: stats.rv_continuous
    defect: stats.rv_continuous

    def draw(self, images: tuple[int, int], rng: np.random.Generator) -> tuple[Floats, Floats]:
        return (
            self.good.rvs(images[0], random_state=rng),
            self.defect.rvs(images[1], random_state=rng),
        )


LAWS = (
    Law("normal, 1 σ apart", stats.norm(), stats.norm(1)),
    Law("normal, 2 σ apart", stats.norm(), stats.norm(2)),
    Law("normal, 3.5 σ apart", stats.norm(), stats.norm(3.5)),
    Law("skewed", stats.gamma(3), stats.gamma(6, scale=1.3)),
)


def true_figures(law: Law, images: tuple[int, int]) -> dict[str, float]:
    """The image figures of infinitely many parts, good and defective ones in this proportion."""
    low = min(law.good.ppf(1e-12), law.defect.ppf(1e-12))
    high = max(law.good.isf(1e-12), law.defect.isf(1e-12))
    falling = np.linspace(high, low, 400_001)
    good, defect = (
        np.diff(one.sf(falling), prepend=0.0) * n
        for one, n in zip((law.good, law.defect), images, strict=True)
    )
    false, true = np.cumsum(good), np.cumsum(defect)
    recalls = [float(law.defect.sf(law.good.isf(rate))) for rate in (0.01, 0.05)]
    return {
        "image_auroc": float(np.trapezoid(true, false) / false[-1] / true[-1]),
        "image_ap": float((defect * true / (true + false)).sum() / true[-1]),
        "image_f1_max": float((2 * true / (true + false + true[-1])).max()),
        "recall_at_frr_0.01": recalls[0],
        "recall_at_frr_0.05": recalls[1],
    }


def figure_coverage(law: Law, images: tuple[int, int], repeats: int) -> dict[str, float]:
    """How often the interval of each image figure holds the true one."""
    truth, rng = true_figures(law, images), np.random.default_rng(images)
    labels = np.arange(sum(images)) >= images[0]
    held = dict.fromkeys(truth, 0)
    for seed in range(repeats):
        scores = np.concatenate(law.draw(images, rng))
        for name, interval in image_intervals(scores, labels, draws=400, seed=seed).items():
            low, high = interval or (1.0, 0.0)
            held[name] += low - 1e-9 <= truth[name] <= high + 1e-9
    return {name: count / repeats for name, count in held.items()}


def threshold_coverage(law: Law, images: tuple[int, int], repeats: int) -> dict[str, float]:
    """How often what is told of thresholds holds."""
    rng = np.random.default_rng(images)
    rows: list[dict[str, float]] = []
    for _ in range(repeats):
        good, defects = law.draw(images, rng)
        row: dict[str, float] = {}
        review = threshold_for_expected_rate(good, 0.05)
        reject = threshold_for_false_reject_rate(good, 0.01)
        for name, by_rate in (("review", review), ("reject", reject)):
            row[f"{name}: false rejects"] = _kept(by_rate, law)
            recall = rate_above(defects, by_rate.value)
            row[f"{name}: recall"] = recall.low <= law.defect.sf(by_rate.value) <= recall.high
        # Somebody puts it just where the last good image, or a tenth of them, would be flagged.
        worst = max((_slack(threshold_at(t, good), law), t) for t in np.sort(good)[-10:])[1]
        row["by hand, the worst of ten: false rejects"] = _kept(threshold_at(worst, good), law)
        for name, fixed in (("false reject rate", law.good), ("escape rate", law.defect)):
            new, n = (good, images[0]) if fixed is law.good else (-defects, images[1])
            limit = float(law.good.isf(0.02)) * (1 if fixed is law.good else -1)
            count = int((new > limit).sum())
            true = 0.02 if fixed is law.good else float(law.defect.cdf(-limit))
            rate = rate_of(count, n, count / n)
            row[f"evaluate: {name}"] = rate.low <= true <= rate.high
        rows.append(row)
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def _kept(threshold: Threshold, law: Law) -> bool:
    return float(law.good.sf(threshold.value)) <= threshold.false_rejects.at_most


def _slack(threshold: Threshold, law: Law) -> float:
    return float(law.good.sf(threshold.value)) - threshold.false_rejects.at_most


def exact_level(images: int, confidence: float) -> float:
    """The level at which one-sided Clopper–Pearson bounds hold at all thresholds at once.

    The counts above thresholds of falling rate are a Poisson process that is known to end at
    `images`; the chance that it keeps above the bounds follows step by step.
    """
    from scipy.optimize import brentq
    from scipy.special import betaincinv, gammaln

    if images == 1:
        return 1 - confidence
    n, rank = images, np.arange(1, images + 1)

    def keeps(log_level: float) -> float:
        bounds = betaincinv(rank, n - rank + 1, 1 - np.exp(log_level))
        lowest, chances = 0, np.ones(1)
        for i, step in enumerate(np.diff(bounds, prepend=0.0, append=1.0) * n, 1):
            k = np.arange(int(step + 12 * np.sqrt(step) + 25))
            more = np.exp(-step + k * np.log(step) - gammaln(k + 1))
            chances = np.convolve(chances, more)[: n - lowest + 1]
            needed = min(i, n)
            chances, lowest = chances[needed - lowest :], needed
            chances = chances[: 1 + np.flatnonzero(chances > 1e-40)[-1]]
        return float(chances[0] / np.exp(-n + n * np.log(n) - gammaln(n + 1)))

    searched = brentq(
        lambda x: keeps(x) - confidence, np.log(1e-5), np.log(1 - confidence), xtol=1e-4
    )
    return float(np.exp(searched))


def table(
    sizes: tuple[tuple[int, int], ...],
    measure: Callable[[Law, tuple[int, int], int], dict[str, float]],
    repeats: int,
) -> list[str]:
    """The lines of a Markdown table of coverages, the lowest over the laws."""
    lines: list[str] = []
    for images in sizes:
        found = [measure(law, images, repeats // (4 if sum(images) > 1000 else 1)) for law in LAWS]
        names = list(found[0])
        if not lines:
            lines = [f"| good / defective | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        cells = (f"{min(f[n] for f in found):.1%}" for n in names)
        lines.append(f"| {images[0]} / {images[1]} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--levels", action="store_true", help="print the levels instead")
    parser.add_argument("--repeats", type=int, default=400)
    args = parser.parse_args()
    if args.levels:
        for n in (1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100, 200, 500, 1000, 2000, 5000, 20000):
            print(n, *(f"{exact_level(n, c):.4g}" for c in (0.95, 0.975)), flush=True)
        return
    figures = table(SPLITS, figure_coverage, args.repeats)
    thresholds = table(CALIBRATIONS, threshold_coverage, args.repeats)
    print(
        PAGE.format(
            repeats=args.repeats,
            few=args.repeats // 4,
            laws="; ".join(law.name for law in LAWS),
            figures="\n".join(figures),
            thresholds="\n".join(thresholds),
        )
    )


PAGE = """# How often intervals and bounds hold

For anybody who checks that "95 % confidence" means 95 %.

Each cell shows how often an interval or bound held the true figure in simulations: the lowest
share over four laws of scores ({laws}), of {repeats} draws each ({few} above 1,000 images), so
95 % is uncertain by 2 points (4 points).
Made by `python -m benchmarks.coverage`.

## Figures of `evaluate`

The intervals hold in at least 95 % of cases (the best F1 in at least 92 %). With 20 good images,
that of the recall at 1 % covers nearly everything.

{figures}

## Thresholds

- `review` and `reject` are calibrated for 5 % (on average) and at most 1 % of good parts: the upper
  bound of false rejects, and the interval of the recall that `calibrate --defects` prints.
- `by hand`: of the ten highest scores, the threshold whose bound fails most.
- `evaluate`: the intervals of false rejects and escapes on a test split.

{thresholds}

**Next:** [Thresholds](thresholds.md), to use them.
"""


if __name__ == "__main__":
    main()
