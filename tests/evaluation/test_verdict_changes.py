"""What newly passes when one model takes another's place."""

from __future__ import annotations

import pytest

from anomaly.evaluation.price import Compared


@pytest.mark.parametrize("before", ["good", "review", "reject"])
@pytest.mark.parametrize("after", ["good", "review", "reject"])
def test_what_was_caught_and_would_pass_escapes(before: str, after: str) -> None:
    passes = Compared("a.png", before, after, (1.0, 2.0)).newly_passes
    assert passes == ((before, after) in {("review", "good"), ("reject", "good")})
