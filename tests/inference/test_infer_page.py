"""`infer` writes one page over everything that it has scored, unless that isn't wanted."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

from anomaly.cli import infer
from anomaly.report import gallery


def data_of(folder: Path) -> dict[str, Any]:
    """The data of the page in a folder of results."""
    text = (folder / "results.html").read_text("utf-8")
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_the_page_is_over_all_rows(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    inputs, output = tmp_path / "in", tmp_path / "out"
    shutil.copytree(product / "test", inputs)
    (inputs / "broken.png").write_bytes(b"no picture")
    arguments = ["--model", run_folder, "--input", inputs, "--output", output]
    code, out, _ = command("infer", arguments)
    assert (code, "results.html" in out) == (3, True)
    rows = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    data = data_of(output)
    scored = [row for row in rows if row["status"] == "ok"]
    assert [(i["name"], i["score"], i["link"]) for i in data["images"]] == [
        (row["path"], row["image_score"], row["heatmap"]) for row in scored
    ]
    assert all(image["photo"] and image["source"] == [120, 96] for image in data["images"])
    assert data["thresholds"]["reject"] == scored[0]["threshold"]
    assert [row["name"] for row in data["refused"]["rows"]] == [str(inputs / "broken.png")]
    assert str(run_folder) in data["command"]
    assert dict(data["provenance"])["input"] == str(inputs)
    # It is one of ours: refused where it is, gone with --overwrite.
    assert command("infer", arguments)[0] == 2
    assert command("infer", [*arguments, "--overwrite", "--no-page"])[0] == 3
    assert not (output / "results.html").exists()


def test_images_that_the_model_knows_are_told(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    inputs, output = tmp_path / "in", tmp_path / "out"
    shutil.copytree(product / "test" / "good", inputs)
    known = sorted((product / "train" / "good").iterdir())[:2]
    for file in known:
        shutil.copy(file, inputs / f"known_{file.name}")
    arguments = ["--model", run_folder, "--input", inputs, "--output", output]
    code, out, _ = command("infer", arguments)
    assert (code, "2 of these images were used to train the model" in out) == (0, True)
    total = len(list(inputs.iterdir()))
    assert f"2 of the {total} images were used to train the model" in data_of(output)["left_out"]
    # Page and terminal compare the promise with the same images.
    assert f"The promise is compared with the other {total - 2}\n" in out
    assert data_of(output)["promise"]["head"][-1] == f"{total - 2} images"
    shutil.copytree(product / "test" / "good", tmp_path / "again")
    arguments = ["--model", run_folder, "--good", product / "test" / "good"]
    arguments += ["--defects", tmp_path / "again", "--output", tmp_path / "evaluation"]
    code, _, err = command("evaluate", arguments)
    assert (code, "is the same picture as" in err) == (2, True)


def test_no_heatmap_is_read_again(
    run_folder: Path,
    product: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gallery, "_picture", None)
    arguments = ["--model", run_folder, "--input", product / "test", "--output", tmp_path / "out"]
    assert command("infer", arguments)[0] == 0
    assert all(image["photo"] for image in data_of(tmp_path / "out")["images"])


def test_a_run_that_was_broken_off_ends_with_the_same_page(
    run_folder: Path,
    product: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    inputs = [product / "test", product / "train"]  # more than one batch
    arguments = ["--model", run_folder, "--input", *inputs, "--output"]
    assert command("infer", [*arguments, whole])[0] == 0

    class Soon:
        """Stands in for a signal that comes at once."""

        exit_code, signal = 130, 2

        def __enter__(self) -> "Soon":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    with monkeypatch.context() as patch:
        patch.setattr(infer, "Stopping", Soon)
        assert command("infer", [*arguments, broken])[0] == 130
    assert not (broken / "results.html").exists()
    assert command("infer", [*arguments, broken, "--resume"])[0] == 0
    pages = data_of(whole), data_of(broken)
    for page in pages:
        assert page.pop("provenance")
    assert pages[0] == pages[1]


def test_the_page_shows_what_was_promised_beside_what_is_flagged(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    arguments = ["--model", run_folder, "--input", product / "test", "--output", tmp_path / "out"]
    code, _, err = command("infer", arguments)
    assert (code, "images flagged" in err) == (0, False)  # of six images nothing can be said
    promise = data_of(tmp_path / "out")["promise"]
    assert promise["head"] == ["", "promised of good parts", "at most", "6 images"]
    # Of 12 training images none lies above both thresholds: 1 in 13, at most 1 - 0.05^(1/12).
    assert promise["rows"][0] == ["flagged", "7.7 %", "22 %", "50 % (3)"]
    assert promise["line"] == ""
