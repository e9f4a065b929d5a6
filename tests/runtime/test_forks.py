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
import os, sys
import numpy as np
import anomaly

rng = np.random.default_rng(0)
parts = [rng.integers(0, 255, (96, 120, 3), np.uint8) for _ in range(5)]

def in_child(task):
    child = os.fork()
    if not child:
        print(task(), flush=True)
        sys.exit()  # as most programs end
    assert os.waitpid(child, 0)[1] == 0

def scores():
    found = [*detector.predict(parts, channels="rgb"), *detector.predict([file])]
    return [one.score for one in found]

def exported_score():
    try:
        return exported.predict(parts[0], channels="rgb").score > 0
    except anomaly.AnomalyError as error:
        return error

file = sys.argv[3]
exported = anomaly.load(sys.argv[2])
in_child(exported_score)  # nothing was computed before: an engine of its own
exported_score()
in_child(exported_score)
import torch
torch.set_num_threads(2)
detector = anomaly.load(sys.argv[1], device="cpu")
before = scores()
in_child(lambda: (np.allclose(scores(), before, rtol=1e-4), torch.get_num_threads()))
print((scores() == before, torch.get_num_threads()))
"""


def test_models_compute_on_in_a_forked_child_or_say_what_to_do(
    run_folder: Path, bank_export: Path, product: Path
) -> None:
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    environment.pop("OMP_NUM_THREADS", None)
    given = map(str, (run_folder, bank_export, product / "train" / "good" / "000.png"))
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *given],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    unused, used, child, parent = done.stdout.splitlines()
    assert unused == "True"
    assert "was used before this process was forked" in used
    assert "get_context('spawn')" in used
    assert (child, parent) == ("(True, 1)", "(True, 2)")
