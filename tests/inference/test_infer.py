"""Files, rows and the page that `infer` writes, on request and for what it can't score."""

import json
import os
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import Command, write_part
from kit import table
from scipy import ndimage

from anomaly.errors import OutputError
from anomaly.imaging.read import read_image
from anomaly.inference.results import Outputs, PictureWriter
from anomaly.report import page
from anomaly.scoring.model import Model, Prediction
from anomaly.storage.models import load_model


@pytest.fixture(scope="module")
def model(run_folder: Path) -> Model:
    return load_model(run_folder, torch.device("cpu"))


def picture(file: Path) -> np.ndarray:
    found = cv2.imread(str(file), cv2.IMREAD_UNCHANGED)
    assert found is not None
    return found


def test_masks_regions_and_maps_say_the_same(model: Model, inferred: Path) -> None:
    assert model.thresholds is not None
    limit = model.thresholds.pixel
    rows, regions = table(inferred), table(inferred, "regions.csv")
    assert len(rows) == 6
    for row in rows:
        assert (row["status"], row["model_name"]) == ("ok", "disc")
        assert datetime.fromisoformat(row["time"]) <= datetime.now(UTC)
        assert 0 < float(row["milliseconds"]) < 600_000
        (prediction,) = model.predict([Path(row["path"])])
        assert isinstance(prediction, Prediction)
        name = Path(row["heatmap"]).relative_to("heatmaps")
        found = picture(inferred / "maps" / name.with_suffix(".tiff"))
        np.testing.assert_allclose(found, prediction.anomaly_map, rtol=1e-4)
        mask = picture(inferred / "masks" / name)
        assert set(np.unique(mask)) <= {0, 255}
        assert ((mask > 0) != prediction.mask).mean() < 1e-3  # scores differ by 1e-4 at most
        mine = [region for region in regions if region["path"] == row["path"]]
        assert [int(region["region"]) for region in mine] == list(range(1, len(mine) + 1))
        assert len(mine) == ndimage.label(mask, np.ones((3, 3)))[1]
        assert bool(mine) == ("spot" in row["path"])
        for region in mine:
            x, y, width, height = (int(region[k]) for k in ("x", "y", "width", "height"))
            box = np.s_[y : y + height, x : x + width]
            peak = found[int(region["peak_y"]), int(region["peak_x"])]
            assert float(region["peak_score"]) == peak > limit
            assert int(region["area"]) <= (mask[box] > 0).sum()
            assert region["width_mm"] == region["area_mm2"] == region["width_uncertainty_mm"] == ""
    spot = next(r for r in regions if r["path"].endswith("spot/000.png"))
    assert abs(int(spot["peak_y"]) - 35) < 12
    assert abs(int(spot["peak_x"]) - 45) < 12


def test_what_needs_thresholds_is_refused_before_anything_is_deleted(
    model: Model, tmp_path: Path
) -> None:
    bare = replace(model, thresholds=None)
    (tmp_path / "results.csv").touch()
    outputs = Outputs(tmp_path, {"masks", "regions"})
    with pytest.raises(OutputError, match="--write masks regions: the model has no thresholds"):
        outputs.clear(bare)
    assert (tmp_path / "results.csv").exists()
    Outputs(tmp_path, {"maps"}).clear(bare)
    assert not (tmp_path / "results.csv").exists()


def test_a_second_run_replaces_the_first_where_that_is_wanted(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    inputs, output = tmp_path / "inputs", tmp_path / "out"
    write_part(inputs / "good.png", seed=500)
    write_part(inputs / "sub" / "spot.png", seed=501, mark=(40, 50))
    (inputs / "broken.png").write_bytes(b"broken")
    write_part(inputs / "text.png", seed=1)
    (inputs / "text.png").rename(inputs / "\udcff.png")  # no text
    base = ["--model", run_folder, "--input", inputs, "--output", output]
    first = ["--write", "flagged-heatmaps", "masks", "regions", "maps"]
    code, out, _ = command("infer", [*base, *first])
    assert (code, "pictures in" in out) == (3, True)
    assert "images a second\n" in out
    assert b"/\xff.png," in (output / "results.csv").read_bytes()
    rows = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    assert str(inputs / "\udcff.png") in [row["path"] for row in rows]
    assert [row["heatmap"] for row in rows if row["verdict"] == "reject"] == [
        "heatmaps/sub/spot.png"
    ]
    assert [file.name for file in (output / "heatmaps").rglob("*.png")] == ["spot.png"]
    assert len(list((output / "masks").rglob("*.png"))) == 3
    assert picture(output / "maps" / "sub" / "spot.tiff").dtype == np.float32
    code, _, err = command("infer", base)
    assert (code, [name in err for name in ("masks", "maps", "regions.csv")]) == (2, [True] * 3)
    second = ["--overwrite", "--write", "maps"]
    code, out, _ = command("infer", [*base, *second])
    assert (code, "pictures in" in out) == (3, False)
    for gone in ("regions.csv", "masks", "heatmaps"):
        assert not list(output.glob(f"{gone}/**/*.png")), gone
        assert not (output / gone).is_file(), gone
    assert (output / "maps" / "sub" / "spot.tiff").is_file()


def test_heatmaps_have_twice_the_networks_size_or_the_images(model: Model, tmp_path: Path) -> None:
    write_part(tmp_path / "part.png", seed=1, mark=(40, 50))
    large = tmp_path / "large.png"
    cv2.imwrite(str(large), cv2.resize(picture(tmp_path / "part.png"), (480, 480)))
    (prediction,) = model.predict([large])
    assert isinstance(prediction, Prediction)
    height, width = model.loading.sizing.view((480, 480)).size
    for output, size in ((tmp_path, (2 * height, 2 * width)), (None, (480, 480))):
        writer, image = PictureWriter(output=output), read_image(large)
        drawn = writer.write(image, prediction.source_map, {"heatmap"}, "part.png")
        png = drawn.heatmap or (tmp_path / "heatmaps" / "part.png").read_bytes()
        assert cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR).shape[:2] == size


def test_whatever_a_list_names_has_its_row(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_part(tmp_path / "parts" / "1.png", seed=1)
    entries = {
        **dict.fromkeys(("..", ".", "//", "parts"), "it is a folder"),
        "/dev/zero": "it is a device or pipe",
        "x" * 5000: "too long",
        "a\0b.png": "null character",
        "~/a.png": "~ stands for no folder here",
        "https://host/a.png": "it is a URL: download the images first",
        "file:///none.png": "No such file",
        r"C:\parts\1.png": "it is a Windows path, write it as this system has it",
        os.fsdecode(b"caf\xe9.png"): "No such file",
        r"parts\1.png": "",
    }
    (tmp_path / "l.txt").write_text("\n".join(entries), "utf-8", "surrogateescape")
    arguments = ["--model", run_folder, "--input", "l.txt", "--output", "out"]
    code, out, err = command("infer", [*arguments, "--write", "heatmaps", "masks"])
    assert (code, err.count("error")) == (3, 0)
    assert f"1 of {len(entries)} images scored" in out
    lines = (tmp_path / "out" / "results.jsonl").read_text("utf-8").splitlines()
    rows = {row["path"]: row for row in map(json.loads, lines)}
    for entry, reason in entries.items():
        path = str(Path(entry.removeprefix("file://")))
        row = rows.pop("parts/1.png" if not reason else path)
        assert reason in row["reason"], entry
        assert row["status"] == ("unreadable" if reason else "ok")
    assert rows == {}
    assert {file.name for file in tmp_path.iterdir()} == {"parts", "l.txt", "out"}


def test_a_run_that_scores_nothing_says_why_in_a_line(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a\nb.png").write_text("no picture")
    output = tmp_path / "out"
    arguments = ["--model", run_folder, "--input", tmp_path / "in", "--output", output]
    code, out, _ = command("infer", arguments)
    first, why, *_, last = out.splitlines()
    assert (code, first) == (2, "0 of 1 images scored: 1 unsupported")
    assert "a\\nb.png" in why
    said = f"rows in {output / 'results.csv'}, all shown in {output / 'results.html'}"
    assert last == said


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
