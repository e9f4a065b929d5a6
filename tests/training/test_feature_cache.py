"""Training images' features on the disk: space foreseen after the first batch; one order."""

import logging
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit import tiny

import anomaly
from anomaly.errors import OutputError
from anomaly.methods.base import PatchSet
from anomaly.methods.patchcore.fitter import MemoryBankFitter

# Feature maps of 64 × 64 pixels: 24 channels of 8 × 8 and 32 of 4 × 4, in float32; and patches.
BYTES = 4 * (24 * 64 + 32 * 16 + 64 * 56)


def _train(shapes: list[tuple[int, int]], image: dict[str, Any], **model: object) -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (*shape, 3), dtype=np.uint8) for shape in shapes]
    settings = tiny(image={"area": 64, **image}, batch_size=2, model=model)
    settings["backbone"]["layers"] = ["layer2", "layer3"]
    anomaly.fit(images, settings, device="cpu", calibrate=False, channels="rgb")


@pytest.mark.parametrize(("copies", "each"), [("none", 1), ("quarter_turns", 4)])
def test_too_small_a_disk_is_refused_before_it_is_full(
    monkeypatch: pytest.MonkeyPatch, copies: str, each: int
) -> None:
    free = 6 * each * BYTES - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(OutputError, match=r"features of 6 images take about .* are free"):
        _train([(64, 64)] * 6, {}, turned_copies=copies)
    _train([(64, 64)] * 5, {}, turned_copies=copies)


def test_much_space_is_announced_and_of_tiles_not_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Six tiles of 64 pixels; other images may have fewer."""
    monkeypatch.setattr("anomaly.training.feature_cache._WORTH_SAYING", 17 * BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=BYTES))
    with caplog.at_level(logging.INFO, "anomaly"):
        for count in (2, 3):
            _train([(128, 192)] * count, {"tile": 64, "overlap": 0})
    assert [m.split(" take")[0] for m in caplog.messages if "the features of" in m] == [
        "the features of 3 images"
    ]


@pytest.mark.parametrize("copies", ["none", "quarter_turns"])
def test_kept_points_are_those_of_the_embeddings_whole_and_in_parts(
    monkeypatch: pytest.MonkeyPatch, copies: str
) -> None:
    """By image, whatever the batches, of which none mixes images of two sizes."""
    monkeypatch.setattr("anomaly.training.feature_cache._PART", 3)
    fit, fitted = MemoryBankFitter.fit, []

    def watched(self: MemoryBankFitter, batches: Any, progress: Any = None) -> Any:
        def double(channels: int) -> torch.Tensor:
            return 2 * self.projection(channels)

        kept = _by_image(batches.projected(self.projection))
        assert list(kept) == list(range(7))
        _same(kept, _by_image(PatchSet.projected(batches, self.projection)))
        _same(kept, {i: p / 2 for i, p in _by_image(batches.projected(double)).items()})
        some = _by_image(batches.only({1, 3}).projected(self.projection))
        _same(some, {i: kept[i] for i in (1, 3)})
        for matrix in (self.projection, double):
            parts = list(batches.each(lambda part, of=matrix: list(part.projected(of))))
            assert len(parts) == 3
            joined, whole = [piece for part in parts for piece in part], batches.projected(matrix)
            for (image, points), (other, expected) in zip(joined, whole, strict=True):
                assert image == other
                assert torch.equal(points, expected)
        fitted.append(fit(self, batches, progress))
        return fitted[-1]

    monkeypatch.setattr(MemoryBankFitter, "fit", watched)
    ignored = {"polygons": [[[0, 0], [0.6, 0], [0.6, 0.4], [0, 0.4]]]}
    shapes = [(64, 64 + 96 * (i % 2)) for i in range(7)]
    _train(shapes, {"ignore": ignored}, turned_copies=copies)
    assert fitted


def _by_image(pieces: Any) -> dict[int, torch.Tensor]:
    """The points of each image; copies in which none counts have none."""
    found: dict[int, list[torch.Tensor]] = {}
    for image, points in pieces:
        found.setdefault(image, []).append(points)
    return {image: torch.cat(points) for image, points in found.items()}


def _same(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[image], other[image]) for image in one)
