"""The products that can be generated, and how one image of a product is made."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from anomaly.sample_data import (
    brushed_plate,
    brushed_plate_defects,
    woven_fabric,
    woven_fabric_defects,
)
from anomaly.sample_data.camera import Camera, scene_side, visible_change
from anomaly.sample_data.noise import Field

Scene = TypeVar("Scene")


@dataclass(frozen=True)
class Product(Generic[Scene]):
    """A kind of part.

    Attributes:
        title: what it is, for the reader.
        draw: (rng, side) → a good part in a scene of `side` pixels.
        shade: scene → (side, side, 3) linear light, RGB.
        defects: name → (scene, severity from 0 to 1, rng) → the same part with that defect.
    """

    title: str
    draw: Callable[[Generator, int], Scene]
    shade: Callable[[Scene], Field]
    defects: Mapping[str, Callable[[Scene, float, Generator], Scene]]


CATALOGUE: dict[str, Product[Any]] = {
    "brushed_plate": Product(
        title="a brushed steel plate with a slot and four socket screws",
        draw=brushed_plate.draw,
        shade=brushed_plate.shade,
        defects=brushed_plate_defects.DEFECTS,
    ),
    "woven_fabric": Product(
        title="a plain-woven cotton cloth",
        draw=woven_fabric.draw,
        shade=woven_fabric.shade,
        defects=woven_fabric_defects.DEFECTS,
    ),
}


@dataclass(frozen=True)
class Shot:
    """One image to be made.

    Attributes:
        product: name in the catalogue.
        split: `train` or `test`.
        kind: `good`, or one of the product's defects.
        index: number of the image within its folder.
    """

    product: str
    split: str
    kind: str
    index: int

    @property
    def severity(self) -> float:
        """How obvious the defect is: 1 for index 0, then 0, 1/2, 3/4, 1/4, 7/8, 3/8, …

        It depends on nothing but the index, so that a smaller set is a part of a larger one.
        """
        if self.index < 2:
            return 1.0 - self.index
        mirrored = int(f"{self.index - 1:b}"[::-1], 2)
        return 1.0 - float(mirrored / 2 ** (self.index - 1).bit_length())


def take(shot: Shot, seed: int, size: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """Make one image; it depends on the arguments alone.

    Returns:
        (size, size, 3) uint8 RGB image, and the (size, size) mask of its defect (0 or 255), or
        None for a good part.
    """
    product = CATALOGUE[shot.product]
    # crc32, not hash(): the same in every process.
    entropy = [seed, zlib.crc32(f"{shot.product}/{shot.split}/{shot.kind}".encode()), shot.index]
    of_part, of_defect, of_camera = np.random.default_rng(entropy).spawn(3)
    scene = product.draw(of_part, scene_side(size))
    camera = Camera.set_up(of_camera, size)
    light = camera.expose(product.shade(scene))
    if shot.kind == "good":
        return camera.develop(light, of_camera), None
    faulty = product.defects[shot.kind](scene, shot.severity, of_defect)
    changed = camera.expose(product.shade(faulty))
    return camera.develop(changed, of_camera), visible_change(light, changed)
