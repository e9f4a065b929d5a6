"""Attacks by files: each costs little time and memory, and ends in a picture or an ImageError."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from attack_files import attacks
from conftest import REPOSITORY
from picture_files import mutated

from anomaly.errors import ImageError
from anomaly.imaging.read import read_image

_MOST_SECONDS, _MOST_BYTES = 10, 2 * 10**9


def fate(path, expected):
    """What becomes of a file: "as it should", or what is wrong with that."""
    try:
        pixels = read_image(path).pixels
    except ImageError as error:
        right = str(path) in str(error) and error.status in ("unreadable", "unsupported")
        return "as it should" if right and expected is None else f"refused: {error}"
    if expected is None:
        return "accepted"
    same = np.array_equal(pixels, expected if expected.ndim == 3 else np.dstack([expected] * 3))
    return "as it should" if same else "other pixels"


def mutant_fate(path):
    """Like `fate`, of a file of which nobody knows the picture."""
    try:
        return "as it should" if read_image(path).pixels.shape[2] == 3 else "no picture"
    except ImageError:
        return "as it should"


def attack(folder, mutants, seed):
    """Read all attacks, and mutants of each, one after the other; print what each one took."""
    rng = np.random.default_rng(seed)
    foreign = rng.bytes(1 << 16)
    path = folder / "attack"
    for name, data, expected in attacks():
        for number in range(mutants + 1):
            path.write_bytes(mutated(data, rng, foreign) if number else data)
            start = time.process_time()
            try:
                end = mutant_fate(path) if number else fate(path, expected)
            except Exception as error:
                end = repr(error)
            most = peak_memory()
            print(json.dumps([f"{name}, {number}", end, time.process_time() - start, most]))


def peak_memory():
    """The most memory that this program has held, in bytes.

    Not `ru_maxrss` where there is another way: on Linux that counts what the process which
    started this one held at the time.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024


def check(folder, mutants, seed):
    """Attack a process of its own, whose memory is what the attacks took."""
    path = [str(Path(__file__).parent), str(REPOSITORY / "tests")]
    program = (
        f"import sys; sys.path[:0] = {path!r}\n"
        "from pathlib import Path\nfrom test_attacks import attack\n"
        f"attack(Path({str(folder)!r}), {mutants}, {seed})"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert run.stderr == ""
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(results) > 30 * (mutants + 1)
    assert [(name, end) for name, end, _, _ in results if end != "as it should"] == []
    assert [(name, seconds) for name, _, seconds, _ in results if seconds > _MOST_SECONDS] == []
    assert results[-1][3] < _MOST_BYTES


@pytest.mark.slow
def test_each_attack_is_cheap(tmp_path):
    check(tmp_path, 0, seed=0)


@pytest.mark.clock
@pytest.mark.parametrize("seed", range(3))
def test_mutants_of_each_attack_are_cheap(tmp_path, seed):
    check(tmp_path, 8, seed)
