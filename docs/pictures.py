"""The two pictures of the README, taken from what `anomaly demo` has written.

    make demo && python docs/pictures.py    # writes docs/heatmaps.jpg and docs/report.jpg

Needs Chromium for the report's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np

DOCS = Path(__file__).resolve().parent
SHOWN = {
    ("plate", "brushed_plate"): ("scratch/000.png", "stain/000.png"),
    ("fabric", "woven_fabric"): ("colour_thread/000.png", "slub/000.png"),
}
SIDE, GAP = 260, 6
WHITE = cv2.BORDER_CONSTANT, None, (255, 255, 255)
WINDOW = 1366, 820


def heatmaps(demo: Path) -> np.ndarray:
    """Defects above, their heatmaps below (H, W, 3)."""
    columns = []
    for (run, product), names in SHOWN.items():
        results = demo / "runs" / "demo" / run / "results" / "heatmaps"
        for name in names:
            files = demo / "data" / "sample" / product / "test" / name, results / name
            pair = [_read(file) for file in files]
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


def _stacked(pair: list[np.ndarray]) -> np.ndarray:
    return np.vstack([cv2.copyMakeBorder(pair[0], 0, GAP, 0, 0, *WHITE), pair[1]])


def _read(file: Path, side: int | None = SIDE) -> np.ndarray:
    picture = cv2.imread(str(file))
    if picture is None:
        sys.exit(f"{file} can't be read; run: anomaly demo")
    return (
        picture if side is None else cv2.resize(picture, (side, side), interpolation=cv2.INTER_AREA)
    )


def main() -> None:
    demo = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    with tempfile.TemporaryDirectory() as folder:
        pictures = {"heatmaps": heatmaps(demo), "report": report(demo, Path(folder))}
    for name, picture in pictures.items():
        cv2.imwrite(str(DOCS / f"{name}.jpg"), picture, [cv2.IMWRITE_JPEG_QUALITY, 82])


if __name__ == "__main__":
    main()
