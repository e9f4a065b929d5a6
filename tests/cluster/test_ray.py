"""`train --ray` and `infer --ray` on real Ray processes, some of which are killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from conftest import PYTHONPATH, train_arguments, write_part, write_product
from safetensors.torch import load_file
from test_cluster_infer import written

pytest.importorskip("ray")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # warnings of Ray's own


def _anomaly(command: str, arguments: Sequence[object]) -> "subprocess.Popen[str]":
    line = [sys.executable, "-m", "anomaly", command, *map(str, arguments)]
    path = os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": f"{path}:{PYTHONPATH}", "OMP_WAIT_POLICY": "passive"}
    environment["RAY_raylet_start_wait_time_s"] = "200"  # of a machine that has much to do
    return subprocess.Popen(
        line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _said(process: "subprocess.Popen[str]", code: int) -> str:
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


def _wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 300
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)


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
        if workers == 2:  # the features of a shard are on their way
            _wait_until(lambda: bool(list((tmp_path / "2").glob("features-*/*"))), process)
            os.kill(_below(process.pid, "ShardWorker")[0], signal.SIGKILL)
        assert refused in _said(process, 3)
        tensors.append(load_file(output / "model" / "scorer.safetensors"))
        assert not list(output.glob("features-*"))
        recorded = json.loads((output / "model" / "manifest.json").read_text())
        assert recorded["made_with"]["shard_images"] == 8
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, some of them cut short."""
    folder = tmp_path_factory.mktemp("archive")
    for i in range(300):
        write_part(folder / f"{i:03}.png", i % 60, mark=(30, 50) if i % 9 == 0 else None)
    data = (folder / "000.png").read_bytes()
    for i in range(3):
        (folder / f"cut{i}.png").write_bytes(data[: 300 + 100 * i])
    return folder


def _arguments(images: Path, run: Path, output: Path, *more: object) -> list[str]:
    first = ["--model", run, "--input", images, "--output", output, "--device", "cpu"]
    return [*map(str, first), "--threads", "1", *map(str, more)]


@pytest.fixture(scope="module")
def alone(images: Path, run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one process."""
    output = tmp_path_factory.mktemp("one") / "out"
    assert "300 of 303 images scored" in _said(
        _anomaly("infer", _arguments(images, run_folder, output)), 3
    )
    return output


def test_workers_on_this_machine_write_what_one_process_does(
    images: Path, run_folder: Path, alone: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    arguments = _arguments(images, run_folder, output, "--ray", "local", "--workers", 2)
    assert "300 of 303 images scored" in _said(_anomaly("infer", arguments), 3)
    assert written(output) == written(alone)
    assert "nothing to resume" in _said(_anomaly("infer", [*arguments, "--resume"]), 3)


def test_what_is_killed_costs_nothing(
    images: Path, run_folder: Path, alone: Path, tmp_path: Path
) -> None:
    """Workers, the command, and the command politely, at random points; then --resume."""
    rng = random.Random(0)
    for turn in range(6):
        output = tmp_path / f"{turn}"
        arguments = _arguments(images, run_folder, output, "--ray", "local", "--workers", 2)
        wanted = rng.randrange(1, 100)
        with _anomaly("infer", arguments) as process:

            def scored(output: Path = output, wanted: int = wanted) -> bool:
                return len(list(output.glob("heatmaps/*.png"))) > wanted

            _wait_until(scored, process)
            if turn % 3 == 0:
                for actor in _below(process.pid, "ScoringWorker")[: rng.randrange(1, 3)]:
                    os.kill(actor, signal.SIGKILL)
                assert process.wait(400) == 3
            elif turn % 3 == 1:
                process.kill()
            else:
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 143
        if turn % 3:
            _said(_anomaly("infer", [*arguments, "--resume"]), 3)
        assert written(output) == written(alone)


def test_nodes_come_and_go_and_an_image_that_kills_workers_is_alone(
    images: Path, run_folder: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real head and two worker nodes, one of which is killed."""
    from ray.cluster_utils import Cluster

    poison = images / "017.png"
    monkeypatch.setenv("PYTHONPATH", f"{_poisoning(tmp_path, poison)}:{PYTHONPATH}")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        output = tmp_path / "out"
        arguments = _arguments(images, run_folder, output, "--ray", cluster.address)
        with _anomaly("infer", arguments) as process:
            _wait_until(lambda: len(list(output.glob("heatmaps/*.png"))) > 40, process)
            cluster.remove_node(nodes[0], allow_graceful=False)
            said = _said(process, 3)
        assert "299 of 303 images scored" in said
    finally:
        cluster.shutdown()
    rows, before = ({r["path"]: r for r in written(f)["rows"]} for f in (output, alone))
    assert list(rows) == list(before)
    assert "crashed" in rows.pop(str(poison))["reason"]
    before.pop(str(poison))
    # What shares a batch with it is scored in a smaller one.
    assert sum(rows[name] != before[name] for name in rows) <= 8


def _poisoning(folder: Path, poison: Path) -> Path:
    """A folder whose `sitecustomize` ends a worker that is to score an image."""
    place = folder / "poison"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        "import sys, os\n"
        "if 'default_worker.py' in ' '.join(sys.argv) or 'ray' in ' '.join(sys.orig_argv):\n"
        "    from anomaly.scoring.pipeline import Model\n"
        "    predict = Model.predict_batches\n"
        "    def kill(self, batches):\n"
        f"        if any(str(item.path) == {str(poison)!r} for b in batches for item in b):\n"
        "            os.kill(os.getpid(), 9)\n"
        "        return predict(self, batches)\n"
        "    Model.predict_batches = kill\n"
    )
    return place
