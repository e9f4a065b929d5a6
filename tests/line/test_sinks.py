"""Rows are sent on, each at least once and in order, whatever becomes of either side."""

from __future__ import annotations

import base64
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from conftest import Command
from kit import until
from receivers import Broker, Receiver
from running import answer

from anomaly.errors import AnomalyError
from anomaly.line import sinks
from anomaly.line.record import Answer, Record
from anomaly.line.sinks import Mqtt, NotTakenError, Outbox, Sink, Webhook


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "_FIRST_SECONDS", 0.02)
    monkeypatch.setattr(sinks, "_LONGEST_SECONDS", 0.1)


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    with closing(Record(tmp_path / "line.sqlite")) as record:
        yield record


def parts(count: int) -> list[Answer]:
    return [answer("good", number) for number in range(count)]


def webhook(port: int) -> Webhook:
    return Webhook(f"http://127.0.0.1:{port}/parts")


def mqtt(port: int) -> Mqtt:
    return Mqtt(f"mqtt://ada:pass%20word@127.0.0.1:{port}/factory/line%201")


@pytest.mark.parametrize(("kind", "sink"), [(Receiver, webhook), (Broker, mqtt)])
def test_rows_arrive_in_order_though_the_receiver_comes_and_goes(
    kind: type[Receiver] | type[Broker],
    sink: Callable[[int], Sink],
    record: Record,
    caplog: pytest.LogCaptureFixture,
) -> None:
    record.add(parts(1))  # before anybody asked
    with kind() as first, Outbox(record, sink(first.port)) as box:
        numbers = record.add(parts(5))
        box.wake()
        until(lambda: first.ids == numbers)
    # Nobody is there; then a process ends and another one starts.
    with Outbox(record, sink(first.port)) as box:
        numbers += record.add(parts(1))
        box.wake()
        until(lambda: "doesn't accept parts" in caplog.text)
        assert box.state() == (1, 0)
    with kind(first.port) as second, Outbox(record, sink(first.port)) as box:
        numbers += record.add(parts(150))
        box.wake()
        until(lambda: first.ids + second.ids == numbers)
        until(lambda: box.state() == (0, 0))
    row = second.rows[-1]
    assert (row["path"], row["model"], row["time"][:10]) == ("149.png", "disc", "2026-01-01")


def test_a_message_that_is_not_confirmed_comes_again(
    record: Record, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_SECONDS", 0.3)
    with Broker(silent=True) as silent, Outbox(record, mqtt(silent.port)) as box:
        record.add(parts(1))
        box.wake()
        until(lambda: "it doesn't confirm a message" in caplog.text)
        assert box.state() == (1, 0)
    with Broker(silent.port) as broker, Outbox(record, mqtt(silent.port)):
        until(lambda: broker.ids == [1])
    assert broker.topics == silent.topics == {"factory/line 1"}
    assert b"ada" in broker.users[0]
    assert b"pass word" in broker.users[0]


def test_what_a_webhook_answers_decides(record: Record, caplog: pytest.LogCaptureFixture) -> None:
    statuses = (503, 302, 401, 404, 429, 500, *(422,) * 6)  # 422 means the row itself
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING), Receiver(statuses=statuses) as receiver:
        url = f"http://ada:pass%20word@127.0.0.1:{receiver.port}/in/secret-path?key=secret-key"
        with Outbox(record, Webhook(url)) as box:
            record.add(parts(2))
            box.wake()
            until(lambda: receiver.ids == [2])
            until(lambda: box.state() == (0, 1))
    assert time.monotonic() - begun > 0.84  # pauses grow from 0.02 s to 0.1 s
    assert len(receiver.headers) == len(statuses) + 1
    assert receiver.rows[0]["target"] == "/in/secret-path?key=secret-key"
    basic = base64.b64encode(b"ada:pass word").decode()
    assert {one["authorization"] for one in receiver.headers} == {f"Basic {basic}"}
    keys = [one["idempotency-key"] for one in receiver.headers]
    times = [one.row.time for one in parts(2)]
    assert keys == [f"1@{times[0]}"] * 11 + [f"2@{times[1]}"] * 2  # it is tried five times
    assert f"127.0.0.1:{receiver.port} doesn't accept parts: it answers 503" in caplog.text
    assert "refused part 1: it answers 422" in caplog.text
    assert "secret" not in caplog.text
    assert "word" not in caplog.text


def test_a_mistake_in_sending_does_not_end_it(
    record: Record, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_LOOK_SECONDS", 0.1)
    sent: list[bytes] = []

    class Mistaken(Sink):
        def __init__(self) -> None:
            super().__init__("http://host", "", ("http",))

        def send(self, message: bytes, key: str) -> None:
            sent.append(message)
            if len(sent) == 1:
                raise RuntimeError("secret")

    with Outbox(record, Mistaken()) as box:
        record.add(parts(2))
        box.wake()
        until(lambda: box.state() == (0, 0))
    assert len(sent) == 3
    assert sent[0] == sent[1]
    assert "sending to http://host:80 failed: RuntimeError" in caplog.text
    assert "secret" not in caplog.text


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


@pytest.mark.parametrize(
    ("sink", "head", "more"),
    [
        *((webhook, head, b"X") for head in (b"", b"HTTP/1.1 200 OK\r\n")),
        *((sink, b"", b"") for sink in (webhook, mqtt)),
    ],
)
def test_an_answer_that_comes_byte_by_byte_or_never_holds_up_no_rows(
    sink: Callable[[int], Sink], head: bytes, more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_SECONDS", 0.5)

    def drip(server: socket.socket) -> None:
        with server.accept()[0] as connection, suppress(OSError):
            connection.sendall(head)
            while True:
                connection.sendall(more)
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, args=(server,), daemon=True).start()
        with pytest.raises(NotTakenError, match=r"no answer within 0\.5 s|doesn't confirm"):
            sink(server.getsockname()[1]).send(b"{}", "1")
