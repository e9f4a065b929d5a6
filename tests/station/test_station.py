"""Stations as processes: what they say to a PLC, and what the record says of it."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from lines import line

pytest.importorskip("pymodbus")
FAKE_CAMERA = "arv-fake-gv-camera-0.8"


def test_each_part_of_a_plc_has_its_verdict(
    tmp_path: Path, run_folder: Path, product: Path
) -> None:
    with line(tmp_path, run_folder, str(product / "test"), csv=str(tmp_path / "parts.csv")) as made:
        made.start_plc(0.5, 8)
        made.start_station()
        made.until(lambda: made.said()[-1].startswith("verdict 8 "))
        made.end_station()
        rows = made.agree()
    # The folder's files in turn: three good parts, three with a spot; the first was the warm-up's.
    judged = ["good", "good", "reject", "reject", "reject", "good", "good", "good"]
    assert [row["verdict"] for row in rows] == judged
    assert made.said()[-1] == "ready 0"
    lines = (tmp_path / "parts.csv").read_text().splitlines()
    assert [text.split(",")[3] for text in lines] == ["verdict", *judged]


@contextmanager
def folder_camera(
    folder: Path, product: Path
) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    there, away = folder / "camera", folder / "unplugged"
    shutil.copytree(product / "test", there)
    yield str(there), lambda: there.rename(away), lambda: away.rename(there)


@contextmanager
def fake_camera(
    folder: Path, product: Path
) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    if shutil.which(FAKE_CAMERA) is None:
        pytest.skip(f"no {FAKE_CAMERA}: apt-get install aravis-tools")
    running: list[subprocess.Popen[bytes]] = []

    def plug() -> None:
        quiet = subprocess.DEVNULL
        command = [FAKE_CAMERA, "-i", "127.0.0.1", "-s", "TEST"]
        running.append(subprocess.Popen(command, stdout=quiet, stderr=quiet))

    def unplug() -> None:
        running[-1].kill()
        running[-1].wait()

    plug()
    time.sleep(1)
    try:
        yield "genicam:Aravis-Fake-TEST", unplug, plug
    finally:
        unplug()


@pytest.mark.slow
@pytest.mark.parametrize("camera", [folder_camera, fake_camera])
def test_record_and_plc_agree_whatever_goes_away(
    tmp_path: Path, run_folder: Path, product: Path, camera: Callable
) -> None:
    most, seed = 400, random.randrange(1000)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with (
        camera(tmp_path, product) as (source, unplug, plug),
        line(tmp_path, run_folder, source, part_seconds=0.4) as made,
    ):

        def station_dies() -> None:
            made.kill("station")
            made.start_station()

        def plc_restarts() -> None:
            made.kill("plc")
            time.sleep(rng.uniform(0, 1))
            made.start_plc(0.2, most)

        def camera_goes() -> None:
            unplug()
            time.sleep(2)
            plug()

        made.start_plc(0.2, most)
        made.start_station()
        made.until(partial(made.has, 10))
        events = [station_dies] * 3 + [plc_restarts] * 2 + [camera_goes] * 2
        rng.shuffle(events)
        for event in events:
            event()
            made.until(partial(made.has, made.parts() + rng.randrange(15, 25)))
        made.until(partial(made.has, most))
        made.until(lambda: len(made.rows()) == most and made.rows()[-1]["line"])
        made.end_station()
        rows = made.agree()
    states = [row["state"] for row in rows]
    reasons = {row["line"]["reason"].partition(":")[0] for row in rows if row["state"] == "lost"}
    print({state: states.count(state) for state in set(states)}, reasons)
    assert states.count("sent") > most / 4
    assert "lost" in states
