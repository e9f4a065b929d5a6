"""The table over all categories: what it adds up and what it doesn't."""

from __future__ import annotations

import json
from dataclasses import replace

from report_cases import case, limits

from anomaly.report.index import index_html
from anomaly.report.tables import metrics_json, passed_in_evaluation, scores_csv, table


def test_models_on_one_test_split_are_not_added_up() -> None:
    first = replace(
        case(40, thresholds=limits()), date="2026-11-22 01:00 UTC", data_folder="<disc>"
    )
    second = replace(first, evaluation=replace(first.evaluation, name="second"))
    page = index_html([first, second], [], {})
    assert "2026-11-22 01:00 UTC" in page
    assert "&lt;disc&gt;" in page
    assert "sum of counts" not in page
    assert "evaluated on the same images" in page
    assert "2 of 2 models evaluated" in page
    evaluations = [first.evaluation, second.evaluation]
    assert json.loads(metrics_json(evaluations))["mean"] is None
    assert not [line for line in table(evaluations).splitlines() if line.startswith("mean")]


def test_categories_of_their_own_images_are_added_up() -> None:
    categories = [case(40, name=name, thresholds=limits()) for name in ("first", "second")]
    page = index_html(categories, [], {})
    assert '<th scope="row">Mean, and sum of counts</th><td>40</td><td>40</td>' in page
    assert "2 of 2 categories evaluated" in page
    assert json.loads(metrics_json([c.evaluation for c in categories]))["mean"]


def test_what_passed_is_repeated_for_the_same_thresholds_alone() -> None:
    category = case(40, thresholds=limits(11.0, review=8.5))
    scores, passed = scores_csv([category.evaluation]), category.verdicts.escapes  # type: ignore[union-attr]
    said = passed_in_evaluation(scores, limits(11.0, review=8.5))
    assert said == f"in evaluation, {passed} of 20 defects passed as good at these thresholds"
    assert passed_in_evaluation(scores, limits(11.0, review=8.6)) == ""
