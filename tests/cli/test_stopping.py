"""A signal ends a command, but not in the middle of an import."""

import importlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anomaly.cli.terminal import Interrupted, Stopping

# An extension module that is interrupted while it is imported fails with an error of its own.
_EXTENSION = """
import signal, time
try:
    signal.raise_signal(signal.SIGTERM)
    time.sleep(0.1)
except BaseException:
    raise ImportError("failed to import") from None
"""


_AT_WORK = """
import signal, time
from anomaly.cli import terminal
terminal.PATIENCE_SECONDS = 0.2
with terminal.Stopping(then="send it again") as stop:
    stop.at_work = True
    signal.raise_signal(signal.SIGTERM)
    time.sleep(0.6)
    stop.at_work = False
    print("finished", flush=True)
    while True:
        pass
"""


def test_what_was_accepted_is_finished_whatever_time_it_takes() -> None:
    command = [sys.executable, "-c", _AT_WORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("finished\n", 143)
    assert "interrupted; send it again" in done.stderr


@pytest.mark.parametrize("politely", [False, True])
def test_an_import_is_finished_first(
    politely: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_extension.py").write_text(_EXTENSION)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "slow_extension", raising=False)

    def work() -> None:
        with Stopping(politely=politely):
            if politely:
                signal.raise_signal(signal.SIGTERM)  # noted; the second one interrupts
            importlib.import_module("slow_extension")
            for _ in range(200):
                time.sleep(0.01)

    with pytest.raises(Interrupted) as caught:
        work()
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert "slow_extension" in sys.modules
    monkeypatch.delitem(sys.modules, "slow_extension")
