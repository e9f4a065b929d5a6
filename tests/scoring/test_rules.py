"""The smallest defect against brute force, zones' promises, and which rule decides."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from anomaly.calibration import GoodScores, thresholds_from
from anomaly.calibration.scores import ZoneScores
from anomaly.config.load import parse_config
from anomaly.errors import ConfigError
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.pose import Motion, Pose
from anomaly.imaging.region import Polygons, Region
from anomaly.maps.regions import MarkedRegion, marked_regions
from anomaly.scoring.image_score import levels_of_areas, place_of_level
from anomaly.scoring.rules import Judge, Rule, Zone
from anomaly.training.measurable import check_measurable

_EIGHT = np.ones((3, 3))
LEFT = {"left": {"polygons": [[[0, 0], [0.5, 0], [0.5, 1], [0, 1]]]}}


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


def test_a_level_falls_with_the_area_and_is_the_maximum_of_one_pixel() -> None:
    values = ndimage.gaussian_filter(np.random.default_rng(1).random((60, 50)), 2)
    values = values.astype(np.float32)
    levels = [values.ravel()[place_of_level(values, area)] for area in (1, 5, 50, 500, 3000)]
    assert levels[0] == values.max()
    assert levels == sorted(levels, reverse=True)
    assert levels[-1] == values.min()


def _good(scores: np.ndarray, zone: np.ndarray, rate: float) -> GoodScores:
    names = tuple(map(str, range(len(scores))))
    image, of_zone = tuple(scores.tolist()), tuple(zone.tolist())
    return GoodScores(names, image, image, "", zones=(ZoneScores("seal", rate, of_zone),))


@given(st.integers(0, 2**32 - 1), st.integers(1, 80), st.booleans())
def test_a_score_is_rejected_where_a_part_is_above_its_own_threshold(
    seed: int, images: int, ties: bool
) -> None:
    rng = np.random.default_rng(seed)
    both = rng.gamma(5, (1.0, 30.0), (images, 2))
    both = np.round(both) if ties else both
    limits = thresholds_from(_good(*both.T, 0.1), 0.2, 0.1)
    own = limits.zones["seal"].value
    edges = [0.0, own, limits.image, *np.nextafter([own, limits.image], np.inf).tolist()]
    for pair in [*both.tolist(), *((a, b) for a in edges for b in edges)]:
        score, zone = limits.image_score(pair)
        above = pair[0] > limits.image, pair[1] > own
        assert (limits.verdict(score) == "reject") == any(above)
        if above == (False, True):
            assert zone == "seal"
    assert np.isnan(limits.image_score((np.nan, np.nan))[0])


def test_each_zone_keeps_its_rate_over_splits() -> None:
    """The zone's rate lies below the rest's; of 400 splits each promise fails in 5 % at most."""
    rng = np.random.default_rng(0)
    rates, kept, images = {"rest": 0.05, "seal": 0.02}, {"rest": 0, "seal": 0}, 200
    for _ in range(400):
        parts = rng.gamma(3, 1, (images, 1)) + rng.gamma(2, (1, 4), (images, 2))  # they go together
        limits = thresholds_from(_good(*parts.T, rates["seal"]), 0.1, rates["rest"])
        new = rng.gamma(3, 1, (4000, 1)) + rng.gamma(2, (1, 4), (4000, 2))
        values = {"rest": limits.image, "seal": limits.zones["seal"].value}
        for column, (name, value) in enumerate(values.items()):
            kept[name] += (new[:, column] > value).mean() <= rates[name] + 0.003
    assert min(kept.values()) >= 0.95 * 400 - 9  # two standard deviations


def test_good_scores_keep_those_of_zones_in_their_rows() -> None:
    good = _good(np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 30.0]), 0.1)
    left = good.without(["1"])
    assert left.zones[0].image == (10.0, 30.0)
    assert left.left_out[0].zones == (20.0,)
    assert left.without([]) == good
    other = replace(good, names=("a", "b", "c"))
    assert left.joined(other, "").zones[0].image == (10.0, 30.0, 10.0, 20.0, 30.0)


def _region(area: int, length: float = 1.0, thickness: float = 1.0, x: int = 0) -> MarkedRegion:
    return MarkedRegion(x, 0, 1, 1, area, 1.0, x, 0, 1.0, 1.0, length, thickness)


def test_of_each_region_the_first_rule_that_fits_decides() -> None:
    left = Zone("left", Region(Polygons((((0, 0), (50, 0), (50, 80), (0, 80)),), False), None))
    judge = Judge(
        (left,),
        (
            Rule("long", "reject", None, (("length", 30.0),)),
            Rule("many", "review", "left", (("area", 10.0),), count=2),
            Rule("rest", "good", None, ()),
        ),
    )
    view = Sizing(None, None, 64, 8).view((80, 100))

    def decided(by_score: str, *regions: MarkedRegion) -> tuple[Any, ...]:
        placed = judge.placed(regions, view)
        return (*judge.verdict(by_score, placed), *(r.rule for r in placed))

    assert decided("reject", _region(10, length=29.9)) == ("good", "rest", "rest")
    assert decided("review", _region(10, length=30)) == ("reject", "long", "long")
    pair = _region(10, x=3), _region(10, x=49)
    assert decided("reject", *pair) == ("review", "many", "many", "many")
    assert decided("reject", pair[0], _region(10, x=50))[:2] == ("good", "rest")  # one lies outside
    assert decided("reject") == ("reject", "")
    strict = replace(judge, rules=judge.rules[:2])
    placed = strict.placed([_region(5), *pair], view)
    assert strict.verdict("reject", placed) == ("reject", "")  # the score's, of the first region
    assert [r.zone for r in placed] == ["left"] * 3
    excused = judge.placed([_region(5)], view)  # but something is missing elsewhere
    assert judge.verdict("review", excused, beyond=True) == ("review", "")
    assert judge.verdict("review", judge.placed([_region(5, 30)], view), beyond=True)[1] == "long"


def test_a_zone_follows_the_part() -> None:
    zone = Zone("left", Region(Polygons((((0, 0), (50, 0), (50, 80), (0, 80)),), False), None))
    view = Sizing(None, None, 64, 8).view((80, 100))
    moved = replace(view, pose=Pose(Motion(0.0, 20.0, 0.0), (80, 100)))
    assert [zone.holds(_region(1, x=x), moved) for x in (10, 20, 69, 70)] == [
        False, True, True, False,
    ]  # fmt: skip


def test_length_and_thickness_are_those_of_a_turned_box() -> None:
    from pixel_map import pixel_map

    scores = np.zeros((60, 60), np.float32)
    along = np.arange(30)
    for across in range(4):
        scores[10 + along + across // 2, 10 + along - (across + 1) // 2] = 1.0
    (region,) = marked_regions((scores > 0).astype(np.uint8), pixel_map(scores))
    assert region.length == pytest.approx(29 * 2**0.5 + 1, abs=1.5)
    assert region.thickness == pytest.approx(3, abs=1)


def _rule(**values: Any) -> dict[str, Any]:
    return {"name": "a", "verdict": "good", **values}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rules": [_rule(zone="seel")], "zones": LEFT}, "names the zone 'seel'.*it has: left"),
        ({"rules": [_rule(area=1, unit="mm")]}, "'a' is in mm; set image.mm_per_pixel"),
        ({"rules": [_rule(), _rule(name="b", area=9)]}, "'b' never applies: 'a' comes before it"),
        ({"rules": [_rule(area=9), _rule(name="b", area=9, count=2, zone="left")],
          "zones": LEFT}, "'b' never applies"),
        ({"rules": [_rule(length=3, unit="mm"), _rule(name="b", length=31)],
          "image": {"mm_per_pixel": 0.1}}, "'b' never applies"),
        ({"rules": [_rule(), _rule()]}, "two rules are called 'a'"),
        ({"rules": [_rule(zone="left", size=3)], "zones": LEFT}, "unknown key 'rules.0.size'"),
        ({"zones": {"a/b": LEFT["left"]}}, "must be a name"),
        ({"zones": {"left": {"png": "x.png"}}}, "zones.left: a zone takes"),
        ({"model": {"smallest_defect": {"area": 9}}, "image": {"tile": 64}}, "exclude each other"),
        ({"model": {"smallest_defect": {"area": 9, "unit": "mm"}}}, "in mm; set image.mm_per"),
    ],
)  # fmt: skip
def test_mistakes_in_a_config(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config(values, "a test")


@pytest.mark.parametrize("later", [{"area": 8}, {"zone": None, "area": 9, "length": 2, "count": 1}])
def test_rules_that_can_decide_pass(later: dict[str, Any]) -> None:
    first = _rule(area=9, zone="left")
    config = parse_config({"rules": [first, _rule(name="b", **later)], "zones": LEFT}, "a test")
    assert [rule.name for rule in config.rules] == ["a", "b"]


def _zone(left: float, right: float, **more: Any) -> dict[str, Any]:
    corners = [[left, 0], [right, 0], [right, 60], [left, 60]]
    return {"z": {"polygons": [corners], "unit": "pixels", **more}}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"zones": _zone(100, 140)}, r"zones\.z doesn't fit .* its 120×60 pixels don't hold"),
        ({"zones": _zone(0, 1)}, "no patch lies at least half inside the zone 'z'"),
        ({"zones": _zone(0, 40)}, r"zones\.z lies outside image\.region"),
        ({"zones": _zone(0, 120, reject_rate=0.1)}, "cover the whole image"),
        ({"rules": [_rule(length=9)]}, r"rule 'a': length is 9 pixels, .*10 × 10 .*; give 10"),
        ({"rules": [_rule(area=99)]}, "nothing smaller can be measured; give 100"),
        ({"rules": [_rule(area=0.99, unit="mm")], "image": {"mm_per_pixel": 0.1}}, "is 99 pixels"),
        ({"model": {"smallest_defect": {"area": 99}}}, "smallest_defect: area is 99 pixels"),
        ({"model": {"smallest_defect": {"area": 2000}}}, "more than half of what counts"),
    ],
)
def test_what_cannot_be_measured_is_refused(values: dict[str, Any], says: str) -> None:
    region = Region(Polygons((((60, 0), (120, 0), (120, 60), (60, 60)),), False), None)
    sizing = Sizing(None, None, 68, 16)  # 48 × 96

    def grid_of(size: tuple[int, int]) -> tuple[int, int]:
        return size[0] // 8, size[1] // 8

    with pytest.raises(ConfigError, match=says):
        check_measurable(parse_config(values, "a test"), [(60, 120)], sizing, grid_of, region)
    fine = {"zones": _zone(60, 90, reject_rate=0.1), "rules": [_rule(area=100, length=10)]}
    fine["model"] = {"smallest_defect": {"area": 100}}  # type: ignore[assignment]
    check_measurable(parse_config(fine, "a test"), [(60, 120)], sizing, grid_of, region)
