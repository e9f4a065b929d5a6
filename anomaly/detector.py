"""Detector: a trained model as people use it from Python; `anomaly.fit` and `load` make one.

It joins scoring, training, explanation, storage and thresholds; none of these rooms imports it.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from anomaly.calibration.thresholds import Thresholds
from anomaly.config.load import parse_config
from anomaly.config.schema import Config
from anomaly.datasets.samples import Dataset, Sample
from anomaly.desk.calibrate import Wishes, recalibrate
from anomaly.desk.change import samples_of
from anomaly.errors import ConfigError, DataError, ImageError, needs_training
from anomaly.evaluation.evaluate import dataset_of, not_learned, tested_split
from anomaly.imaging.arrays import ImageLike, is_one, source_of
from anomaly.imaging.read import Decoding
from anomaly.report.report import Category, evaluated
from anomaly.runtime import Progress, StageProgress, device_of
from anomaly.scoring.build import decoding_of
from anomaly.scoring.model import Model, Prediction
from anomaly.storage.models import load_model, save

if TYPE_CHECKING:
    import torch

    from anomaly.explain.page import Explanation

log = logging.getLogger(__name__)

TrainingImages: TypeAlias = "str | os.PathLike[str] | Dataset | Iterable[ImageLike | Sample]"
"""A folder, a data set, or a collection of paths, arrays, PIL images, tensors or samples."""


@contextmanager
def _extra_train(name: str) -> Iterator[None]:
    """Replace a failed import of torch in the block by an error of `needs_training`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise needs_training(name, error) from None


@dataclass(frozen=True, eq=False)
class Detector:
    """A trained detector, made by `anomaly.fit` or `anomaly.load`. Threads may share it.

    Nothing in it changes: `calibrate` and `update` return another one.

    Attributes:
        model: the stages from file to verdict, and the record of how they were made.
    """

    model: Model

    def __repr__(self) -> str:
        model = self.model
        images = f"{len(model.manifest.get('training_images', ()))} good images"
        about = f"{model.method} on {model.config.backbone.name}, {images}, {model.device.type}"
        return f"<Detector {model.name}: {about}>"

    @property
    def config(self) -> Config:
        """All settings."""
        return self.model.config

    @property
    def thresholds(self) -> Thresholds | None:
        """The review and the reject threshold; None for a detector that gives no verdicts."""
        return self.model.thresholds

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The record of how the model was made, as in the folder's `manifest.json`."""
        return self.model.manifest

    @property
    def model_id(self) -> str:
        """Id of the saved model; empty before it is saved."""
        return self.model.model_id

    @overload
    def predict(self, images: ImageLike) -> Prediction: ...  # type: ignore[overload-overlap]

    @overload
    def predict(self, images: Iterable[ImageLike]) -> list[Prediction]: ...

    def predict(self, images: ImageLike | Iterable[ImageLike]) -> Prediction | list[Prediction]:
        """Score one image, or several.

        An image is a path, a grey array (H, W) of uint8 or uint16, a PIL image, or what
        `anomaly.image` makes of other arrays and of tensors. The pixels of an array and a lossless
        file of the same score the same.

        Args:
            images: one image, or a list of images.

        Returns:
            One prediction for one image; for several a list in their order.

        Raises:
            ImageError: an image can't be used; says which and why. `stream` goes on instead.
        """
        return self.model.predict(images)

    def stream(
        self,
        images: Iterable[ImageLike],
        *,
        on_error: Callable[[ImageLike, ImageError], object] | None = None,
    ) -> Iterator[Prediction]:
        """Score many images, one after the other, and go on where one can't be used.

        Args:
            images: one image or many, as in `predict`; read a few batches ahead at most.
            on_error: called with each image that can't be used, and the ImageError that says why.
                By default that is logged as a warning.

        Yields:
            A prediction for each image that can be used. Images of several shapes may come in
            another order; `index` is the place among `images`.
        """
        waiting: dict[int, ImageLike] = {}

        # `on_error` gets the unusable image itself; a result has only its index.
        def remembered() -> Iterator[ImageLike]:
            for index, image in enumerate([images] if is_one(images) else images):
                waiting[index] = image
                yield image

        for result in self.model.results(remembered()):
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
            overwrite: replace an earlier model.

        Returns:
            The model's id.

        Raises:
            OutputError: the folder exists already, or holds something else than a model, or can't
                be written.
        """
        return save(self.model, Path(folder), overwrite=overwrite)

    def calibrate(
        self,
        good_images: str | Path | Iterable[ImageLike] | None = None,
        *,
        reject_rate: float | None = None,
        review_rate: float | None = None,
        threshold: float | None = None,
        review_threshold: float | None = None,
        force: bool = False,
    ) -> Detector:
        """A detector with other thresholds; this one and its folder stay as they are.

        The log says how far they move, and which images move them. The change is a line in the
        history of the folder that the new one is saved to.

        Args:
            good_images: a folder, or a list of images as for `predict`. The detector mustn't have
                learned from them or be evaluated on them. By default the stored scores, from which
                the present thresholds were found.
            reject_rate: share of good parts that may be rejected; the present one by default.
            review_rate: share of good parts that may not be called good; the present one by
                default.
            threshold: reject above this image score, instead of by rates.
            review_threshold: review above this image score; with `threshold` alone there is no
                review.
            force: accept thresholds that would be refused: because a known defect that is caught
                now would pass, or because the reject threshold rises by more than chance explains,
                as it does if defects are among the good images.

        Raises:
            DataError: no image can be used, rates or thresholds contradict each other, a known
                defect that is caught now would pass, or the reject threshold rises by more than
                chance explains.
            ImageError: an array can't be used as an image.
        """
        wishes = Wishes(reject_rate, review_rate, threshold, review_threshold)
        wishes.check(good=good_images is not None, production=False)
        decoding = self.model.loading.decoding
        good = [] if good_images is None else samples_of(good_images, "good images", decoding)
        return Detector(recalibrate(self.model, wishes, good=good).accept(force=force))

    def update(
        self,
        good_images: str | Path | Iterable[ImageLike],
        *,
        defects: str | Path | Iterable[ImageLike] | None = None,
        include_suspects: bool = False,
        force: bool = False,
    ) -> Detector:
        """A new detector that has also learned further good images; this one is unchanged.

        Its thresholds are found anew, see `anomaly.desk.update.learn`.

        Args:
            good_images: a folder, or images as for `predict`, that people have confirmed.
            defects: images of defects. The update is refused if one of them, or a known defect,
                is caught now and would pass afterwards.
            include_suspects: learn from images that stand out, too, which may be defects; a warning
                in the log names them.
            force: accept the update even if a defect that is caught now would pass.

        Raises:
            DataError: a known defect that is caught now would pass, or no image can be learned
                from.
            ModelError: an exported model, or a method that can't learn more.
            ImageError: an array can't be used as an image.
        """
        with _extra_train("Detector.update"):
            from anomaly.desk.update import update

        decoding = self.model.loading.decoding
        good = samples_of(good_images, "good images", decoding)
        bad = [] if defects is None else samples_of(defects, "defects", decoding, defects=True)
        change = update(self.model, good, defects=bad, include_suspects=include_suspects)
        return Detector(change.accept(force=force))

    def explain(self, image: ImageLike, *, good: str | Path | None = None) -> Explanation:
        """Pictures and figures that explain an image's score, see `Explanation`.

        Args:
            image: one image, as in `predict`.
            good: a folder to search for training images, whose nearest patches are shown, besides
                the data set in the run's `train.json`.

        Raises:
            ImageError: the image can't be used; says why.
            DataError: `good` isn't a folder.
        """
        with _extra_train("Detector.explain"):
            from anomaly.explain.evidence import explained

        source = source_of(image, self.model.loading.decoding)
        return explained(self.model, source, *([] if good is None else [good]))

    def evaluate(
        self,
        data: Dataset | Iterable[Sample] | None = None,
        *,
        progress: Progress = lambda done, total: None,
    ) -> Category:
        """Score test images and compare the verdicts with their labels.

        Nothing is tuned here: the detector and its thresholds stay as they are.

        Args:
            data: a data set, whose test split is taken (`anomaly.open_dataset`), samples of your
                own, or None for the data set named in the run's `train.json`. Training images are
                left out.
            progress: called with (done, total).

        Returns:
            Figures (`metrics`), every image's score (`scored`), what the thresholds did
            (`verdicts`), and `report(folder)`.

        Raises:
            DataError: there are no images, or a mask doesn't fit its image.
        """
        place = ""  # the data set's folder, for the report
        if data is None:
            data = dataset_of(self.model)
        if isinstance(data, Dataset):
            place = str(data.folder)
            data = tested_split(data)
        # A path isn't iterated: the check below refuses it.
        samples: list[Any] = [data] if isinstance(data, str | os.PathLike) else list(data)
        if not all(isinstance(sample, Sample) for sample in samples):
            raise DataError(
                "test images need labels that say which are defective: give "
                "anomaly.open_dataset(format, folder), or samples"
            )
        samples = not_learned(self.model, samples)
        # Samples from a program have no place, so advice shows a placeholder for their folder.
        tested = () if place else ("--defects", "FOLDER")
        return evaluated(self.model, samples, place, tested=tested, progress=progress)


def fit(
    images: TrainingImages,
    config: Config | Mapping[str, Any] | None = None,
    *,
    device: str | torch.device = "auto",
    calibrate: bool = True,
    progress: StageProgress = lambda stage, done, total: None,
) -> Detector:
    """Learn what good looks like. The command is `anomaly train`.

    The thresholds come from scores of the same images by models that haven't learned from them;
    the detector itself learns from all.

    Args:
        images: good images only. A folder (all images in it and its subfolders), a list of paths,
            arrays, PIL images or tensors as for `Detector.predict`, or a data set that
            `anomaly.open_dataset` has listed, whose training split is taken; none of its images
            may be among the defects as well.
        config: settings, as in a config file: a `Config`, a dict of them
            (`{"model": {"kind": "padim"}}`), or None for the defaults. `data` isn't read.
        device: `auto` (the GPU where there is one), `cpu`, `cuda`, or a torch device.
        calibrate: find thresholds. Without them predictions have no verdict.
        progress: called with (stage, done, total).

    Returns:
        The detector. A file that can't be used is left out, with a warning in the log.

    Raises:
        ConfigError: an unknown key, a wrong type or range.
        ImageError: an array can't be used as an image; says which and why.
        AnomalyError: no image can be used, one is labelled good and defective, or weights or layers
            can't be used as configured.
    """
    with _extra_train("anomaly.fit"):
        from anomaly.training.fit import train  # needs torch
    settings = _settings(config)
    samples = _samples(images, decoding_of(settings.image))
    # Defects are only compared by content: an image labelled good and defective is refused.
    test = images.test if isinstance(images, Dataset) else ()
    with tempfile.TemporaryDirectory(prefix="anomaly-") as scratch:
        training = train(
            settings,
            samples,
            defects=[sample for sample in test if sample.is_defect],
            device=device_of(device),
            scratch=Path(scratch),
            calibrate=calibrate,
            progress=progress,
        )
    for reason in training.refused.values():
        log.warning("skipped: %s", reason)
    return Detector(training.model)


def load(
    folder: str | Path, device: str | torch.device = "auto", precision: str | None = None
) -> Detector:
    """Read a model folder, checking every file against the manifest.

    Args:
        folder: the model folder, or the run that holds it as `model/`.
        device: device of the network and the scorer: `auto` (the GPU where there is one), `cpu`,
            `cuda`, or a torch device.
        precision: `fp32` or `bf16` instead of the model's own, which a warning points out.

    Raises:
        AnomalyError: a GPU was asked for and isn't there; or the model isn't an exported one, and
            torch isn't installed.
        ModelError: no model there, made by something else, or a file is missing, changed or
            doesn't belong.
    """
    return Detector(load_model(folder, device, precision))


def _settings(config: Config | Mapping[str, Any] | None) -> Config:
    if isinstance(config, Config):
        return config
    if config is None or isinstance(config, Mapping):
        return parse_config(config or {}, "config")
    raise ConfigError(
        f"config is a {type(config).__name__}; give a Config, a dict of settings, or "
        "anomaly.load_config('file.yaml')"
    )


def _samples(images: TrainingImages, decoding: Decoding) -> list[Sample]:
    if isinstance(images, Dataset):
        return list(images.train)
    if is_one(images) and not isinstance(images, str | os.PathLike):
        raise DataError("one image shows no variation; give a list of good images, or their folder")
    return samples_of(images, "images", decoding)
