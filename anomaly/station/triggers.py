"""What says that a part is there: the PLC, a clock, a camera, a line of text, or a request."""

from __future__ import annotations

import hmac
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from anomaly.errors import AnomalyError
from anomaly.station.cameras import CameraError, Frame
from anomaly.station.plc import PlcError
from anomaly.station.settings import host_and_port

if TYPE_CHECKING:
    from anomaly.station.station import Station

TOKEN_VARIABLE = "ANOMALY_TOKEN"
_LOOK_SECONDS = 0.003  # between two looks at the PLC
_MOTION_SECONDS = 0.03  # between two looks at the camera
_SHADES = 25  # of 255, by which a pixel has changed


def triggers(station: Station) -> list[Callable[[], None]]:
    """What each thread that triggers parts does until the station closes.

    Raises:
        AnomalyError: an address can't be listened at.
    """
    settings = station.settings.trigger
    work: list[Callable[[], None]] = []
    if settings.counter is not None or settings.coil is not None:
        work.append(partial(by_plc, station))
    if settings.interval is not None:
        work.append(partial(by_clock, station, settings.interval))
    if settings.motion is not None:
        work.append(partial(by_motion, station, settings.motion))
    if settings.stdin:
        work.append(partial(by_lines, station))
    if settings.http is not None:
        work.append(listening(station, settings.http).serve_forever)
    return work


def by_plc(station: Station) -> None:
    """Read the PLC's counter or coil; what came while nobody looked is lost."""
    settings, plc = station.settings.trigger, station.plc
    assert plc is not None
    before, looked = station.counter, float("-inf")
    while not station.closing.wait(_LOOK_SECONDS):
        now = time.perf_counter()
        try:
            if settings.counter is not None:
                count = plc.counter(settings.counter)
                parts = 0 if before is None else steps(before, count)
            elif settings.coil is not None:
                count, parts = None, int(plc.take(settings.coil))
        except PlcError:
            continue
        for left in reversed(range(parts)):
            # It came after the last look, when exactly isn't known; of several only the last one
            # is still there.
            counter = None if count is None else (count - left) % 65536
            station.trigger(looked if not left else float("-inf"), counter)
        before, looked = count, now


def steps(before: int, now: int) -> int:
    """Parts from one state of a 16-bit counter to another; one that fell began anew from 0."""
    ahead = (now - before) % 65536
    return ahead if ahead < 32768 else now


def by_clock(station: Station, seconds: float) -> None:
    """A part in equal intervals."""
    due = time.perf_counter()
    while not station.closing.wait(max(due - time.perf_counter(), 0)):
        station.trigger()
        due = max(due + seconds, time.perf_counter())


def by_motion(station: Station, share: float) -> None:
    """A part when enough of the first camera's picture differs from the empty place."""
    camera, seen, there = next(iter(station.cameras.values())), None, False
    while not station.closing.wait(_MOTION_SECONDS):
        picture: Future[Frame | CameraError] = Future()
        camera.take(float("inf"), picture.set_result)
        if isinstance(frame := picture.result(), CameraError):
            continue
        now = small(frame.data)
        changed = 0.0 if seen is None else float(np.mean(np.abs(now - seen) > _SHADES))
        if changed > share and not there:
            station.trigger()
        there = changed > share if not there else changed > share / 2
        if not there:  # the lamp may change slowly
            seen = now if seen is None else 0.95 * seen + 0.05 * now


def small(data: bytes) -> Any:
    """An image file as (48, 64) grey."""
    grey: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE)
    return cv2.resize(grey, (64, 48), interpolation=cv2.INTER_AREA).astype(np.float32)


def by_lines(station: Station) -> None:
    """A part for each line of the standard input; its end ends the station."""
    for _ in sys.stdin:
        if station.closing.is_set():
            return
        station.trigger()
    station.finish()


def listening(station: Station, address: str) -> ThreadingHTTPServer:
    """The server for POST /trigger, answered once the part is done, and GET /status."""
    host, port = host_and_port(address, "trigger.http")
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token and host != "localhost" and not ip_address(host).is_loopback:
        raise AnomalyError(
            f"trigger.http {address} lets other machines trigger: set ${TOKEN_VARIABLE}, too"
        )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, station.status()) if self.path == "/status" else self.send_error(404)

        def do_POST(self) -> None:
            # No page in a browser may trigger: it says where it is from.
            bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if self.headers.get("Origin") or not hmac.compare_digest(bearer, token):
                self.send_error(403)
            elif self.path != "/trigger":
                self.send_error(404)
            else:
                part = station.trigger()
                part.done.wait()
                self._answer(200, part.summary())

        def _answer(self, status: int, values: dict[str, Any]) -> None:
            body = json.dumps(values).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise AnomalyError(
            f"trigger.http {address} can't be listened at: {error.strerror}"
        ) from None
    server.daemon_threads = True
    return server
