"""Verdicts: a reason for review makes them stricter; what isn't inspected isn't good."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from kit import bgr, tiny
from moving_parts import SIZE, draw

import anomaly
from anomaly.calibration.thresholds import GoodScores, thresholds_by_hand
from anomaly.datasets.samples import Sample
from anomaly.desk.change import verdicts_of
from anomaly.scoring.build import region_of
from anomaly.scoring.model import Model, Scored, verdict

LIMITS = thresholds_by_hand(GoodScores(("a", "b"), (1.0, 2.0), (1.0, 2.0), ""), 3.0, 5.0)
# The upper half of the plates, and the room above it that they need, in shares of the frame.
UPPER = {"polygons": [[[0.25, 0.1], [0.75, 0.1], [0.75, 0.5], [0.25, 0.5]]]}
HEIGHTS = (*np.linspace(-16, 18, 12), -23)
PICTURES = {
    "usual": draw((0, 0, 4), 50),
    "high": draw((0, 0, -23), 51),  # 7 pixels of the region lie outside; half a patch is 5
    "rim": draw((0, 0, -19), 52),  # 3 pixels
    "broken": draw((0, 0, -23), 53, (0, -20)),
    "far": draw((0, 40, 0), 54),
    "far_broken": draw((0, 40, 0), 55, (-20, -10)),
    "none": np.full((*SIZE, 3), 50, np.uint8),
}


def test_a_reason_makes_a_verdict_stricter_never_milder() -> None:
    sample = Sample(Path("a.png"), "a.png")
    for reason, verdicts in (
        ("", ("good", "review", "reject", "")),
        ("blank", ("review", "review", "reject", "review")),
    ):
        for score, expected in zip((2.0, 4.0, 6.0), verdicts, strict=False):
            assert verdict(score, LIMITS, reason) == expected
            assert Scored(sample, score, reason).verdict(LIMITS) == expected
        assert verdict(4.0, None, reason) == verdicts[-1]
        assert Scored(sample, None, reason).verdict(LIMITS) == ""


@pytest.fixture(scope="module")
def model() -> Model:
    """Learned from plates that lie higher or lower; their upper half counts."""
    parts = [draw((0, 0, height), seed) for seed, height in enumerate(HEIGHTS)]
    settings = tiny(image={"area": 128, "align": "shift", "region": UPPER})
    learned = anomaly.fit([*map(bgr, parts)], settings, device="cpu").model
    # Other reasons than where the part lies are left out here.
    return replace(learned, training_statistics=None)


def test_what_is_not_inspected_is_not_good(model: Model, tmp_path: Path) -> None:
    for name, picture in PICTURES.items():
        cv2.imwrite(str(tmp_path / f"{name}.png"), picture)
    files = {name: tmp_path / f"{name}.png" for name in PICTURES}
    found = {name: model.predict([file])[0] for name, file in files.items()}  # type: ignore[index]
    assert {name: one.verdict for name, one in found.items()} == {
        "usual": "good",
        "high": "review",
        "rim": "good",
        "broken": "reject",
        "far": "review",
        "far_broken": "reject",
        "none": "reject",
    }
    for name in ("high", "broken"):
        assert re.search("region to look at reaches [67] pixels beyond", found[name].reason)
    assert "shifted by +20 %" in found["far_broken"].reason
    assert "pose can't be found" in found["none"].reason
    # One way to score: what the price of a change compares are these verdicts.
    samples = [Sample(file, name) for name, file in files.items()]
    compared = verdicts_of(model, model, {"parts": samples}).compared["parts"]
    assert {one.sample.name: one.after for one in compared} == {
        n: p.verdict for n, p in found.items()
    }


def test_a_region_all_outside_has_no_verdict(model: Model) -> None:
    edge = {"polygons": [[[0.3, 0.0], [0.7, 0.0], [0.7, 0.1], [0.3, 0.1]]]}
    region = anomaly.Config.model_validate({"image": {"region": edge}}).image
    other = replace(model, region=region_of(region, Path()))
    with pytest.raises(anomaly.ImageError, match="all of the region to look at lies outside"):
        other.predict(bgr(PICTURES["high"]))
