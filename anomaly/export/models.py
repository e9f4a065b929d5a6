"""A model for another engine: its graph, the rest of its folder, and the proof that it is equal."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from anomaly.backbones.engine import Graph, check_precision, installed
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import DataError, ModelError, OutputError
from anomaly.export.equality import (
    TOLERANCE,
    compare,
    compare_patches,
    differences,
    golden_images,
)
from anomaly.export.graph import OPSET, write_graph
from anomaly.export.quantised import quantised, training_images
from anomaly.files.writing import as_json, like, remove_drafts, write
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
    model_id,
)
from anomaly.storage.load import load_model
from anomaly.training.fit import StageProgress
from anomaly.training.runs import made_of, training_record
from anomaly.version import __version__


def check_arguments(
    source: Path,
    output: Path,
    engine: str,
    *,
    precision: str,
    whole: bool,
    golden: Path | None,
    data_root: Path | None,
    further: Sequence[Path],
    overwrite: bool,
) -> Path:
    """See that a model can be exported as somebody wants it; see `export_model`.

    Returns:
        The model folder.

    Raises:
        ModelError: there is no model, it is an exported one, or the engine or what exporting needs
            isn't installed or doesn't compute in the number format.
        DataError: there are no images where they are said to be.
        OutputError: something is there already, or the model itself would be written over.
    """
    folder = find_model(source, exported=False)
    _check_output(folder, output / "model", overwrite)
    if precision != "fp32" and whole:
        raise ModelError("--whole is for other programs, and exported in fp32 only")
    if golden is not None:
        find_inputs([golden], option="--golden")
    if further:
        find_inputs(further, option="--training-images")
    if data_root is not None and not data_root.is_dir():
        raise DataError(f"--data-root {data_root} is no folder{like(data_root)}")
    _check_installed(engine, precision)
    check_precision(engine, precision, f"--precision {precision} was asked for")
    return folder


def _check_output(folder: Path, target: Path, overwrite: bool) -> None:
    model, place = folder.resolve(), target.resolve()
    if place.is_relative_to(model) or model.is_relative_to(place):
        raise OutputError(
            f"{target} is where the model is that is to be exported ({folder}); give another "
            "--output"
        )
    check_run_folder(target.parent)
    if (target / MANIFEST).is_file() and not (target / EXPORT).is_file():
        raise OutputError(
            f"{target} is a trained model, which an export isn't written over; give another "
            "--output"
        )
    claim_model(target, overwrite=overwrite)


def _check_installed(engine: str, precision: str) -> None:
    needed = ["onnx", "onnxscript", *(["onnxruntime"] if precision == "int8" else [])]
    if missing := [name for name in needed if find_spec(name) is None]:
        raise ModelError(
            f"exporting needs {' and '.join(missing)}: pip install 'anomaly[export,{engine}]'"
        )
    installed(engine, "the model is compared in")


log = logging.getLogger(__name__)


def export_model(
    source: Path,
    output: Path,
    engine: str,
    *,
    precision: str = "fp32",
    whole: bool = False,
    golden: Path | None = None,
    data_root: Path | None = None,
    further: Sequence[Path] = (),
    workers: int = 2,
    overwrite: bool = False,
    progress: StageProgress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Write a model for another engine, once that says the same about golden images.

    Args:
        source: the run, or its model folder.
        output: a folder that gets `model/`, and what the run remembers of its training.
        engine: a key of `anomaly.backbones.engine.ENGINES`.
        precision: `fp32` or `bf16`, the number format to compute in; `int8` makes another model,
            which learns again from the training images.
        whole: whether to write a second graph, on to patch scores, for other programs.
        golden: a folder of images to compare on; by default some of the training images.
        data_root: with `int8`, where the data sets are, if they have moved since training.
        further: with `int8`, folders with training images that aren't in the data set.
        workers: decoding processes.
        overwrite: replace an earlier export there.
        progress: called with (stage, done, total).

    Returns:
        What export.json says.

    Raises:
        ModelError: the model can't be exported, or the export doesn't say the same; then there is
            nothing new in `output`.
        DataError: there are no images to compare on, or, in int8, to learn from.
        OutputError: something is there already, the model itself would be written over, or it
            can't be written.
    """
    folder = check_arguments(
        source,
        output,
        engine,
        precision=precision,
        whole=whole,
        golden=golden,
        data_root=data_root,
        further=further,
        overwrite=overwrite,
    )
    remove_drafts(output)
    parent = load_model(folder, "cpu")
    samples = training_images(parent, source, data_root, further) if precision == "int8" else {}
    paths = golden_images(parent, source, golden, [one.path for one in samples.values()])
    with appearing(output / "model") as draft:
        progress("writing graphs", 0, 1)
        if precision == "int8":
            own, entry, inputs = quantised(
                parent, samples, draft, engine, workers=workers, progress=progress
            )
            reference = own
        else:
            own, entry, inputs = parent, write_graph(parent, draft, engine), 0
            _copy_rest(folder, own, draft)
            same = precision == own.extractor.precision
            reference = own if same else load_model(folder, "cpu", precision)
        values: dict[str, Any] = {
            "source_model_id": parent.model_id,
            "precision": precision,
            "network": entry,
            "whole": write_graph(own, draft, engine, whole=True) if whole else None,
            "software_version": __version__,
            "engine": engine,
            "opset": OPSET,
            "files": _graph_files(draft),
        }
        progress("writing graphs", 1, 1)
        network = open_network(draft, own.manifest, values)
        exported = replace(own, **exported_stages(network, draft, own.config))
        values["engine_version"] = network.graph.version
        both = reference, own
        values["equality"] = _equality(both, exported, draft, values, paths, workers, progress)
        if own is not parent:
            found = differences(parent, exported, paths, workers=workers)
            values["quantised"] = {"calibrated_on": inputs, **found}
        values["model_id"] = model_id(draft)
        write_export(draft, values)
    is_new = own is not parent
    record = made_of([source], own, values["model_id"]) if is_new else training_record(source)
    if record:  # where the data set is, for `evaluate`
        write(output / "train.json", as_json(record))
    return values


def _graph_files(draft: Path) -> dict[str, Any]:
    """Size and hash of each file of the graphs, by name."""
    files = sorted([*draft.glob("network.*"), *draft.glob("whole.*")])
    return {file.name: file_entry(file) for file in files}


def _equality(
    both: tuple[Model, Model],
    exported: Model,
    draft: Path,
    values: Mapping[str, Any],
    paths: Sequence[Path],
    workers: int,
    progress: StageProgress,
) -> dict[str, Any]:
    """How equal an export is to a model, in its number format and in the model's own.

    Raises:
        ModelError: not enough.
    """
    largest = compare(
        *both,
        exported,
        paths,
        workers=workers,
        progress=lambda done: progress("comparing", done, len(paths)),
    )
    if left := len(paths) - len(largest.images):
        log.warning("%d of %d golden images can't be scored, and prove nothing", left, len(paths))
    patches, precision = None, values["precision"]
    if values["whole"]:
        graph = Graph(draft / values["whole"]["file"], values["engine"], precision, workers)
        patches = compare_patches(both[0], graph, paths, workers=workers)
    return {
        "compared_with": f"torch {torch.__version__}, {precision}",
        "images": largest.images,
        "tolerance": TOLERANCE[precision],
        "largest_difference": largest.share,
        "largest_difference_at": largest.name,
        "largest_patch_difference": patches,
        "verdicts_changed": 0,
    }


def _copy_rest(folder: Path, model: Model, draft: Path) -> None:
    """Copy the files of a model folder but the network."""
    for name in (MANIFEST, *model.manifest["files"].keys() - {BACKBONE}):
        shutil.copyfile(folder / name, draft / name)
    if (folder / HISTORY).exists():
        shutil.copyfile(folder / HISTORY, draft / HISTORY)
