"""Interpreters that decode images: starting them, and what they use. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from anomaly.errors import AnomalyError
from anomaly.imaging.decoder_worker import serve

if sys.platform == "linux":
    import fcntl

_HOME = str(Path(__file__).resolve().parents[2])  # the folder that holds the package
_PIPE_BYTES = 1 << 20  # an image of the network's size in one go; 64 kB take 3 ms more for each


def usage(pid: int) -> tuple[float, int] | None:
    """Seconds that a process has computed and bytes that it holds; None where nothing says so."""
    try:
        # proc(5): utime, stime and rss are fields 14, 15 and 24; the second one may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def _imports() -> str:
    """A program that finds the modules where this one does, its working folder changed or not."""
    places = [*sys.path, _HOME]
    return f"import sys; sys.path[:] = {places!r}; from {serve.__module__} import serve"


def check_start() -> None:
    """See that an interpreter gets as far as serving, where none has answered yet.

    Raises:
        AnomalyError: it doesn't; says why.
    """
    tried = subprocess.run(
        [sys.executable, "-c", _imports()], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        said = (tried.stderr.strip() or "it says nothing").splitlines()[-1]
        raise AnomalyError(
            f"the processes that decode images end as soon as they are started: {said}"
        )


def start() -> subprocess.Popen[bytes]:
    """A fresh interpreter that serves: works alike on every system, whatever threads there are."""
    code = f"{_imports()}; serve({os.getpid()})"
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | threads,
    )
    if sys.platform == "linux" and child.stdout is not None:
        with suppress(OSError):  # the user's pipes hold as much as they may
            fcntl.fcntl(child.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return child
