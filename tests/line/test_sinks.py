"""Rows are sent on, each at least once and in order, whatever becomes of either side."""

from __future__ import annotations

import base64
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Command
from receivers import Broker, Receiver

from anomaly.errors import AnomalyError
from anomaly.inference.rows import Row
from anomaly.line import sinks
from anomaly.line.record import Answer, Record
from anomaly.line.sinks import Mqtt, NotTakenError, Outbox, Sink, Webhook

ROW = Row(
    path="part.png",
    image_sha256="0" * 64,
    status="ok",
    image_score=1.0,
    calibrated_score=None,
    review_threshold=1.0,
    threshold=2.0,
    verdict="good",
    heatmap="",
    model_id="0" * 16,
    software_version="0",
    threshold_label="calibrated",
    reason="",
    time="2026-01-01T00:00:00.000+00:00",
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "_FIRST_SECONDS", 0.02)
    monkeypatch.setattr(sinks, "_LONGEST_SECONDS", 0.1)
    monkeypatch.setattr(sinks, "_SECONDS", 1.0)


def until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def part(path: str) -> Answer:
    return Answer("disc", replace(ROW, path=path), b"")


def webhook(port: int) -> Webhook:
    return Webhook(f"http://127.0.0.1:{port}/parts")


def mqtt(port: int) -> Mqtt:
    return Mqtt(f"mqtt://ada:pass%20word@127.0.0.1:{port}/factory/line%201")


@pytest.mark.parametrize(("kind", "sink"), [(Receiver, webhook), (Broker, mqtt)])
def test_rows_arrive_in_order_though_the_receiver_comes_and_goes(
    kind: type[Receiver] | type[Broker], sink: Callable[[int], Sink], tmp_path: Path
) -> None:
    with closing(Record(tmp_path / "line.sqlite")) as record:
        record.add([part("before anybody asked")])
        with kind() as first, Outbox(record, sink(first.port)) as box:
            numbers = record.add([part(f"{i}.png") for i in range(5)])
            box.wake()
            until(lambda: first.ids == numbers)
        # Nobody is there; then a process ends and another one starts.
        with Outbox(record, sink(first.port)) as box:
            numbers += record.add([part("nobody")])
            box.wake()
            until(lambda: box._failed > 2)
            assert box.state() == (1, 0)
        with kind(first.port) as second, Outbox(record, sink(first.port)) as box:
            numbers += record.add([part(f"more {i}.png") for i in range(150)])
            box.wake()
            until(lambda: first.ids + second.ids == numbers)
            until(lambda: box.state() == (0, 0))
    row = second.rows[-1]
    assert (row["path"], row["model"], row["time"]) == ("more 149.png", "disc", ROW.time)


def test_a_message_that_is_not_confirmed_comes_again(tmp_path: Path) -> None:
    with closing(Record(tmp_path / "line.sqlite")) as record:
        with Broker(silent=True) as silent, Outbox(record, mqtt(silent.port)) as box:
            record.add([part("0.png")])
            box.wake()
            until(lambda: box._failed > 0)
            assert box.state() == (1, 0)
        with Broker(silent.port) as broker, Outbox(record, mqtt(silent.port)):
            until(lambda: broker.ids == [1])
    assert broker.topics == silent.topics == {"factory/line 1"}
    assert b"ada" in broker.users[0]
    assert b"pass word" in broker.users[0]


def test_what_a_webhook_answers_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    statuses = (503, 302, 401, 404, 429, 500, *(422,) * 5)  # the last ones mean the row itself
    with (
        caplog.at_level(logging.WARNING),
        Receiver(statuses=statuses) as receiver,
        closing(Record(tmp_path / "line.sqlite")) as record,
    ):
        url = f"http://ada:pass%20word@127.0.0.1:{receiver.port}/in/secret-path?key=secret-key"
        with Outbox(record, Webhook(url)) as box:
            record.add([part("0.png"), part("1.png")])
            box.wake()
            until(lambda: receiver.ids == [2])
            until(lambda: box.state() == (0, 1))
    assert len(receiver.headers) == len(statuses) + 1
    assert receiver.rows[0]["target"] == "/in/secret-path?key=secret-key"
    basic = base64.b64encode(b"ada:pass word").decode()
    assert {one["authorization"] for one in receiver.headers} == {f"Basic {basic}"}
    keys = [one["idempotency-key"] for one in receiver.headers]
    assert set(keys[:-1]) == {f"1@{ROW.time}"}
    assert keys[-1] == f"2@{ROW.time}"
    assert f"127.0.0.1:{receiver.port} doesn't accept parts: it answers 503" in caplog.text
    assert "refused part 1: it answers 422" in caplog.text
    assert "secret" not in caplog.text
    assert "word" not in caplog.text


def test_a_mistake_in_sending_does_not_end_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_LOOK_SECONDS", 0.1)
    sent: list[bytes] = []

    class Mistaken:
        shown = name = "http://host:80"

        def send(self, message: bytes, key: str) -> None:
            sent.append(message)
            if len(sent) == 1:
                raise RuntimeError("secret")

        def close(self) -> None:
            pass

    with (
        closing(Record(tmp_path / "line.sqlite")) as record,
        Outbox(record, Mistaken()) as box,
    ):
        record.add([part("0.png"), part("1.png")])
        box.wake()
        until(lambda: box.state() == (0, 0))
    assert len(sent) == 3
    assert sent[0] == sent[1]
    assert "sending to http://host:80 failed: RuntimeError" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\n", b"X"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
def test_an_answer_that_drips_ends_in_time(head: bytes, piece: bytes) -> None:
    threads, begun = threading.active_count(), time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            with suppress(OSError), server.accept()[0] as line:
                line.sendall(head)
                while True:
                    line.sendall(piece)
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(NotTakenError, match="no answer within"):
            webhook(server.getsockname()[1]).send(b"{}", "1")
        assert time.monotonic() - begun < 5
        until(lambda: threading.active_count() <= threads)


def test_pauses_grow_to_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with closing(Record(tmp_path / "line.sqlite")) as record:
        box = Outbox(record, Webhook("http://127.0.0.1:9/"))
        with record.changing() as db:
            db.execute("INSERT INTO outboxes VALUES (?, 0, 0)", (box._sink.name,))
        record.add([part("0.png")])
        pauses = [box._send_next() for _ in range(9)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_addresses_that_make_no_sense(command: Command, tmp_path: Path) -> None:
    for url in ("line", "ftp://host/", "http://", "http://host:port/", "http://a b/", "http://é/",
                "http://host/\nX: y", "http://a..b/x", f"http://{'a' * 64}/"):  # fmt: skip
        with pytest.raises(AnomalyError, match="--webhook takes an address"):
            Webhook(url)
    for url in ("mqtt://host", "mqtt://host/", "mqtt://host/a/%23", "mqtt://host/a?b"):
        with pytest.raises(AnomalyError, match="topic"):
            Mqtt(url)
    # A password may change without anything being lost; another path is another receiver.
    urls = ("https://host/in", "https://ada:old@host/in?key=old", "https://b:new@host/in?key=new")
    names = [Webhook(url).name for url in (*urls, "https://host/in2")]
    assert len(set(names[:3])) == 1
    assert names[3] != names[0]
    assert not any("old" in name for name in names)
    assert Webhook("https://host").name == Webhook("https://host/").name
    models = tmp_path / "models"
    code, _, err = command("serve", ["--models", models, "--mqtt", "mqtt://user:secret@host"])
    assert (code, "topic" in err, "secret" in err) == (2, True, False)
