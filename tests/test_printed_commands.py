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
from anomaly.desk.demo import write_sample_data

PAGES = [REPOSITORY / "README.md", REPOSITORY / "data" / "README.md"]
PAGES += sorted((REPOSITORY / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(python (?:-m )?[\w./]+)")
# What stands for the reader's own files, and what of the sample set is put there.
PLACES = {
    "my_part/good": "train/good",
    "my_part/defect": "test/scratch",
    "good/images": "train/good",
    "other/good/images": "test/good",
    "defects/scratch": "test/scratch",
    "production": "test",
}


def commands(page: Path) -> list[str]:
    lines = [line for block in BLOCK.findall(page.read_text("utf-8")) for line in block.split("\n")]
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def test_every_command_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    monkeypatch.syspath_prepend(str(REPOSITORY))
    for page in PAGES:
        for line in commands(page):
            program, *arguments = shlex.split(line, comments=True)
            if program == "make":
                assert set(arguments) <= set(targets), line
            elif program == "anomaly":
                cli._parse(arguments)  # exits where it can't
            else:
                assert [program, *arguments] == ["source", ".venv/bin/activate"]
        for command in INLINE.findall(page.read_text("utf-8")):
            name = command.split()[-1]
            found = importlib.util.find_spec(name) if " -m " in command else None
            assert found or (REPOSITORY / name).is_file(), command


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "anomaly", "--version"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert done.stdout.startswith(b"anomaly ")


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


@pytest.mark.slow
def test_the_readmes_commands_run_as_printed(tmp_path: Path) -> None:
    """In an environment into which the checkout was installed, on a reader's own files."""
    sample = tmp_path / "sample"
    write_sample_data(sample, n_train=10, n_good=5, n_defect=10)
    for place, source in PLACES.items():
        shutil.copytree(sample / source, tmp_path / "path" / "to" / place)
    # A fresh environment that borrows every package of this one, but for this project itself:
    # path files inside a folder that a path file names aren't followed.
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    checkout = _checkout(tmp_path / "checkout")
    subprocess.run([environment / "bin" / "python", *install, checkout], check=True)

    lines = [line for line in commands(PAGES[0]) if line.startswith("anomaly ")]
    assert len(lines) > 4
    text = "\n".join(lines).replace("/path/to/", f"{tmp_path}/path/to/")
    # As the page says for a machine without a network connection.
    offline = " --set backbone.name=timm/tf_efficientnet_lite2"
    text = re.sub("^(anomaly train .*)$", rf"\1{offline}", text, flags=re.MULTILINE)
    (tmp_path / "else where").mkdir()
    done = subprocess.run(
        ["bash", "-exc", f"source '{environment}/bin/activate'\n{text}"],
        cwd=tmp_path / "else where", capture_output=True, text=True, check=False,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]


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
    for file in [*(checkout / "anomaly").rglob("*.*"), *(checkout / "configs").rglob("*.*")]:
        inside = file.relative_to(checkout).as_posix().removeprefix("anomaly/")
        assert f"anomaly/{inside}" in names[0]  # configs, too, lie inside the package
