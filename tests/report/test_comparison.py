"""Two evaluations side by side: who changed, for the better or the worse."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from report_cases import case, limits

from anomaly.errors import DataError
from anomaly.report.category import Category
from anomaly.report.comparison import compare, comparison_csv, summary
from anomaly.report.comparison_page import comparison_html
from anomaly.report.tables import metrics_json, scores_csv


def written(folder: Path, *categories: Category) -> Path:
    folder.mkdir()
    evaluations = [c.evaluation for c in categories]
    (folder / "metrics.json").write_text(metrics_json(evaluations))
    (folder / "scores.csv").write_text(scores_csv(evaluations))
    return folder


def test_changed_verdicts_are_those_of_a_plain_recount(tmp_path: Path) -> None:
    first, second = case(40, thresholds=limits()), case(40, thresholds=limits(9.5), seed=3)
    compared = compare(written(tmp_path / "a", first), written(tmp_path / "b", second))
    better = worse = 0
    rows = zip(first.evaluation.scored, second.evaluation.scored, strict=True)
    for one, two in rows:
        before, after = (one.image_score or 0) > 10, (two.image_score or 0) > 9.5
        if before != after:
            better += after == one.sample.is_defect
            worse += after != one.sample.is_defect
    assert better
    assert worse
    text = f"{better + worse} of 40 images changed verdict, {better} for the better and {worse} for"
    assert text in summary(compared)
    assert [c.changed for c in compared.changes] == sorted(
        (c.changed for c in compared.changes), reverse=True
    )
    by_path = {c.path: c for c in compared.changes}
    sample = first.evaluation.scored[7]
    change = by_path[sample.sample.name]
    assert change.scores == (sample.image_score, second.evaluation.scored[7].image_score)
    assert change.ratios[1] == pytest.approx((change.scores[1] or 0) / 9.5)
    listed = list(csv.DictReader(io.StringIO(comparison_csv(compared))))
    assert len(listed) == 40
    assert sum(int(row["changed"]) for row in listed) == better + worse
    row = next(r for r in listed if r["path"] == sample.sample.name)
    assert float(row["difference"]) == (change.scores[1] or 0) - (change.scores[0] or 0)
    shown = comparison_html(compared)
    assert text in shown
    counted = []
    for good, is_meant in ((True, True), (False, False)):  # false rejects, escapes
        counts = [
            sum(
                one.sample.is_defect != good and ((one.image_score or 0) > limit) == is_meant
                for one in evaluation.scored
            )
            for evaluation, limit in ((first.evaluation, 10), (second.evaluation, 9.5))
        ]
        counted.append("{}<br>→ {}".format(*counts))
    assert all(f"<td>{pair}<small" in shown for pair in counted)
    assert len(set(counted)) == 2
    assert shown.index(f"<td>{counted[0]}<small") < shown.index(f"<td>{counted[1]}<small")


def test_an_evaluation_compared_with_itself_changes_nothing(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", case(), case(name="other", thresholds=limits()))
    compared = compare(folder, folder)
    assert len(compared.changes) == 60
    assert not any(c.changed for c in compared.changes)
    assert all(a == b for a, b in compared.figures.values())


def test_single_categories_are_compared_whatever_their_names(tmp_path: Path) -> None:
    first, second = case(20, name="padim"), case(16, name="padim")
    second = replace(second, evaluation=replace(second.evaluation, name="patchcore"))
    compared = compare(written(tmp_path / "a", first), written(tmp_path / "b", second))
    assert len(compared.changes) == 16
    assert compared.alone == (4, 0)
    assert list(compared.figures) == ["padim"]


def test_images_of_one_name_and_another_content_are_not_compared(tmp_path: Path) -> None:
    first, second = case(), case()
    rows = list(second.evaluation.scored)
    rows[3] = replace(rows[3], image_sha256="another picture")
    second = replace(second, evaluation=replace(second.evaluation, scored=tuple(rows)))
    compared = compare(written(tmp_path / "a", first), written(tmp_path / "b", second))
    assert len(compared.changes) == 29
    assert compared.alone == (1, 1)


def test_where_one_side_has_no_verdicts_none_has_changed(tmp_path: Path) -> None:
    first, second = case(), case(thresholds=limits())
    compared = compare(written(tmp_path / "a", first), written(tmp_path / "b", second))
    assert not any(c.changed for c in compared.changes)
    assert summary(compared) == "30 images in both; A without verdicts"


def test_what_is_not_an_evaluation_is_named(tmp_path: Path) -> None:
    good = written(tmp_path / "a", case())
    with pytest.raises(DataError, match="nowhere holds no evaluation"):
        compare(good, tmp_path / "nowhere")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.json").write_text(json.dumps({"else": 1}))
    with pytest.raises(DataError, match="give folders that `evaluate --output` wrote"):
        compare(tmp_path / "b", good)
    other = written(tmp_path / "c", case(2, names=("x.png", "y.png")))
    with pytest.raises(DataError, match="no image in common"):
        compare(good, other)
