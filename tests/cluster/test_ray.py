"""The same job on Ray's actors: one table, whatever is killed."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import PYTHONPATH, Command, write_part

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's own


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, some of them cut short, in chunks of eight."""
    from anomaly.cli import main

    folder = tmp_path_factory.mktemp("archive")
    for i in range(60):
        write_part(folder / "images" / f"{i:03}.png", i, mark=(30, 50) if i % 9 == 0 else None)
    data = (folder / "images" / "000.png").read_bytes()
    for i in range(3):
        (folder / "images" / f"cut{i}.png").write_bytes(data[: 300 + 100 * i])
    file = folder / "manifest.parquet"
    arguments = ["--input", str(folder / "images"), "--chunk", "8", "--output", str(file)]
    assert main(["manifest", *arguments]) == 0
    return file


def _arguments(manifest: Path, run: Path, output: Path, *more: object) -> list[str]:
    first = ["--model", run, "--manifest", manifest, "--output", output, "--device", "cpu"]
    return [*map(str, first), "--threads", "1", *map(str, more)]


@pytest.fixture(scope="module")
def expected(manifest: Path, run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The table of one process."""
    from anomaly.cli import main

    output = tmp_path_factory.mktemp("one") / "out"
    assert main(["infer", *_arguments(manifest, run_folder, output)]) == 0
    return _joined(manifest, output)


def _joined(manifest: Path, output: Path, code: int = 3) -> bytes:
    from anomaly.cli import main

    table = output.parent / "joined.csv"
    assert main(["merge-results", str(manifest), str(output), "--output", str(table)]) == code
    return table.read_bytes()


def _infer(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "anomaly", "infer", *arguments]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_WAIT_POLICY": "passive"}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _said(process: "subprocess.Popen[str]", code: int = 0, seconds: float = 400) -> str:
    with process:
        out, err = process.communicate(timeout=seconds)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out + err


@pytest.mark.slow
def test_workers_on_this_machine_make_the_table_of_one_process(
    manifest: Path, run_folder: Path, expected: bytes, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    arguments = _arguments(manifest, run_folder, output, "--ray", "local", "--workers", 2)
    assert "60 of 63 images scored" in _said(_infer(*arguments))
    assert _joined(manifest, output) == expected
    assert "8 of 8 chunks already; add --resume" in _said(_infer(*arguments), 2)


@pytest.mark.slow
def test_workers_tell_products_apart_as_one_process_does(
    product_runs: Path, two_products: Path, tmp_path: Path, command: Command
) -> None:
    file, tables = tmp_path / "manifest.parquet", []
    inputs = [two_products / product / "test" for product in ("disc", "stripes")]
    assert command("manifest", ["--input", *inputs, "--chunk", 4, "--output", file])[0] == 0
    for more in ((), ("--ray", "local", "--workers", 2)):
        output = tmp_path / str(len(more)) / "out"
        assert "12 of 12" in _said(_infer(*_arguments(file, product_runs, output, *more)))
        tables.append(_joined(file, output, 0))
    assert tables[0] == tables[1]
    assert [tables[1].count(f",{one}\n".encode()) for one in ("disc", "stripes")] == [6, 6]


def test_what_does_not_go_together(
    manifest: Path, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    def err(*more: str) -> str:
        code, _, said = command("infer", _arguments(manifest, run_folder, tmp_path / "o", *more))
        assert code == 2
        return said

    assert "--shard can't be given with --ray" in err("--ray", "local", "--shard", "0/2")
    assert "--workers needs a Ray cluster" in err("--workers", "2")
    assert "--workers is 0" in err("--ray", "local", "--workers", "0")
    plain = ["--model", run_folder, "--input", manifest.parent, "--output", tmp_path / "o"]
    code, _, said = command("infer", [*plain, "--ray", "local"])
    assert (code, "--ray needs a manifest" in said) == (2, True)


@pytest.mark.slow
def test_what_is_killed_costs_nothing(
    manifest: Path, run_folder: Path, expected: bytes, tmp_path: Path
) -> None:
    """Actors and the driver by SIGKILL at random points, ten times each, then --resume."""
    rng = random.Random(0)
    for turn in range(20):
        output = tmp_path / f"{turn}" / "out"
        more = ("--ray", "local", "--workers", 2, "--resume")
        with _infer(*_arguments(manifest, run_folder, output, *more)) as process:
            _wait_for_parts(output, rng.randrange(1, 4), process)
            if turn % 2:
                for actor in _actors_below(process.pid)[: rng.randrange(1, 3)]:
                    os.kill(actor, signal.SIGKILL)
                assert process.wait(400) == 0
            else:
                process.kill()
        if turn % 2 == 0:
            _said(_infer(*_arguments(manifest, run_folder, output, *more)))
        assert _joined(manifest, output) == expected


def _wait_for_parts(output: Path, count: int, process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 300
    while len(list(output.glob("results.parts/*.parquet"))) < count:
        assert process.poll() in (None, 0)
        assert time.monotonic() < end
        time.sleep(0.05)


def _actors_below(pid: int) -> list[int]:
    """Ray's actor processes that a driver has started, by way of its node."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True)
    below, actors = {pid}, []
    for line in sorted(listed.stdout.splitlines(), key=lambda line: int(line.split()[0])):
        process, parent, args = line.split(maxsplit=2)
        if int(parent) in below:
            below.add(int(process))
            if "_Scorer" in args:
                actors.append(int(process))
    return actors


@pytest.mark.slow
def test_nodes_that_die_cost_nothing(
    manifest: Path, run_folder: Path, expected: bytes, tmp_path: Path
) -> None:
    """One of two worker nodes at a random point, ten times; another takes its place afterwards."""
    from ray.cluster_utils import Cluster

    rng = random.Random(1)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        for turn in range(10):
            output = tmp_path / f"{turn}" / "out"
            more = ("--ray", cluster.address, "--resume")
            with _infer(*_arguments(manifest, run_folder, output, *more)) as process:
                _wait_for_parts(output, rng.randrange(1, 4), process)
                cluster.remove_node(nodes.pop(rng.randrange(2)), allow_graceful=False)
                _said(process)
            assert _joined(manifest, output) == expected
            nodes.append(cluster.add_node(num_cpus=1))
    finally:
        cluster.shutdown()


@pytest.mark.slow
def test_nodes_come_and_go_and_poison_is_alone(
    manifest: Path,
    run_folder: Path,
    expected: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A real head and two worker nodes; one node is killed; one image kills its process."""
    from ray.cluster_utils import Cluster

    poison = manifest.parent / "images" / "017.png"
    monkeypatch.setenv("PYTHONPATH", f"{_poisoning(tmp_path, [poison])}:{PYTHONPATH}")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        output = tmp_path / "out"
        more = ("--ray", cluster.address, "--resume")
        arguments = _arguments(manifest, run_folder, output, *more)
        with subprocess.Popen(
            [sys.executable, "-m", "anomaly", "infer", *arguments],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            _wait_for_parts(output, 2, process)
            cluster.remove_node(nodes[0], allow_graceful=False)
            said = _said(process, seconds=500)
        assert "59 of 63 images scored" in said
        assert "4 failed" in said or ("3 unreadable" in said and "1 failed" in said)
    finally:
        cluster.shutdown()
    rows = {line.split(",")[0]: line for line in _joined(manifest, output).decode().splitlines()}
    before = {line.split(",")[0]: line for line in expected.decode().splitlines()}
    assert "crashed" in rows.pop(str(poison))
    before.pop(str(poison))
    # What shares a batch with the poison is scored in a smaller one.
    assert rows.keys() == before.keys()
    assert sum(rows[name] != before[name] for name in rows) <= 8


@pytest.mark.slow
def test_twenty_thousand_images_on_two_nodes(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in a hundred is damaged, three kill their process: each has its row as before."""
    from ray.cluster_utils import Cluster

    from anomaly.cli import main

    folder = tmp_path / "images"
    for i in range(200):
        write_part(folder / f"{i:05}.png", i, mark=(30, 50) if i % 9 == 0 else None)
    originals = [(folder / f"{i:05}.png").read_bytes() for i in range(200)]
    damaged = {i for i in range(20_000) if i % 100 == 37}
    for i in range(20_000):
        data = originals[i % 200]
        (folder / f"{i:05}.png").write_bytes(data[: 200 + i % 300] if i in damaged else data)
    poison = [folder / f"{i:05}.png" for i in (1234, 9876, 17_000)]
    manifest = tmp_path / "manifest.parquet"
    where = ["--input", str(folder), "--chunk", "500", "--output", str(manifest)]
    assert main(["manifest", *where]) == 0
    started = time.monotonic()
    one = [*_arguments(manifest, run_folder, tmp_path / "one" / "out"), "--heatmap", "none"]
    assert main(["infer", *one]) == 0
    alone = time.monotonic() - started
    monkeypatch.setenv("PYTHONPATH", f"{_poisoning(tmp_path, poison)}:{PYTHONPATH}")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "200")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        more = ("--ray", cluster.address, "--heatmap", "none")
        started = time.monotonic()
        output = tmp_path / "many" / "out"
        said = _said(_infer(*_arguments(manifest, run_folder, output, *more)), seconds=3000)
        assert "19797 of 20000 images scored" in said
        assert "200 unreadable, 3 failed" in said
        print(f"one process {alone:.0f} s, two nodes {time.monotonic() - started:.0f} s")
    finally:
        cluster.shutdown()
    rows, before = (
        {line.split(",")[0]: line for line in _joined(manifest, place).decode().splitlines()[1:]}
        for place in (output, tmp_path / "one" / "out")
    )
    assert list(rows) == list(before)
    assert len(rows) == 20_000
    for path in map(str, poison):
        assert "crashed" in rows.pop(path)
        before.pop(path)
    # What shared a batch with the poison is scored in another one: last digits.
    different = [path for path in rows if rows[path] != before[path]]
    assert len(different) <= 3 * 8
    for path in different:
        pair = [table[path].split(",") for table in (rows, before)]
        assert [cell for cell in pair[0] if "." not in cell] == [
            cell for cell in pair[1] if "." not in cell
        ]


def _poisoning(folder: Path, poison: Sequence[Path]) -> Path:
    """A folder whose `sitecustomize` ends a worker as soon as it is to load one of some images."""
    place = folder / "poison"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        "import sys, os\n"
        "if 'default_worker.py' in ' '.join(sys.argv) or 'ray' in ' '.join(sys.orig_argv):\n"
        "    from anomaly.imaging import decoder_pool\n"
        "    load = decoder_pool.Decoders.load_all\n"
        "    def kill(self, items, *more):\n"
        "        def each():\n"
        "            for index, path in items:\n"
        f"                if str(path) in {[str(path) for path in poison]!r}:\n"
        "                    os.kill(os.getpid(), 9)\n"
        "                yield index, path\n"
        "        return load(self, each(), *more)\n"
        "    decoder_pool.Decoders.load_all = kill\n"
    )
    return place
