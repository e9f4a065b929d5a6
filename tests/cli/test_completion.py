"""The Tab key, as bash calls it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from anomaly.cli import COMMANDS, main

bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@bash
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        (["anomaly", "in"], ["infer"]),
        (["anomaly", ""], list(COMMANDS)),
        (["anomaly", "infer", "--res"], ["--resume"]),
        (["anomaly", "train", "--conf"], ["--config"]),
        (["anomaly", "train", "--watch"], []),
        (["anomaly", "train", "folder"], []),  # file names are the shell's own business
    ],
)
def test_what_the_shell_completes(
    line: list[str], completed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion"]) == 0
    words = " ".join(f"'{word}'" for word in line)
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _anomaly; echo ${{COMPREPLY[@]}}"
    script = capsys.readouterr().out + ask
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed
    assert done.stderr == ""
