"""AnomalyDetector: a trained model as people use it from Python. `anomaly.fit` makes one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.config.methods import METHODS
from anomaly.errors import DataError
from anomaly.imaging.array_input import AxisOrder, Channels, ImageLike
from anomaly.model.appearance import Appearance
from anomaly.model.predictor import Predictor
from anomaly.model.saving import save
from anomaly.model.scoring import ScoringPipeline

if TYPE_CHECKING:
    from anomaly.explain.score import Explanation


@dataclass(frozen=True, eq=False)
class AnomalyDetector(ScoringPipeline, Predictor):
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
    def models(self) -> Mapping[str, AnomalyDetector]:
        """The models that may score an image, by product: this one alone, by an empty name."""
        return {"": self}

    def product_of(self, look: Appearance) -> tuple[str, str]:
        """The product that an image shows: a single model has one, which needs no name.

        Args:
            look: the image as a whole.

        Returns:
            An empty name; and why a person has to look at the image, whatever its score, empty
            where there is no reason.
        """
        return "", self.reason_to_look(look)

    @property
    def name(self) -> str:
        """The model's name in its config."""
        return self.config.name

    @property
    def method(self) -> str:
        """The method's name in the literature."""
        return METHODS[self.config.model.kind].title

    @property
    def unit(self) -> str:
        """What the scores are, for people."""
        return self.scorer.unit

    def rates(
        self, review_rate: float | None = None, reject_rate: float | None = None
    ) -> tuple[float, float]:
        """Shares of good parts for review and for rejection, to find thresholds for.

        Args:
            review_rate: that may not be called good; by default that of the present thresholds,
                else the config's.
            reject_rate: that may be rejected; by default as well.

        Returns:
            Both; a rejected part isn't called good either, so the second is at most the first.

        Raises:
            DataError: both are given and contradict each other, or one isn't between 0 and 1.
        """
        for name, value in (("review", review_rate), ("false-reject", reject_rate)):
            if value is not None and not 0 < value < 1:
                raise DataError(
                    f"the {name} rate is {value:g}; it must be between 0 and 1 (0.01: 1 %)"
                )
        config, now = self.config.calibration, self.thresholds
        review = review_rate or (now and now.calibration.review.target) or config.review_rate
        reject = reject_rate or (now and now.calibration.reject.target) or config.reject_rate
        if reject <= review:
            return review, reject
        if review_rate is not None and reject_rate is not None:
            raise DataError(
                f"the false-reject rate {reject:g} is above the review rate {review:g}; what is "
                "rejected is never called good"
            )
        # One of them gives way: the one that wasn't given, or the rate of rejection.
        return (reject, reject) if reject_rate is not None else (review, review)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> str:
        """Write the model folder; it appears under its name complete, or not at all.

        Args:
            folder: the model folder.
            overwrite: replace an earlier model.

        Returns:
            The model's id.

        Raises:
            OutputError: the folder exists already, or holds something else than a model, or can't
                be written.
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
