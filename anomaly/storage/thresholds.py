"""Thresholds in a model folder, and the history of their changes since training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anomaly.calibration.rates import Rate
from anomaly.calibration.thresholds import GoodScores, Threshold, Thresholds
from anomaly.errors import DataError, ModelError
from anomaly.files.writing import as_json, from_json
from anomaly.runtime import __version__
from anomaly.storage.folder import AGAIN, HISTORY, checked

if TYPE_CHECKING:
    from anomaly.scoring.model import Model

_FILES = ("thresholds.json", "calibration.json")


def write_thresholds(folder: Path, thresholds: Thresholds | None) -> None:
    """Write thresholds, and the good images' scores behind them; both files hold null for None."""
    contents = (None if thresholds is None else thresholds.to_json(), _scores(thresholds))
    for name, values in zip(_FILES, contents, strict=True):
        (folder / name).write_text(as_json(values), "utf-8")


def _scores(thresholds: Thresholds | None) -> dict[str, Any] | None:
    """The scores of good images behind thresholds, as plain values; optional ones only if set."""
    if thresholds is None:
        return None
    values = asdict(thresholds.good).items()
    return {key: value for key, value in values if value or key not in ("hashes", "stood_out")}


def read_thresholds(folder: Path) -> Thresholds | None:
    """Thresholds from the two files of a model folder; None where the model has none.

    Raises:
        ModelError: an entry is missing, or of another type.
    """
    files = [folder / name for name in _FILES]
    values, scores = (from_json(file.read_bytes()) for file in files)
    return None if values is None else _thresholds(values, scores, files)


def earlier_thresholds(model: Model) -> Thresholds:
    """The thresholds before the last change that wasn't undone.

    Raises:
        DataError: there was no such change since training, or since the last update.
        ModelError: the thresholds are damaged.
    """
    file = Path(model.folder or "") / HISTORY
    undone = 0  # changes still to be skipped, since later entries undo them
    for entry in _since_update(model.history):
        if entry.get("before") is None:  # the model had no thresholds until then
            break
        undone += 1 if "undo" in entry["asked"] else -1
        if undone < 0:
            return _thresholds(entry["before"], entry.get("scores_before"), [file, file])
    raise DataError(f"{file} names no earlier thresholds, so there is nothing to undo")


def _thresholds(values: Any, scores: Any, files: Sequence[Path]) -> Thresholds:
    """Thresholds from plain values.

    Args:
        values: content of thresholds.json.
        scores: content of calibration.json.
        files: the files that hold the two, for messages.

    Raises:
        ModelError: an entry is missing, or of another type.
    """
    written = checked(values, _ThresholdsFile, files[0])
    good = checked(scores, GoodScores, files[1])
    return Thresholds(written.review, written.reject, written.label, good)


@dataclass(frozen=True)
class _ThresholdsFile:
    """The entries of thresholds.json that are read; the others follow from them and the scores."""

    label: Literal["calibrated", "by hand"]
    review: Threshold
    reject: Threshold


def read_history(folder: Path) -> bytes:
    """A model folder's history: a line of JSON for each change; empty without any.

    Raises:
        ModelError: the history can't be read.
    """
    file = folder / HISTORY
    try:
        return file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror}; {AGAIN}") from None


def models_scoring_alike(folder: Path) -> frozenset[str]:
    """Ids of a folder's earlier models that score each image as its present one does.

    These are the models since the last update, because only an update changes scores.
    """
    entries = _since_update(read_history(folder))
    return frozenset({str(entry.get("model_before", "")) for entry in entries} - {""})


def thresholds_by_id(folder: Path) -> dict[str, Thresholds]:
    """Thresholds of the models that `models_scoring_alike` names, where they had any, by id.

    Raises:
        ModelError: the history can't be read, or its thresholds are damaged.
    """
    files = [folder / HISTORY] * 2
    return {
        str(entry["model_before"]): _thresholds(entry["before"], entry.get("scores_before"), files)
        for entry in _since_update(read_history(folder))
        if entry.get("model_before") and entry.get("before")
    }


def changes_of(model: Model) -> list[Mapping[str, Any]]:
    """Entries of a model's history and of changes not saved yet, oldest first."""
    return [*_entries(model.history), *model.changes]


def _entries(history: bytes) -> list[dict[str, Any]]:
    """The entries of a history, oldest first; lines that a person has added are passed over."""
    entries = []
    for line in history.splitlines():
        with suppress(ValueError):
            entry = from_json(line)
            if isinstance(entry, dict) and isinstance(entry.get("asked"), dict):
                entries.append(entry)
    return entries


def _since_update(history: bytes) -> Iterator[dict[str, Any]]:
    """The entries of a history after the last update, newest first."""
    newest_first = reversed(_entries(history))
    return takewhile(lambda entry: "updated" not in entry["asked"], newest_first)


def changes_with(
    model: Model,
    asked: Mapping[str, Any],
    after: Thresholds,
    images: Mapping[str, Mapping[str, str]],
    defects_found: Mapping[str, Rate],
) -> tuple[Mapping[str, Any], ...]:
    """The changes of a model's thresholds since loading, and one more, for its history.

    Args:
        model: the model before the change.
        asked: options of the command that made the change, with their values.
        after: the new thresholds.
        images: sha256 of the images given for the change, by kind (good, defects) and name.
        defects_found: rates of the given defects by verdict; empty where none were given.
    """
    before = model.thresholds
    entry = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "software_version": __version__,
        "asked": dict(asked),
        "before": None if before is None else before.to_json(),
        "scores_before": _scores(before),
        "after": after.to_json(),
        "images": {kind: dict(hashes) for kind, hashes in images.items()},
        "left_out": list(after.good.left_out),
        "defects_found": {name: asdict(rate) for name, rate in defects_found.items()} or None,
        "model_before": model.model_id,
    }
    return (*model.changes, entry)


def write_history(folder: Path, model: Model, saved_id: str) -> None:
    """Write a model's history, if there is any; its changes since loading made model `saved_id`."""
    # Models between several changes were never written, so they have no id. Without
    # changes, one id is left over.
    ids = ["" for _ in model.changes[1:]] + [saved_id]
    lines = [
        json.dumps({**change, "model_after": after}, allow_nan=False).encode() + b"\n"
        for change, after in zip(model.changes, ids, strict=False)
    ]
    if history := model.history + b"".join(lines):
        (folder / HISTORY).write_bytes(history)


def threshold_images(model: Model) -> frozenset[str]:
    """sha256 of the images that a model's thresholds were chosen with; figures on them flatter.

    These are good images and, where thresholds were set by hand, the defects given with them.
    """
    limits = model.thresholds
    if limits is None:
        return frozenset()
    # Without hashes of their own the good scores are held-out scores of the training images.
    hashes = {*limits.good.hashes} - {""} or {*model.manifest["training_images"].values()}
    if limits.label != "calibrated":
        hashes |= _images(changes_of(model)[-1:], "defects")
    return frozenset(hashes)


def history_images(model: Model, kind: str) -> set[str]:
    """sha256 of the images of one kind, such as `defects`, in a model's history."""
    return _images(changes_of(model), kind)


# Errors of reading an entry that a person has edited: it counts as empty.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, IndexError)


def _images(entries: Sequence[Mapping[str, Any]], kind: str) -> set[str]:
    """sha256 of the images of one kind in entries of a history."""
    hashes: set[str] = set()
    for entry in entries:
        with suppress(*_MALFORMED):
            hashes |= {*entry["images"].get(kind, {}).values()}
    return hashes


def caught_share(model: Model) -> float | None:
    """Estimated share of defects that the thresholds catch; None if they were set without any."""
    with suppress(*_MALFORMED):
        return float(changes_of(model)[-1]["defects_found"]["caught"]["expected"])
    return None
