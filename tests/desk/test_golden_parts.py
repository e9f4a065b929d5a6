"""Known parts before a shift: 0 as recorded, 1 when something has moved, 2 for a mistake."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import cv2
import pytest
from conftest import Says, write_part

from anomaly.desk.golden import Answer, moved_since

Check = Callable[..., str]


@pytest.fixture
def golden(product: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(product / "test", tmp_path / "golden"))


@pytest.fixture
def check(run_folder: Path, golden: Path, says: Says) -> Check:
    """Runs the command to an exit code; all that it says."""

    def run(code: int, *flags: object, model: Path = run_folder, images: Path = golden) -> str:
        return says(code, "evaluate", ["--model", model, "--golden", images, *flags])

    return run


def test_nothing_moves_and_another_model_is_said(
    padim_folder: Path, golden: Path, check: Check
) -> None:
    assert "--overwrite" in check(2)
    said = check(2, images=golden / "nowhere")
    assert "--golden" in said
    assert "--input" not in said
    said = check(0, "--overwrite")
    assert "6 images recorded" in said
    record = json.loads((golden / "golden.json").read_text())["images"]
    assert [said["verdict"] for said in record.values()] == ["good"] * 3 + ["reject"] * 3
    assert "6 of 6 images score as recorded: ready" in check(0)
    assert "recorded with model" in check(1, model=padim_folder)


def test_a_score_a_verdict_and_a_file_have_moved(golden: Path, check: Check) -> None:
    (golden / "good" / "002.png").rename(golden / "good" / "12:30.png")
    check(0, "--overwrite")
    write_part(golden / "good" / "000.png", seed=4711)
    assert "good/000.png: score has moved by" in check(1, "--tolerance", "1e-5")
    check(0, "--tolerance", "0.5")
    write_part(golden / "good" / "000.png", seed=101, mark=(40, 50))
    assert "good/000.png: verdict good -> reject" in check(1, "--tolerance", "1e9")
    picture = cv2.imread(str(golden / "good" / "001.png"))
    cv2.imwrite(str(golden / "good" / "001.png"), picture // 30)  # a lamp has died
    (golden / "spot" / "000.png").unlink()
    write_part(golden / "new.png", seed=3)
    (golden / "good" / "12:30.png").write_text("damaged")
    said = check(1)
    for moved in (
        "good/001.png: verdict good -> reject",
        "good/12:30.png: verdict good -> unsupported",
        "spot/000.png: recorded, but missing",
        "new.png: new",
        "2 of 6 images score as recorded",
    ):
        assert moved in said


def test_a_spoilt_record(golden: Path, check: Check) -> None:
    for text in ("{", "[]", '{"model_id": 3}', '{"model_id": "a", "images": 1}'):
        (golden / "golden.json").write_text(text)
        assert "golden.json can't be read" in check(2)


def test_an_image_without_a_score_is_never_as_recorded() -> None:
    said = {"a.png": Answer(None, "failed")}
    assert moved_since(said, said, 1.0) == {"a.png": "can't be scored: failed"}
