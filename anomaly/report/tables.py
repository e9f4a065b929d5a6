"""Evaluations -> metrics.json, scores.csv and a table on screen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from anomaly.calibration.rates import rate_of
from anomaly.calibration.thresholds import Thresholds
from anomaly.errors import counted
from anomaly.evaluation.evaluate import Evaluation
from anomaly.evaluation.metrics import NO_DEFECT_MASKS, NO_MASKS, Confusion
from anomaly.files.tables import csv_rows, csv_text, text_table
from anomaly.files.writing import as_json

Columns = Sequence[tuple[str, str]]
_COLUMNS: Columns = (
    ("image AUROC", "image_auroc"),
    ("image AP", "image_ap"),
    ("image F1", "image_f1_max"),
    ("pixel AUROC", "pixel_auroc"),
    ("pixel AP", "pixel_ap"),
    ("pixel F1", "pixel_f1_max"),
    ("AUPRO", "aupro_30"),
)


def metrics_json(evaluations: Sequence[Evaluation]) -> str:
    """`{"categories": {name: figures}, "mean": figures}`; an undefined figure is null.

    Each category, and each type of defect, says why a figure is undefined under `undefined`; under
    `intervals` what the image figures can be for parts still to come, with at least 95 %
    confidence; each type of defect against all good images under `by_type`; and under `verdicts`
    what the model's own thresholds did, in counts and in rates with 95 % intervals;
    `n_threshold_images` of the images are those that the thresholds were chosen with,
    `n_settings_images` the settings. The mean leaves undefined figures out; it is null where models
    were evaluated on the same images.
    """
    categories = {e.name: _figures(e) | _verdicts(e) for e in evaluations}
    overall = None if _on_shared_images(evaluations) else _mean(evaluations)
    return as_json(_rounded({"categories": categories, "mean": overall}))


def _rounded(value: Any) -> Any:
    """Numbers to nine digits, which single precision needs: 1, not 0.9999999999999999."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.9g}"))


def scores_csv(evaluations: Sequence[Evaluation]) -> str:
    """One row for each test image; docs/outputs.md describes the columns."""
    rows: list[Sequence[object]] = [
        (
            *("category", "path", "defect_type", "is_defect", "image_score", "calibrated_score"),
            *("review_threshold", "threshold", "verdict", "reason", "image_sha256"),
        )
    ]
    for evaluation in evaluations:
        limits = evaluation.thresholds
        for row in evaluation.scored:
            sample, score = row.sample, row.score
            calibrated = None if score is None or limits is None else limits.calibrated(score)
            borders = (None, None) if limits is None else (limits.review, limits.image)
            rows.append(
                (
                    *(evaluation.name, sample.name, sample.defect_type, int(sample.is_defect)),
                    *(score, calibrated, *borders),
                    *(row.verdict(limits), row.reason, row.sha256),
                )
            )
    return csv_text(rows)


def passed_in_evaluation(scores: str, thresholds: Thresholds) -> str:
    """A line on the defects that passed an evaluation at these very thresholds; empty for others.

    Args:
        scores: what `scores_csv` has made of the evaluation.
        thresholds: of a model.

    Raises:
        ValueError: these aren't such lines.
        KeyError: columns are missing.
    """
    header, *cells = csv_rows(scores)
    both = [repr(thresholds.review), repr(thresholds.image)]
    verdicts = [
        row["verdict"]
        for row in (dict(zip(header, each, strict=True)) for each in cells)
        if row["is_defect"] == "1" and row["verdict"]
        if [row["review_threshold"], row["threshold"]] == both
    ]
    if not verdicts:
        return ""
    passed = f"{verdicts.count('good')} of {counted(len(verdicts), 'defect')}"
    return f"in evaluation, {passed} passed as good at these thresholds"


def _defined_columns(evaluations: Sequence[Evaluation]) -> Columns:
    """The columns that some evaluation has a figure for."""
    return [c for c in _COLUMNS if any(e.metrics.values.get(c[1]) is not None for e in evaluations)]


def table(evaluations: Sequence[Evaluation]) -> str:
    """The figures for people, one line a category and their mean, unless they share images."""
    columns = _defined_columns(evaluations)
    header = ["", "good", "defect", *(title for title, _ in columns)]
    lines = [
        [e.name, str(e.n_good), str(e.n_defect)]
        + [_shown(e.metrics.values.get(key)) for _, key in columns]
        for e in evaluations
    ]
    if len(evaluations) > 1 and not _on_shared_images(evaluations):
        means = _mean(evaluations)
        lines.append(["mean", "", "", *(_shown(means.get(key)) for _, key in columns)])
    head, *texts = text_table([header, *lines])
    return "\n".join([head, "─" * len(head), *texts])


def at_thresholds(name: str, counts: Confusion) -> str:
    """Verdicts on test images at a model's own thresholds, in one line."""
    good, bad = counts.good, counts.defective
    clauses = [f"of {good.total} good ones {good.reject} rejected and {good.review} to review"]
    if bad.total:
        clauses.append(
            f"of {bad.total} defective ones {bad.reject} rejected, {bad.review} to review, "
            f"{bad.good} called good (escapes)"
        )
    return f"{name} at its thresholds: {'; '.join(clauses)}"


def undefined(evaluations: Sequence[Evaluation]) -> list[str]:
    """Reasons for missing figures, one line for each reason of each category."""
    lines = []
    for e in evaluations:
        by_reason: dict[str, list[str]] = {}
        for key, reason in e.metrics.reasons.items():
            by_reason.setdefault(reason, []).append(key)
        for why, keys in by_reason.items():
            missing = f"{', '.join(keys)} undefined"
            if why in (NO_MASKS, NO_DEFECT_MASKS):
                missing = "no pixel figures"
            lines.append(f"{e.name}: {missing}: {why}")
    return lines


def _figures(evaluation: Evaluation) -> dict[str, Any]:
    metrics = evaluation.metrics
    return {
        **metrics.values,
        "n_good": evaluation.n_good,
        "n_defect": evaluation.n_defect,
        "n_threshold_images": evaluation.n_threshold_images,
        "n_not_scored": len(evaluation.scored) - evaluation.n_good - evaluation.n_defect,
        "n_settings_images": evaluation.n_settings_images,
        "undefined": metrics.reasons,
        "intervals": evaluation.intervals,
        "by_type": {
            name: {**metrics.values, "undefined": metrics.reasons}
            for name, metrics in evaluation.by_type.items()
        },
    }


def _verdicts(evaluation: Evaluation) -> dict[str, Any]:
    counts = evaluation.verdicts
    if counts is None:
        why = {"verdicts": "the model has no thresholds"}
        return {"verdicts": None, "undefined": evaluation.metrics.reasons | why}
    totals = {
        "false_rejects": counts.false_rejects,
        "good_to_review": counts.good_to_review,
        "escapes": counts.escapes,
        "caught": counts.caught,
        "false_reject_rate": _rate(counts.false_rejects, counts.good.total),
        "good_to_review_rate": _rate(counts.good_to_review, counts.good.total),
        "escape_rate": _rate(counts.escapes, counts.defective.total),
    }
    return {"verdicts": totals | asdict(counts)}


def _rate(count: int, images: int) -> dict[str, Any] | None:
    """A share with its Clopper–Pearson interval: the test images had no say in the thresholds."""
    if not images:
        return None
    rate = rate_of(count, images, count / images)
    return {"value": rate.expected, "interval": (rate.low, rate.high)}


def _mean(evaluations: Sequence[Evaluation]) -> dict[str, float | None]:
    """Each figure's mean over the evaluations that have it; None where none has."""
    keys = dict.fromkeys(key for e in evaluations for key in e.metrics.values)
    means: dict[str, float | None] = {}
    for key in keys:
        if key.endswith("_threshold"):  # in the score units of one model
            continue
        values = [v for e in evaluations if (v := e.metrics.values.get(key)) is not None]
        means[key] = sum(values) / len(values) if values else None
    return means


def _on_shared_images(evaluations: Sequence[Evaluation]) -> bool:
    """True if an image was scored in two evaluations: models are compared, not added up."""
    seen: set[str] = set()
    for evaluation in evaluations:
        own = {row.sha256 for row in evaluation.scored if row.sha256}
        if own & seen:
            return True
        seen |= own
    return False


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
