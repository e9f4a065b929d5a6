"""The smallest defect: its level against brute force, in every score, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import tiny
from scipy import ndimage

import anomaly
from anomaly.config.load import parse_config
from anomaly.errors import ConfigError, ModelError
from anomaly.export.graph import check_pixels
from anomaly.imaging.geometry import Polygons, Region, Sizing
from anomaly.scoring.model import levels_of_areas, network_map, place_of_level
from anomaly.training.fit import check_smallest_defect

_EIGHT = np.ones((3, 3))


def _highest_level(values: np.ndarray, area: int) -> float:
    """By trying every level: the highest at which a region of the area stands, or the largest."""
    sizes = {}
    for level in np.unique(values[~np.isnan(values)]):
        labels, _ = ndimage.label(np.nan_to_num(values, nan=-np.inf) >= level, _EIGHT)
        sizes[level] = np.bincount(labels.ravel())[1:].max()
    area = min(area, max(sizes.values()))
    return max(level for level, size in sizes.items() if size >= area)


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 14), st.integers(1, 14)),
    st.integers(1, 220),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.booleans(),
)
def test_a_level_of_an_area_is_that_of_brute_force(
    seed: int, size: tuple[int, int], area: int, blur: float, ties: bool
) -> None:
    rng = np.random.default_rng(seed)
    values = ndimage.gaussian_filter(rng.random(size), blur).astype(np.float32)
    if ties:
        values = np.round(values * 4).astype(np.float32)
    values[rng.random(size) < 0.2] = np.nan
    if np.isnan(values).all():
        assert place_of_level(values, area) == 0
        return
    level = values.ravel()[place_of_level(values, area)]
    assert level == _highest_level(values, area)
    maps = torch.from_numpy(values)[None].requires_grad_()
    levels = levels_of_areas(maps, [area])
    assert levels.tolist() == [level]
    levels.sum().backward()
    assert maps.grad is not None
    assert maps.grad.sum() == 1


def _check(smallest: dict[str, Any], **image: Any) -> None:
    region = Region(Polygons((((0.5, 0), (1, 0), (1, 1), (0.5, 1)),)), None)
    sizing = Sizing(None, None, 68, 16)  # 48 × 96, so that a patch covers 10 × 10 pixels

    def grid_of(size: tuple[int, int]) -> tuple[int, int]:
        return size[0] // 8, size[1] // 8

    config = parse_config({"model": {"smallest_defect": smallest}, "image": image}, "a test")
    setup: Any = SimpleNamespace(
        config=config,
        region=region,
        loading=SimpleNamespace(sizing=sizing),
        embedder=SimpleNamespace(grid=grid_of),
    )
    check_smallest_defect(setup, [(60, 120)])


def test_what_cannot_be_measured_is_refused() -> None:
    for area, says in (
        (99, r"smallest_defect: area is 99 pixels, .*10 × 10 .*can be measured; give 100"),
        (2000, "more than half of the inspected area"),
    ):
        with pytest.raises(ConfigError, match=says):
            _check({"area": area})
        with pytest.raises(ConfigError, match=says):
            _check({"area": area / 100, "unit": "mm"}, mm_per_pixel=0.1)
    _check({"area": 100})
    with pytest.raises(ConfigError, match="exclude each other"):
        _check({"area": 100}, tile=64)
    with pytest.raises(ConfigError, match=r"in mm; set image\.mm_per"):
        _check({"area": 9, "unit": "mm"})


def test_the_smallest_defect_is_part_of_every_score(product: Path) -> None:
    """Images and thresholds go by the level of the area."""
    model = {"halo_damping": 0, "spacing_neighbours": 0, "smallest_defect": {"area": 300}}
    detector = anomaly.fit(product / "train" / "good", tiny(model=model), device="cpu")
    predicted: Any = detector.predict(product / "test" / "spot" / "000.png")
    height, width = predicted.view.size
    maps = network_map(predicted.patch_scores[None], (height, width), predicted.smoothing)
    area = round(300 * height * width / (96 * 120))
    labels = [ndimage.label(maps[0] >= predicted.score * t, _EIGHT)[0] for t in (1, 1.001)]
    largest = [int(np.bincount(of_level.ravel())[1:].max(initial=0)) for of_level in labels]
    assert largest[0] >= area > largest[1]
    assert predicted.verdict == "reject"
    assert predicted.score < maps.max()
    # What other programs run can't measure regions.
    with pytest.raises(ModelError, match="the size of regions decides its image score"):
        check_pixels(detector.model)
