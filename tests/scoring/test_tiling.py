"""Large images in tiles, and the patches and sizes that scores are made of."""

import itertools
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cv2
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kit import bare_model, bgr, tiny

import anomaly
from anomaly.config.load import parse_config
from anomaly.imaging.geometry import Sizing, View
from anomaly.maps.anomaly_map import source_map
from anomaly.methods.patchcore.bank import MemoryBank
from anomaly.scoring.build import loading_of
from anomaly.scoring.model import Model, Prediction, _Scores


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(64, 1500), st.integers(0, 100))
def test_tiles_cover_every_pixel(height: int, width: int, tile: int, percent: int) -> None:
    assume(max(height, width) <= 64 * min(height, width))  # thinner ones are refused
    overlap = tile * percent // 200
    tiling = Sizing(None, None, 64, 8, tile=tile, overlap=overlap).view((height, width))
    assert tiling.source == (height, width)
    for pieces, length in zip(tiling.axes, (height, width), strict=True):
        assert pieces[0].start == 0
        assert pieces[-1].stop == length
        assert len({(p.source, p.size) for p in pieces}) == 1
        for one, other in itertools.pairwise(pieces):
            assert one.stop - other.start >= overlap
            assert other.start > one.start
        assert len(pieces) == 1 or (len(pieces) - 2) * (tile - overlap) + tile < length


def _mosaic(tiling: View, field: np.ndarray, grid: int) -> np.ndarray:
    """What tiles would score if the score were this field (H0, W0) at a patch's centre."""
    positions = [
        np.concatenate([p.to_source((np.arange(grid) + 0.5) * p.size / grid) for p in pieces])
        for pieces in tiling.axes
    ]
    rows, columns = (np.clip(p.astype(int), 0, None) for p in positions)
    return field[np.ix_(rows, columns)].astype(np.float32)


def test_a_smooth_field_has_no_seams() -> None:
    size = (700, 900)
    tiling = Sizing(None, None, 64, 8, tile=256, overlap=48).view(size)
    y, x = np.mgrid[: size[0], : size[1]]
    field = np.sin(x / 90) + np.cos(y / 70)
    found = source_map(_mosaic(tiling, field, 16), tiling, smoothing=0)
    assert np.abs(found - field).max() < 0.25  # a patch is 16 pixels wide
    # Where tiles meet, the map is as smooth as elsewhere.
    steps = np.abs(np.diff(found, axis=1)).max(axis=0)
    assert steps.max() < 3 * np.median(steps)
    even = source_map(np.full((48, 64), 3, np.float32), tiling, smoothing=4)
    np.testing.assert_allclose(even, 3, rtol=1e-5)
    strip = source_map(_mosaic(tiling, field, 16), tiling, 0, slice(200, 317))
    np.testing.assert_allclose(strip, found[200:317], atol=1e-5)


def _texture(size: int, seed: int, spot: tuple[int, int] | None = None) -> np.ndarray:
    """Fine-grained grey; a spot is 14 pixels across, and as dark on the whole as its surround."""
    rng = np.random.default_rng(seed)
    small = rng.normal(0, 1, (size // 4, size // 4)).astype(np.float32)
    picture = 128 + 14 * cv2.resize(small, (size, size), interpolation=cv2.INTER_CUBIC)
    if spot is not None:
        y, x = np.mgrid[:14, :14]
        ring = np.where((x // 2 + y // 2) % 2, 90, -90)
        picture[spot[0] : spot[0] + 14, spot[1] : spot[1] + 14] += ring
    grey = np.clip(picture, 0, 255).astype(np.uint8)
    return cv2.merge([grey, grey, grey])


def _train(size: int, *, calibrate: bool = False, **image: Any) -> Model:
    settings = tiny(image=image, model={"coreset_ratio": 0.05})
    good = [_texture(size, seed) for seed in range(4)]
    return anomaly.fit([*map(bgr, good)], settings, device="cpu", calibrate=calibrate).model


def _predicted(model: Model, pictures: list[np.ndarray]) -> list[Prediction]:
    found = [model.predict(bgr(picture)) for picture in pictures]
    return cast(list[Prediction], found)


def test_a_defect_that_a_resize_loses_is_found_in_tiles() -> None:
    size = 512
    spots = [(size // 2 + 3, size // 3), (7, 9), (size - 30, size - 22), (size // 4, size // 5)]
    pictures = [_texture(size, 50 + i, spot) for i, spot in enumerate([*spots, *[None] * 4])]
    for image, found in (({"area": 128}, False), ({"area": 128, "tile": 128}, True)):
        results = _predicted(_train(size, **image), pictures)
        ratio = min(r.score for r in results[:4]) / max(r.score for r in results[4:])
        assert (ratio > 1.2) == found
    for spot, result in zip(spots, results[:4], strict=True):
        assert result.anomaly_map.shape == (size, size)
        row, column = np.unravel_index(np.nanargmax(result.anomaly_map), (size, size))
        assert abs(row - spot[0] - 7) < 24
        assert abs(column - spot[1] - 7) < 24


def test_an_image_of_one_tile_is_scored_as_a_whole() -> None:
    pictures = [_texture(256, 1), _texture(256, 9, (100, 60))]
    plain, tiled = (_train(256, area=128, **more) for more in ({}, {"tile": 256}))
    for one, other in zip(_predicted(plain, pictures), _predicted(tiled, pictures), strict=True):
        assert one.score == pytest.approx(other.score, rel=1e-5)
        np.testing.assert_allclose(one.anomaly_map, other.anomaly_map, atol=1e-5)


def test_regions_hold_in_tiles() -> None:
    half = {"polygons": [[[0, 0], [0.5, 0], [0.5, 1], [0, 1]]]}
    model = _train(640, area=128, tile=256, region=half)
    spots = [(300, 100), (300, 500), None]
    inside, outside, none = _predicted(model, [_texture(640, 9, spot) for spot in spots])
    assert np.isnan(inside.anomaly_map[:, 320:]).all()
    assert not np.isnan(inside.anomaly_map[:, :320]).any()
    assert outside.score == pytest.approx(none.score, rel=1e-5)
    assert inside.score > 1.1 * none.score
    origins = model.scorer.tensors()["origins"]
    assert len(np.unique(origins.numpy(), axis=0)) == len(origins)
    # Three tiles of 16 patches: 640 pixels, tiles from 0, 192 and 384. Half ends in the second.
    assert origins[:, 2].max() == 16 + 7


@pytest.mark.parametrize(
    "how", ["max", "map_max", "map_top_percent", "map_top_relative", "reweighted"]
)
def test_a_broken_patch_counts_where_it_lies_inside_the_region(how: str) -> None:
    bank = MemoryBank(torch.zeros(4, 8), torch.zeros(4, 3, dtype=torch.int32), 0.0)
    model = bare_model({"model": {"kind": "patchcore", "image_score": how}}, scorer=bank)
    embeddings = torch.ones(2, 4, 5, 8)
    embeddings[:, 0, 0] = math.nan
    inside = torch.ones(2, 4, 5, dtype=torch.bool)
    inside[1, 0, 0] = False
    layout = Sizing(None, None, 36, 8).view((32, 40))
    _, scores = model.score_patches(embeddings, [(layout, (0, 0), 0)] * 2, inside)
    assert scores.isfinite().tolist() == [False, True]


def test_a_tile_without_a_score_leaves_the_image_without_one() -> None:
    def scored(batch: list[float]) -> list[_Scores]:
        patches = np.ones((1, 1), np.float32)
        return [_Scores(cast(Any, 0), patches, None, score) for score in batch]

    model: Any = SimpleNamespace(batch_size=2, device=torch.device("cpu"), _scored=scored)
    for scores, best in ((1.0, 3.0, 2.0), 3.0), ((1.0, 3.0, 2.0, math.nan, 1.0), math.nan):
        view = SimpleNamespace(axes=((None,), (None,) * len(scores)))
        item: Any = SimpleNamespace(view=view, tiles=lambda size, of=scores: [[*of]])
        whole = Model._tiles_scored(model, item)
        assert whole.patches.shape == (1, len(scores))
        assert whole.score == pytest.approx(best, nan_ok=True)


def test_kept_aspects_fill_whole_patches_of_every_layer() -> None:
    for stride, size in ((16, (352, 192)), (64, (384, 192))):  # from 362 × 181
        network: Any = SimpleNamespace(strides=(stride,), patch=None)
        sizing = loading_of(parse_config({}, "a test"), network, None, None).sizing
        assert sizing.view((600, 300)).size == size  # type: ignore[union-attr]


def _resident(pid: int) -> int:
    """Bytes in memory of a process and all its children; pages that they share count again."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [c for task in tasks for c in (task / "children").read_text().split()]
    except OSError:  # gone
        return 0
    held = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")]
    return 1024 * sum(held) + sum(_resident(int(child)) for child in children)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_sixty_megapixels_fit_into_two_gigabytes(tmp_path: Path) -> None:
    """The whole of `infer`, decoding process and pictures included."""
    model = anomaly.Detector(_train(1024, calibrate=True, area=256, tile=512))
    model.save(tmp_path / "run")
    large = np.tile(_texture(1000, 7), (8, 7, 1))  # 56 million pixels
    cv2.imwrite(str(tmp_path / "large.png"), large, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    del large
    arguments = ["--model", tmp_path / "run", "--input", tmp_path / "large.png"]
    outputs = ["--output", tmp_path / "out", "--write", "masks", "regions", "maps"]
    process = subprocess.Popen([sys.executable, "-m", "anomaly", "infer", *arguments, *outputs])
    peak = 0
    while process.poll() is None:
        peak = max(peak, _resident(process.pid))
        time.sleep(0.02)
    assert process.returncode == 0
    assert peak < 2e9
