"""Image files -> RGB arrays, or errors that say why not; lists of the image files in folders.

The only place where files are decoded, for training, scoring and evaluation alike. A pixel value
means the same in all images of a kind:

- Full scale is the full range of the file's declared depth: 255, 65535, 1.0 for floats.
  Values are never clipped, and never stretched to the range of the single image.
- Cameras often put 10, 12 or 14 bits into a 16-bit file, which can't state them. With `bit_depth`,
  full scale becomes 2**bit_depth - 1. It only narrows the range: from 8 on, 8-bit files keep it.
- A pixel above full scale, a negative one or one that isn't a number makes the image
  `unsupported`: the stated depth is wrong.

Alpha is composited over black, and EXIF orientation is applied. Colour profiles are not.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import resource
import signal
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.errors import DataError, ImageError, some, why
from anomaly.files.writing import is_model, left_by_system, own_outputs
from anomaly.imaging.formats import FORMATS, Format, ImageHeader, Pixels, damaged, unsupported

log = logging.getLogger(__name__)

# Files of these kinds are listed as images, too: each gets a row that says why it can't be read.
_UNREADABLE = (".gif", ".heic", ".heif", ".avif", ".jp2", ".j2k", ".jxl", ".psd", ".exr", ".tga")
IMAGE_SUFFIXES = frozenset(_UNREADABLE).union(*(kind.suffixes for kind in FORMATS))

_READABLE = ", ".join(kind.name for kind in FORMATS[:-1]) + f" or {FORMATS[-1].name}"

MAX_PIXELS = 250_000_000
# Longest file: 16 bits for each of four samples of a pixel, and metadata.
_BYTES_A_PIXEL = 8
_BYTES_OF_METADATA = 64 * 1024**2

# Limits of a decoding process: so many pixels take it 4 s of computing and 0.7 GB at most.
MODEST_PIXELS = 25_000_000
COMPUTING_SECONDS = 9.0
MEMORY_SETTING = "ANOMALY_DECODER_MEMORY"


@dataclass(frozen=True)
class Decoding:
    """Decoding of files: limits and depth.

    Attributes:
        max_pixels: images of more pixels are refused before they are decoded, and files far too
            long for so many before they are read.
        bit_depth: significant bits of files that can't say so themselves, such as 12-bit camera
            data in a 16-bit file; None takes the full range of each file's type.
    """

    max_pixels: int = MAX_PIXELS
    bit_depth: int | None = None

    def full_scale(self, stored: float) -> float:
        """The value that means white; `stored` is the highest value of the type or file."""
        return stored if self.bit_depth is None else min(stored, 2.0**self.bit_depth - 1)

    def check_size(self, size: tuple[int, int]) -> None:
        """Refuse an image (H0, W0) without pixels, or of more than `max_pixels`.

        Raises:
            ImageError: `unsupported`.
        """
        height, width = size
        if not (height and width):
            raise unsupported(f"it has no pixels ({width} × {height})")
        if height * width > self.max_pixels:
            raise unsupported(
                f"it has {width} × {height} = {height * width / 1e6:.1f} million pixels, more than "
                f"image.max_pixels allows ({self.max_pixels / 1e6:.1f} million)"
            )

    def unstated_bits(self, brightest: Iterable[float | None]) -> int | None:
        """Bits of camera data in 16-bit files that use less than a quarter of their range.

        Args:
            brightest: the highest value of each 16-bit image as a share of full scale; None for
                other images.

        Returns:
            The bits; None where more is used, all are black, or `bit_depth` is stated.
        """
        highest = max((value for value in brightest if value is not None), default=0.0)
        if self.bit_depth is not None or not 0 < highest < 0.25:
            return None
        return round(highest * 65535).bit_length()


DEFAULT = Decoding()


HEAD_BYTES = 64

# Kinds of file that can't be read, by the pattern of their first bytes.
_OTHER_KINDS = {
    rb"GIF8": "a GIF picture",
    rb"II\+\0|MM\0\+": "a BigTIFF picture",
    rb"8BPS": "a Photoshop picture",
    rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51": "a JPEG 2000 picture",
    rb".{4}ftyp(hei|mif|avi)": "a HEIC or AVIF picture",
    rb".{4}ftyp": "a video",
    rb"%PDF": "a PDF document",
    rb"[^\0-\x08\x0e-\x1f]+\Z": "a text file",
}


def identify(head: bytes) -> Format:
    """The format of a file by its first `HEAD_BYTES` bytes.

    Raises:
        ImageError: `unsupported` for other known kinds of file, else `unreadable`.
    """
    for format_ in FORMATS:
        if format_.signature.match(head):
            return format_
    if not head:
        raise damaged("it is empty")
    if not any(head):
        raise damaged("it starts with zeros only, as files do whose writing was interrupted")
    for signature, kind in _OTHER_KINDS.items():
        if re.match(signature, head, re.DOTALL):
            remedy = "; convert it to one of these" if kind.endswith("picture") else ""
            raise unsupported(f"it is {kind}, not a {_READABLE} picture{remedy}")
    raise damaged(f"it isn't a {_READABLE} picture, or its first bytes are damaged")


def suffix_of(file: bytes) -> str:
    """The usual suffix of an image file by its content, without the dot; `damaged` for others."""
    try:
        return identify(file[:HEAD_BYTES]).name.lower()
    except ImageError:
        return "damaged"


@dataclass(frozen=True)
class Image:
    """One decoded image.

    Attributes:
        pixels: (H0, W0, 3) RGB, uint8, uint16 or float32, C-contiguous; upright, at the depth of
            the file.
        full_scale: the pixel value that means 1.0.
        mode: colour kind and bits a sample as stored: "grey8", "rgb16", "palette8", "rgba8",
            "greyfloat32".
        sha256: hex digest of the file's bytes; of the pixels where there is no file.
        orientation: EXIF orientation by which the stored pixels were turned, 1 to 8; 1 is upright.
    """

    pixels: Pixels
    full_scale: float
    mode: str
    sha256: str
    orientation: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """(H0, W0)."""
        return self.pixels.shape[0], self.pixels.shape[1]


def read_image(source: Path | bytes, decoding: Decoding = DEFAULT) -> Image:
    """Read one image; its content says which of the supported formats it has.

    Args:
        source: the file, or its bytes.
        decoding: limits and depth.

    Raises:
        ImageError: its `status` is `unreadable` or `unsupported`; the message names the file,
            where there is one.
    """
    with _naming(source):
        header, data = _read_file(source, decoding.max_pixels)
        decoding.check_size(header.size)
        _allow_time(header.size)
        pixels = header.decode()
        if pixels.shape[:2] != header.stored:
            raise damaged("its pixels are damaged or cut short")
        pixels = turned_upright(pixels, header.orientation)
        full_scale = decoding.full_scale(header.full_scale)
        check_range(pixels, full_scale)
    sha256 = hashlib.sha256(data).hexdigest()
    upright = np.ascontiguousarray(pixels)
    return Image(upright, full_scale, header.mode, sha256, header.orientation)


def derive(function: Callable[[Image], Any], decoding: Decoding, source: Path | Image) -> Any:
    """Result of a function of an image; None where the image can't be read, or the function fails.

    Decoding processes call it: a function of a module that imports torch has each of them import
    torch, too.
    """
    try:
        return function(source if isinstance(source, Image) else read_image(source, decoding))
    except Exception:  # the step that learns from the image or scores it says why
        return None


def read_header(source: Path | bytes) -> ImageHeader:
    """Header of a file, or of its bytes, without decoding the pixels.

    Raises:
        ImageError: `unreadable` or `unsupported`; damage inside the pixels may go unnoticed.
    """
    with _naming(source):
        return _read_file(source, MAX_PIXELS)[0]


@contextmanager
def _naming(source: Path | bytes) -> Iterator[None]:
    """Name the file, if there is one, in the block's ImageErrors; lack of memory becomes one."""
    name = "" if isinstance(source, bytes) else f"{source}: "
    try:
        yield
    except ImageError as error:
        raise ImageError(f"{name}{error}", error.status) from None
    except (MemoryError, cv2.error) as error:
        if not is_out_of_memory(error):
            raise
        raise ImageError(f"{name}{out_of_memory()}", "unsupported") from None


def read_mask(path: Path) -> NDArray[np.bool_]:
    """Read a mask as (H, W): True where any channel is above 0.

    Raises:
        ImageError: `unreadable` or `unsupported`.
    """
    return np.asarray((read_image(path).pixels > 0).any(axis=2))


def _read_file(source: Path | bytes, max_pixels: int) -> tuple[ImageHeader, bytes]:
    """Header and bytes of a file, which is read once its first bytes and length are an image's."""
    longest = _BYTES_OF_METADATA + _BYTES_A_PIXEL * max_pixels
    try:
        # Opening a pipe would wait for ever.
        if isinstance(source, Path) and not stat.S_ISREG(source.stat().st_mode):
            kind = "a folder" if source.is_dir() else "a device or pipe"
            raise damaged(f"it is {kind}, not a file")
        with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
            format_ = identify(file.read(HEAD_BYTES))
            length = file.seek(0, os.SEEK_END)
            if length > longest:
                raise unsupported(
                    f"its file has {length / 1e6:.1f} MB, more than the {longest / 1e6:.1f} MB "
                    f"that an image of {max_pixels / 1e6:.1f} million pixels needs; if it is an "
                    "image, raise image.max_pixels"
                )
            file.seek(0)
            data = file.read(length)
    except (OSError, ValueError) as error:  # ValueError: a path that holds a null character
        raise damaged(f"it can't be read ({why(error)})") from None
    return format_.read(data), data


def _allow_time(size: tuple[int, int]) -> None:
    """Raise the limit of a decoding process's computing time for a large image (H0, W0).

    Elsewhere, as with a single image in the program's own process, no timer runs.
    """
    more = COMPUTING_SECONDS * (size[0] * size[1] / MODEST_PIXELS - 1)
    if more > 0:
        left, _ = signal.getitimer(signal.ITIMER_PROF)
        if left:
            signal.setitimer(signal.ITIMER_PROF, left + more)


def is_out_of_memory(error: Exception) -> bool:
    """True for an error for want of memory: Python's, numpy's or OpenCV's."""
    no_memory = isinstance(error, cv2.error) and error.code == cv2.Error.StsNoMem
    return no_memory or isinstance(error, MemoryError)


def out_of_memory() -> str:
    """Reason to refuse an image that this process has no memory for, and the remedy."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit != resource.RLIM_INFINITY:
        return (
            f"it takes more than the {limit / 1e9:.1f} GB of memory that a decoding process may "
            f"use; if the file is sound, set the environment variable {MEMORY_SETTING} to more "
            "megabytes"
        )
    return "there isn't enough memory to decode it"


def unstated_bits_warning(bits: int) -> str:
    """Warning that 16-bit files hold so many bits of camera data, with the setting for it."""
    return (
        f"no 16-bit image uses more than {bits} bits, so the network sees them nearly black; if "
        f"the camera has {bits} bits, set image.bit_depth={bits}"
    )


def described(index: int, source: object = None) -> str:
    """Name of an image in messages: its path, or its number where it came from memory."""
    return str(source) if isinstance(source, Path) else f"image {index}"


def check_range(pixels: Pixels, full_scale: float) -> None:
    """Refuse pixels (H, W, 3) that aren't all numbers from 0 to the full scale.

    Raises:
        ImageError: `unsupported`; says what to do.
    """
    is_float = pixels.dtype.kind == "f"
    if not is_float and full_scale >= np.iinfo(pixels.dtype).max:
        return
    lowest, highest = float(pixels.min()), float(pixels.max())  # NaN if any pixel is
    if not np.isfinite((lowest, highest)).all():
        raise unsupported("some of its pixels are not a number or infinite")
    if lowest < 0 or highest > full_scale:
        bits = int(full_scale).bit_length()
        remedy = f"its camera has more than {bits} bits: set image.bit_depth"
        if is_float:
            remedy = "save floats from 0 to 1"
        raise unsupported(
            f"its values run from {lowest:g} to {highest:g}, not from 0 to {full_scale:g}; "
            f"{remedy}, or give an array and its own full_scale"
        )


def turned_upright(pixels: Pixels, orientation: int) -> Pixels:
    """Stored pixels (H, W, 3) turned and mirrored upright by an EXIF orientation, 1 to 8."""
    if orientation in (5, 6, 7, 8):
        pixels = np.asarray(cv2.transpose(pixels))
    # Transposed or not, the picture now lacks only a mirroring of rows, columns or both.
    # OpenCV's codes: 0 flips the rows, 1 the columns, -1 both.
    flip = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}.get(orientation)
    return pixels if flip is None else np.asarray(cv2.flip(pixels, flip))


def aspect_error(size: tuple[int, int], aspect: float) -> float:
    """Share by which one side of (H0, W0) is too long for an aspect H/W: 0.1 for 10 %."""
    ratio = size[0] / size[1] / aspect
    return max(ratio, 1 / ratio) - 1


def list_images(folder: Path) -> list[Path]:
    """Image files in a folder and its subfolders, sorted by path.

    Raises:
        DataError: the folder, or one inside it, can't be listed.
    """
    return [path for path in list_files(folder) if is_image(path)]


def other_files(folder: Path) -> str:
    """Kinds of files in a folder without images, in brackets for a message; empty without files.

    Raises:
        DataError: the folder, or one inside it, can't be listed.
    """
    files = list_files(folder, warn=False) if is_folder(folder) else []
    kinds = Counter(path.suffix.lower() or path.name for path in files)
    if not kinds:
        return ""
    listed = some([f"{count} {kind}" for kind, count in kinds.most_common()])
    return f" (but {listed}, in a format that can't be read; convert them to {_READABLE})"


def is_image(path: Path) -> bool:
    """True if a file is an image by its suffix."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def is_folder(path: Path) -> bool:
    """True if there is a folder of this name.

    Raises:
        DataError: the folder can't be looked at: no permission, or too long a name.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be looked at ({why(error)})") from None


def list_files(folder: Path, *, warn: bool = True) -> list[Path]:
    """Files in a folder and its subfolders, sorted by path.

    Files of the operating system (`left_by_system`) and outputs of this program are skipped. Links
    are followed, except to a folder that the link lies in.

    Args:
        folder: the folder, which may be a link.
        warn: log a warning that names the outputs that are skipped.

    Raises:
        DataError: the folder, or one inside it, can't be listed.
    """
    skipped: list[Path] = []
    files: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        place, entries = Path(root), [*folders, *names]
        if place != folder and is_model(place):
            skipped.append(place)
            folders.clear()
            continue
        outputs = own_outputs(place, entries)
        # Of a run's outputs, only folders and images could be taken for input, so only they are
        # named in the warning.
        skipped += [place / name for name in outputs if name in folders or is_image(place / name)]
        kept = {name for name in entries if not (name in outputs or left_by_system(name))}
        files += [place / name for name in names if name in kept]
        # A link to a folder above would be walked for ever.
        above = {parent.resolve() for parent in (place, *place.parents)}
        kept -= {name for name in folders if (place / name).resolve() in above}
        folders[:] = [name for name in folders if name in kept]
    if skipped and warn:
        listed = some([path.relative_to(folder).as_posix() for path in sorted(skipped)], most=6)
        log.warning("%s: skipped this program's own outputs: %s", folder, listed)
    return sorted(files, key=lambda path: path.parts)


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename} can't be listed ({why(error)})") from None
