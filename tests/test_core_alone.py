"""The core without its annexes, which may be left out."""

import ast
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import REPOSITORY, TINY, train_arguments

from anomaly import cli
from anomaly.cli import annex

_ANNEXES = ("line", "cluster", "export", "sample_data")
# Imports every module, then trains, scores and evaluates, and asks for a command of an annex.
_PROGRAM = """
import pkgutil, sys
from importlib import import_module
from pathlib import Path

# An editable installation would find the annexes beside the core that is tried here.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import anomaly
from anomaly.cli import main

for module in pkgutil.walk_packages(anomaly.__path__, "anomaly."):
    if module.name != "anomaly.__main__":
        import_module(module.name)
run, images = sys.argv[1:3]
commands = [
    ["train", *sys.argv[3:]],
    ["infer", "--model", run, "--input", images, "--output", f"{run}/results", "--device", "cpu"],
    ["evaluate", "--model", run, "--output", f"{run}/evaluation", "--device", "cpu"],
]
for arguments in commands:
    assert main(arguments) == 0, arguments
for name in ("results/results.csv", "results/results.html", "evaluation/index.html"):
    assert Path(run, name).is_file(), name
print("asked for more", file=sys.stderr)
sys.exit(main(["serve", "--models", run]))
"""


@pytest.mark.slow
def test_the_core_works_without_its_annexes(tmp_path: Path, product: Path) -> None:
    left_out = shutil.ignore_patterns("__pycache__", *_ANNEXES)
    shutil.copytree(REPOSITORY / "anomaly", tmp_path / "core" / "anomaly", ignore=left_out)
    shutil.copytree(REPOSITORY / "configs", tmp_path / "core" / "configs")
    run = tmp_path / "run"
    arguments = map(str, [run, product / "test", *train_arguments(product, run)])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([TINY, str(tmp_path / "core")])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    message = done.stderr.partition("asked for more\n")[2]
    assert message == (
        "error: this command needs anomaly.line, which isn't installed; install all of anomaly\n"
    )


def test_an_annex_has_the_commands_that_the_core_lists() -> None:
    for room, listed in cli._ANNEXES.items():
        assert set(annex(f"{room}.commands").COMMANDS) == set(listed)


def test_what_the_core_asks_of_an_annex_is_there() -> None:
    asked = []
    for file in (REPOSITORY / "anomaly").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            function = node.func if isinstance(node, ast.Call) else None
            name = getattr(function, "attr", getattr(function, "id", ""))
            if name == "annex" and isinstance(node, ast.Call):
                asked += [a.value for a in node.args if isinstance(a, ast.Constant)]
    assert len(asked) >= 4
    for name in asked:
        assert find_spec(f"anomaly.{name}"), name
