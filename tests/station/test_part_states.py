"""What becomes of a part: cameras and models that the test answers for, and a PLC that it is."""

from __future__ import annotations

import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

pytest.importorskip("pymodbus")

from anomaly.errors import OutputError
from anomaly.imaging.read import read_image
from anomaly.inference.rows import Row
from anomaly.line.record import Record
from anomaly.line.sinks import CsvFile, Outbox
from anomaly.station.cameras import CameraError, CameraThread, Stream, as_file, open_camera
from anomaly.station.settings import StationSettings
from anomaly.station.station import Part, Station
from anomaly.station.triggers import by_motion, listening, steps

PATIENT, SHORT = 60.0, 3.0  # seconds for a part


class Plc:
    """Says what it was told; `away` while nobody answers."""

    def __init__(self, last: tuple[int, int] = (0, 0)) -> None:
        self.told: list[tuple[int, int]] = []
        self.away, self._last = "", last

    def last(self) -> tuple[int, int]:
        return self.told[-1] if self.told else self._last

    def say(self, code: int, number: int, until: float) -> str:
        self.told += [] if self.away else [(code, number)]
        return self.away

    def work(self, closing: threading.Event) -> None:
        pass

    close = connect = lambda self: None


def row(path: str, verdict: str) -> Row:
    values = dict.fromkeys((field.name for field in fields(Row)), "")
    return Row(**values | {"path": path, "verdict": verdict, "image_score": 1.0})


@contextmanager
def running(
    folder: Path, judge: Callable[[str], str | None], plc: Plc | None = None, **settings: Any
) -> Iterator[Station]:
    """A station with cameras `a` and `b`; `judge` takes a picture's name, None never answers."""
    given = {
        "model": "m",
        "cameras": {"a": {"source": "a"}, "b": {"source": "b"}},
        "trigger": {"interval": 1000.0},
        "part_seconds": PATIENT,
        "record": str(folder / "line.sqlite"),
    }

    def submit(data: bytes, name: str, _: object) -> Future[Any]:
        done: Future[Any] = Future()
        if name.startswith("start/") or (verdict := judge(name)):
            said = row(name, "good" if name.startswith("start/") else str(verdict))
            done.set_result(SimpleNamespace(answer=SimpleNamespace(row=said)))
        slot.asked.append(done)
        return done

    record = Record(folder / "line.sqlite")
    slot = SimpleNamespace(name="m", unusable="", submit=submit, asked=[])
    made = StationSettings.model_validate(given | settings)
    station = Station(made, record, dict.fromkeys(("a", "b"), slot))  # type: ignore[arg-type]
    station.plc = plc  # type: ignore[assignment]
    for camera in station.cameras.values():
        camera._reopen = Pictures
    station.check()
    station.start([])
    try:
        yield station
    finally:
        station.close()
        record.close()


class Pictures:
    """A camera; `gone` while it is unplugged."""

    gone = False

    def grab(self) -> tuple[bytes, str]:
        if Pictures.gone:
            raise CameraError("unplugged")
        return b"", ""

    check = close = lambda self: None


def done(part: Part) -> tuple[str, str, int | None]:
    assert part.done.wait(60)
    return part.state, part.verdict, part.sent


def recorded(folder: Path) -> list[tuple[Any, ...]]:
    record = Record(folder / "line.sqlite")
    try:
        return record.read("SELECT id, state, verdict, sent FROM triggers ORDER BY id", ())
    finally:
        record.close()


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("good", "good", ("sent", "good", 1)),
        ("good", "review", ("sent", "review", 2)),
        ("reject", "good", ("sent", "reject", 3)),
        ("reject", None, ("sent", "reject", 3)),  # known without the other one
        ("good", None, ("late", "", 3)),
    ],
)
def test_a_parts_verdict_is_that_of_all_its_pictures(
    tmp_path: Path, a: str, b: str | None, expected: tuple[str, str, int]
) -> None:
    seconds = SHORT if expected[0] == "late" else PATIENT

    def judge(name: str) -> str | None:
        return a if name.endswith("a") else b

    with running(tmp_path, judge, plc := Plc(), part_seconds=seconds) as station:
        begun = time.perf_counter()
        assert done(station.trigger()) == expected
        assert (time.perf_counter() - begun >= seconds) == (expected[0] == "late")
    assert plc.told == [(expected[2], 1)]
    assert recorded(tmp_path) == [(1, *expected)]


def test_a_verdict_after_the_deadline_changes_nothing(tmp_path: Path) -> None:
    settings = {"without_verdict": "nothing", "part_seconds": 0.1}
    with running(tmp_path, lambda name: None, plc := Plc(), **settings) as station:
        part = station.trigger()
        assert done(part) == ("late", "", None)
        for future in station._slots["a"].asked:  # type: ignore[attr-defined]
            if not future.done():
                future.set_result(SimpleNamespace(answer=SimpleNamespace(row=row("x", "good"))))
    assert plc.told == []
    assert recorded(tmp_path) == [(1, "late", "", None)]


def test_a_camera_that_is_away_loses_parts_and_comes_back(tmp_path: Path) -> None:
    with running(tmp_path, lambda name: "good", plc := Plc()) as station:
        Pictures.gone = True
        try:
            part = station.trigger()
            assert done(part) == ("lost", "", 3)
            assert part.reason == "a: unplugged; b: unplugged"
            assert "camera a: unplugged" in station.trouble()
        finally:
            Pictures.gone = False
        end = time.monotonic() + 60
        while station.trouble():
            assert time.monotonic() < end
            time.sleep(0.05)
        assert done(station.trigger()) == ("sent", "good", 1)
    assert plc.told == [(3, 1), (1, 2)]


def test_a_part_that_came_while_nobody_looked_is_never_told(tmp_path: Path) -> None:
    with running(tmp_path, lambda name: "good", plc := Plc()) as station:
        assert done(station.trigger(float("-inf"), 7))[0] == "lost"
        assert done(station.trigger(time.perf_counter(), 8)) == ("sent", "good", 1)
    assert plc.told == [(1, 2)]


def test_without_a_plc_that_confirms_a_part_is_lost(tmp_path: Path) -> None:
    with running(tmp_path, lambda name: "good", plc := Plc()) as station:
        plc.away = "the PLC doesn't answer"
        part = station.trigger()
        assert done(part) == ("lost", "good", None)
        assert part.reason == plc.away


def test_numbers_and_open_parts_survive_a_kill(tmp_path: Path) -> None:
    record = Record(tmp_path / "line.sqlite")
    with record.changing() as db:
        for number, state, verdict in (
            (4, "sent", "good"),
            (5, "judged", "good"),
            (6, "taken", ""),
        ):
            line = "{}" if state == "sent" else ""
            values = (number, "", 40 + number, state, verdict, 1 if line else None, "m", line)
            db.execute("INSERT INTO triggers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
    record.close()
    with running(tmp_path, lambda name: "reject", Plc(last=(1, 5))) as station:
        assert station.counter == 46
        assert done(station.trigger()) == ("sent", "reject", 3)
    assert recorded(tmp_path) == [
        (4, "sent", "good", 1),
        (5, "sent", "good", 1),  # the PLC has its number
        (6, "lost", "", None),
        (7, "sent", "reject", 3),
    ]


def test_a_part_that_cant_be_recorded_has_no_picture_and_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[str] = []
    with running(tmp_path, lambda name: judged.append(name) or "good", plc := Plc()) as station:

        def full() -> None:
            raise OutputError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(station._record, "changing", full)
            assert done(station.trigger()) == ("lost", "", 3)
        assert done(station.trigger()) == ("sent", "good", 1)
    assert sorted(judged) == ["2/a", "2/b"]
    assert plc.told == [(3, 1), (1, 2)]


def test_receivers_get_each_part_once_and_in_order(tmp_path: Path) -> None:
    class Receiver:
        shown = name = "receiver"
        ids: queue.SimpleQueue[int] = queue.SimpleQueue()

        def send(self, message: bytes, key: str) -> None:
            self.ids.put(json.loads(message)["id"])

        def close(self) -> None:
            pass

    with running(tmp_path, lambda name: "good") as station:
        station.trigger()
        with Outbox(station._record, Receiver(), "triggers") as outbox:
            station._outboxes = [outbox]
            parts = [station.trigger() for _ in range(5)]
            assert [Receiver.ids.get(timeout=60) for _ in parts][-1] == 6


def test_a_csv_file_has_no_part_twice(tmp_path: Path) -> None:
    file = tmp_path / "parts.csv"
    for first in (1, 2):  # the second process sends part 2 again
        csv = CsvFile(file)
        for number in (first, first + 1):
            part = Part(number, reason="a, b").summary() | {"model": "m"}
            csv.send(json.dumps(part).encode(), "")
    assert [line.partition(",")[0] for line in file.read_text().splitlines()] == ["id", *"123"]


@pytest.mark.parametrize(
    ("before", "now", "parts"), [(None, 9, 0), (5, 5, 0), (5, 8, 3), (65534, 1, 3), (400, 2, 2)]
)
def test_steps_of_a_counter(before: int | None, now: int, parts: int) -> None:
    assert steps(before, now) == parts


def test_motion_counts_parts(tmp_path: Path) -> None:
    """Twelve parts pass in front of a noisy belt whose lamp grows brighter all the time."""
    rng = np.random.default_rng(0)
    with running(tmp_path, lambda name: "good") as station:
        pictures = []
        for step in range(240):
            picture = np.full((120, 160), 60 + step / 4) + rng.normal(0, 5, (120, 160))
            if 5 <= step % 20 < 13:
                cv2.circle(picture, (20 * (step % 20 - 4), 60), 30, 180, -1)
            pictures.append(as_file(np.clip(picture, 0, 255).astype(np.uint8)))

        class Belt:
            def put(self, wanted: tuple[float, Callable[[Any], None]]) -> None:
                wanted[1]((pictures.pop(0), ""))
                if not pictures:
                    station.closing.set()

        seen = SimpleNamespace(
            closing=station.closing,
            trigger=lambda: parts.append(1),
            cameras={"a": SimpleNamespace(wanted=Belt())},
        )
        parts: list[int] = []
        by_motion(seen, 0.05)  # type: ignore[arg-type]
        assert len(parts) == 12


def test_a_request_is_a_part_but_none_of_a_page(tmp_path: Path) -> None:
    with running(tmp_path, lambda name: "review") as station:
        server = listening(station, "127.0.0.1:0")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/trigger"
        with urllib.request.urlopen(address, data=b"") as answer:
            part = json.load(answer)
        assert (part["id"], part["verdict"], len(part["views"])) == (1, "review", 2)
        page = urllib.request.Request(address, b"", {"Origin": "http://evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(page)
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("shape", [(30, 41), (30, 41, 3)])
def test_a_cameras_pixels_are_kept(dtype: type, shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, np.iinfo(dtype).max + 1, shape).astype(dtype)
    image = read_image(as_file(pixels))
    bgr = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, 2)
    np.testing.assert_array_equal(image.pixels[..., ::-1], bgr)
    assert image.full_scale == np.iinfo(dtype).max


def test_a_stream_gives_the_second_picture_to_come_until_it_ends() -> None:
    come: queue.SimpleQueue[int] = queue.SimpleQueue()

    def read() -> tuple[bool, Any]:
        number = come.get()
        return number > 0, np.full((8, 8), number, np.uint8)

    capture = SimpleNamespace(isOpened=lambda: True, read=read, release=lambda: None)
    stream = Stream(capture, "usb:0")  # type: ignore[arg-type]
    come.put(1)
    while stream._frames < 1:
        time.sleep(0.01)
    threading.Timer(0.3, lambda: [come.put(number) for number in (2, 3)]).start()
    assert read_image(stream.grab()[0]).pixels.max() == 3
    come.put(0)
    while not stream._ended:
        time.sleep(0.01)
    with pytest.raises(CameraError, match="usb:0 has stopped sending pictures"):
        stream.check()
    with pytest.raises(CameraError, match="usb:0 has sent no picture within 2 s"):
        stream.grab()


def test_a_video_begins_anew_at_its_end(tmp_path: Path) -> None:
    file = str(tmp_path / "belt.avi")
    video = cv2.VideoWriter(file, cv2.VideoWriter.fourcc(*"MJPG"), 10, (64, 48))
    for grey in (50, 200):
        video.write(np.full((48, 64, 3), grey, np.uint8))
    video.release()
    camera = open_camera(file)
    greys = [read_image(camera.grab()[0]).pixels.mean() for _ in range(5)]
    np.testing.assert_allclose(greys, [50, 200, 50, 200, 50], atol=4)


class Mjpeg(BaseHTTPRequestHandler):
    """A network camera: a stream of JPEG files, each a grey brighter than the last one."""

    grey, cut = 0, threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        while not self.cut.wait(0.03):
            Mjpeg.grey = min(Mjpeg.grey + 1, 250)
            picture = cv2.imencode(".jpg", np.full((48, 64, 3), self.grey, np.uint8))[1].tobytes()
            head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(picture)}\r\n\r\n"
            with suppress(OSError):
                self.wfile.write(head.encode() + picture + b"\r\n")

    def log_message(self, *_: object) -> None:
        pass


def test_a_network_camera_is_opened_again_after_its_stream_was_cut() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mjpeg)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    source = f"http://eva:secret@127.0.0.1:{server.server_address[1]}/video"
    camera = CameraThread("top", partial(open_camera, source))

    def taken() -> float | CameraError:
        picture: Future[Any] = Future()
        camera.wanted.put((float("inf"), picture.set_result))
        result = picture.result(60)
        return result if isinstance(result, CameraError) else read_image(result[0]).pixels.mean()

    first = read_image(camera.first()[0]).pixels.mean()
    work = threading.Thread(target=camera.work)
    work.start()
    try:
        assert first < (second := taken())
        Mjpeg.cut.set()
        while not isinstance(gone := taken(), CameraError):
            pass
        assert camera.trouble
        assert "secret" not in str(gone)
        Mjpeg.cut.clear()
        while isinstance(again := taken(), CameraError):
            time.sleep(0.1)
        assert second < again
        assert not camera.trouble
    finally:
        Mjpeg.cut.set()
        camera.wanted.put(None)
        work.join(60)
        server.shutdown()
        server.server_close()
