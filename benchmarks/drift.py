"""When `drift` raises its alarm: scores that grow over 2,000 parts, and such that don't.

    python -m benchmarks.drift

Good parts' scores are log-normal with σ = 0.2; their logarithm grows evenly by so many σ from the
first part to the last. Each stream has a calibration of its own, and 1 % of its parts are defects.
"""

from __future__ import annotations

import numpy as np

from anomaly.calibration.cusum import HORIZON
from anomaly.calibration.model_thresholds import thresholds_from
from anomaly.calibration.scores import GoodScores
from anomaly.line.drift import Drift, levels_of

SIGMA = 0.2
REPEATS = 100


def stream(rng: np.random.Generator, images: int, growth: float) -> tuple[int | None, float, float]:
    """One stream: the part that raised the alarm, and false rejects until then, seen and promised.

    Args:
        rng: source of all numbers.
        images: good images that the thresholds come from.
        growth: of the scores' logarithm over the stream, in σ.
    """
    scores = tuple(np.exp(rng.normal(0, SIGMA, images)).tolist())
    names = tuple(map(str, range(images)))
    thresholds = thresholds_from(GoodScores(names, scores, scores, ""), 0.05, 0.01)
    trend = growth * SIGMA * np.arange(HORIZON) / HORIZON
    good = np.exp(rng.normal(0, SIGMA, HORIZON) + trend)
    defect = rng.random(HORIZON) < 0.01
    parts = np.where(defect, 4 * good, good)
    alarm = Drift(levels_of(thresholds)).add_all(parts.tolist()).alarm
    number = None if alarm is None else alarm.alarm
    rejected = good[:number][~defect[:number]] > thresholds.image
    promised = thresholds.calibration.reject.false_rejects.at_most
    return number, float(rejected.mean()), promised


def main() -> None:
    print("| good images | growth | alarms | at part | false rejects until then | promised |")
    print("|---|---|---|---|---|---|")
    for images in (40, 100, 209):
        for growth in (0.0, 1.0, 2.0):
            rng = np.random.default_rng(images)
            found = [stream(rng, images, growth) for _ in range(REPEATS)]
            alarms = [number for number, *_ in found if number is not None]
            at = f"{np.median(alarms):.0f}" if alarms else "–"
            rejected, promised = np.mean([pair for _, *pair in found], axis=0)
            print(
                f"| {images} | {growth:g} σ | {len(alarms)} of {REPEATS} | {at} | {rejected:.1%} | "
                f"{promised:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
