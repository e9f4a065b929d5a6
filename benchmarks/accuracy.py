"""What each choice is worth: variants × data sets × seeds, on feature maps computed once.

    python -m benchmarks.accuracy --weights FILE.safetensors --data FOLDER... [--seeds 0 1 2]
        [--network resnet50_v1] [--cache FOLDER] [--variant NAME=KEY:VALUE,…]... [--each]

Every variant is today's default with some values changed, see `benchmarks.variants`. Ranks are of
the mean over figures; where a variant leads on one set alone, it leads by chance.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import fields
from pathlib import Path

import cv2
import numpy as np
from torch import Tensor

from anomaly.evaluation.metrics import (
    PixelAccumulator,
    image_metrics,
    recall_at_false_reject_rates,
)
from anomaly.maps.anomaly_map import without_halo
from anomaly.model.image_score import network_map, with_border_damped
from benchmarks.feature_cache import SeenSet, seen
from benchmarks.generated_sets import NAMES, write
from benchmarks.inputs import machine
from benchmarks.variants import Variant, forget, patch_scores

FIGURES = (
    "image_auroc",
    "image_ap",
    "recall_at_frr_0.01",
    "recall_at_frr_0.05",
    "pixel_auroc",
    "pixel_ap",
    "aupro_30",
    "aupro_05",
)


def image_score(scores: Tensor, blurred: Tensor, how: str) -> float:
    """One image's score."""
    values = blurred if how.startswith("map") else scores
    share = how.partition("top")[2]
    if not share:
        return float(values.max())
    count = max(1, round(values.numel() * float(share) / 100))
    return float(values.flatten().topk(count).values.mean())


def figures(
    images: SeenSet, scores: list[Tensor], variant: Variant, pixels: bool
) -> dict[str, float]:
    """What a variant is worth on one set."""
    accumulator, found, labels = PixelAccumulator(), [], []
    for one, patch in zip(images.test, scores, strict=True):
        counted = with_border_damped(patch[None], one.size, variant.border)
        blurred = network_map(counted, one.size, variant.smoothing)[0]
        found.append(image_score(counted[0], blurred, variant.score))
        labels.append(one.defect != "good")
        if pixels:
            assert one.mask is not None
            damped = without_halo(patch[None], variant.halo)
            shown = network_map(damped, one.size, variant.smoothing)[0].numpy()
            if shown.shape != one.mask.shape:
                size = one.mask.shape[::-1]
                shown = cv2.resize(shown, size, interpolation=cv2.INTER_AREA)
            accumulator.update(shown, one.mask)
    metrics = image_metrics(found, labels) | recall_at_false_reject_rates(found, labels)
    if pixels:
        metrics |= accumulator.result()
    return {k: np.nan if (v := metrics.values.get(k)) is None else v for k in FIGURES}


def parse(text: str) -> tuple[str, Variant]:
    """A variant from `name=key:value,key:value`."""
    name, _, rest = text.partition("=")
    kinds = {f.name: type(f.default) for f in fields(Variant)}
    values = dict(part.split(":") for part in rest.split(",") if part)
    if unknown := values.keys() - kinds.keys():
        sys.exit(f"{text}: unknown {', '.join(unknown)}; there are {', '.join(kinds)}")
    return name, Variant(**{k: kinds[k](v) for k, v in values.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", required=True, help="as backbone.weights")
    parser.add_argument("--network", default="resnet50_v1", help="as backbone.name")
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="MVTec AD layout")
    parser.add_argument("--generated", type=Path, help="folder for the generated sets")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cache", type=Path, default=Path("runs/accuracy"))
    parser.add_argument("--variant", action="append", default=[], help="name=key:value,…")
    parser.add_argument("--each", action="store_true", help="also every set's own figures")
    parser.add_argument("--no-pixels", action="store_true", help="image figures only")
    args = parser.parse_args()
    print(machine() + "\n")
    folders = list(args.data)
    for name in NAMES if args.generated else ():
        folders.append(args.generated / name)
        if not folders[-1].exists():
            write(name, folders[-1])
    variants = dict(map(parse, args.variant)) or {"default": Variant()}
    table: dict[str, dict[str, dict[str, float]]] = {name: {} for name in variants}
    for folder in folders:
        images = seen(folder, args.weights, args.network, args.cache)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
        for seed in args.seeds:
            known: dict[Variant, tuple[list[Tensor], float]] = {}
            for name, variant in variants.items():
                if variant.distances not in known:
                    known[variant.distances] = patch_scores(images, variant, seed)
                scores, seconds = known[variant.distances]
                one = figures(images, scores, variant, not args.no_pixels)
                runs[name].append({**one, "seconds": seconds})
        forget()
        for name, every in runs.items():
            table[name][folder.name] = {
                key: statistics.fmean(one[key] for one in every) for key in every[0]
            }
            if args.each:
                _print(f"{folder.name} {name}", table[name][folder.name])
    _summary(table)


def _print(name: str, row: dict[str, float]) -> None:
    cells = " | ".join(f"{row[key]:.3f}" for key in FIGURES)
    print(f"| {name} | {cells} | {row['seconds']:.1f} |", flush=True)


def _summary(table: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"\n| variant | {' | '.join(FIGURES)} | seconds | mean rank |")
    print("|---" * (len(FIGURES) + 3) + "|")
    ranks: dict[str, list[float]] = {name: [] for name in table}
    for folder in next(iter(table.values())):
        for key in FIGURES:
            values = {name: round(table[name][folder][key], 4) for name in table}
            for name, value in values.items():
                better = sum(v > value for v in values.values())
                equal = sum(v == value for v in values.values())
                ranks[name].append(better + (equal + 1) / 2)
    for name, sets in table.items():
        mean = {
            key: statistics.fmean(row[key] for row in sets.values())
            for key in (*FIGURES, "seconds")
        }
        cells = " | ".join(f"{mean[key]:.3f}" for key in FIGURES)
        rank = statistics.fmean(ranks[name])
        print(f"| {name} | {cells} | {mean['seconds']:.1f} | {rank:.2f} |")


if __name__ == "__main__":
    main()
