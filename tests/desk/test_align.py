"""`image.align` through the commands: maps, regions, verdicts and reasons of moved parts."""

import json
import math
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Command, Says, run_command, train_arguments
from kit import table
from moving_parts import LABEL, SIZE, draw, place, poses, write

from anomaly.explain.evidence import patch_box, peak_of
from anomaly.imaging.loading import NetworkInput, load
from anomaly.maps.anomaly_map import MarkedRegion
from anomaly.storage.models import load_model

_ALIGN = ("image.align=rigid", "image.area=128", "name=plates")


def trained(
    says: Says, root: Path, output: Path, *settings: str, flags: tuple[str, ...] = ()
) -> tuple[Path, str]:
    arguments = train_arguments(root, output, *_ALIGN, *settings)
    said = says(0, "train", [*arguments, *flags])
    return output, said


@pytest.fixture(scope="module")
def plates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parts that lie anyhow, marks at (-20, -10) of those in test/spot; read only."""
    return write(tmp_path_factory.mktemp("data") / "plates", turn=180)


@pytest.fixture(scope="module")
def run(plates: Path) -> Path:
    """A model of them; read only."""
    output = plates.parent / "run"
    run_command("train", train_arguments(plates, output, *_ALIGN))
    return output


def assert_marked_where_it_lies(says: Says, run: Path, plates: Path, output: Path) -> None:
    infer = ["--model", run, "--input", plates / "test" / "spot", "--output", output]
    says(0, "infer", [*infer, "--write", "regions"])
    found = table(output, "regions.csv")
    for i, pose in enumerate(poses(4, 3, 180)):
        x, y = place([(-20, -10)], pose)[0]
        own = [row for row in found if row["path"].endswith(f"{i:03}.png")]
        best = max(own, key=lambda row: float(row["peak_score"]))
        assert 0 <= x - int(best["x"]) < int(best["width"])
        assert 0 <= y - int(best["y"]) < int(best["height"])
        # Within a patch: of the tests' network, whose weights are random, the peak is at an edge.
        assert math.dist((x, y), (float(best["peak_x"]), float(best["peak_y"]))) < 12


def test_a_planted_defect_is_marked_where_it_lies(
    run: Path, plates: Path, tmp_path: Path, says: Says
) -> None:
    assert_marked_where_it_lies(says, run, plates, tmp_path / "out")
    says(0, "evaluate", ["--model", run, "--output", tmp_path / "evaluation"])
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert metrics["mean"]["image_auroc"] == 1
    tiled, said = trained(says, plates, tmp_path / "tiled", "image.tile=128")
    assert "all parts are brought into the pose of" in said
    assert_marked_where_it_lies(says, tiled, plates, tmp_path / "of tiles")


def test_where_to_look_follows_the_part(tmp_path: Path, says: Says) -> None:
    root = write(tmp_path / "plates", turn=180, serial=True)
    quick = ("--no-calibrate",)
    _, said = trained(says, root, tmp_path / "plain", flags=quick)
    middle = int(said.partition("into the pose of train/good/")[2][:3])
    label = place([(x, y) for x, y in LABEL], poses(24, 1, 180)[middle])
    shares = (label / SIZE[::-1]).round(5).tolist()
    ignore = f"image.ignore={{polygons: [{shares}]}}"
    run, _ = trained(says, root, tmp_path / "run", ignore, "model.kind=padim", flags=quick)
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


def test_a_pose_beyond_training_is_never_good(tmp_path: Path, says: Says, command: Command) -> None:
    root = write(tmp_path / "plates", turn=5)
    run, _ = trained(says, root, tmp_path / "run")
    new = tmp_path / "new"
    new.mkdir()
    cv2.imwrite(str(new / "turned.png"), draw((60, 0, 0), 1))
    cv2.imwrite(str(new / "usual.png"), draw((2, 3, 3), 2))
    cv2.imwrite(str(new / "empty.png"), np.random.default_rng(0).integers(40, 60, (*SIZE, 3)))
    cv2.imwrite(str(new / "other.png"), draw((0, 0, 0), 3)[:, :150])
    infer = ["--model", run, "--input", new, "--output", tmp_path / "out"]
    assert command("infer", infer)[0] == 3  # of another shape
    found = {Path(row["path"]).stem: row for row in table(tmp_path / "out")}
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


def test_an_explanation_compares_equal_places(run: Path, plates: Path) -> None:
    detector = load_model(run, "cpu")
    for i, pose in enumerate(poses(2, 3, 180)):
        item = load(i, plates / "test" / "spot" / f"{i:03}.png", detector.loading)
        assert isinstance(item, NetworkInput)
        x, y = (int(value) for value in place([(-20, -10)], pose)[0])
        flaw = MarkedRegion(x - 6, y - 6, 12, 12, 100, 1.0, x, y, 8.0, 8.0, 12.0, 12.0)
        right, down = map(int, peak_of(flaw, item.view))
        red, green, _ = item.in_part().decoded.pixels[down, right].tolist()
        assert red > 150 > green
        # A patch that holds the mark lies around it.
        rows, columns = item.view.axes
        grid = (rows[0].size // 4, columns[0].size // 4)
        patch = (down * grid[0] // SIZE[0], right * grid[1] // SIZE[1])
        box = patch_box(item.in_part().view, grid, *patch)
        assert box[1] - 1 <= right <= box[3] + 1
        assert box[0] - 1 <= down <= box[2] + 1
        assert box[3] - box[1] < 12
