"""Model folders -> models."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.config.load import parse_config, parse_yaml
from anomaly.config.schema import Config
from anomaly.errors import AnomalyError, ConfigError, ModelError, needs_training
from anomaly.imaging.alignment import Reference
from anomaly.runtime import CPU, __version__, device_of, has_bf16
from anomaly.scoring.build import region_of, scorer_of
from anomaly.scoring.image_statistics import TrainingStatistics
from anomaly.scoring.model import Model
from anomaly.storage.exported import exported_stages, open_network, read_folder
from anomaly.storage.folder import (
    AGAIN,
    BACKBONE,
    REFERENCE,
    SCORER,
    STATISTICS,
    find_model,
    model_id,
    read_tensors,
)
from anomaly.storage.thresholds import read_history, read_thresholds

if TYPE_CHECKING:
    import torch

    from anomaly.backbones.extractor import FeatureExtractor


log = logging.getLogger(__name__)


def load_model(
    folder: str | Path,
    device: str | torch.device = "auto",
    precision: str | None = None,
) -> Model:
    """Read a model folder, checking every file against the manifest.

    Args:
        folder: the model folder, or the run that holds it as `model/`.
        device: where the network and the scorer go: `auto` (the GPU where there is one), `cpu`,
            `cuda`, or a torch device.
        precision: `fp32` or `bf16` instead of the model's own, which a warning points out.

    Raises:
        AnomalyError: a GPU was asked for and isn't there; or the model isn't an exported one, and
            torch isn't installed.
        ModelError: no model there, made by something else, or a file is missing, changed or
            doesn't belong; or there is no such precision.
    """
    if precision not in (None, "fp32", "bf16"):
        raise ModelError(f"precision {precision!r}: give 'fp32' or 'bf16'")
    folder = find_model(folder)
    manifest, export = read_folder(folder)
    chosen, config = _device(folder, export, device), config_in(folder)
    if export and precision == "bf16":
        raise ModelError(f"{folder} is an exported model, which computes in fp32 only")
    # Outside the try: a missing engine is no damage, and training again wouldn't help.
    network = open_network(folder, manifest, export) if export else None
    try:
        if network:
            stages = exported_stages(network, folder, config)
        else:
            stages = _torch_stages(folder, manifest, config, chosen, precision)
        statistics = folder / STATISTICS
        images = len(manifest["training_images"])
        training_statistics = None
        if statistics.is_file():
            training_statistics = TrainingStatistics.from_tensors(read_tensors(statistics), images)
        thresholds = read_thresholds(folder)
        region = region_of(config.image, folder)
        reference = None
        if (align := config.image.align) != "none":
            tensors = read_tensors(folder / REFERENCE)
            reference = Reference.from_tensors(tensors, rigid=align == "rigid")
    except (OSError, AnomalyError) as error:
        # The hashes fit, so the folder is as it was written: by another version, perhaps.
        raise _unreadable(folder, error) from None
    return Model(
        config=config,
        **stages,
        thresholds=thresholds,
        region=region,
        aspect=manifest["aspect"],
        reference=reference,
        training_statistics=training_statistics,
        manifest=manifest,
        model_id=model_id(folder),
        folder=folder,
        history=read_history(folder),
    )


def _device(
    folder: Path, export: dict[str, Any] | None, wanted: str | torch.device
) -> torch.device:
    """The device that a model computes on.

    Raises:
        ModelError: an export was to compute elsewhere.
        AnomalyError: there is no such device here, or no torch, which the model needs.
    """
    if export is None:
        try:
            return device_of(wanted)
        except ModuleNotFoundError as error:
            raise needs_training(str(folder), error) from None
    if str(wanted) not in ("auto", "cpu"):
        raise ModelError(f"{folder}: an exported model computes on the CPU; choose that device")
    return CPU


def _torch_stages(
    folder: Path,
    manifest: dict[str, Any],
    config: Config,
    device: torch.device,
    precision: str | None,
) -> dict[str, Any]:
    """A model's stages in torch: the truncated network with its weights, and the scorer."""
    from anomaly.backbones.registry import Normalisation  # needs torch, which exports do without

    backbone = manifest["backbone"]
    extractor = _extractor(folder, backbone, config.backbone.name)
    return {
        "extractor": extractor.to(device, _precision(config.precision, device, precision)),
        "normalise": Normalisation(tuple(backbone["mean"]), tuple(backbone["std"])),
        "scorer": scorer_of(config, _tensors(folder / SCORER), device),
        "device": device,
    }


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    """Copies of the tensors in a file: one mapped and written over takes the process with it."""
    import torch

    return {name: torch.from_numpy(values).clone() for name, values in read_tensors(file).items()}


def _extractor(folder: Path, backbone: dict[str, Any], name: str) -> FeatureExtractor:
    """The truncated network with its weights."""
    import torch

    from anomaly.backbones.registry import build, load_state  # these need torch
    from anomaly.backbones.truncation import truncate_again

    try:
        extractor = truncate_again(build(name), backbone)
        file, network = folder / BACKBONE, extractor.network
        load_state(network, _tensors(file), network, str(file))
        return extractor
    except (AnomalyError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # torch, timm and networks raise many types
        raise ModelError(
            f"{folder}: its network can't be built from its manifest; {AGAIN}"
        ) from None


def config_in(folder: Path) -> Config:
    """The settings in a model folder.

    Raises:
        ModelError: the file can't be read, or holds no settings of this version.
    """
    file = folder / "config.yaml"
    try:
        return parse_config(parse_yaml(file.read_text("utf-8"), str(file)), str(file))
    except (ConfigError, UnicodeError, OSError) as error:
        raise _unreadable(folder, error) from None


def _unreadable(folder: Path, error: Exception) -> ModelError:
    if isinstance(error, ModelError) and AGAIN in str(error):
        return error
    return ModelError(
        f"{folder} can't be read by anomaly {__version__} ({error}); train it again with this "
        "version"
    )


def _precision(own: str, device: torch.device, wanted: str | None) -> str:
    """The model's own precision, unless another is wanted or the device is slower with it."""
    chosen = wanted or ("bf16" if own == "bf16" and has_bf16(device) else "fp32")
    if chosen != own:
        log.warning(
            "the model was trained in %s and runs in %s (%s): scores change by about 1 %% on "
            "average and by up to 10 %% for single images, so verdicts close to a threshold may "
            "change",
            own,
            chosen,
            "as asked" if wanted else "this machine doesn't have bf16",
        )
    return chosen
