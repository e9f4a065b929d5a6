"""Camera pixels -> verdict, in operations that can be traced into a graph."""

from __future__ import annotations

import math
from typing import Any, cast

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from anomaly.config.schema import METHODS
from anomaly.errors import ModelError
from anomaly.imaging.geometry import View, resampling_matrix
from anomaly.maps.anomaly_map import LEAST_WEIGHT, map_matrix
from anomaly.methods.base import PatchScores
from anomaly.scoring.image_score import network_map
from anomaly.scoring.image_statistics import (
    BLANK,
    FARTHER,
    LEAST_DISTANCE,
    QUIET,
    TrainingStatistics,
)
from anomaly.scoring.model import Model


def check_pixels(detector: Model) -> None:
    """Check that a model can be a graph from pixels to the verdict.

    Raises:
        ModelError: it can't; the message gives the reason.
    """
    config = detector.config
    why = ""
    if config.image.tile is not None:
        why = "it cuts images into tiles (image.tile)"
    elif detector.reference is not None:
        why = "it finds the part's pose first (image.align)"
    elif config.image_score_in_force in METHODS[config.model.kind].image_scores:
        why = f"its image score, {config.image_score_in_force}, searches the memory bank again"
    elif config.model.smallest_defect is not None:
        why = "the size of regions decides its image score (model.smallest_defect)"
    elif detector.thresholds is None:
        why = "it has no thresholds (set them with anomaly calibrate)"
    if why:
        raise ModelError(f"this model can't be a graph from pixels to the verdict: {why}")


class PixelsToVerdict(nn.Module):
    """Pixels (B, H0, W0, 3) uint8 -> verdict, score, reason, anomaly map, patch scores.

    Args:
        detector: on the CPU, in fp32; `check_pixels` has passed it.
        embed: images (B, 3, H, W) in [0, 1] -> embeddings (B, h, w, D), in a tuple.
        camera: (H0, W0) of the pixels.

    Raises:
        DataError: the model doesn't take images of this size.
    """

    def __init__(self, detector: Model, embed: nn.Module, camera: tuple[int, int]) -> None:
        super().__init__()
        self.embed, self.score = embed, detector.scorer.graph()
        self._detector, self._camera = detector, camera
        self._view = view = cast(View, detector.loading.sizing.view(camera))
        self._grid = grid = detector.embedder.grid(view.size)
        self._resample = [_tensor(resampling_matrix(axis)) for axis in (view.rows, view.columns)]
        smoothing = detector.config.model.smoothing
        self._map_axes = [
            _tensor(map_matrix(count, axis, smoothing))
            for count, axis in zip(grid, (view.rows, view.columns), strict=True)
        ]
        self._inside: Tensor | None = None
        self._seen: Tensor | bool = True
        if detector.region is not None:
            self._inside = torch.from_numpy(detector.region.patches(view, grid))[None]
            self._seen = torch.from_numpy(detector.region.inside(camera))
        self._top = self._count_top()
        self._statistics = _Statistics(detector, self._inside, view.size)

    def _count_top(self) -> int:
        """Number of values in the highest 1 %, whose mean is the image score."""
        if self._detector.config.image_score_in_force.startswith("map_"):
            smoothing = self._detector.config.model.smoothing
            zeros = torch.zeros(1, *self._grid)
            values = network_map(zeros, self._view.size, smoothing, self._inside)
        else:
            values = torch.where(
                torch.ones(self._grid) if self._inside is None else self._inside, 0.0, math.nan
            )
        return max(1, round(int((~values.isnan()).sum()) / 100))

    def example(self) -> Tensor:
        """Two images of noise."""
        return torch.randint(0, 256, (2, *self._camera, 3), dtype=torch.uint8)

    def described(self) -> dict[str, tuple[str, list[int | str]]]:
        """Meaning and lengths of the axes of the input and of the outputs, by name."""
        height, width = self._camera
        return {
            "pixels": (
                "RGB, 8 bits, raw camera pixels",
                ["batch", height, width, 3],
            ),
            "verdict": ("0 good, 1 review, 2 reject", ["batch"]),
            "score": ("image score, higher is more anomalous", ["batch"]),
            "reason": (
                "why the image isn't good, whatever its score: 1 it is blank; its 2 brightness, "
                "3 contrast, 4 sharpness is far outside the training images'; 5 it looks like "
                "another product; 0 no reason",
                ["batch"],
            ),
            "anomaly_map": (
                "score of each pixel of the image; NaN where nothing counts",
                ["batch", height, width],
            ),
            "patch_scores": (
                "score of each patch of the network's input; NaN where it doesn't count",
                ["batch", *self._grid],
            ),
        }

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """The graph's outputs, in the order of `described`."""
        images = pixels.permute(0, 3, 1, 2).float() / 255
        rows, columns = self._resample
        images = rows @ images @ columns.T
        (embeddings,) = self.embed(images)
        scores, *nearest = self.score(embeddings)
        patches = PatchScores(scores, nearest[0] if nearest else None)
        pieces = [(self._view, (0, 0), 0)]
        shown, values = self._detector.image_scores_of(
            patches, embeddings, pieces, self._inside, self._top
        )
        reason = self._statistics(images, embeddings)
        limits = self._detector.thresholds
        assert limits is not None  # see `check_pixels`
        # NaN exceeds neither threshold.
        verdict = 2 - (values <= limits.review).long() - (values <= limits.image).long()
        verdict = torch.maximum(verdict, (reason > 0).long())
        return verdict, values, reason, self._anomaly_map(shown.scores), shown.scores

    def _anomaly_map(self, scores: Tensor) -> Tensor:
        """Anomaly maps (B, H0, W0), as in `anomaly.maps.anomaly_map`."""
        rows, columns = self._map_axes
        if self._inside is not None:
            scores = torch.where(self._inside, scores, 0.0)
        highest = F.max_pool2d(scores[:, None], 3, stride=1, padding=1)[:, 0]
        share = scores / highest.clamp(min=float(np.finfo(np.float32).tiny))
        damped = scores * share**self._detector.config.model.halo_damping
        maps = rows @ damped @ columns.T
        if self._inside is None:
            return maps
        weights = rows @ self._inside.float() @ columns.T
        seen = (weights > LEAST_WEIGHT) & self._seen
        return torch.where(seen, maps / torch.where(seen, weights, 1.0), math.nan)


class _Statistics(nn.Module):
    """Network inputs and their embeddings -> why an image is for review, (B,) int64.

    Same checks as in `anomaly.scoring.image_statistics`.
    """

    def __init__(self, detector: Model, inside: Tensor | None, size: tuple[int, int]) -> None:
        super().__init__()
        self._learned = detector.training_statistics
        if self._learned is not None and not self._learned.is_reliable:
            self._learned = None
        self._turned = detector.config.model.turned_copies != "none"
        self._patches = inside
        self._pixels = None
        if inside is not None:
            patches = inside[0].numpy().astype(np.uint8)
            shown = cv2.resize(patches, size[::-1], interpolation=cv2.INTER_NEAREST)
            self._pixels = torch.from_numpy(shown > 0)
            # Plain numbers, which a trace treats as constants.
            self._counts = int(patches.sum()), int((shown > 0).sum())

    def forward(self, images: Tensor, embeddings: Tensor) -> Tensor:
        light = images.mean(1)
        around = F.pad(light[:, None], (1, 1, 1, 1), mode="reflect")[:, 0]
        beside = around[:, :-2, 1:-1] + around[:, 2:, 1:-1]
        beside = beside + around[:, 1:-1, :-2] + around[:, 1:-1, 2:]
        mean = self._mean(light)
        contrast = self._mean((light - mean[:, None, None]).square()).sqrt()
        sharpness = self._mean((beside - 4 * light).abs()) / contrast.clamp(min=QUIET)
        lowest, highest = (
            light if self._pixels is None else torch.where(self._pixels, light, fill)
            for fill in (math.inf, -math.inf)
        )
        tests = [highest.amax((1, 2)) - lowest.amin((1, 2)) <= BLANK]
        if self._learned is not None:
            figures = {"brightness": mean, "contrast": contrast, "sharpness": sharpness}
            for name, values in figures.items():
                low, high = self._learned.ranges[name]
                tests.append((values < low) | (values > high))
            if not self._turned:
                tests.append(self._is_foreign(embeddings, self._learned))
        reason = torch.zeros_like(mean, dtype=torch.int64)
        for code, test in reversed([*enumerate(tests, 1)]):
            reason = torch.where(test, code, reason)
        return reason

    def _mean(self, values: Tensor) -> Tensor:
        """Over the pixels (B, H, W) that count."""
        if self._pixels is None:
            return values.mean((1, 2))
        return (values * self._pixels).sum((1, 2)) / self._counts[1]

    def _is_foreign(self, embeddings: Tensor, learned: TrainingStatistics) -> Tensor:
        if self._patches is None:
            mean = embeddings.mean((1, 2))
        else:
            mean = (embeddings * self._patches[..., None]).sum((1, 2)) / self._counts[0]
        apart = mean - _tensor(learned.mean)
        away = (apart / _tensor(learned.deviations(learned.variance))).square().mean(-1).sqrt()
        distance = apart.square().mean(-1).sqrt() / learned.spread
        return (away > FARTHER * learned.seen_distance) & (distance > LEAST_DISTANCE)


def _tensor(values: NDArray[np.floating[Any]]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))
