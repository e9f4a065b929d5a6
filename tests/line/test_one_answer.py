"""One image has one answer, whoever asks: `infer`, Python, the service, and an exported model."""

from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import run_command, train_arguments
from kit import bgr, table
from moving_parts import draw, write
from running import serving

import anomaly

_REGION = [[0.15, 0.2], [0.85, 0.2], [0.85, 0.8], [0.15, 0.8]]
Answers = dict[str, tuple[float, str, str, int]]
_MARK = (-20.0, -10.0)
_POSE = (5.0, 6.0, -4.0)


def _pictures() -> dict[str, np.ndarray]:
    """Pictures as OpenCV writes them, by file name."""
    good, defect = draw(_POSE, 1), draw(_POSE, 2, _MARK)
    small = cv2.resize(defect, (150, 120), interpolation=cv2.INTER_AREA)
    return {
        "good.png": good,
        "defect.png": defect,
        "defect_outside.png": cv2.rectangle(good.copy(), (1, 1), (2, 150), (30, 30, 220), -1),
        "grey.png": cv2.cvtColor(defect, cv2.COLOR_BGR2GRAY),
        "deep.png": defect.astype(np.uint16) * 257,
        "deep.tif": good.astype(np.uint16) * 257,
        "defect.jpg": defect,
        "good.bmp": good,
        "defect.webp": defect,
        "small.png": small,
        "turned.png": draw((70.0, 0.0, 0.0), 3),
        "dark.png": (good * 0.2).astype(np.uint8),
        "another.png": np.random.default_rng(0).integers(0, 255, good.shape, np.uint8),
    }


def _of_rows(output: Path) -> Answers:
    regions = Counter(row["path"] for row in table(output, "regions.csv"))
    found: Answers = {}
    for row in table(output):
        score, path = float(row["image_score"]), row["path"]
        found[Path(path).name] = score, row["verdict"], row["reason"], regions[path]
    return found


def _of_arrays(run: Path, pictures: Path) -> Answers:
    detector = anomaly.load(run, "cpu")
    found: Answers = {}
    for file in sorted(pictures.iterdir()):
        array = cv2.imread(str(file), cv2.IMREAD_UNCHANGED)
        assert array is not None
        one = detector.predict(bgr(array))
        found[file.name] = one.score, one.verdict, one.reason, len(one.regions)
    return found


def _of_service(models: Path, pictures: Path) -> Answers:
    found: Answers = {}
    with serving(models) as service:
        for file in sorted(pictures.iterdir()):
            status, row = service.score(file.read_bytes(), "?include=regions")
            assert status == 200, row
            keys = ("image_score", "verdict", "reason")
            score, verdict, reason = (row[key] for key in keys)
            found[file.name] = score, verdict, reason, len(row["regions"])
    return found


def test_whoever_asks_gets_one_answer(tmp_path: Path) -> None:
    pictures, run = tmp_path / "pictures", tmp_path / "models" / "disc"
    pictures.mkdir()
    for name, picture in _pictures().items():
        assert cv2.imwrite(str(pictures / name), picture)
    region = f"image.region={{polygons: [{_REGION}]}}"
    settings = ("image.align=rigid", "image.area=128", "name=disc", region)
    run_command("train", train_arguments(write(tmp_path / "parts"), run, *settings))
    run_command("export", ["--model", run, "--to", "onnx", "--output", tmp_path / "export"])
    for model, output in ((run, "torch"), (tmp_path / "export", "onnx")):
        asked = ["--model", model, "--input", pictures, "--output", tmp_path / output]
        asked += ["--write", "heatmaps", "regions"]
        run_command("infer", asked)
    expected = _of_rows(tmp_path / "torch")
    assert len(expected) == len(_pictures())
    assert {verdict for _, verdict, _, _ in expected.values()} == {"good", "review", "reject"}
    ways = {
        "arrays": _of_arrays(run, pictures),
        "service": _of_service(run.parent, pictures),
        "export": _of_rows(tmp_path / "onnx"),
    }
    for way, found in ways.items():
        for name, (score, *rest) in expected.items():
            assert found[name][0] == pytest.approx(score, rel=1e-5), (way, name)
            assert list(found[name][1:]) == rest, (way, name)
