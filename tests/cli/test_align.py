"""`image.align` through the commands: maps, regions, verdicts and reasons of moved parts."""

import csv
import json
import math
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Command, train_arguments
from moving_parts import LABEL, SIZE, draw, place, poses, write

from anomaly.errors import ModelError
from anomaly.explain.evidence import in_part, patch_box
from anomaly.explain.pictures import read_image
from anomaly.imaging.loading import NetworkInput
from anomaly.maps.regions import MarkedRegion
from anomaly.storage.load import load_model

_ALIGN = ("image.align=rigid", "image.area=128", "name=plates")


def trained(command: Command, root: Path, output: Path, *settings: str) -> tuple[Path, str]:
    code, out, err = command("train", train_arguments(root, output, *_ALIGN, *settings))
    assert code == 0, err
    return output, out


@pytest.fixture(scope="module")
def plates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parts that lie anyhow, marks at (-20, -10) of those in test/spot; read only."""
    return write(tmp_path_factory.mktemp("data") / "plates", turn=180)


def rows(folder: Path, name: str = "results.csv") -> list[dict[str, str]]:
    with (folder / name).open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def inferred(command: Command, run: Path, inputs: Path, output: Path) -> list[dict[str, str]]:
    infer = ["--model", run, "--input", inputs, "--output", output, "--regions"]
    assert command("infer", infer)[0] == 0
    return rows(output)


@pytest.mark.parametrize(
    "settings", [("model.kind=padim",), (), ("image.tile=128", "image.align=rigid")]
)
def test_a_planted_defect_is_marked_where_it_lies(
    settings: tuple[str, ...], plates: Path, tmp_path: Path, command: Command
) -> None:
    run, said = trained(command, plates, tmp_path / "run", *settings)
    assert "all parts are brought into the pose of" in said
    inferred(command, run, plates / "test" / "spot", tmp_path / "out")
    found = rows(tmp_path / "out", "regions.csv")
    for i, pose in enumerate(poses(4, 3, 180)):
        x, y = place([(-20, -10)], pose)[0]
        own = [row for row in found if row["path"].endswith(f"{i:03}.png")]
        best = max(own, key=lambda row: float(row["peak_score"]))
        assert 0 <= x - int(best["x"]) < int(best["width"])
        assert 0 <= y - int(best["y"]) < int(best["height"])
        # Within a patch: of the tests' network, whose weights are random, the peak is at an edge.
        assert math.dist((x, y), (float(best["peak_x"]), float(best["peak_y"]))) < 12
    code, _, err = command("evaluate", ["--model", run, "--output", tmp_path / "evaluation"])
    assert code == 0, err
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert metrics["mean"]["image_auroc"] == 1


def test_where_to_look_follows_the_part(tmp_path: Path, command: Command) -> None:
    root = write(tmp_path / "plates", turn=180, serial=True)
    _, said = trained(command, root, tmp_path / "plain")
    middle = int(said.partition("into the pose of train/good/")[2][:3])
    label = place([(x, y) for x, y in LABEL], poses(24, 1, 180)[middle]).round(2).tolist()
    ignore = f"image.ignore={{unit: pixels, polygons: [{label}]}}"
    run, _ = trained(command, root, tmp_path / "run", ignore)
    for i, pose in enumerate(poses(3, 9, 180)):
        cv2.imwrite(str(tmp_path / f"{i}.png"), draw(pose, 900 + i, serial=True))
        prediction = load_model(run, "cpu").predict(tmp_path / f"{i}.png")
        unknown = np.isnan(prediction.anomaly_map)
        covered = np.zeros(SIZE, np.uint8)
        cv2.fillPoly(covered, [place(LABEL, pose).round().astype(np.int32)], 1)
        inner, outer = cv2.erode(covered, np.ones((5, 5))), cv2.dilate(covered, np.ones((5, 5)))
        plate = np.zeros(SIZE, np.uint8)
        cv2.circle(plate, tuple(place([(0, 0)], pose)[0].astype(int).tolist()), 40, 1, -1)
        assert unknown[inner > 0].all()
        assert not unknown[(plate > 0) & (outer == 0)].any()


def test_a_pose_beyond_training_is_never_good(tmp_path: Path, command: Command) -> None:
    root = write(tmp_path / "plates", turn=5)
    run, _ = trained(command, root, tmp_path / "run")
    new = tmp_path / "new"
    new.mkdir()
    cv2.imwrite(str(new / "turned.png"), draw((60, 0, 0), 1))
    cv2.imwrite(str(new / "usual.png"), draw((2, 3, 3), 2))
    cv2.imwrite(str(new / "empty.png"), np.random.default_rng(0).integers(40, 60, (*SIZE, 3)))
    cv2.imwrite(str(new / "other.png"), draw((0, 0, 0), 3)[:, :150])
    infer = ["--model", run, "--input", new, "--output", tmp_path / "out"]
    assert command("infer", infer)[0] == 3  # of another shape
    found = {Path(row["path"]).stem: row for row in rows(tmp_path / "out")}
    assert found["turned"]["verdict"] != "good" != found["empty"]["verdict"]
    assert "the part is turned by" in found["turned"]["reason"]
    assert "pose can't be found" in found["empty"]["reason"]
    assert "pose" not in found["usual"]["reason"]
    assert "another shape than the training images" in found["other"]["reason"]
    report = (tmp_path / "out" / "results.html").read_text()
    assert "the part is turned by" in report
    # As a training image it teaches nothing.
    cv2.imwrite(str(root / "train" / "good" / "empty.png"), cv2.imread(str(new / "empty.png")))
    code, _, err = command(
        "train", train_arguments(root, tmp_path / "again", *_ALIGN, "image.align=rigid")
    )
    assert (code, "pose can't be found" in err) == (3, True)


def test_surfaces_are_refused_in_words(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "cloth" / "train" / "good"
    folder.mkdir(parents=True)
    for i in range(12):
        grain = np.random.default_rng(i).normal(size=(96, 96, 3))
        cv2.imwrite(str(folder / f"{i}.png"), 120 + 300 * cv2.GaussianBlur(grain, (0, 0), 3))
    arguments = train_arguments(tmp_path / "cloth", tmp_path / "run", "image.align=shift")
    code, _, err = command("train", arguments)
    assert code == 2
    assert "the pose of the part can't be found" in err
    assert "train with image.align=none" in err
    assert "Traceback" not in err


def test_check_says_which_setting_fits(plates: Path, product: Path, command: Command) -> None:
    def said(root: Path, *settings: str) -> str:
        chosen = train_arguments(root, root, *settings)
        code, out, _ = command("check", chosen[: chosen.index("--output")])
        assert code == 0
        return out

    assert "moving_parts: parts lie any way" in said(plates)
    assert "image.align=rigid" in said(plates)
    assert "moving_parts" not in said(plates, "image.align=rigid")
    assert "moving_parts" not in said(product)  # discs that lie alike


def test_the_reference_is_part_of_the_model(plates: Path, tmp_path: Path, command: Command) -> None:
    run, _ = trained(command, plates, tmp_path / "run")
    manifest = json.loads((run / "model" / "manifest.json").read_text())
    assert "reference.safetensors" in manifest["files"]
    explain = ["--model", run, "--input", plates / "test" / "spot" / "000.png"]
    assert command("explain", [*explain, "--output", tmp_path / "why"])[0] == 0
    file = run / "model" / "reference.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(ModelError, match=r"reference\.safetensors"):
        load_model(run, "cpu")


def test_an_export_says_the_same(plates: Path, tmp_path: Path, command: Command) -> None:
    run, _ = trained(command, plates, tmp_path / "run")
    export = ["--model", run, "--to", "onnx", "--output", tmp_path / "export"]
    assert command("export", export)[0] == 0
    one, two = (
        inferred(command, model, plates / "test", tmp_path / name)
        for model, name in ((run, "a"), (tmp_path / "export", "b"))
    )
    for row, other in zip(one, two, strict=True):
        assert (row["verdict"], row["reason"]) == (other["verdict"], other["reason"])
        assert float(row["image_score"]) == pytest.approx(float(other["image_score"]), rel=1e-3)
    assert {row["verdict"] for row in one} > {"reject"}


def test_an_explanation_compares_equal_places(
    plates: Path, tmp_path: Path, command: Command
) -> None:
    run, _ = trained(command, plates, tmp_path / "run")
    detector = load_model(run, "cpu")
    for i, pose in enumerate(poses(2, 3, 180)):
        item = read_image(plates / "test" / "spot" / f"{i:03}.png", detector.loading)
        assert isinstance(item, NetworkInput)
        x, y = (int(value) for value in place([(-20, -10)], pose)[0])
        flaw = MarkedRegion(x - 6, y - 6, 12, 12, 100, 1.0, x, y, 8.0, 8.0, 12.0, 12.0)
        moved = in_part(flaw, item.view.pose)
        red, green, _ = item.in_part().decoded.pixels[moved.peak_y, moved.peak_x].tolist()
        assert red > 150 > green
        assert 12 <= moved.width <= 18
        # A patch that holds the mark lies around it in the photograph, too.
        rows, columns = item.view.axes
        grid = (rows[0].size // 4, columns[0].size // 4)
        patch = (moved.peak_y * grid[0] // SIZE[0], moved.peak_x * grid[1] // SIZE[1])
        box = patch_box(item.view, grid, *patch)
        assert box.left - 1 <= x <= box.right + 1
        assert box.top - 1 <= y <= box.bottom + 1
        assert box.right - box.left < 12
        assert moved.x < moved.peak_x < moved.x + moved.width
