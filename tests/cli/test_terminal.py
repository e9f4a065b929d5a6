"""How much commands say, and where."""

from __future__ import annotations

import io
import logging
import re
import sys
import time
import unicodedata
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import Command, train_arguments

from anomaly import cli
from anomaly.cli import start, terminal
from anomaly.cli.terminal import NOTE, ProgressLine, command_line, log_to_terminal
from anomaly.errors import DataError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_quiet_shows_results_and_errors(product: Path, tmp_path: Path, command: Command) -> None:
    code, out, err = command("train", [*train_arguments(product, tmp_path / "run"), "-q"])
    assert code == 0
    assert err == ""  # random weights are worth a warning otherwise
    assert [line.split()[0] for line in out.splitlines()][:2] == ["trained", "thresholds"]
    assert f"in {tmp_path / 'run' / 'model'}" in out.splitlines()[-1]
    assert "mend" not in out
    code, out, err = command("train", ["--config", "nothing", "-q"])
    assert (code, out) == (2, "")
    assert err.startswith("error: no config nothing")


def test_verbose_says_why_on_stderr_alone(product: Path, tmp_path: Path, command: Command) -> None:
    asked = ["--config", "folder", "--set", f"data.root={product / 'train' / 'good'}"]
    _, plain, nothing = command("check", asked)
    code, out, err = command("check", [*asked, "-v"])
    assert (code, out, nothing) == (0, plain, "")
    assert re.search(r"read as folder: .*12 train images", err)
    assert re.search(r"reading: 12 of 12 in [\d.]+ s", err)


def test_addresses_are_shown_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    with log_to_terminal(verbose=True):
        for address in ("http://ada:pa55/w@h/s3cret?k=s3cret", "ada:pa55@h"):
            for given in (["--webhook", address], [f"--webhook={address}"], ["--port", address]):
                cli.log.debug("$ anomaly %s", command_line(["serve", *given]))
        cli.log.error("can't reach %s", "mqtt://ada:pa55@h:1883/line")
    said = capsys.readouterr().err
    assert ("$ anomaly serve" in said, "pa55" in said, "s3cret" in said) == (True, False, False)
    assert "can't reach mqtt://…@h:1883/line" in said


def test_progress_that_nobody_watches_is_a_plain_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_PLAIN_SECONDS", 0.25)
    with log_to_terminal(), ProgressLine() as line:
        for done in (0, 4, 5, 8):
            line("features", done, 8)
            time.sleep(0 if done == 4 else 0.3)
    out, err = capsys.readouterr()
    assert (out, "\r" in err, "\x1b" in err) == ("", False, False)
    first, last = err.splitlines()
    assert re.fullmatch(r"features: 4 of 8, .* s left", first)
    assert last == "features: 8 of 8, finishing"


def test_a_terminal_shows_progress_unless_it_is_to_be_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for quiet in (True, False):
        stream = Terminal()
        monkeypatch.setattr("sys.stderr", stream)
        with log_to_terminal(quiet=quiet), ProgressLine() as progress:
            progress("features", 1, 2)
            progress("features", 2, 2)
        assert ("features: 2 of 2" in stream.getvalue()) != quiet


HARM = "a\x1b[2J\x07\x9b31m\r\x7f\u202eb\u2066\u2028c\udce9\x00"
ORDINARY = "ä 良品 𝛼 نم\u200cا \u00a0\u3000"


def controls(text: str) -> set[str]:
    """What in a text controls something, but for ends of lines."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs")} - set(
        "\n\u200c"
    )


@pytest.mark.parametrize("way", ["error", "warning", "note", "remark", "print", "defect", "os"])
def test_nothing_that_is_said_controls_a_terminal(
    way: str, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{HARM} {ORDINARY}\nerror: forged"

    def say(options: object) -> int:
        if way == "error":
            raise DataError(text)
        if way == "os":
            raise OSError(5, "broken", text.replace("\0", ""))
        if way == "defect":
            raise ZeroDivisionError(text)
        if way == "print":
            print(text)
        else:
            level = {"warning": logging.WARNING, "note": NOTE, "remark": logging.INFO}[way]
            cli.log.log(level, "%s", text)
        return 0

    monkeypatch.setattr(start, "run_check", say)
    if way == "defect":
        with pytest.raises(ZeroDivisionError) as caught:
            command("check", ["--config", "folder"])
        sys.excepthook(caught.type, caught.value, caught.tb)
        out = err = capsys.readouterr().err
    else:
        _, out, err = command("check", ["--config", "folder"])
    said = out + err
    assert controls(said) == set()
    assert ORDINARY in said
    assert "a\\u001b[2J\\u0007\\u009b31m\\r\\u007f\\u202eb\\u2066\\u2028c\\udce9" in said
    if way not in ("print", "defect"):  # which have lines of their own
        assert not re.search("^error: forged", said, re.MULTILINE)


def test_nothing_of_a_command_line_comes_back_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        [HARM],
        ["check", f"--{HARM}"],
        ["check", "--config", HARM],
        ["check", "--config", "folder", "--set", f"{HARM}=1"],
        ["check", "--config", "folder", "--set", f"data.root={HARM}"],
        ["check", "--config", "folder", HARM],
        ["infer", "--model", HARM, "--input", HARM, "--output", HARM],
        ["report", "--record", HARM, "--from", "2026-01-01", "--output", HARM],
    ):
        with suppress(SystemExit):
            assert cli.main([argument.replace("\0", "") for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert controls(out + err) == set()
        assert "\\u001b" in err or "\\x1b" in err
