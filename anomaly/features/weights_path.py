"""Where a user's own weights are. Imports no torch, so that a wrong path is told at once."""

from __future__ import annotations

from pathlib import Path

from anomaly.errors import WeightsError
from anomaly.files.writing import at_home, looked_in


def check_weights(weights: str) -> None:
    """See that what `backbone.weights` says can be: `imagenet`, `random`, or a file that is there.

    Raises:
        WeightsError: as `weights_path`.
    """
    if weights not in ("imagenet", "random"):
        weights_path(Path(weights))


def weights_path(path: Path) -> Path:
    """A user's `.safetensors`, `.pth`, `.pt` or `.bin` file, with `~` replaced by the home folder.

    Raises:
        WeightsError: no such file, or another suffix.
        AnomalyError: its `~` stands for nobody's home folder.
    """
    path = at_home(path)
    if not path.is_file():
        missing = f"doesn't exist{looked_in(path)}"
        kind = "is a folder" if path.is_dir() else missing
        raise WeightsError(
            f"backbone.weights: {path} {kind}. Give `imagenet`, `random`, "
            "or the path of a .safetensors or .pth file"
        )
    if path.suffix not in (".safetensors", ".pth", ".pt", ".bin"):
        raise WeightsError(
            f"backbone.weights: {path} isn't a .safetensors, .pth, .pt or .bin file; convert it "
            "first"
        )
    return path
