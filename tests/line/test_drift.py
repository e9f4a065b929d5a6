"""Drift: alarms of streams that stay as they were, and of streams that change; the command."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Says
from running import answer

from anomaly.calibration.thresholds import GoodScores, Thresholds, thresholds_from
from anomaly.errors import DataError
from anomaly.inference.results import Row, as_jsonl
from anomaly.line.drift import HORIZON, Drift, Level, levels_of, scores_of
from anomaly.line.models import ModelSlot, Version
from anomaly.line.record import Answer, Record, in_utc, open_to_read
from anomaly.storage.folder import model_id
from anomaly.storage.models import load_model

Draw = Callable[[np.random.Generator], np.ndarray]
OTHER = "0" * 16  # a model's id


def thresholds_of(rng: np.random.Generator, images: int) -> Thresholds:
    scores = tuple(np.exp(rng.normal(0, 0.2, images)).tolist())
    good = GoodScores(tuple(map(str, range(images))), scores, scores, "training images")
    return thresholds_from(good, 0.05, 0.01)


def test_an_alarm_names_the_part_and_where_the_rise_began() -> None:
    level = Level("reject", 2.0, 0.1, limit=2.5 / 3)  # at first three parts say as much as one
    drift = Drift([level], [1.0, 3.0, 1.0, 3.0, *[3.0] * 4])
    alarm = drift.alarm
    assert alarm is not None
    assert (alarm.alarm, alarm.since, alarm.above) == (6, 1, 6)
    assert "Alarm at part 7; the rise began at part 2" in drift.lines()[0]


def lots(size: int, share: float, begin: int = 0) -> Draw:
    """Standard normal scores; a share of the variance is common to a lot."""

    def drawn(rng: np.random.Generator) -> np.ndarray:
        common = np.repeat(rng.normal(size=HORIZON // size + 2), size)[begin : begin + HORIZON]
        return math.sqrt(share) * common + math.sqrt(1 - share) * rng.normal(size=HORIZON)

    return drawn


def alarm_of(rng: np.random.Generator, scores: np.ndarray, images: int = 209) -> float:
    """The part that raises an alarm, of 2,000 with 1 % defects; infinite without one."""
    defects = np.where(rng.random(HORIZON) < 0.01, 4, 1)
    levels = levels_of(thresholds_of(rng, images))
    alarm = Drift(levels, (np.exp(0.2 * scores) * defects).tolist()).alarm
    return math.inf if alarm is None or alarm.alarm is None else alarm.alarm


@pytest.mark.parametrize(
    ("images", "drawn"),
    [(40, lots(1, 1.0)), (209, lots(50, 0.3, begin=27)), (209, lots(4, 1.0))],
    ids=["unlike", "lots of 50, begun", "views"],
)
def test_a_false_alarm_is_rare_whatever_neighbours_have_in_common(images: int, drawn: Draw) -> None:
    """At most 5 % of streams: over calibrations as well."""
    rng = np.random.default_rng(5)
    assert sum(alarm_of(rng, drawn(rng), images) < HORIZON for _ in range(40)) <= 2


def test_a_shift_of_one_standard_deviation_is_told_in_time() -> None:
    rng, at = np.random.default_rng(6), np.arange(HORIZON)
    for begin in (0, 1000):
        shifted = [alarm_of(rng, rng.normal(size=HORIZON) + (at >= begin)) for _ in range(9)]
        assert begin < np.median(shifted) < begin + 200
    # And so is what comes slowly, half as far.
    assert alarm_of(rng, rng.normal(size=HORIZON) + 2.5 * at / HORIZON) < HORIZON / 2


def rows(model: str, scores: list[float]) -> list[Row]:
    """Rows of a second each."""
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    times = [begin + timedelta(seconds=i) for i in range(len(scores))]
    return [
        answer("good", i, image_score=score, model_id=model, time=in_utc(times[i])).row
        for i, score in enumerate(scores)
    ]


def scores(file: Path) -> list[float]:
    with open_to_read(file) as db:
        return scores_of(db, [OTHER])


def test_rows_are_read_in_order_and_views_of_a_part_count_once(tmp_path: Path) -> None:
    found = rows(OTHER, [1.0, 3.0, 2.0, 1.0, 5.0, 6.0])
    views = [replace(row, group=str(i // 2) if i < 4 else "") for i, row in enumerate(found)]
    views[4] = replace(views[4], path="a\u2028b\x85c.png")  # one line all the same
    left_out = [replace(found[0], status="unreadable", image_score=None)]
    left_out += [replace(found[0], reason="another product?"), *rows("1" * 16, [9.0] * 3)]
    (tmp_path / "results.jsonl").write_text(as_jsonl([*left_out, *views[::-1]]), "utf-8")
    assert scores(tmp_path / "results.jsonl") == [3.0, 2.0, 5.0, 6.0]


def test_rows_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    file, row = tmp_path / "results.jsonl", as_jsonl(rows(OTHER, [1.0]))
    for content in (row + "{", row + '{"path": "a"}', row.replace("1.0", "NaN"), "words",
                    row.replace("1.0", "1e999"), row.replace("1.0", '"high"')):  # fmt: skip
        file.write_text(content)
        with pytest.raises(DataError, match="holds lines that infer doesn't write"):
            scores(file)
    file.write_bytes(b"\xff")
    with pytest.raises(DataError, match="can't be read"):
        scores(file)


def test_the_service_sees_what_the_report_says(
    run_folder: Path, tmp_path: Path, says: Says
) -> None:
    loaded = load_model(run_folder, "cpu")
    assert loaded.thresholds is not None
    middle = float(np.median(loaded.thresholds.good.image))
    scored = rows(loaded.model_id, [0.98 * middle] * 100 + [2 * middle] * 160)
    scored[3] = replace(scored[3], reason="another product?")
    scored[4] = replace(scored[4], model_id=OTHER)
    scored[5] = replace(scored[5], image_score=None, status="unreadable")
    file, output = tmp_path / "line.sqlite", tmp_path / "report"
    days = ["--from", "2026-01-01", "--to", "2026-01-01"]

    def agree(alarm: bool) -> None:
        arguments = ["--record", file, *days, "--output", output, "--overwrite"]
        out = says(alarm, "report", arguments)
        page, said = (output / "report.html").read_text(), slot.drift_facts()
        assert said["alarm"] == alarm
        assert said["compared"] == ("more" if alarm else "as promised")
        assert ("The scores have drifted" in out) == alarm
        assert all(f"{loaded.model_id}: {line}" in page for line in said["lines"])

    with closing(Record(file)) as record:
        slot = ModelSlot("disc", run_folder / "model", record, device=torch.device("cpu"))
        slot.use(Version.of(loaded, run_folder / "model", ""))
        for batch in (scored[:50], scored[50:120], scored[120:]):
            record.add([Answer("disc", row, b"") for row in batch])
            slot.drift_facts()
        agree(True)
        for part in range(101, 261):  # what people call defects doesn't count,
            record.add_feedback("defect", who="Ada", part=part)
        agree(False)
        record.add([Answer("disc", row, b"") for row in scored[100:]])  # scored once more or not
        agree(False)
        for part in range(101, 261):
            record.add_feedback("good", who="Bob", part=part)
        agree(True)
        calm = replace(scored[0], image_sha256="c" * 64)
        record.add([Answer("disc", calm, b"")] * HORIZON)
        assert not slot.drift_facts()["alarm"]  # it is over once so many are calm
        slot.use(Version.of(loaded, run_folder / "model", ""))  # as after a restart
        assert not slot.drift_facts()["alarm"]
    assert f"of {HORIZON} parts" in slot.drift_facts()["lines"][0]


def test_rows_from_before_a_recalibration_count(
    run_folder: Path, tmp_path: Path, says: Says
) -> None:
    run = shutil.copytree(run_folder, tmp_path / "run")
    found = rows(model_id(run / "model"), [9.0, 1.1, 1.2])
    found[:2] = [replace(row, group="p") for row in found[:2]]  # views of one part
    (tmp_path / "results.jsonl").write_text(as_jsonl(found))
    for threshold in (7, 8):
        arguments = ["--model", run, "--threshold", threshold, "--yes"]
        says(0, "calibrate", arguments)
    report = ["--record", tmp_path, "--model", run, "--from", "2026-01-01", "--to", "2026-01-01"]
    report += ["--output", tmp_path / "report", "--overwrite"]

    def drift() -> str:
        says(0, "report", report)
        return (tmp_path / "report" / "report.html").read_text()

    page = drift()
    assert "above the reject threshold (8): 50 % of 2 parts" in page
    assert page.count("parts flagged") == 1  # what the thresholds of then have promised
    # Scores of before an update are another model's.
    line = {"asked": {"updated": {}}, "model_before": "1" * 16}
    history = run / "model" / "history.jsonl"
    earlier, latest = history.read_text().splitlines()
    history.write_text("\n".join([earlier, json.dumps(line), latest]))
    assert "above the median" not in drift()
