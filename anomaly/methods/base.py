"""Protocols of a method: patches in, a fitter, an immutable scorer, and the tensors it saves."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import numpy as np

from anomaly.errors import DataError, ModelError
from anomaly.imaging.arrays import Array, module_of
from anomaly.runtime import CPU, Progress

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Result = TypeVar("Result")


@dataclass(frozen=True)
class PatchBatch:
    """The patch embeddings of a few images that share one grid.

    Attributes:
        embeddings: (B, h, w, D) float32.
        images: the B training-image indices.
        corners: row and column of each grid's first patch in its image; None for (0, 0). Tiles have
            others, and so have turned copies (see `anomaly.imaging.loading.turned_corner`).
        inside: (B, h, w) bool, the patches that count; None for all.
    """

    embeddings: Tensor
    images: tuple[int, ...]
    corners: tuple[tuple[int, int], ...] | None = None
    inside: Tensor | None = None

    def counted(self) -> Iterator[Tensor]:
        """The patches (n, D) that count, image by image.

        A sum's or product's rounding depends on its shape. Results that are computed image by image
        don't depend on which images share a batch.
        """
        for i, patches in enumerate(self.embeddings.flatten(1, 2)):
            yield patches if self.inside is None else patches[self.inside[i].flatten()]


class PatchSet(Protocol):
    """The patches of all training images; can be iterated repeatedly, always the same.

    Attributes:
        channels: number D of channels of the embeddings; 0 without images.
    """

    channels: int

    @property
    def count(self) -> int:
        """Number of patches of all images."""
        ...

    def __iter__(self) -> Iterator[PatchBatch]: ...

    def only(self, images: Container[int]) -> PatchSet:
        """The patches of these training images alone."""
        ...

    def projected(self, matrix: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Patches that count, projected by a matrix (D, d), image by image.

        Yields:
            Index of a training image, and points (n, d) float32 of it or of one of its tiles.
            Indices ascend where the whole set is read from files.
        """
        for batch in self:
            on_device = matrix.to(batch.embeddings.device)
            for image, patches in zip(batch.images, batch.counted(), strict=True):
                yield image, patches @ on_device

    def each(self, function: Callable[[PatchSet], Result]) -> Iterator[Result]:
        """Results of a function of the patches, one for each part of the set; here for the whole.

        Args:
            function: takes a part. A cluster pickles it and calls it where each part lies; images
                ascend from part to part.
        """
        yield function(self)


def check_tensors(
    tensors: Mapping[str, Array], wanted: Mapping[str, tuple[object, tuple[int, ...]]]
) -> None:
    """Check names, types, shapes and values of saved tensors.

    Args:
        tensors: tensors or arrays by name.
        wanted: dtype (`float32`, say, or torch's) and shape of each; -1 takes any length but 0.

    Raises:
        ModelError: one is missing, unknown, of another dtype or shape, or holds NaN or infinity.
    """
    if mismatched := sorted(tensors.keys() ^ wanted.keys()):
        raise ModelError(f"the saved tensors {', '.join(mismatched)} are missing or unknown")
    for name, (dtype, shape) in wanted.items():
        tensor = tensors[name]
        same_dtype = _dtype_name(tensor.dtype) == _dtype_name(dtype)
        fits = len(shape) == tensor.ndim and all(
            length == size or (length == -1 and size)
            for length, size in zip(shape, tensor.shape, strict=True)
        )
        if not (same_dtype and fits):
            raise ModelError(
                f"the saved tensor {name} is {tuple(tensor.shape)} of {_dtype_name(tensor.dtype)}, "
                "which doesn't go with the others"
            )
        if not is_finite(tensor):
            raise ModelError(f"the saved tensor {name} holds NaN or infinite values")


def _dtype_name(dtype: object) -> str:
    """`float32`, for example, the same for torch and NumPy."""
    return str(dtype).removeprefix("torch.")


def check_channels(channels: int, learned: int) -> None:
    """Check that embeddings have as many channels as the scorer has learned.

    Raises:
        DataError: the two numbers differ.
    """
    if channels != learned:
        raise DataError(
            f"embeddings have {channels} channels where the model's have {learned}; use the "
            "backbone and layers it was made with"
        )


def axis_length(tensors: Mapping[str, Array], name: str, axis: int = 0) -> int:
    """The length of one axis of a saved tensor; -1 without that tensor or axis."""
    shape = tensors[name].shape if name in tensors else ()
    return shape[axis] if -len(shape) <= axis < len(shape) else -1


def device_of(values: Array) -> torch.device:
    """The device of a tensor; the CPU for an array."""
    return CPU if isinstance(values, np.ndarray) else values.device


def is_finite(values: Array) -> bool:
    """True if all values are finite; allocates no other tensor."""
    if "float" not in str(values.dtype) or 0 in values.shape:
        return True
    # A NaN or an infinity shows in the lowest or the highest value.
    return bool(np.isfinite([float(values.min()), float(values.max())]).all())


# Feature maps (B, C_i, h_i, w_i) of several layers -> patch embeddings (B, h, w, D) float32.
Align: TypeAlias = "Callable[[Sequence[Tensor]], Tensor]"
Fold: TypeAlias = tuple[int, ...]  # training images that are left out together


@dataclass(frozen=True)
class PatchScores:
    """Scores of patches: tensors, or arrays from an exported model's scorer.

    Attributes:
        scores: (B, h, w) float32, a distance (never squared); higher is more anomalous.
        nearest: (B, h, w) int64, the nearest bank vector of each patch; None without a bank.
    """

    scores: Array
    nearest: Array | None = None


class Scorer(Protocol):
    """An immutable model of good patches; default bodies serve most methods.

    The scorer of an exported model takes and returns NumPy arrays where others have tensors. It is
    asked for `unit`, `dimensions`, `score`, `weighted` and `image_scores` alone.
    """

    @property
    def unit(self) -> str:
        """Name of the score's unit for people, e.g. `distance`."""
        ...

    @property
    def dimensions(self) -> int:
        """Number D of channels that `score` takes."""
        ...

    def score(self, embeddings: Array) -> PatchScores:
        """Score patch embeddings (B, h, w, D)."""
        ...

    def weighted(self, scores: PatchScores) -> Array:
        """Patch scores (B, h, w) weighted for the image score; maps use unweighted ones."""
        return scores.scores

    def image_scores(self, embeddings: Array, scores: PatchScores) -> Array:
        """Image scores by the method's own formula; by default the highest patch score.

        Called only if `model.image_score` names such a formula.

        Args:
            embeddings: (B, h, w, D), the embeddings that were scored.
            scores: result of `score`, with -inf on patches that don't count.

        Returns:
            (B,) float32, in score units.
        """
        values = scores.scores
        return module_of(values).amax(values.reshape(len(values), -1), 1)

    @property
    def align(self) -> Align:
        """The function from feature maps to the embeddings that `score` takes."""
        ...

    def evidence(self, patches: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
        """The training patches nearest to given patches.

        Args:
            patches: (N, D) float32.
            count: number K of training patches for each.

        Returns:
            Distances (N, K) float32, ascending, and origins (N, K, 3) int32: training image, patch
            row, patch column. None, as here, for a method that keeps no patches.
        """
        return None

    def graph(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """`score` in operations that `torch.export` can trace: reductions, no search.

        Returns:
            A function of embeddings (B, h, w, D) that returns patch scores (B, h, w) float32 and,
            with a bank, the nearest vectors (B, h, w) int64.

        Raises:
            ModelError: the method has no such form, as here.
        """
        raise ModelError("the model's method can't be a graph; export it without --pixels")

    def to(self, target: torch.device | str) -> Scorer:
        """An equal scorer on another device."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by name."""
        ...


S = TypeVar("S", bound=Scorer)


class Fitter(Protocol[S]):
    """Settings that make a scorer from patches; holds nothing learned from images."""

    @property
    def align(self) -> Align:
        """The function from feature maps to the embeddings to learn from."""
        ...

    @property
    def compact(self) -> bool:
        """True if embeddings take less memory than their feature maps."""
        return False

    def prepared(self, channels: int, device: torch.device) -> Fitter[S]:
        """The fitter for a network, with all drawn that `align` needs; by default itself.

        Args:
            channels: number of channels of all hooked layers together.
            device: device of the embeddings.

        Raises:
            ConfigError: the settings don't fit that many channels.
        """
        return self

    def selection_matrix(self, channels: int) -> Tensor | None:
        """The matrix (D, d) that projects embeddings of D = `channels` for `PatchSet.projected`.

        None, as here, for a method whose `fit` reads embeddings alone.
        """
        return None

    def fit(self, batches: PatchSet, progress: Progress | None = None) -> S:
        """Learn from good patches.

        Args:
            batches: patches of the training images; may be read more than once.
            progress: called with (done, total) during long steps.
        """
        ...

    def incremental(self, scorer: S, learned: int) -> Fitter[S]:
        """A fitter whose `fit` adds images to a fitted scorer.

        Args:
            scorer: a scorer fitted with these settings.
            learned: number of images that it was fitted on.

        Raises:
            ModelError: the method, as here, can't add to what it has learned.
        """
        raise ModelError("the model's method can't learn more images; train again with all of them")

    def held_out(
        self, scorer: S, patches: PatchSet, folds: Sequence[Fold], *, grouped: bool
    ) -> Iterator[tuple[Fold, Scorer]]:
        """Scorers for cross-fitting, each without the images it will score.

        Args:
            scorer: the scorer fitted on all of `patches`.
            patches: patches of all training images.
            folds: disjoint sets of images which together hold all of them; at least two.
            grouped: a fold keeps images together that show one part; else a method may leave images
                out one by one. Refits, as here, leave out whole folds.

        Yields:
            Some images, and the scorer for them; each image once.
        """
        for fold in folds:
            rest = frozenset(image for other in folds if other != fold for image in other)
            yield fold, self.fit(patches.only(rest))
