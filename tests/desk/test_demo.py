"""`anomaly demo`: every step is a command that can be run alone, and a failing one ends it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from anomaly import cli
from anomaly.cli import main, start


def test_each_step_is_a_command_and_a_failing_one_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    steps: list[Sequence[str]] = []
    codes = iter([0] * 3 + [3])

    def execute(arguments: Sequence[str]) -> int:
        cli._parser(arguments[0]).parse_args(arguments)  # exits where it can't
        steps.append(arguments)
        return next(codes)

    made: list[Path] = []
    monkeypatch.setattr(start, "write_sample_data", lambda root, **more: made.append(root))
    monkeypatch.setattr(start, "execute", execute)
    assert main(["demo", "--output", "all"]) == 0
    assert [step[0] for step in steps] == ["train", "infer", "evaluate"]
    assert all("--overwrite" in step for step in steps)
    report = tmp_path / "all" / "evaluation" / "sample_brushed_plate" / "report.html"
    assert str(report) in capsys.readouterr().out
    assert main(["demo"]) == 3  # its training couldn't use some images
    assert [step[0] for step in steps[3:]] == ["train"]
    assert made == [Path("data/sample/brushed_plate")] * 2
    assert "Look at" not in capsys.readouterr().out
