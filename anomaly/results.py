"""Rows of verdicts: what `infer` says about each image."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Row:
    """One image's line in results.csv and results.jsonl; the fields are the columns, in order.

    Attributes:
        path: the file, as given or found.
        image_sha256: of the file's bytes; empty where they couldn't be read.
        status: `ok`, `unreadable`, `unsupported`, or `failed` when the file took the processes down
            that tried to decode it.
        image_score: higher is more anomalous; None unless `ok`.
        calibrated_score: how rare such a score is among good parts, in powers of ten; None
            without a score or a threshold.
        review_threshold: a higher score needs a second look; None where the model has none.
        threshold: a higher score is rejected; None where the model has none.
        verdict: `good`, `review` (a person has to look) or `reject`; empty without a score or a
            threshold.
        heatmap: picture, relative to the output folder; empty unless `ok`.
        model_id: which model said so.
        software_version: of this program.
        threshold_label: how the thresholds were found: `calibrated`, `by cost` or `by hand`.
        reason: why there is no score, or why a person has to look.
    """

    path: str
    image_sha256: str
    status: str
    image_score: float | None
    calibrated_score: float | None
    review_threshold: float | None
    threshold: float | None
    verdict: str
    heatmap: str
    model_id: str
    software_version: str
    threshold_label: str
    reason: str


def as_csv(rows: Iterable[Row]) -> str:
    """Rows as CSV with a header; floats have all their digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in fields(Row))
    for row in rows:
        writer.writerow(_cell(value) for value in asdict(row).values())
    return text.getvalue()


def as_jsonl(rows: Iterable[Row]) -> str:
    """Rows as one JSON object a line."""
    return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)
