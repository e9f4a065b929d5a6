"""What `anomaly tune` chooses by half of the known images, measured on the other half.

    python -m benchmarks.tune --data FOLDER… [--network timm/tf_efficientnet_lite2]
        [--weights imagenet] [--train 40] [--budget 600] [--device cpu] [--figures FOLDER]

Defects and other good images with even places choose, those with odd ones measure; `--defects 25`
takes so many for each. The default and the chosen settings are then trained anew. *Caught*, good
images *flagged*: by the thresholds that training found; *at 5 %*: where 5 % of the measuring good
images are flagged.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

import anomaly
from anomaly.calibration.rates import rate_of
from anomaly.config.load import parse_config
from anomaly.config.schema import Config
from anomaly.datasets import Dataset, Sample
from anomaly.evaluation.metrics.images import image_metrics, recall_at_false_reject_rates
from benchmarks.inputs import machine


def cpu_seconds() -> float:
    """Processor seconds of this process and of those that it has started and ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def figures(config: Config, dataset: Dataset, test: list[Sample], args: argparse.Namespace) -> str:
    """Of a model of these settings on images that didn't choose them, as cells of a table."""
    detector = anomaly.fit(dataset, config, device=args.device, workers=args.workers)
    result = anomaly.evaluate(detector, test, workers=args.workers)
    scored = [(row.image_score, row.sample.is_defect) for row in result.scored]
    known = [(score, label) for score, label in scored if score is not None]
    scores, labels = (np.array(column) for column in zip(*known, strict=True))
    assert result.thresholds is not None  # they were asked for
    above = scores > result.thresholds.review
    caught, flagged = int(above[labels].sum()), int(above[~labels].sum())
    interval = rate_of(caught, int(labels.sum()), caught / labels.sum())
    values = image_metrics(scores, labels) | recall_at_false_reject_rates(scores, labels)
    auroc, recall = (values.values[key] for key in ("image_auroc", "recall_at_frr_0.05"))
    return (
        f"{caught} of {labels.sum()} ({interval.low:.0%} to {interval.high:.0%}) | "
        f"{flagged} of {(~labels).sum()} | {recall:.3f} | {auroc:.3f}"
    )


def measured(folder: Path, args: argparse.Namespace) -> None:
    """Tune on one data set, and print the two lines of its table."""
    dataset = anomaly.open_dataset("mvtec", folder)
    if args.train:
        dataset = replace(dataset, train=dataset.train[: args.train])
    groups = [[s for s in dataset.test if s.is_defect is defect] for defect in (True, False)]
    defects, good = ([group[i::2][: args.defects] for i in (0, 1)] for group in groups)
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
        defects=defects[0],
        good=good[0],
        budget=args.budget,
        device=args.device,
        workers=args.workers,
        say=print,
    )
    seconds, cpu = time.monotonic() - started, cpu_seconds() - before
    print("\n".join(tuning.lines()), flush=True)
    if args.figures:
        args.figures.mkdir(parents=True, exist_ok=True)
        tuning.write(args.figures / f"{folder.name}_{len(dataset.train)}.yaml")
    test = [*defects[1], *good[1]]
    chosen = tuning.name(tuning.judgement.index)
    name = f"{folder.name}, {len(dataset.train)} to learn from, {len(defects[0])} defects"
    base = figures(config, dataset, test, args)
    settled = figures(tuning.config, dataset, test, args) if tuning.judgement.better else base
    print(f"| {name} | default | {base} | |")
    print(f"| | {chosen} | {settled} | {seconds:.0f} s, {cpu:.0f} s of a core |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="MVTec AD layout")
    parser.add_argument("--network", default="timm/tf_efficientnet_lite2", help="backbone.name")
    parser.add_argument("--weights", default="imagenet", help="backbone.weights")
    parser.add_argument("--train", type=int, help="so many training images, the first")
    parser.add_argument("--defects", type=int, help="so many of each kind for each half, at most")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--workers", type=int, default=2, help="decoding processes")
    parser.add_argument("--figures", type=Path, help="folder for each set's config and figures")
    args = parser.parse_args()
    print(machine())
    print("| set | settings | caught | flagged | caught at 5 % | AUROC | took |")
    print("|---|---|---|---|---|---|---|")
    for folder in args.data:
        measured(folder, args)


if __name__ == "__main__":
    main()
