"""What is wrong with a command line is told before torch is imported, which takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

_RUN = """
import sys
from anomaly.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
print("torch" if "torch" in sys.modules else "light", code or 0)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("infer --model nowhere --input . --output o", 2, "no model at nowhere"),
        ("infer --watch --model nowhere --input . --output o", 2, "no model at nowhere"),
        ("calibrate --model nowhere", 2, "no model at nowhere"),
        ("evaluate --model nowhere --output o", 2, "no model at nowhere"),
        ("evaluate --config nowhere --output o", 2, "no config nowhere"),
        ("explain --model nowhere --input . --output o", 2, "no model at nowhere"),
        ("features --model nowhere --input . --output o", 2, "no model at nowhere"),
        ("layers --model nowhere", 2, "no model at nowhere"),
        ("selfcheck --model nowhere --golden .", 2, "no model at nowhere"),
        ("train --config folder --set mode.kind=padim", 2, "unknown key 'mode'"),
        ("check --config nowhere", 2, "no config nowhere"),
        ("train --help", 0, "usage:"),
    ],
)
def test_told_without_torch(arguments: str, code: int, message: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *arguments.split()],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert message in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"light {code}"
    assert list(tmp_path.iterdir()) == []
