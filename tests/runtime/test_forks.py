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
import torch
import anomaly

rng = np.random.default_rng(0)
parts = [
    anomaly.image(rng.integers(0, 255, (96, 120, 3), np.uint8), channels="rgb") for _ in range(5)
]

def in_child(task, end):
    child = os.fork()
    if not child:
        print(task(), flush=True)
        end(0)
    assert os.waitpid(child, 0)[1] == 0

def scores():
    found = [*detector.predict(parts), *detector.predict([sys.argv[3]])]
    return [one.score for one in found]

def exported_score():
    try:
        return exported.predict(parts[0]).score > 0
    except anomaly.AnomalyError as error:
        return error

torch.set_num_threads(2)
detector = anomaly.load(sys.argv[1], device="cpu")
before = scores()
# It ends as most programs do.
in_child(lambda: (np.allclose(scores(), before, rtol=1e-4), torch.get_num_threads()), sys.exit)
print((scores() == before, torch.get_num_threads()), flush=True)
exported = anomaly.load(sys.argv[2])
in_child(exported_score, os._exit)  # nothing was computed before: an engine of its own
exported_score()
in_child(exported_score, os._exit)
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
    child, parent, unused, used = done.stdout.splitlines()
    assert unused == "True"
    assert "was used before this process was forked" in used
    assert "get_context('spawn')" in used
    assert (child, parent) == ("(True, 1)", "(True, 2)")
