"""A signal ends a command, but not in the middle of an import."""

import importlib
import signal
import sys
import time
from pathlib import Path

import pytest

from anomaly.cli.stopping import Interrupted, Stopping

# An extension module that is interrupted while it is imported fails with an error of its own.
_EXTENSION = """
import signal, time
try:
    signal.raise_signal(signal.SIGTERM)
    time.sleep(0.2)
except BaseException:
    raise ImportError("failed to import") from None
"""


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
            time.sleep(2)

    with pytest.raises(Interrupted) as caught:
        work()
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert "slow_extension" in sys.modules
    monkeypatch.delitem(sys.modules, "slow_extension")
