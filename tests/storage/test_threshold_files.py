"""Which earlier models of a folder have the scores of the present one."""

from __future__ import annotations

import json
from pathlib import Path

from anomaly.storage.folder import HISTORY
from anomaly.storage.thresholds import models_scoring_alike


def write_history(folder: Path, *changes: tuple[str, str]) -> None:
    lines = [json.dumps({"asked": {what: 1}, "model_before": before}) for what, before in changes]
    (folder / HISTORY).write_text("\n".join([*lines, ""]))


def test_models_since_the_last_update_have_the_present_scores(tmp_path: Path) -> None:
    assert models_scoring_alike(tmp_path) == frozenset()
    write_history(tmp_path, ("threshold", "a"), ("good", "b"))
    with (tmp_path / HISTORY).open("a") as file:
        file.write("a person's own line\n")
    assert models_scoring_alike(tmp_path) == {"a", "b"}
    write_history(tmp_path, ("threshold", "a"), ("updated", "b"), ("threshold", "c"), ("good", "d"))
    assert models_scoring_alike(tmp_path) == {"c", "d"}
