"""Training images' features on the disk: space foreseen after the first batch; one order."""

import logging
import shutil
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import anomaly
from anomaly.errors import OutputError
from anomaly.methods.base import PatchSet
from anomaly.methods.patchcore.embedding import ALIGNERS
from anomaly.methods.patchcore.fitter import MemoryBankFitter

SETTINGS = {
    "backbone": {"name": "resnet18", "weights": "random", "layers": ["layer2", "layer3"]},
    "image": {"area": 64},
    "precision": "fp32",
    "batch_size": 2,
}
# Feature maps of 64 × 64 pixels: 128 channels of 8 × 8 and 256 of 4 × 4, in float32.
BYTES = 4 * (128 * 64 + 256 * 16 + 64 * 128)  # two layers, and projected patches


def _train(count: int, **model: object) -> list[str]:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (64, 64, 3), dtype=np.uint8) for _ in range(count)]
    seen: list[str] = []
    anomaly.fit(
        images,
        {**SETTINGS, "model": model},
        device="cpu",
        calibrate=False,
        channels="rgb",
        progress=lambda stage, done, total: seen.append(f"{stage} {done}"),
    )
    return seen


@pytest.mark.parametrize(("copies", "each"), [("none", 1), ("quarter_turns", 4)])
def test_too_small_a_disk_is_refused_before_it_is_full(
    monkeypatch: pytest.MonkeyPatch, copies: str, each: int
) -> None:
    free = 6 * each * BYTES - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(OutputError, match=r"features of 6 images take about .* are free"):
        _train(6, turned_copies=copies)
    assert _train(5, turned_copies=copies)


def test_tiles_are_counted_but_not_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Six tiles of 64 pixels; other images may have fewer."""
    monkeypatch.setattr("anomaly.training.feature_cache._WORTH_SAYING", 17 * BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=BYTES))
    images = [np.full((128, 192, 3), 9 + i, np.uint8) for i in range(3)]
    settings = SETTINGS | {"image": {"area": 64, "tile": 64}}
    with caplog.at_level(logging.INFO, "anomaly"):
        anomaly.fit(images, settings, device="cpu", calibrate=False, channels="rgb")
    assert sum("features of 3 images" in message for message in caplog.messages) == 1


def test_much_space_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("anomaly.training.feature_cache._WORTH_SAYING", 3 * BYTES)
    with caplog.at_level(logging.INFO, "anomaly"):
        _train(3)
        assert not any("features of 3 images" in message for message in caplog.messages)
        _train(4)
    assert sum("features of 4 images" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("kept", [False, True])
def test_points_come_in_the_order_of_the_parts(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """Batches of images of two sizes don't: what is measured by parts goes with what is read."""
    monkeypatch.setattr("anomaly.training.feature_cache._PART", 3)
    fit, seen = MemoryBankFitter.fit, []

    def watched(self: MemoryBankFitter, batches: Any, progress: Any = None) -> Any:
        def matrix(channels: int) -> torch.Tensor:
            return self.projection(channels) * (1 if kept else 2)

        points = [list(batches.projected(matrix)) for _ in range(2)]
        parts = list(batches.each(lambda part: list(part.projected(matrix))))
        assert [len(part) for part in parts] == [3, 3, 1]
        for other in (points[1], [piece for part in parts for piece in part]):
            assert [image for image, _ in points[0]] == [image for image, _ in other]
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(points[0], other, strict=True))
        seen.append([image for image, _ in points[0]])
        return fit(self, batches, progress)

    monkeypatch.setattr(MemoryBankFitter, "fit", watched)
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (64, 64 + 96 * (i % 2), 3), dtype=np.uint8) for i in range(7)]
    anomaly.fit(images, SETTINGS, device="cpu", calibrate=False, channels="rgb")
    assert seen[-1] == (list(range(7)) if kept else [0, 2, 1, 3, 4, 5, 6])


@pytest.mark.parametrize("ignored", [None, [[0, 0], [0.6, 0], [0.6, 0.4], [0, 0.4]]])
@pytest.mark.parametrize(("copies", "each"), [("none", 1), ("quarter_turns", 4)])
def test_projected_patches_are_kept(
    monkeypatch: pytest.MonkeyPatch, copies: str, each: int, ignored: list[list[float]] | None
) -> None:
    """Of 5 images in batches of 2, each of which is aligned once."""
    align, fit = ALIGNERS["sharp"], MemoryBankFitter.fit
    aligned, banks = [0], []

    def counted(maps: Any) -> torch.Tensor:
        aligned[0] += 1
        return align(maps)

    def readings(dry: bool = False) -> float:
        """How often all batches were aligned since this was asked last, but for a dry run."""
        made, aligned[0] = aligned[0] - dry, 0
        return made / (3 * each)

    def watched(self: MemoryBankFitter, batches: Any, progress: Any = None) -> Any:
        kept = list(batches.projected(self.projection))
        assert readings(dry=ignored is not None) == 1  # which tells a region's grid
        # They are found by their matrix, and in parts.
        assert _same(list(batches.projected(self.projection)), kept)
        some = batches.only({1, 3}).projected(self.projection)
        assert _same(list(some), [piece for piece in kept if piece[0] in (1, 3)])
        assert readings() == 0
        # Without files, and of another matrix, embeddings are aligned again.
        assert _same(_ascending(PatchSet.projected(batches, self.projection)), kept)
        assert readings() == 1
        twice = [(image, 2 * points) for image, points in kept]
        double = batches.projected(lambda channels: 2 * self.projection(channels))
        assert _same(_ascending(double), twice)
        assert readings() == 1
        banks.append(fit(self, batches, progress))
        assert readings() == 1  # for the vectors
        return banks[-1]

    monkeypatch.setitem(ALIGNERS, "sharp", counted)
    monkeypatch.setattr(MemoryBankFitter, "fit", watched)
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (64, 64, 3), dtype=np.uint8) for _ in range(5)]
    settings = SETTINGS | {"model": {"turned_copies": copies}}
    if ignored is not None:
        settings["image"] = {"area": 64, "ignore": {"polygons": [ignored]}}
    anomaly.fit(images, settings, device="cpu", calibrate=False, channels="rgb")
    assert len(banks) == 1


def _ascending(pieces: Iterable[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    """By image, as in files; of tiles and copies in which none counts there are no points."""
    return sorted((piece for piece in pieces if len(piece[1])), key=lambda piece: piece[0])


def _same(one: list[tuple[int, torch.Tensor]], other: list[tuple[int, torch.Tensor]]) -> bool:
    return [image for image, _ in one] == [image for image, _ in other] and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True)
    )
