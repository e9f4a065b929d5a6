"""The report of a shift: figures against those counted from the rows, periods, refusals."""

from __future__ import annotations

import csv
import io
import json
import random
import shutil
import sqlite3
import time
from collections import Counter, namedtuple
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from conftest import Says
from running import Served, answer

from anomaly.calibration.rates import rate_of
from anomaly.inference.results import as_jsonl
from anomaly.line.models import Version
from anomaly.line.record import Answer, Record
from anomaly.line.report import Period, report
from anomaly.storage.models import load_model

_BEGIN = datetime(2026, 10, 24, tzinfo=UTC)
DAY = Period(_BEGIN, _BEGIN + timedelta(days=1))
Part = namedtuple("Part", "version outcome judged kind day once")


@pytest.fixture(autouse=True)
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A zone whose summer time ends on 2026-10-25."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


def scored(score: float | None, at: datetime, number: int, model: str = "a" * 16) -> Answer:
    """The answer to a part with thresholds of 1 and 2; without a score it couldn't be read."""
    values = {
        "image_score": score,
        "model_id": model,
        "time": at.isoformat(timespec="milliseconds"),
    }
    if score is None:
        return answer("", number, "unreadable", image_sha256="", **values)
    return answer("reject" if score > 2 else "review" if score > 1 else "good", number, **values)


def answers(*scores: float) -> list[Answer]:
    return [scored(score, _BEGIN, i) for i, score in enumerate(scores)]


def recorded(
    folder: Path,
    found: list[Answer],
    said: Mapping[int, str] | None = None,
    promised: float | None = None,
    caught: float | None = None,
) -> Path:
    """A record of parts, of what people say of some, and of what the model's thresholds promise."""
    with closing(Record(folder / "line.sqlite", goods=1)) as record:
        if promised is not None:
            rate = asdict(rate_of(round(100 * promised), 100, promised))
            line = {"levels": [], "same_scores": [], "caught": caught}
            line |= {"rates": {"review": rate, "reject": rate}}
            record.promises["a" * 16] = json.dumps(line)
        record.add(found)
        for part, words in (said or {}).items():
            verdict, _, kind = words.partition(" ")
            record.add_feedback(verdict, who="eva", part=part, defect_type=kind)
    return record.file


def table(files: dict[str, str], name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(files[f"{name}.csv"])))


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Four days of parts, a new version on the third; half of what is flagged is judged."""
    rng = random.Random(0)
    times = [_BEGIN + timedelta(minutes=7 * i) for i in range(4 * 24 * 60 // 7)]
    scores = [rng.choice([None, 2.5, 1.5, *[rng.random()] * 17]) for _ in times]
    found = [
        scored(score, at, rng.randrange(700), "ab"[at.day > 25] * 16)
        for score, at in zip(scores, times, strict=True)
    ]
    kinds = ("good", "defect scratch", "defect dent")
    said = {
        number: rng.choice(kinds)
        for number, one in enumerate(found, 1)
        if one.row.verdict and rng.random() < (0.03 if one.row.verdict == "good" else 0.5)
    }
    return recorded(tmp_path, found, said)


def parts_between(record: Path, begin: str, end: str) -> list[Part]:
    """The parts scored between two times in UTC, read row by row.

    Of an image that was sent again, the strictest and then the newest answer is judged: of each
    version, and of all (`once`).
    """
    with closing(sqlite3.connect(record)) as db:
        judged = db.execute("SELECT sha256, verdict, defect_type FROM feedback ORDER BY id")
        words = {sha256: said for sha256, *said in judged}  # the last one stays
        rows = db.execute("SELECT model_id, status, verdict, sha256, time FROM parts").fetchall()
    rows = [row for row in rows if begin <= row[4] < end]
    last: dict[tuple[str, str], int] = {}
    order = sorted(
        range(len(rows)), key=lambda i: ("good", "review", "reject", "").index(rows[i][2])
    )
    for i in order:
        last[rows[i][3], rows[i][0]] = last[rows[i][3], ""] = i
    return [
        Part(version, verdict or status,
             *(words.get(sha256, ("", "")) if last[sha256, version] == i else ("again", "")),
             str(datetime.fromisoformat(at).astimezone().date()), last[sha256, ""] == i)
        for i, (version, status, verdict, sha256, at) in enumerate(rows)
    ]  # fmt: skip


def count(parts: list[Part], **wanted: object) -> int:
    return sum(all(getattr(part, n) == wanted[n] for n in wanted) for part in parts)


def test_figures_are_those_of_the_rows(record: Path, tmp_path: Path, says: Says) -> None:
    output = tmp_path / "report"
    period = ["--from", "2026-10-25", "--to", "2026-10-26"]
    prices = ["--prices", "false-reject=4", "escape=250.5", "currency=EUR"]
    arguments = ["--record", record, *period, *prices, "--output", output]
    assert says(0, "report", arguments) == f"Look at {output / 'report.html'}\n"
    assert "add --overwrite" in says(2, "report", arguments)
    files = {file.name: file.read_text("utf-8") for file in output.iterdir()}
    # Two local days, of which the first one has 25 hours.
    now = parts_between(record, "2026-10-24T22:00", "2026-10-26T23:00")
    before = parts_between(record, "2026-10-22T22:00", "2026-10-24T22:00")

    def both(**wanted: object) -> tuple[int, int]:
        return count(now, **wanted), count(before, **wanted)

    false = both(outcome="reject", judged="good", once=True)
    escapes = both(outcome="good", judged="defect", once=True)
    yields = {r["outcome"]: (int(r["parts"]), int(r["before"])) for r in table(files, "yield")}
    assert yields == {
        "all parts": (len(now), len(before)),
        **{name: both(outcome=name) for name in ("good", "review", "reject", "unreadable")},
        "false rejects": false,
        "escapes": escapes,
    }
    shares = [float(row["share"]) for row in table(files, "yield")]
    assert shares == pytest.approx([parts / len(now) for parts, _ in yields.values()])
    for verdict, *parts in (row.values() for row in table(files, "judgements")):
        words = ("good", "defect", "")
        said = [count(now, outcome=verdict, judged=word, once=True) for word in words]
        assert [*map(int, parts)] == said
    for version, row in zip("ab", table(files, "versions"), strict=True):
        own = [part for part in now if part.version == version * 16]
        right = count(own, outcome="good", judged="good")
        right += count(own, outcome="reject", judged="defect")
        said = [part.outcome for part in own if part.judged in ("good", "defect")]
        judged = sum(outcome in ("good", "reject") for outcome in said)
        assert (row["model and version"], int(row["parts"])) == (f"disc {version * 16}", len(own))
        assert float(row["agreement"]) == pytest.approx(right / judged)
    for row in table(files, "kinds"):
        for verdict in ("reject", "review", "good"):
            kind = row["kind of defect"]
            assert int(row[verdict]) == count(now, outcome=verdict, kind=kind, once=True) > 0
    days = Counter[str]()
    for row in table(files, "times"):
        days[row["time"][:10]] += int(row["parts"])
    assert days == Counter(part.day for part in now)
    cost = 4 * false[0] + 250.5 * escapes[0]
    page = files["report.html"]
    assert "Report of 2026-10-25 to 2026-10-26" in page
    assert "CEST (UTC+02:00) to CET (UTC+01:00)" in page
    assert f"Known cost: {cost:,.2f} EUR" in page
    assert page.count("<img class") == 10
    assert page.index("Called good, but a defect") < page.index("Rejected, but good")


@pytest.mark.parametrize(
    ("begin", "end", "period", "before"),
    [
        ("2026-01-01", "2026-02-28", "2026-01-01 to 2026-02-28", "2025-11-03 to 2025-12-31"),
        ("2026-11-27 22:00", "2026-11-28 06:00", "2026-11-27 22:00 to 2026-11-28 06:00",
         "2026-11-27 14:00 to 22:00"),
        # The hour from 02:00 comes twice, and on 29 March never.
        ("2026-10-25T02:30+02:00", "2026-10-25T02:30+01:00", "2026-10-25 02:30 to 02:30",
         "2026-10-25 01:30 to 02:30"),
        ("2026-03-29 03:00", "2026-03-29 05:00", "2026-03-29 03:00 to 05:00",
         "2026-03-29 00:00 to 03:00"),
    ],
)  # fmt: skip
def test_periods_and_those_before(begin: str, end: str, period: str, before: str) -> None:
    found = Period.of(begin, end)
    assert (str(found), str(found.before)) == (period, before)


def test_without_feedback_nothing_is_claimed(tmp_path: Path) -> None:
    file = recorded(tmp_path, answers(2.5, 2.5, 2.5))
    files = report(file, DAY, {})[0]
    page = files["report.html"]
    assert "false rejects unknown: no rejected part was judged" in page
    assert "0.00 % of 3 parts are called good" in page
    assert 'class="answer "' in page  # neither good nor bad news
    assert "no part on record" in page  # before
    assert "unknown: name its run with --model" in page
    yields = {r["outcome"]: r["parts"] for r in table(files, "yield")}
    assert (yields["all parts"], yields["reject"], yields["escapes"]) == ("3", "3", "0")
    assert yields["false rejects"] == "unknown: no rejected part was judged"
    assert "Known cost" not in page


def test_each_version_is_held_to_its_own_promise(
    run_folder: Path, tmp_path: Path, says: Says
) -> None:
    """Parts of a model and of the same one with other thresholds, which take its folder's place."""
    run, promised = shutil.copytree(run_folder, tmp_path / "disc"), []
    with closing(Record(tmp_path / "line.sqlite")) as record:
        for at in (_BEGIN, _BEGIN + timedelta(hours=1)):
            model = load_model(run, torch.device("cpu"))
            assert model.thresholds is not None
            promised.append(model.thresholds.to_review.false_rejects.expected)
            drift = Version.of(model, run / "model", "").drift
            assert drift is not None
            record.promises[model.model_id] = json.dumps(asdict(drift.promise))
            record.add([scored(2.5, at, 3 * i, model.model_id) for i in range(60)])
            lower = ["--model", run, "--threshold", 0.99 * model.thresholds.image]
            says(0, "calibrate", lower)
        for part in range(1, 51):
            record.add_feedback("good", who="eva", part=part)
    files = report(record.file, DAY, {})[0]
    rows, page = table(files, "promises"), files["report.html"]
    assert [row["compared"] for row in rows] == ["more"] * 4
    assert [float(row["about"]) for row in rows[::2]] == promised
    assert promised[0] < promised[1]
    assert [float(row["seen"]) for row in rows] == [1, pytest.approx(50 / 60)] * 2
    assert 'class="answer reject"' in page
    assert "The scores have drifted" in page
    # One model, whose scores are watched by its last thresholds.
    assert page.count("above the median") == page.count("of 120 parts") // page.count("<li>") == 1


def test_false_rejects_and_escapes_are_held_to_the_promise(tmp_path: Path) -> None:
    said = dict.fromkeys(range(1, 31), "good") | {99: "defect"}
    found = answers(*[2.5] * 40, *[0.5] * 60)
    rows = table(report(recorded(tmp_path, found, said, 0.01, 0.9), DAY, {})[0], "promises")
    assert [(row["promised share"], float(row["seen"]), row["compared"]) for row in rows] == [
        ("parts flagged", 0.4, "more"),
        ("good parts rejected", 0.3, "more"),
        ("defects called good", 1, ""),
    ]
    assert float(rows[2]["about"]) == pytest.approx(0.1)


def test_refusals(tmp_path: Path, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path, answers(0.5))
    Path("words.txt").write_text("words")
    for option, value, refusal in (
        ("--record", "lane.sqlite", "there is no record"),
        ("--record", "words.txt", "words.txt can't be read as a record of serve"),
        ("--from", "yesterday", "--from yesterday is no date or time; write"),
        ("--to", "2026-10-01", "isn't before --to 2026-10-01"),
        ("--prices", "escape=much", "--prices escape=much isn't valid; write"),
    ):
        options = {"--record": "line.sqlite", "--from": "2026-10-25", "--output": "out"}
        words = [word for pair in (options | {option: value}).items() for word in pair]
        assert refusal in says(2, "report", words)
        assert not Path("out").exists()


def test_an_unknown_is_no_zero_and_no_good_news(tmp_path: Path) -> None:
    file = recorded(tmp_path, answers(*[2.5] * 4, *[0.5] * 96), promised=0.05)
    page = report(file, DAY, {"escape": "250"})[0]["report.html"]
    assert 'class="answer good"' in page  # as many are flagged as promised
    assert "unknown: no part called good was judged" in page
    assert page.count("unknown: no rejected part was judged") >= 2  # yield, promises
    assert page.count("as promised") == 1  # parts flagged
    assert "Known cost: unknown" in page
    assert "<h2>96.00 % of 100 parts are called good</h2>" in page
    few = report(recorded(tmp_path / "few", answers(*[0.5] * 5), promised=0.05), DAY, {})[0]
    assert 'class="answer "' in few["report.html"]
    compared = [row["compared"] for row in table(few, "promises")]
    assert compared == ["unknown: fewer than 20 parts"] * 2


def test_a_shift_with_a_dark_lamp_is_no_good_news(tmp_path: Path) -> None:
    found = answers(*[1.5] * 5, *[0.5] * 195, *[1.5] * 60)
    found[200:] = [replace(part, row=replace(part.row, reason="darker")) for part in found[200:]]
    page = report(recorded(tmp_path, found, promised=0.03), DAY, {})[0]["report.html"]
    assert 'class="answer review"' in page
    assert "60 parts not judged by their score: check lamp, lens and product." in page


def test_only_parts_near_a_threshold_are_listed_as_near(tmp_path: Path) -> None:
    scores = [0.75, 0.85, 1.15, 1.35, 1.65, 1.9, 2.3, 2.5, 4.0]
    page = report(recorded(tmp_path, answers(*scores)), DAY, {})[0]["report.html"]
    listed = [s for s in scores if f"<br>score {s:.4g}, " in page]
    assert listed == [0.85, 1.15, 1.65, 1.9, 2.3]  # thresholds: 1 and 2


def test_an_empty_period_is_a_sentence(tmp_path: Path, says: Says) -> None:
    arguments = ["--record", recorded(tmp_path, answers(0.5)), "--output", tmp_path / "out"]
    arguments += ["--from", "2027-01-01", "--to", "2027-01-02", "--prices", "escape=3"]
    out = says(0, "report", arguments)
    assert "holds no part of 2027-01-01 to 2027-01-02, CET (UTC+01:00)" in out
    assert "<h2>no part on record</h2>" in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_views_of_a_part_are_one_part_with_its_strictest_verdict(tmp_path: Path) -> None:
    rows = [
        replace(one.row, group=group)
        for one, group in zip(answers(0.5, 2.5, 1.5, 0.5, 0.5), "ppqq ", strict=True)
    ]
    rows[-1] = replace(rows[-1], group="")
    (tmp_path / "results.jsonl").write_text(as_jsonl(rows), "utf-8")
    found, _ = report(tmp_path / "results.jsonl", DAY, {})
    parts = {row["outcome"]: row["parts"] for row in table(found, "yield")}
    assert [parts[w] for w in ("all parts", "good", "review", "reject")] == ["3", "1", "1", "1"]


def test_the_hour_that_comes_twice_is_two_hours(tmp_path: Path) -> None:
    midnight = datetime(2026, 10, 24, 22, tzinfo=UTC)  # in Berlin
    found = [scored(0.5, midnight + timedelta(minutes=30 * i), i) for i in range(10)]
    file = recorded(tmp_path, found)
    period = Period.of("2026-10-25", "2026-10-25 04:00")
    times = report(file, period, {})[0]["times.csv"].splitlines()[1:]
    hours = ("00:00 UTC+02", "01:00 UTC+02", "02:00 UTC+02", "02:00 UTC+01", "03:00 UTC+01")
    assert times == [f"2026-10-25 {hour}:00,2,2,0,0" for hour in hours]
    second = Period.of("2026-10-25T02:00+01:00", "2026-10-25 03:00")
    assert "all parts,2," in report(file, second, {})[0]["yield.csv"]


def test_the_service_shows_the_last_hours(served: Served, product: Path) -> None:
    served.score((product / "test" / "spot" / "000.png").read_bytes())
    status, headers, body = served.ask("GET", "/report?hours=8")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "script-src" not in headers["content-security-policy"]
    assert "parts are called good" in body.decode()
    assert served.ask("GET", "/report?hours=0")[0] == 400
