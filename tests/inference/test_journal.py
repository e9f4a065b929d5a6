"""A journal keeps whole lines, and only continues what it is about."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anomaly.errors import OutputError
from anomaly.inference.journal import Journal, Known, finished
from anomaly.inference.rows import Row


def _known(index: int) -> Known:
    row = Row(
        f"ä\udcff\n{index}", "00", "ok", 0.1 + index, None, 0.5, 1.0, "good", "h", "m", "1", "", ""
    )
    return Known(index, (32, 8 * index) if index % 2 else None, row)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.integers(0, 2000))
def test_a_torn_line_is_dropped_and_the_run_goes_on(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "journal"
    file.unlink(missing_ok=True)
    with Journal(file, {"model": "a"}) as journal:
        for i in (2, 0, 1):
            journal.add(_known(i))
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    again = Journal(file, {"model": "a"})
    lines = whole[:cut].count(b"\n")
    assert list(again.known.values()) == [_known(i) for i in (2, 0, 1)][: max(0, lines - 1)]
    with again:
        for i in (2, 0, 1):
            if i not in again.known:
                again.add(_known(i))
    assert file.read_bytes() == whole
    assert again.rows() == [_known(i).row for i in range(3)]


def test_another_run_is_not_continued(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    with Journal(file, {"model": "a", "images": "x"}):
        pass
    with pytest.raises(OutputError, match="another model"):
        Journal(file, {"model": "b", "images": "x"})
    file.write_text('{"about": {"model": "a"}}\n{"index": 3}\n')
    with pytest.raises(OutputError, match="damaged"):
        Journal(file, {"model": "a"})


def test_a_finished_run_says_what_it_was(tmp_path: Path) -> None:
    about = {"model": "a", "images": ("x", "y")}
    journal = Journal(tmp_path / "journal", about)
    with journal:
        journal.add(_known(0))
    journal.finish(tmp_path / "done", 3)
    assert [file.name for file in tmp_path.iterdir()] == ["done"]
    assert finished(tmp_path / "done", about) == 3
    with pytest.raises(OutputError, match="another images"):
        finished(tmp_path / "done", about | {"images": ("x",)})
    with pytest.raises(OutputError, match="missing or damaged"):
        finished(tmp_path / "nowhere", about)
