"""What is wrong with an export's arguments, told before anything is computed. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from anomaly.datasets.inputs import find_inputs
from anomaly.errors import DataError, ModelError, OutputError
from anomaly.features.engine import check_precision, installed
from anomaly.files.writing import like
from anomaly.model.folder import EXPORT, check_run_folder, claim_model, find_model
from anomaly.model.manifest import MANIFEST


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
