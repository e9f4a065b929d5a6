"""Poses of parts in images: the way to the part's coordinates, and back. Imports no torch.

The reference is a picture of the part, made of the training images. Turned in steps of 5°, it is
correlated with a small grey picture of the image; the best candidates are refined by Gauss-Newton
steps on the correlation (the inverse compositional form of ECC, Evangelidis and Psarakis 2008); the
highest correlation wins. Brightness and contrast of the whole image change no correlation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.errors import DataError
from anomaly.imaging.read import Image, aspect_error

Grey = NDArray[np.float32]

# Sides of squares with the area of the pictures that are compared, in pixels.
_SIDE, _COARSE = 128, 64
_STEP = math.radians(5)  # between the turns of the reference that are tried
_CANDIDATES = 3  # turns that are refined
# Most Gauss-Newton steps for each candidate and for the best one; a step below so many pixels is
# the last.
_FIRST_STEPS, _STEPS, _CONVERGED = 6, 20, 0.02
_ASPECT = 0.02  # share by which an image's aspect may differ from the training images'
# A turn beyond the usual range has to correlate better by the preference: round parts look alike in
# any turn.
_USUAL, _PREFERENCE = math.radians(15), 0.05
_APART = 1 / 8  # share of a side; a place that is farther away is another place than the pose
_ROUNDS = 3  # in each, the reference becomes the mean of the aligned training images
_LEAST_IMAGES = 8  # fewer don't show how far parts move
# 95 % of training images correlate with the reference by at least the first (screws 0.95,
# transistors 0.89, castings 0.69; but cells 0.41, fabric 0.04), and at another place by at most the
# second share of that (castings 0.69, hazelnuts 0.80, screws 0.84; but drawn fabric 0.95, tile
# 0.98). Where they don't, the images show a surface, which has no pose.
_LEAST_CORRELATION, _ELSEWHERE = 0.55, 0.9
_WORSE = 0.8  # share of the training images' correlation that is enough for a pose
# Expected motions go beyond the training images' by this share of their range, and at least by so
# many radians and shares of width and height.
_MARGIN, _LEAST_MARGIN = 0.25, (math.radians(2), 0.02, 0.02)


class Motion(NamedTuple):
    """A turn about a picture's middle, then a shift: from the part's coordinates to the image's.

    Attributes:
        turn: in radians, clockwise.
        x: in pixels, to the right.
        y: in pixels, down.
    """

    turn: float
    x: float
    y: float

    def after(self, first: Motion) -> Motion:
        """The motion `first` followed by this one, as one motion."""
        cos, sin = math.cos(self.turn), math.sin(self.turn)
        x, y = cos * first.x - sin * first.y, sin * first.x + cos * first.y
        return Motion(wrapped(self.turn + first.turn), x + self.x, y + self.y)

    def inverse(self) -> Motion:
        """The motion that undoes this one."""
        return Motion(-self.turn, 0.0, 0.0).after(Motion(0.0, -self.x, -self.y))

    def matrix(self, size: tuple[int, int]) -> NDArray[np.float64]:
        """OpenCV's matrix (2, 3) of the motion for pixel indices (x, y) in pictures (H, W)."""
        cos, sin = math.cos(self.turn), math.sin(self.turn)
        x, y = (size[1] - 1) / 2, (size[0] - 1) / 2
        turned = np.array([[cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y]])
        turned[:, 2] += self.x, self.y
        return turned


@dataclass(frozen=True)
class Pose:
    """Pose of a part in an image.

    Attributes:
        motion: motion from the part's coordinates to the image's, in original pixels.
        size: (H0, W0) of the image.
        reason: reason for review whatever the image's score; empty for a trusted pose.
    """

    motion: Motion
    size: tuple[int, int]
    reason: str = ""

    def to_part(self, pixels: NDArray[Any], rows: slice, columns: slice) -> NDArray[Any]:
        """Rows and columns of an image (H0, W0, 3) that is moved into the part's coordinates.

        Places outside the image get the value of the image's border.
        """
        return cut(pixels, self.motion, rows, columns, cv2.INTER_CUBIC, cv2.BORDER_REPLICATE)

    def shrunk(self, size: tuple[int, int]) -> Pose:
        """Pose of the same part in the image shrunk to (H, W)."""
        height, width = (new / old for new, old in zip(size, self.size, strict=True))
        turn, x, y = self.motion
        return replace(self, motion=Motion(turn, x * width, y * height), size=size)

    def in_image(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Image coordinates (x, y) of points (…, 2) in the part's coordinates."""
        return self._moved_points(self.motion, points)

    def in_part(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """The part's coordinates (x, y) of points (…, 2) in image coordinates."""
        return self._moved_points(self.motion.inverse(), points)

    def _moved_points(self, motion: Motion, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Points (…, 2) moved; (x, y) in pixels from the image's upper left corner."""
        matrix = motion.matrix(self.size)
        # The matrix takes pixel indices; the centre of pixel 0 lies at 0.5.
        return np.asarray((points - 0.5) @ matrix[:, :2].T + matrix[:, 2] + 0.5)

    def to_image(self, values: NDArray[np.float32], strip: slice) -> NDArray[np.float32]:
        """Values (H0, W0) moved from the part's coordinates to a strip of rows of the image.

        Args:
            values: values in the part's coordinates; NaN for unknown ones.
            strip: the rows.

        Returns:
            (rows, W0); NaN outside the part's picture and where most of the value is unknown.
        """
        # Each value is a mean of the known values around its place, weighted by interpolation.
        known = np.isfinite(values).astype(np.float32)
        rows = slice(*strip.indices(self.size[0])[:2])
        weighted, weights = (
            cut(v, self.motion.inverse(), rows, slice(0, self.size[1]))
            for v in (np.where(known > 0, values, 0), known)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(weights >= 0.5, weighted / weights, np.nan).astype(np.float32)


def cut(
    values: NDArray[Any],
    motion: Motion,
    rows: slice,
    columns: slice,
    interpolation: int = cv2.INTER_LINEAR,
    border: int = cv2.BORDER_CONSTANT,
) -> NDArray[Any]:
    """Rows and columns of a picture (H, W, …) that is moved by the inverse of a motion.

    Args:
        values: the picture.
        motion: motion from the result's coordinates to the picture's.
        rows: rows of the result; may lie outside the picture, as may columns.
        columns: columns of the result.
        interpolation: OpenCV's number.
        border: OpenCV's rule for places outside the picture.
    """
    matrix = motion.matrix(values.shape[:2])
    matrix[:, 2] += matrix[:, :2] @ (columns.start, rows.start)
    size = columns.stop - columns.start, rows.stop - rows.start
    flags = interpolation | cv2.WARP_INVERSE_MAP
    return np.asarray(cv2.warpAffine(values, matrix, size, flags=flags, borderMode=border))


def wrapped(turn: float) -> float:
    """The same turn between -π and π, in radians."""
    return math.remainder(turn, math.tau)


def grey_picture(image: Image) -> Grey:
    """A small grey picture (h, w) of an image, in [0, 1]; (h, w) follows from its aspect."""
    height, width = _sides(image.size[0] / image.size[1], _SIDE)
    small = cv2.resize(image.pixels, (width, height), interpolation=cv2.INTER_AREA)
    return np.asarray(small.mean(axis=2) / image.full_scale, np.float32)


def _sides(aspect: float, side: int) -> tuple[int, int]:
    """Sides (h, w), at least 8, close to the aspect H/W and to the area of a square of `side`."""
    middle = side * math.sqrt(aspect)  # the height with just that area
    heights = range(max(8, math.floor(0.95 * middle)), max(9, math.ceil(1.05 * middle)))
    sizes = [(height, max(8, round(height / aspect))) for height in heights]
    return min(sizes, key=lambda size: (aspect_error(size, aspect), abs(size[0] - middle)))


# Range of expected motions until training images narrow it.
_LOWEST, _HIGHEST = Motion(-_USUAL, -math.inf, -math.inf), Motion(_USUAL, math.inf, math.inf)


@dataclass(frozen=True, eq=False)
class Reference:
    """Picture of the part, and the range of its poses in the training images.

    Attributes:
        picture: grey picture (h, w) with mean 0 and norm 1.
        rigid: True if parts turn and shift; False if they only shift.
        least: correlation below which a pose counts as not found.
        lowest: lowest expected motion: radians, and shares of width and height.
        highest: highest expected motion, in the same units.
    """

    picture: Grey
    rigid: bool
    least: float = 0.0
    lowest: Motion = _LOWEST
    highest: Motion = _HIGHEST

    def pose(self, image: Image) -> Pose:
        """Pose of the part in an image.

        Raises:
            DataError: the image has another aspect than the training images.
        """
        height, width = self.picture.shape
        if aspect_error(image.size, height / width) > _ASPECT:
            raise DataError(
                f"its {image.size[1]}×{image.size[0]} pixels have another shape than the training "
                "images, so the part's pose can't be compared; crop it to their shape, or train "
                "with image.align=none"
            )
        small = cv2.resize(grey_picture(image), (width, height), interpolation=cv2.INTER_AREA)
        motion, correlation = self.find(np.asarray(small, np.float32))
        share = Motion(motion.turn, motion.x / width, motion.y / height)
        in_pixels = Motion(motion.turn, share.x * image.size[1], share.y * image.size[0])
        return Pose(in_pixels, image.size, self._doubt(share, correlation))

    def find(self, grey: Grey) -> tuple[Motion, float]:
        """The part's motion in a grey picture of the reference's size, and its correlation."""
        refined = [self._refined(grey, start, _FIRST_STEPS) for start in self._starts(grey)]
        best = max(refined, key=lambda fit: fit[1] - self._penalty(fit[0].turn))[0]
        return self._refined(grey, best, _STEPS)

    def _penalty(self, turn: float) -> float:
        """Correlation taken off a turn outside the expected range."""
        return 0.0 if self.lowest.turn <= turn <= self.highest.turn else _PREFERENCE

    def _starts(self, grey: Grey) -> list[Motion]:
        """Motions to refine: the best turns, far from one another, each at its best shift."""
        # Products of spectra give the correlation (turns, rows, columns) at every shift.
        rows, columns = self._coarse_size
        (height, width), turns = grey.shape, self._turns
        spectrum = np.fft.rfft2(_reduced(grey, (rows, columns)))
        fits = np.fft.irfft2(self._spectra * spectrum.astype(np.complex64), s=(rows, columns))
        fits = fits.reshape(len(turns), -1)
        values = fits.max(axis=1) - [self._penalty(turn) for turn in turns]
        starts = []
        for _ in range(_CANDIDATES):
            best = int(values.argmax())
            y, x = divmod(int(fits[best].argmax()), columns)
            # The correlation is periodic: a shift beyond half a side is one back.
            y, x = (y + rows // 2) % rows - rows // 2, (x + columns // 2) % columns - columns // 2
            starts.append(Motion(turns[best], x * width / columns, y * height / rows))
            # The candidate and its neighbours, up to four steps away, are out.
            values[[abs(wrapped(turn - turns[best])) < 4.5 * _STEP for turn in turns]] = -np.inf
            if not np.isfinite(values).any():
                break
        return starts

    @cached_property
    def _coarse_size(self) -> tuple[int, int]:
        return _sides(self.picture.shape[0] / self.picture.shape[1], _COARSE)

    @cached_property
    def _turns(self) -> list[float]:
        return [wrapped(i * _STEP) for i in range(72)] if self.rigid else [0.0]

    @cached_property
    def _spectra(self) -> NDArray[np.complex64]:
        """Conjugate spectra (turns, h, w // 2 + 1) of the small reference in each turn."""
        small, size = _reduced(self.picture, self._coarse_size), self._coarse_size
        turned = [
            cv2.warpAffine(small, Motion(turn, 0, 0).matrix(size), size[::-1])
            for turn in self._turns
        ]
        return np.fft.rfft2(np.stack(turned)).conj().astype(np.complex64)

    @cached_property
    def _solver(self) -> Grey:
        """Matrix (2 or 3, h·w): a picture's difference from the reference -> its motion.

        It is the pseudo-inverse of the reference's derivatives by turn (if rigid), x and y.
        """
        x, y = (cv2.Sobel(self.picture, cv2.CV_32F, *d, scale=1 / 8) for d in ((1, 0), (0, 1)))
        rows, columns = np.indices(self.picture.shape) - np.array(
            [(side - 1) / 2 for side in self.picture.shape]
        ).reshape(2, 1, 1)
        slopes = np.stack([y * columns - x * rows, x, y] if self.rigid else [x, y])
        flat, picture = slopes.reshape(len(slopes), -1), self.picture.ravel()
        flat = flat - flat.mean(axis=1, keepdims=True)
        flat = flat - np.outer(flat @ picture, picture)  # a change of contrast isn't a motion
        return np.asarray(np.linalg.pinv((flat @ flat.T).astype(np.float64)) @ flat, np.float32)

    def _refined(self, grey: Grey, motion: Motion, steps: int) -> tuple[Motion, float]:
        """A motion refined by at most `steps` Gauss-Newton steps, and its correlation."""
        for _ in range(steps):
            *turn, x, y = (self._solver @ (_moved(grey, motion) - self.picture).ravel()).tolist()
            step = Motion(turn[0] if turn else 0.0, x, y)
            motion = motion.after(step.inverse())
            # A turn counts by the path of a point on the picture's edge.
            if abs(step.turn) * self.picture.shape[0] / 2 + abs(x) + abs(y) < _CONVERGED:
                break
        return motion, float(np.vdot(_moved(grey, motion), self.picture))

    def elsewhere(self, grey: Grey, motion: Motion) -> float:
        """Best correlation at another place than the part's, as a share of that at its place.

        Args:
            grey: grey picture of the reference's size.
            motion: the part's motion in the picture, by `find`.
        """
        spectrum = np.fft.rfft2(_moved(grey, motion))
        fits = np.fft.irfft2(np.fft.rfft2(self.picture).conj() * spectrum, s=grey.shape)
        rows, columns = (np.abs(np.fft.fftfreq(side)) >= _APART for side in grey.shape)
        return float(fits[rows[:, None] | columns].max() / max(fits[0, 0], 1e-6))

    def _doubt(self, share: Motion, correlation: float) -> str:
        """Reason not to trust a pose, for a person; empty for a trusted one.

        `share` is its motion, in radians and shares of width and height.
        """
        if correlation < self.least:
            return (
                "the part's pose can't be found: it matches the training images by "
                f"{correlation:.2f}, but at least {self.least:.2f} is needed (another product, or "
                "a part covered or out of view?)"
            )
        bounds = zip(_AXES, share, self.lowest, self.highest, strict=True)
        for (phrase, unit, scale), value, low, high in bounds:
            if not low <= value <= high:
                return (
                    f"the part is {phrase.format(f'{scale * value:+.3g}{unit}')}; the training "
                    f"images allow {scale * low:+.3g}{unit} to {scale * high:+.3g}{unit}"
                )
        return ""

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Arrays to save, by name; all fields but `rigid`, which is a setting."""
        bounds = np.array([self.lowest, self.highest])
        return {"picture": self.picture, "least": np.array(self.least), "bounds": bounds}

    @classmethod
    def from_tensors(cls, tensors: dict[str, NDArray[Any]], *, rigid: bool) -> Reference:
        """The reference whose arrays were saved."""
        lowest, highest = (Motion(*row) for row in tensors["bounds"].tolist())
        return cls(tensors["picture"], rigid, float(tensors["least"]), lowest, highest)


# Of turn, x and y: phrase, unit and factor to the unit, for messages.
_AXES = (
    ("turned by {}", "°", math.degrees(1)),
    ("shifted by {} of the image's width", " %", 100.0),
    ("shifted by {} of the image's height", " %", 100.0),
)


def _moved(grey: Grey, motion: Motion) -> Grey:
    """A grey picture moved into the part's coordinates, with mean 0 and norm 1."""
    rows, columns = (slice(0, side) for side in grey.shape)
    return _normed(cut(grey, motion, rows, columns, border=cv2.BORDER_REPLICATE))


def _normed(picture: Grey) -> Grey:
    centred = picture - picture.mean()
    return np.asarray(centred / (np.linalg.norm(centred) + 1e-6), np.float32)


def _reduced(grey: Grey, size: tuple[int, int]) -> Grey:
    """A picture reduced to (h, w), with mean 0 and norm 1."""
    small = cv2.resize(grey, size[::-1], interpolation=cv2.INTER_AREA)
    border = np.concatenate([small[0], small[-1], small[:, 0], small[:, -1]])
    # The mean goes anyway; the median changes last digits, which choose among turns of round parts.
    return _normed(small - np.median(border))


def learn(pictures: Sequence[Grey], *, rigid: bool) -> tuple[Reference, int]:
    """Reference for poses in further images, made of training images.

    Args:
        pictures: grey pictures (h, w) of training images, by `grey_picture`; a picture of another
            shape than most counts as one that doesn't match.
        rigid: True if parts turn and shift; False if they only shift.

    Returns:
        The reference, and the index of the image in whose coordinates all parts are seen.

    Raises:
        DataError: there are no images, or they show no part that can be aligned.
    """
    shapes = [picture.shape for picture in pictures]
    if not shapes:
        raise DataError("image.align: none of the training images can be used")
    shape = max(shapes, key=shapes.count)
    usable = [i for i, picture in enumerate(pictures) if picture.shape == shape]
    greys = [pictures[i] for i in usable]
    reference, middle = Reference(_normed(greys[0]), rigid), 0
    for _ in range(_ROUNDS):
        motions, fits = _motions(reference, greys)
        middle = _middle(motions, fits, shape)
        back = motions[middle].inverse()
        # Images that match badly would blur the mean.
        alike = np.flatnonzero(fits >= np.median(fits) - 2 * _PREFERENCE)
        mean = np.mean([_moved(greys[i], motions[i].after(back)) for i in alike], axis=0)
        reference = Reference(_normed(mean), rigid)
    motions, fits = _motions(reference, greys)
    typical = float(np.quantile([*fits, *[0.0] * (len(shapes) - len(greys))], 0.05))
    elsewhere = np.quantile(list(map(reference.elsewhere, greys, motions)), 0.95)
    if typical < _LEAST_CORRELATION or elsewhere > _ELSEWHERE:
        reason = f"match by {typical:.2f}, but {_LEAST_CORRELATION:.2f} is needed"
        if typical >= _LEAST_CORRELATION:
            reason = "match nearly as well when they are shifted"
        raise DataError(
            "image.align: there is no part to align, as in images of a surface: the training "
            f"images {reason}; train with image.align=none"
        )
    least = _WORSE * typical
    shares = np.array(motions) / (1, shape[1], shape[0])
    lowest, highest = _bounds(shares[fits >= least])
    return replace(reference, least=least, lowest=lowest, highest=highest), usable[middle]


def _motions(
    reference: Reference, greys: Sequence[Grey]
) -> tuple[list[Motion], NDArray[np.float64]]:
    """The part's motions in N grey pictures, and the correlations (N,)."""
    motions, fits = zip(*map(reference.find, greys), strict=True)
    return list(motions), np.array(fits)


def _middle(motions: Sequence[Motion], fits: NDArray[np.float64], shape: tuple[int, ...]) -> int:
    """Index of the image with the pose nearest to the mean, of the half that correlates best."""
    turns = np.exp(1j * np.array([motion.turn for motion in motions]))
    shifts = np.array([complex(motion.x, motion.y) for motion in motions])
    # The point of the reference that lies nearest to the middles of the pictures, on average.
    centre = -np.mean(shifts / turns)
    away = np.abs(turns * centre + shifts)
    if abs(turns.mean()) > 0.9:  # else the parts lie in all directions, and there is no mean turn
        away += np.abs(np.angle(turns / turns.mean())) * min(shape) / 2
    return int(np.argmin(np.where(fits >= np.median(fits), away, np.inf)))


def _bounds(motions: NDArray[np.float64]) -> tuple[Motion, Motion]:
    """Lowest and highest expected motions: those of the training images, and a margin.

    Fewer than `_LEAST_IMAGES` set no bounds, and turns over a range of π set none for the turn.

    Args:
        motions: motions (N, 3) of training images: radians, and shares of width and height.
    """
    low, high = motions.min(axis=0), motions.max(axis=0)
    margin = np.maximum(_MARGIN * (high - low), _LEAST_MARGIN)
    low, high = low - margin, high + margin
    if len(motions) < _LEAST_IMAGES:
        low[:], high[:] = -math.inf, math.inf
    elif high[0] - low[0] > math.pi:  # parts lie in any direction
        low[0], high[0] = -math.inf, math.inf
    return Motion(*low), Motion(*high)
