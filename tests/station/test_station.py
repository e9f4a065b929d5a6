"""Stations as processes: what they say to a PLC, and what the record says of it."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Command
from lines import Line, line

pytest.importorskip("pymodbus")
FAKE_CAMERA = "arv-fake-gv-camera-0.8"
PARTS, KILLS = (
    int(os.environ.get(f"STATION_{n}", least)) for n, least in (("PARTS", 400), ("KILLS", 3))
)


@pytest.mark.parametrize(
    "trigger", [{"counter": 10}, pytest.param({"coil": 0}, marks=pytest.mark.slow)]
)
def test_each_part_of_a_plc_has_its_verdict(
    tmp_path: Path, run_folder: Path, product: Path, trigger: dict[str, int]
) -> None:
    settings = {"trigger": trigger, "csv": str(tmp_path / "parts.csv"), "part_seconds": 60}
    with line(tmp_path, str(product / "test"), model=str(run_folder), **settings) as made:
        made.start_plc(0.5)
        made.start_station()
        made.until(partial(made.has, 8))
        made.end_parts()
        made.end_station()
        rows = made.agree()
    # The folder's files in turn: three good parts, three with a spot; the first was the warm-up's.
    judged = [*["good"] * 2, *["reject"] * 3, *["good"] * 3, *["reject"] * 3][: len(rows)]
    assert [row["verdict"] for row in rows] == judged
    assert made.said()[-1] == "ready 0"
    lines = (tmp_path / "parts.csv").read_text().splitlines()
    assert [text.split(",")[3] for text in lines] == ["verdict", *judged]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"part_second": 1}, "line.yaml: unknown key 'part_second'; did you mean 'part_seconds'"),
        ({"cameras": {"a": {"source": "x", "model_": 1}}}, "'cameras.a.model_'; did you mean 'mo"),
        ({"cameras": {"a": {}}}, "line.yaml: cameras.a.source is missing"),
        ({"part_seconds": 0}, "part_seconds is 0: must be above 0"),
        (
            {"trigger": {}},
            "trigger is empty, so no part would be noticed; give one of counter, coil",
        ),
        ({"trigger": {"coil": 1, "counter": 9}}, "trigger.counter or trigger.coil, not both"),
        ({"trigger": {"counter": 4}}, "and some are the same; move one"),
        ({"trigger": {"http": "0.0.0.0:80"}}, "must be 127.0.0.1:PORT"),
        ({"plc": {"address": "10.0.0.1"}}, "must be HOST:PORT, for example 192.168.0.10:502"),
        ({"model": "nowhere"}, "no model at nowhere"),
        ({"webhook": "ftp://x"}, "webhook takes an address that begins with http://"),
        ({}, "no PLC answers at 127.0.0.1:"),
        ({"plc": None, "trigger": {"interval": 1}}, "there is no camera, folder or file"),
    ],
)
def test_what_a_station_refuses(
    tmp_path: Path, run_folder: Path, command: Command, settings: dict[str, object], said: str
) -> None:
    config = Line(tmp_path, "camera 1", **{"model": str(run_folder)} | settings).config
    code, out, err = command("station", ["--config", config, "--device", "cpu"])
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_camera_compares_with_the_training_images(
    tmp_path: Path, run_folder: Path, product: Path, command: Command
) -> None:
    dark = cv2.imread(str(product / "test" / "good" / "000.png")) // 4
    dark[:48, :30] = 255  # an eighth of the picture
    cv2.imwrite(str(tmp_path / "dark.png"), dark)
    output = tmp_path / "taken.png"
    code, out, _ = command("camera", [tmp_path, "--output", output, "--model", run_folder])
    assert code == 0
    assert out.startswith("120 × 96, 8 bits\n")
    assert "12.50% of the pixels clipped, 0.00% black" in out
    assert "review, score" in out
    assert "far outside the training images" in out
    np.testing.assert_array_equal(cv2.imread(str(output)), dark)


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
    seed = random.randrange(1000)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with (
        camera(tmp_path, product) as (source, unplug, plug),
        line(tmp_path, source, model=str(run_folder), part_seconds=0.4) as made,
    ):

        def station_dies() -> None:
            made.kill("station")
            made.start_station()

        def plc_restarts() -> None:
            made.kill("plc")
            time.sleep(rng.uniform(0, 1))
            made.start_plc(0.2)

        def camera_goes() -> None:
            unplug()
            time.sleep(2)
            plug()

        made.start_plc(0.2)
        made.start_station()
        made.until(partial(made.has, 10))
        events = [station_dies] * KILLS + [plc_restarts, camera_goes] * (KILLS // 2 + 1)
        rng.shuffle(events)
        gap = PARTS // (3 * len(events))
        for event in events:
            time.sleep(rng.uniform(0, 0.2))  # at any point of a part's way
            event()
            made.until(partial(made.has, made.parts() + rng.randrange(gap, 2 * gap)))
        made.until(partial(made.has, PARTS))
        made.end_parts()
        made.end_station()
        rows = made.agree()
    states = [row["state"] for row in rows]
    reasons = {row["line"]["reason"].partition(":")[0] for row in rows if row["state"] == "lost"}
    print({state: states.count(state) for state in set(states)}, reasons)
    assert states.count("sent") > 50
    assert "lost" in states
