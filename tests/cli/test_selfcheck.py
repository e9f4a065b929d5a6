"""Known parts before a shift: 0 as recorded, 1 when something has moved, 2 for a mistake."""

import json
import shutil
import sys
from pathlib import Path

import cv2
import pytest
from conftest import Command, train_arguments, write_part

from anomaly.storage.golden import moved_since


@pytest.fixture
def golden(product: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "golden"
    shutil.copytree(product / "test", folder)
    return folder


def _arguments(run: Path, golden: Path, *flags: object) -> list[object]:
    return ["--model", run, "--golden", golden, *flags]


def test_nothing_moves(run_folder: Path, golden: Path, command: Command) -> None:
    code, _, err = command("selfcheck", _arguments(run_folder, golden))
    assert (code, "--record" in err) == (2, True)
    code, _, err = command("selfcheck", _arguments(run_folder, golden / "nowhere"))
    assert (code, "--golden" in err, "--input" in err) == (2, True, False)
    code, out, _ = command("selfcheck", _arguments(run_folder, golden, "--record"))
    assert (code, "6 images recorded" in out) == (0, True)
    record = json.loads((golden / "golden.json").read_text())["images"]
    assert [said["verdict"] for said in record.values()] == ["good"] * 3 + ["reject"] * 3
    code, out, _ = command("selfcheck", _arguments(run_folder, golden))
    assert (code, "6 of 6 images score as recorded: ready" in out) == (0, True)


def test_a_score_a_verdict_and_a_file_have_moved(
    run_folder: Path, golden: Path, command: Command
) -> None:
    assert command("selfcheck", _arguments(run_folder, golden, "--record"))[0] == 0
    write_part(golden / "good" / "000.png", seed=4711)
    code, out, _ = command("selfcheck", _arguments(run_folder, golden, "--tolerance", "1e-5"))
    assert (code, "good/000.png: score has moved by" in out) == (1, True)
    assert command("selfcheck", _arguments(run_folder, golden, "--tolerance", "0.5"))[0] == 0
    write_part(golden / "good" / "000.png", seed=101, mark=(40, 50))
    code, out, _ = command("selfcheck", _arguments(run_folder, golden, "--tolerance", "1e9"))
    assert (code, "good/000.png: verdict good -> reject" in out) == (1, True)
    picture = cv2.imread(str(golden / "good" / "001.png"))
    cv2.imwrite(str(golden / "good" / "001.png"), picture // 30)  # a lamp has died
    (golden / "spot" / "000.png").unlink()
    write_part(golden / "new.png", seed=3)
    (golden / "good" / "002.png").write_text("damaged")
    code, out, _ = command("selfcheck", _arguments(run_folder, golden))
    assert code == 1
    assert "good/001.png: verdict good -> reject" in out
    assert "good/002.png: verdict good -> unsupported" in out
    assert "spot/000.png: recorded, but missing" in out
    assert "new.png: new" in out
    assert "2 of 6 images score as recorded" in out


@pytest.mark.skipif(sys.platform == "win32", reason="no name there has a colon")
def test_a_name_with_a_colon_counts_once_it_has_moved(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    write_part(tmp_path / "golden" / "12:30.png", seed=101)
    arguments = _arguments(run_folder, tmp_path / "golden")
    assert command("selfcheck", [*arguments, "--record"])[0] == 0
    write_part(tmp_path / "golden" / "12:30.png", seed=101, mark=(40, 50))
    code, out, _ = command("selfcheck", arguments)
    assert (code, "12:30.png: verdict good -> reject" in out) == (1, True)
    assert "0 of 1 images score as recorded" in out


def test_another_model_is_said(
    run_folder: Path, product: Path, golden: Path, tmp_path: Path, command: Command
) -> None:
    assert command("selfcheck", _arguments(run_folder, golden, "--record"))[0] == 0
    assert command("train", train_arguments(product, tmp_path / "run", "seed=7"))[0] == 0
    _, out, _ = command("selfcheck", _arguments(tmp_path / "run", golden))
    assert "recorded with model" in out


@pytest.mark.parametrize("text", ["{", "[]", '{"model_id": 3}', '{"model_id": "a", "images": 1}'])
def test_a_spoilt_record(run_folder: Path, golden: Path, command: Command, text: str) -> None:
    (golden / "golden.json").write_text(text)
    code, _, err = command("selfcheck", _arguments(run_folder, golden))
    assert (code, "golden.json can't be read" in err) == (2, True)


def test_an_image_without_a_score_is_never_as_recorded() -> None:
    said = {"a.png": {"image_score": None, "verdict": "failed"}}
    assert moved_since(said, said, 1.0) == {"a.png": "can't be scored: failed"}
