"""The model folder: tensors, settings and a manifest that vouches for every file. No pickle.

    model/
      backbone.safetensors   the truncated network
      scorer.safetensors     the memory bank or the Gaussians
      usual.safetensors      what images look like as a whole
      region.png, ignore.png where to look, if that was drawn as a picture
      config.yaml            every setting but the place of the data
      thresholds.json        where good ends, and how that was found
      calibration.json       the scores of good images that the thresholds come from
      manifest.json          sha256 of every file, training images, versions, seed
      history.jsonl          when thresholds were changed, and why; only once they were

Files but the history hold no time and no absolute path: the same training gives the same bytes.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import yaml
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file

from anomaly import __version__
from anomaly.config.schema import Config, parse_config
from anomaly.errors import AnomalyError, ModelError, OutputError
from anomaly.features.backbones import Normalisation, build, fill
from anomaly.features.extractor import truncate
from anomaly.files.writing import share
from anomaly.imaging.decoder_pool import read_mask
from anomaly.imaging.region import Picture, Region
from anomaly.model.appearance import UsualLook
from anomaly.model.build import scorer_of
from anomaly.model.consistency import agree, check_together
from anomaly.model.detector import AnomalyDetector
from anomaly.model.folder import (
    appearing,
    check_files,
    find_model,
    model_id,
    vouch,
)
from anomaly.model.manifest import AGAIN, read_manifest, write_manifest
from anomaly.model.settings import portable, region_of
from anomaly.model.threshold_files import read_thresholds, write_thresholds
from anomaly.model.training import Training
from anomaly.runtime import has_bf16

log = logging.getLogger(__name__)

_RECORDED = ("torch", "torchvision", "numpy", "faiss-cpu", "opencv-python-headless", "safetensors")
_BACKBONE, _SCORER, _USUAL = (f"{n}.safetensors" for n in ("backbone", "scorer", "usual"))


@dataclass(frozen=True, eq=False)
class Model:
    """A model folder that was read and checked.

    Attributes:
        detector: ready to predict.
        manifest: as written at training.
        model_id: the first 16 digits of the manifest's sha256; names this very model.
    """

    detector: AnomalyDetector
    manifest: dict[str, Any]
    model_id: str


def save(training: Training, folder: Path, *, overwrite: bool = False) -> str:
    """Write a model folder; it appears under its name complete, or not at all.

    Args:
        training: what to keep.
        folder: the model folder.
        overwrite: replace an earlier one.

    Returns:
        The model's id.

    Raises:
        OutputError: the folder exists already, or can't be written.
    """
    if folder.exists() and not overwrite:
        raise OutputError(f"{folder} exists already; give another --output or add --overwrite")
    detector = training.detector
    with appearing(folder) as draft:
        state = {
            k: v.cpu().contiguous() for k, v in detector.extractor.network.state_dict().items()
        }
        save_file(state, draft / _BACKBONE)
        scorer = {k: v.cpu().contiguous() for k, v in detector.scorer.tensors().items()}
        save_file(scorer, draft / _SCORER)
        if detector.usual is not None:
            save_numpy(detector.usual.tensors(), draft / _USUAL)
        for file in draft.iterdir():
            share(file)
        for name, picture in _pictures(detector.region).items():
            (draft / name).write_bytes(picture)
        settings = portable(detector.config)
        (draft / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), "utf-8")
        write_thresholds(draft, detector.thresholds)
        write_manifest(draft, _manifest(training, draft))
        return model_id(draft)


def load(
    folder: str | Path, device: str | torch.device = "cpu", precision: str | None = None
) -> Model:
    """Read a model folder, checking every file against the manifest.

    Args:
        folder: the model folder, or the run that holds it as `model/`.
        device: where the network and the scorer go.
        precision: `fp32` or `bf16` instead of the model's own, which a warning points out.

    Raises:
        ModelError: no model there, made by something else, or a file is missing, changed or
            doesn't belong.
    """
    folder, device = find_model(folder), torch.device(device)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    config = _config(folder, manifest)
    try:
        truncated = truncate(build(config.backbone.name), manifest["backbone"]["layers"])
        agree(folder, "channels", manifest["backbone"]["channels"], list(truncated.channels))
        agree(folder, "strides", manifest["backbone"]["strides"], list(truncated.strides))
        state = load_file(folder / _BACKBONE)
        network, full = truncated.network, build(config.backbone.name)
        fill(network, state, full, str(folder / _BACKBONE))
        scorer = scorer_of(config, load_file(folder / _SCORER), device)
        looks = folder / _USUAL
        usual = UsualLook.from_tensors(load_numpy(looks)) if looks.is_file() else None
        thresholds = read_thresholds(folder)
        region = region_of(config.image, folder, read_mask)
    except SafetensorError:
        raise ModelError(f"{folder}: a .safetensors file in it is damaged; {AGAIN}") from None
    except (OSError, AnomalyError) as error:
        # The hashes fit, so the folder is as it was written: by another version, perhaps.
        raise _unreadable(folder, manifest, error) from None
    check_together(folder, manifest, scorer, usual)
    detector = AnomalyDetector(
        config=config,
        extractor=truncated.extractor().to(device, _precision(config, device, precision)),
        normalise=Normalisation(
            tuple(manifest["backbone"]["mean"]), tuple(manifest["backbone"]["std"])
        ),
        scorer=scorer,
        thresholds=thresholds,
        device=device,
        region=region,
        aspect=manifest["aspect"],
        usual=usual,
    )
    return Model(detector, manifest, model_id(folder))


def _config(folder: Path, manifest: dict[str, Any]) -> Config:
    """The settings in a model folder, which repeat some of what its manifest says."""
    file = folder / "config.yaml"
    try:
        config = parse_config(yaml.safe_load(file.read_text("utf-8")), str(file))
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ModelError(f"{file} isn't YAML as this program writes it; {AGAIN}") from None
    except (OSError, AnomalyError) as error:
        raise _unreadable(folder, manifest, error) from None
    made, backbone = manifest["made_with"], manifest["backbone"]
    agree(folder, "name", manifest["name"], config.name)
    agree(folder, "seed", manifest["seed"], config.seed)
    agree(folder, "backbone.name", backbone["name"], config.backbone.name)
    agree(folder, "backbone.weights", backbone["weights"], config.backbone.weights)
    agree(folder, "batch_size", made["batch_size"], config.batch_size)
    agree(folder, "precision", made["precision"], config.precision)
    one_aspect = manifest["aspect"] is not None
    agree(folder, "one aspect for all images", one_aspect, config.one_aspect)
    return config


def _unreadable(folder: Path, manifest: dict[str, Any], error: Exception) -> ModelError:
    return ModelError(
        f"{folder} was written by anomaly {manifest['software_version']} and can't be read by "
        f"{__version__} ({error}); train it again with this version"
    )


def _precision(config: Config, device: torch.device, wanted: str | None) -> str:
    """The model's own precision, unless told otherwise or the device is slower with it."""
    own = config.precision
    chosen = wanted or ("fp32" if own == "bf16" and not has_bf16(device) else own)
    if chosen != own:
        why = "as asked" if wanted else "this machine doesn't have bf16"
        log.warning(
            "the model was trained in %s and runs in %s (%s): scores move by about 1 %%, and a "
            "verdict this close to its threshold may change",
            own,
            chosen,
            why,
        )
    return chosen


def _pictures(region: Region | None) -> dict[str, bytes]:
    """The masks that say where to look, as PNG files by name."""
    shapes = {} if region is None else {"region": region.look, "ignore": region.ignore}
    return {
        f"{name}.png": cv2.imencode(".png", shape.pixels.astype(np.uint8) * 255)[1].tobytes()
        for name, shape in shapes.items()
        if isinstance(shape, Picture)
    }


def _manifest(training: Training, folder: Path) -> dict[str, Any]:
    detector = training.detector
    extractor = detector.extractor
    return {
        "software_version": __version__,
        "name": detector.config.name,
        "seed": detector.config.seed,
        "aspect": detector.aspect,
        "backbone": {
            "name": detector.config.backbone.name,
            "layers": list(extractor.layers),
            "channels": list(extractor.channels),
            "strides": list(extractor.strides),
            "mean": list(detector.normalise.mean),
            "std": list(detector.normalise.std),
            "weights": portable(detector.config)["backbone"]["weights"],
            "weights_sha256": training.weights_sha256,
        },
        "made_with": {
            "packages": {name: _version(name) for name in _RECORDED},
            "python": platform.python_version(),
            "machine": platform.machine(),
            "device": detector.device.type,
            "threads": torch.get_num_threads(),
            "batch_size": detector.config.batch_size,
            "precision": detector.config.precision,
        },
        "files": {file.name: vouch(file) for file in sorted(folder.iterdir())},
        "training_images": training.hashes,
        "refused_images": training.refused_at,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
