"""The model folder: tensors, settings and a manifest that vouches for every file. No pickle.

    model/
      backbone.safetensors   the truncated network
      scorer.safetensors     the memory bank or the Gaussians
      usual.safetensors      what images look like as a whole
      region.png, ignore.png where to look, if that was drawn as a picture
      config.yaml            every setting but the place of the data
      thresholds.json        where good ends, and how that was found
      calibration.json       the scores of good images that the thresholds come from
      manifest.json          sha256 of every file, training images, versions, seed; the ids of
                             the models that it comes from, where it was updated or merged
      history.jsonl          when thresholds or more were changed, and why; only once they were

Files but the history hold no time and no absolute path: the same training gives the same bytes.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from safetensors import SafetensorError
from safetensors.numpy import load_file

from anomaly.config.parsing import parse_config
from anomaly.config.schema import Config
from anomaly.errors import AnomalyError, ModelError, needs_training
from anomaly.features.engine import ExportedNetwork
from anomaly.imaging.decoder_pool import read_mask
from anomaly.model.appearance_model import AppearanceModel
from anomaly.model.build import scorer_of
from anomaly.model.consistency import agree, check_together
from anomaly.model.exported import exported_stages, files_of, open_network, read_export
from anomaly.model.folder import (
    BACKBONE,
    EXPORT,
    SCORER,
    USUAL,
    check_files,
    find_model,
    model_id,
)
from anomaly.model.manifest import AGAIN, read_manifest
from anomaly.model.scoring import Model
from anomaly.model.settings import as_of_today, has_two_banks, region_of
from anomaly.model.threshold_files import read_history, read_thresholds
from anomaly.runtime.devices import CPU, device_of, has_bf16
from anomaly.version import __version__

if TYPE_CHECKING:
    import torch

    from anomaly.features.extractor import FeatureExtractor

log = logging.getLogger(__name__)


def load(
    folder: str | Path,
    device: str | torch.device = "auto",
    precision: str | None = None,
    *,
    like: Model | None = None,
) -> Model:
    """Read a model folder, checking every file against the manifest.

    Args:
        folder: the model folder, or the run that holds it as `model/`.
        device: where the network and the scorer go: `auto` (the GPU where there is one), `cpu`,
            `cuda`, or a torch device.
        precision: `fp32` or `bf16` instead of the model's own, which a warning points out.
        like: a model of the same network, which is then in memory once; None to read it.

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
    network = _exported(folder, manifest, export, precision, like) if export else None
    try:
        stages = (
            exported_stages(network, folder, config)
            if network
            else _computed_stages(folder, manifest, config, chosen, precision, like)
        )
        looks = folder / USUAL
        images = len(manifest["training_images"])
        appearance = (
            AppearanceModel.from_tensors(load_file(looks), images) if looks.is_file() else None
        )
        thresholds = read_thresholds(folder)
        region = region_of(config.image, folder, read_mask)
    except SafetensorError:
        raise ModelError(f"{folder}: a .safetensors file in it is damaged; {AGAIN}") from None
    except (OSError, AnomalyError) as error:
        # The hashes fit, so the folder is as it was written: by another version, perhaps.
        raise _unreadable(folder, manifest, error) from None
    check_together(folder, manifest, stages["scorer"], appearance)
    return Model(
        config=config,
        **stages,
        thresholds=thresholds,
        region=region,
        aspect=manifest["aspect"],
        appearance=appearance,
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


def _exported(
    folder: Path,
    manifest: dict[str, Any],
    export: dict[str, Any],
    precision: str | None,
    like: Model | None,
) -> ExportedNetwork:
    """The exported network, asked for nothing but what it was compared in."""
    if precision not in (None, export["precision"]):
        raise ModelError(
            f"{folder} was exported in {export['precision']}; to have it in {precision}, export "
            f"the model again with --precision {precision}"
        )
    if like is not None and isinstance(like.extractor, ExportedNetwork):
        return like.extractor
    return open_network(folder, manifest, export)


def _computed_stages(
    folder: Path,
    manifest: dict[str, Any],
    config: Config,
    device: torch.device,
    precision: str | None,
    like: Model | None,
) -> dict[str, Any]:
    """A detector's stages in torch: the truncated network with its weights, and the scorer."""
    from safetensors.torch import load_file

    from anomaly.features.backbones import Normalisation

    network = like.extractor if like else _extractor(folder, manifest, config, device, precision)
    backbone = manifest["backbone"]
    # Copies: a mapped file that somebody writes over takes the process with it.
    known = {name: values.clone() for name, values in load_file(folder / SCORER).items()}
    return {
        "extractor": network,
        "normalise": Normalisation(tuple(backbone["mean"]), tuple(backbone["std"])),
        "scorer": scorer_of(config, known, device),
        "device": device,
    }


def _extractor(
    folder: Path,
    manifest: dict[str, Any],
    config: Config,
    device: torch.device,
    precision: str | None,
) -> FeatureExtractor:
    """The truncated network with its weights."""
    from safetensors.torch import load_file

    from anomaly.features.backbone_weights import load_state
    from anomaly.features.backbones import build
    from anomaly.features.truncation import truncate

    backbone = manifest["backbone"]
    truncated = truncate(build(config.backbone.name), backbone["layers"])
    agree(folder, "channels", backbone["channels"], list(truncated.channels))
    agree(folder, "strides", backbone["strides"], list(truncated.strides))
    agree(folder, "patch", backbone.get("patch"), truncated.extractor().patch)
    # Copies, as of the scorer's tensors.
    state = {name: values.clone() for name, values in load_file(folder / BACKBONE).items()}
    full = build(config.backbone.name)
    load_state(truncated.network, state, full, str(folder / BACKBONE))
    return truncated.extractor().to(device, _precision(config, device, precision))


def config_in(folder: Path, manifest: dict[str, Any]) -> Config:
    """The settings in a model folder, which repeat some of what its manifest says."""
    file = folder / "config.yaml"
    try:
        values = as_of_today(yaml.safe_load(file.read_text("utf-8")))
        config = None if has_two_banks(values) else parse_config(values, str(file))
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ModelError(f"{file} isn't YAML as this program writes it; {AGAIN}") from None
    except (OSError, AnomalyError) as error:
        raise _unreadable(folder, manifest, error) from None
    if config is None:
        raise ModelError(
            f"{folder} has two memory banks (model.embedding: levels), which this version doesn't "
            "support; train it again"
        )
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
            "the model was trained in %s and runs in %s (%s): scores move by about 1 %% in "
            "the mean, single ones by up to 10 %%, and verdicts close to a threshold may change",
            own,
            chosen,
            why,
        )
    return chosen
