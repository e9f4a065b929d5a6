"""Reference vectors: a few images and a model's result of each step, in plain files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.arrays import as_numpy
from anomaly.errors import ImageError
from anomaly.export.equality import Camera
from anomaly.files.writing import as_json
from anomaly.imaging.loading import NetworkInput, load, size_of
from anomaly.imaging.read import read_image
from anomaly.maps.heatmap import encode_png
from anomaly.scoring.pipeline import Model
from anomaly.scoring.prediction import Prediction

VECTORS = "vectors"  # the folder's name, beside the model's
_FILE = "vectors.json"
_IMAGES = 5
_LONGEST = 320  # pixels of an image's longer side, if the model takes any size
_VALUES = 16  # values of an array to compare


def is_written(folder: Path) -> bool:
    """Whether a folder is one that `write_vectors` wrote."""
    return (folder / _FILE).is_file()


def write_vectors(folder: Path, model: Model, paths: Sequence[Path], camera: Camera | None) -> None:
    """Write small images, their network inputs, patch scores, maps and verdicts.

    Args:
        folder: that gets `1.png`, `1_input.npy`, `1_patch_scores.npy`, `1_map.npy`, … and
            `vectors.json`, with each step's results for each image.
        model: the exported model.
        paths: images to choose from, evenly.
        camera: images of a graph from pixels; None if images may have any size.
    """
    any_size = camera is None and model.region is None and model.reference is None
    fitting = [path for path in paths if camera is None or size_of(path) == camera.size]
    files: list[Path] = []
    for path in _spread(fitting):
        if len(files) == _IMAGES:
            break
        if (picture := _picture(path)) is not None:
            shown = _small(picture) if any_size else picture
            files.append(folder / f"{len(files) + 1}.png")
            files[-1].write_bytes(encode_png(np.ascontiguousarray(shown, np.uint8)))
    entries = [
        _entry(model, prediction, folder)
        for prediction in sorted(model.score_all(files), key=lambda result: result.index)
        if isinstance(prediction, Prediction)
    ]
    limits = model.thresholds
    about = {
        "model_id": model.model_id,
        "thresholds": limits and {"review": limits.review, "reject": limits.image},
        "images": entries,
    }
    (folder / _FILE).write_text(as_json(about), "utf-8")


def _spread(paths: Sequence[Path]) -> list[Path]:
    """The paths, evenly spread ones first, so that few need decoding."""
    first = np.linspace(0, len(paths) - 1, min(_IMAGES, len(paths))).astype(int).tolist()
    return [*(paths[i] for i in first), *(p for i, p in enumerate(paths) if i not in first)]


def _picture(path: Path) -> NDArray[np.uint8] | None:
    """The pixels (H0, W0, 3) of a file of 8 bits; None for other and unreadable files."""
    try:
        pixels = read_image(path).pixels
    except ImageError:
        return None
    return np.asarray(pixels, np.uint8) if pixels.dtype == np.uint8 else None


def _small(picture: NDArray[Any]) -> NDArray[Any]:
    height, width = picture.shape[:2]
    scale = min(1.0, _LONGEST / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA))


def _entry(model: Model, prediction: Prediction, folder: Path) -> dict[str, Any]:
    """Each step's results for an image; writes arrays beside it."""
    assert prediction.path is not None
    file = prediction.path
    pixels = read_image(file).pixels
    arrays = {"patch_scores": prediction.patch_scores, "map": prediction.anomaly_map}
    steps = {"pixels": fingerprint(pixels)}
    item = load(0, file, model.loading)
    if isinstance(item, NetworkInput) and item.view.whole:
        arrays = {"input": item.pixels.transpose(2, 0, 1), **arrays}
        embeddings = as_numpy(model.embedder([item]))[0]
        steps |= {"input": fingerprint(arrays["input"]), "embeddings": fingerprint(embeddings)}
    for name, values in arrays.items():
        np.save(folder / f"{file.stem}_{name}.npy", np.ascontiguousarray(values))
        steps[name] = fingerprint(values)
    return {
        "file": file.name,
        **steps,
        "score": prediction.score,
        "verdict": prediction.verdict,
        "reason": prediction.reason,
    }


def fingerprint(values: NDArray[Any]) -> dict[str, Any]:
    """An array in a few numbers: shape, mean, and values at even steps in its memory's order."""
    places = np.linspace(0, values.size - 1, _VALUES).astype(int)
    chosen = np.asarray(values, np.float64).ravel()[places]
    return {
        "shape": list(values.shape),
        "mean": float(np.nanmean(values)),
        "places": places.tolist(),
        "values": [None if np.isnan(value) else value for value in chosen.tolist()],
    }
