"""The thresholds in a model folder, which alone may change after training, each time on record."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anomaly.calibration import GoodScores, Thresholds
from anomaly.model_folder import (
    HISTORY,
    MANIFEST,
    appearing,
    find_model,
    link,
    model_id,
    read_manifest,
    vouch,
    write_json,
)

_FILES = ("thresholds.json", "calibration.json")


def write_thresholds(folder: Path, thresholds: Thresholds | None) -> None:
    """Write the thresholds, and the scores of good images behind them."""
    written = None if thresholds is None else thresholds.to_json()
    write_json(folder / "thresholds.json", written)
    write_json(folder / "calibration.json", None if thresholds is None else asdict(thresholds.good))


def read_thresholds(folder: Path) -> Thresholds | None:
    """The way back; None where a model has none."""
    values, scores = (json.loads((folder / name).read_text("utf-8")) for name in _FILES)
    if values is None:
        return None
    return Thresholds.from_json(values, GoodScores.from_json(scores))


def replace_thresholds(folder: Path, thresholds: Thresholds, record: dict[str, Any]) -> str:
    """Give a model other thresholds; everything else in the folder stays as it is.

    Args:
        folder: the model folder, or the run that holds it as `model/`.
        thresholds: the new ones.
        record: what its history shall say; the ids before and after are added.

    Returns:
        The id of the model with these thresholds.

    Raises:
        ModelError: no model there.
        OutputError: the folder can't be written.
    """
    folder = find_model(folder)
    manifest = read_manifest(folder)
    before = model_id(folder)
    with appearing(folder) as draft:
        for file in folder.iterdir():
            if file.is_file() and file.name not in (*_FILES, MANIFEST, HISTORY):
                link(file, draft / file.name)
        write_thresholds(draft, thresholds)
        manifest["files"] |= {name: vouch(draft / name) for name in _FILES}
        write_json(draft / MANIFEST, manifest)
        after = model_id(draft)
        line = json.dumps(record | {"model_before": before, "model_after": after})
        earlier = (folder / HISTORY).read_text("utf-8") if (folder / HISTORY).exists() else ""
        (draft / HISTORY).write_text(earlier + line + "\n", "utf-8")
    return after
