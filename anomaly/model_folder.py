"""The folder that a model lives in: its manifest, which vouches for every file, and its id.

Knows files and hashes; what is in them is `anomaly.checkpoint`'s business.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from anomaly.errors import ModelError, OutputError
from anomaly.files import like

FORMAT = "anomaly-model/1"
MANIFEST = "manifest.json"
HISTORY = "history.jsonl"


def find_model(folder: Path) -> Path:
    """The model folder meant by itself, or by the run that holds it as `model/`.

    Raises:
        ModelError: there is none.
    """
    for candidate in (folder / "model", folder):
        if (candidate / MANIFEST).is_file():
            return candidate
    if not folder.exists():
        raise ModelError(
            f"no model at {folder}: there is nothing of that name{like(folder)}; train one first"
        )
    raise ModelError(
        f"{folder} holds no model (no {MANIFEST} in it or in its model/); "
        "give the folder that `train` wrote"
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a model folder says about itself, without reading or checking its other files.

    Args:
        folder: the model folder, or the run that holds it as `model/`.

    Raises:
        ModelError: no model there, or made by something else.
    """
    file = find_model(folder) / MANIFEST
    try:
        manifest = json.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{file} can't be read ({error}); copy the model folder again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise ModelError(
            f"{file} isn't a manifest of this program's models (format {found!r}, expected "
            f"{FORMAT!r}); give a folder that this version's `train` wrote"
        )
    return manifest


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Compare every file of a model folder with what its manifest says.

    Raises:
        ModelError: a file is missing, was changed or doesn't belong.
    """
    expected: dict[str, dict[str, Any]] = manifest["files"]
    # Finder and Explorer leave their own files in every folder they show.
    present = {f.name for f in folder.iterdir() if not f.name.startswith(".")} - {
        MANIFEST,
        HISTORY,
        "Thumbs.db",
        "desktop.ini",
    }
    again = "; copy the model folder again, or train again"
    if missing := sorted(set(expected) - present):
        raise ModelError(f"{folder} lacks {', '.join(missing)}{again}")
    if foreign := sorted(present - set(expected)):
        raise ModelError(
            f"{folder} holds {', '.join(foreign)}, which isn't part of the model; remove it there"
        )
    for name, record in expected.items():
        if (folder / name).stat().st_size != record["bytes"]:
            raise ModelError(f"{folder / name} has another size than when it was written{again}")
        if _sha256(folder / name) != record["sha256"]:
            raise ModelError(f"{folder / name} was changed since it was written{again}")


def model_id(folder: Path) -> str:
    """The first 16 digits of the manifest's sha256; the manifest vouches for all the rest."""
    return _sha256(folder / MANIFEST)[:16]


def vouch(file: Path) -> dict[str, Any]:
    """What a manifest says about a file."""
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(file: Path, values: Any) -> None:
    """Values as JSON, the same bytes each time."""
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "utf-8")


def link(file: Path, to: Path) -> None:
    """The same file under a second name, or a copy where the file system has no links."""
    try:
        to.hardlink_to(file)
    except OSError:
        shutil.copy2(file, to)


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A draft beside `folder` that takes its name at the end, or vanishes on an error."""
    draft: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        draft.chmod(0o755)
        yield draft
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
            folder.rename(old / folder.name)
            draft.rename(folder)
            shutil.rmtree(old)
        else:
            draft.rename(folder)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{folder} can't be written: {error}") from None
    finally:
        if draft is not None and draft.exists():
            shutil.rmtree(draft, ignore_errors=True)
