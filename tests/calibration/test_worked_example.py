"""The example of docs/thresholds.md, computed from the numbers that stand there."""

import re

from conftest import REPOSITORY

from anomaly.evaluation.metrics import confusion

PAGE = (REPOSITORY / "docs" / "thresholds.md").read_text("utf-8")
EXAMPLE = PAGE.partition("## What each word means")[2].partition("\n## ")[0]
CELLS = [
    [c.strip() for c in row.strip("|").split("|")] for row in re.findall(r"^\|.*", EXAMPLE, re.M)
]
ROWS = {name: rest for name, *rest in CELLS}


def test_every_figure_of_the_example_follows_from_its_counts() -> None:
    rows: list[tuple[str, bool, str]] = []
    for row, is_defect in (("200 good parts", False), ("50 defects", True)):
        for verdict, count in zip(ROWS["in truth"], map(int, ROWS[row]), strict=True):
            rows += [(verdict, is_defect, "part")] * count
    counts = confusion(rows)
    good, defective = counts.good.total, counts.defective.total
    assert (good, defective) == (200, 50)
    for word, count, total in (
        ("false reject", counts.false_rejects, good),
        ("good part to review", counts.good.review, good),
        ("escape", counts.escapes, defective),
        ("caught", counts.caught, defective),
    ):
        assert ROWS[word][-1] == f"{count} of {total}, {count / total:.0%}".replace("%", " %")
