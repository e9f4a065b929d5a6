"""`train --ray` and `infer --ray` on real Ray processes, one of which is killed each time."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from conftest import Command, result_files, train_arguments, write_part, write_product
from safetensors.torch import load_file

pytest.importorskip("ray")
psutil = pytest.importorskip("psutil")  # comes with Ray
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # warnings of Ray's own


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """One session of Ray for all tests."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_raylet_start_wait_time_s", "200")  # of a machine that has much to do
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        yield cluster.address
        cluster.shutdown()


def killing(kind: str, happened: Callable[[], Any]) -> list[int]:
    """Kill a worker of a class, from a thread, once something has happened; lists those killed."""
    killed: list[int] = []

    def act() -> None:
        while not killed:
            time.sleep(0.02)
            for one in psutil.Process().children(recursive=True) if happened() else []:
                with suppress(psutil.Error):
                    if not killed and kind in " ".join(one.cmdline()):
                        one.kill()
                        killed.append(one.pid)

    Thread(target=act, daemon=True).start()
    return killed


def test_a_killed_worker_changes_nothing_about_the_model(
    address: str, tmp_path: Path, command: Command
) -> None:
    product = write_product(tmp_path / "disc", n_train=60)
    assert command("train", train_arguments(product, tmp_path / "one"))[0] == 0
    output = tmp_path / "two"
    killed = killing("ShardWorker", lambda: list(output.glob("features-*/*")))
    arguments = train_arguments(product, output)
    code, _, err = command("train", [*arguments, "--ray", address])
    assert code == 0, err
    assert killed
    here, there = (
        load_file(run / "model" / "scorer.safetensors") for run in (tmp_path / "one", output)
    )
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert not list(output.glob("features-*"))


def test_a_killed_worker_changes_nothing_about_results(
    address: str, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    for i in range(150):
        write_part(tmp_path / "in" / f"{i:03}.png", i % 60, mark=(30, 50) if i % 9 == 0 else None)
    where = ["--model", run_folder, "--input", tmp_path / "in", "--device", "cpu"]
    assert command("infer", [*where, "--output", tmp_path / "one"])[0] == 0
    output = tmp_path / "two"
    killed = killing("ScoringWorker", lambda: len(list(output.glob("heatmaps/*.png"))) > 5)
    many = ["--output", output, "--ray", address]
    code, _, err = command("infer", [*where, *many])
    assert code == 0, err
    assert killed
    assert result_files(output) == result_files(tmp_path / "one")
