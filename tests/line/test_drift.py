"""Drift: alarms of streams that stay as they were, and of streams that change; the command."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Command

import anomaly
from anomaly.calibration.model_thresholds import Thresholds, thresholds_from
from anomaly.calibration.scores import GoodScores
from anomaly.errors import DataError
from anomaly.inference.rows import Row, as_csv, as_jsonl
from anomaly.line.drift import HORIZON, Drift, Level, gains, levels_of, limit_of, read_scores
from anomaly.line.record import Answer, Record
from anomaly.line.slot import ModelSlot, Version
from anomaly.storage.folder import model_id
from anomaly.storage.load import load_model


def model_thresholds(rng: np.random.Generator, images: int) -> Thresholds:
    scores = tuple(np.exp(rng.normal(0, 0.2, images)).tolist())
    good = GoodScores(tuple(map(str, range(images))), scores, scores, "training images")
    return thresholds_from(good, 0.05, 0.01)


def stream(rng: np.random.Generator, change: float, defects: float = 0.0) -> list[float]:
    """Scores whose logarithm grows by `change` from the first to the last."""
    scores = np.exp(rng.normal(0, 0.2, HORIZON) + change * np.arange(HORIZON) / HORIZON)
    scores[rng.random(HORIZON) < defects] *= 4
    return list(scores)


@pytest.mark.parametrize("promised", [0.02, 0.3, 0.62])
def test_a_limit_is_reached_as_seldom_as_it_says(promised: float) -> None:
    """The chain that is computed, against streams that are drawn."""
    chance, repeats = 0.05, 4000
    limit, (down, up) = limit_of(promised, chance), gains(promised)
    above = np.random.default_rng(0).random((HORIZON, repeats)) < promised
    sums, highest = np.zeros(repeats), np.zeros(repeats)
    for part in above:
        sums = np.maximum(sums + np.where(part, up, down), 0.0)
        highest = np.maximum(highest, sums)
    reached = float((highest >= limit).mean())
    noise = 3 * math.sqrt(chance * (1 - chance) / repeats)
    assert reached <= chance + noise
    assert reached >= 0.5 * chance  # and it isn't careful for nothing


def test_the_sum_is_that_of_the_definition() -> None:
    level = Level("reject", 2.0, 0.1, limit=2.5 / 3)  # at first three parts say as much as one
    down, up = math.log((1 - 2 / 11) / 0.9), math.log((2 / 11) / 0.1)
    assert gains(0.1) == pytest.approx((down, up))
    drift, kept = Drift([level]), []
    for score in [1.0, 3.0, 1.0, 3.0, *[3.0] * 4]:
        drift.add(score)
        kept.append(drift.watched[0].sum)
    sums = [0.0, up, up + down, 2 * up + down]
    sums += [sums[-1] + up * i for i in range(1, 5)]
    assert kept == pytest.approx(sums)
    alarm = drift.alarm
    assert alarm is not None
    assert (alarm.alarm, alarm.since, alarm.above) == (6, 1, 6)
    assert "Alarm at part 7; the rise began at part 2" in drift.lines()[0]


def test_a_change_is_seen_and_none_is_not() -> None:
    rng = np.random.default_rng(1)
    levels = levels_of(model_thresholds(rng, 200))
    assert [level.name for level in levels] == [
        "reject threshold",
        "review threshold",
        "upper quartile",
        "median",
    ]
    assert Drift(levels).add_all(stream(rng, 0.0, defects=0.01)).alarm is None
    changed = Drift(levels).add_all(stream(rng, 0.5)).alarm
    assert changed is not None
    assert changed.alarm is not None
    assert changed.alarm < HORIZON / 2


def lots(size: int, share: float, begin: int = 0) -> Callable[[np.random.Generator], np.ndarray]:
    """Standard normal scores; a share of the variance is common to a lot."""

    def drawn(rng: np.random.Generator) -> np.ndarray:
        common = np.repeat(rng.normal(size=HORIZON // size + 2), size)[begin : begin + HORIZON]
        return math.sqrt(share) * common + math.sqrt(1 - share) * rng.normal(size=HORIZON)

    return drawn


def chain(likeness: float) -> Callable[[np.random.Generator], np.ndarray]:
    """Standard normal scores, each like the one before it: an AR(1) process."""

    def drawn(rng: np.random.Generator) -> np.ndarray:
        news = rng.normal(0, math.sqrt(1 - likeness**2), HORIZON)
        return np.array(list(accumulate(news, lambda last, new: likeness * last + new)))

    return drawn


def alarm_of(rng: np.random.Generator, scores: np.ndarray) -> float:
    """The part that raises an alarm, of 2,000 with 1 % defects; infinite without one."""
    defects = np.where(rng.random(HORIZON) < 0.01, 4, 1)
    levels = levels_of(model_thresholds(rng, 209))
    alarm = Drift(levels).add_all((np.exp(0.2 * scores) * defects).tolist()).alarm
    return math.inf if alarm is None or alarm.alarm is None else alarm.alarm


@pytest.mark.parametrize(
    "drawn",
    [lots(20, 0.3), lots(50, 0.3), lots(50, 0.3, begin=27), lots(4, 1.0), chain(0.5), chain(0.8)],
    ids=["lots of 20", "lots of 50", "lots of 50, begun", "views", "alike", "much alike"],
)
def test_parts_that_resemble_their_neighbours_are_no_drift(
    drawn: Callable[[np.random.Generator], np.ndarray],
) -> None:
    rng = np.random.default_rng(5)
    assert sum(alarm_of(rng, drawn(rng)) < HORIZON for _ in range(60)) <= 3


def test_a_shift_of_one_standard_deviation_is_told_in_time() -> None:
    rng, at = np.random.default_rng(6), np.arange(HORIZON)
    for begin in (0, 1000):
        shifted = [alarm_of(rng, rng.normal(size=HORIZON) + (at >= begin)) for _ in range(15)]
        assert begin < np.median(shifted) < begin + 200


def test_views_of_one_part_count_once(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    views = [
        replace(row, group=str(i // 2) if i < 4 else "")
        for i, row in enumerate(rows("0" * 16, [1.0, 3.0, 2.0, 1.0, 5.0, 5.0]))
    ]
    file.write_text(as_csv(views, Row))
    assert read_scores(file, ["0" * 16]).scores == [3.0, 2.0, 5.0, 5.0]


def test_thresholds_that_coincide_are_watched_once() -> None:
    levels = levels_of(model_thresholds(np.random.default_rng(2), 20))
    assert [level.name for level in levels] == ["reject threshold", "upper quartile", "median"]
    with pytest.raises(ValueError, match="defects"):
        levels_of(model_thresholds(np.random.default_rng(2), 20), defects=0.7)


@pytest.mark.slow
@pytest.mark.parametrize("images", [40, 100, 209])
def test_false_alarms_are_as_rare_as_is_said(images: int) -> None:
    """Over calibrations as well as streams, 1 % of parts defective."""
    rng, repeats = np.random.default_rng(3), 200
    alarms = sum(
        Drift(levels_of(model_thresholds(rng, images))).add_all(stream(rng, 0.0, 0.01)).alarm
        is not None
        for _ in range(repeats)
    )
    assert alarms / repeats <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / repeats)


@pytest.mark.slow
def test_a_lamp_that_ages_is_seen_before_false_rejects_treble(
    run_folder: Path, product: Path
) -> None:
    """A lamp that loses a fifth of its light while 2,000 good parts pass."""
    detector = anomaly.load(run_folder, device="cpu")
    files = sorted((product / "train" / "good").glob("*.png"))
    parts = [cv2.imread(str(file)).astype(np.float64) for file in files]
    rng = np.random.default_rng(4)

    def shot(light: float) -> np.ndarray:
        part = parts[rng.integers(len(parts))] + rng.normal(0, 6, parts[0].shape)
        return np.clip(part * light, 0, 255).astype(np.uint8)

    def scores(lights: np.ndarray) -> np.ndarray:
        shots = (shot(light) for light in lights)
        return np.array([one.score for one in detector.stream(shots, channels="bgr")])

    steady = scores(np.ones(400))
    good = GoodScores(
        tuple(map(str, range(200))), tuple(steady[:200]), tuple(steady[:200]), "good parts"
    )
    thresholds = thresholds_from(good, 0.05, 0.01)
    levels = levels_of(thresholds)
    assert Drift(levels).add_all(steady[200:]).alarm is None
    ageing = scores(1 - 0.2 * np.arange(HORIZON) / HORIZON)
    alarm = Drift(levels).add_all(ageing).alarm
    assert alarm is not None
    assert alarm.alarm is not None
    rejected = float((ageing[: alarm.alarm] > thresholds.image).mean())
    promised = thresholds.calibration.reject.false_rejects.at_most
    assert rejected < 3 * promised
    assert (ageing > thresholds.image).mean() > 3 * promised  # what would have come of it


def rows(model_id: str, scores: list[float]) -> list[Row]:
    return [
        Row(
            path=f"={i}.png",
            image_sha256=f"{i:064x}",
            status="ok",
            image_score=score,
            calibrated_score=None,
            review_threshold=None,
            threshold=None,
            verdict="good",
            heatmap="",
            model_id=model_id,
            software_version="0",
            threshold_label="calibrated",
            reason="",
            time=f"2026-01-01T{i // 3600:02}:{i // 60 % 60:02}:{i % 60:02}.000+00:00",
        )
        for i, score in enumerate(scores)
    ]


def test_the_command_takes_whatever_has_rows(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    detector = anomaly.load(run_folder, device="cpu")
    assert detector.thresholds is not None
    middle = float(np.median(detector.thresholds.good.image))
    calm = rows(detector.model_id, [0.98 * middle, 1.02 * middle] * 150)
    wild = rows(detector.model_id, [0.98 * middle] * 100 + [2 * middle] * 100)
    odd = [replace(row, status="unreadable", image_score=None) for row in calm[:2]]
    strange = [replace(row, model_id="0" * 16) for row in wild[:3]]
    (tmp_path / "calm.csv").write_text(as_csv([*odd, *strange, *reversed(calm)], Row))
    (tmp_path / "wild.jsonl").write_text(as_jsonl(wild))
    record = Record(tmp_path / "wild.sqlite")
    record.add([Answer("disc", row, b"") for row in wild])
    record.close()
    code, out, err = command("drift", ["--model", run_folder, "--rows", tmp_path / "calm.csv"])
    assert (code, "no drift" in out) == (0, True), (out, err)
    assert "rows of other models left out: 3" in err
    assert "rows left out, without a score or with a reason for review: 2" in err
    for name in ("wild.jsonl", "wild.sqlite"):
        option = "--record" if name.endswith("sqlite") else "--rows"
        code, out, _ = command("drift", ["--model", run_folder, option, tmp_path / name])
        assert (code, "alarm: the parts have drifted" in out) == (1, True)
    # What people have called defects doesn't count.
    record = Record(tmp_path / "wild.sqlite")
    for part in range(101, 201):
        record.add_feedback("defect", who="Ada", part=part)
    record.close()
    arguments = ["--model", run_folder, "--record", tmp_path / "wild.sqlite"]
    assert command("drift", arguments)[0] == 0
    # Nor do their pictures that were scored once more, by a sender that got no answer say.
    record = Record(tmp_path / "wild.sqlite")
    record.add([Answer("disc", row, b"") for row in wild[100:]])
    record.close()
    assert command("drift", arguments)[0] == 0


def test_the_service_sees_what_the_command_sees(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    detector = anomaly.load(run_folder, device="cpu")
    assert detector.thresholds is not None
    middle = float(np.median(detector.thresholds.good.image))
    scored = rows(detector.model_id, [0.98 * middle] * 100 + [2 * middle] * 160)
    scored[3] = replace(scored[3], reason="another product?")
    scored[4] = replace(scored[4], model_id="0" * 16)
    scored[5] = replace(scored[5], image_score=None, status="unreadable")
    file = tmp_path / "line.sqlite"
    slot = ModelSlot("disc", run_folder / "model", file)
    loaded = load_model(run_folder, "cpu")
    slot.now = Version.of(loaded, run_folder / "model", "")

    def agree(alarm: bool) -> None:
        code, out, _ = command("drift", ["--model", run_folder, "--record", file])
        said = slot.drifted()
        assert (code, said["alarm"], bool(said["flagged"])) == (alarm, alarm, alarm)
        assert ("with anomaly calibrate" in out) == alarm
        assert out.splitlines()[: len(said["lines"])] == said["lines"]

    with closing(Record(file)) as record:
        for batch in (scored[:50], scored[50:120], scored[120:]):
            record.add([Answer("disc", row, b"") for row in batch])
            slot.drifted()
        agree(True)
        for part in range(101, 261):
            record.add_feedback("defect", who="Ada", part=part)
        agree(False)
        record.add([Answer("disc", row, b"") for row in scored[100:]])  # scored once more
        agree(False)
        for part in range(101, 261):
            record.add_feedback("good", who="Bob", part=part)
        agree(True)
        calm = replace(scored[0], image_sha256="c" * 64)
        record.add([Answer("disc", calm, b"")] * HORIZON)  # it is over once so many are calm
        agree(False)
        slot.now = Version.of(loaded, run_folder / "model", "")  # as after a restart
        agree(False)
    assert f"of {HORIZON} parts" in slot.drifted()["lines"][0]


def test_rows_from_before_a_recalibration_count(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    run = shutil.copytree(run_folder, tmp_path / "run")
    first = model_id(run / "model")
    (tmp_path / "rows.jsonl").write_text(as_jsonl(rows(first, [1.0, 1.1, 1.2])))
    (tmp_path / "results.csv").write_text(as_csv(rows(first, [1.0, 1.1, 1.2]), Row))
    for threshold in (7, 8):
        arguments = ["--model", run, "--threshold", threshold, "--device", "cpu", "--yes"]
        assert command("calibrate", arguments)[0] == 0
    code, out, err = command("drift", ["--model", run, "--rows", tmp_path / "rows.jsonl"])
    assert (code, "of 3 parts" in out) == (0, True), err
    code, again, _ = command("drift", ["--model", run, "--rows", tmp_path])  # infer's output
    assert (code, again) == (0, out)
    # Scores of before an update are another model's.
    line = {"asked": {"updated": {}}, "model_before": "1" * 16}
    history = run / "model" / "history.jsonl"
    earlier, latest = history.read_text().splitlines()
    history.write_text("\n".join([earlier, json.dumps(line), latest]))
    code, _, err = command("drift", ["--model", run, "--rows", tmp_path / "rows.jsonl"])
    assert (code, "but 3 of other models" in err) == (2, True)


def test_a_row_is_a_line_whatever_its_name_holds(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    named = [replace(row, path="a\u2028b\x85c.png") for row in rows("0" * 16, [1.0, 2.0])]
    file.write_text(as_jsonl(named), "utf-8")
    assert read_scores(file, ["0" * 16]).scores == [1.0, 2.0]


@pytest.mark.parametrize("score", ["nan", "inf", "high"])
def test_a_score_is_a_number(tmp_path: Path, score: str) -> None:
    file = tmp_path / "results.csv"
    file.write_text(f"status,image_score,model_id\nok,{score},{'0' * 16}\n")
    with pytest.raises(DataError, match="no number"):
        read_scores(file, ["0" * 16])


def test_rows_that_cannot_be_used_are_refused(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    other = rows("0" * 16, [1.0])
    for name, content, said in (
        ("other.jsonl", as_jsonl(other), "1 of other models"),
        ("torn.jsonl", json.dumps({"path": "a"}) + "\n{", "line 2"),
        ("words.csv", "these,are,words\n", "lacks the column 'status'"),
        ("score.csv", "status,image_score,model_id\nok,high,", "no scored part"),
    ):
        (tmp_path / name).write_text(content)
        code, _, err = command("drift", ["--model", run_folder, "--rows", tmp_path / name])
        assert (code, said in err) == (2, True), (name, err)
    arguments = ["--model", run_folder, "--rows", tmp_path / "missing.csv"]
    assert command("drift", arguments)[0] == 2
    arguments = ["--model", run_folder, "--rows", tmp_path / "other.jsonl", "--defects", "2"]
    assert command("drift", arguments)[0] == 2
