"""A journal keeps whole lines, and only continues what it is about."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anomaly.errors import OutputError
from anomaly.inference.pipeline import Finished, RunJournal
from anomaly.inference.results import Outputs, Row, as_jsonl


def _finished(index: int) -> Finished:
    row = Row(
        f"ä\udcff\n{index}", "00", "ok", 0.1 + index, None, 0.5, 1.0, "good", "h", "m", "1", "", ""
    )
    return Finished(index, row)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.integers(0, 2000))
def test_a_torn_line_is_dropped_and_the_run_goes_on(tmp_path: Path, cut: int) -> None:
    file, outputs = tmp_path / "results.partial.jsonl", Outputs(tmp_path)
    file.unlink(missing_ok=True)
    with RunJournal(outputs, {"model": "a"}) as journal:
        for i in (2, 0, 1):
            journal.add([_finished(i)])
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    again = RunJournal(outputs, {"model": "a"})
    lines = whole[:cut].count(b"\n")
    assert list(again.done.values()) == [_finished(i) for i in (2, 0, 1)][: max(0, lines - 1)]
    with again:
        for i in (2, 0, 1):
            if i not in again.done:
                again.add([_finished(i)])
    assert file.read_bytes() == whole
    rows = as_jsonl(_finished(i).row for i in range(3))
    assert (tmp_path / "results.jsonl").read_text("utf-8") == rows


def test_a_damaged_journal_and_another_run_are_not_continued(tmp_path: Path) -> None:
    file, outputs = tmp_path / "results.partial.jsonl", Outputs(tmp_path)
    row = b'{"about": {"model": "a"}}\n{"index": 3}'
    for lines in (b"[" * 100_000, b'{"about": 1e400}', b'{"about": NaN}', b"[]", row):
        file.write_bytes(lines + b"\n")
        with pytest.raises(OutputError, match=r"l\.jsonl is damaged \(.*start again with --over"):
            RunJournal(outputs, {"model": "a"})
    file.unlink()
    with RunJournal(outputs, {"model": "a", "images": "x"}):
        pass
    with pytest.raises(OutputError, match="another model"):
        RunJournal(outputs, {"model": "b", "images": "x"})


def test_a_finished_run_says_what_it_was(tmp_path: Path) -> None:
    about = {"model": "a", "images": ("x", "y")}
    journal = RunJournal(Outputs(tmp_path), about)
    with journal:
        journal.add([_finished(0)])
    journal.finish(3)
    assert not journal.file.exists()
    assert RunJournal.finished(tmp_path, about) == 3
    with pytest.raises(OutputError, match="another images"):
        RunJournal.finished(tmp_path, about | {"images": ("x",)})
    with pytest.raises(OutputError, match="missing or damaged"):
        RunJournal.finished(tmp_path / "nowhere", about)
