"""One model after another under the same name, and back; and what each has to pass first.

runs/plate/
  model/      the version in use, for every command and for the service
  golden/     its golden parts, if there are any
  earlier/    001-MODELID/{model,golden}  versions before it, the oldest first
  withdrawn/  001-MODELID/{model,golden}  versions that `back` has taken out of use
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from anomaly.errors import ModelError, OutputError, some, why
from anomaly.files.output_lock import locked
from anomaly.files.writing import draft_of
from anomaly.imaging.listing import list_images
from anomaly.imaging.read import Image
from anomaly.model.folder import EXPORT, check_run_folder, model_id
from anomaly.model.golden import golden_of, moved_since, read_record, score_golden
from anomaly.model.manifest import MANIFEST
from anomaly.model.scoring import Model

_TOLERANCE = 0.01  # by which a golden part's score may have moved, as in `selfcheck`
_EARLIER, _WITHDRAWN = "earlier", "withdrawn"
# In the order in which they move: nobody finds a new model without its golden parts.
_BESIDE = ("train.json", "suspects", "golden")
_PARTS = (*_BESIDE, "model")


def check(model: Model, folder: Path, workers: int) -> str:
    """Score the golden parts beside a model, if there are any; `load` has compared its files.

    Args:
        model: the model.
        folder: its folder.
        workers: decoding processes.

    Returns:
        What was done.

    Raises:
        ModelError: a score or a verdict isn't as it was recorded.
        DataError: the record of golden parts is damaged.
    """
    golden = golden_of(folder)
    if golden is None:
        # The first pass of a network takes longer than the others.
        grey = Image(np.full((256, 256, 3), 128, np.uint8), 255.0, "rgb8", "array", "")
        list(model.score_all([grey], workers=1))
        return "every file's hash; no golden parts are recorded beside the model"
    recorded = read_record(golden)["images"]
    found = score_golden(model, list_images(golden), golden, workers)
    moved = moved_since(recorded, found, _TOLERANCE)
    if moved:
        said = some([f"{name}: {change}" for name, change in moved.items()], "; ")
        raise ModelError(f"its golden parts aren't scored as recorded in {golden}: {said}")
    return f"every file's hash, and {len(found)} golden parts, which score as recorded"


def stamp_of(folder: Path) -> tuple[object, ...]:
    """What tells whether a model folder's files or its golden parts were written since."""
    golden = folder.parent / "golden" if folder.name == "model" else folder / "golden"
    found: list[object] = []
    for place in (folder, golden):
        try:
            for file in sorted(place.rglob("*")):
                said = file.stat()
                found.append((str(file), said.st_mtime_ns, said.st_size, said.st_ino))
        except OSError:  # being replaced right now
            found.append(place)
    return tuple(found)


def deploy(new: Path, run: Path) -> bool:
    """Put a copy of a model in the place of a run's, which is kept.

    With it go its golden parts and what is known of its training: on which data set, above all.

    Args:
        new: the model folder.
        run: made if need be.

    Returns:
        Whether there was a version before, which `back` can put in use again.

    Raises:
        OutputError: it is what is there already, or the folder can't be written, or holds runs.
    """
    if (run / MANIFEST).is_file():
        raise OutputError(
            f"{run} is a model folder, which holds one version; give the run's folder"
        )
    check_run_folder(run)
    draft = draft_of(run / "model")
    with _changing(run):
        before = _id(run)
        if _holds(run / "model", new):
            raise OutputError(f"{run} holds this model already ({before}); nothing is changed")
        try:
            shutil.copytree(new, draft / "model")
            for part in _BESIDE if new.name == "model" else ():
                _copy(new.parent / part, draft / part)
            _move(run, _numbered(run, _EARLIER))
            _move(draft, run)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return bool(before)


def back(run: Path) -> str:
    """Put the version before in use again; the one in use is kept among those withdrawn.

    Args:
        run: as `deploy` has left it.

    Returns:
        The id of the model that is in use again.

    Raises:
        OutputError: there is none before, or the folder can't be written.
    """
    with _changing(run):
        before = [one for one in _kept(run, _EARLIER) if (one / "model" / MANIFEST).is_file()]
        if not before:
            raise OutputError(f"{run} has no earlier version (none in {run / _EARLIER})")
        _move(run, _numbered(run, _WITHDRAWN))
        _move(before[-1], run)
        shutil.rmtree(before[-1])
        return _id(run)


def _id(run: Path, name: str = "model") -> str:
    return model_id(run / name) if (run / name / MANIFEST).is_file() else ""


def _holds(old: Path, new: Path) -> bool:
    """Whether two model folders are of one model in one engine; an export keeps its model's id."""

    def told(folder: Path) -> list[bytes]:
        files = [folder / MANIFEST, folder / EXPORT]
        return [file.read_bytes() if file.is_file() else b"" for file in files]

    return told(old) == told(new)


def _kept(run: Path, kind: str) -> list[Path]:
    folder = run / kind
    return sorted(one for one in folder.iterdir() if one.is_dir()) if folder.is_dir() else []


def _numbered(run: Path, kind: str) -> Path:
    """A new folder for the version in use, behind all others of its kind."""
    kept = _kept(run, kind)
    last = int(kept[-1].name.partition("-")[0]) if kept else 0
    return run / kind / f"{last + 1:03}-{_id(run)}"


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copy2(source, target)


def _move(source: Path, target: Path) -> None:
    for part in _PARTS:
        if (source / part).exists():
            target.mkdir(parents=True, exist_ok=True)
            (source / part).rename(target / part)


@contextmanager
def _changing(run: Path) -> Iterator[None]:
    with locked(run):
        try:
            yield
        except (OSError, ValueError) as error:
            raise OutputError(f"the versions in {run} can't be changed: {why(error)}") from None
