"""A detector -> its model folder, which `anomaly.storage.load` describes and reads."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import yaml
from safetensors.numpy import save_file as save_numpy

from anomaly.files.writing import share
from anomaly.imaging.geometry import DrawnMask, Region
from anomaly.runtime import __version__, get_threads
from anomaly.scoring.build import MASKS, to_dict
from anomaly.storage.folder import (
    BACKBONE,
    MANIFEST,
    REFERENCE,
    SCORER,
    STATISTICS,
    appearing,
    claim_model,
    file_entry,
    model_id,
    write_sealed,
)
from anomaly.storage.thresholds import write_history, write_thresholds

if TYPE_CHECKING:
    from anomaly.scoring.model import Model

_RECORDED = ("torch", "torchvision", "numpy", "faiss-cpu", "opencv-python-headless", "safetensors")


def save(detector: Model, folder: Path, *, overwrite: bool = False) -> str:
    """Write a model folder; it appears under its name complete, or not at all.

    Args:
        detector: the model; an exported one can't be saved.
        folder: the model folder.
        overwrite: replace an earlier model.

    Returns:
        The model's id.

    Raises:
        OutputError: the folder exists already, or holds something else than a model, or can't be
            written.
        ModelError: the model is an exported one.
    """
    claim_model(folder, overwrite=overwrite)
    network = detector.extractor.network
    with appearing(folder) as draft:
        _save_tensors(network.state_dict(), draft / BACKBONE)
        _save_tensors(detector.scorer.tensors(), draft / SCORER)
        parts = (detector.training_statistics, STATISTICS), (detector.reference, REFERENCE)
        for part, name in parts:
            if part is not None:
                save_numpy(part.tensors(), draft / name)
                share(draft / name)
        for name, picture in _pictures(detector.region).items():
            (draft / name).write_bytes(picture)
        settings = yaml.safe_dump(to_dict(detector.config), sort_keys=False)
        (draft / "config.yaml").write_text(settings, "utf-8")
        write_thresholds(draft, detector.thresholds)
        files = {f.name: file_entry(f) for f in sorted(draft.iterdir())}
        # The manifest comes last: it holds the hashes of all other files but the history, and its
        # own hash is the model's id, which the history names.
        manifest = {**detector.manifest, "software_version": __version__, "files": files}
        write_sealed(draft / MANIFEST, manifest)
        written = model_id(draft)
        write_history(draft, detector.history, detector.changes, written)
    return written


def _save_tensors(tensors: Mapping[str, Any], file: Path) -> None:
    from safetensors.torch import save_file

    save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, file)
    share(file)


def manifest_of(
    detector: Model,
    weights_sha256: str | None,
    training_images: Mapping[str, str],
    refused_images: Mapping[str, int],
) -> dict[str, Any]:
    """A new model's manifest: its network, training images and origin; `save` adds the files.

    Args:
        detector: the model, just trained.
        weights_sha256: hash of the backbone's weights file; None for random weights.
        training_images: sha256 of each training image learned from, by name, in order.
        refused_images: number of each training image that wasn't learned from, by name.
    """
    from anomaly.backbones.layers import describe
    from anomaly.backbones.networks import backbone_of

    backbone = backbone_of(detector.config.backbone.name)
    return {
        "software_version": __version__,
        "aspect": detector.aspect,
        "backbone": {
            **describe(detector.extractor),
            "mean": list(detector.normalise.mean),
            "std": list(detector.normalise.std),
            "weights_sha256": weights_sha256,
            "weights_licence": backbone.licence() if weights_sha256 else None,
        },
        "made_with": {
            "packages": {name: _version(name) for name in (*_RECORDED, *backbone.packages)},
            "python": platform.python_version(),
            "machine": platform.machine(),
            "device": detector.device.type,
            "threads": get_threads(),
        },
        "files": {},
        "training_images": dict(training_images),
        "refused_images": dict(refused_images),
    }


def _version(package: str) -> str | None:
    """The version of an installed distribution; None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _pictures(region: Region | None) -> dict[str, bytes]:
    """The masks that say where to look, as PNG files by name."""
    shapes = {} if region is None else {"region": region.look, "ignore": region.ignore}
    return {
        MASKS[name]: cv2.imencode(".png", shape.pixels.astype(np.uint8) * 255)[1].tobytes()
        for name, shape in shapes.items()
        if isinstance(shape, DrawnMask)
    }
