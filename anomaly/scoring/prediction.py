"""Results for one image: the prediction with its pictures, and the score with its sample."""

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
    highest,
    marked_regions,
    predicted_mask,
)
from anomaly.maps.heatmap import RgbImage, encode_png, heatmap
from anomaly.scoring.image_statistics import ImageStatistics

_NOTEBOOK_PIXELS = 600_000


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The result of a detector for one image.

    Attributes:
        index: the image's place in the list of images, from 0.
        path: the image file; None for pixels from memory.
        sha256: SHA-256 of the file's bytes, or of the pixels where there is no file.
        image: the decoded image; None for a file, which `heatmap` reads again.
        view: geometry from the image to the network's input.
        patch_scores: (h, w) float32, distances; higher is more anomalous. NaN doesn't count. With
            tiles, the mosaic of their patches.
        nearest: (h, w) int64, the nearest bank vector of each patch; None without a bank.
        score: the image score, in the same unit; with tiles, the highest of the tiles' scores.
        smoothing: standard deviation of the anomaly map's Gaussian, in network pixels.
        halo_damping: exponent γ that lowers a patch beside a higher one, see `without_halo`.
        loading: preprocessing of the image, with the region that counts.
        statistics: statistics of the whole image.
        thresholds: the model's thresholds; None without any.
        reason: reason for review whatever the score: the image isn't like the training images, it
            is blank, the part's pose is doubtful, or a part of the region lies outside the
            photograph. Empty without a reason.
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
        """`good`, `review` or `reject`; empty without thresholds and without a reason."""
        return verdict(self.score, self.thresholds, self.reason)

    @property
    def calibrated_score(self) -> float | None:
        """How rare the score is among good parts, in powers of ten; None without thresholds."""
        return None if self.thresholds is None else self.thresholds.calibrated(self.score)

    @cached_property
    def source_map(self) -> SourceMap:
        """The anomaly map as a function of the rows wanted, computed at each call."""
        region = self.loading.region
        return SourceMap(self.patch_scores, self.view, self.smoothing, self.halo_damping, region)

    @cached_property
    def anomaly_map(self) -> NDArray[np.float32]:
        """(H0, W0) float32 in score units, in the image's own pixels.

        NaN where a crop hid the image from the network, and outside the region that counts.
        """
        return self.source_map()

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Mask (H0, W0): True around each peak above the pixel threshold.

        Raises:
            ModelError: the model has no thresholds.
        """
        if self.thresholds is None:
            raise ModelError(
                "the model has no thresholds, so no defects can be marked; find thresholds with "
                "detector.calibrate(good_images)"
            )
        return predicted_mask(self._held_map, self.thresholds.pixel) > 0

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
            ImageError: the file can't be read any more, or was changed.
        """
        limits = self.thresholds
        limit = float(np.nanmax(self.patch_scores)) if limits is None else limits.pixel
        review = None if limits is None else limits.review_pixel
        rejected, shown = self.verdict == "reject", self.source_map.held()
        return heatmap(self._decoded(), shown, limit, review, rejected=rejected)

    def _repr_png_(self) -> bytes | None:
        """The heatmap as PNG for notebooks, reduced if large; None if the file has gone."""
        try:
            picture = self.heatmap()
        except ImageError:  # the notebook then shows the text of `__repr__`
            return None
        height, width = picture.shape[:2]
        scale = (_NOTEBOOK_PIXELS / (height * width)) ** 0.5
        if scale < 1:
            size = max(1, round(width * scale)), max(1, round(height * scale))
            picture = np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA), np.uint8)
        return encode_png(picture)

    @property
    def _held_map(self) -> SourceMap:
        # `anomaly_map` is cached, so the mask, its regions and a user's look share one map.
        return replace(self.source_map, values=self.anomaly_map)

    def _decoded(self) -> Image:
        if self.image is not None:
            return self.image
        assert self.path is not None
        item = Decoders(self.loading, keep_image=True).load(self.path, self.index)
        if isinstance(item, UnusableImage):
            raise ImageError(item.reason, item.status)
        assert isinstance(item, NetworkInput)
        # The map would lie over another picture.
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
        score: the image score; None if the image couldn't be scored.
        reason: reason why there is no score, or for review whatever the score; else empty.
        sha256: SHA-256 of the file's bytes; empty without a score.
        status: `ok`, or the status of an `UnusableImage`.
        peak: the highest value of the anomaly map; NaN if it wasn't computed.
        width: the defect's greatest width in original pixels; None without a mask.
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
        """The score of a sample.

        Args:
            sample: the image.
            result: its prediction, or the reason why it is unusable.
            peak: compute the anomaly map's highest value, too.
        """
        if isinstance(result, UnusableImage):
            return cls(sample, None, result.reason, status=result.status)
        height = highest(result.source_map) if peak else math.nan
        return cls(sample, result.score, result.reason, result.sha256, peak=height)

    def verdict(self, thresholds: Thresholds | None) -> str:
        """`good`, `review` or `reject`, the same as from `infer`; empty without a score."""
        return "" if self.score is None else verdict(self.score, thresholds, self.reason)
