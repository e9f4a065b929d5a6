"""Rooms above the commands, which are asked by name."""

import ast
from importlib.util import find_spec

from conftest import REPOSITORY

from anomaly import cli


def test_every_command_has_its_function() -> None:
    assert all(callable(cli._run_of(command)) for command in cli.COMMANDS)


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
