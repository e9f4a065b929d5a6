"""A model for another engine: its graph, the rest of its folder, and the proof that it is equal."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from anomaly import __version__
from anomaly.errors import ModelError, OutputError
from anomaly.export.equality import TOLERANCE, compare, compare_patches, golden_images
from anomaly.export.graph import OPSET, write_graph
from anomaly.features.engine import Graph, check_precision, installed
from anomaly.files.writing import as_json, write
from anomaly.model.checkpoint import load
from anomaly.model.exported import exported_stages, open_network, write_export
from anomaly.model.folder import HISTORY, appearing, file_entry, find_model
from anomaly.model.manifest import MANIFEST
from anomaly.model.run_folder import training_record
from anomaly.model.saving import BACKBONE


def export_model(
    source: Path,
    output: Path,
    engine: str,
    *,
    precision: str = "fp32",
    whole: bool = False,
    golden: Path | None = None,
    workers: int = 2,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Write a model for another engine, once that says the same about golden images.

    Args:
        source: the run, or its model folder.
        output: a folder that gets `model/`, and what the run remembers of its training.
        engine: a key of `anomaly.features.engine.ENGINES`.
        precision: `fp32` or `bf16`, the number format to compute in.
        whole: whether to write a second graph, on to patch scores, for other programs.
        golden: a folder of images to compare on; by default some of the training images.
        workers: decoding processes.
        overwrite: replace an earlier export there.
        progress: called with (stage, done, total).

    Returns:
        What export.json says.

    Raises:
        ModelError: the model can't be exported, or the export doesn't say the same; then there is
            nothing new in `output`.
        DataError: there are no images to compare on.
        OutputError: something is there already, or it can't be written.
    """
    folder = find_model(source, exported=False)
    _check_installed(engine)
    if (output / "model").exists() and not overwrite:
        raise OutputError(
            f"{output / 'model'} exists already; give another --output or add --overwrite"
        )
    if precision == "bf16" and whole:
        raise ModelError("--whole is for other programs, and exported in fp32 only")
    check_precision(engine, precision, f"--precision {precision} was asked for")
    own = load(folder, "cpu")
    same = precision == own.extractor.precision
    reference = own if same else load(folder, "cpu", precision)
    paths = golden_images(own, source, golden)
    with appearing(output / "model") as draft:
        progress("writing graphs", 0, 1)
        values: dict[str, Any] = {
            "software_version": __version__,
            "source_model_id": own.model_id,
            "engine": engine,
            "opset": OPSET,
            "precision": precision,
            "network": write_graph(own, draft, engine),
            "whole": write_graph(own, draft, engine, whole=True) if whole else None,
            "files": {file.name: file_entry(file) for file in sorted(draft.iterdir())},
        }
        progress("writing graphs", 1, 1)
        for name in (MANIFEST, *own.manifest["files"].keys() - {BACKBONE}):
            shutil.copyfile(folder / name, draft / name)
        if (folder / HISTORY).exists():
            shutil.copyfile(folder / HISTORY, draft / HISTORY)
        network = open_network(draft, own.manifest, values)
        exported = replace(own, **exported_stages(network, draft, own.config))
        largest = compare(
            reference,
            own,
            exported,
            paths,
            workers=workers,
            progress=lambda done: progress("comparing", done, len(paths)),
        )
        patches = None
        if whole:
            graph = Graph(draft / values["whole"]["file"], engine, precision, workers)
            patches = compare_patches(reference, graph, paths, workers=workers)
        values["engine_version"] = network.version
        values["equality"] = {
            "compared_with": f"torch {torch.__version__}, {precision}",
            "images": [path.name for path in paths],
            "tolerance": TOLERANCE[precision],
            "largest_difference": largest.share,
            "largest_difference_at": largest.name,
            "largest_patch_difference": patches,
            "verdicts_changed": 0,
        }
        write_export(draft, values)
    if record := training_record(source):  # where the data set is, for `evaluate`
        write(output / "train.json", as_json(record))
    return values


def _check_installed(engine: str) -> None:
    if missing := [n for n in ("onnx", "onnxscript") if find_spec(n) is None]:
        raise ModelError(
            f"exporting needs {' and '.join(missing)}: pip install 'anomaly[export,{engine}]'"
        )
    installed(engine, "the model is compared in")
