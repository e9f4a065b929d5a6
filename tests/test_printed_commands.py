"""The commands of README and docs, as they are printed: each is known, and all of them run."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import REPOSITORY

from anomaly import cli
from anomaly.sample_data import write_sample_data

PAGES = [REPOSITORY / "README.md", REPOSITORY / "data" / "README.md"]
PAGES += sorted((REPOSITORY / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(python (?:-m )?[\w./]+)")
# What stands for the reader's own files, and what of the sample set is put there.
PLACES = {
    "/path/to/mvtec_ad": {"bottle": "."},
    "/path/to/images": {".": "test/dent"},
    "/path/to/good/images": {".": "train/good"},
    "/path/to/production": {".": "test"},
    "/path/to/other/good/images": {".": "test/good"},
    "/path/to/new/good/images": {".": "test/good"},
    "/path/to/new/good/images/003.png": {".": "test/good/003.png"},
    "/path/to/confirmed/good/images": {".": "test/good"},
    "/path/to/known/parts": {".": "test/scratch"},
    "/path/to/defects": {"scratch": "test/scratch", "stain": "test/stain"},
    "/path/to/my_part": {"good": "train/good", "defect": "test/scratch"},
    "/path/to/camera": {".": "test/edge_nick"},
    "/path/to/part.png": {".": "test/scratch/000.png"},
}
IN_THE_CHECKOUT = ("make ", "source ")
RUNS_TESTS = ("make test", "make test-all")  # this very test among them
# A run that follows a folder goes on until somebody stops it.
UNTIL_A_ROW = " & until grep -q ,ok, shift/results.csv; do sleep 0.2; kill -0 $!; done; "
UNTIL_A_ROW += "kill -TERM $!; wait $!"
# So does a service, which scores a part.
SERVICE = "http://127.0.0.1:8000"
OPEN = "import urllib.request as u; u.urlopen"
SCORE = f'"{SERVICE}/v1/models/my_part/score", open("/path/to/part.png", "rb").read()'
UNTIL_SCORED = f""" & until python -c '{OPEN}("{SERVICE}/v2/health/ready")'; """
UNTIL_SCORED += f"do sleep 0.5; kill -0 $!; done; python -c '{OPEN}({SCORE})'; "
UNTIL_SCORED += "kill -TERM $!; wait $!"
# WideResNet50-2's file can't be had without a network: its layers have random weights here.
STAND_IN = """
import importlib.util, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "anomaly.backbones.weights":
            return None
        sys.meta_path.remove(Finder)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            official = module.official_state

            def official_state(url):
                if "wide_resnet50_2" not in url:
                    return official(url)
                import torch, torchvision
                torch.manual_seed(0)
                return torchvision.models.wide_resnet50_2().state_dict(), "0" * 64

            module.official_state = official_state

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder)
"""


def commands(page: Path) -> list[str]:
    lines = [line for block in BLOCK.findall(page.read_text("utf-8")) for line in block.split("\n")]
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_is_one(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for line in commands(page):
        program, *arguments = shlex.split(line, comments=True)
        if program == "make":
            assert set(arguments) <= set(targets), line
        elif program == "anomaly":
            assert arguments[0] in cli.COMMANDS, line
            cli._parser(arguments[0]).parse_args(arguments)  # exits where it can't
        else:
            assert [program, *arguments] == ["source", ".venv/bin/activate"]
        places = {p.rstrip(",") for p in arguments for p in re.findall(r"/path/to[\w/.]*", p)}
        assert places <= PLACES.keys(), line
    monkeypatch.syspath_prepend(str(REPOSITORY))
    for command in INLINE.findall(page.read_text("utf-8")):
        name = command.split()[-1]
        if command.startswith("python -m "):
            assert importlib.util.find_spec(name), command
        else:
            assert (REPOSITORY / name).is_file(), command


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "anomaly", "--version"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert done.stdout.startswith(b"anomaly ")


def _own_files(folder: Path) -> Path:
    """The reader's own files, in `folder`/path/to."""
    sample = folder / "sample"
    write_sample_data(sample, n_train=10, n_good=5, n_defect=10)
    for place, parts in PLACES.items():
        for name, source in parts.items():
            target = folder / place.lstrip("/") / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (sample / source).is_dir() else shutil.copy
            copy(sample / source, target)
    return folder


def _environment(folder: Path) -> Path:
    """A fresh environment that borrows every package of this one, but for this project itself."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # Path files inside a folder that a path file names aren't followed: no editable installs.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "sitecustomize.py").write_text(STAND_IN)
    return folder / "bin"


def _checkout(folder: Path) -> Path:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    for name in names:
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)
    return folder


def _shell(lines: list[str], cwd: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"XDG_CACHE_HOME": str(cwd / "cache")}
    log = cwd / "log.txt"
    with log.open("w") as said:
        done = subprocess.run(
            ["bash", "-exc", "\n".join(["PS4='+ $SECONDS s: '", *lines])],
            cwd=cwd, env=environment, stdout=said, stderr=said, check=False,
        )  # fmt: skip
    assert done.returncode == 0, log.read_text()[-5000:]


def _printed(own_files: Path) -> list[str]:
    """The commands that work in any folder, on the reader's own files.

    Each page starts in a folder of its own, with the model that the README trains, `runs/my_part`.
    """
    lines = []
    for number, page in enumerate(PAGES):
        printed = commands(page)
        lines += [f"mkdir -p {number}/runs", f"cd {number}"]
        if number and not re.search("anomaly start|name=my_part", " ".join(printed)):
            lines.append("cp -r ../0/runs/the_part runs/my_part")
        lines += [*printed, "cd .."]
    return [
        (line + _ended(line)).replace("/path/to/", f"{own_files}/path/to/")
        for line in lines
        if not line.startswith(IN_THE_CHECKOUT)
    ]


def _ended(line: str) -> str:
    """What ends a command that goes on by itself, once it has scored a part."""
    return UNTIL_A_ROW if "--watch" in line else UNTIL_SCORED if "anomaly serve" in line else ""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pip install .", "make demo"])
def test_all_commands_run_as_printed(way: str, tmp_path: Path) -> None:
    own_files, checkout = _own_files(tmp_path / "own"), _checkout(tmp_path / "checkout")
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    if way == "make demo":
        python = _environment(checkout / ".venv") / "python"
        subprocess.run([python, *install, "-e", checkout], cwd=checkout, check=True)
        (checkout / ".venv" / ".installed").touch()
        printed = [line for line in commands(PAGES[0]) if line.startswith(IN_THE_CHECKOUT)]
        first = [line for line in printed if line.split("#")[0].strip() not in RUNS_TESTS]
        assert [line.split()[0] for line in first] == ["make", "source"]
    else:
        python = _environment(tmp_path / "environment") / "python"
        subprocess.run([python, *install, checkout], check=True)
        first = [f"source {shlex.quote(str(python.with_name('activate')))}"]
        shutil.rmtree(checkout)
        checkout = elsewhere
    _shell([*first, f"cd {shlex.quote(str(elsewhere))}", *_printed(own_files)], checkout)


def test_the_sdist_builds_the_same_wheel_as_the_checkout(tmp_path: Path) -> None:
    checkout = _checkout(tmp_path / "checkout")

    def build(what: str, source: Path) -> Path:
        code = f"from setuptools import build_meta as b; print(b.build_{what}('built'))"
        run = [sys.executable, "-c", code]
        done = subprocess.run(run, cwd=source, capture_output=True, text=True, check=True)
        return source / "built" / done.stdout.splitlines()[-1]

    direct = build("wheel", checkout)
    sdist = build("sdist", checkout)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    through = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"))
    names = [sorted(zipfile.ZipFile(wheel).namelist()) for wheel in (direct, through)]
    assert names[0] == names[1]
    for name in ("configs/base/mvtec_ad.yaml", "report/assets/region.js", "py.typed"):
        assert f"anomaly/{name}" in names[0]


def test_configs_are_installed_with_the_package(tmp_path: Path) -> None:
    build = ["-q", "egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", tmp_path / "lib"]
    done = subprocess.run(
        [sys.executable, "setup.py", *build], cwd=REPOSITORY, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert "absent from" not in done.stderr

    def files(folder: Path) -> set[str]:
        found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return {path.as_posix() for path in found if "__pycache__" not in path.parts}

    assert files(tmp_path / "lib" / "anomaly" / "configs") == files(REPOSITORY / "configs")
    assert files(REPOSITORY / "anomaly") <= files(tmp_path / "lib" / "anomaly")
