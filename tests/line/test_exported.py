"""Exported models are served where torch isn't installed."""

import shutil
from pathlib import Path

from running import serving


def test_a_part_is_judged(
    bank_export: Path, product: Path, tmp_path: Path, without_torch: str
) -> None:
    models = tmp_path / "models"
    shutil.copytree(bank_export, models / "disc")
    with serving(models, path=without_torch) as running:
        status, said = running.score((product / "test" / "spot" / "000.png").read_bytes())
    assert (status, said["verdict"], said["engine"]) == (200, "reject", "onnx")
