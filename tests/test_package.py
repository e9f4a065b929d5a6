"""What a package has to say of itself, and that it says the same everywhere."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

import yaml
from conftest import REPOSITORY

import anomaly
from anomaly import __version__

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]


NAMES = (
    "AnomalyError Config Detector ImageError Prediction fit image load load_config "
    "open_dataset tune"
)


def test_eleven_public_names_and_no_more() -> None:
    assert sorted(anomaly.__all__) == NAMES.split()
    for name in anomaly.__all__:
        assert getattr(anomaly, name).__module__.startswith("anomaly.")
    assert not hasattr(anomaly, "surprise")


def test_importing_and_decoding_load_no_torch() -> None:
    code = (
        "import sys, anomaly, anomaly.datasets.layouts\n"
        "import anomaly.imaging.loading, anomaly.maps.heatmap\n"
        "assert not {'torch', 'torchvision', 'faiss', 'sklearn', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_stands_in_one_place() -> None:
    assert version("anomaly") == __version__
    assert f"## {__version__}" in (REPOSITORY / "CHANGELOG.md").read_text("utf-8")
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]


def test_the_command_line_sets_how_threads_wait_unless_the_user_has() -> None:
    plain = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    program = (
        "import os; before = dict(os.environ); import anomaly; assert os.environ == before;"
        " from anomaly.cli import main; main(['no-command']);"
        " print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    for given, expected in (
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "77"}, "77"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ):
        said = subprocess.run(
            [sys.executable, "-c", program], env=plain | given, cwd=REPOSITORY,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert said.stdout.strip() == expected


def test_what_other_code_imports_is_there() -> None:
    for folder in ("benchmarks", "docs", "examples", "scripts"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anomaly"):
                    module = import_module(str(node.module))
                    for name in {alias.name for alias in node.names} - set(dir(module)):
                        inside = hasattr(module, "__path__") and find_spec(f"{node.module}.{name}")
                        assert inside, f"{file}: {node.module} has no {name}"


def test_every_package_that_is_needed_has_its_licence_listed() -> None:
    listed = (REPOSITORY / "docs" / "licences.md").read_text("utf-8")
    extras = PROJECT["optional-dependencies"]
    needed = [one for name, extra in extras.items() if name != "test" for one in extra]
    for requirement in PROJECT["dependencies"] + needed:
        name = re.split(r"[<>=\[; ]", requirement)[0]
        if name == "anomaly":  # its other extras
            continue
        assert f"| {name} " in listed, name
