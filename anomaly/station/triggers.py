"""Triggers of parts: the PLC, a clock, a camera, a line of text, or a request."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import cv2
import numpy as np

from anomaly.errors import AnomalyError
from anomaly.station.cameras import CameraError, Picture
from anomaly.station.plc import PlcError
from anomaly.station.settings import host_and_port
from anomaly.station.station import Station

_LOOK_SECONDS = 0.003  # between reads of the PLC
_MOTION_SECONDS = 0.03  # between pictures of the camera
_SHADES = 25  # of 255, by which a pixel has changed


def triggers(station: Station) -> list[Callable[[], None]]:
    """Work of each thread that triggers parts. Raises AnomalyError if an address is taken."""
    settings = station.settings.trigger.model_dump(exclude_defaults=True)
    kinds: dict[str, Callable[[Station, Any], None]] = {
        "counter": by_plc,
        "coil": by_plc,
        "interval": by_clock,
        "motion": by_motion,
        "stdin": by_lines,
    }
    server = listening(station, settings.pop("http")).serve_forever if "http" in settings else None
    work = [partial(kinds[name], station, value) for name, value in settings.items()]
    return [*work, *filter(None, [server])]


def by_plc(station: Station, address: int) -> None:
    """Trigger parts by the PLC's counter or coil; parts that came between reads are lost."""
    plc = station.plc
    assert plc is not None
    before, looked, count, parts = station.counter, float("-inf"), None, 0
    while not station.closing.wait(_LOOK_SECONDS):
        now = time.perf_counter()
        try:
            if station.settings.trigger.counter is None:
                parts = int(plc.take(address))
            else:
                count = plc.counter(address)
                parts = steps(before, count)
        except PlcError:
            continue
        for ago in reversed(
            range(parts)
        ):  # of several, only the last is still in front of the camera
            counter = None if count is None else (count - ago) % 65536
            station.trigger(looked if ago == 0 else float("-inf"), counter)
        before, looked = count, now


def steps(before: int | None, now: int) -> int:
    """Parts between two values of a 16-bit counter; a lower value means a restart from 0."""
    ahead = 0 if before is None else (now - before) % 65536
    return ahead if ahead < 32768 else now


def by_clock(station: Station, seconds: float) -> None:
    """Trigger parts in equal intervals."""
    due = time.perf_counter()
    while not station.closing.wait(max(due - time.perf_counter(), 0)):
        station.trigger()
        due = max(due + seconds, time.perf_counter())


def by_motion(station: Station, share: float) -> None:
    """Trigger a part when enough of the first camera's picture differs from the empty place."""
    camera, empty, there = next(iter(station.cameras.values())), None, False
    while not station.closing.wait(_MOTION_SECONDS):
        picture: Future[Picture | CameraError] = Future()
        camera.wanted.put((float("inf"), picture.set_result))
        if isinstance(taken := picture.result(), CameraError):
            continue
        now = small(taken[0])
        empty = now if empty is None else empty
        changed = float(np.mean(np.abs(now - empty) > _SHADES))
        if changed > share and not there:
            station.trigger()
        there = changed > (share / 2 if there else share)
        if not there:  # the lamp may change slowly
            empty = 0.95 * empty + 0.05 * now


def small(data: bytes) -> Any:
    """An image file as (48, 64) grey."""
    grey: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE)
    return cv2.resize(grey, (64, 48), interpolation=cv2.INTER_AREA).astype(np.float32)


def by_lines(station: Station, wanted: bool) -> None:
    """Trigger a part for each line of standard input; prints a line of JSON; ends with it."""
    for _ in sys.stdin:
        part = station.trigger()
        part.done.wait()
        print(json.dumps(part.summary()), flush=True)
    station.closing.set()


def listening(station: Station, address: str) -> ThreadingHTTPServer:
    """The server that triggers a part for each POST, and answers when it is done."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.headers.get("Origin"):  # sent by a page in a browser
                self.send_error(403)
                return
            part = station.trigger()
            part.done.wait()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(part.summary()).encode())

        def log_message(self, *_: object) -> None:
            """Nothing: the record has each part."""

    try:
        return ThreadingHTTPServer(host_and_port(address, "trigger.http"), Handler)
    except OSError as error:
        raise AnomalyError(f"can't listen at trigger.http {address}: {error.strerror}") from None
