"""Parts missing, surplus, swapped or wrong: what a look at the whole image brings beside patches.

    python -m benchmarks.logical --weights FILE --data FOLDER… --drawn FOLDER [--parts FOLDER]
        [--network resnet50_v1] [--seeds 0 1 2] [--scores FOLDER]

Each way gives an image a distance, cross-fitted on the training images like the patch scores:
`quarters`, the histogram of 32 kinds of coarse patches in each quarter (`model.arrangement`);
`whole`, one histogram of the image; `places`, a Gaussian of the mean embedding in each of 4×4
places; `nearest`, the nearest training image, place by place. It is joined with the patch score:
`steep` as `anomaly.scoring.arrangement` does, `equal` as the higher of the two, each in units of
its own held-out median and 95 % quantile. For logical and for other defects: image AUROC, recall at
5 % false rejects, share above the threshold promised for 5 %; then the good images above it.
`--parts` holds the photographs that `tray` is made of.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from anomaly.evaluation.metrics.images import image_metrics, recall_at_false_reject_rates
from anomaly.methods.patchcore.fitter import MemoryBankFitter
from anomaly.scoring import arrangement
from anomaly.scoring.arrangement import Arrangement
from anomaly.training.cross_fitting import split
from benchmarks import generated_sets, logical_sets
from benchmarks.accuracy import image_score
from benchmarks.feature_cache import ImageMaps, Network, SetMaps, feature_maps
from benchmarks.inputs import machine
from benchmarks.variants import TrainingPatches, Variant, embeddings

CPU, DEFAULT = torch.device("cpu"), Variant()
LOGICAL = {"logical_anomalies", "absent", "turned", "swapped", "misplaced"}
WAYS = ("quarters", "whole", "places", "nearest")
Numbers = NDArray[Any]
Pair = tuple[Numbers, Numbers]  # of the training images, each held out, and of the test images


def patch_scores(images: SetMaps, seed: int, file: Path | None) -> Pair:
    """Image scores of the patches; kept in the file."""
    if file is not None and file.exists():
        kept = np.load(file)
        return kept["held"], kept["test"]
    patches = TrainingPatches([embeddings(image, DEFAULT, CPU) for image in images.train])
    fitter = MemoryBankFitter(DEFAULT.ratio, seed=seed, spacing_neighbours=DEFAULT.spacing)
    bank, held = fitter.fit(patches), np.zeros(len(images.train))

    def score(by: Any, image: ImageMaps) -> float:
        weighted = by.weighted(by.score(embeddings(image, DEFAULT, CPU)[None]))[0]
        return image_score(image, weighted, DEFAULT)

    for fold, without in fitter.held_out(bank, patches, folds_of(held), grouped=False):
        held[list(fold)] = [score(without, images.train[i]) for i in fold]
    pair = held, np.array([score(bank, image) for image in images.test])
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, held=pair[0], test=pair[1])
    return pair


def folds_of(values: Sequence[Any] | Numbers) -> list[tuple[int, ...]]:
    return split(range(len(values)), {}, 10)


def cross_fitted(
    train: Numbers, test: Numbers, fit: Callable[[Numbers], Callable[[Numbers], Numbers]]
) -> Pair:
    held = np.zeros(len(train))
    for fold in folds_of(train):
        held[list(fold)] = fit(np.delete(train, fold, axis=0))(train[list(fold)])
    return held, fit(train)(test)


def gaussian(train: Numbers) -> Callable[[Numbers], Numbers]:
    """The mean over places (n, places, p) of the squared distance."""
    fits = [arrangement._gaussian(train[:, place]) for place in range(train.shape[1])]

    def distance(vectors: Numbers) -> Numbers:
        away = [
            arrangement._distances(vectors[:, place], *fit) ** 2 for place, fit in enumerate(fits)
        ]
        return np.asarray(np.sqrt(np.mean(away, axis=0)))

    return distance


def nearest(train: Numbers) -> Callable[[Numbers], Numbers]:
    def distance(vectors: Numbers) -> Numbers:
        flat = [torch.from_numpy(v.reshape(len(v), -1)) for v in (vectors, train)]
        return torch.cdist(*flat).amin(1).numpy()

    return distance


def distances(images: SetMaps, seed: int) -> Iterator[tuple[str, Pair]]:
    """What each way gives."""
    batches = (((i,), embeddings(x, DEFAULT, CPU)[None], None) for i, x in enumerate(images.train))
    known = Arrangement.of(batches, seed)
    quarters, pooled = [], []
    for image in (*images.train, *images.test):
        patches = embeddings(image, DEFAULT, CPU)[None]
        coarse, weights = (part[0] for part in arrangement._coarse(patches, known.projection, None))
        quarters.append(arrangement._histogram(coarse, weights, known.centres))
        maps = torch.from_numpy(coarse).permute(2, 0, 1)
        pooled.append(F.adaptive_avg_pool2d(maps, 4).flatten(1).T.numpy())
    whole = np.stack(quarters).reshape(len(quarters), 4, -1).mean(1)
    every = np.stack(quarters)[:, None], whole[:, None], np.stack(pooled), np.stack(pooled)
    for way, vectors in zip(WAYS, every, strict=True):
        train, test = vectors[: len(images.train)], vectors[len(images.train) :]
        yield way, cross_fitted(train, test, nearest if way == "nearest" else gaussian)


def joined(patches: Pair, other: Pair, how: str) -> Pair:
    (held, test), (held_away, test_away) = (map(np.log, pair) for pair in (patches, other))
    top = held_away.max() if how == "steep" else np.quantile(held_away, 0.95)
    slope = arrangement._STEEPNESS if how == "steep" else 1.0
    middle, rare, median = np.median(held), np.quantile(held, 0.95), np.median(held_away)
    scale = slope * (rare - middle) / (top - median)
    return tuple(  # type: ignore[return-value]
        np.exp(np.maximum(own, rare + scale * (away - top)))
        for own, away in ((held, held_away), (test, test_away))
    )


def figures(kinds: Numbers, held: Numbers, test: Numbers) -> list[float]:
    """For logical and for other defects three figures each, then the good images flagged."""
    limit = np.sort(held)[-max(1, int(0.05 * (len(held) + 1)))]
    logical, good = np.isin(kinds, list(LOGICAL)), kinds == "good"
    values: list[float] = []
    for part in (logical, ~logical & ~good):
        if not part.any():
            values += [np.nan] * 3
            continue
        labels, scores = part[part | good].tolist(), test[part | good].tolist()
        recall = recall_at_false_reject_rates(scores, labels).values["recall_at_frr_0.05"]
        auroc = image_metrics(scores, labels).values["image_auroc"]
        values += [
            auroc or np.nan,
            np.nan if recall is None else recall,
            (test[part] > limit).mean(),
        ]
    return [*values, (test[good] > limit).mean()]


def row(name: str, way: str, runs: Sequence[Sequence[float]]) -> str:
    mean, spread = np.mean(runs, axis=0), np.std(runs, axis=0)
    cells = [f"{m:.3f}" + f" ± {s:.3f}" * bool(s > 5e-4) for m, s in zip(mean, spread, strict=True)]
    return f"| {name} | {way} | {' | '.join('' if 'nan' in c else c for c in cells)} |"


def drawn(root: Path, parts: Path | None) -> Iterator[Path]:
    """The drawn sets' folders, made where they are absent; `tray` where there are photographs."""
    if not (root / "assembly").exists():
        generated_sets.write("assembly", root / "assembly")
    for name in logical_sets.NAMES:
        if not (root / name).exists() and (parts or name != "tray"):
            logical_sets.write(name, root / name, parts)
    yield from (f for n in (*logical_sets.NAMES, "assembly") if (f := root / n).exists())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", required=True, help="as backbone.weights")
    parser.add_argument("--network", default="resnet50_v1", help="as backbone.name")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="MVTec AD layout")
    parser.add_argument("--drawn", type=Path, help="folder for the drawn sets")
    parser.add_argument("--parts", type=Path, help="folder with the photographs of `tray`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cache", type=Path, default=Path("runs/accuracy"))
    parser.add_argument("--scores", type=Path, help="folder that patch scores are kept in")
    parser.add_argument("--all-ways", action="store_true", help="not only `quarters`, `steep`")
    args = parser.parse_args()
    print(f"{machine()}\n\n| set | way | logical | | | other | | | good flagged |", flush=True)
    for folder in (*args.data, *(drawn(args.drawn, args.parts) if args.drawn else ())):
        images = feature_maps(folder, Network(args.network, args.weights), args.cache, CPU)
        kinds = np.array([image.defect for image in images.test])
        runs: dict[str, list[list[float]]] = {}
        with torch.inference_mode():
            for seed in args.seeds:
                name = f"{folder.name}-{args.network}-{seed}.npz".replace("/", "-")
                patches = patch_scores(images, seed, args.scores and args.scores / name)
                runs.setdefault("patches", []).append(figures(kinds, *patches))
                for way, other in distances(images, seed):
                    for how in ("alone", "steep", "equal"):
                        if args.all_ways or (way, how) == ("quarters", "steep"):
                            pair = other if how == "alone" else joined(patches, other, how)
                            runs.setdefault(f"{way}, {how}", []).append(figures(kinds, *pair))
        for way, each in runs.items():
            print(row(folder.name, way, each), flush=True)


if __name__ == "__main__":
    main()
