"""Training and evaluating on real Ray processes, some of which are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from conftest import PYTHONPATH, train_arguments, write_part, write_product
from safetensors.torch import load_file

pytest.importorskip("ray")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # warnings of Ray's own


def _anomaly(command: str, arguments: Sequence[object]) -> "subprocess.Popen[str]":
    line = [sys.executable, "-m", "anomaly", command, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_WAIT_POLICY": "passive"}
    environment["RAY_raylet_start_wait_time_s"] = "200"  # of a machine that has much to do
    return subprocess.Popen(
        line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _said(process: "subprocess.Popen[str]", code: int = 0) -> str:
    with process:
        out, err = process.communicate(timeout=500)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out + err


def _below(pid: int, kind: str) -> list[int]:
    """Ray's actor processes of a class that a driver has started, by way of its node."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True)
    below, actors = {pid}, []
    for line in sorted(listed.stdout.splitlines(), key=lambda line: int(line.split()[0])):
        process, parent, args = line.split(maxsplit=2)
        if int(parent) in below:
            below.add(int(process))
            if kind in args:
                actors.append(int(process))
    return actors


def test_a_killed_worker_changes_nothing_about_the_model(tmp_path: Path) -> None:
    product = write_product(tmp_path / "disc", n_train=60)
    file = product / "train" / "good" / "017.png"
    file.write_bytes(file.read_bytes()[:300])
    plain = _said(_anomaly("train", train_arguments(product, tmp_path / "one")), 3)
    refused = f"skipped: {file}: it is cut short inside its IDAT chunk"
    assert refused in plain
    tensors = []
    for workers in (1, 2):
        output = tmp_path / str(workers)
        options = [*train_arguments(product, output), "--ray", "local", "--workers", workers]
        process = _anomaly("train", options)
        if workers == 2:
            end = time.monotonic() + 300
            while not list(output.glob("features-*/*")):  # the features of a shard are on their way
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.02)
            os.kill(_below(process.pid, "ShardWorker")[0], signal.SIGKILL)
        assert refused in _said(process, 3)
        tensors.append(load_file(output / "model" / "scorer.safetensors"))
        assert not list(output.glob("features-*"))
        recorded = json.loads((output / "model" / "manifest.json").read_text())
        assert recorded["made_with"]["shard_images"] == 8
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def test_categories_side_by_side_make_the_report_of_one_by_one(tmp_path: Path) -> None:
    configs = []
    for name in ("ring", "disc", "cut"):
        product = write_product(tmp_path / name, n_train=16)
        if name == "ring":
            write_part(product / "train" / "good" / "extra.png", 99)
        if name == "cut":
            for file in (product / "train" / "good").glob("*.png"):
                file.write_bytes(b"no picture")
        arguments = [str(a) for a in train_arguments(product, Path("x"), f"name={name}")]
        settings = [a for a in arguments if "=" in a]
        config: dict[str, dict[str, object]] = {}
        for key, value in (setting.split("=", 1) for setting in settings):
            section, _, last = key.rpartition(".")
            place = config.setdefault(section, {}) if section else config
            place[last] = yaml.safe_load(value)
        configs.append(tmp_path / f"{name}.yaml")
        configs[-1].write_text(yaml.safe_dump(config))
    figures, said = [], []
    for more in ([], ["--ray", "local", "--workers", 2]):
        where = tmp_path / f"report{len(more)}"
        options = ["--config", *configs, "--output", where, "--runs", tmp_path / f"runs{len(more)}"]
        options += ["--device", "cpu", "--threads", 1]
        said.append(_said(_anomaly("evaluate", [*options, *more]), 3))
        figures.append((where / "scores.csv").read_text())
        assert "none of the 16 images can be used" in said[-1]
    assert figures[0] == figures[1]
    for name in ("ring", "disc"):
        models = [
            tmp_path / runs / name / "model" / "scorer.safetensors" for runs in ("runs0", "runs4")
        ]
        assert models[0].read_bytes() == models[1].read_bytes()
    told = [[line for line in text.splitlines() if line.startswith("trained")] for text in said]
    assert told[0] == told[1]
    assert len(told[0]) == 2
