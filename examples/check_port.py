"""Where does a program of your own leave the way from pixels to the verdict? numpy is enough.

python examples/check_port.py exported/vectors my_steps

`exported/vectors` is what `anomaly export` wrote: images 1.png to 5.png, and what the model makes
of them. In `my_steps` your program writes, as far as it computes them, for image 1:

1_pixels.npy         (H0, W0, 3) uint8, RGB        1_patch_scores.npy   (h, w)
1_input.npy          (3, H, W) in [0, 1]           1_map.npy            (H0, W0)
1_embeddings.npy     (h, w, D)                     1.json               {"score": …, "verdict": …}
"""

import json
import sys
from pathlib import Path

import numpy as np

# How far values may be apart, as a share of the largest, and what is wrong where they are.
STEPS = {
    "pixels": (0, "decoding: are red and blue exchanged, is the file turned by its EXIF, is it the "
               "same file?"),
    "input": (1e-3, "resizing or scale: averaged over area when an axis shrinks, linear when it "
              "grows, size as the shape says; divided by 255, not normalised"),
    "embeddings": (1e-2, "normalisation, the network or its weights: mean and deviation are those "
                   "of the backbone, and are inside an exported graph already"),
    "patch_scores": (1e-3, "the memory bank or the Gaussians"),
    "map": (1e-3, "halo damping, smoothing or the way back to the image's pixels"),
}  # fmt: skip


def difference(known: dict, values: np.ndarray, limit: float) -> str:
    """What is wrong with an array; empty where nothing is."""
    if list(values.shape) != known["shape"]:
        return f"its shape is {list(values.shape)}, not {known['shape']}"
    wanted = np.array(known["values"], np.float64)
    found = values.ravel()[known["places"]].astype(np.float64)
    off = np.nanmax(np.abs(found - wanted)) / max(np.nanmax(np.abs(wanted)), 1e-12)
    return "" if off <= limit else f"it is off by {off:.2g} of its largest value"


def check(known: dict, steps: Path) -> str:
    """The first step at which an image goes wrong, and why; empty where none does."""
    stem = Path(known["file"]).stem
    for step, (limit, hint) in STEPS.items():
        file = steps / f"{stem}_{step}.npy"
        problem = ""
        if step in known and file.exists():
            problem = difference(known[step], np.load(file), limit)
        if problem:
            return f"{step}: {problem}. Look at {hint}"
    if (file := steps / f"{stem}.json").exists():
        found = json.loads(file.read_text())
        if abs(found["score"] - known["score"]) > 1e-3 * abs(known["score"]):
            return f"score: {found['score']:.6g}, not {known['score']:.6g}. Look at the image score"
        if found["verdict"] != known["verdict"]:
            why = known["reason"] or "its score and the thresholds"
            return f"verdict: {found['verdict']}, not {known['verdict']}. Look at {why}"
    return ""


def main(vectors: Path, steps: Path) -> None:
    """Print for each image where it goes wrong; exits with 1 where one does."""
    wrong = 0
    for known in json.loads((vectors / "vectors.json").read_text())["images"]:
        problem = check(known, steps)
        print(f"{known['file']}: {problem or 'equal'}")
        wrong += bool(problem)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: check_port.py VECTORS STEPS")
    main(*map(Path, sys.argv[1:]))
