"""AnomalyDetector: a trained model as people use it from Python. `anomaly.fit` makes one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from anomaly.config.methods import METHODS
from anomaly.errors import ImageError
from anomaly.imaging.given import AxisOrder, Channels, Given, ImageLike, is_one, sources
from anomaly.imaging.preprocessing import UnusableImage, by_shape
from anomaly.imaging.shared_decoders import load_shared
from anomaly.model.prediction import Prediction
from anomaly.model.saving import save
from anomaly.model.scoring import ScoringPipeline

if TYPE_CHECKING:
    from anomaly.explain.score import Explanation

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class AnomalyDetector(ScoringPipeline):
    """A trained detector, made by `anomaly.fit` or `anomaly.load`. Threads may share it.

    Nothing in it changes: `calibrate` returns another one.

    Attributes:
        manifest: what the model folder says, or will say, of how the model was made.
        model_id: names the model in a folder, the first 16 digits of its manifest's sha256; empty
            for one that hasn't been saved.
        folder: the model folder that it was loaded from; None where there is none.
        history: earlier changes of thresholds, in lines of JSON: that folder's history.jsonl.
        changes: of thresholds since; `save` adds them to the history.
    """

    manifest: Mapping[str, Any] = field(default_factory=dict)
    model_id: str = ""
    folder: Path | None = None
    history: bytes = b""
    changes: tuple[Mapping[str, Any], ...] = ()

    def __repr__(self) -> str:
        network, count = self.config.backbone.name, len(self.manifest.get("training_images", ()))
        said = f"{self.method} on {network}, {count} good images, {self.device.type}"
        return f"<AnomalyDetector {self.config.name}: {said}>"

    @property
    def method(self) -> str:
        """The method's name in the literature."""
        return METHODS[self.config.model.kind].title

    @property
    def unit(self) -> str:
        """What the scores are, for people."""
        return self.scorer.unit

    @overload
    def predict(  # type: ignore[overload-overlap]  # a str is a collection, too
        self,
        images: ImageLike,
        *,
        channels: Channels = "rgb",
        full_scale: float | None = None,
        layout: AxisOrder | None = None,
    ) -> Prediction: ...

    @overload
    def predict(
        self,
        images: Iterable[ImageLike],
        *,
        channels: Channels = "rgb",
        full_scale: float | None = None,
        layout: AxisOrder | None = None,
    ) -> list[Prediction]: ...

    def predict(
        self,
        images: ImageLike | Iterable[ImageLike],
        *,
        channels: Channels = "rgb",
        full_scale: float | None = None,
        layout: AxisOrder | None = None,
    ) -> Prediction | list[Prediction]:
        """Score one image, or several.

        An image is a path, an array (H, W) or (H, W, 3) of uint8, uint16 or floats, a PIL image, or
        a torch tensor. The pixels of an array and a lossless file of the same score the same.

        Args:
            images: one image, or a list of images.
            channels: order of an array's colours: `rgb`, or `bgr` as OpenCV gives them.
            full_scale: an array's value that means white; floats have to state it. By default 255
                for uint8 and 65535, or what the model's `image.bit_depth` says, for uint16.
            layout: an array's axes, `HW`, `HWC` or `CHW`; tensors have to state them.

        Returns:
            One prediction for one image; for several a list in their order.

        Raises:
            ImageError: an image can't be used; says which and why. `stream` goes on instead.
            DataError: `channels`, `full_scale` or `layout` isn't a legal value.
        """
        given = self._given(channels, full_scale, layout)
        if is_one(images):
            (result,) = map(_scored, self._results([images], given))
            return result
        every = map(_scored, self._results(cast(Iterable[ImageLike], images), given))
        return sorted(every, key=lambda one: one.index)

    def stream(
        self,
        images: Iterable[ImageLike],
        *,
        on_error: Callable[[ImageLike, ImageError], object] | None = None,
        channels: Channels = "rgb",
        full_scale: float | None = None,
        layout: AxisOrder | None = None,
    ) -> Iterator[Prediction]:
        """Score many images, one after the other, and go on where one can't be used.

        Args:
            images: as for `predict`; read only a few batches ahead of what is yielded.
            on_error: called with each image that can't be used, and the ImageError that says why.
                By default that is logged as a warning.
            channels: order of an array's colours, as for `predict`.
            full_scale: an array's value that means white, as for `predict`.
            layout: an array's axes, as for `predict`.

        Yields:
            A prediction for each image that can be used. Images of several shapes may come in
            another order; `index` is the place among `images`.
        """
        waiting: dict[int, ImageLike] = {}

        def noted() -> Iterator[ImageLike]:
            for index, image in enumerate(images):
                waiting[index] = image
                yield image

        for result in self._results(noted(), self._given(channels, full_scale, layout)):
            image = waiting.pop(result.index)
            if isinstance(result, Prediction):
                yield result
            elif on_error is not None:
                on_error(image, ImageError(result.reason, result.status))
            else:
                log.warning("skipped: %s", result.reason)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> str:
        """Write the model folder; it appears under its name complete, or not at all.

        Args:
            folder: the model folder.
            overwrite: replace an earlier one.

        Returns:
            The model's id.

        Raises:
            OutputError: the folder exists already, or can't be written.
        """
        return save(self, Path(folder), overwrite=overwrite)

    def calibrate(
        self,
        good_images: str | Path | Iterable[ImageLike] | None = None,
        *,
        reject_rate: float | None = None,
        review_rate: float | None = None,
        threshold: float | None = None,
        review_threshold: float | None = None,
        channels: Channels = "rgb",
        full_scale: float | None = None,
        layout: AxisOrder | None = None,
    ) -> AnomalyDetector:
        """A detector with other thresholds; this one and its folder stay as they are.

        The change is a line in the history of the folder that the new one is saved to.

        Args:
            good_images: a folder, or a list of images as for `predict`, that the detector hasn't
                learned from and isn't evaluated on. None takes the scores that the thresholds have
                been found with.
            reject_rate: share of good parts that may be rejected; the present one by default.
            review_rate: share of good parts that may not be called good; the present one by
                default.
            threshold: reject above this image score, instead of by rates.
            review_threshold: review above this image score; without it there is no review.
            channels: order of an array's colours, as for `predict`.
            full_scale: an array's value that means white, as for `predict`.
            layout: an array's axes, as for `predict`.

        Raises:
            DataError: no image can be used, one belongs to the test split, or rates or thresholds
                contradict each other.
            ImageError: an array can't be used as an image.
        """
        from anomaly import recalibrated

        return recalibrated(
            self,
            good_images,
            self._given(channels, full_scale, layout),
            reject_rate=reject_rate,
            review_rate=review_rate,
            threshold=threshold,
            review_threshold=review_threshold,
        )

    def update(
        self,
        good_images: str | Path | Iterable[ImageLike],
        *,
        defects: str | Path | Iterable[ImageLike] | None = None,
        include_suspects: bool = False,
        force: bool = False,
        channels: Channels = "rgb",
        full_scale: float | None = None,
        layout: AxisOrder | None = None,
    ) -> AnomalyDetector:
        """A detector that has learned further good images; this one and its folder stay.

        Its thresholds are found anew, see `anomaly.model.updating.learn`.

        Args:
            good_images: a folder, or images as for `predict`, that people have confirmed.
            defects: images of defects, of which none that is caught may pass.
            include_suspects: learn from images that stand out, too, which may be defects taken for
                good; a warning in the log names them.
            force: take the update even where a defect that was caught would pass.
            channels: order of an array's colours, as for `predict`.
            full_scale: an array's value that means white, as for `predict`.
            layout: an array's axes, as for `predict`.

        Raises:
            DataError: a defect that was caught would pass, no image can be learned from, or one
                belongs to the test split.
            ModelError: an exported model, or a method that can't learn more.
            ImageError: an array can't be used as an image.
        """
        from anomaly import updated

        return updated(
            self,
            good_images,
            self._given(channels, full_scale, layout),
            defects=defects,
            include_suspects=include_suspects,
            force=force,
        )

    def explain(
        self,
        image: ImageLike,
        *,
        good: str | Path | None = None,
        channels: Channels = "rgb",
        full_scale: float | None = None,
        layout: AxisOrder | None = None,
    ) -> Explanation:
        """Why an image has its score, in pictures: see `anomaly.explain.score.Explanation`.

        Args:
            image: as for `predict`.
            good: the training images' folder, to show what was compared with; by default where a
                run remembers that they were.
            channels: order of an array's colours, as for `predict`.
            full_scale: an array's value that means white, as for `predict`.
            layout: an array's axes, as for `predict`.

        Raises:
            ImageError: it can't be used; says why.
        """
        from anomaly import explained

        return explained(self, image, self._given(channels, full_scale, layout), good)

    def _given(
        self, channels: Channels, full_scale: float | None, layout: AxisOrder | None
    ) -> Given:
        image = self.config.image
        return Given(channels, full_scale, layout, image.bit_depth, image.max_pixels)

    def _results(
        self, images: Iterable[ImageLike], given: Given
    ) -> Iterator[Prediction | UnusableImage]:
        loaded = self.fitting(load_shared(sources(images, given), self.loading))
        return self.predict_batches(by_shape(loaded, self.config.batch_size))


def _scored(result: Prediction | UnusableImage) -> Prediction:
    if isinstance(result, UnusableImage):
        raise ImageError(result.reason, result.status)
    return result
