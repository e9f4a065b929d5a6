"""`infer` writes one page over everything that it has scored, unless that isn't wanted."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

from anomaly.report import page


def data_of(folder: Path) -> dict[str, Any]:
    """The data of the page in a folder of results."""
    text = (folder / "results.html").read_text("utf-8")
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_the_page_is_over_all_rows(
    run_folder: Path,
    product: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, output = tmp_path / "in", tmp_path / "out"
    shutil.copytree(product / "test", inputs)
    (inputs / "broken.png").write_bytes(b"no picture")
    for file in sorted((product / "train" / "good").iterdir())[:2]:
        shutil.copy(file, inputs / f"known_{file.name}")
    monkeypatch.setattr(page, "read_image", None)  # no heatmap is read again
    arguments = ["--model", run_folder, "--input", inputs, "--output", output]
    code, out, err = command("infer", arguments)
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
    # The promise is compared with images that the model hasn't learned.
    assert "2 of these images were used to train the model" in out
    assert "2 of the 9 images were used to train the model" in data["left_out"]
    promise = data["promise"]
    assert promise["head"] == ["", "promised of good parts", "at most", "6 images"]
    # Of 12 training images none lies above both thresholds: 1 in 13, at most 1 - 0.05^(1/12).
    assert promise["rows"][0] == ["flagged", "7.7 %", "22 %", "50 % (3)"]
    assert (promise["line"], "images flagged" in err) == ("", False)  # six images say nothing
    # It is one of ours: refused where it is, gone with --overwrite.
    assert command("infer", arguments)[0] == 2
    assert command("infer", [*arguments, "--overwrite", "--write", "heatmaps"])[0] == 3
    assert not (output / "results.html").exists()
