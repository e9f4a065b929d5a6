"""A model for another engine: its graph, its other files, and the check that it is equal."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anomaly.backbones.engine import Graph, check_precision, installed
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import ModelError, OutputError, some
from anomaly.export.equality import (
    TOLERANCE,
    Camera,
    Compared,
    compare,
    compare_patches,
    compare_pixels,
    golden_images,
)
from anomaly.files.writing import as_json, remove_drafts, write
from anomaly.scoring.pipeline import Model
from anomaly.storage.exported import exported_stages, open_network, write_export
from anomaly.storage.folder import (
    BACKBONE,
    EXPORT,
    HISTORY,
    MANIFEST,
    appearing,
    check_run_folder,
    claim_model,
    file_entry,
    find_model,
)
from anomaly.storage.golden import golden_of
from anomaly.storage.load import config_in, load_model
from anomaly.training.runs import training_record
from anomaly.version import __version__

if TYPE_CHECKING:
    from anomaly.training.fit import StageProgress  # with torch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportOptions:
    """How a model is exported.

    Attributes:
        engine: a key of `anomaly.backbones.engine.ENGINES`.
        precision: `fp32` or `bf16`, the number format to compute in.
        whole: whether to write a second graph, up to patch scores, for other programs.
        camera: the raw images that the second graph takes and judges; None for network inputs.
        golden: a folder of images to compare on; None for golden parts or training images.
        force: export in another number format than training's even if verdicts change.
        overwrite: replace an earlier export.
    """

    engine: str
    precision: str = "fp32"
    whole: bool = False
    camera: Camera | None = None
    golden: Path | None = None
    force: bool = False
    overwrite: bool = False


def check_export(source: Path, output: Path, options: ExportOptions) -> Path:
    """Check that a model can be exported with these options; imports no torch.

    Returns:
        The model folder.

    Raises:
        ModelError: there is no model, it is an exported one, or the engine or what exporting needs
            isn't installed or doesn't compute in the number format.
        DataError: a given folder has no images.
        OutputError: the output exists already, or the model itself would be overwritten.
    """
    folder, precision = find_model(source, exported=False), options.precision
    _check_output(folder, output / "model", options.overwrite)
    if precision != "fp32" and options.whole:
        raise ModelError("--whole exports in fp32 only; leave out --precision")
    if options.golden is not None:
        find_inputs([options.golden], option="--golden")
    if options.whole and options.camera is None:
        _warn_of_scores(folder)
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"exporting needs {' and '.join(missing)}: pip install 'anomaly[export,"
            f"{options.engine}]'"
        )
    installed(options.engine, "the model is compared in")
    check_precision(options.engine, precision, f"--precision {precision} was asked for")
    return folder


def _warn_of_scores(folder: Path) -> None:
    """Warn of a smallest defect, which a graph to patch scores leaves to other programs."""
    config = config_in(folder)
    if config.model.smallest_defect is not None:
        log.warning(
            "the whole graph ends with patch scores: smallest_defect of this model applies when "
            "anomaly runs the export, not in other programs"
        )


def _check_output(folder: Path, target: Path, overwrite: bool) -> None:
    model, place = folder.resolve(), target.resolve()
    if place.is_relative_to(model) or model.is_relative_to(place):
        raise OutputError(f"{target} holds the model to export ({folder}); give another --output")
    check_run_folder(target.parent)
    if (target / MANIFEST).is_file() and not (target / EXPORT).is_file():
        raise OutputError(
            f"{target} holds a trained model, which an export doesn't replace; give another "
            "--output"
        )
    claim_model(target, overwrite=overwrite)


def export_model(
    source: Path,
    output: Path,
    options: ExportOptions,
    *,
    workers: int = 2,
    progress: StageProgress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Write a model for another engine, if it is equal on golden images.

    Args:
        source: the run, or its model folder.
        output: a folder for `model/` and the run's facts of its training.
        options: engine, number format, and images to compare on.
        workers: decoding processes.
        progress: called with (stage, done, total).

    Returns:
        The content of export.json.

    Raises:
        ModelError: the model can't be exported, the export isn't equal, or verdicts change in
            another number format; then `output` is unchanged.
        DataError: there are no images to compare on.
        OutputError: the output exists already, the model itself would be overwritten, or the disk
            is full.
    """
    # They import torch; `check_export` refuses wrong options before.
    from anomaly.export.graph import OPSET, write_graph
    from anomaly.export.pixels import check_pixels

    folder = check_export(source, output, options)
    engine, precision, camera = options.engine, options.precision, options.camera
    remove_drafts(output)
    trained_in = config_in(folder).precision
    model = load_model(folder, "cpu", trained_in)
    if camera is not None:
        check_pixels(model)
    reference, recorded = model, None
    if precision != trained_in:
        reference = replace(model, extractor=model.extractor.to("cpu", precision))
        recorded = golden_of(folder)
    paths = golden_images(model, source, options.golden, recorded)
    with appearing(output / "model") as draft:
        progress("writing graphs", 0, 1)
        _copy_rest(folder, model, draft)
        entry, whole = write_graph(reference, draft, engine), None
        if options.whole:
            whole = write_graph(reference, draft, engine, whole=True, camera=camera)
        graphs = sorted([*draft.glob("network.*"), *draft.glob("whole.*")])
        values: dict[str, Any] = {
            "model_id": model.model_id,
            "precision": precision,
            "network": entry,
            "whole": whole,
            "software_version": __version__,
            "engine": engine,
            "opset": OPSET,
            "files": {file.name: file_entry(file) for file in graphs},
        }
        progress("writing graphs", 1, 1)
        network = open_network(draft, model.manifest, values)
        exported = replace(model, **exported_stages(network, draft, model.config))
        values["engine_version"] = network.graph.version
        compared = compare(
            model,
            reference,
            exported,
            paths,
            workers=workers,
            progress=lambda done: progress("comparing", done, len(paths)),
        )
        values["other_precision"] = None
        if reference is not model:
            values["other_precision"] = _other_precision(compared, trained_in, options)
        values["equality"] = _equality(compared, precision, len(paths))
        if whole:
            graph = Graph(draft / whole["file"], engine, precision, workers)
            if camera is None:
                share = compare_patches(reference, graph, paths, workers=workers)
            else:
                share = compare_pixels(reference, graph, paths, camera, workers=workers)
            values["equality"]["largest_whole_difference"] = share
        write_export(draft, values)
    if record := training_record(source):  # where the data set is, for `evaluate`
        write(output / "train.json", as_json(record))
    return values


def _copy_rest(folder: Path, model: Model, draft: Path) -> None:
    """Copy all files of a model folder except the network."""
    for name in (MANIFEST, *model.manifest["files"].keys() - {BACKBONE}):
        shutil.copyfile(folder / name, draft / name)
    if (folder / HISTORY).exists():
        shutil.copyfile(folder / HISTORY, draft / HISTORY)


def _other_precision(compared: Compared, trained_in: str, options: ExportOptions) -> dict[str, Any]:
    """Differences from the model in training's number format, as in export.json.

    Raises:
        ModelError: verdicts change, and they may not.
    """
    changed = compared.verdicts_changed
    if changed and not options.force:
        names = some([f"{one['image']}: {one['before']} -> {one['after']}" for one in changed])
        raise ModelError(
            f"the model was trained in {trained_in}, and in {options.precision} "
            f"{len(changed)} of {len(compared.images)} golden images get another verdict "
            f"({names}). Nothing was exported; train with --set precision={options.precision}, "
            f"or accept these changes with --force"
        )
    return {
        "trained_in": trained_in,
        "median_difference": float(np.median(compared.shifts)),
        "largest_difference": max(compared.shifts),
        "verdicts_changed": changed,
    }


def _equality(compared: Compared, precision: str, images: int) -> dict[str, Any]:
    """Differences between an export and its model in one number format, as in export.json."""
    if unusable := images - len(compared.images):
        log.warning("%d of %d golden images can't be scored and aren't compared", unusable, images)
    largest = int(np.argmax(compared.shares))
    return {
        "compared_with": f"torch {version('torch')}, {precision}",
        "images": compared.images,
        "tolerance": TOLERANCE[precision],
        "largest_difference": compared.shares[largest],
        "largest_difference_at": compared.images[largest],
        "largest_whole_difference": None,
    }
