"""Model folders that earlier versions wrote load, and score as they did.

python tests/model/test_kept_models.py    # keeps one of today's format, where there is none yet
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import anomaly
from anomaly.storage.manifest import FORMAT

KEPT = Path(__file__).parent / "kept"
SETTINGS = {
    "backbone": {
        "name": "mobilenet_v2", "weights": "random", "layers": ["features[2]", "features[3]"],
    },
    "image": {"area": 64, "region": {"polygons": [[[0, 0], [1, 0], [1, 0.9], [0, 0.9]]]}},
    "precision": "fp32",
}  # fmt: skip
METHODS = {
    "patchcore": {"kind": "patchcore", "coreset_size": 60},
    "padim": {"kind": "padim", "dimensions": 6},
}


def part(seed: int, mark: bool = False) -> np.ndarray:
    """A disc, by whole numbers alone: the same on every machine."""
    y, x = np.mgrid[:72, :72] - 36
    picture = np.where(x * x + y * y < 900, 150, 40)[..., None].repeat(3, axis=2)
    picture += np.random.Generator(np.random.PCG64(seed)).integers(-8, 9, picture.shape)
    if mark:
        picture[30:40, 20:34] = (220, 30, 30)
    return picture.astype(np.uint8)


def said(detector: anomaly.AnomalyDetector) -> list[dict[str, object]]:
    return [
        {"score": one.score, "calibrated": one.calibrated_score, "verdict": one.verdict,
         "peak": float(np.nanmax(one.anomaly_map)), "regions": len(one.regions)}
        for one in map(detector.predict, [part(100), part(101, mark=True)])
    ]  # fmt: skip


FOLDERS = sorted(KEPT.glob("*/*/"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: "-".join(folder.parts[-2:]))
def test_a_kept_model_scores_as_it_did(folder: Path) -> None:
    expected = json.loads((folder / "said.json").read_text())
    found = said(anomaly.load(folder / "model", device="cpu"))
    assert [one["verdict"] for one in expected] == ["good", "reject"]
    for one, other in zip(found, expected, strict=True):
        assert one.pop("verdict") == other.pop("verdict")
        assert one == pytest.approx(other, rel=1e-4)


def test_a_model_of_todays_format_is_kept() -> None:
    kept = {folder.parent.name for folder in FOLDERS}
    assert FORMAT.replace("/", "-") in kept, "run this file: later versions have to read it, too"
    assert sum(file.stat().st_size for file in KEPT.rglob("*") if file.is_file()) < 400_000


if __name__ == "__main__":
    home = KEPT / FORMAT.replace("/", "-")
    if home.exists():
        sys.exit(f"{home} is there already: what was kept stays as it is")
    for name, model in METHODS.items():
        config = {**SETTINGS, "name": name, "model": model}
        detector = anomaly.fit([part(seed) for seed in range(24)], config, device="cpu")
        detector.save(home / name / "model")
        (home / name / "said.json").write_text(json.dumps(said(detector), indent=1) + "\n")
