"""Printed commands are followed blindly: none makes a model catch fewer known defects."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Command, write_part

import anomaly
from anomaly.desk.advice import flagged_line

PRINTED = re.compile(r"(?:^|: )\s*(anomaly [a-z]+ -.*|anomaly explain .*)$", re.MULTILINE)


def test_no_printed_command_loses_a_known_defect(
    run_folder: Path, product: Path, tmp_path: Path, command: Command,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """From a model that misses some; a third of the production images are defective."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    run = Path(shutil.copytree(run_folder, tmp_path / "runs" / "disc"))
    spots = sorted((product / "test" / "spot").iterdir())
    for i in range(30):
        file = tmp_path / "FOLDER" / f"{i:03}.png"
        write_part(file, seed=500 + i, mark=(30, 35 + i) if i % 3 == 0 else None)
        rough = np.random.default_rng(i).normal(0, 14, (96, 120, 3))
        rougher = np.clip(np.asarray(cv2.imread(str(file))) + rough, 0, 255).astype(np.uint8)
        cv2.imwrite(str(file), rougher)

    def caught() -> int:
        return sum(p.verdict != "good" for p in anomaly.load(run, device="cpu").predict(spots))

    lowest, second, _ = sorted(p.score for p in anomaly.load(run, device="cpu").predict(spots))
    by_hand = ["--threshold", (lowest + second) / 2, "--yes"]
    assert command("calibrate", ["--model", run, *by_hand])[0] == 0
    most = caught()
    assert most == 2
    model = anomaly.load(run, device="cpu")
    assert model.thresholds is not None
    promised = model.thresholds.to_review.false_rejects
    (advice,) = re.findall("anomaly calibrate .*", flagged_line(30, 30, promised, str(run)))
    waiting = [
        advice,
        f"anomaly evaluate --model {run} --output figures",
        f"anomaly infer --model {run} --input FOLDER --output rows",
    ]
    followed: list[str] = []
    while waiting:
        line = waiting.pop(0)
        name, *arguments = shlex.split(line)[1:]
        caplog.clear()
        _, out, _ = command(name, arguments)
        followed.append(line)
        assert caught() >= most, line
        most = caught()
        new = dict.fromkeys(PRINTED.findall("\n".join([out, *caplog.messages])))
        # tune takes minutes, and writes nothing but a config.
        waiting += [one for one in new if one not in [*followed, *waiting] and " tune " not in one]
        assert not any("defective" in one or "--yes" in one for one in new)
    names = {line.split()[1] for line in followed}
    assert {"explain", "calibrate", "train"} <= names, followed
    assert any("--production" in line for line in followed)
