"""The camera above the inspection table: from radiance to a picture, and to a defect's mask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Field = NDArray[np.floating[Any]]
"""float32 throughout: numpy's stubs lose sight of that in a product with a Python float."""


@lru_cache(maxsize=2)
def grid(side: int) -> tuple[Field, Field]:
    """The x and y of every pixel's centre, (S, S) each, in shares of the side from the middle."""
    axis = ((np.arange(side) + 0.5) / side - 0.5).astype(np.float32)
    x, y = np.meshgrid(axis, axis)
    # One grid serves every image.
    x.setflags(write=False)
    y.setflags(write=False)
    return x, y


def white(rng: Generator, shape: tuple[int, ...]) -> Field:
    """Independent noise, mean 0 and standard deviation 1, to be blurred.

    Uniform, not normal: after any blur nobody can tell, and it costs a tenth of the time.
    """
    byte = np.frombuffer(rng.bytes(int(np.prod(shape))), np.uint8).reshape(shape)
    return (byte - np.float32(127.5)) / np.float32(73.9)


_SUPERSAMPLING = 2
_MARGIN = 1.07
"""A scene is this much larger than the picture, so that no shift or turn shows its border."""

_VISIBLE = 0.028
"""From this difference in display brightness (0 to 1) on, a change is clearly visible."""


def scene_side(size: int) -> int:
    """Side of the scene, in scene pixels, behind a picture of `size` pixels."""
    return round(size * _SUPERSAMPLING * _MARGIN)


@dataclass(frozen=True)
class Camera:
    """One exposure: where the camera stood and how it was set.

    Attributes:
        size: side of the picture, in pixels.
        placement: (2, 3) affine map from the supersampled picture to the scene.
        gain: (size, size, 3) exposure, white balance (RGB) and vignetting.
        blur: Gaussian σ of the lens, in picture pixels.
        grain: sensor noise at full brightness, as a share of it.
    """

    size: int
    placement: NDArray[np.float64]
    gain: Field
    blur: float
    grain: float

    @classmethod
    def set_up(cls, rng: Generator, size: int) -> Camera:
        """Place and set the camera about as well as a fixture and its operator would.

        Everything varies between limits, not around a mean: a fixture has stops, and a good part
        that lies like no other would be an anomaly.
        """
        fine = size * _SUPERSAMPLING
        angle = np.deg2rad(rng.uniform(-0.8, 0.8))
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        turn *= 1 + rng.uniform(-0.006, 0.006)
        target = scene_side(size) / 2 + rng.uniform(-0.005, 0.005, 2) * fine
        x, y = grid(size)
        x0, y0 = rng.uniform(-0.08, 0.08, 2)
        falloff = 1 - rng.uniform(0.3, 0.5) * ((x - x0) ** 2 + (y - y0) ** 2)
        balance = np.exp(rng.uniform(-0.05, 0.05) + rng.uniform(-0.01, 0.01, 3))
        return cls(
            size=size,
            placement=np.column_stack([turn, target - turn @ np.full(2, fine / 2)]),
            gain=np.asarray(falloff[..., None] * balance, np.float32),
            blur=rng.uniform(0.45, 0.7),
            grain=rng.uniform(0.009, 0.013),
        )

    def expose(self, radiance: Field) -> Field:
        """What falls on the sensor.

        Args:
            radiance: (S, S, 3) linear light, RGB, S = `scene_side(size)`.

        Returns:
            (size, size, 3) linear light, RGB, 1 = saturation.
        """
        fine = self.size * _SUPERSAMPLING
        view = cv2.warpAffine(
            radiance,
            self.placement,
            (fine, fine),
            flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_REPLICATE,
        )
        light = cv2.resize(view, (self.size, self.size), interpolation=cv2.INTER_AREA)
        return np.asarray(cv2.GaussianBlur(light, (0, 0), self.blur) * self.gain, np.float32)

    def develop(self, light: Field, rng: Generator) -> NDArray[np.uint8]:
        """Sensor noise, tone curve and 8 bits: linear light (H, W, 3) to RGB (H, W, 3)."""
        # A colour sensor interpolates two thirds of its values, which softens the grain.
        noise = cv2.GaussianBlur(white(rng, light.shape), (0, 0), 0.55)
        shot = np.sqrt(light + 0.02) * (1.7 * self.grain)
        return np.asarray(_display(light + shot * noise) * 255 + 0.5, np.uint8)


def _display(light: Field) -> Field:
    """Tone curve from linear light to display brightness, 0 to 1, with a soft shoulder."""
    light = np.maximum(light, 0)
    rolled = light * (1 + light * 0.16) / (1 + light * 0.42)
    return np.asarray(np.minimum(rolled, 1) ** (1 / 2.2), np.float32)


def visible_change(before: Field, after: Field) -> NDArray[np.uint8]:
    """Mask of what a person sees to have changed between two exposures.

    Args:
        before: (H, W, 3) linear light of the good part.
        after: (H, W, 3) linear light of the same part with its defect.

    Returns:
        (H, W) uint8, 255 on the defect and 0 elsewhere.
    """
    change = np.abs(_display(after) - _display(before)).max(axis=2)
    change = cv2.GaussianBlur(change, (0, 0), 1.0)
    # The flanks of a strong change are not part of it; a faint defect is still a defect.
    peak = float(change.max())
    bar = min(max(_VISIBLE, 0.12 * peak), 0.4 * peak)
    mask = np.asarray(change > bar, np.uint8) * np.uint8(255)
    # One defect is one region, though it may shine through the brushing in bits.
    gap = round(change.shape[0] / 28) | 1
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (gap, gap))
    padded = cv2.copyMakeBorder(mask, gap, gap, gap, gap, cv2.BORDER_CONSTANT, value=0)
    closed = cv2.morphologyEx(padded, cv2.MORPH_CLOSE, disc)[gap:-gap, gap:-gap]
    outlines, _ = cv2.findContours(closed, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    areas = [cv2.contourArea(outline) for outline in outlines]
    kept = [o for o, area in zip(outlines, areas, strict=True) if area >= 0.02 * max(areas)]
    cv2.drawContours(solid := np.zeros_like(mask), kept, -1, 255, cv2.FILLED)
    return solid
