"""Model folders on disk: places, manifests, ids, and the check that all files are whole.

`manifest.json` holds the sha256 of each other file, and `manifest_sha256`, that of its own text
without this entry. `anomaly.storage.models` writes and reads the other files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from anomaly.errors import ModelError, OutputError, unwritable, why
from anomaly.files.writing import as_json, draft_of, from_json, is_model, like, sha256_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
HISTORY = "history.jsonl"
EXPORT = "export.json"  # only where a model was exported for another engine
BACKBONE, SCORER, STATISTICS, REFERENCE = (
    f"{n}.safetensors" for n in ("backbone", "scorer", "usual", "reference")
)
AGAIN = "copy the model folder again, or train again"

# Files that hold their own hash: the name of their format, and the remedy for another format.
_FORMATS = {
    MANIFEST: ("anomaly-model/4", "train it again"),
    EXPORT: ("anomaly-export/3", "export the model again"),
}
_SEAL = "manifest_sha256"
_T = TypeVar("_T")


def read_tensors(file: Path) -> dict[str, NDArray[Any]]:
    """The tensors in a safetensors file, by name; they may be mapped memory.

    Raises:
        OSError: the file can't be read.
        SafetensorError: its content is damaged.
    """
    # Imports numpy, which commands that only look for a folder do without.
    from safetensors.numpy import load, load_file

    try:
        os.fspath(file).encode()
    except UnicodeEncodeError:  # the library opens only files whose names are text
        return load(file.read_bytes())
    return load_file(file)


def checked(values: Any, kind: type[_T], file: Path) -> _T:
    """Values read from JSON as an instance of the dataclass `kind`; messages name `file`.

    Raises:
        ModelError: a value is missing, or of another type.
    """
    # Bytes of file names that aren't UTF-8 become `?`, as pydantic refuses them.
    text = json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        raise ModelError(f"{file}: {where} is missing, or its value is wrong; {AGAIN}") from None


@dataclass(frozen=True)
class _Layout:
    axes: str
    stride: int


@dataclass(frozen=True)
class _Network:
    layouts: list[_Layout]


@dataclass(frozen=True)
class _Manifest:
    """The values that every reader of a manifest relies on; it has more."""

    aspect: float | None
    backbone: _Network
    files: dict[str, dict[str, Any]]
    training_images: dict[str, str]
    refused_images: dict[str, int]


def read_manifest(folder: Path) -> dict[str, Any]:
    """A model's manifest: its origin, files and network; the files aren't looked at.

    Raises:
        ModelError: the manifest can't be read, was changed, or has another format.
    """
    values = read_sealed(folder / MANIFEST)
    checked(values, _Manifest, folder / MANIFEST)
    return values


def read_sealed(file: Path) -> dict[str, Any]:
    """The values in a manifest or export.json, without their own hash, which is checked.

    Raises:
        ModelError: it can't be read, was changed, or has another format.
    """
    try:
        text = file.read_bytes()
        values = from_json(text)
    except OSError as error:
        raise ModelError(f"{file} can't be read ({error.strerror}); {AGAIN}") from None
    except ValueError:
        raise ModelError(f"{file} isn't JSON as this program writes it; {AGAIN}") from None
    readable, remedy = _FORMATS[file.name]
    present = values.get("format") if isinstance(values, dict) else None
    if present != readable:
        raise ModelError(
            f"{file} has the format {str(present)[:40]!r}, but this version reads {readable!r}; "
            f"{remedy}"
        )
    values.pop(_SEAL, None)
    if text != _sealed(values).encode():
        raise ModelError(f"{file} was changed since it was written; {AGAIN}")
    return dict(values)


def write_sealed(file: Path, values: dict[str, Any]) -> None:
    """Write a manifest or export.json, which `read_sealed` reads; the format's name is added."""
    file.write_text(_sealed({"format": _FORMATS[file.name][0]} | values), "utf-8")


def _sealed(values: dict[str, Any]) -> str:
    """Values as JSON, with the hash of that JSON without it."""
    return as_json(values | {_SEAL: hashlib.sha256(as_json(values).encode()).hexdigest()})


def find_model(folder: str | Path, *, exported: bool = True) -> Path:
    """The model folder: the folder itself, or the `model/` of a run.

    Raises:
        ModelError: the folder holds no model or several, or an exported one without `exported`.
    """
    folder = Path(folder)
    if (model := _model_at(folder)) is not None:
        if not exported and (model / EXPORT).exists():
            raise ModelError(
                f"{model} is an exported model, which stays as it is and has verdicts and no "
                "layers; give the model folder that it was exported from"
            )
        return model
    if inside := _models_inside(folder):
        raise ModelError(
            f"{folder} is a folder of runs ({', '.join(inside)}); give one of them, e.g. "
            f"{folder / inside[0]}"
        )
    if not folder.exists():
        raise ModelError(f"no model at {folder}{like(folder) or '; train one first'}")
    if folder.is_file():
        raise ModelError(f"{folder} is a file; give the model's folder, or the run that it is in")
    raise ModelError(
        f"{folder} holds no model (no {MANIFEST} in it or in its model/); "
        "give the folder that `train` wrote"
    )


def find_models(folder: Path) -> dict[str, Path]:
    """The model folder of each run that `find_runs` finds, by the run's name.

    Raises:
        ModelError: as from `find_runs`.
    """
    return {run.absolute().name: find_model(run) for run in find_runs(folder)}


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a model folder or a run, else its subfolders that are one.

    Raises:
        ModelError: there is no model, or a subfolder holds parts of one without its manifest.
    """
    if _model_at(folder) is None and (inside := _models_inside(folder)):
        return [folder / name for name in inside]
    find_model(folder)
    return [folder]


def check_run_folder(folder: Path, source: Path | None = None) -> None:
    """Refuse a folder that can't become a run.

    Args:
        folder: the run's folder, which needn't exist.
        source: the model folder that an update or an export starts from.

    Raises:
        OutputError: it is the source, inside it or the folder that holds it; or it holds runs,
            which its own model would hide from `find_runs`.
        ModelError: a subfolder holds parts of a model without its manifest.
    """
    place, model = folder.resolve(), source and source.resolve()
    if model and (place == model.parent or place.is_relative_to(model)):
        raise OutputError(
            f"{folder} holds the source model and isn't replaced; name another folder"
        )
    if _model_at(folder) is None and (inside := _models_inside(folder)):
        raise OutputError(
            f"{folder} holds the runs {', '.join(inside[:5])}"
            f"{' …' if len(inside) > 5 else ''}, which a model in it would hide; name one of them, "
            "or a new folder"
        )


def _models_inside(folder: Path) -> list[str]:
    """The names of the subfolders that are a model folder or a run, sorted.

    Raises:
        ModelError: a subfolder holds parts of a model, but no manifest.
    """
    try:
        entries = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError:  # no such folder, or it can't be read
        return []
    models = []
    for entry in entries:
        # A `model/` makes the folder itself a run; drafts begin with a dot.
        if entry.name == "model" or entry.name.startswith("."):
            continue
        if _model_at(entry):
            models.append(entry.name)
        elif any((entry / part).exists() for part in _PARTS):  # a broken copy
            raise ModelError(
                f"{entry} holds parts of a model, but no {MANIFEST} in it or in its model/; "
                f"{AGAIN}, or move it out of {folder}"
            )
    return models


# Files of a run or model, by which a folder without a manifest is recognised as a broken copy.
_PARTS = ("train.json", *(f"{at}{name}" for at in ("", "model/") for name in (BACKBONE, SCORER)))


def _model_at(folder: Path) -> Path | None:
    """A folder's `model/`, or the folder itself, whichever has a manifest; None without."""
    for candidate in (folder / "model", folder):
        if (candidate / MANIFEST).is_file():
            return candidate
    return None


def check_files(folder: Path, expected: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a model folder whose files differ from `expected`: each one's `file_entry` by name.

    Raises:
        ModelError: a file is missing, was changed or doesn't belong.
    """
    # The first two hold their own hash, the history grows, and file managers add the last two.
    unchecked = {MANIFEST, EXPORT, HISTORY, "Thumbs.db", "desktop.ini"}
    present = {f.name for f in folder.iterdir() if not f.name.startswith(".")} - unchecked
    if missing := sorted(set(expected) - present):
        raise ModelError(f"{folder} lacks {', '.join(missing)}; {AGAIN}")
    if foreign := sorted(present - set(expected)):
        raise ModelError(
            f"{folder} holds {', '.join(foreign)}, which isn't part of the model; remove it there"
        )
    for name, record in expected.items():
        try:
            if file_entry(folder / name) != record:
                raise ModelError(f"{folder / name} was changed since it was written; {AGAIN}")
        except OSError as error:
            raise ModelError(f"{folder / name} can't be read: {error.strerror}; {AGAIN}") from None


def model_id(folder: Path) -> str:
    """The first 16 hex digits of the manifest's sha256; it holds the hashes of the other files."""
    return sha256_of(folder / MANIFEST)[:16]


def check_model_folder(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that a model mustn't be written to; nothing is deleted.

    Args:
        folder: the model folder, which needn't exist.
        overwrite: accept a folder that is empty or a model.

    Raises:
        OutputError: the folder exists and isn't accepted.
    """
    if not folder.exists():
        return
    if not overwrite:
        raise OutputError(
            f"{folder} exists already; give another --output or add --overwrite (overwrite=True)"
        )
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if not (is_empty or is_model(folder)):
        raise OutputError(
            f"{folder} isn't a model, so it isn't replaced; move it away or give another --output"
        )


def file_entry(file: Path) -> dict[str, Any]:
    """A manifest's entry about a file: its bytes and sha256."""
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A draft folder beside `folder`, which takes its name at the end, or vanishes on an error.

    A folder of that name is replaced; if that is interrupted, the old or the new one is there,
    whole. Of a link, the folder that it leads to is replaced.

    Raises:
        OutputError: the folder can't be written.
    """
    place = folder.resolve()
    draft, old = draft_of(place), draft_of(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        yield draft
        # Two renames, as a folder that isn't empty can't be replaced by one.
        if place.is_dir():
            place.rename(old)
        draft.rename(place)
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError):  # it holds the system's error number as text only
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            error = OSError(code, os.strerror(code))
        raise unwritable(folder, error) from None
    finally:
        if old.exists() and not place.exists():  # stopped between the two renames
            old.rename(place)
        shutil.rmtree(draft, ignore_errors=True)
        try:
            if old.exists():
                shutil.rmtree(old)
        except OSError as error:  # the model's own files are complete
            log.warning("%s, which was replaced, can't be deleted: %s", old, why(error))
