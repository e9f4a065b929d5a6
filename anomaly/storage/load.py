"""Model folders -> models."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.backbones.engine import ExportedNetwork
from anomaly.config.load import parse_config, parse_yaml
from anomaly.config.schema import Config
from anomaly.errors import AnomalyError, ConfigError, ModelError, needs_training
from anomaly.imaging.reference import Reference
from anomaly.methods.base import ArrayScorer
from anomaly.runtime.devices import CPU, device_of, has_bf16
from anomaly.scoring.build import region_of, scorer_of
from anomaly.scoring.image_statistics import TrainingStatistics
from anomaly.scoring.pipeline import Model
from anomaly.storage.exported import exported_stages, files_of, open_network, read_export
from anomaly.storage.folder import (
    AGAIN,
    BACKBONE,
    EXPORT,
    REFERENCE,
    SCORER,
    STATISTICS,
    check_files,
    find_model,
    model_id,
    read_manifest,
    read_tensors,
)
from anomaly.storage.thresholds import read_history, read_thresholds
from anomaly.version import __version__

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
    manifest, export = read_manifest(folder), read_export(folder)
    chosen = _device(folder, export, device)
    check_files(folder, files_of(manifest, export), [EXPORT] if export else [])
    config = config_in(folder, manifest)
    source = _Source(folder, manifest, config, chosen, precision)
    # Outside the try: a missing engine is no damage, and training again wouldn't help.
    network = _exported_network(source, export) if export else None
    try:
        stages = exported_stages(network, folder, config) if network else _torch_stages(source)
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
    _check_together(folder, manifest, stages["scorer"], training_statistics)
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


def _check_equal(folder: Path, key: str, recorded: object, actual: object) -> None:
    """See that a manifest and the files beside it say the same.

    Raises:
        ModelError: they don't.
    """
    if recorded != actual:
        raise ModelError(
            f"{folder}: {key} is {recorded!r} in its manifest, and {actual!r} in its other files; "
            f"{AGAIN}"
        )


def _check_together(
    folder: Path,
    manifest: dict[str, Any],
    scorer: ArrayScorer,
    training_statistics: TrainingStatistics | None,
) -> None:
    """See that the scorer is one for the network's embeddings and the manifest's images.

    Raises:
        ModelError: it isn't.
    """
    images = len(manifest["training_images"]) + len(manifest["refused_images"])
    try:
        scorer.check_origin(sum(manifest["backbone"]["channels"]), images)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}; {AGAIN}") from None
    if training_statistics is not None:
        _check_equal(folder, "channels", scorer.dimensions, len(training_statistics.mean))


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


@dataclass(frozen=True)
class _Source:
    """A model folder whose files were checked, and how its model is wanted; see `load_model`."""

    folder: Path
    manifest: dict[str, Any]
    config: Config
    device: torch.device
    precision: str | None


def _exported_network(source: _Source, export: dict[str, Any]) -> ExportedNetwork:
    """The exported network, asked for nothing but what it was compared in."""
    if source.precision not in (None, export["precision"]):
        raise ModelError(
            f"{source.folder} was exported in {export['precision']}; to have it in "
            f"{source.precision}, export the model again with --precision {source.precision}"
        )
    return open_network(source.folder, source.manifest, export)


def _torch_stages(source: _Source) -> dict[str, Any]:
    """A model's stages in torch: the truncated network with its weights, and the scorer."""
    from anomaly.backbones.registry import Normalisation  # needs torch, which exports do without

    backbone = source.manifest["backbone"]
    return {
        "extractor": _extractor(source),
        "normalise": Normalisation(tuple(backbone["mean"]), tuple(backbone["std"])),
        "scorer": scorer_of(source.config, _tensors(source.folder / SCORER), source.device),
        "device": source.device,
    }


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    """Copies of the tensors in a file: one mapped and written over takes the process with it."""
    import torch

    return {name: torch.from_numpy(values).clone() for name, values in read_tensors(file).items()}


def _extractor(source: _Source) -> FeatureExtractor:
    """The truncated network with its weights."""
    import torch

    from anomaly.backbones.registry import build, is_unchanged, load_state  # these need torch
    from anomaly.backbones.truncation import truncate, truncate_again

    folder, backbone = source.folder, source.manifest["backbone"]
    name, packages = source.config.backbone.name, source.manifest["made_with"]["packages"]
    try:
        if "truncation" in backbone and is_unchanged(name, packages):
            extractor = truncate_again(build(name), backbone)  # without torch's compiler: 2 s
        else:
            extractor = truncate(build(name), backbone["layers"])
        _check_equal(folder, "channels", backbone["channels"], list(extractor.channels))
        _check_equal(folder, "strides", backbone["strides"], list(extractor.strides))
        _check_equal(folder, "patch", backbone.get("patch"), extractor.patch)
        full = build(name)
        load_state(extractor.network, _tensors(folder / BACKBONE), full, str(folder / BACKBONE))
        return extractor.to(source.device, _precision(source))
    except (AnomalyError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # torch, timm and networks raise many types
        raise ModelError(
            f"{folder}: its network can't be built from its manifest; {AGAIN}"
        ) from None


def config_in(folder: Path, manifest: dict[str, Any]) -> Config:
    """The settings in a model folder, which repeat some of what its manifest says."""
    file = folder / "config.yaml"
    try:
        values = parse_yaml(file.read_text("utf-8"), str(file))
    except (ConfigError, UnicodeError):
        raise ModelError(f"{file} isn't YAML as this program writes it; {AGAIN}") from None
    except OSError as error:
        raise _unreadable(folder, error) from None
    try:
        config = parse_config(values, str(file))
    except ConfigError as error:
        raise _unreadable(folder, error) from None
    made, backbone = manifest["made_with"], manifest["backbone"]
    one_aspect = manifest["aspect"] is not None
    for key, recorded, actual in (
        ("name", manifest["name"], config.name),
        ("seed", manifest["seed"], config.seed),
        ("backbone.name", backbone["name"], config.backbone.name),
        ("backbone.weights", backbone["weights"], config.backbone.weights),
        ("batch_size", made["batch_size"], config.batch_size),
        ("precision", made["precision"], config.precision),
        ("one aspect for all images", one_aspect, config.one_aspect),
    ):
        _check_equal(folder, key, recorded, actual)
    return config


def _unreadable(folder: Path, error: Exception) -> ModelError:
    if isinstance(error, ModelError) and AGAIN in str(error):
        return error
    return ModelError(
        f"{folder} can't be read by anomaly {__version__} ({error}); train it again with this "
        "version"
    )


def _precision(source: _Source) -> str:
    """The model's own precision, unless another is wanted or the device is slower with it."""
    own = source.config.precision
    chosen = source.precision
    chosen = chosen or ("fp32" if own == "bf16" and not has_bf16(source.device) else own)
    if chosen != own:
        why = "as asked" if source.precision else "this machine doesn't have bf16"
        log.warning(
            "the model was trained in %s and runs in %s (%s): scores change by about 1 %% on "
            "average and by up to 10 %% for single images, so verdicts close to a threshold may "
            "change",
            own,
            chosen,
            why,
        )
    return chosen
