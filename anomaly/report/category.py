"""Model x test images -> one model's evaluation with everything that its report shows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.calibration import Thresholds
from anomaly.datasets import Sample
from anomaly.errors import AnomalyError
from anomaly.evaluation.evaluate import Evaluation, Map, Mask, score_test_split
from anomaly.evaluation.metrics.images import Confusion
from anomaly.evaluation.weaknesses import Run, Weakness, of_images
from anomaly.maps.encoding import encoded, jpeg, pixels_for
from anomaly.maps.heatmap import display, layer, outlines
from anomaly.maps.regions import predicted_mask
from anomaly.methods.base import Progress
from anomaly.report.page import utc_now
from anomaly.runtime.parallel import program_threads
from anomaly.scoring.build import to_dict
from anomaly.scoring.pipeline import Model
from anomaly.scoring.prediction import Prediction
from anomaly.scoring.scored import Scored
from anomaly.storage.folder import find_model
from anomaly.storage.thresholds import thresholds_alone_differ
from anomaly.training.runs import training_record

# All pictures of a page together, for about 30 MB at most: 190 images of 500 x 1254 are whole.
_PIXELS = 120_000_000
_HEAT_SIDE = 160


@dataclass(frozen=True, repr=False)
class Category:
    """An evaluation, where it comes from, and its pictures.

    Attributes:
        evaluation: scores and figures.
        model: the model's folder, as the user named it.
        model_id: names this very model.
        method: the model's method, by the name that it has in the literature.
        unit: of the scores.
        engine: what computed them.
        manifest: the model's manifest.
        settings: the model's config as plain values.
        training: what the run's train.json says; empty where it isn't there.
        data_folder: where the test images are.
        date: of the evaluation, in UTC.
        seconds: that scoring the test split took.
        tiles: by the images' places in the test split; empty for no report.
        weaknesses: what to mend, the most important first.
    """

    evaluation: Evaluation
    model: str = ""
    model_id: str = ""
    method: str = ""
    unit: str = "score"
    engine: str = "torch"
    manifest: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    data_folder: str = ""
    date: str = ""
    seconds: float = 0.0
    tiles: Mapping[int, Tile] = field(default_factory=dict)
    weaknesses: tuple[Weakness, ...] = ()

    def __repr__(self) -> str:
        figures = ", ".join(
            f"{name} {value:.4f}"
            for name, value in self.metrics.items()
            if name.endswith(("auroc", "aupro")) and value is not None
        )
        count = f"{self.evaluation.n_good} good, {self.evaluation.n_defect} defective"
        return f"<Evaluation of {self.name} on {count}: {figures}>"

    @property
    def name(self) -> str:
        """The category's name."""
        return self.evaluation.name

    @property
    def metrics(self) -> dict[str, float | None]:
        """Image and pixel figures by name; None where one is undefined (see `undefined`)."""
        return dict(self.evaluation.metrics.values)

    @property
    def scored(self) -> tuple[Scored, ...]:
        """Every test image and its score."""
        return self.evaluation.scored

    @property
    def verdicts(self) -> Confusion | None:
        """What the model's own thresholds did; None where it has none."""
        return self.evaluation.verdicts

    @property
    def thresholds(self) -> Thresholds | None:
        """The model's own; None where it has none."""
        return self.evaluation.thresholds


def evaluated(
    detector: Model,
    samples: Sequence[Sample],
    data_folder: str,
    *,
    own_split: bool = True,
    tested: Sequence[object] = ("--defects", "FOLDER", "--good", "FOLDER"),
    progress: Progress = lambda done, total: None,
    model: str = "",
) -> Category:
    """Score test images and draw them for the report.

    Args:
        detector: trained.
        samples: to test with.
        data_folder: where they are, for people.
        own_split: whether they are the test split of a data set.
        tested: options that name them, where they aren't.
        progress: called with (done, total).
        model: the model's folder, as the user named it.

    Raises:
        DataError: as `evaluate`.
    """
    started = time.perf_counter()
    limit = None if detector.thresholds is None else detector.thresholds.pixel

    def take(prediction: Prediction, sample: Sample, anomaly_map: Map, mask: Mask | None) -> None:
        tiles.add(prediction, anomaly_map, mask)

    with Tiles(len(samples), limit) as tiles:
        evaluation = score_test_split(
            detector,
            samples,
            progress=progress,
            visit=take,
        )
        pictures = tiles.finished()
    seconds = time.perf_counter() - started
    folder = Path(model) if model else detector.folder
    training = {} if folder is None else training_of(folder, detector.model_id)
    run = Run(detector, folder or Path("RUN"), training, () if own_split else tested)
    return Category(
        evaluation=evaluation,
        model="" if folder is None else str(folder),
        model_id=detector.model_id,
        method=detector.method,
        unit=detector.unit,
        engine=detector.extractor.engine,
        manifest=detector.manifest,
        settings=to_dict(detector.config),
        training=training,
        data_folder=data_folder,
        date=utc_now(),
        seconds=seconds,
        tiles=pictures,
        weaknesses=of_images(run, evaluation.scored),
    )


def training_of(folder: Path, model_id: str) -> dict[str, Any]:
    """What is known of a model's training; empty where the record beside it is another model's."""
    record = training_record(folder)
    if record.get("model_id", model_id) == model_id:
        return record
    with suppress(AnomalyError):
        if record["model_id"] in thresholds_alone_differ(find_model(folder)):
            return record
    return {}


@dataclass(frozen=True)
class Tile:
    """What the report shows of one image.

    Attributes:
        photo: JPEG.
        heat: WebP with opacity, to be stretched over the photo; empty where nothing is coloured.
        size: (width, height) of the photo; the outlines' coordinates.
        source: (width, height) of the original image.
        truth: outline of the ground-truth mask, as an SVG path.
        marked: outline of the predicted mask, as an SVG path.
        partly: whether the network didn't look at some of the image.
    """

    photo: bytes
    heat: bytes
    size: tuple[int, int]
    source: tuple[int, int]
    truth: str
    marked: str
    partly: bool = False


class Tiles:
    """Makes tiles behind the scoring; used in a `with` statement.

    Args:
        count: how many images there will be; the more, the smaller their pictures.
        threshold: the anomaly map's value where marking starts; None takes each map's highest.
    """

    def __init__(self, count: int, threshold: float | None) -> None:
        self._pixels = pixels_for(count, _PIXELS)
        self._threshold = threshold
        self._pool = ThreadPoolExecutor(program_threads())
        self._tiles: dict[int, Future[Tile]] = {}

    def __enter__(self) -> Tiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, prediction: Prediction, anomaly_map: Map, mask: Mask | None) -> None:
        """Take one image: (H0, W0) map and mask.

        Raises:
            ValueError: the image was decoded in another process.
        """
        if prediction.image is None:
            raise ValueError(f"image {prediction.index} isn't at hand to be shown")
        threshold = self._threshold
        if threshold is None:
            threshold = float(np.nanmax(anomaly_map))
        source_map = replace(prediction.source_map, values=anomaly_map)
        height, width = anomaly_map.shape
        size = _shrunk_size((width, height), (self._pixels / (width * height)) ** 0.5)
        # Shrunk now, so that the full image isn't kept waiting in the queue.
        self._tiles[prediction.index] = self._pool.submit(
            _encoded,
            _shrunk(display(prediction.image), size),
            _shrunk(anomaly_map, size),
            None if mask is None else _shrunk_mask(mask, size),
            _shrunk_mask(predicted_mask(source_map, threshold) > 0, size),
            threshold,
            (width, height),
        )

    def finished(self) -> dict[int, Tile]:
        """The tiles by the images' places in the test split; waits for the last."""
        return {index: future.result() for index, future in self._tiles.items()}


def _shrunk_size(size: tuple[int, int], scale: float) -> tuple[int, int]:
    """(width, height) of a picture of `size` brought down, or as it is where `scale` is above 1."""
    scale = min(1.0, scale)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _shrunk(values: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """An array (H, W, ...) averaged down to `size` (width, height)."""
    return np.asarray(cv2.resize(values, size, interpolation=cv2.INTER_AREA), values.dtype)


def _shrunk_mask(mask: Mask, size: tuple[int, int]) -> Mask:
    """A mask made smaller: a defect of a single pixel must still show."""
    return _shrunk(mask.astype(np.float32), size) > 0


def _encoded(
    photo: NDArray[np.uint8],
    anomaly_map: Map,
    truth: Mask | None,
    marked: Mask,
    threshold: float,
    source: tuple[int, int],
) -> Tile:
    height, width = anomaly_map.shape
    return Tile(
        photo=jpeg(photo[..., ::-1]),
        heat=_heat(anomaly_map, threshold),
        size=(width, height),
        source=source,
        truth="" if truth is None else svg_path(outlines(truth)),
        marked=svg_path(outlines(marked)),
        partly=bool(np.isnan(anomaly_map).any()),
    )


def _heat(anomaly_map: Map, threshold: float) -> bytes:
    """The heatmap as a picture of its own; it is smooth, so a small one will do."""
    height, width = anomaly_map.shape
    size = _shrunk_size((width, height), _HEAT_SIDE / max(height, width))
    colours = layer(_shrunk(anomaly_map, size), threshold)
    if not colours[..., 3].any():
        return b""
    return encoded(".webp", colours[..., [2, 1, 0, 3]], cv2.IMWRITE_WEBP_QUALITY)


def svg_path(lines: Sequence[NDArray[np.int32]]) -> str:
    """Closed lines of pixel coordinates as an SVG path through the pixels' centres."""
    parts = []
    for line in lines:
        points = cv2.approxPolyDP(line, 0.6, closed=True).reshape(-1, 2)
        steps = np.diff(points, axis=0)
        start = f"M{points[0, 0]}.5 {points[0, 1]}.5"
        # A single pixel still gets a dot: a closed line of no length with round caps.
        parts.append(start + "".join(f"l{x} {y}" for x, y in steps) + "z")
    return "".join(parts)
