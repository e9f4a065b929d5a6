"""What is tried for which settings."""

from typing import Any

import pytest

from anomaly.config.load import parse_config
from anomaly.config.schema import Config
from anomaly.desk.tune import changed, expense, steps, work


def config(**values: Any) -> Config:
    return parse_config(values, "a test")


def axes(given: Config) -> set[str]:
    return {step.axis for step in steps(given, ["resnet50"])}


def test_what_is_tried_depends_on_what_is_there() -> None:
    every = {"image score", "bank", "size", "turns", "pose", "network"}
    assert axes(config(model={"coreset_ratio": 0.02})) == every
    assert "bank" not in axes(config(model={"coreset_ratio": 0.5}))
    assert axes(config(model={"kind": "padim"})) == {"image score", "size", "pose", "network"}
    assert "turns" not in axes(config(model={"turned_copies": "quarter_turns"}))
    assert "size" not in axes(config(image={"resize": 256}))
    assert "pose" not in axes(config(image={"align": "shift"}))
    assert "network" not in axes(config(backbone={"name": "resnet50"}))


def test_every_candidate_is_a_valid_config_that_differs() -> None:
    for values in (
        {},
        {"model": {"kind": "padim"}},
        {"model": {"image_score": "max"}},
        {"image": {"tile": 1024}},
        {"image": {"area": 64}},
        {"image": {"resize": 256, "crop": 224}},
    ):
        base = config(**values)
        for change in steps(base, ["resnet50"]):
            assert changed(base, [change]) != base
            assert change.reason


def test_turned_copies_keep_the_bank_as_large_as_it_was() -> None:
    base = config(model={"coreset_ratio": 0.04})
    turned = [step for step in steps(base, []) if step.axis == "turns"]
    for step, copies in zip(turned, (4, 8), strict=True):
        settled = changed(base, [step])
        assert settled.model.coreset_ratio == pytest.approx(0.04 / copies, rel=1e-2)
        assert expense(settled, base) == pytest.approx(1.0, rel=1e-2)
        assert work(settled)[1] == copies * work(base)[1]
