"""Decoding processes give what decoding here gives, and outlive files that take them down."""

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
from conftest import REPOSITORY

from anomaly.errors import AnomalyError, OutputError
from anomaly.imaging import pool
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import NetworkInput, Preprocessing, UnusableImage, load
from anomaly.imaging.pool import Decoders
from anomaly.imaging.read import Decoding
from anomaly.inference.results import Pictures, PictureWriter
from anomaly.maps.anomaly_map import SourceMap
from anomaly.maps.heatmap import encode_png, heatmap


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for i in range(12):
        picture = rng.integers(0, 256, (60 + 4 * (i % 3), 80, 3), np.uint8)
        cv2.imwrite(str(tmp_path / f"{i:02}.png"), picture)
    (tmp_path / "05.png").write_bytes(b"not a picture")
    return tmp_path


@pytest.fixture
def children(
    own_pool: None,
    decoding_threads: Callable[[], "subprocess.Popen[bytes]"],
    monkeypatch: pytest.MonkeyPatch,
) -> "list[subprocess.Popen[bytes]]":
    """The processes that are started from now on."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> "subprocess.Popen[bytes]":
        started.append(decoding_threads())
        return started[-1]

    monkeypatch.setattr(pool, "start", start)
    return started


def _decoders(folder: Path, **sizing: object) -> Decoders:
    rule = {"resize": None, "crop": None, "area": 64, "multiple": 8, **sizing}
    return Decoders(
        Preprocessing(Sizing(**rule), Decoding(10**6)),
        PictureWriter(limit=1.0, output=folder / "out"),
    )


def _map(item: NetworkInput) -> SourceMap:
    scores = np.random.default_rng(item.index).random((4, 4), np.float32) * 2
    return SourceMap(scores, item.view, 1.0, 0.0, None)


@pytest.mark.usefixtures("decoding_processes")
@pytest.mark.parametrize("processes", [1, 2])
def test_the_same_as_here_in_order(
    processes: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "program_threads", lambda: processes)
    paths = sorted(folder.glob("*.png"))
    decoders = _decoders(folder)
    there = list(decoders.load_all(enumerate(paths)))
    assert [item.index for item in there] == list(range(12))
    for i, item in enumerate(there):
        here = load(i, paths[i], decoders.loading)
        if isinstance(here, UnusableImage):
            assert item == here
            continue
        assert isinstance(item, NetworkInput)
        assert (item.sha256, item.view, item.image) == (here.sha256, here.view, None)
        np.testing.assert_array_equal(item.pixels, here.pixels)
        done = decoders.finish(i, paths[i], _map(here), {"heatmap"}, f"sub/{i}.png").result()
        assert done == Pictures()
        drawn = encode_png(heatmap(here.decoded, _map(here), 1.0))
        assert (folder / "out" / "heatmaps" / "sub" / f"{i}.png").read_bytes() == drawn
        with pytest.raises(ValueError, match="another process"):
            _ = item.decoded


def test_tasks_share_the_processes_and_keep_their_images_apart(folder: Path) -> None:
    first, second = (_decoders(folder / name) for name in ("a", "b"))
    paths = [folder / "00.png", folder / "01.png"]
    items = [each.load(path) for each, path in zip((first, second), paths, strict=True)]
    for path in paths:
        path.unlink()
    for each, path, item in zip((first, second), paths, items, strict=True):
        each.finish(0, path, _map(item), {"heatmap"}, "0.png").result()
    drawn = [cv2.imread(str(folder / name / "out/heatmaps/0.png")) for name in ("a", "b")]
    assert [picture.shape[0] for picture in drawn] == [60, 64]


@pytest.mark.usefixtures("decoding_processes")
def test_files_are_looked_for_in_the_folder_of_the_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders = _decoders(folder)
    for place, usable in ((folder.parent, False), (folder, True)):
        monkeypatch.chdir(place)
        assert isinstance(decoders.load(Path("00.png")), NetworkInput) == usable


def test_images_that_are_not_kept_are_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kept in (1 << 28, 0):
        monkeypatch.setattr(pool, "_KEPT_BYTES", kept)
        worker, task = pool.Worker(), _decoders(folder)
        paths = [folder / f"{kept} {i}.png" for i in range(2)]
        for path in paths:
            path.write_bytes((folder / "00.png").read_bytes())
        items = [worker.answer(task, "load", (i, path))[1] for i, path in enumerate(paths)]
        for path in paths:
            path.unlink()
        assert isinstance(items[0], NetworkInput)
        found = worker.finish(0, paths[0], _map(items[0]), {"heatmap"}, "0.png")
        assert isinstance(found, UnusableImage) == (kept == 0)


def test_tiles_are_the_same_as_here(folder: Path) -> None:
    decoders = _decoders(folder, tile=64, overlap=8)
    path = folder / "00.png"
    there = decoders.load(path)
    here = load(0, path, decoders.loading)
    assert isinstance(there, NetworkInput)
    assert isinstance(here, NetworkInput)
    assert not there.view.whole
    assert not there.keep_image  # it is there for the tiles alone
    for mine, theirs in zip(here.tiles(2), there.tiles(2), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one.pixels, other.pixels)


def test_processes_that_are_killed_or_rest_are_replaced(
    folder: Path, children: "list[subprocess.Popen[bytes]]"
) -> None:
    path = folder / "00.png"
    decoders = _decoders(folder)
    first = decoders.load(path)
    assert isinstance(first, NetworkInput)
    children[-1].kill()
    assert decoders.finish(0, path, _map(first), {"heatmap"}).result() == Pictures()
    children[-1].kill()
    second = decoders.load(path)
    pool.rest()
    assert children[-1].wait(timeout=60) == -signal.SIGKILL
    third = decoders.load(path)  # with the same task
    pool.close()
    assert len(children) == 4
    assert all(child.returncode is not None for child in children)
    for again in (second, third):
        assert isinstance(again, NetworkInput)
        np.testing.assert_array_equal(again.pixels, first.pixels)


def test_bugs_and_full_disks_are_not_hidden(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "out").write_text("a file where the folder should be")
    path = folder / "00.png"
    decoders = _decoders(folder)
    item = decoders.load(path)
    with pytest.raises(OutputError, match="can't be written"):
        decoders.finish(0, path, _map(item), {"heatmap"}, "1.png").result()
    monkeypatch.setattr(pool, "load", Mock(side_effect=ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        decoders.load(path)
    # An image that can't be drawn is the image's fault.
    monkeypatch.setattr(PictureWriter, "write", Mock(side_effect=cv2.error("no room")))
    drawn = decoders.finish(0, path, _map(item), {"heatmap"}, "0.png").result()
    assert (drawn.status, "no room" in drawn.reason) == ("failed", True)


@pytest.mark.usefixtures("decoding_processes")
def test_processes_that_do_not_start_are_not_the_images_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> str:
        pool.close()
        with pytest.raises(AnomalyError) as caught:
            _decoders(folder).load(folder / "00.png")
        return str(caught.value)

    (folder / "cv2.py").write_text("raise ImportError('libGL.so.1: no such file')")
    monkeypatch.syspath_prepend(str(folder))
    assert re.search(r"end as soon as they are started: .*libGL\.so\.1", refused())
    no_room = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    monkeypatch.setattr(pool.subprocess, "Popen", Mock(side_effect=no_room))
    assert "no process can be started that decodes images: Resourc" in refused()


def test_processes_find_the_package_from_any_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a program in an uninstalled checkout has changed its folder meanwhile."""
    home = str(REPOSITORY)
    monkeypatch.setattr(sys, "path", ["", *(p for p in sys.path if p not in ("", home))])
    # Without the hooks of site-packages, which find an editable install.
    command = [sys.executable, "-S", "-c", pool._imports()]
    subprocess.run(command, cwd=folder, check=True)
