"""What all benchmarks share: the machine in words, and a program with its process tree's memory."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_LOOK = 0.05  # seconds from one look at a process tree to the next, at least
# Of one processor, which what is measured lacks: the kernel counts gigabytes page by page.
_SHARE = 0.02
# Set by `anomaly`'s command line: a peer gets memory and threads as it asks for them.
OURS = ("THP_MEM_ALLOC_ENABLE", "GOMP_SPINCOUNT")


@dataclass(frozen=True)
class Outcome:
    """What a run said and used.

    Attributes:
        result: its `RESULT {json}` line; empty without one.
        seconds: of the whole process.
        peak: bytes, all its processes together, shared pages counted once.
        cpu: seconds of processor time, of all its processes.
        failed: the end of its output where it didn't exit with 0.
    """

    result: dict[str, Any]
    seconds: float
    peak: int
    cpu: float
    failed: str


def run(command: Sequence[object], cwd: Path | None = None) -> Outcome:
    """Run a command to its end."""
    environment = {k: v for k, v in os.environ.items() if k not in OURS}
    start = time.perf_counter()
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=cwd,
        env=environment,
    )
    peak, cpu = 0, dict[int, float]()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        pause = _LOOK
        while not done.wait(pause):
            began = time.perf_counter()
            tree = _tree(process.pid)
            peak = max(peak, sum(map(_proportional, tree)))
            cpu.update((pid, max(_cpu(pid), cpu.get(pid, 0.0))) for pid in tree)
            pause = max(_LOOK, (time.perf_counter() - began) / _SHARE)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    done.set()
    watcher.join()
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    result = json.loads(lines[-1].removeprefix("RESULT ")) if lines else {}
    failed = "" if process.returncode == 0 else output[-500:]
    return Outcome(result, time.perf_counter() - start, peak, sum(cpu.values()), failed)


def _tree(pid: int) -> list[int]:
    found = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _tree(int(child))
    except OSError:
        pass
    return found


def _proportional(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _cpu(pid: int) -> float:
    """Seconds of processor time so far, 0 of a process that has just ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine() -> str:
    """What the figures depend on, in a line."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return (
        f"{_processor()} ({_instructions()}), {torch.get_num_threads()} threads, "
        f"{device}, torch {torch.__version__}, load {load:.1f} at the start"
    )


def _processor() -> str:
    """The processor's model where the system says it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def _instructions() -> str:
    """Those that torch computes with, and whether bfloat16 and sums of 8-bit products are there."""
    read = getattr(torch.cpu, "get_capabilities", None)  # newer than the oldest torch we take
    if read is None:
        return torch.backends.cpu.get_cpu_capability()
    there = [name for name, is_there in read().items() if is_there is True]
    further = [
        sign if any(mark in name for name in there) else f"no {sign}"
        for mark, sign in (("bf16", "bf16"), ("vnni", "VNNI"))
    ]
    return ", ".join([torch.backends.cpu.get_cpu_capability(), *further])
