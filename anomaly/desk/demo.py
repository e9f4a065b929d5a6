"""The sample set's photographs: the camera over the plate, masks of defects, and the files."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from anomaly.desk import plate
from anomaly.desk.plate import Field, grid, white
from anomaly.errors import ConfigError, OutputError
from anomaly.files.writing import write
from anomaly.runtime import cores
from anomaly.storage.folder import appearing

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
        """Light on the sensor.

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


def severity(index: int) -> float:
    """Clearness of an image's defect: 1 for index 0, then 0, 1/2, 3/4, 1/4, 7/8, 3/8, …

    It depends on nothing but the index, so that a smaller set is a part of a larger one.
    """
    if index < 2:
        return 1.0 - index
    mirrored = int(f"{index - 1:b}"[::-1], 2)
    return 1.0 - float(mirrored / 2 ** (index - 1).bit_length())


def take(
    split: str, kind: str, index: int, size: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """Make one image; it depends on the arguments alone.

    Args:
        split: `train` or `test`.
        kind: `good`, or one of the plate's defects.
        index: number of the image within its folder.
        size: side of the image, in pixels.

    Returns:
        (size, size, 3) uint8 RGB image, and the (size, size) mask of its defect (0 or 255), or
        None for a good part.
    """
    # crc32, not hash(): the same in every process.
    entropy = [0, zlib.crc32(f"brushed_plate/{split}/{kind}".encode()), index]
    of_part, of_defect, of_camera = np.random.default_rng(entropy).spawn(3)
    part = plate.draw(of_part, scene_side(size))
    camera = Camera.set_up(of_camera, size)
    light = camera.expose(plate.shade(part))
    if kind == "good":
        return camera.develop(light, of_camera), None
    faulty = plate.DEFECTS[kind](part, severity(index), of_defect)
    changed = camera.expose(plate.shade(faulty))
    return camera.develop(changed, of_camera), visible_change(light, changed)


_README = """\
brushed_plate: a brushed steel plate with a slot and four socket screws

Every picture in this folder is generated by the program `anomaly` ({size} x {size} pixels).
None is a photograph, and none contains anything made by anybody else.

train/good, test/good   good parts
test/<defect type>      defective parts: {kinds}
ground_truth/<type>     NNN_mask.png for test/<type>/NNN.png: 255 where the defect shows

Within a type, image 000 shows the most obvious defect and 001 the most subtle one.

Licence: CC0 1.0 (https://creativecommons.org/publicdomain/zero/1.0/). Use it as you like.
"""


def write_sample_data(
    folder: Path,
    *,
    size: int = 384,
    n_train: int = 40,
    n_good: int = 20,
    n_defect: int = 30,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Generate the sample data set: brushed steel plates, and their defects.

    The same arguments give the same bytes; a smaller set is a part of a larger one.

    Args:
        folder: where to; it holds `train`, `test` and `ground_truth` then.
        size: side of the images, in pixels, at least 128.
        n_train: good images to train on.
        n_good: good images to test on.
        n_defect: defective images to test on, dealt out evenly to the types of defect.
        overwrite: replace a folder that exists already.
        progress: called with (images done, images in all) after every image.

    Raises:
        ConfigError: a number is out of range.
        OutputError: the folder exists and isn't empty, or writing failed.
    """
    if size < 128:
        raise ConfigError(f"the sample data's size is {size} pixels; it must be 128 or more")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not overwrite):
        raise OutputError(f"{folder} exists; name another folder, or give overwrite=True")
    kinds = tuple(plate.DEFECTS)
    shots = [
        *(("train", "good", i) for i in range(n_train)),
        *(("test", "good", i) for i in range(n_good)),
        *(("test", kinds[i % len(kinds)], i // len(kinds)) for i in range(n_defect)),
    ]
    # The threads end before their draft does, also on an error.
    with appearing(folder) as draft, ThreadPoolExecutor(cores()) as pool:
        write(draft / "readme.txt", _README.format(size=size, kinds=", ".join(kinds)))
        for done, _ in enumerate(pool.map(partial(_write_shot, draft, size), shots), 1):
            if progress:
                progress(done, len(shots))


def _write_shot(folder: Path, size: int, shot: tuple[str, str, int]) -> None:
    split, kind, index = shot
    image, mask = take(split, kind, index, size)
    _write_png(folder / split / kind / f"{index:03d}.png", image[..., ::-1])
    if mask is not None:
        _write_png(folder / "ground_truth" / kind / f"{index:03d}_mask.png", mask)


def _write_png(path: Path, pixels: NDArray[np.uint8]) -> None:
    # Not cv2.imwrite, which reports a full disk only by its return value; and sensor noise doesn't
    # compress, so the quickest way makes files as small.
    _, png = cv2.imencode(".png", pixels, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    write(path, png.tobytes())
