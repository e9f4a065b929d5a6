"""Scores of images that a model hasn't learned from and isn't judged by."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anomaly.calibration import GoodScores
from anomaly.errors import DataError, some
from anomaly.imaging.loading import UnusableImage
from anomaly.imaging.read import Image, described
from anomaly.maps.regions import strips
from anomaly.model.prediction import Prediction
from anomaly.model.scoring import Model
from anomaly.scorers.base import Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOutScores:
    """Images with their scores, in the order of their files.

    Attributes:
        paths: of the images that were scored; mere names of those that came from memory.
        image: their image scores.
        peak: the highest value of each one's anomaly map.
        hashes: sha256 of each file.
        reasons: why a person has to look at each one whatever its score; empty where there is none.
        refused: why others can't be used.
    """

    paths: tuple[Path, ...]
    image: tuple[float, ...]
    peak: tuple[float, ...]
    hashes: tuple[str, ...]
    reasons: tuple[str, ...]
    refused: tuple[str, ...]

    def named_hashes(self) -> dict[str, str]:
        """sha256 of each image that was scored, by its path."""
        return dict(zip(map(str, self.paths), self.hashes, strict=True))

    def good_scores(self) -> GoodScores:
        """What thresholds are found with, where all of these images are good.

        Those that a person has to look at whatever their score say nothing of thresholds: they are
        left out, and a warning in the log names some.

        Raises:
            DataError: they are all like that.
        """
        kept = [i for i, reason in enumerate(self.reasons) if not reason]
        if not kept:
            raise DataError(
                f"all {len(self.paths)} good images would be for review whatever their score "
                f"({self.reasons[0]}), so they say nothing of thresholds; where parts look like "
                "that from now on, the model can learn them (update)"
            )
        if odd := [f"{p}: {why}" for p, why in zip(self.paths, self.reasons, strict=True) if why]:
            log.warning(
                "%d good images would be for review whatever their score, and say nothing of "
                "thresholds; left out: %s",
                len(odd),
                some(odd, "; "),
            )
        names = _names([self.paths[i] for i in kept])
        return GoodScores(
            tuple(names),
            tuple(self.image[i] for i in kept),
            tuple(self.peak[i] for i in kept),
            f"{len(kept)} good images that the model hasn't learned from",
            hashes=tuple(self.hashes[i] for i in kept),
        )


def score_held_out(
    detector: Model,
    images: Sequence[Path | Image],
    *,
    what: str,
    tested: Collection[str],
    workers: int = 2,
    progress: Progress = lambda done, total: None,
) -> HeldOutScores:
    """Score images that thresholds may hang on.

    Those that the detector has learned from, whose scores say too little, and copies of others are
    left out; warnings in the log say how many.

    Args:
        detector: trained.
        images: files, or pixels that are decoded already.
        what: the images are, for messages.
        tested: sha256 of the test split's images, which no threshold may see.
        workers: decoding processes.
        progress: called with (images done, all of them).

    Raises:
        DataError: an image belongs to the test split, or none is left.
    """
    rows: dict[int, tuple[float, float, str, str]] = {}
    paths = [described(i) if isinstance(im, Image) else im for i, im in enumerate(images)]
    refused: list[str] = []
    met: set[str] = set()
    known = repeated = 0
    learned = frozenset(detector.manifest["training_images"].values())
    for done, result in enumerate(detector.score_all(images, workers=workers), 1):
        progress(done, len(images))
        if isinstance(result, UnusableImage):
            refused.append(result.reason)
            continue
        sha256 = result.sha256
        if sha256 in tested:
            raise DataError(
                f"{paths[result.index]} belongs to the test split that the model is evaluated on, "
                "which no threshold may see; give other images"
            )
        if sha256 in learned:
            known += 1
        elif sha256 in met:
            repeated += 1
        else:
            rows[result.index] = (result.score, _peak(result), sha256, result.reason)
        met.add(sha256)
    if not rows:
        reasons = [f"{known} the model has learned from"] if known else []
        reasons += refused[:3]
        raise DataError(f"none of {len(images)} images can be used: {'; '.join(reasons)}")
    if known:
        log.warning("%s: the model has learned from %d; left out", what, known)
    if repeated:
        log.warning("%s: %d are copies of others; left out", what, repeated)
    order = sorted(rows)
    image, peak, hashes, odd = zip(*(rows[i] for i in order), strict=True)
    files = tuple(Path(paths[i]) for i in order)
    return HeldOutScores(files, image, peak, hashes, odd, tuple(refused))


def _names(paths: Sequence[Path]) -> list[str]:
    """Images' names: those of their files, with as many folders as it takes to tell them apart."""
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    places = [path.absolute() for path in paths]
    common = Path(os.path.commonpath([place.parent for place in places]))
    return [place.relative_to(common).as_posix() for place in places]


def _peak(result: Prediction) -> float:
    # Rows outside the region to look at are NaN all along.
    rows = strips(result.view.source)
    peaks = [np.fmax.reduce(result.source_map(strip), axis=None) for strip in rows]
    return float(np.fmax.reduce(peaks))
