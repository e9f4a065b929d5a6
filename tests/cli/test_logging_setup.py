"""How much commands say, where, and in which colours."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from conftest import Command, train_arguments

from anomaly import cli
from anomaly.cli import region
from anomaly.cli.logging_setup import ProgressLine, log_to_terminal

UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\w+) +(.*)")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_quiet_shows_results_and_the_log_file_everything(
    product: Path, tmp_path: Path, command: Command
) -> None:
    log = tmp_path / "logs" / "shift.txt"
    said = ["-q", "--log-file", log]
    code, out, err = command("train", [*train_arguments(product, tmp_path / "run"), *said])
    assert code == 0
    assert err == ""  # random weights are worth a warning otherwise
    assert [line.split()[0] for line in out.splitlines()][:2] == ["trained", "thresholds"]
    assert f"in {tmp_path / 'run' / 'model'}" in out.splitlines()[-1]
    assert "look at" not in out
    found = [UTC.fullmatch(line) for line in log.read_text("utf-8").splitlines()]
    assert all(found)
    lines = {(line[1], line[2]) for line in found if line}
    assert {("result", line) for line in out.splitlines()} <= lines
    text = "\n".join(" ".join(line) for line in sorted(lines))
    for known in (
        "detail $ anomaly train --config",
        "detail settings from",
        "warning backbone.weights is 'random'",
        "detail time: backbone",
        "remark look at these training images",
        "detail exit code 0",
    ):
        assert known in text
    length = log.stat().st_size
    code, out, err = command("train", ["--config", "nothing", *said])
    assert (code, out) == (2, "")
    assert err.startswith("error: no config nothing")
    assert "error    no config nothing" in log.read_bytes()[length:].decode()


def test_verbose_says_why_on_stderr_alone(product: Path, tmp_path: Path, command: Command) -> None:
    asked = ["--config", "folder", "--set", f"data.root={product / 'train' / 'good'}"]
    _, plain, nothing = command("check", asked)
    code, out, err = command("check", [*asked, "-v"])
    assert (code, out, nothing) == (0, plain, "")
    assert re.search(r"read as folder: .*12 train images", err)
    assert re.search(r"reading: 12 of 12 in [\d.]+ s", err)
    code, out, err = command("check", [*asked, "-q", "-v"])
    assert code == 2
    assert "not allowed with" in err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_takes_the_options(name: str) -> None:
    assert {"--quiet", "--verbose", "--log-file"} <= set(cli.options_of(name))


def test_a_log_file_that_cannot_be_written(tmp_path: Path, command: Command) -> None:
    code, out, err = command("completion", ["--log-file", tmp_path])
    assert (code, out) == (2, "")
    assert err.startswith(f"error: --log-file {tmp_path} can't be written: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full: /dev/full")
def test_a_full_disk_ends_the_log_and_not_the_command(command: Command) -> None:
    code, out, err = command("completion", ["--log-file", "/dev/full"])
    assert code == 0
    assert "complete -o default" in out
    assert err.startswith("warning: the log file ends here: ")
    assert len(err.splitlines()) == 1


def test_a_defect_of_the_program_keeps_its_traceback_in_the_log(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, "run", lambda options: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        command("region", ["part.png", "--log-file", tmp_path / "log"])
    assert "ZeroDivisionError" in (tmp_path / "log").read_text("utf-8")


def test_too_little_memory_on_a_gpu_is_told(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(options: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(region, "run", full)
    code, _, err = command("region", ["part.png"])
    assert code == 2
    assert "--set batch_size=1" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("stream", "variables", "coloured"),
    [
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
    ],
)
def test_colour_is_for_terminals_and_never_the_only_sign(
    stream: io.StringIO,
    variables: dict[str, str],
    coloured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stderr", stream)
    with log_to_terminal():
        cli.log.error("it is broken")
    text = stream.getvalue()
    assert ("\x1b[31m" in text) == coloured
    assert re.sub(r"\x1b\[\d*[mK]|\r", "", text) == "error: it is broken\n"


@pytest.mark.parametrize("quiet", [True, False])
def test_a_terminal_shows_progress_unless_it_is_to_be_quiet(
    quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with log_to_terminal(quiet=quiet), ProgressLine() as progress:
        progress("features", 1, 2)
        progress("features", 2, 2)
    assert ("features: 2 of 2" in stream.getvalue()) != quiet
