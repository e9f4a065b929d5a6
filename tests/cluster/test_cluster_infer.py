"""`infer --ray`: workers in threads here, on Ray in `test_ray`."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import Command, MadeOnce, result_files, write_part
from kit import table
from thread_cluster import Once, ThreadCluster

from anomaly.cluster import workers
from anomaly.inference.pipeline import RunJournal

_Infer = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two sizes in turn, some of them cut short: batches differ from the order."""
    folder = tmp_path_factory.mktemp("images")
    for i in range(24):
        file = folder / f"{i:02}.png"
        write_part(file, i, mark=(30, 50) if i % 9 == 0 else None)
        if i % 3 == 0:
            cv2.imwrite(str(file), np.ascontiguousarray(cv2.imread(str(file))[:-16]))
        if i in (5, 6, 23):
            file.write_bytes(file.read_bytes()[:300])
    return folder


@pytest.fixture
def run(
    images: Path, run_folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> _Infer:
    """`infer` into a folder, on a cluster where one is given."""

    def call(output: Path, cluster: ThreadCluster | None = None, *more: object) -> tuple[int, str]:
        @contextmanager
        def joined(*_: object) -> Iterator[ThreadCluster | None]:
            yield cluster

        monkeypatch.setattr(workers, "joined", joined)
        where = ["--model", run_folder, "--input", images, "--output", output, "--device", "cpu"]
        options = [*where, "--write", "heatmaps", "page", "masks", "regions"]
        ray = [] if cluster is None else ["--ray", "local"]
        code, out, err = command("infer", [*options, *ray, *more])
        return code, out + err

    return call


@pytest.fixture
def alone(run: _Infer, made_once: MadeOnce) -> dict[str, bytes]:
    """What one process writes."""
    return result_files(made_once("cluster/alone", lambda output: run(output)))


def test_rows_and_pictures_are_those_of_one_process_whoever_dies(
    run: _Infer, alone: dict[str, bytes], tmp_path: Path
) -> None:
    for number, cluster in enumerate((ThreadCluster(1), ThreadCluster(3, Once("predict", 2)))):
        output = tmp_path / str(number)
        assert run(output, cluster)[0] == 3
        assert result_files(output) == alone
        assert cluster.stopped == cluster.started
    code, said = run(output, ThreadCluster(1), "--resume")
    assert (code, "there is nothing to resume" in said) == (3, True)


def test_an_image_that_kills_workers_costs_its_row(
    run: _Infer, images: Path, tmp_path: Path
) -> None:
    def dies(method: str, arguments: tuple[Any, ...]) -> bool:
        return any(item.path.name == "07.png" for item in arguments[0])

    code, said = run(tmp_path / "many", ThreadCluster(2, dies))
    assert (code, "20 of 24 images scored" in said) == (3, True)
    row = table(tmp_path / "many")[7]
    assert (row["status"], "crashed (out of memory?)" in row["reason"]) == ("failed", True)
    assert row["path"] == str(images / "07.png")


def test_a_run_whose_workers_all_die_is_resumed(
    run: _Infer, alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(3))
    code, said = run(tmp_path / "many", ThreadCluster(1, lambda *_: next(calls, None) is None))
    assert code == 2
    assert "workers die even when they are given no image; see why in Ray's logs" in said
    (kept,) = re.findall(r"(\d+) of 24 images are done and kept; continue with --resume", said)
    added: list[int] = []
    add = RunJournal.add

    def counted(self: RunJournal, batch: Any) -> None:
        added.append(len(batch))
        add(self, batch)

    monkeypatch.setattr(RunJournal, "add", counted)
    assert run(tmp_path / "many", ThreadCluster(2), "--resume")[0] == 3
    assert result_files(tmp_path / "many") == alone
    assert 0 < sum(added) == 24 - int(kept)
