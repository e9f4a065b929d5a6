"""Figures of whole trainings on data sets with known defects: settings × sets × seeds.

    python -m benchmarks.accuracy --data FOLDER… [--set KEY=VALUE…] [--seeds 0 1 2]
        [--variant NAME=KEY:VALUE,…]…

Each data set lies in MVTec AD's layout. A variant is a training with some settings changed; without
one, the settings given by `--set` are measured. Good test images flagged and defects caught are
those of the model's own thresholds. Figures are means over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import anomaly
from anomaly.config.load import parse_config
from benchmarks.process import machine

FIGURES = ("image_auroc", "image_ap", "pixel_auroc", "pixel_ap", "aupro_30", "flagged", "caught")
Figures = Mapping[str, float]


def figures(folder: Path, settings: Sequence[str], seed: int, device: str) -> Figures:
    """The figures of one training; NaN where the data set has no masks.

    Args:
        folder: of the data set.
        settings: `key=value`, as of `--set`.
        seed: of the training.
        device: as of `--device`.
    """
    config = parse_config({"seed": seed}, "benchmark", settings)
    data = anomaly.open_dataset("mvtec", folder.parent, folder.name)
    detector = anomaly.fit(data, config, device=device)
    result = detector.evaluate(data)
    assert result.verdicts is not None
    counts = result.verdicts
    known = {name: result.metrics.get(name) for name in FIGURES[:5]}
    known["flagged"] = (counts.false_rejects + counts.good.review) / counts.good.total
    known["caught"] = counts.caught / counts.defective.total
    return {name: float("nan") if value is None else value for name, value in known.items()}


def mean(rows: Sequence[Figures]) -> Figures:
    """The mean of each figure."""
    return {name: statistics.fmean(row[name] for row in rows) for name in FIGURES}


def show(*names: str, row: Figures) -> None:
    """Print a line of the table."""
    cells = ("" if row[name] != row[name] else f"{row[name]:.3f}" for name in FIGURES)
    print(f"| {' | '.join([*names, *cells])} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="MVTec AD layout")
    parser.add_argument("--set", action="append", default=[], help="key=value, for all variants")
    parser.add_argument("--variant", action="append", default=[], help="name=key:value,…")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    variants: dict[str, list[str]] = {}
    for text in args.variant or ["as set="]:
        name, _, settings = text.partition("=")
        variants[name] = [one.replace(":", "=", 1) for one in settings.split(",") if one]
    print(machine() + "\n")
    print(f"| data set | variant | {' | '.join(FIGURES)} |\n{'|---' * (len(FIGURES) + 2)}|")
    found: dict[str, list[Figures]] = {name: [] for name in variants}
    for folder in args.data:
        for name, settings in variants.items():
            chosen = [*args.set, *settings]
            rows = [figures(folder, chosen, seed, args.device) for seed in args.seeds]
            found[name].append(mean(rows))
            show(folder.name, name, row=found[name][-1])
    for name, rows in found.items():
        show("mean", name, row=mean(rows))


if __name__ == "__main__":
    main()
