"""The pictures of the docs, made of what `anomaly demo` has written.

    make demo && python docs/pictures.py    # writes heatmaps.jpg, report.jpg, moving.jpg

Needs Chromium for the report's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np

import anomaly
from anomaly.imaging.alignment import Motion, Pose

DOCS = Path(__file__).resolve().parent
PLATES = Path("data/sample/brushed_plate")
SHOWN = "scratch/000.png", "stain/000.png", "dent/000.png", "edge_nick/000.png"
MOVED = ("good/000.png", "scratch/000.png", "stain/000.png")
SIDE, GAP = 260, 6
WHITE = cv2.BORDER_CONSTANT, None, (255, 255, 255)
WINDOW = 1366, 820


def heatmaps(demo: Path) -> np.ndarray:
    """Defects above, their heatmaps below (H, W, 3)."""
    folders = demo / PLATES / "test", demo / "runs" / "demo" / "plate" / "results" / "heatmaps"
    columns = []
    for name in SHOWN:
        pair = [_read(folder / name) for folder in folders]
        columns.append(cv2.copyMakeBorder(_stacked(pair), 0, 0, 0, GAP, *WHITE))
    return np.hstack(columns)[:, :-GAP]


def report(demo: Path, folder: Path) -> np.ndarray:
    """The report of the sample plate as a browser shows it (H, W, 3)."""
    page = demo / "runs" / "demo" / "evaluation" / "sample_brushed_plate" / "report.html"
    picture = folder / "report.png"
    size = "--window-size={},{}".format(*WINDOW)
    options = ["--headless", "--no-sandbox", "--virtual-time-budget=5000", size]
    command = ["chromium", *options, f"--screenshot={picture}", page.resolve().as_uri()]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return _read(picture, None)


def moving(demo: Path) -> np.ndarray:
    """Plates that lie anyhow, below them what the network sees and their heatmaps (H, W, 3)."""
    plates, rng = demo / PLATES, np.random.default_rng(3)

    def moved(file: Path) -> np.ndarray:
        picture = cv2.imread(str(file))
        motion = Motion(*(rng.uniform(-1, 1, 3) * (0.35, 5, 5)).tolist())
        return Pose(motion, picture.shape[:2]).part(picture, *map(slice, (0, 0), picture.shape[:2]))

    train = [moved(file) for file in sorted((plates / "train" / "good").iterdir())]
    settings = {
        "image": {"align": "rigid"},
        "backbone": {"name": "timm/tf_efficientnet_lite2"},
        "model": {"coreset_ratio": 0.02},
    }
    detector = anomaly.fit([anomaly.image(each, channels="bgr") for each in train], settings)
    columns = []
    for name in MOVED:
        picture = moved(plates / "test" / name)
        prediction = detector.predict(anomaly.image(picture, channels="bgr"))
        pose, whole = prediction.view.pose, map(slice, (0, 0), picture.shape[:2])
        heatmap = prediction.heatmap()[..., ::-1]
        rows = [_small(each) for each in (picture, pose.part(picture, *whole), heatmap)]
        rows = [cv2.copyMakeBorder(row, 0, GAP, 0, GAP, *WHITE) for row in rows]
        columns.append(np.vstack(rows))
    return np.hstack(columns)[:-GAP, :-GAP]


def _stacked(pair: list[np.ndarray]) -> np.ndarray:
    return np.vstack([cv2.copyMakeBorder(pair[0], 0, GAP, 0, 0, *WHITE), pair[1]])


def _read(file: Path, side: int | None = SIDE) -> np.ndarray:
    picture = cv2.imread(str(file))
    if picture is None:
        sys.exit(f"{file} can't be read; run: anomaly demo")
    return picture if side is None else _small(picture, side)


def _small(picture: np.ndarray, side: int = SIDE) -> np.ndarray:
    return cv2.resize(picture, (side, side), interpolation=cv2.INTER_AREA)


def main() -> None:
    demo = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    with tempfile.TemporaryDirectory() as folder:
        pictures = {"heatmaps": heatmaps(demo), "report": report(demo, Path(folder))}
        pictures["moving"] = moving(demo)
    for name, picture in pictures.items():
        cv2.imwrite(str(DOCS / f"{name}.jpg"), picture, [cv2.IMWRITE_JPEG_QUALITY, 82])


if __name__ == "__main__":
    main()
