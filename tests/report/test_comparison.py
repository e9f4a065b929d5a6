"""Two evaluations side by side: who changed, for the better or the worse."""

import csv
import io
import json
import re
from dataclasses import replace
from html import escape, unescape
from pathlib import Path

import pytest
from report_cases import HOSTILE, case, limits
from scipy.stats import binomtest

from anomaly.errors import DataError
from anomaly.report.category import Category
from anomaly.report.comparison import compare, comparison_csv, summary
from anomaly.report.comparison_page import comparison_html, mcnemar
from anomaly.report.index import write_report
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


def evaluated(folder: Path, category: Category) -> Path:
    """An evaluation's whole folder, its report included."""
    write_report(category, folder, overwrite=False)
    return folder


def text_of(page: str) -> str:
    body = re.sub(r"<(style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", body)))


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (5, 1), (3, 3), (2, 14), (40, 61)])
def test_chance_is_the_exact_test_of_mcnemar(better: int, worse: int) -> None:
    expected = binomtest(better, better + worse).pvalue if better + worse else 1
    assert mcnemar(better, worse) == pytest.approx(expected)


def test_what_changed_is_counted_with_its_interval(tmp_path: Path) -> None:
    first, second = case(60, thresholds=limits()), case(60, thresholds=limits(8.5), seed=3)
    both = evaluated(tmp_path / "a", first), evaluated(tmp_path / "b", second)
    page = comparison_html(compare(*both))
    flags = [
        [(row.image_score or 0) > limit for row in c.evaluation.scored]
        for c, limit in ((first, 10), (second, 8.5))
    ]
    defects = [row.sample.is_defect for row in first.evaluation.scored]
    rows = list(zip(*flags, defects, strict=True))
    caught, missed = rows.count((False, True, True)), rows.count((True, False, True))
    flagged, released = rows.count((False, True, False)), rows.count((True, False, False))
    before, after = (sum(x and d for x, d in zip(f, defects, strict=True)) for f in flags)
    test = binomtest(caught, caught + missed)
    low, high = (f"{float(f'{100 * x:.2g}'):g} %" for x in test.proportion_ci(method="exact"))
    answer = "Yes" if test.pvalue > 0.05 else "Hardly"
    line = (
        f"Defects caught {sum(defects)} {before} {after} {caught} {missed} {answer}: "
        f"p = {test.pvalue:.2g} (exact McNemar test). B is right in {caught} of {caught + missed} "
        f"images on which A and B differ; among parts to come, in {low} to {high} of such cases"
    )
    assert line in text_of(page)
    headings = re.findall(r"<h2>(?:Def|Good).*?</h2>", page)
    assert headings == [
        f"<h2>Defects newly caught: {caught}</h2>",
        f"<h2>Defects newly missed: {missed}</h2>",
        f"<h2>Good parts newly flagged: {flagged}</h2>",
        f"<h2>Good parts released: {released}</h2>",
    ]


def test_changed_images_are_shown_with_both_heatmaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anomaly.report.comparison._PICTURED", 5)
    first, second = case(40, thresholds=limits()), case(40, thresholds=limits(8.5), seed=3)
    both = evaluated(tmp_path / "a", first), evaluated(tmp_path / "b", second)
    compared = compare(*both)
    page = comparison_html(compared)
    changed = [c for c in compared.changes if c.changed]
    assert len(changed) > 5
    cards = re.findall(r'<section class="card changed">(.*?)</section>', page, re.DOTALL)
    assert len(cards) == 5
    for card, change in zip(cards, changed, strict=False):
        assert change.path in card
        assert [card.count(tag) for tag in ("<svg", "image/jpeg", "image/webp", "<use ")] == [
            *(3, 1),
            sum(bool(c.tiles[int(change.path[-8:-4])].heat) for c in (first, second)),
            2,
        ]
        a, b = (f"{score:.4g}" for score in change.scores)
        for side, verdict, score in zip("AB", change.verdicts, (a, b), strict=True):
            assert f"<b>{side}</b> {verdict}, score {score}" in card
    listed = page[page.index("Other changed verdicts") : page.index("<h2>Figures")]
    assert all(change.path in listed for change in changed[5:])
    assert not any(change.path in listed for change in changed[:5])


def test_both_models_are_named_and_what_differs_in_their_settings(tmp_path: Path) -> None:
    first = replace(case(thresholds=limits()), date="2026-11-22 01:00 UTC")
    second = replace(
        case(thresholds=limits()),
        evaluation=replace(first.evaluation, name="other"),
        model="runs/other",
        date="2026-11-23 02:00 UTC",
        training={"time": "2026-11-21T07:08:09+00:00"},
        settings={**first.settings, "backbone": {"name": "<resnet50>"}},
    )
    both = evaluated(tmp_path / "a", first), evaluated(tmp_path / "b", second)
    page = comparison_html(compare(*both))
    said = text_of(page)
    for line in (
        f"Evaluation {both[0]} {both[1]}",
        "Evaluated 2026-11-22 01:00 UTC 2026-11-23 02:00 UTC",
        "Model in runs/my disc runs/other",
        "Trained – 2026-11-21 07:08 UTC",
        "backbone.name resnet18 <resnet50>",
    ):
        assert line in said
    assert "model.kind" not in said
    assert escape("<resnet50>") in page
    assert "<resnet50>" not in page


def test_names_of_any_script_stay_text_beside_their_pictures(tmp_path: Path) -> None:
    names = [*HOSTILE, "部品/Прокат – בדיקה é.png"]
    first, second = (case(8, names=names, thresholds=limits(limit)) for limit in (0.0, 99.0))
    both = evaluated(tmp_path / "a", first), evaluated(tmp_path / "b", second)
    page = comparison_html(compare(*both))
    assert page.count('<section class="card changed">') == len(names)
    assert all(escape(name) in page for name in names)
    assert not re.search(r"<(script|img|svg onload)", page)
    assert not re.search(r"""(href|src)=["'](?!data:|#)""", page)


def test_a_report_that_is_gone_or_damaged_leaves_names_and_counts(tmp_path: Path) -> None:
    first, second = case(40, thresholds=limits()), case(40, thresholds=limits(8.5), seed=3)
    both = evaluated(tmp_path / "a", first), evaluated(tmp_path / "b", second)
    (both[0] / "disc" / "report.html").unlink()
    page = comparison_html(compare(*both))
    assert page.count("its report has no picture") == page.count('<section class="card changed">')
    (both[1] / "disc" / "report.html").write_text("<html>")
    page = comparison_html(compare(*both))
    assert "Other changed verdicts" in page
    assert '<section class="card changed">' not in page
