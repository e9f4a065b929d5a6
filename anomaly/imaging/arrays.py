"""Images from a Python program -> a path, or an `Image`. Imports no torch, no PIL.

Arrays, PIL images and tensors become the same `Image` that a file is decoded into, so that the
pixels of a lossless file and the file itself score the same, bit by bit.

A model that torch computes has tensors, an exported one has arrays. Code for the scores of both is
written once: `module_of(values)` is the module whose functions it calls.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from anomaly.errors import DataError, ImageError
from anomaly.imaging.formats import Pixels, grey_to_rgb, over_black, unsupported
from anomaly.imaging.loading import UnusableImage
from anomaly.imaging.read import Decoding, Image, check_range, described, is_out_of_memory


class PilImage(Protocol):
    """A PIL image, for type checkers; PIL needn't be installed."""

    def getexif(self) -> Any:
        """EXIF data of its file."""


class TorchTensor(Protocol):
    """A torch tensor, for type checkers; torch needn't be imported."""

    def detach(self) -> Any:
        """The same values, outside the gradient's graph."""


ImageLike: TypeAlias = (
    "str | os.PathLike[str] | NDArray[Any] | PilImage | TorchTensor | Image | ArrayImage"
)
"""A path, or pixels: an array, a PIL image, a torch tensor, an `image` or a decoded file."""

Array: TypeAlias = Any  # a torch.Tensor or an np.ndarray
Channels: TypeAlias = Literal["rgb", "bgr"]
AxisOrder: TypeAlias = Literal["HW", "HWC", "CHW"]
_AXES = {None: (2, 3), "HW": (2,), "HWC": (3,), "CHW": (3,)}

# Modes of PIL images of 8 bits a sample, and of more.
_PIL_8_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
_PIL_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "F")


@dataclass(frozen=True, eq=False)
class ArrayImage:
    """Pixels in memory with the meaning of their numbers; its public name is `image`.

    Args:
        pixels: an array (H, W) or (H, W, 3) of uint8, uint16 or floats, a PIL image or a tensor.
        channels: order of the three colours: `rgb`, or `bgr` as from OpenCV. NumPy arrays have to
            state it; tensors are RGB by default, PIL images and files always.
        full_scale: the value that means white; floats have to state it. By default the highest
            value of the type, or of the model's `image.bit_depth` if that is lower.
        layout: the axes, `HW`, `HWC` or `CHW`; tensors have to state them. By default (H, W) or
            (H, W, 3).

    Raises:
        DataError: `channels`, `full_scale` or `layout` isn't a legal value.
    """

    pixels: NDArray[Any] | PilImage | TorchTensor | Image
    _: KW_ONLY
    channels: Channels | None = None
    full_scale: float | None = None
    layout: AxisOrder | None = None

    def __post_init__(self) -> None:
        # A message names all but None, which comes first.
        choices = {"channels": (None, "rgb", "bgr"), "layout": (*_AXES,)}
        for name, legal in choices.items():
            if (value := getattr(self, name)) not in legal:
                raise DataError(f"{name} is {value!r}; it must be one of {legal[1:]}")
        if self.full_scale is not None and not 0 < self.full_scale < float("inf"):
            raise DataError(f"full_scale is {self.full_scale!r}; it must be a number above 0")

    def decoded(self, decoding: Decoding) -> Image:
        """A copy of the pixels as an image: a camera may use its buffer again.

        Size and kind are checked before the pixels are read. An `Image` is returned uncopied.

        Args:
            decoding: limits and bit depth, as for files.

        Raises:
            ImageError: the pixels can't be used as an image; says why.
        """
        values: Any = self.pixels
        channels = self.channels
        if isinstance(values, Image):
            decoding.check_size(values.size)
            return values
        if _is(values, "PIL.Image", "Image"):
            decoding.check_size((values.height, values.width))
            channels, values = "rgb", _from_pil(values)
        else:
            is_tensor = _is(values, "torch", "Tensor")
            if not is_tensor and not isinstance(values, np.ndarray):
                raise unsupported(
                    f"{type(values).__name__} can't be used as an image; give a path, a NumPy "
                    "array (H, W) or (H, W, 3), a PIL image or a torch tensor"
                )
            if is_tensor and self.layout is None:
                raise unsupported(
                    "a tensor doesn't say which axis is which: give "
                    "anomaly.image(tensor, layout='CHW'), 'HWC' or 'HW'"
                )
            decoding.check_size(self._size(tuple(values.shape)))
            if is_tensor:
                channels, values = channels or "rgb", _from_torch(values)
            if self.layout == "CHW":
                values = values.transpose(1, 2, 0)
        full_scale = self._full_scale(values.dtype, decoding)
        pixels = _rgb(values, channels)
        check_range(pixels, full_scale)
        digest = hashlib.sha256(f"{pixels.shape} {pixels.dtype} {full_scale}".encode())
        digest.update(pixels.data)
        mode = f"rgb{'float' if pixels.dtype.kind == 'f' else ''}{8 * pixels.itemsize}"
        return Image(pixels, full_scale, mode, digest.hexdigest())

    def _size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """(H, W) of an array of this shape.

        Raises:
            ImageError: an array of this shape isn't one image.
        """
        sides = " × ".join(map(str, shape)) or "no axes"
        if self.layout == "CHW":
            shape = (*shape[1:], *shape[:1])
        if shape[2:] not in ((), (1,), (3,)) or len(shape) not in _AXES[self.layout]:
            named = f"layout {self.layout!r}" if self.layout else "(H, W), (H, W, 1) or (H, W, 3)"
            raise unsupported(
                f"its shape {sides} isn't an image of {named}; for (3, H, W) give "
                "anomaly.image(array, layout='CHW'), and leave out alpha: image[..., :3]"
            )
        return shape[0], shape[1]

    def _full_scale(self, dtype: np.dtype[Any], decoding: Decoding) -> float:
        """The value that means white.

        Raises:
            ImageError: images don't have such numbers, or floats don't state their white.
        """
        if dtype.kind != "f" and not (dtype.kind == "u" and dtype.itemsize <= 2):
            raise unsupported(
                f"its values are {dtype}; an image has uint8, uint16 or floats (convert it with "
                "image.astype(np.uint8) if its values run from 0 to 255)"
            )
        if self.full_scale is not None:
            return float(self.full_scale)
        if dtype.kind == "f":
            raise unsupported(
                "its values are floats, so the value of white must be given: "
                "anomaly.image(array, full_scale=1.0) for values from 0 to 1, 255 for 0 to 255"
            )
        return decoding.full_scale(float(np.iinfo(dtype).max))


image = ArrayImage


def source_of(pixels: ImageLike, decoding: Decoding, index: int | None = None) -> Path | Image:
    """The file's path, or the pixels as a decoded `Image`.

    Args:
        pixels: a path, or pixels in memory.
        decoding: limits and bit depth, as for files.
        index: place in the list of images, for messages; None for a single image.

    Raises:
        ImageError: the pixels can't be used as an image; says why, and which if `index` is given.
    """
    if isinstance(pixels, str | os.PathLike):
        return Path(pixels)
    try:
        stated = pixels if isinstance(pixels, ArrayImage) else ArrayImage(pixels)
        return stated.decoded(decoding)
    except Exception as error:
        if is_out_of_memory(error):
            error = unsupported("there isn't enough memory for a copy of it")
        if index is not None and isinstance(error, ImageError):
            error = ImageError(f"{described(index)}: {error}", error.status)
        raise error from None


def sources(
    images: Iterable[ImageLike], decoding: Decoding
) -> Iterator[tuple[int, Path | Image | UnusableImage]]:
    """Index of each image, and its file, its pixels, or the reason why it can't be used."""
    for index, image in enumerate(images):
        try:
            yield index, source_of(image, decoding, index)
        except ImageError as error:
            yield index, UnusableImage(index, error.status, str(error))


def is_one(images: Any) -> TypeGuard[ImageLike]:
    """True for a single image; False for a collection of images."""
    if isinstance(images, np.ndarray) or _is(images, "torch", "Tensor"):
        return len(images.shape) < 4  # (N, H, W, 3) is N images
    # Bytes, an open file and another library's array are no collections either; `decoded` refuses
    # them as images.
    single = str, os.PathLike, Image, ArrayImage, bytes, bytearray, memoryview, io.IOBase
    array = hasattr(images, "__array__")
    return isinstance(images, single) or array or not isinstance(images, Iterable)


def _is(value: Any, module: str, name: str) -> bool:
    """True if a value is of a library's class; doesn't import the library."""
    return isinstance(value, getattr(sys.modules.get(module), name, ()))


def _rgb(values: NDArray[Any], channels: Channels | None) -> Pixels:
    """A copy (H, W, 3) RGB of values (H, W), (H, W, 1) or (H, W, 3); floats become float32.

    Raises:
        ImageError: the order of three colours isn't stated.
    """
    dtype = np.float32 if values.dtype.kind == "f" else values.dtype.newbyteorder("=")
    if values.ndim == 2 or values.shape[2] == 1:
        return grey_to_rgb(np.ascontiguousarray(values.reshape(values.shape[:2]), dtype))
    if channels is None:
        raise unsupported(
            "an array doesn't say in which order its three colours are: give "
            "anomaly.image(array, channels='bgr') for OpenCV's pictures, else channels='rgb'"
        )
    return np.array(values[..., ::-1] if channels == "bgr" else values, dtype, order="C")


def _from_torch(tensor: Any) -> NDArray[Any]:
    """Values of a dense tensor, from whichever device; floats that NumPy lacks become float32."""
    try:
        try:
            return as_numpy(tensor)
        except TypeError:  # NumPy has no bfloat16
            return as_numpy(tensor.float())
    except (TypeError, RuntimeError):  # without values, sparse, quantised
        kind = f"{tensor.dtype} on {tensor.device}, {tensor.layout}"
        raise unsupported(
            f"a tensor of this kind ({kind}) can't be used as an image; give a dense one of uint8, "
            "uint16 or floats"
        ) from None


def _from_pil(image: Any) -> NDArray[Any]:
    """Values (H, W) or (H, W, 3) of an upright copy of a PIL image; alpha over black."""
    if image.mode not in (*_PIL_8_BIT, *_PIL_DEEP):
        raise unsupported(f"a PIL image of mode {image.mode}; convert it: image.convert('RGB')")
    try:
        image = import_module("PIL.ImageOps").exif_transpose(image)
        if image.mode in _PIL_8_BIT:
            has_alpha = image.mode.endswith(("A", "P")) or "transparency" in image.info
            image = image.convert("RGBA" if has_alpha else "RGB")
        values = np.asarray(image)
    except Exception as error:  # PIL's readers have many ways to fail
        if is_out_of_memory(error):
            raise
        raise ImageError(f"PIL can't read it ({' '.join(str(error).split())})") from None
    return over_black(values[..., :3], values[..., 3]) if image.mode == "RGBA" else values


def module_of(values: Array) -> Any:
    """`numpy` for an array, `torch` for a tensor."""
    return np if isinstance(values, np.ndarray) else import_module("torch")


def like(values: NDArray[Any], other: Array) -> Array:
    """An array as it is, or as a tensor of its dtype on the device of `other`, if that is one."""
    if isinstance(other, np.ndarray):
        return values
    return import_module("torch").from_numpy(values).to(other.device)


def as_numpy(values: Array) -> NDArray[Any]:
    """Values of a tensor, from whichever device, as an array; an array itself."""
    return cast(
        NDArray[Any], values if isinstance(values, np.ndarray) else values.numpy(force=True)
    )


def as_float32(values: Array) -> Array:
    """Values of an array or a tensor in float32."""
    return values.astype(np.float32) if isinstance(values, np.ndarray) else values.float()
