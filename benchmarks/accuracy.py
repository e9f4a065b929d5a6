"""What each choice is worth: variants × data sets × seeds, on feature maps computed once.

    python -m benchmarks.accuracy --weights FILE.safetensors --data FOLDER… [--drawn FOLDER]
        [--network resnet50_v1] [--layers PATH…] [--seeds 0 1 2] [--device cuda] [--area 256]
        [--variant NAME=KEY:VALUE,…]… [--each]

Sets of photographs (`--data`) decide; what a program has drawn (`--drawn`) stands in a table of its
own. Every variant is the default with some values changed, see `benchmarks.variants`. Ranks are of
the mean over figures and sets; where a variant leads on one set alone, it leads by chance.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor

from anomaly.evaluation.metrics.images import image_metrics, recall_at_false_reject_rates
from anomaly.evaluation.metrics.pixels import PixelAccumulator
from anomaly.maps.anomaly_map import without_halo
from anomaly.scoring.image_score import image_scores, network_map, with_border_damped
from benchmarks.feature_cache import ImageMaps, Network, SetMaps, feature_maps
from benchmarks.generated_sets import NAMES, write
from benchmarks.inputs import machine
from benchmarks.variants import Variant, patch_scores

_IMAGE = ("image_auroc", "recall_at_frr_0.01", "recall_at_frr_0.05")
_PIXEL = ("pixel_auroc", "pixel_ap", "aupro_30", "aupro_05")
_RIM = "rim_recall"
FIGURES = (*_IMAGE, _RIM, *_PIXEL)
_RANKED = (*_IMAGE, "pixel_ap", "aupro_30", "aupro_05")
_RIM_PIXELS = 16  # a defect within so many network pixels of the border lies at the rim

Figures = dict[str, float]
Scores = tuple[Tensor, Tensor]
"""An image's patch scores (h, w), for the map and for the image score."""
Table = dict[str, dict[str, Figures]]
"""Figures by variant and set."""


def image_figures(images: SetMaps, scores: Sequence[Scores], variant: Variant) -> Figures:
    """What image scores are worth on one set.

    Args:
        images: the set.
        scores: of each test image.
        variant: what is made of them.
    """
    labels = [image.defect != "good" for image in images.test]
    pairs = zip(images.test, scores, strict=True)
    values = [
        image_score(image, weighted if variant.spacing else plain, variant)
        for image, (plain, weighted) in pairs
    ]
    metrics = image_metrics(values, labels) | recall_at_false_reject_rates(values, labels)
    known = {key: metrics.values.get(key) for key in _IMAGE}
    return _numbers(known | {_RIM: _rim_recall(images, values, labels)})


def pixel_figures(images: SetMaps, scores: Sequence[Scores], variant: Variant) -> Figures:
    """What anomaly maps are worth on one set; NaN without masks. Arguments as before."""
    accumulator = PixelAccumulator()
    for image, (patches, _) in zip(images.test, scores, strict=True):
        if image.mask is None:
            return dict.fromkeys(_PIXEL, np.nan)
        damped = without_halo(patches[None], variant.halo)
        shown = network_map(damped, image.size, variant.smoothing)[0].numpy()
        if shown.shape != image.mask.shape:
            size = image.mask.shape[::-1]
            shown = cv2.resize(shown, size, interpolation=cv2.INTER_AREA)
        accumulator.update(shown, image.mask)
    values = accumulator.result().values
    return _numbers({key: values.get(key) for key in _PIXEL})


def _numbers(values: Mapping[str, float | None]) -> Figures:
    return {key: np.nan if value is None else value for key, value in values.items()}


def image_score(image: ImageMaps, patches: Tensor, variant: Variant) -> float:
    counted = with_border_damped(patches[None], image.size, variant.border)
    if variant.score.startswith("relative"):
        maps = network_map(counted, image.size, variant.smoothing)
        plain, relative = (
            float(image_scores(counted, maps, how)[0])
            for how in ("map_top_percent", "map_top_relative")
        )
        # The exponent of the image's median: 1 divides by it, 0 not at all.
        power = float(variant.score.removeprefix("relative") or 1)
        return plain ** (1 - power) * relative**power
    values = counted[0]
    if variant.score.startswith("map"):
        values = network_map(counted, image.size, variant.smoothing)[0]
    share = variant.score.partition("top")[2]
    count = max(1, round(values.numel() * float(share) / 100)) if share else 1
    return float(values.flatten().topk(count).values.mean())


def _rim_recall(images: SetMaps, values: list[float], labels: list[bool]) -> float:
    """Recall at 5 % false rejects of the defects that touch the rim; NaN where there are none."""
    rim = [defect and _at_rim(image) for image, defect in zip(images.test, labels, strict=True)]
    if not any(rim):
        return np.nan
    kept = [i for i, defect in enumerate(labels) if not defect or rim[i]]
    figures = recall_at_false_reject_rates([values[i] for i in kept], [labels[i] for i in kept])
    value = figures.values["recall_at_frr_0.05"]
    return np.nan if value is None else value


def _at_rim(image: ImageMaps) -> bool:
    if image.mask is None:
        return False
    rows, columns = (
        max(1, round(_RIM_PIXELS * side / size))
        for side, size in zip(image.mask.shape, image.size, strict=True)
    )
    inner = image.mask[rows:-rows, columns:-columns]
    return bool(image.mask.sum() > inner.sum())


def compared(
    folders: Sequence[Path], variants: Mapping[str, Variant], args: argparse.Namespace
) -> Table:
    """The figures of all variants on all sets, the mean over seeds."""
    network = Network(args.network, args.weights, tuple(args.layers))
    device = torch.device(args.device)
    table: Table = {name: {} for name in variants}
    for folder in folders:
        images = feature_maps(folder, network, args.cache, device, f"area={args.area}")
        runs: dict[str, list[Figures]] = {name: [] for name in variants}
        for seed in args.seeds:
            known: dict[Variant, tuple[list[Scores], float]] = {}
            drawn: dict[Variant, Figures] = {}
            for name, variant in variants.items():
                if variant.distances not in known:
                    known[variant.distances] = patch_scores(images, variant.distances, seed, device)
                scores, seconds = known[variant.distances]
                if variant.maps not in drawn:
                    drawn[variant.maps] = pixel_figures(images, scores, variant)
                row = image_figures(images, scores, variant) | drawn[variant.maps]
                runs[name].append({**row, "seconds": seconds})
        for name, rows in runs.items():
            table[name][folder.name] = {
                key: statistics.fmean(row[key] for row in rows) for key in rows[0]
            }
            if args.each:
                _print(f"{folder.name} {name}", table[name][folder.name])
    return table


def _print(name: str, row: Figures) -> None:
    cells = ("" if np.isnan(row[key]) else f"{row[key]:.3f}" for key in FIGURES)
    print(f"| {name} | {' | '.join(cells)} | {row['seconds']:.1f} |", flush=True)


def _summary(title: str, table: Table) -> None:
    print(f"\n{title}\n\n| variant | {' | '.join(FIGURES)} | seconds | mean rank |")
    print("|---" * (len(FIGURES) + 3) + "|")
    ranks: dict[str, list[float]] = {name: [] for name in table}
    for folder in next(iter(table.values())):
        for key in _RANKED:
            values = {name: round(table[name][folder][key], 4) for name in table}
            if any(np.isnan(value) for value in values.values()):
                continue
            for name, value in values.items():
                better = sum(v > value for v in values.values())
                equal = sum(v == value for v in values.values())
                ranks[name].append(better + (equal + 1) / 2)
    for name, sets in table.items():
        mean = {
            key: float(np.nanmean([row[key] for row in sets.values()]))
            for key in (*FIGURES, "seconds")
        }
        cells = " | ".join(f"{mean[key]:.3f}" for key in FIGURES)
        rank = statistics.fmean(ranks[name])
        print(f"| {name} | {cells} | {mean['seconds']:.1f} | {rank:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", required=True, help="as backbone.weights")
    parser.add_argument("--network", default="resnet50_v1", help="as backbone.name")
    parser.add_argument("--layers", nargs="*", default=[], help="as backbone.layers")
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="MVTec AD layout")
    parser.add_argument("--drawn", type=Path, help="folder for the drawn sets")
    parser.add_argument("--area", type=int, default=256, help="as image.area")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cache", type=Path, default=Path("runs/accuracy"))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--variant", action="append", default=[], help="name=key:value,…")
    parser.add_argument("--each", action="store_true", help="also every set's own figures")
    args = parser.parse_args()
    try:
        parts = [text.partition("=") for text in args.variant]
        variants = {name: Variant.parsed(rest) for name, _, rest in parts}
    except ValueError as error:
        sys.exit(f"--variant: {error}")
    variants = variants or {"default": Variant()}
    print(machine(), flush=True)
    if args.data:
        _summary("Photographs", compared(args.data, variants, args))
    if args.drawn:
        folders = [args.drawn / name for name in NAMES]
        for folder in folders:
            if not folder.exists():
                write(folder.name, folder)
        _summary("Drawn", compared(folders, variants, args))


if __name__ == "__main__":
    main()
