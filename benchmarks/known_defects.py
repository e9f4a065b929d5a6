"""Do known defects help to catch others? PatchCore with and without, cross-fitted over defects.

    python -m benchmarks.known_defects --weights FILE --data FOLDER… [--network resnet50_v1]

Of a known defect, the ten highest patches count, inside its mask where there is one. A rule raises
a patch's distance d by a factor from 1 to 2. `nearest`: d over its distance to the nearest patch of
a known defect. `direction`: how far its difference from its nearest good patch lies along Fisher's
discriminant between known defects' and held-out good images' differences; one good image in ten
has a raised patch. Halves of each kind, drawn at random, are known in turn, some of them or all;
the others measure. `unseen`: none of a kind is known, 15 others are. Gains in defects caught: where
1 and 5 % of the good test images are flagged, and by the review threshold of held-out training
images; mean ± standard deviation of the draws (95 %, of images drawn again).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.methods.patchcore.bank import MemoryBank
from anomaly.methods.patchcore.fitter import MemoryBankFitter
from anomaly.training.cross_fitting import split
from benchmarks.accuracy import image_score
from benchmarks.feature_cache import ImageMaps, Network, SetMaps, feature_maps
from benchmarks.inputs import machine
from benchmarks.variants import TrainingPatches, Variant, embeddings

CPU, CACHE, DEFAULT = torch.device("cpu"), Path("runs/accuracy"), Variant()
RULES = ("nearest", "direction")
_PATCHES, _SHRINKAGE, _RAISED, _MOST, _KNOWN, _DRAWS = 10, 0.5, 0.1, 2.0, (3, 8, 15, 30), 3
Numbers: TypeAlias = NDArray[Any]
# An image, its patches' distances (h, w), what image scores divide them by, differences (h, w, D).
Scored: TypeAlias = tuple[ImageMaps, Tensor, Tensor, Tensor]


def scored(bank: MemoryBank, image: ImageMaps) -> Scored:
    scores = bank.score(patches := embeddings(image, DEFAULT, CPU)[None])
    sparsity = (scores.scores / bank.weighted(scores).clip(min=1e-9)).clip(min=1)
    return image, scores.scores[0], sparsity[0], (patches - bank.vectors[scores.nearest])[0]


def held_out_and_test(images: SetMaps) -> tuple[list[Scored], list[Scored]]:
    """Every other training image, by a bank without it, and the test images."""
    patches = TrainingPatches([embeddings(image, DEFAULT, CPU) for image in images.train])
    fitter = MemoryBankFitter(DEFAULT.ratio, spacing_neighbours=DEFAULT.spacing)
    folds = split(range(len(images.train)), {}, 10)
    banks = fitter.held_out(bank := fitter.fit(patches), patches, folds, grouped=False)
    held_out = [scored(b, images.train[i]) for fold, b in banks for i in fold if i % 2 == 0]
    return held_out, [scored(bank, image) for image in images.test]


def defect_patches(image: ImageMaps, distances: Tensor, sparsity: Tensor, _: Tensor) -> Tensor:
    weighted = (distances / sparsity).flatten()
    if image.mask is not None:
        mask = image.mask.astype(np.float32)
        mask = cv2.resize(mask, distances.shape[::-1], interpolation=cv2.INTER_AREA)
        marked = torch.from_numpy(mask).flatten()
        weighted = weighted.where(marked >= marked.max().clip(max=0.5), -torch.inf)
    best = weighted.topk(_PATCHES)
    return best.indices[best.values > -torch.inf]


class Trial:
    def __init__(self, held_out: Sequence[Scored], test: Sequence[Scored]) -> None:
        self.images, self.train = [*held_out, *test], np.arange(len(held_out))
        kinds = np.array([image.defect for image, *_ in test])
        self.good = len(held_out) + np.flatnonzero(kinds == "good")
        self.defects = len(held_out) + np.flatnonzero(kinds != "good")
        self.kinds = kinds[kinds != "good"]
        places = {i: defect_patches(*self.images[i]) for i in self.defects}
        differences = [each.flatten(0, 1) for *_, each in self.images]
        means = torch.stack([differences[i][chosen].mean(0) for i, chosen in places.items()])
        covariance = torch.zeros((means.shape[1],) * 2)
        for flat in differences[: len(held_out) : max(1, len(held_out) // 50)]:
            covariance += flat.T @ flat / len(flat)
        spread = covariance.diagonal().mean() * torch.eye(len(covariance))
        covariance += _SHRINKAGE * (spread - covariance)
        directions = torch.linalg.solve(covariance, means.T)
        every = [embeddings(image, DEFAULT, CPU).flatten(0, 1) for image, *_ in self.images]
        known, sizes = [every[i][p] for i, p in places.items()], [len(p) for p in places.values()]
        self.factors: dict[str, list[Tensor]] = {rule: [] for rule in RULES}  # (h, w, defects)
        for patches, (_, distances, _, each) in zip(every, self.images, strict=True):
            away = torch.cdist(patches, torch.cat(known)).clip(min=1e-6).split(sizes, 1)
            nearest = torch.stack([d.amin(1) for d in away], 1).view(*distances.shape, -1)
            self.factors["nearest"].append(distances[..., None] / nearest)
            self.factors["direction"].append(each @ directions)
        self.plain = np.array([self._score(i, torch.ones(())) for i in range(len(self.images))])

    def _score(self, i: int, factor: Tensor) -> float:
        image, distances, sparsity, _ = self.images[i]
        return image_score(image, distances * factor.clip(1, _MOST) / sparsity, DEFAULT)

    def scores(self, rule: str, known: Numbers) -> list[Numbers]:
        """Image scores of good test images, defects and training images."""
        factors = [each[..., known] for each in self.factors[rule]]
        factors = [each.amax(-1) if rule == "nearest" else each.mean(-1) for each in factors]
        if rule == "direction":
            usual = np.quantile([float(factors[i].max()) for i in self.train], 1 - _RAISED)
            factors = [factor / usual for factor in factors]
        parts = self.good, self.defects, self.train
        return [np.array([self._score(i, factors[i]) for i in part]) for part in parts]

    def runs(self, rule: str, count: int, unseen: bool) -> Iterator[list[Numbers]]:
        """Scores, and which defects measure."""
        for seed in range(_DRAWS):
            order = np.random.default_rng(seed).permutation(len(self.kinds))
            order = order[np.argsort(self.kinds[order], kind="stable")]
            for known in (order[::2], order[1::2]):
                drawn = np.random.default_rng(seed).permutation(known)
                for kind in sorted(set(self.kinds)) if unseen else [""]:
                    measure = ~np.isin(np.arange(len(order)), known)
                    measure &= (self.kinds == kind) | (not unseen)
                    if measure.any():
                        taken = drawn[self.kinds[drawn] != kind][:count]
                        yield [*self.scores(rule, taken), measure]


def review(held_out: Numbers) -> float:
    """The threshold above which 5 % of good images are to be expected."""
    return float(np.sort(held_out)[-int(0.05 * (len(held_out) + 1))])


def gain(plain: Sequence[Numbers], runs: Sequence[list[Numbers]], own: float | None = None) -> str:
    draw = np.random.default_rng(0)

    def above(good: Numbers, defects: Numbers, train: Numbers) -> Numbers:
        allowed = int((own or 0) * len(good) + 1e-9)
        return defects > (review(train) if own is None else np.sort(good)[-1 - allowed])

    def gains(drawn: Sequence[Numbers]) -> list[float]:
        before = above(*(part[i] for part, i in zip(plain, drawn, strict=True))).astype(float)
        pairs = [(above(*(p[i] for p, i in zip(run, drawn, strict=False))), run[3]) for run in runs]
        pairs = [(after - before, measure[drawn[1]]) for after, measure in pairs]
        return [float(change[kept].mean()) for change, kept in pairs if kept.any()]

    again = ([draw.integers(len(part), size=len(part)) for part in plain] for _ in range(300))
    low, high = np.quantile([np.mean(gains(drawn)) for drawn in again], (0.025, 0.975))
    each = gains([np.arange(len(part)) for part in plain])
    return f"{np.mean(each):+.3f} ± {np.std(each):.3f} ({low:+.3f} to {high:+.3f})"


def row(trial: Trial, rule: str, count: int, unseen: bool) -> str:
    plain = [trial.plain[part] for part in (trial.good, trial.defects, trial.train)]
    everything = np.ones(len(trial.defects), bool)
    runs = list(trial.runs(rule, count, unseen)) if rule else [[*plain, everything]]
    caught = np.mean([(d[measure] > review(train)).mean() for _, d, train, measure in runs])
    flagged = np.mean([(good > review(train)).mean() for good, _, train, _ in runs])
    gains = [gain(plain, runs, own) for own in (0.01, 0.05, None)]
    known = "unseen" if unseen else str(count)
    return " | ".join([rule, known, *gains, f"{caught:.1%}, {flagged:.1%}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", required=True, help="as backbone.weights")
    parser.add_argument("--network", default="resnet50_v1", help="as backbone.name")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="MVTec AD layout")
    args = parser.parse_args()
    print(f"{machine()}\n\n| set | rule | known | 1 % | 5 % | threshold | caught, flagged |")
    network, rows = Network(args.network, args.weights), [("", 0, False)]
    rows += [(rule, n, False) for rule in RULES for n in _KNOWN]
    rows += [(rule, 15, True) for rule in RULES]
    with torch.inference_mode():
        for folder in args.data:
            trial = Trial(*held_out_and_test(feature_maps(folder, network, CACHE, CPU)))
            for each in rows if len(set(trial.kinds)) > 1 else rows[:-2]:
                print(f"| {folder.name} | {row(trial, *each)} |", flush=True)


if __name__ == "__main__":
    main()
