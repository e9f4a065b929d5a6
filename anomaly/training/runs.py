"""A run's folder: the model in `model/`, and the files beside it.

train.json holds facts about the training, `suspects/` pictures of training images, and `golden/`
golden parts if people have recorded any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.config.schema import Config
from anomaly.datasets.samples import Dataset, Sample
from anomaly.errors import DataError, why
from anomaly.files.writing import TRAIN, as_json, claim, clear, from_json, short_name, write
from anomaly.imaging.loading import NetworkInput
from anomaly.imaging.pool import Decoders
from anomaly.maps.anomaly_map import SourceMap
from anomaly.maps.heatmap import encode_png, heatmap
from anomaly.runtime import StageProgress, peak_memory
from anomaly.storage.folder import check_run_folder
from anomaly.storage.models import save

if TYPE_CHECKING:
    import torch

    from anomaly.training.fit import FeaturesOf, Training

log = logging.getLogger(__name__)


def train_run(
    config: Config,
    dataset: Dataset,
    output: Path,
    *,
    device: torch.device,
    calibrate: bool = True,
    overwrite: bool = False,
    features_of: FeaturesOf | None = None,
    progress: StageProgress = lambda stage, done, total: None,
) -> tuple[Training, dict[str, Any]]:
    """Train a model into a run's folder.

    Args:
        config: all settings.
        dataset: the data set; its good training images are learned from.
        output: the run's folder.
        device: the device of the network and the scorer.
        calibrate: find thresholds.
        overwrite: replace an earlier run there, once the new model is trained.
        features_of: as in `train`; all machines of a cluster see `output`.
        progress: called with (stage, done, total).

    Returns:
        The training, and the content of train.json.

    Raises:
        OutputError: an earlier run is there, or the folder can't be written to.
        AnomalyError: no model can be trained with these settings and images.
    """
    from anomaly.training.fit import train

    started = time.perf_counter()
    check_run_folder(output)
    claim(output, TRAIN, overwrite=overwrite)
    training = train(
        config,
        dataset.train,
        defects=[sample for sample in dataset.test if sample.is_defect],
        device=device,
        scratch=output,
        calibrate=calibrate,
        features_of=features_of,
        progress=progress,
    )
    model_id = save(training.model, output / "model", overwrite=overwrite)
    summary = _summary(training, model_id)
    clear(output, ("suspects",))
    summary["suspects"] = _draw_suspects(training, dataset.train, output)
    summary["data_folder"] = str(dataset.folder.absolute())
    seconds = training.seconds | {"total": time.perf_counter() - started}
    summary["seconds"] = {stage: round(spent, 3) for stage, spent in seconds.items()}
    write(output / "train.json", as_json(summary))
    return training, summary


def trained_on(folder: Path) -> Path:
    """Folder of the data set that a run was trained on.

    Args:
        folder: the run, or its model folder.

    Raises:
        DataError: the run has no train.json that names the data set's folder.
    """
    data_folder = training_record(folder).get("data_folder")
    if not isinstance(data_folder, str):
        raise DataError(
            f"{folder} has no train.json that says where its data set is; give --good and --defects"
        )
    return Path(data_folder)


def training_record(folder: Path) -> dict[str, Any]:
    """The content of a run's train.json; empty where there is none, or it can't be read.

    Args:
        folder: the run, or its model folder.
    """
    for file in (folder / "train.json", folder.absolute().parent / "train.json"):
        if file.is_file():
            try:
                return dict(from_json(file.read_text("utf-8")))
            except (OSError, ValueError, TypeError) as error:
                log.warning("%s can't be read: %s", file, why(error))
    return {}


def _summary(training: Training, model_id: str) -> dict[str, Any]:
    """The content of train.json, but for the suspects, the data set's folder and durations."""
    model, config = training.model, training.model.config
    tensors, thresholds, mm = model.scorer.tensors(), model.thresholds, config.image.mm_per_pixel
    return {
        "name": config.name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "model_id": model_id,
        "kind": config.model.kind,
        "device": model.device.type,
        "images": {"learned": len(training.images), "refused": len(training.refused)},
        "patches": training.patches,
        "patch_size": {
            "pixels": [round(side, 2) for side in training.patch_pixels],
            "mm": mm and [round(side * mm, 4) for side in training.patch_pixels],
        },
        "bank_vectors": len(tensors["vectors"]) if "vectors" in tensors else None,
        "thresholds": None if thresholds is None else thresholds.to_json(),
        "odd": list(training.outliers),
        "stand_out": dict(training.stand_out),
        "left_out": config.model.leave_out_suspects and bool(training.stand_out),
        "refused": training.refused,
        "peak_memory_bytes": peak_memory(),
    }


def _draw_suspects(
    training: Training, samples: Sequence[Sample], output: Path
) -> list[dict[str, Any]]:
    """Write heatmaps of the training images that look least like the others.

    Returns:
        Name, score and heatmap's path in the run of each image, as in train.json.
    """
    model, thresholds = training.model, training.model.thresholds
    listed = []
    files = [(suspect.image, samples[suspect.image].path) for suspect in training.suspects]
    decoders = Decoders(model.loading, keep_image=True)
    for rank, loaded in enumerate(decoders.load_all(files), 1):  # in the order of the suspects
        if not isinstance(loaded, NetworkInput):  # the file has changed since it was learned from
            continue
        suspect, sample = training.suspects[rank - 1], samples[loaded.index]
        assert suspect.patches is not None
        smoothing, damping = model.config.model.smoothing, model.config.model.halo_damping
        scores = SourceMap(suspect.patches, loaded.view, smoothing, damping, model.region).held()
        limit = suspect.score if thresholds is None else thresholds.pixel
        review = None if thresholds is None else thresholds.review_pixel
        picture = f"suspects/{rank}_{short_name(sample.path.stem)}.png"
        write(output / picture, encode_png(heatmap(loaded.decoded, scores, limit, review)))
        listed.append({"name": sample.name, "score": suspect.score, "heatmap": picture})
    return listed
