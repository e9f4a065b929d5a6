"""Processors of a container: what its control groups allow."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from anomaly import runtime
from anomaly.runtime import cores, cpu_quota


def _groups(root: Path, lines: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": lines, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


V2 = "0::/\n"


QUOTAS: list[tuple[str, dict[str, str], float]] = [
    (V2, {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
    (V2, {"sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
    (V2, {}, math.inf),
    (V2, {"sys/fs/cgroup/cpu.max": "nonsense\n"}, math.inf),
    # A group's own quota is larger than that of the group around it.
    (
        "0::/pods/one/job\n",
        {
            "sys/fs/cgroup/pods/one/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pods/one/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/pods/cpu.max": "100000 50000\n",
        },
        2.0,
    ),
    ("0::/../../other\n", {"sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
]


def test_the_least_quota_counts(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf  # no control groups
    for number, (lines, files, expected) in enumerate(QUOTAS):
        assert cpu_quota(_groups(tmp_path / str(number), lines, files)) == expected, files


def test_the_default_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    for quota, expected in ((0.2, 1), (1.0, 1), (1.5, 2), (99, 4)):
        monkeypatch.setattr(runtime, "cpu_quota", lambda quota=quota: quota)
        assert cores() == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert cores() == 8
