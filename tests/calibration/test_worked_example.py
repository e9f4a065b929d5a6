"""The example of docs/thresholds.md, computed from the numbers that stand there."""

import re

import pytest
from conftest import REPOSITORY

from anomaly.calibration import Costs
from anomaly.evaluation.metrics.images import confusion

PAGE = (REPOSITORY / "docs" / "thresholds.md").read_text("utf-8")
EXAMPLE = PAGE.partition("## What each word and each price means")[2].partition("\n## ")[0]
CELLS = [
    [c.strip() for c in row.strip("|").split("|")] for row in re.findall(r"^\|.*", EXAMPLE, re.M)
]
ROWS = {name: rest for name, *rest in CELLS}


def test_every_figure_of_the_example_follows_from_its_counts_and_prices() -> None:
    verdicts, labels = [], []
    for row, is_defect in (("200 good parts", False), ("50 defects", True)):
        for verdict, count in zip(ROWS["in truth"], map(int, ROWS[row]), strict=True):
            verdicts += [verdict] * count
            labels += [is_defect] * count
    counts = confusion(verdicts, labels, ["part"] * len(labels))
    good, defective = counts.good.total, counts.defective.total
    assert (good, defective) == (200, 50)
    for word, count, total in (
        ("false reject", counts.false_rejects, good),
        ("good part to review", counts.good_to_review, good),
        ("escape", counts.escapes, defective),
        ("caught", counts.caught, defective),
    ):
        assert ROWS[word][-1] == f"{count} of {total}, {count / total:.0%}".replace("%", " %")

    def price(name: str) -> float:
        return float(re.match(r"[\d.]+", ROWS[f"`--cost-{name}`"][-1])[0])  # type: ignore[index]

    share = float(ROWS["`--defect-share`"][-1].removesuffix(" %")) / 100
    costs = Costs(price("false-reject"), price("escape"), price("review"), share)
    of_good = 1 - counts.good.good / good, counts.false_rejects / good
    cost = costs.of_a_part(*of_good, counts.caught / defective, counts.defective.reject / defective)
    formula, told = re.search(r"^    (99 %.*) = ([\d.]+) EUR$", EXAMPLE, re.M).groups()  # type: ignore[union-attr]
    assert float(cost) == pytest.approx(float(told), rel=1e-9)
    plain = formula.replace(" EUR", "").replace("×", "*").replace(" %", "/100")
    assert re.fullmatch(r"[\d*/+(). ]+", plain)
    assert eval(plain) == pytest.approx(float(told), rel=1e-9)
