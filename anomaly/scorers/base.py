"""What a fitter and a scorer are. A fitter turns good patches into an immutable scorer.

Imports no torch: a scorer that an exported model needs works on numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from anomaly.arrays import Array, module_of
from anomaly.errors import ModelError
from anomaly.scorers.patches import MatrixOf, PatchSet

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Progress: TypeAlias = Callable[[int, int], None]
# Feature maps (B, C_i, h_i, w_i) of several layers -> patch embeddings (B, h, w, D) float32.
Align: TypeAlias = "Callable[[Sequence[Tensor]], Tensor]"
Fold: TypeAlias = tuple[int, ...]  # training images that are left out together


@dataclass(frozen=True)
class PatchScores:
    """How anomalous each patch is. Tensors of a `Scorer`, arrays of an `ArrayScorer`.

    Attributes:
        scores: (B, h, w) float32, a distance (never squared); higher is more anomalous.
        nearest: (B, h, w) int64, the nearest bank vector of each patch; None without a bank.
    """

    scores: Array
    nearest: Array | None = None


class ArrayScorer(Protocol):
    """What scoring asks of a model of good patches; an exported model's has no more.

    It takes and gives numpy arrays where it stands alone, and tensors where it is a `Scorer`.
    """

    @property
    def unit(self) -> str:
        """What patch scores are, for people: `distance`, say."""
        ...

    @property
    def dimensions(self) -> int:
        """D, the channels of the embeddings that `score` takes."""
        ...

    def score(self, embeddings: Array) -> PatchScores:
        """Score patch embeddings (B, h, w, D)."""
        ...

    def weighted(self, scores: PatchScores) -> Array:
        """Patch scores (B, h, w) as image scores count them; maps have those of `score`."""
        return scores.scores

    def image_scores(self, embeddings: Array, scores: PatchScores) -> Array:
        """The method's own image score, where a config names one that it alone has.

        Without one of its own it is the highest patch score.

        Args:
            embeddings: (B, h, w, D), those that were scored.
            scores: what `score` said about them; -inf on patches that don't count.

        Returns:
            (B,) float32, in score units.
        """
        values = scores.scores
        return module_of(values).amax(values.reshape(len(values), -1), 1)

    def check_origin(self, channels: int, images: int) -> None:
        """See that this can have been learned from a network's embeddings of so many images.

        Args:
            channels: of all hooked layers together.
            images: training images, numbered from 0.

        Raises:
            ModelError: it can't; the message says what doesn't fit.
        """
        ...


class Scorer(ArrayScorer, Protocol):
    """An immutable model of good patches. What has a body here serves most methods."""

    @property
    def align(self) -> Align:
        """How feature maps become the embeddings that `score` takes."""
        ...

    def evidence(self, patches: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
        """The training patches that patches were compared with.

        Args:
            patches: (N, D) float32.
            count: K, how many for each.

        Returns:
            Their distances (N, K) float32, ascending, and where they come from, (N, K, 3) int32:
            training image, patch row, patch column. None for a method that keeps no patches and
            compares places.
        """
        return None

    def graph(self) -> nn.Module:
        """What `score` does, as a module that `torch.export` can follow: reductions, no indices.

        Returns:
            A module that takes embeddings (B, h, w, D) and gives patch scores (B, h, w) float32,
            and where there is a bank the nearest vectors (B, h, w) int64 after them, in a tuple.

        Raises:
            ModelError: the method has no such form.
        """
        raise ModelError("the model's method can't be a graph; export it without --whole")

    def to(self, target: torch.device | str) -> Scorer:
        """An equal scorer on another device."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has to be saved, by name."""
        ...


S = TypeVar("S", bound=Scorer)


class Fitter(Protocol[S]):
    """Settings of a scorer that isn't there yet. Holds nothing that is learned from images."""

    @property
    def align(self) -> Align:
        """How feature maps become the embeddings to learn from."""
        ...

    @property
    def compact(self) -> bool:
        """Whether aligned embeddings take less room than the feature maps that they come from."""
        return False

    def prepared(self, channels: int, device: torch.device) -> Fitter[S]:
        """The fitter for a network, with what has to be drawn before images are read.

        Args:
            channels: of all hooked layers together.
            device: where the embeddings will be.

        Raises:
            ConfigError: the settings don't fit that many channels.
        """
        return self

    @property
    def projected_by(self) -> MatrixOf | None:
        """What `fit` wants patches projected by; None where it reads embeddings."""
        return None

    def fit(self, batches: PatchSet, progress: Progress | None = None) -> S:
        """Learn from good patches.

        Args:
            batches: of the training images; may be read more than once.
            progress: called with (done, total) while something takes long.
        """
        ...

    def again(self, scorer: S, patches: PatchSet) -> S:
        """What a scorer has learned, in the embeddings of another network.

        Args:
            scorer: of these settings.
            patches: of the images that it was learned from, by the other network.

        Raises:
            DataError: patches that it was learned from are missing.
        """
        return self.fit(patches)

    def continuing(self, scorer: S, learned: int) -> Fitter[S]:
        """A fitter whose `fit` adds to what a scorer has learned already.

        Args:
            scorer: of these settings.
            learned: from how many images.

        Raises:
            ModelError: the method can't add to what it has learned.
        """
        raise ModelError("the model's method can't learn more images; train again with all of them")

    def merged(self, scorers: Sequence[S], numbers: Sequence[Mapping[int, int]]) -> S:
        """What scorers have learned apart, in one.

        Args:
            scorers: of these settings.
            numbers: for each of them the training images it has learned from, and which numbers
                these get; an image that several have learned from gets one.

        Raises:
            ModelError: the method can't join what it has learned, or not from these images.
        """
        raise ModelError("the model's method can't be merged; train one with the images of all")

    def held_out(
        self, scorer: S, patches: PatchSet, folds: Sequence[Fold], *, grouped: bool
    ) -> Iterator[tuple[Fold, Scorer]]:
        """Scorers that haven't learned from the images which they are to score.

        Args:
            scorer: fitted on all of `patches`.
            patches: of all training images.
            folds: disjoint sets of images which together hold all of them; at least two.
            grouped: whether folds keep images together that show one part; without it, images may
                also be left out one by one.

        Yields:
            Images, and the scorer for them; each image once.
        """
        for fold in folds:
            rest = frozenset(image for other in folds if other != fold for image in other)
            yield fold, self.fit(patches.only(rest))
