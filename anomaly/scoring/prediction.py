"""The result of a detector for one image, with the sample that it is of."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.calibration.thresholds import Thresholds
from anomaly.datasets.samples import Sample
from anomaly.errors import ImageError, ModelError
from anomaly.imaging.geometry import View
from anomaly.imaging.loading import NetworkInput, Preprocessing, UnusableImage
from anomaly.imaging.pool import Decoders
from anomaly.imaging.read import Image, described
from anomaly.maps.anomaly_map import (
    MarkedRegion,
    SourceMap,
    marked_regions,
    outlined_areas,
    predicted_mask,
    strips,
)
from anomaly.maps.heatmap import RgbImage, encode_png, heatmap
from anomaly.scoring.image_statistics import ImageStatistics

_NOTEBOOK_PIXELS = 600_000


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The result of a detector for one image.

    Attributes:
        index: the image's place among those that were given.
        path: its file; None for pixels that came from memory.
        sha256: of the file's bytes; of the pixels where there is no file.
        image: the decoded image; None for a file, which `heatmap` reads again.
        view: how the network saw it.
        patch_scores: (h, w) float32, distances; higher is more anomalous. NaN doesn't count. With
            tiles, the mosaic of their patches.
        nearest: (h, w) int64, the nearest bank vector of each patch; None without a bank.
        score: the image score, in the same unit; with tiles, the highest of theirs.
        smoothing: of the anomaly map, in network pixels.
        halo_damping: how much a patch beside a higher one is lowered on the anomaly map.
        loading: how the image was turned into the network's input, what of it counts included.
        statistics: of the image as a whole.
        thresholds: the model's; None where it has none.
        reason: why the image isn't called good whatever its score: it isn't like the training
            images at all, it is blank, the part's pose is doubtful, or a part of the region lies
            outside the photograph. Empty where nothing of that is so.
    """

    index: int
    path: Path | None
    sha256: str
    image: Image | None
    view: View
    patch_scores: NDArray[np.float32]
    nearest: NDArray[np.int64] | None
    score: float
    smoothing: float
    halo_damping: float
    loading: Preprocessing
    statistics: ImageStatistics
    thresholds: Thresholds | None = None
    reason: str = ""

    def __repr__(self) -> str:
        limit = "" if self.thresholds is None else f" (reject above {self.thresholds.image:.4g})"
        verdict = f"{self.verdict}, " if self.verdict else ""
        reason = f"; {self.reason}" if self.reason else ""
        return f"<Prediction of {self.name}: {verdict}score {self.score:.4g}{limit}{reason}>"

    @property
    def name(self) -> str:
        """The image's name in messages: its path, or its position."""
        return described(self.index, self.path)

    @property
    def verdict(self) -> str:
        """`good`, `review` or `reject`, see the function `verdict`."""
        return verdict(self.score, self.thresholds, self.reason)

    @property
    def calibrated_score(self) -> float | None:
        """How rare the score is among good parts, in powers of ten; None without thresholds."""
        return None if self.thresholds is None else self.thresholds.calibrated(self.score)

    @cached_property
    def source_map(self) -> SourceMap:
        """A function that computes the anomaly map, all rows or some."""
        region = self.loading.region
        return SourceMap(self.patch_scores, self.view, self.smoothing, self.halo_damping, region)

    @cached_property
    def anomaly_map(self) -> NDArray[np.float32]:
        """(H0, W0) float32 in score units, in the image's own pixels.

        NaN where a crop hid the image from the network and outside the region to look at.
        """
        return self.source_map()

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Mask (H0, W0): True around each peak above the pixel threshold.

        Raises:
            ModelError: the model has no thresholds.
        """
        return predicted_mask(self._held_map, self._limits().pixel) > 0

    @property
    def regions(self) -> tuple[MarkedRegion, ...]:
        """The connected parts of `mask`, in original pixels, the highest peak first.

        Raises:
            ModelError: the model has no thresholds.
        """
        return marked_regions(self.mask.view(np.uint8), self._held_map)

    def heatmap(self) -> RgbImage:
        """The image under its anomaly map, (H0, W0, 3) uint8 RGB.

        Without thresholds, marking starts at the image's own highest patch score. A file is read
        again.

        Raises:
            ImageError: it can't be read any more, or was changed.
        """
        limits = self.thresholds
        limit = float(np.nanmax(self.patch_scores)) if limits is None else limits.pixel
        review = None if limits is None else limits.review_pixel
        rejected = self.verdict == "reject"
        scores = self.source_map.held()
        areas = outlined_areas(scores, limit, review, rejected=rejected)
        return heatmap(self._decoded(), scores, limit, areas)

    def _repr_png_(self) -> bytes | None:
        """The heatmap as PNG for notebooks, reduced if large."""
        try:
            picture = self.heatmap()
        except ImageError:  # the file has gone; the text remains
            return None
        height, width = picture.shape[:2]
        scale = (_NOTEBOOK_PIXELS / (height * width)) ** 0.5
        if scale < 1:
            size = max(1, round(width * scale)), max(1, round(height * scale))
            picture = np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA), np.uint8)
        return encode_png(picture)

    @property
    def _held_map(self) -> SourceMap:
        return replace(self.source_map, values=self.anomaly_map)

    def _limits(self) -> Thresholds:
        if self.thresholds is None:
            raise ModelError(
                "the model has no thresholds, so no defects can be marked; find thresholds with "
                "detector.calibrate(good_images)"
            )
        return self.thresholds

    def _decoded(self) -> Image:
        if self.image is not None:
            return self.image
        assert self.path is not None
        item = Decoders(self.loading, keep_image=True).load(self.path, self.index)
        if isinstance(item, UnusableImage):
            raise ImageError(item.reason, item.status)
        assert isinstance(item, NetworkInput)
        if item.sha256 != self.sha256:
            raise ImageError(f"{self.path} was changed since it was scored; predict it again")
        return item.decoded


def verdict(score: float, thresholds: Thresholds | None, reason: str) -> str:
    """`good`, `review` or `reject`; empty without thresholds and without a reason for review.

    A reason makes a verdict stricter, never milder: what would be good is for review, and what the
    score rejects stays rejected.
    """
    by_score = "" if thresholds is None else thresholds.verdict(score)
    return "review" if reason and by_score != "reject" else by_score


@dataclass(frozen=True)
class Scored:
    """One image with its score.

    Attributes:
        sample: the image.
        score: the image score; None where it couldn't be scored.
        reason: why it couldn't be scored, or isn't called good whatever its score.
        sha256: of the file's bytes.
        status: `ok`, or that of an `UnusableImage`.
        peak: the highest value of the anomaly map, where that was asked for; else NaN.
        width: of its defect in original pixels, where that is widest; None without a mask.
    """

    sample: Sample
    score: float | None
    reason: str = ""
    sha256: str = ""
    status: str = "ok"
    peak: float = math.nan
    width: float | None = None

    @classmethod
    def of(
        cls, sample: Sample, result: Prediction | UnusableImage, *, peak: bool = False
    ) -> Scored:
        """A result with the sample that it is of."""
        if isinstance(result, UnusableImage):
            return cls(sample, None, result.reason, status=result.status)
        highest = _peak(result) if peak else math.nan
        return cls(sample, result.score, result.reason, result.sha256, peak=highest)

    @property
    def outlier(self) -> bool:
        """True if the image isn't called good whatever its score."""
        return self.score is not None and bool(self.reason)

    def verdict(self, thresholds: Thresholds | None) -> str:
        """`good`, `review` or `reject`, as `infer` says; empty without a score."""
        return "" if self.score is None else verdict(self.score, thresholds, self.reason)


def _peak(result: Prediction) -> float:
    # Rows outside the region to look at are NaN all along.
    rows = strips(result.view.source)
    peaks = [np.fmax.reduce(result.source_map(strip), axis=None) for strip in rows]
    return float(np.fmax.reduce(peaks))
