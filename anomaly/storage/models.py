"""Models written to model folders and read back; exported models are read, too.

An exported model has the model folder's files without the network, and beside them:

    network.onnx           or network.xml and network.bin: images -> patch embeddings
    whole.onnx             camera pixels -> verdict; only with --pixels
    export.json            engine, inputs, outputs, differences on golden images; sha256 of these
                           files

The manifest is the model's, and so is its id: it is the same model, computed by another engine.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import yaml

from anomaly.backbones.engine import ExportedNetwork, Graph
from anomaly.config.load import parse_config, parse_yaml
from anomaly.config.schema import Config
from anomaly.errors import AnomalyError, ConfigError, ModelError, needs_training
from anomaly.files.writing import share
from anomaly.imaging.alignment import Reference
from anomaly.imaging.geometry import DrawnMask, Region
from anomaly.runtime import CPU, __version__, device_of, get_threads, has_bf16
from anomaly.scoring.build import MASKS, region_of, scorer_of, to_dict
from anomaly.scoring.image_statistics import TrainingStatistics
from anomaly.scoring.model import Model
from anomaly.storage.folder import (
    AGAIN,
    BACKBONE,
    EXPORT,
    MANIFEST,
    REFERENCE,
    SCORER,
    STATISTICS,
    appearing,
    check_files,
    check_model_folder,
    file_entry,
    find_model,
    model_id,
    read_manifest,
    read_sealed,
    read_tensors,
    write_sealed,
)
from anomaly.storage.thresholds import (
    read_history,
    read_thresholds,
    write_history,
    write_thresholds,
)

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)

_RECORDED = ("torch", "torchvision", "numpy", "faiss-cpu", "opencv-python-headless", "safetensors")


def load_model(
    folder: str | Path,
    device: str | torch.device = "auto",
    precision: str | None = None,
) -> Model:
    """Read a model folder, checking every file against the manifest.

    Args:
        folder: the model folder, or the run that holds it as `model/`.
        device: device of network and scorer: `auto` (the GPU where there is one), `cpu`, `cuda`,
            or a torch device. An exported model runs on the CPU.
        precision: `fp32` or `bf16`; None for the model's own, or fp32 on a device without bf16. A
            warning names one that isn't the model's own.

    Raises:
        AnomalyError: a GPU was asked for and isn't there; or torch, or an exported model's engine,
            isn't installed.
        ModelError: no model there, made by something else, or a file is missing, changed or
            doesn't belong; or precision or device can't be used.
    """
    if precision not in (None, "fp32", "bf16"):
        raise ModelError(f"precision {precision!r}: give 'fp32' or 'bf16'")
    folder = find_model(folder)
    manifest, export = read_folder(folder)
    if export and (precision == "bf16" or str(device) not in ("auto", "cpu")):
        raise ModelError(f"{folder} is an exported model, which runs on the CPU in fp32 only")
    config = config_in(folder)
    # Outside the try: a missing engine is no damage, and training again wouldn't help.
    stages = exported_stages(folder, manifest, export, config) if export else None
    try:
        chosen = CPU if export else device_of(device)
    except ModuleNotFoundError as error:
        raise needs_training(str(folder), error) from None
    try:
        statistics, reference = None, None
        if (folder / STATISTICS).is_file():
            tensors = read_tensors(folder / STATISTICS)
            n_images = len(manifest["training_images"])
            statistics = TrainingStatistics.from_tensors(tensors, n_images)
        if (align := config.image.align) != "none":
            tensors = read_tensors(folder / REFERENCE)
            reference = Reference.from_tensors(tensors, rigid=align == "rigid")
        return Model(
            config=config,
            **(stages or _torch_stages(folder, manifest, config, chosen, precision)),
            thresholds=read_thresholds(folder),
            region=region_of(config.image, folder),
            aspect=manifest["aspect"],
            reference=reference,
            training_statistics=statistics,
            manifest=manifest,
            model_id=model_id(folder),
            folder=folder,
            history=read_history(folder),
        )
    except (OSError, AnomalyError) as error:
        # The hashes fit, so the folder is undamaged: probably another version wrote it.
        raise _unreadable(folder, error) from None


def _torch_stages(
    folder: Path,
    manifest: dict[str, Any],
    config: Config,
    device: torch.device,
    precision: str | None,
) -> dict[str, Any]:
    """A model's stages in torch: the truncated network with its weights, and the scorer."""
    import torch  # which exports do without

    from anomaly.backbones.extractor import Normalisation
    from anomaly.backbones.layers import truncate_again
    from anomaly.backbones.networks import build, load_state

    backbone, name = manifest["backbone"], config.backbone.name
    try:
        extractor = truncate_again(build(name), backbone)
        file, network = folder / BACKBONE, extractor.network
        load_state(network, _tensors(file), network, str(file))
        colours = (tuple(float(backbone[key][i]) for i in range(3)) for key in ("mean", "std"))
        return {
            "extractor": extractor.to(device, _precision(config.precision, device, precision)),
            "normalise": Normalisation(*colours),
            "scorer": scorer_of(config, _tensors(folder / SCORER)).to(device),
            "device": device,
        }
    except (AnomalyError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # torch, timm and networks raise many types
        raise ModelError(
            f"{folder}: its network can't be built from its manifest; {AGAIN}"
        ) from None


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    """Copies of the tensors in a file, by name: overwriting a mapped file crashes its readers."""
    import torch

    return {name: torch.from_numpy(values).clone() for name, values in read_tensors(file).items()}


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
    """The error of a model folder that is undamaged, but that this version can't read."""
    if isinstance(error, ModelError) and AGAIN in str(error):  # it names the remedy already
        return error
    return ModelError(
        f"{folder} can't be read by anomaly {__version__} ({error}); train it again with this "
        "version"
    )


def _precision(own: str, device: torch.device, wanted: str | None) -> str:
    """`fp32` or `bf16`, in which a model runs; a warning names one that isn't the model's own.

    Args:
        own: the precision that the model was trained in.
        device: device of the network; one without bf16 runs in fp32, unless bf16 is wanted.
        wanted: the user's choice; None for `own`.
    """
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


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The manifest of a model folder, and its export.json or None; all files are checked.

    Raises:
        ModelError: a file is missing, was changed, has another format, or doesn't belong.
    """
    manifest, export = read_manifest(folder), None
    files = dict(manifest["files"])
    if (folder / EXPORT).exists():
        export = read_sealed(folder / EXPORT)
        if export["model_id"] != model_id(folder):
            raise ModelError(
                f"{folder} mixes files of two models: {EXPORT} belongs to another one than "
                f"{MANIFEST}; copy the whole model folder again"
            )
        files = {name: files[name] for name in files if name != BACKBONE} | export["files"]
    check_files(folder, files)
    return manifest, export


def exported_stages(
    folder: Path, manifest: Mapping[str, Any], export: Mapping[str, Any], config: Config
) -> dict[str, Any]:
    """An exported model's stages, by the names of the stages in torch that they replace.

    Raises:
        ModelError: the engine isn't installed, or the method has no scorer without torch.
    """
    graph = Graph(folder / export["network"]["file"], export["engine"], get_threads())
    layouts = manifest["backbone"]["layouts"]
    # A transformer's layers are tokens; their stride is the side of its patches.
    patch = next((each["stride"] for each in layouts if each["axes"] == "tokens"), None)
    return {
        "extractor": ExportedNetwork(graph, tuple(each["stride"] for each in layouts), patch),
        "normalise": None,  # the graph does
        "scorer": scorer_of(config, read_tensors(folder / SCORER)),
        "device": CPU,
    }


def save(model: Model, folder: Path, *, overwrite: bool = False) -> str:
    """Write a model folder, which appears complete or not at all; returns the model's id.

    Raises:
        OutputError: the folder exists and `overwrite` is False, or it isn't a model, or can't be
            written.
        ModelError: the model is an exported one.
    """
    check_model_folder(folder, overwrite=overwrite)
    with appearing(folder) as draft:
        _save_tensors(model.extractor.network.state_dict(), draft / BACKBONE)
        _save_tensors(model.scorer.tensors(), draft / SCORER)
        optional = {STATISTICS: model.training_statistics, REFERENCE: model.reference}
        for name, part in optional.items():
            if part is not None:
                _save_tensors(part.tensors(), draft / name)
        for name, picture in _mask_files(model.region).items():
            (draft / name).write_bytes(picture)
        settings = yaml.safe_dump(to_dict(model.config), sort_keys=False)
        (draft / "config.yaml").write_text(settings, "utf-8")
        write_thresholds(draft, model.thresholds)
        files = {f.name: file_entry(f) for f in sorted(draft.iterdir())}
        # The manifest comes last: it holds the hashes of all other files but the history, and its
        # own hash is the model's id, which the history names.
        manifest = {**model.manifest, "software_version": __version__, "files": files}
        write_sealed(draft / MANIFEST, manifest)
        new_id = model_id(draft)
        write_history(draft, model, new_id)
    return new_id


def _save_tensors(tensors: Mapping[str, Any], file: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({k: torch.as_tensor(v).cpu().contiguous() for k, v in tensors.items()}, file)
    share(file)


def manifest_of(
    model: Model,
    weights_sha256: str | None,
    training_images: Mapping[str, str],
    refused_images: Mapping[str, int],
) -> dict[str, Any]:
    """A new model's manifest: its network, training images and origin; `save` adds the files.

    Args:
        model: the model, just trained.
        weights_sha256: hash of the backbone's weights file; None for random weights.
        training_images: sha256 of each training image learned from, by name, in order.
        refused_images: number of each training image that wasn't learned from, by name.
    """
    from anomaly.backbones.layers import describe
    from anomaly.backbones.networks import backbone_of

    backbone = backbone_of(model.config.backbone.name)
    return {
        "software_version": __version__,
        "aspect": model.aspect,
        "backbone": {
            **describe(model.extractor),
            "mean": list(model.normalise.mean),
            "std": list(model.normalise.std),
            "weights_sha256": weights_sha256,
            "weights_licence": backbone.licence() if weights_sha256 else None,
        },
        "made_with": {
            "packages": {name: _version(name) for name in (*_RECORDED, *backbone.packages)},
            "python": platform.python_version(),
            "machine": platform.machine(),
            "device": model.device.type,
            "threads": get_threads(),
        },
        "files": {},
        "training_images": dict(training_images),
        "refused_images": dict(refused_images),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _mask_files(region: Region | None) -> dict[str, bytes]:
    """PNG files, by name, of a region's masks that are drawn; polygons are settings."""
    shapes = {} if region is None else {"region": region.look, "ignore": region.ignore}
    return {
        MASKS[name]: cv2.imencode(".png", shape.pixels.astype(np.uint8) * 255)[1].tobytes()
        for name, shape in shapes.items()
        if isinstance(shape, DrawnMask)
    }
