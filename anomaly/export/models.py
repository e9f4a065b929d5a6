"""A model for another engine: its graph, its other files, and the check that it is equal."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.backbones.engine import Graph, check_precision, installed
from anomaly.datasets import Sample
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import DataError, ModelError, OutputError
from anomaly.export.equality import (
    TOLERANCE,
    Camera,
    Largest,
    compare,
    compare_patches,
    compare_pixels,
    differences,
    golden_images,
)
from anomaly.export.vectors import VECTORS, is_written, write_vectors
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
    read_manifest,
)
from anomaly.storage.load import config_in, load_model
from anomaly.training.runs import made_of, training_record
from anomaly.version import __version__

if TYPE_CHECKING:
    from anomaly.training.fit import StageProgress  # with torch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportOptions:
    """How a model is exported.

    Attributes:
        engine: a key of `anomaly.backbones.engine.ENGINES`.
        precision: `fp32`, `bf16` or `int8`, the number format to compute in; a format other than
            the model's makes a new model, which is trained again on the training images.
        whole: whether to write a second graph, up to patch scores, for other programs.
        camera: the raw images that the second graph takes and judges; None for network inputs.
        keep_thresholds: whether a model that was trained in another number format keeps its
            thresholds, which then promise less; otherwise it is trained again on the training
            images.
        golden: a folder of images to compare on; None for some of the training images.
        data_root: the data sets' folder, if it has moved since training.
        further: folders with training images that aren't in the data set.
        overwrite: replace an earlier export.
    """

    engine: str
    precision: str = "fp32"
    whole: bool = False
    camera: Camera | None = None
    keep_thresholds: bool = False
    golden: Path | None = None
    data_root: Path | None = None
    further: Sequence[Path] = ()
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
    if options.further:
        find_inputs(options.further, option="--training-images")
    data_root = options.data_root
    if data_root is not None and not data_root.is_dir():
        raise DataError(f"--data-root {data_root} is no folder{like(data_root)}")
    if options.whole and options.camera is None:
        _warn_of_scores(folder)
    _check_installed(options.engine, precision)
    check_precision(options.engine, precision, f"--precision {precision} was asked for")
    return folder


def _warn_of_scores(folder: Path) -> None:
    """Warn of a smallest defect, which a graph to patch scores leaves to other programs."""
    config = config_in(folder, read_manifest(folder))
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
    if (vectors := target.with_name(VECTORS)).exists() and not is_written(vectors):
        raise OutputError(f"{vectors} is in the way; move it away, or give another --output")


def _check_installed(engine: str, precision: str) -> None:
    needed = ["onnx", "onnxscript", *(["onnxruntime"] if precision == "int8" else [])]
    if missing := [name for name in needed if find_spec(name) is None]:
        raise ModelError(
            f"exporting needs {' and '.join(missing)}: pip install 'anomaly[export,{engine}]'"
        )
    installed(engine, "the model is compared in")


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
        options: engine, number format, and images to compare on and to train on.
        workers: decoding processes.
        progress: called with (stage, done, total).

    Returns:
        The content of export.json.

    Raises:
        ModelError: the model can't be exported, or the export isn't equal; then `output` is
            unchanged.
        DataError: there are no images to compare on, or, for int8, to train on.
        OutputError: the output exists already, the model itself would be overwritten, or the disk
            is full.
    """
    # They import torch; `check_export` refuses wrong options before.
    from anomaly.export.graph import OPSET, write_graph
    from anomaly.export.pixels import check_pixels
    from anomaly.export.quantised import learned_again, quantised

    folder = check_export(source, output, options)
    engine, precision = options.engine, options.precision
    remove_drafts(output)
    parent, samples, camera = load_model(folder, "cpu"), {}, options.camera
    if camera is not None:
        check_pixels(parent)
    trained_in = parent.manifest["made_with"]["precision"]
    learns = precision == "int8" or (precision != trained_in and not options.keep_thresholds)
    if learns:
        samples = _training_images(parent, source, options, trained_in)
    elif options.data_root or options.further:
        raise DataError(
            "--data-root and --training-images are only for exports that are trained again: in "
            f"int8, or in a precision other than the model's {trained_in}; leave them out"
        )
    paths = golden_images(
        parent, source, options.golden, [sample.path for sample in samples.values()]
    )
    with appearing(output / "model") as draft:
        progress("writing graphs", 0, 1)
        if precision == "int8":
            own, entry, inputs = quantised(
                parent, samples, draft, engine, workers=workers, progress=progress
            )
            reference = own
        else:
            reference = parent
            if precision != trained_in or precision != parent.extractor.precision:
                reference = _in_precision(parent, precision)
            own, entry, inputs = parent, write_graph(reference, draft, engine), 0
            if learns:
                own = learned_again(reference, samples, draft, precision, workers, progress)
                reference = own
            else:
                _copy_rest(folder, own, draft)
        whole = None
        if options.whole:
            whole = write_graph(own, draft, engine, whole=True, camera=camera)
        graphs = sorted([*draft.glob("network.*"), *draft.glob("whole.*")])
        values: dict[str, Any] = {
            "source_model_id": parent.model_id,
            "precision": precision,
            "network": entry,
            "whole": whole,
            "software_version": __version__,
            "engine": engine,
            "opset": OPSET,
            "files": {file.name: file_entry(file) for file in graphs},
        }
        progress("writing graphs", 1, 1)
        network = open_network(draft, own.manifest, values)
        exported = replace(own, **exported_stages(network, draft, own.config))
        values["engine_version"] = network.graph.version
        largest = compare(
            reference,
            own,
            exported,
            paths,
            workers=workers,
            progress=lambda done: progress("comparing", done, len(paths)),
        )
        values["equality"] = _equality(largest, precision, len(paths))
        if whole:
            graph = Graph(draft / whole["file"], engine, precision, workers)
            if camera is None:
                share = compare_patches(reference, graph, paths, workers=workers)
            else:
                share = compare_pixels(reference, graph, paths, camera, workers=workers)
            values["equality"]["largest_whole_difference"] = share
        if own is not parent:
            changes = differences(parent, exported, paths, workers=workers)
            values["learned_again"] = {"calibrated_on": inputs, **changes}
        values["model_id"] = model_id(draft)
        with appearing(output / VECTORS) as vectors:
            named = replace(exported, model_id=values["model_id"])
            write_vectors(vectors, named, paths, camera)
        write_export(draft, values)
    is_new = own is not parent
    record = made_of(source, own, values["model_id"]) if is_new else training_record(source)
    if record:  # where the data set is, for `evaluate`
        write(output / "train.json", as_json(record))
    return values


def _in_precision(parent: Model, precision: str) -> Model:
    """The model with its network in another number format."""
    made = {**parent.manifest["made_with"], "precision": precision}
    return replace(
        parent,
        extractor=parent.extractor.to("cpu", precision),
        config=parent.config.model_copy(update={"precision": precision}),
        manifest={**parent.manifest, "made_with": made},
    )


def _training_images(
    parent: Model, source: Path, options: ExportOptions, trained_in: str
) -> dict[int, Sample]:
    """The training images, for an export in another number format.

    Raises:
        DataError: some are missing.
    """
    from anomaly.export.quantised import training_images

    try:
        return training_images(parent, source, options.data_root, options.further)
    except DataError as error:
        choice = "" if options.precision == "int8" else ", or --keep-thresholds to keep them"
        raise DataError(
            f"the model was trained in {trained_in}; scores differ in {options.precision}, so the "
            f"export is trained again on its training images, with new thresholds: {error}{choice}"
        ) from None


def _equality(largest: Largest, precision: str, images: int) -> dict[str, Any]:
    """Differences between an export and its source, as in export.json."""
    if unusable := images - len(largest.images):
        log.warning("%d of %d golden images can't be scored and aren't compared", unusable, images)
    return {
        "compared_with": f"torch {version('torch')}, {precision}",
        "images": largest.images,
        "tolerance": TOLERANCE[precision],
        "largest_difference": largest.share,
        "largest_difference_at": largest.name,
        "largest_whole_difference": None,
        "verdicts_changed": 0,
    }


def _copy_rest(folder: Path, model: Model, draft: Path) -> None:
    """Copy all files of a model folder except the network."""
    for name in (MANIFEST, *model.manifest["files"].keys() - {BACKBONE}):
        shutil.copyfile(folder / name, draft / name)
    if (folder / HISTORY).exists():
        shutil.copyfile(folder / HISTORY, draft / HISTORY)
