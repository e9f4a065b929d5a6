"""What `infer` writes on request: masks, regions, maps; and when it can't."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

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
