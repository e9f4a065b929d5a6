"""The patch scores of an image by an exported model, without anomaly: numpy and ONNX Runtime.

anomaly export --model runs/my_part --to onnx --whole --output exported
python examples/patch_scores.py exported/model/whole.onnx part.ppm

The image is a PPM file (P6, 8 bits) of the network's size: what `anomaly` makes of a file before
the network sees it is decoding, resizing as `image` in config.yaml says, and dividing by 255.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import onnxruntime


def read_ppm(file: Path) -> np.ndarray:
    """An image as (1, 3, H, W) float32, RGB in [0, 1]."""
    content = file.read_bytes()
    header = re.match(rb"P6\s+(\d+)\s+(\d+)\s+255\s", content)
    if header is None:
        raise SystemExit(f"{file} isn't a PPM file of 8 bits (P6, 255)")
    width, height = map(int, header.groups())
    pixels = np.frombuffer(content, np.uint8, 3 * width * height, header.end())
    picture = pixels.reshape(1, height, width, 3).transpose(0, 3, 1, 2)
    return picture.astype(np.float32) / np.float32(255)


def main(graph: Path, image: Path) -> None:
    """Print the patch scores row by row, and the highest."""
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    scores = session.run(["patch_scores"], {"images": read_ppm(image)})[0][0]
    for row in scores:
        print(*(f"{score:.6g}" for score in row))
    print(f"highest: {scores.max():.6g}")


if __name__ == "__main__":
    files = [Path(argument) for argument in sys.argv[1:]]
    if len(files) != 2 or not all(file.is_file() for file in files):
        raise SystemExit("usage: patch_scores.py whole.onnx image.ppm")
    main(*files)
