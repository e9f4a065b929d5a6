"""A folder of runs, one for each product -> a ProductSet whose models share one network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.numpy import load_file

from anomaly.config.methods import METHODS
from anomaly.errors import ModelError, some
from anomaly.model import checkpoint
from anomaly.model.appearance_model import LEAST_IMAGES, AppearanceModel
from anomaly.model.exported import files_of, read_export
from anomaly.model.folder import BACKBONE, USUAL, check_files, find_products
from anomaly.model.manifest import read_manifest
from anomaly.model.products import AnyModel, ProductSet, check_product
from anomaly.model.settings import MASKS, flat, portable

if TYPE_CHECKING:
    import torch


def load(
    folder: str | Path,
    device: str | torch.device = "auto",
    precision: str | None = None,
    product: str | None = None,
) -> AnyModel:
    """Read a model folder, or a folder that holds a run for each of several products.

    Every file is checked against its manifest.

    Args:
        folder: the model folder, the run that holds it as `model/`, or the folder of the runs.
        device: where the network and the scorer go: `auto` (the GPU where there is one), `cpu`,
            `cuda`, or a torch device.
        precision: `fp32` or `bf16` instead of the model's own, which a warning points out.
        product: that all images show, one of several; None tells each image's.

    Returns:
        An `AnomalyDetector` of one model; a `ProductSet` of several, with the same methods.

    Raises:
        AnomalyError: a GPU was asked for and isn't there; or the model isn't an exported one, and
            torch isn't installed.
        ModelError: no model there, made by something else, or a file is missing, changed or
            doesn't belong; there is no such product; or the products' models can't share one
            network, or nothing tells images of theirs apart.
    """
    folder = Path(folder)
    products = find_products(folder)
    if product is not None:
        check_product(folder, products, product)
    if not products:
        return checkpoint.load(folder, device, precision)
    _check_sharing(folder, products, precision)
    if product is None:
        _check_looks(folder, products)
    models: dict[str, Any] = {}
    for name, place in products.items():
        like = next(iter(models.values()), None)
        models[name] = checkpoint.load(place, device, precision, like=like)
    return ProductSet(models, product or "", folder)


def appearances(folder: Path) -> dict[str, AppearanceModel]:
    """What the images of each of several products look like, without their networks and scorers.

    Args:
        folder: of the products' runs.

    Raises:
        ModelError: as `load`.
    """
    products = find_products(folder)
    _check_sharing(folder, products, None)
    _check_looks(folder, products)
    return {name: _appearance(place) for name, place in products.items()}


def _appearance(place: Path) -> AppearanceModel:
    manifest = read_manifest(place)
    files = files_of(manifest, read_export(place))
    check_files(place, {USUAL: files[USUAL]}, files.keys() - {USUAL})
    return AppearanceModel.from_tensors(load_file(place / USUAL), len(manifest["training_images"]))


def _check_sharing(folder: Path, products: Mapping[str, Path], precision: str | None) -> None:
    """See that what one network makes of an image serves the models of all products.

    Raises:
        ModelError: it doesn't; says what differs between which.
    """
    every = {name: _shared(place, precision) for name, place in products.items()}
    first, *others = every
    for other in others:
        ours, theirs = every[first], every[other]
        different = [
            f"{key} is {_said(ours.get(key))} in {first} and {_said(theirs.get(key))} in {other}"
            for key in ours | theirs
            if ours.get(key) != theirs.get(key)
        ]
        if listed := some(different, "; "):
            raise ModelError(
                f"the models in {folder} can't share one pass of the network: {listed}. Train "
                f"them with one config, or score them one by one, with {folder / first} say"
            )


def _shared(place: Path, precision: str | None) -> dict[str, Any]:
    """All that what a network makes of an image depends on, by name."""
    manifest, export = read_manifest(place), read_export(place)
    config = checkpoint.config_in(place, manifest)
    files = files_of(manifest, export)
    stem = Path(export["network"]["file"]).stem if export else Path(BACKBONE).stem
    settings = portable(config)
    every = dict(flat(settings))
    backbone = {k: v for k, v in manifest["backbone"].items() if k != "weights_licence"}
    return {
        "model.kind": config.model.kind,
        "the engine": export["engine"] if export else "torch",
        "precision": precision or (export or manifest["made_with"])["precision"],
        "the images' aspect": manifest["aspect"],
        **{f"backbone.{key}": value for key, value in backbone.items()},
        **{key: every[key] for key in METHODS[config.model.kind].embedded_by},
        **dict(flat(settings["image"], "image.")),
        **{
            f"the content of {name}": one["sha256"]
            for name, one in files.items()
            if Path(name).stem == stem or name in MASKS.values()
        },
    }


def _said(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _check_looks(folder: Path, products: Mapping[str, Path]) -> None:
    """See that every model knows what its product looks like, where there is more than one.

    Raises:
        ModelError: one of them doesn't.
    """
    lacking = [
        name
        for name, place in products.items()
        if not (place / USUAL).is_file()
        or len(read_manifest(place)["training_images"]) < LEAST_IMAGES
    ]
    if lacking and len(products) > 1:
        raise ModelError(
            f"{folder}: {', '.join(lacking)} learned from too few images to tell what else looks "
            "like it; say which product the images show (--product, product=)"
        )
