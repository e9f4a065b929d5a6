"""Progress where nobody watches a terminal: a plain line now and then."""

import time

import pytest

from anomaly.cli import logging_setup
from anomaly.cli.logging_setup import ProgressLine, log_to_terminal


def test_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging_setup, "_PLAIN_SECONDS", 0.25)
    with log_to_terminal(), ProgressLine() as line:
        time.sleep(0.3)  # nothing to say yet
        line("features", 0, 8)
        time.sleep(0.3)
        line("features", 4, 8)
        time.sleep(0.5)
        line("features", 8, 8)
        time.sleep(0.3)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert (out, "\r" in err, "\x1b" in err) == ("", False, False)
    assert lines[0] == "features: 0 of 8"
    assert lines[1].startswith("features: 4 of 8, ")
    assert lines[1].endswith(" s left")
    assert lines[-1] == "features: 8 of 8, finishing"


def test_a_short_run_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine() as line:
        for i in range(5):
            line("scoring", i, 5)
    assert capsys.readouterr() == ("", "")
