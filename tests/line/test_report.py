"""The report of a shift: figures against those counted from the rows, periods, refusals."""

from __future__ import annotations

import csv
import json
import random
import shutil
import sqlite3
import time
from collections import Counter, namedtuple
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from conftest import Command
from running import Served

from anomaly.calibration.rates import rate_of
from anomaly.inference.rows import Row
from anomaly.line.record import Answer, Keeping, Record
from anomaly.line.report import Period
from anomaly.line.slot import Version
from anomaly.storage.load import load_model

_ROW = Row(
    *("part.png", "", "ok", 1.0, None, 1.0, 2.0, "good", "", "a" * 16, "0", "calibrated", ""),
    milliseconds=50.0,
)
_BEGIN = datetime(2026, 10, 24, tzinfo=UTC)


@pytest.fixture(autouse=True)
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A zone whose summer time ends on 2026-10-25."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


def answer(score: float | None, at: datetime, number: int, model: str = "a" * 16) -> Answer:
    status, verdict = ("ok", "good") if score is not None else ("unreadable", "")
    if score is not None and score > 1:
        verdict = "reject" if score > 2 else "review"
    row = replace(
        _ROW, path=f"{number}.png", image_sha256=f"{number:064x}" * (status == "ok"), status=status,
        image_score=score, verdict=verdict, model_id=model,
        time=at.isoformat(timespec="milliseconds"),
    )  # fmt: skip
    return Answer("disc", row, b"file", b"heatmap %d" % number)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Four days of parts, a new version on the third; half of what is flagged is judged."""
    rng, file = random.Random(0), tmp_path / "line.sqlite"
    record = Record(file, Keeping(goods=0.2))
    times = (_BEGIN + timedelta(minutes=7 * i) for i in range(4 * 24 * 60 // 7))
    scores = (rng.choice([None, 2.5, 1.5, *[rng.random()] * 17]) for _ in iter(int, 1))
    record.add([
        answer(s, at, rng.randrange(700), "ab"[at.day > 25] * 16)
        for s, at in zip(scores, times, strict=False)
    ])  # fmt: skip
    rows = record.read("SELECT id, verdict FROM parts WHERE status = 'ok'", ())
    for number, verdict in rows:
        if rng.random() < (0.03 if verdict == "good" else 0.5):
            said, kind = rng.choice([("good", ""), ("defect", "scratch"), ("defect", "dent")])
            record.add_feedback(said, who="eva", part=number, defect_type=kind)
    record.close()
    return file


def table(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


Part = namedtuple("Part", "version outcome judged kind day")


def parts_between(record: Path, begin: str, end: str) -> list[Part]:
    """The parts scored between two times in UTC, read row by row."""
    with closing(sqlite3.connect(record)) as db:
        words = {
            sha256: (verdict, kind)  # the last one stays
            for sha256, verdict, kind in db.execute(
                "SELECT sha256, verdict, defect_type FROM feedback ORDER BY id"
            )
        }
        rows = db.execute("SELECT model_id, status, verdict, sha256, time FROM parts").fetchall()
    return [
        Part(version, verdict or status, *words.get(sha256, ("", "")),
             str(datetime.fromisoformat(at).astimezone().date()))
        for version, status, verdict, sha256, at in rows if begin <= at < end
    ]  # fmt: skip


def count(parts: list[Part], **wanted: str) -> int:
    return sum(all(getattr(part, n) == wanted[n] for n in wanted) for part in parts)


def test_figures_are_those_of_the_rows(record: Path, tmp_path: Path, command: Command) -> None:
    output = tmp_path / "report"
    period = ["--from", "2026-10-25", "--to", "2026-10-26"]
    prices = ["--prices", "false-reject=4", "escape=250.5", "currency=EUR"]
    arguments = ["--record", record, *period, *prices, "--output", output]
    assert command("report", arguments)[:2] == (0, f"Look at {output / 'report.html'}\n")
    # Two local days, of which the first one has 25 hours.
    now = parts_between(record, "2026-10-24T22:00", "2026-10-26T23:00")
    before = parts_between(record, "2026-10-22T22:00", "2026-10-24T22:00")

    def both(**wanted: str) -> tuple[int, int]:
        return count(now, **wanted), count(before, **wanted)

    false, escapes = both(outcome="reject", judged="good"), both(outcome="good", judged="defect")
    yields = {r["outcome"]: (int(r["parts"]), int(r["before"])) for r in table(output, "yield")}
    assert yields == {
        "all parts": (len(now), len(before)),
        **{name: both(outcome=name) for name in ("good", "review", "reject", "unreadable")},
        "false rejects": false,
        "escapes": escapes,
    }
    shares = [float(row["share"]) for row in table(output, "yield")]
    assert shares == pytest.approx([parts / len(now) for parts, _ in yields.values()])
    for verdict, *parts in (row.values() for row in table(output, "judgements")):
        said = [count(now, outcome=verdict, judged=word) for word in ("good", "defect", "")]
        assert [*map(int, parts)] == said
    for version, row in zip("ab", table(output, "versions"), strict=True):
        own = [part for part in now if part.version == version * 16]
        right = count(own, outcome="good", judged="good")
        right += count(own, outcome="reject", judged="defect")
        judged = sum(part.outcome in ("good", "reject") and part.judged != "" for part in own)
        assert (row["model and version"], int(row["parts"])) == (f"disc {version * 16}", len(own))
        assert float(row["agreement"]) == pytest.approx(right / judged)
    for row in table(output, "kinds"):
        for verdict in ("reject", "review", "good"):
            assert int(row[verdict]) == count(now, outcome=verdict, kind=row["kind of defect"]) > 0
    days = Counter[str]()
    for row in table(output, "times"):
        days[row["time"][:10]] += int(row["parts"])
    assert days == Counter(part.day for part in now)
    cost = 4 * false[0] + 250.5 * escapes[0]
    assert table(output, "cost")[-1]["cost"] == f"{cost:,.2f} EUR"
    page = (output / "report.html").read_text("utf-8")
    assert "Report of 2026-10-25 to 2026-10-26" in page
    assert "CEST (UTC+02:00) to CET (UTC+01:00)" in page
    assert f"Known cost: {cost:,.2f} EUR" in page
    assert page.count("<img class") == 10
    assert page.index("Called good, but a defect") < page.index("Rejected, but good")


@pytest.mark.parametrize(
    ("begin", "end", "period", "before"),
    [
        ("2026-11-01", "2026-11-30", "2026-11-01 to 2026-11-30", "2026-10-01 to 2026-10-31"),
        ("2026-01-01", "2026-02-28", "2026-01-01 to 2026-02-28", "2025-11-01 to 2025-12-31"),
        ("2026-11-27", "2026-11-27", "2026-11-27", "2026-11-26"),
        ("2026-11-27 22:00", "2026-11-28 06:00", "2026-11-27 22:00 to 2026-11-28 06:00",
         "2026-11-27 14:00 to 22:00"),
        ("2026-11-27T05:00Z", "2026-11-27 14:00+01:00", "2026-11-27 06:00 to 14:00",
         "2026-11-26 22:00 to 2026-11-27 06:00"),
    ],
)  # fmt: skip
def test_periods_and_those_before(begin: str, end: str, period: str, before: str) -> None:
    found = Period.of(begin, end)
    assert (str(found), str(found.before)) == (period, before)


def test_without_feedback_nothing_is_claimed(tmp_path: Path, command: Command) -> None:
    record = Record(tmp_path / "line.sqlite")
    record.add([answer(2.5, _BEGIN, i) for i in range(3)])
    record.add_feedback("good", who="eva", sha256="f" * 64)  # of an image that was never scored
    record.close()
    arguments = ["--record", record.file, "--from", "2026-10-24", "--output", tmp_path / "out"]
    assert command("report", arguments)[0] == 0
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "No good or rejected part has been judged" in page
    assert "no part on record" in page  # before
    assert "not known to this record" in page
    yields = {r["outcome"]: r["parts"] for r in table(tmp_path / "out", "yield")}
    assert (yields["all parts"], yields["reject"]) == ("3", "3")
    assert not table(tmp_path / "out", "cost")
    code, _, err = command("report", arguments)
    assert (code, "add --overwrite" in err) == (2, True)
    assert command("report", [*arguments, "--overwrite"])[0] == 0


def test_each_version_is_held_to_its_own_promise(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    """Parts of a model and of the same one with other thresholds, which take its folder's place."""
    run, record = tmp_path / "disc", Record(tmp_path / "line.sqlite")
    shutil.copytree(run_folder, run)
    promised = []
    for at in (_BEGIN, _BEGIN + timedelta(hours=1)):
        model = load_model(run, torch.device("cpu"))
        assert model.thresholds is not None
        promised.append(model.thresholds.calibration.review.false_rejects)
        record.promises[model.model_id] = Version.of(model, run / "model", "").promise
        record.add([answer(2.5, at, 3 * i, model.model_id) for i in range(300)])
        lower = ["--model", run, "--threshold", 0.99 * model.thresholds.image]
        assert command("calibrate", lower)[0] == 0
    for part in range(1, 251):
        record.add_feedback("good", who="eva", part=part)
    record.close()
    shutil.rmtree(run)
    arguments = ["--record", record.file, "--from", "2026-10-24", "--output", tmp_path / "out"]
    assert command("report", arguments)[0] == 0
    rows = table(tmp_path / "out", "promises")
    assert [row["compared"] for row in rows] == ["more"] * 4
    assert [float(row["about"]) for row in rows[::2]] == [rate.expected for rate in promised]
    assert promised[0].expected < promised[1].expected
    assert [float(row["seen"]) for row in rows] == [1, pytest.approx(250 / 300)] * 2
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert 'class="answer reject"' in page
    assert "The scores have drifted" in page
    # One model, whose scores are watched by its last thresholds.
    assert page.count("above the median") == page.count("of 600 parts") // page.count("<li>") == 1


def test_false_rejects_and_escapes_are_held_to_the_promise(
    tmp_path: Path, command: Command
) -> None:
    record, rate = Record(tmp_path / "line.sqlite"), asdict(rate_of(1, 100, 0.01))
    rates = dict.fromkeys(("review", "reject"), rate)
    promise = {"rates": rates, "levels": [], "same_scores": [], "caught": 0.9}
    record.promises["a" * 16] = json.dumps(promise)
    record.add([answer(2.5 if i < 40 else 0.5, _BEGIN, i) for i in range(100)])
    for part in (*range(1, 31), 99):
        record.add_feedback("defect" if part == 99 else "good", who="eva", part=part)
    record.close()
    arguments = ["--record", record.file, "--from", "2026-10-24", "--output", tmp_path / "out"]
    assert command("report", arguments)[0] == 0
    rows = table(tmp_path / "out", "promises")
    assert [(row["promised share"], float(row["seen"]), row["compared"]) for row in rows] == [
        ("parts flagged", 0.4, "more"),
        ("good parts rejected", 0.3, "more"),
        ("defects called good", 1, ""),
    ]
    assert float(rows[2]["about"]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--record": "lane.sqlite"}, "there is no record"),
        ({"--record": "words.txt"}, "words.txt can't be read as a record of serve"),
        ({"--record": "other.sqlite"}, "database of another program; give a record of serve"),
        (
            {"--from": "2027-01-01", "--to": "2027-01-02"},
            "holds no part of 2027-01-01 to 2027-01-02",
        ),
        ({"--from": "yesterday"}, "--from yesterday is no date or time; write"),
        ({"--to": "2026-10-01"}, "isn't before --to 2026-10-01"),
        ({"--prices": "escape=much"}, "--prices escape=much isn't valid; write"),
    ],
)
def test_refusals(
    changed: dict[str, str], message: str, record: Path, tmp_path: Path,
    command: Command, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("words")
    with closing(sqlite3.connect("other.sqlite")) as db, db:
        db.execute("CREATE TABLE parts (number INTEGER)")
    options = {"--record": "line.sqlite", "--from": "2026-10-25", "--output": "out"} | changed
    code, _, err = command("report", [word for pair in options.items() for word in pair])
    assert code == 2
    assert message in err
    assert not Path("out").exists()


def test_the_service_shows_the_last_hours(served: Served, product: Path) -> None:
    served.score((product / "test" / "spot" / "000.png").read_bytes())
    status, headers, body = served.ask("GET", "/report?hours=8")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "script-src" not in headers["content-security-policy"]
    assert "parts are called good" in body.decode()
    assert served.ask("GET", "/report?hours=0")[0] == 400
