"""Known parts before a shift: 0 as recorded, 1 when something has moved, 2 for a mistake."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import pytest
from conftest import Command, write_part

from anomaly.storage.golden import moved_since

Selfcheck = Callable[..., tuple[int, str]]


@pytest.fixture
def golden(product: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(product / "test", tmp_path / "golden"))


@pytest.fixture
def selfcheck(run_folder: Path, golden: Path, command: Command) -> Selfcheck:
    """Runs the command; its exit code and all that it says."""

    def run(*flags: object, model: Path = run_folder, images: Path = golden) -> tuple[int, str]:
        code, out, err = command("selfcheck", ["--model", model, "--golden", images, *flags])
        return code, out + err

    return run


def test_nothing_moves_and_another_model_is_said(
    padim_folder: Path, golden: Path, selfcheck: Selfcheck
) -> None:
    code, said = selfcheck()
    assert (code, "--record" in said) == (2, True)
    code, said = selfcheck(images=golden / "nowhere")
    assert (code, "--golden" in said, "--input" in said) == (2, True, False)
    code, said = selfcheck("--record")
    assert (code, "6 images recorded" in said) == (0, True)
    record = json.loads((golden / "golden.json").read_text())["images"]
    assert [said["verdict"] for said in record.values()] == ["good"] * 3 + ["reject"] * 3
    code, said = selfcheck()
    assert (code, "6 of 6 images score as recorded: ready" in said) == (0, True)
    assert "recorded with model" in selfcheck(model=padim_folder)[1]


def test_a_score_a_verdict_and_a_file_have_moved(golden: Path, selfcheck: Selfcheck) -> None:
    assert selfcheck("--record")[0] == 0
    write_part(golden / "good" / "000.png", seed=4711)
    code, said = selfcheck("--tolerance", "1e-5")
    assert (code, "good/000.png: score has moved by" in said) == (1, True)
    assert selfcheck("--tolerance", "0.5")[0] == 0
    write_part(golden / "good" / "000.png", seed=101, mark=(40, 50))
    code, said = selfcheck("--tolerance", "1e9")
    assert (code, "good/000.png: verdict good -> reject" in said) == (1, True)
    picture = cv2.imread(str(golden / "good" / "001.png"))
    cv2.imwrite(str(golden / "good" / "001.png"), picture // 30)  # a lamp has died
    (golden / "spot" / "000.png").unlink()
    write_part(golden / "new.png", seed=3)
    (golden / "good" / "002.png").write_text("damaged")
    code, said = selfcheck()
    assert code == 1
    for moved in (
        "good/001.png: verdict good -> reject",
        "good/002.png: verdict good -> unsupported",
        "spot/000.png: recorded, but missing",
        "new.png: new",
        "2 of 6 images score as recorded",
    ):
        assert moved in said


@pytest.mark.skipif(sys.platform == "win32", reason="no name there has a colon")
def test_a_name_with_a_colon_counts_once_it_has_moved(tmp_path: Path, selfcheck: Selfcheck) -> None:
    part = tmp_path / "colon" / "12:30.png"
    write_part(part, seed=101)
    assert selfcheck("--record", images=part.parent)[0] == 0
    write_part(part, seed=101, mark=(40, 50))
    code, said = selfcheck(images=part.parent)
    assert (code, "12:30.png: verdict good -> reject" in said) == (1, True)
    assert "0 of 1 images score as recorded" in said


def test_a_spoilt_record(golden: Path, selfcheck: Selfcheck) -> None:
    for text in ("{", "[]", '{"model_id": 3}', '{"model_id": "a", "images": 1}'):
        (golden / "golden.json").write_text(text)
        code, said = selfcheck()
        assert (code, "golden.json can't be read" in said) == (2, True)


def test_an_image_without_a_score_is_never_as_recorded() -> None:
    said = {"a.png": {"image_score": None, "verdict": "failed"}}
    assert moved_since(said, said, 1.0) == {"a.png": "can't be scored: failed"}
