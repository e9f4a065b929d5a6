"""Promises of the HTTP server: who may ask, limits of size, time and number, and odd names."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from conftest import REPOSITORY
from kit import until
from receivers import Receiver
from running import Served, behind_nginx, serving

from anomaly.errors import visible
from anomaly.imaging.pool import Decoders
from anomaly.line import models, server, service
from anomaly.line.commands import served_names
from anomaly.line.server import is_loopback
from anomaly.line.sinks import Webhook

TOKEN = "0123456789abcdef"
SHOWN = f"Authorization: Bearer {TOKEN}\r\n".encode()
SCORE, FEEDBACK = "/v1/models/disc/score", "/v1/parts/1/feedback"
POST = f"POST {SCORE} HTTP/1.1\r\nHost: localhost\r\n".encode()
HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n"
NAMES = {
    b'--caf\xe9\\ \x1b[31m\xc2\x9b\n\xe2\x80\xae<img src=x onerror=x> "a", {b="c"} 1%41?#': (
        '--caf\\udce9\\\\ \\u001b[31m\\u009b\\n\\u202e<img src=x onerror=x> "a", {b="c"} 1%41?#'
    ),
    b"disc": "disc",
    b"bad\xe9\x1b": "bad\\udce9\\u001b",
}
USABLE = list(NAMES.values())[:2]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def guarded(
    run_folder: Path, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
) -> Iterator[Served]:
    """A service with a token, short patience, models with odd names, and one that is damaged."""
    folder = tmp_path_factory.mktemp("line") / os.fsdecode(b"runs\xff\x1b")
    for raw in NAMES:
        shutil.copytree(run_folder / "model", folder / os.fsdecode(raw) / "model")
    (folder / os.fsdecode(b"bad\xe9\x1b") / "model" / "thresholds.json").write_text("{}")
    sink = Webhook(f"http://127.0.0.1:{receiver.port}/parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "_IDLE_SECONDS", 2)
        patch.setattr(server, "_RECEIVE_SECONDS", 3.0)
        patch.setattr(server, "_IMAGE_BYTES", 1_000_000)
        patch.setattr(server, "_HELD_BYTES", 2_000_000)
        with serving(folder, token=TOKEN, sinks=[sink]) as served:
            yield served


@pytest.fixture
def proxied(guarded: Served, tmp_path: Path) -> Iterator[int]:
    """The port of nginx with docker/nginx.conf in front of it, whose times are shorter."""
    shipped = (REPOSITORY / "docker" / "nginx.conf").read_text("utf-8")
    changes = {
        "http://line:8000": f"http://127.0.0.1:{guarded.port}",
        "addresses 64": "addresses 999",
    }
    changes |= {"15s": "2s", "30s": "2s", "listen 80": "listen 127.0.0.1:{port}"}
    for text, here in changes.items():
        assert text in shipped
        shipped = shipped.replace(text, here)
    with behind_nginx(shipped, tmp_path) as port:
        yield port


@dataclass
class Attack:
    """A client that means harm."""

    statuses: tuple[int, ...]  # right answers before the connection is closed; 0 for none
    head: bytes  # behind the request's first line and `Host`
    body: bytes = b""
    drip: bytes = b""  # sent again and again


CHUNKED = b"Transfer-Encoding: chunked\r\n"
TINY = b"1\r\nx\r\n" * 9000 + b"0\r\n\r\n"
CHUNK = b"8000\r\n" + bytes(0x8000) + b"\r\n"
DIRECT = [
    Attack((413,), b"Content-Length: 5000000000\r\n\r\n", drip=bytes(1000)),
    Attack((413,), CHUNKED + b"\r\n", CHUNK * 40, CHUNK),
    Attack((400,), b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", b"{"),
    Attack((400,), b"X: " + b"x" * 200_000),
    Attack((408,), b"Content-Length: 60000\r\n\r\n", bytes(1000), bytes(150)),
    Attack((408,), b"Content-Length: 18\r\n\r\n", b"{"),
    Attack((408,), b"Content-Length: 60000\r\n\r\n", b"{", b" "),
]
# What only a proxy withstands: endless heads, bodies in tiny chunks, clients that are silent.
PROXIED = [
    Attack((413,), b"Content-Length: 5000000000\r\n\r\n", drip=bytes(1000)),
    Attack((400, 422), CHUNKED + b"\r\n", TINY),
    Attack((400, 422), CHUNKED + b"\r\n", b"0\r\n" + b"X:y\r\n" * 9000 + b"\r\n"),
    Attack((400,), b"Content-Length: 18\r\n" + CHUNKED + b"\r\n", CHUNK),
    Attack((400,), b"X: " + b"x" * 90_000 + b"\r\n\r\n"),
    Attack((0, 408), b"Content-Length: 18\r\n\r\n", b"{"),
    Attack((0, 408), b"X:"),
    Attack((0, 408), b"X: ", drip=b"x"),
]
ROUTES = [("POST", SCORE), ("POST", FEEDBACK), ("GET", "/v1/parts"), ("GET", "/nowhere")]


def told(port: int, sent: bytes, drip: bytes = b"") -> bytes:
    """All that is answered until the server closes the connection; `drip` is sent all the while."""
    answer, end = b"", time.monotonic() + 60
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
        with suppress(ConnectionError):
            line.sendall(sent)
        line.settimeout(0.1)
        while time.monotonic() < end:
            with suppress(TimeoutError, ConnectionError):
                line.sendall(drip)
            try:
                piece = line.recv(65536)
            except TimeoutError:
                continue
            except ConnectionError:
                return answer
            if not piece:
                return answer
            answer += piece
    raise AssertionError(("it stays open", sent[:300], answer[:300]))


def is_ended_that_reads_nothing(port: int) -> bool:
    """Whether the server closes the connection of a client that asks for much."""
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", port))
        line.settimeout(1)
        asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n" + SHOWN + b"\r\n"
        with suppress(OSError):
            line.sendall(asked * 10_000)
        poll = select.poll()
        poll.register(line, 0)  # no event but its end
        return bool(poll.poll(60_000))


def no_attack_lasts(port: int, attacks: list[Attack], routes: list[tuple[str, str]]) -> None:
    """Nor does any keep others out."""
    kept, slowest = HTTPConnection("127.0.0.1", port, timeout=20), 0.0
    answers: list[tuple[Attack, tuple[str, str], Future[bytes]]] = []
    with ThreadPoolExecutor(len(attacks) * len(routes)) as pool:
        for method, path in routes:
            start = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n".encode() + SHOWN
            for attack in attacks:
                sent = start + attack.head + attack.body
                answers.append((attack, (method, path), pool.submit(told, port, sent, attack.drip)))
        while not all(future.done() for *_, future in answers):
            begun = time.monotonic()
            kept.request("GET", "/v2/health/live", headers={"Authorization": f"Bearer {TOKEN}"})
            assert kept.getresponse().read() == b'{"live":true}'
            slowest = max(slowest, time.monotonic() - begun)
            time.sleep(0.1)
    kept.close()
    assert slowest < 5
    for attack, route, future in answers:
        answer = future.result()
        assert int(answer[9:12] or 0) in attack.statuses, (attack.head[:60], route, answer[:200])


def test_no_attack_on_any_route_lasts_or_keeps_others_out(guarded: Served) -> None:
    no_attack_lasts(guarded.port, DIRECT, ROUTES)


def test_behind_the_proxy_no_slow_client_lasts(proxied: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        silent = pool.submit(told, proxied, b"")
        reads_nothing = pool.submit(is_ended_that_reads_nothing, proxied)
        no_attack_lasts(proxied, PROXIED, ROUTES[:2])
    assert silent.result() == b""
    assert reads_nothing.result()


def test_a_stranger_is_refused_before_the_body_is_read(guarded: Served, served: Served) -> None:
    endless = b"Content-Length: 999999\r\n\r\n"
    for method, path in ROUTES:
        start = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
        assert told(guarded.port, start + endless).startswith(b"HTTP/1.1 401 ")
    long = [POST + b"Content-Length: 5000000000\r\n\r\n", POST + CHUNKED + b"\r\n" + CHUNK * 70]
    with ThreadPoolExecutor() as pool:
        for answer in pool.map(partial(told, served.port), long):
            assert b"1 MB, which is the limit" in answer


def test_a_body_of_just_the_limit_is_read(guarded: Served) -> None:
    for path, most, status in ((SCORE, 1_000_000, 422), (FEEDBACK, 64_000, 400)):
        assert guarded.ask("POST", path, bytes(most))[0] == status
        assert guarded.ask("POST", path, bytes(most + 1))[0] == 413


def test_images_that_wait_are_limited_in_memory(guarded: Served) -> None:
    with ExitStack() as clients:
        lines = [socket.create_connection(("127.0.0.1", guarded.port), 20) for _ in range(2)]
        for line in map(clients.enter_context, lines):
            line.sendall(POST + SHOWN + b"Content-Length: 900000\r\n\r\n" + bytes(899_999))
        until(lambda: guarded.figures()["anomaly_held_bytes{}"] == 2 * 899_999)
        assert guarded.ask("POST", SCORE, bytes(700_000))[0] == 503
        for line in lines:
            line.sendall(b"\0")
            assert line.recv(2000).startswith(b"HTTP/1.1 422 ")
    assert guarded.figures()["anomaly_held_bytes{}"] == 0


def test_who_may_ask(guarded: Served, served: Served) -> None:
    def basic(text: bytes) -> str:
        return "Basic " + base64.b64encode(text).decode()

    shown = {"Authorization": f"Bearer {TOKEN}"}
    own, proxy = f"http://127.0.0.1:{guarded.port}", "https://plant.example"
    page = {**shown, "Origin": proxy}  # a proxy has put its own host in
    link = {**shown, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    wrong = ["", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Digest {TOKEN}"]
    wrong += ["x" * 5000, "Basic %%%", "Bearer é", "Basic é", basic(b"ada")]
    parts, local, others = "/v1/parts", ("localhost:8", "127.0.0.1", "[::1]:8"), ("line", "", "[")
    cases = [
        *((guarded, path, {"Authorization": one}, 401) for one in wrong for path in ("/", parts)),
        (guarded, parts, shown, 200),
        (guarded, parts, {"Authorization": basic(f"ada:{TOKEN}".encode())}, 200),
        (guarded, "/v2/health/live", {"Authorization": ""}, 200),
        (guarded, parts, {**shown, "Origin": own}, 200),
        (guarded, parts, {**shown, "Origin": "http://["}, 403),
        (guarded, parts, page, 403),
        (guarded, "/line.js", page, 200),
        (guarded, parts, {**page, "Sec-Fetch-Site": "same-origin"}, 200),
        (guarded, parts, {**page, "X-Requested-With": "line"}, 200),  # as over plain HTTP
        (guarded, "/", link, 200),
        (guarded, "/report", link, 403),
        (guarded, parts, {**page, "Sec-Fetch-Site": "same-site", "X-Requested-With": "line"}, 403),
        *((served, parts, {"Host": host}, 200) for host in local),
        *((served, parts, {"Host": host}, 403) for host in (*others, "127.0.0.1.evil.example")),
        (served, parts, {"Origin": "https://evil.example"}, 403),
    ]
    answers = [one.ask("GET", path, headers=headers) for one, path, headers, _ in cases]
    assert [(*case[1:3], answer[0]) for case, answer in zip(cases, answers, strict=True)] == [
        case[1:] for case in cases
    ]
    assert {answer[1]["x-content-type-options"] for answer in answers} == {"nosniff"}
    assert "default-src 'none'" in guarded.ask("GET", "/")[1]["content-security-policy"]
    assert guarded.ask("POST", "/", headers=link)[0] == 403
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "127.1.2.3")] == [False, False, True]


def test_who_only_connects_keeps_nobody_out(guarded: Served, proxied: int) -> None:
    with ExitStack() as ends:
        silent = [socket.create_connection(("127.0.0.1", proxied), 20) for _ in range(300)]
        for client in map(ends.enter_context, silent):
            client.sendall(HEALTH[:-10])
        assert guarded.ask("GET", "/v2/health/live")[0] == 200
        assert told(proxied, HEALTH + b"Connection: close\r\n\r\n").endswith(b'{"live":true}')
        until(lambda: len(select.select(silent, [], [], 0)[0]) == 300)  # are closed


def test_few_may_ask_at_a_time_but_health(guarded: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_AT_ONCE", 5)
    with ExitStack() as clients:
        for _ in range(5):
            line = socket.create_connection(("127.0.0.1", guarded.port), 20)
            clients.enter_context(line).sendall(POST + SHOWN + b"Content-Length: 9\r\n\r\n")
        until(lambda: guarded.ask("GET", "/v1/models")[0] == 503)
        assert guarded.ask("GET", "/v2/health/live")[0] == 200
    until(lambda: guarded.ask("GET", "/v1/models")[0] == 200)


def test_bodies_behind_each_other_are_all_read(guarded: Served) -> None:
    """However they are framed: each by its head, and none by what has come with it."""
    head, body = POST + SHOWN, b"x" * 60_000
    sized = head + b"Content-Length: 60000\r\n\r\n" + body
    for size in (1000, 30_000):
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        chunked = head + CHUNKED + b"\r\n" + chunks + b"0\r\nA: b\r\n\r\n"
        answer = told(guarded.port, sized + chunked + sized + HEALTH + b"\r\n")
        assert answer.count(b"HTTP/1.1 422") == 3  # no images
        assert answer.count(b"HTTP/1.1 200") == 1


def test_it_ends_when_all_parts_are_answered(
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Parts that nothing has begun with are refused, slow clients and parts without end left."""
    shutil.copytree(run_folder, tmp_path / "line" / "disc")
    monkeypatch.setattr(server, "_LAST_SECONDS", 0.5)
    monkeypatch.setattr(server, "_MOST_LAST_SECONDS", 2)
    monkeypatch.setattr(service, "_ANSWER_SECONDS", 1)
    monkeypatch.setattr(models, "_LAST_SECONDS", 0.1)
    begun: list[Future[Any]] = []

    def never(*_: object) -> Future[Any]:
        begun.append(Future())
        if len(begun) == 1:
            begun[0].set_running_or_notify_cancel()  # for ever
        return begun[-1]

    with ThreadPoolExecutor() as pool:
        with serving(tmp_path / "line") as served:
            monkeypatch.setattr(Decoders, "submit", never)
            hangs = pool.submit(served.ask, "POST", SCORE, b"image")
            until(lambda: begun)
            waits = pool.submit(served.ask, "POST", SCORE, b"image")
            pool.submit(told, served.port, POST + b"Content-Length: 9\r\n\r\n")
            until(lambda: len(begun) == 2)
        assert hangs.result()[0] == 504
        status, headers, body = waits.result()
    assert (status, headers["retry-after"], b"is stopping" in body) == (503, "5", True)
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


def plain(value: Any) -> bool:
    """Whether no text in a JSON value, or in lines of text, holds what controls anything."""
    if isinstance(value, dict):
        return all(plain(one) for pair in value.items() for one in pair)
    if isinstance(value, list):
        return all(map(plain, value))
    return not isinstance(value, str) or all(visible(one) == one for one in value.split("\n"))


def test_every_model_is_listed_and_scores(
    guarded: Served, product: Path, receiver: Receiver
) -> None:
    data = (product / "test" / "spot" / "000.png").read_bytes()
    models = guarded.get("/v1/models")["models"]
    states = {one["name"]: one["state"] for one in models}
    assert states == dict.fromkeys(USABLE, "ready") | {"bad\\udce9\\u001b": "failed"}
    for name in USABLE:
        status, row = guarded.score(data, model=quote(name, safe=""))
        assert (status, row["verdict"]) == (200, "reject")
        facts = guarded.get(f"/v1/models/{quote(name, safe='')}")
        assert (facts["name"], facts["method"]) == (name, "PatchCore")
        assert any("reject threshold" in line for line in facts["calibration"])
    assert {part["model"] for part in guarded.get("/v1/parts")["parts"]} == {*USABLE}
    login = base64.b64encode(f"Ada:{TOKEN}".encode()).decode()  # as a browser's user gives it
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {login}"}
    judged = guarded.ask("POST", f"/v1/parts/{row['id']}/feedback", b'{"verdict": "good"}', headers)
    assert json.loads(judged[2])["feedback"]["who"] == "Ada"
    told = re.findall(r'anomaly_parts_total\{model=(".*"),status', "\n".join(guarded.figures()))
    assert {*map(json.loads, told)} == {*USABLE}
    until(lambda: {row["model"] for row in receiver.rows} == {*USABLE})


def test_every_route_answers_in_plain_text(guarded: Served) -> None:
    status, _, body = guarded.ask("GET", "/v2/health/ready")
    assert (status, b'"reason":"bad\\\\udce9\\\\u001b has failed"' in body) == (503, True)
    (reason,) = [one["reason"] for one in guarded.get("/v1/models")["models"] if one["reason"]]
    assert "thresholds.json" in reason
    names = ["disk", "caf\udce9", "\x1b[2J\n", "../../etc/passwd", "disc\0", "<b>disc</b>", ".."]
    models = [f"/v1/models/{quote(os.fsencode(n), safe='')}" for n in (*NAMES.values(), *names)]
    pages = ["/v1/models", "/v1/parts", "/v1/alarms", "/metrics", "/", "/openapi.json"]
    for path in (*pages, *models):
        status, _, body = guarded.ask("GET", path)
        assert (status < 500, plain(body.decode())) == (True, True), path
    for model in models[len(NAMES) :]:
        status, _, body = guarded.ask("POST", f"{model}/score", b"x")
        assert (status in (404, 405), plain(body.decode())) == (True, True), model
    assert b"did you mean 'disc'" in guarded.ask("GET", "/v1/models/disk")[2]


def test_names_that_are_one_once_escaped_stay_two() -> None:
    names = NAMES | {
        b"caf\xe9": "caf\\udce9",  # Latin-1
        b"caf\\udce9": "caf\\\\udce9",
        "良品 ä".encode(): "良品 ä",
        b"x" * 255: "x" * 255,
        b"\xff" * 255: "\\udcff" * 255,
    }
    folders = {os.fsdecode(raw): Path(name) for raw, name in names.items()}
    assert served_names(folders) == {name: Path(name) for name in names.values()}
    assert all(map(plain, names.values()))
