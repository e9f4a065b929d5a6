"""What people say of parts: on record, taken back, and learned from."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, write_part
from running import Served, serving
from test_record import answer

from anomaly.datasets import open_dataset
from anomaly.errors import DataError
from anomaly.line.feedback import confirmed_parts, judgements
from anomaly.line.record import Keeping, Record
from anomaly.line.report import Period, parts_of
from anomaly.training.tuning import search


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

        def said() -> object:
            return ((record.part(1) or {})["feedback"] or {}).get("verdict")

        record.add_feedback("good", who="Ann", part=1)
        record.add_feedback("defect", who="Ben", part=1)
        record.add_feedback("", who="Ann", part=1)
        assert said() == "defect"
        with pytest.raises(DataError, match="no judgement by Ann to take back"):
            record.add_feedback("", who="Ann", part=1)
        record.add_feedback("good", who="Ann", part=1)
        record.add_feedback("", who="Ann", part=1)
        assert said() == "defect"  # Ben's stands again
        record.add_feedback("", who="Ben", part=1)
        assert said() is None


def post(served: Served, path: str, **body: Any) -> tuple[int, Any]:
    sent, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    status, _, said = served.ask("POST", path, sent, kind)
    return status, json.loads(said)


@pytest.mark.slow
def test_judged_parts_are_a_data_set(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judged on the service, written as files, and read by what tests, tunes and explains."""
    models = tmp_path / "models"
    run = Path(shutil.copytree(run_folder, models / "disc"))
    for i in range(6):
        write_part(tmp_path / f"{i}.png", seed=600 + i, mark=(20 + 3 * i, 30))
        write_part(tmp_path / f"good_{i}.png", seed=700 + i)
    record = tmp_path / "line.sqlite"
    with serving(models, record=record, keeping=Keeping(goods=1)) as served:
        for i in range(6):
            number = served.score((tmp_path / f"{i}.png").read_bytes())[1]["id"]
            path = f"/v1/parts/{number}/feedback"
            assert post(served, path, verdict="defect", defect_type="spot")[0] == 200
            good = served.score((tmp_path / f"good_{i}.png").read_bytes())[1]
            assert post(served, f"/v1/parts/{good['id']}/feedback", verdict="good")[0] == 200
    judged = tmp_path / "judged" / "disc"
    arguments = ["--record", record, "--pictures", judged.parent]
    assert "6 good, 6 defective" in command("feedback", arguments)[1]
    defects = [sample for sample in open_dataset("good_defect", judged).test if sample.is_defect]
    assert [sample.defect_type for sample in defects] == ["spot"] * 6
    named = ["--good", judged / "good", "--defects", judged / "defect"]
    evaluation = ["--model", run, *named, "--output", tmp_path / "evaluation", "--device", "cpu"]
    code, out, err = command("evaluate", evaluation)
    assert (code, "image AUROC" in out) == (0, True), err
    monkeypatch.setattr(search, "networks_on_disk", list)
    data = ("data.format=good_defect", f"data.root={judged}", "data.category=null")
    settings = [option for value in data for option in ("--set", value)]
    tune = ["--config", run / "model" / "config.yaml", *settings, "--budget", "10s"]
    code, out, err = command("tune", [*tune, "--output", tmp_path / "t.yaml", "--device", "cpu"])
    assert (code, "of 6" in out) == (0, True), err
    assert command("missed", [judged / "defect", "--model", run, "--device", "cpu"])[0] == 0
