"""The core without its annexes, which may be left out."""

import ast
import sys
from importlib.util import find_spec

import pytest
from conftest import REPOSITORY, Command

from anomaly import cli
from anomaly.cli import annex


def test_a_command_of_an_annex_that_is_left_out_says_so(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "anomaly.line.commands", None)
    code, _, said = command("serve", ["--models", "runs"])
    assert code == 2
    assert "needs anomaly.line, which isn't installed; install all of anomaly" in said


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
