"""What `anomaly tune` chooses by half of the known images, measured on the other half.

    python -m benchmarks.tune --data FOLDER… [--network timm/tf_efficientnet_lite2]
        [--weights imagenet] [--train 40] [--budget 600] [--defects 25] [--device cpu]

Settings are tried once for all test images; then halves drawn at random choose, and the other
halves measure. Which changes are tried together is told by all of them. *Caught*, good images
*flagged*: by the thresholds that training found; *at 5 %*: where 5 % of the measuring good images
are flagged. Figures are means over the draws.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import anomaly
from anomaly.calibration.thresholds import threshold_for_expected_rate
from anomaly.config.load import parse_config
from anomaly.evaluation.metrics.images import recall_at_false_reject_rates
from anomaly.training.tuning.judging import Mask, Scores, judge
from benchmarks.inputs import machine

_RATE = 0.05  # calibration.review_rate
HEAD = (
    "| set | default: caught, flagged, caught at 5 % | chosen | other settings taken, most often "
    "| took |\n|---|---|---|---|---|"
)


def cpu_seconds() -> float:
    """Processor seconds of this process and of those that it has started and ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def figures(scores: Scores) -> tuple[float, float, float]:
    """Shares of defects caught and of good images flagged by training's threshold, and at 5 %."""
    limit = threshold_for_expected_rate(scores.held_out, _RATE).value
    values = np.concatenate([scores.defects, scores.good])
    labels = np.arange(len(values)) < len(scores.defects)
    recall = recall_at_false_reject_rates(values, labels).values[f"recall_at_frr_{_RATE}"]
    caught, flagged = float((scores.defects > limit).mean()), float((scores.good > limit).mean())
    return caught, flagged, recall or 0.0


def row(
    name: str,
    settings: Sequence[Scores],
    names: Sequence[str],
    costs: Sequence[float],
    took: str,
    *,
    splits: int = 20,
    defects: int | None = None,
) -> str:
    """A line of the table.

    Args:
        name: of the set.
        settings: scores by each; the first is the default.
        names: of the settings.
        costs: of each.
        took: how long trying them took.
        splits: how many halves are drawn.
        defects: so many, and as many good images, are known; None for half of them.
    """
    draw = np.random.default_rng(0)
    before, after, chosen = [], [], Counter[str]()

    def half(count: int) -> Mask:
        known = count // 2 if defects is None else min(defects, count // 2)
        return np.asarray(draw.permutation(count) < known)

    for split in range(splits):
        known = [np.ones(len(settings[0].held_out), bool)]
        known += [half(len(group)) for group in settings[0].groups[1:]]
        new = [known[0], ~known[1], ~known[2]]
        judgement = judge([scores.only(known) for scores in settings], costs, _RATE, split)
        before.append(figures(settings[0].only(new)))
        after.append(figures(settings[judgement.index].only(new)))
        if judgement.better:
            chosen[names[judgement.index]] += 1
    cells = [", ".join(f"{x:.0%}" for x in np.mean(each, 0)) for each in (before, after)]
    often = chosen.most_common(1)
    taken = f"{chosen.total()} of {splits}" + (f": `{often[0][0]}`" if often else "")
    return f"| {name} | {cells[0]} | {cells[1]} | {taken} | {took} |"


def measured(folder: Path, args: argparse.Namespace) -> str:
    """Try settings on one data set; the line of the table."""
    dataset = anomaly.open_dataset("mvtec", folder)
    if args.train:
        dataset = replace(dataset, train=dataset.train[: args.train])
    few = len(dataset.train) < 50
    config = parse_config(
        {
            "name": folder.name,
            "backbone": {"name": args.network, "weights": args.weights},
            "model": {"coreset_ratio": 0.1 if few else 0.02},  # as `start` chooses it
        },
        "benchmark",
    )
    started, before = time.monotonic(), cpu_seconds()
    tuning = anomaly.tune(
        config,
        dataset,
        budget=args.budget,
        device=args.device,
        workers=args.workers,
        say=print,
    )
    took = f"{time.monotonic() - started:.0f} s, {cpu_seconds() - before:.0f} s of a core"
    print("\n".join(tuning.lines()), flush=True)
    if args.figures:
        args.figures.mkdir(parents=True, exist_ok=True)
        tuning.write(args.figures / f"{folder.name}_{len(dataset.train)}.yaml")
    names = [tuning.name(i) for i in range(len(tuning.tried))]
    title = f"{folder.name} ({len(dataset.train)} to learn from)"
    return row(title, tuning.scores, names, tuning.costs, took, defects=args.defects)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="MVTec AD layout")
    parser.add_argument("--network", default="timm/tf_efficientnet_lite2", help="backbone.name")
    parser.add_argument("--weights", default="imagenet", help="backbone.weights")
    parser.add_argument("--train", type=int, help="so many training images, the first")
    parser.add_argument("--defects", type=int, help="so many of each kind choose, at most")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--workers", type=int, default=2, help="decoding processes")
    parser.add_argument("--figures", type=Path, help="folder for each set's config and figures")
    args = parser.parse_args()
    print(machine())
    lines = [measured(folder, args) for folder in args.data]
    print("\n".join([HEAD, *lines]))


if __name__ == "__main__":
    main()
