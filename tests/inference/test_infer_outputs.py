"""What `infer` writes on request: masks, regions, maps."""

import csv
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import Command, result_files, train_arguments, write_part
from scipy import ndimage

from anomaly.scoring.prediction import Prediction
from anomaly.storage.load import load_model


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "inputs"
    write_part(folder / "good.png", seed=500)
    write_part(folder / "sub" / "spot.png", seed=501, mark=(40, 50))
    write_part(folder / "spot.jpg", seed=502, mark=(20, 30))
    (folder / "broken.png").write_bytes(b"broken")
    return folder


def _csv(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def _picture(file: Path) -> np.ndarray:
    picture = cv2.imread(str(file), cv2.IMREAD_UNCHANGED)
    assert picture is not None
    return picture


def test_masks_regions_and_maps_say_the_same(
    run_folder: Path, inputs: Path, tmp_path: Path, command: Command
) -> None:
    output = tmp_path / "out"
    base = ["--model", run_folder, "--input", inputs, "--output", output]
    more = ["--masks", "--regions", "--maps", "float32"]
    assert command("infer", [*base, *more])[0] == 3
    detector = load_model(run_folder, torch.device("cpu"))
    assert detector.thresholds is not None
    limit = detector.thresholds.pixel
    rows = [row for row in _csv(output / "results.csv") if row["status"] == "ok"]
    regions = _csv(output / "regions.csv")
    assert len(rows) == 3
    for row in rows:
        (prediction,) = detector.predict([Path(row["path"])])
        assert isinstance(prediction, Prediction)
        expected = prediction.anomaly_map
        name = Path(row["heatmap"]).relative_to("heatmaps")
        found = _picture(output / "maps" / name.with_suffix(".tiff"))
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        mask = _picture(output / "masks" / name)
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
    spot = next(r for r in regions if r["path"].endswith("sub/spot.png"))
    assert abs(int(spot["peak_y"]) - 45) < 12
    assert abs(int(spot["peak_x"]) - 55) < 12
    code, _, err = command("infer", base)
    assert code == 2
    assert all(name in err for name in ("masks", "maps", "regions.csv"))
    assert command("infer", [*base, "--overwrite", "--maps", "uint16"])[0] == 3
    assert not (output / "regions.csv").exists()
    again = _picture(output / "maps" / name)
    assert again.dtype == np.uint16
    np.testing.assert_allclose(again * (limit / 8192), found, atol=limit / 8192)


def test_millimetres(product: Path, inputs: Path, tmp_path: Path, command: Command) -> None:
    settings = ["image.mm_per_pixel=0.5"]
    assert command("train", train_arguments(product, tmp_path / "run", *settings))[0] == 0
    base = ["--model", tmp_path / "run", "--input", inputs / "sub", "--output", tmp_path / "out"]
    assert command("infer", [*base, "--regions"])[0] == 0
    for region in _csv(tmp_path / "out" / "regions.csv"):
        assert float(region["width_mm"]) == int(region["width"]) * 0.5
        assert float(region["height_mm"]) == int(region["height"]) * 0.5
        assert float(region["area_mm2"]) == int(region["area"]) * 0.25
        for side, patch in (("width", 15), ("height", 12)):
            assert float(region[f"{side}_uncertainty"]) == patch
            assert float(region[f"{side}_uncertainty_mm"]) == patch * 0.5


def test_what_cant_be_written_is_said_before_anything_else(
    product: Path,
    inputs: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    base = ["--input", inputs, "--output", tmp_path / "out", "--model"]
    arguments = [*train_arguments(product, tmp_path / "run"), "--no-calibrate"]
    assert command("train", arguments)[0] == 0
    code, _, err = command("infer", [*base, tmp_path / "run", "--masks", "--regions"])
    assert (code, "--masks, --regions: the model has no thresholds" in err) == (2, True)
    assert command("infer", [*base, tmp_path / "run", "--maps", "float32"])[0] == 3
    before = result_files(tmp_path / "out")
    assert command("infer", [*base, tmp_path / "run", "--masks", "--overwrite"])[0] == 2
    assert result_files(tmp_path / "out") == before


def test_heatmaps_of_those_that_need_looking_at(
    run_folder: Path, inputs: Path, tmp_path: Path, command: Command
) -> None:
    base = ["--model", run_folder, "--input", inputs, "--masks", "--heatmap"]
    for kind, wanted in (("none", set()), ("reject", {"spot", "sub/spot"})):
        output = tmp_path / kind
        code, out, _ = command("infer", [*base, kind, "--output", output])
        assert (code, "pictures in" in out) == (3, kind == "reject")
        rows = [row for row in _csv(output / "results.csv") if row["status"] == "ok"]
        named = {row["heatmap"] for row in rows} - {""}
        assert {row["heatmap"] for row in rows if row["verdict"] != "good"} - {""} == named
        assert len(named) == len(wanted)
        drawn = {f.relative_to(output).as_posix() for f in (output / "heatmaps").rglob("*.png")}
        assert drawn == named
        assert len(list((output / "masks").rglob("*.png"))) == len(rows) == 3
        assert (output / "heatmap_scale.png").exists() == (kind == "reject")


def test_rows_say_when_and_by_which_model(
    run_folder: Path, inputs: Path, tmp_path: Path, command: Command
) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    output = tmp_path / "out"
    assert command("infer", ["--model", run_folder, "--input", inputs, "--output", output])[0] == 3
    for row in _csv(output / "results.csv"):
        assert before <= datetime.fromisoformat(row["time"]) <= datetime.now(UTC)
        assert row["model_name"] == "disc"
        assert 0 < float(row["milliseconds"]) < 600_000
    done = json.loads((output / "results.done.json").read_text())
    assert done["model_name"] == "disc"
    assert before <= datetime.fromisoformat(done["time"])
    trained = json.loads((run_folder / "train.json").read_text())["time"]
    assert datetime.fromisoformat(trained).utcoffset() == timedelta(0)


def test_what_is_said_where_nothing_could_be_scored(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "broken.png").write_bytes(b"broken")
    base = ["--model", run_folder, "--input", tmp_path / "broken.png"]
    code, out, _ = command("infer", [*base, "--output", tmp_path / "out"])
    assert (code, out.splitlines()[0]) == (2, "0 of 1 images scored: 1 unsupported")
    said = f"rows in {tmp_path / 'out' / 'results.csv'}, all shown in "
    assert out.splitlines()[-1] == said + str(tmp_path / "out" / "results.html")


def test_heatmaps_have_twice_the_networks_size_or_the_images(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    write_part(tmp_path / "part.png", seed=1, mark=(40, 50))
    picture = _picture(tmp_path / "part.png")
    cv2.imwrite(str(tmp_path / "large.png"), cv2.resize(picture, (480, 480)))
    loading = load_model(run_folder, torch.device("cpu")).loading
    height, width = loading.sizing.view((480, 480)).size
    base = ["--model", run_folder, "--input", tmp_path / "large.png"]
    for options, size in ([], (2 * height, 2 * width)), (["--full-size"], (480, 480)):
        output = tmp_path / f"out{len(options)}"
        assert command("infer", [*base, "--output", output, *options])[0] == 0
        shape = _picture(output / "heatmaps" / "large.png").shape
        assert shape[:2] == size


def test_another_set_of_outputs_isnt_resumed(
    run_folder: Path, inputs: Path, tmp_path: Path, command: Command
) -> None:
    output = tmp_path / "out"
    base = ["--model", run_folder, "--input", inputs, "--output", output]
    assert command("infer", [*base, "--masks"])[0] == 3
    journal = {"about": {}}
    (output / "results.partial.jsonl").write_text(json.dumps(journal) + "\n")
    code, _, err = command("infer", [*base, "--resume", "--masks"])
    assert (code, "set of outputs" in err) == (2, True)


def test_names_as_long_as_a_file_system_takes(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    folder = tmp_path / "inputs" / ("検査画像" * 21)  # 252 bytes
    long = ["x" * 246 + ".tiff", "検査画像" * 20 + "不良品.png", "y" * 251 + ".png"]
    for i, name in enumerate(long):
        write_part(tmp_path / "part.png", seed=i, mark=(30, 50))
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "part.png").rename(folder / name)
    output = tmp_path / "out"
    base = ["--model", run_folder, "--input", tmp_path / "inputs", folder, "--output", output]
    code, _, err = command("infer", [*base, "--masks", "--regions", "--maps", "float32"])
    assert (code, err) == (0, "")
    rows = _csv(output / "results.csv")
    assert {Path(row["path"]).name for row in rows} == set(long)
    for row in rows:
        name = Path(row["heatmap"]).relative_to("heatmaps")
        files = (row["heatmap"], "masks" / name, "maps" / name.with_suffix(".tiff"))
        assert all(_picture(output / file).shape[:2] == (96, 120) for file in files)


def test_names_that_are_no_text(run_folder: Path, tmp_path: Path, command: Command) -> None:
    name = tmp_path / "inputs" / "\udcff.png"
    try:
        write_part(tmp_path / "inputs" / "a.png", seed=1)
        (tmp_path / "inputs" / "a.png").rename(name)
    except OSError:
        pytest.skip("file names are text here")
    (tmp_path / "inputs" / "\udcfe.png").write_bytes(b"broken")
    output = tmp_path / "out"
    base = ["--model", run_folder, "--input", tmp_path / "inputs", "--output", output]
    more = ["--regions", "--masks"]
    assert command("infer", [*base, *more])[0] == 3
    assert b"/\xff.png," in (output / "results.csv").read_bytes()
    rows = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    assert rows[1]["path"] == str(name)
    assert (output / rows[1]["heatmap"]).exists()
