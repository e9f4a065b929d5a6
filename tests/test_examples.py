"""The examples run as they are."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from conftest import REPOSITORY, write_part

from anomaly.features.weights import search_folders

MOBILENET = "mobilenet_v2-b0353104.pth"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANOMALY_WEIGHTS", str(REPOSITORY / "weights"))
    if not any((folder / MOBILENET).is_file() for folder in search_folders()):
        pytest.skip(f"needs torchvision's {MOBILENET}; `make test` gets it")
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_camera_judges_each_frame_and_keeps_what_is_not_good(elsewhere: Path) -> None:
    camera = importlib.import_module("camera")
    counts = camera.main([])
    assert counts.total() == 5
    pictures = list((elsewhere / "camera" / "kept").iterdir())
    assert len(pictures) == counts.total() - counts["good"]
    assert any("000004" in picture.name for picture in pictures)  # the one with a nick
    assert counts["good"] > 0
    with pytest.raises(SystemExit, match="no camera or video"):
        camera.inspect(None, "nothing.avi", elsewhere)


def test_several_products_and_one_that_cannot_be_used(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    products = importlib.import_module("several_products")
    for i in range(6):
        write_part(elsewhere / "all" / "ring" / "good" / f"{i}.png", seed=i)
    write_part(elsewhere / "all" / "ring" / "defect" / "0.png", seed=99, mark=(30, 40))
    (elsewhere / "all" / "empty").mkdir()
    found = products.main(["all"])
    assert found == {"ring": 1.0}
    assert "empty" in capsys.readouterr().out
    assert next((elsewhere / "products" / "ring").rglob("report.html")).is_file()
