"""A detector that was loaded before a fork works in the child, or says at once what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PYTHONPATH

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")

_SECONDS = 120  # far more than it takes, far less than for ever

_PROGRAM = """
import multiprocessing, os, sys
import numpy as np
import anomaly

def scores(first):
    parts = [np.random.default_rng(first + i).integers(0, 255, (96, 120, 3), np.uint8)
             for i in range(5)]
    return [found.score for found in detector.predict(parts, channels="rgb")]

if __name__ == "__main__":
    import torch
    torch.set_num_threads(2)
    detector = anomaly.load(sys.argv[1], device="cpu")
    file = sys.argv[2]
    before = scores(0), detector.predict(file).score
    child = os.fork()
    if not child:
        same = np.allclose(scores(0), before[0], rtol=1e-4)
        same &= np.isclose(detector.predict(file).score, before[1], rtol=1e-4)
        print(f"child {same}, {torch.get_num_threads()} thread", flush=True)
        sys.exit()  # as most programs end
    print("exit code", os.waitpid(child, 0)[1], flush=True)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print("pool", np.allclose(pool.map(scores, [0, 0]), before[0], rtol=1e-4))
    print("parent", (scores(0), detector.predict(file).score) == before, torch.get_num_threads())
"""

_EXPORTED = """
import os, sys
import numpy as np
import anomaly

detector = anomaly.load(sys.argv[1])
part = np.zeros((96, 120, 3), np.uint8)
unused = os.fork()
if not unused:  # nothing was computed before: an engine of its own
    print("unused", detector.predict(part, channels="rgb").score > 0, flush=True)
    os._exit(0)
os.waitpid(unused, 0)
detector.predict(part, channels="rgb")
used = os.fork()
if not used:
    try:
        detector.predict(part, channels="rgb")
    except anomaly.AnomalyError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(used, 0)
"""


def _run(program: str, *arguments: object) -> list[str]:
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_torch_computes_on_in_a_forked_child(run_folder: Path, product: Path) -> None:
    file = next((product / "train" / "good").iterdir())
    assert _run(_PROGRAM, run_folder, file) == [
        "child True, 1 thread",
        "exit code 0",
        "pool True",
        "parent True 2",
    ]


def test_an_exported_model_works_or_says_what_to_do(bank_export: Path) -> None:
    unused, used = _run(_EXPORTED, bank_export)
    assert unused == "unused True"
    assert "was used before this process was forked" in used
    assert "get_context('spawn')" in used
