"""What people say of parts: on record, taken back, and learned from."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Command, write_part
from test_record import answer

from anomaly.datasets import open_dataset
from anomaly.errors import DataError
from anomaly.line.feedback import confirmed_parts, judgements
from anomaly.line.record import Keeping, Record
from anomaly.line.report import Period, parts_of


def test_a_withdrawn_judgement_counts_for_nobody(tmp_path: Path) -> None:
    file = tmp_path / "line.sqlite"
    with closing(Record(file)) as record:
        record.add([answer("reject", 1), answer("reject", 2)])
        record.add_feedback("defect", who="a", part=1, defect_type="scratch")
        record.add_feedback("good", who="a", part=2)
        record.add_feedback("", who="a", part=1)
        assert (record.part(1) or {})["feedback"] is None
        assert len(judgements(file)) == 3  # what was said stays
        (tmp_path / "kept").mkdir()
        confirmed = confirmed_parts(file, ["0" * 16], tmp_path / "kept")
        assert [sample.name for sample in confirmed.past] == ["part 1"]
        assert (len(confirmed.good), len(confirmed.defects)) == (1, 0)
        with parts_of(file, Period.of("2026-01-01", "2026-01-02")) as db:
            rows = db.execute("SELECT judged, kind FROM seen").fetchall()
        assert rows == [("", None), ("good", "")]


def test_people_take_back_what_is_theirs(tmp_path: Path) -> None:
    with closing(Record(tmp_path / "line.sqlite")) as record:
        record.add([answer("reject", 1)])
        for who, verdict, stands in (
            ("Ann", "good", "good"),
            ("Ben", "defect", "defect"),
            ("Ann", "", "defect"),
            ("Ann", "good", "good"),
            ("Ann", "", "defect"),  # Ben's stands again
            ("Ben", "", None),
        ):
            record.add_feedback(verdict, who=who, part=1)
            assert ((record.part(1) or {})["feedback"] or {}).get("verdict") == stands
        with pytest.raises(DataError, match="no judgement by Ann to take back"):
            record.add_feedback("", who="Ann", part=1)


def test_judged_parts_are_a_data_set(tmp_path: Path, command: Command) -> None:
    """Written as files, and read by what evaluates, tunes and explains."""
    record, judged = tmp_path / "line.sqlite", tmp_path / "judged"
    with closing(Record(record, Keeping(goods=1))) as open_record:
        for number in range(1, 5):
            write_part(tmp_path / "part.png", seed=number)
            part = answer("good" if number % 2 else "reject", number)
            open_record.add([replace(part, file=(tmp_path / "part.png").read_bytes())])
            verdict, kind = ("good", "") if number % 2 else ("defect", "spot")
            open_record.add_feedback(verdict, who="Ann", part=number, defect_type=kind)
    code, out, _ = command("feedback", ["--record", record, "--pictures", judged])
    assert (code, "2 good, 2 defective" in out) == (0, True)
    data = open_dataset("good_defect", judged / "disc")
    assert [sample.defect_type for sample in data.test if sample.is_defect] == ["spot"] * 2
    found = {sample.path.read_bytes() for sample in (*data.train, *data.test)}
    assert len(found) == 4
