"""The patch scores and the image score of an image, without anomaly: numpy and ONNX Runtime.

anomaly export --model runs/my_part --to onnx --whole --output exported
python examples/patch_scores.py exported/model/whole.onnx part.ppm

The image is a PPM file (P6, 8 bits) of the network's size: what `anomaly` makes of a file before
the network sees it is decoding, resizing as `image` in config.yaml says, and dividing by 255. A
file of another size gets another score, and no error. With OpenCV, for images that are square and
`image.area: 256`:

small = cv2.resize(cv2.imread("part.png"), (256, 256), interpolation=cv2.INTER_AREA)
cv2.imwrite("part.ppm", small)
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import onnxruntime

# The defaults of `model` in config.yaml; a model that has others there needs those.
BORDER_DAMPING, SMOOTHING, TOP = 0.2, 4.0, 0.01


def read_ppm(file: Path) -> np.ndarray:
    """An image as (1, 3, H, W) float32, RGB in [0, 1]."""
    content = file.read_bytes()
    gap = rb"(?:\s|#[^\n]*\n)+"  # comments are allowed between the numbers
    header = re.match(rb"P6%b(\d+)%b(\d+)%b255\s" % (gap, gap, gap), content)
    if header is None:
        raise SystemExit(f"{file} isn't a PPM file of 8 bits (P6, 255)")
    width, height = map(int, header.groups())
    if len(content) - header.end() < 3 * width * height:
        raise SystemExit(f"{file} is cut short")
    pixels = np.frombuffer(content, np.uint8, 3 * width * height, header.end())
    picture = pixels.reshape(1, height, width, 3).transpose(0, 3, 1, 2)
    return picture.astype(np.float32) / np.float32(255)


def spacing_of(model: Path) -> np.ndarray:
    """How far each bank vector is from its neighbours, (M,), from the model's scorer.safetensors.

    That format: the header's length in 8 bytes, the header in JSON, and then the numbers.
    """
    content = (model / "scorer.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    first, last = json.loads(content[8:end])["spacing"]["data_offsets"]
    return np.frombuffer(content[end + first : end + last], "<f4")


def weighted(scores: np.ndarray, nearest: np.ndarray, spacing: np.ndarray) -> np.ndarray:
    """Patch scores (h, w) as the image score counts them: less where good patches are rare."""
    return scores / np.maximum(1, spacing / spacing.mean())[nearest]


def image_score(scores: np.ndarray, size: tuple[int, int]) -> float:
    """The image score `map_top_percent` of patch scores (h, w), for a network input of (H, W)."""
    rows, columns = (_from_border(n, s) for n, s in zip(scores.shape, size, strict=True))
    distance = np.minimum(np.minimum(rows[:, None], columns), 24)
    damped = scores * (1 - BORDER_DAMPING * (1 - distance / 24))
    rows, columns = (_map_axis(n, s) for n, s in zip(scores.shape, size, strict=True))
    pixels = np.sort((rows @ damped @ columns.T).ravel())
    return float(pixels[-max(1, round(TOP * pixels.size)) :].mean())


def _from_border(patches: int, size: int) -> np.ndarray:
    """Network pixels between the patches' centres and the nearer end of an axis."""
    centres = (np.arange(patches) + 0.5) * size / patches
    return np.minimum(centres, size - centres)


def _map_axis(patches: int, size: int) -> np.ndarray:
    """(size, patches): one axis of the map, bilinear and then smoothed with a Gaussian."""
    centres = (np.arange(size) + 0.5) * patches / size - 0.5
    bilinear = np.stack([np.interp(centres, range(patches), one) for one in np.eye(patches)], 1)
    reach = int(4 * SMOOTHING + 0.5)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / SMOOTHING) ** 2)
    mirrored = np.pad(bilinear, ((reach, reach), (0, 0)), mode="symmetric")
    smooth = [np.convolve(one, kernel / kernel.sum(), mode="valid") for one in mirrored.T]
    return np.stack(smooth, 1)


def main(graph: Path, image: Path) -> None:
    """Print the patch scores row by row, the highest, and the image score."""
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    images = read_ppm(image)
    scores, nearest = (found[0] for found in session.run(None, {"images": images}))
    for row in scores:
        print(*(f"{score:.6g}" for score in row))
    print(f"highest: {scores.max():.6g}")
    counted = weighted(scores, nearest, spacing_of(graph.parent))
    print(f"image score: {image_score(counted, images.shape[2:]):.6g}")


if __name__ == "__main__":
    files = [Path(argument) for argument in sys.argv[1:]]
    if len(files) != 2 or not all(file.is_file() for file in files):
        raise SystemExit("usage: patch_scores.py whole.onnx image.ppm")
    main(*files)
