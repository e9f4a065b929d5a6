"""Queue, golden parts, forms, bodies and tokens, without a server around them."""

from __future__ import annotations

import asyncio
import base64
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from fastapi import HTTPException, Request

from anomaly.errors import OutputError
from anomaly.imaging.decoder_pool import Decoders
from anomaly.line.bodies import Bodies, Form, shown_name
from anomaly.line.engine import BusyError, Engine
from anomaly.line.guard import Guard, Limits, is_loopback
from anomaly.line.record import Answer, Record, Recorder
from anomaly.line.registry import ModelRegistry
from anomaly.storage.folder import find_models
from anomaly.storage.load import load_model

TOKEN = "0123456789abcdef"


class Gate(Record):
    """A record that writes nothing until it may."""

    may = threading.Event()
    trouble = False

    def add(self, answers: Sequence[Answer]) -> list[int]:
        self.may.wait(20)
        if self.trouble:
            raise OutputError("the disk is full")
        return super().add(answers)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "line.sqlite")
    gate.may.clear()
    yield gate
    gate.may.set()
    gate.close()


def test_images_in_tiles_are_decoded_few_at_a_time(
    run_folder: Path, product: Path, gate: Gate
) -> None:
    """Each lies here whole until it is answered: 64 of them would fill the memory."""
    files = sorted((product / "test").rglob("*.png"))[:4]
    model = load_model(run_folder, "cpu")
    image = model.config.image.model_copy(update={"tile": 64})
    tiled = replace(model, config=model.config.model_copy(update={"image": image}))
    with Recorder(gate, lambda *_: None) as recorder:
        with Engine("disc", tiled, recorder, workers=2) as engine:
            begun: list[int] = []
            submit = engine._decoders.submit

            def counted(index: int, source: Any) -> Any:
                begun.append(index)
                return submit(index, source)

            engine._decoders.submit = counted  # type: ignore[assignment]
            futures = [engine.submit(file.read_bytes()) for file in files]
            time.sleep(0.5)
            assert (begun, engine.waiting) == ([0, 1], 4)
            gate.may.set()
            rows = [future.result(60).answer.row for future in futures]
        assert begun == [0, 1, 2, 3]
    assert [row.status for row in rows] == ["ok"] * 4


def test_no_more_wait_than_may_and_all_that_wait_are_answered(
    run_folder: Path, product: Path, gate: Gate
) -> None:
    files = sorted((product / "test").rglob("*.png"))
    told: list[int] = []
    model = load_model(run_folder, "cpu")
    with Recorder(gate, lambda number, _: told.append(number)) as recorder:
        with Engine("disc", model, recorder, workers=1, most_waiting=4) as engine:
            futures = [engine.submit(file.read_bytes(), file.name) for file in files[:4]]
            with pytest.raises(BusyError, match="4 parts are waiting"):
                engine.submit(b"one more")
            time.sleep(0.5)
            assert not any(future.done() for future in futures)  # nothing is written yet
            gate.may.set()
            first = futures[0].result(20)
            assert first.answer.row.path == files[0].name
            assert engine.submit(b"one more").result(20).answer.row.status == "unsupported"
            futures.append(engine.submit(files[4].read_bytes()))
        assert all(future.done() for future in futures)
        assert engine.waiting == 0
    assert sorted(told) == [1, 2, 3, 4, 5, 6]
    expected = {
        one.name: one for one in (load_model(run_folder, "cpu").predict(f) for f in files[:4])
    }
    for file, future in zip(files[:4], futures, strict=False):
        row, theirs = future.result().answer.row, expected[str(file)]
        assert (row.verdict, row.image_sha256) == (theirs.verdict, theirs.sha256)
        assert row.image_score == pytest.approx(theirs.score, rel=1e-4)


def test_parts_that_nothing_has_begun_with_are_refused_at_the_end(
    run_folder: Path, product: Path, gate: Gate
) -> None:
    data = (product / "test" / "good" / "000.png").read_bytes()
    model = load_model(run_folder, "cpu")
    image = model.config.image.model_copy(update={"tile": 64})
    tiled = replace(model, config=model.config.model_copy(update={"image": image}))
    for one in (model, tiled):  # whether parts wait for a process or are held back
        with Recorder(gate, lambda *_: None) as recorder:
            with Engine("disc", one, recorder, workers=1) as engine:
                futures = [engine.submit(data) for _ in range(8)]
                refused = engine.refuse_waiting("it stops")
                assert (refused >= 6, engine.waiting) == (True, 8 - refused)
                gate.may.set()
            assert engine._decoding == 0
        errors = [future.exception() for future in futures]
        assert sum(isinstance(error, BusyError) for error in errors) == refused


def test_batches_are_no_larger_than_the_model_takes_at_once(
    run_folder: Path, product: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes = load_model(run_folder, "cpu"), []
    score = type(model).predict_batches

    def counted(self: Any, batches: Any) -> Iterator[Any]:
        def seen() -> Iterator[Any]:
            for batch in batches:
                sizes.append(len(batch))
                yield batch

        return score(self, seen())

    monkeypatch.setattr(type(model), "predict_batches", counted)
    monkeypatch.setattr("anomaly.line.engine.get_threads", lambda: 1)
    monkeypatch.setattr("anomaly.line.engine.BATCH_SECONDS", 5.0)  # all are gathered
    gate.may.set()
    data = (product / "test" / "good" / "000.png").read_bytes()
    with (
        Recorder(gate, lambda number, _: None) as recorder,
        Engine("disc", model, recorder, workers=1) as engine,
    ):
        wait([engine.submit(data, str(i)) for i in range(9)], 30)
    assert model.batch_size == 4 < model.config.batch_size
    assert sum(sizes) == 9
    assert max(sizes) == 4


def test_what_cannot_be_written_down_is_not_answered(
    run_folder: Path, product: Path, gate: Gate
) -> None:
    gate.trouble = True
    gate.may.set()
    data = (product / "test" / "good" / "000.png").read_bytes()
    told: list[int] = []
    with (
        Recorder(gate, lambda number, _: told.append(number)) as recorder,
        Engine("disc", load_model(run_folder, "cpu"), recorder, workers=1) as engine,
        pytest.raises(OutputError, match="the disk is full"),
    ):
        engine.submit(data).result(20)
    assert told == []


def test_a_part_that_is_being_drawn_when_scoring_fails_is_answered_once(
    run_folder: Path, product: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(run_folder, "cpu")
    score, finish = type(model).predict_batches, Decoders.finish
    fails, drawn = [True], threading.Event()

    def one_and_no_more(self: Any, batches: Any) -> Iterator[Any]:
        for result in score(self, batches):
            yield result
            if fails and fails.pop():
                raise RuntimeError("CUDA out of memory")

    def later(self: Any, *part: Any) -> Future[Any]:
        found, held = finish(self, *part), Future[Any]()
        threading.Thread(target=lambda: held.set_result(drawn.wait(20) and found.result())).start()
        return held

    monkeypatch.setattr(type(model), "predict_batches", one_and_no_more)
    monkeypatch.setattr(Decoders, "finish", later)
    monkeypatch.setattr("anomaly.line.engine.BATCH_SECONDS", 5.0)  # both are gathered
    gate.may.set()
    data = (product / "test" / "good" / "000.png").read_bytes()
    with (
        Recorder(gate, print) as recorder,
        Engine("disc", model, recorder, workers=1) as engine,
    ):
        both = [engine.submit(data, name) for name in ("a", "b")]
        wait(both, 20, "FIRST_COMPLETED")
        drawn.set()
        rows = [future.result(20).answer.row for future in both]
        assert sorted(row.status for row in rows) == ["failed", "ok"]
        assert [row.reason for row in rows if row.reason] == ["scoring failed: RuntimeError"]
        assert engine.submit(data, "c").result(20).answer.row.status == "ok"
    assert len(gate.parts()) == 3


def test_the_record_goes_on_when_a_callback_fails(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    from test_record import answer

    def fail(*_: object) -> None:
        raise RuntimeError("a mistake")

    gate.may.set()
    found: list[int | OutputError] = []
    with Recorder(gate, fail) as recorder:
        recorder.put(answer("good", 1), fail)
        recorder.put(answer("good", 2), found.append)
    assert found == [2]
    assert caplog.text.count("RuntimeError: a mistake") == 3


def test_a_model_whose_golden_parts_have_moved_is_not_let_in(
    run_folder: Path, product: Path, tmp_path: Path, command: Command, gate: Gate
) -> None:
    for name in ("sound", "moved", "damaged"):
        shutil.copytree(run_folder, tmp_path / "models" / name)
    (tmp_path / "models" / "notes").mkdir()
    (tmp_path / "models" / "damaged" / "model" / "scorer.safetensors").write_bytes(b"")
    for name in ("sound", "moved"):
        golden = tmp_path / "models" / name / "golden"
        shutil.copytree(product / "test", golden)
        arguments = ["--model", run_folder, "--golden", golden, "--record", "--device", "cpu"]
        assert command("selfcheck", arguments)[0] == 0
    other = product / "train" / "good" / "003.png"
    shutil.copy(other, tmp_path / "models" / "moved" / "golden" / "spot" / "000.png")
    folders = find_models(tmp_path / "models")
    assert list(folders) == ["damaged", "moved", "sound"]
    with ModelRegistry(
        folders, Recorder(gate, print), device=torch.device("cpu"), workers=1
    ) as registry:
        end = time.monotonic() + 60
        while any(one.state == "loading" for one in registry.models.values()):
            assert time.monotonic() < end
            time.sleep(0.02)
        states = {name: one.state for name, one in registry.models.items()}
        assert states == {"damaged": "failed", "moved": "failed", "sound": "ready"}
        assert "spot/000.png" in registry.models["moved"].trouble
        assert "scorer.safetensors" in registry.models["damaged"].trouble
        sound = registry.models["sound"].now
        assert sound is not None
        assert "6 golden parts" in sound.checked


def test_a_run_alone_is_found_too(run_folder: Path) -> None:
    assert find_models(run_folder) == {run_folder.name: run_folder / "model"}


def file_in_form(kind: str, body: bytes, size: int = 10**6) -> tuple[bytes, str]:
    """The file of a form that comes in pieces of so many bytes."""
    form = Form(kind)
    for start in range(0, len(body), size):
        form.add(body[start : start + size])
    return form.file()


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_a_file_in_a_form_is_found_whatever_is_in_it(size: int) -> None:
    kind = 'multipart/form-data; boundary="a b"'
    head = b'--a b\r\ncontent-disposition: form-data; name="f"; filename="\xc3\xa9.png"\r\n\r\n'
    body = head + b"abc\r\ndef" + b"\r\n--a b--\r\n"
    assert file_in_form(kind, body, size) == (b"abc\r\ndef", "é.png")
    for wrong in (
        b"",
        b"--a b--",
        head[:40],
        b"no form at all",
        b"--a b\r\n\r\nabc",
        head + b"abc",
    ):
        with pytest.raises(HTTPException) as refused:
            file_in_form(kind, wrong, size)
        assert refused.value.status_code == 400
    with pytest.raises(HTTPException):
        file_in_form("multipart/form-data", head)


def test_of_several_files_in_a_form_it_is_the_image() -> None:
    kind = "multipart/form-data; boundary=x"
    meta, image = form_part("meta", "m.json", "{}"), form_part("image", "p.png", "abc")
    for body in (meta + image, image + meta):
        assert file_in_form(kind, f"{body}--x--".encode()) == (b"abc", "p.png")
    assert file_in_form(kind, f"{meta}--x--".encode()) == (b"{}", "m.json")
    for body in (image + image, meta + form_part("else", "p.png", "abc")):
        with pytest.raises(HTTPException, match="holds 2 files"):
            file_in_form(kind, f"{body}--x--".encode())


def form_part(field: str, name: str, content: str) -> str:
    told = f'content-disposition: form-data; name="{field}"; filename="{name}"'
    return f"--x\r\n{told}\r\n\r\n{content}\r\n"


def test_a_form_takes_time_that_grows_with_its_length_only() -> None:
    kind, escaped = "multipart/form-data; boundary=x", '\\";' * 100_000
    long = f'--x\r\ncontent-disposition: form-data; name=image; filename="{escaped}"\r\n\r\nabc'
    bodies = [long, "--x\r\n" + "a: b\r\n" * 100_000, form_part("f", "f", "") * 10_000]
    bodies += [f"--x\r\ncontent-disposition: form-data{'; a=' + chr(34)}" * 20_000]
    begun = time.process_time()
    for body in bodies:
        with pytest.raises(HTTPException) as refused:
            file_in_form(kind, body.encode(), 65_536)
        assert refused.value.status_code == 400
    assert time.process_time() - begun < 1.0  # a header whose time grows with its square took 60 s


def test_charsets_that_are_none_are_refused() -> None:
    kind = "multipart/form-data; boundary=x"

    def named(disposition: str, more: str = "") -> tuple[bytes, str]:
        head = f"--x\r\nContent-Disposition: form-data; name=image; {disposition}{more}"
        return file_in_form(kind, f"{head}\r\n\r\nabc\r\n--x--".encode())

    assert named("filename*=UTF-8''%c3%a9.png") == (b"abc", "é.png")
    assert named("filename=a.png; filename*=none-such''b.png") == (b"abc", "a.png")
    assert named("filename=a", "\r\nContent-Type: image/png; charset=binary") == (b"abc", "a")
    for charset in ("none-such", "hex", "idna", "undefined", "a\0b", ""):
        for disposition, more in (
            (f"filename*={charset}''%ff.png", ""),
            ("filename=a", f'\r\nContent-Type: image/png; charset="{charset or "x" * 3000}"'),
        ):
            if charset == "idna" and more:
                continue  # known, if not as a name's
            with pytest.raises(HTTPException) as refused:
                named(disposition, more)
            assert refused.value.status_code == 400, (charset, disposition, more)


def test_names_are_shown_and_nothing_else() -> None:
    assert shown_name("a\x00b\r\nc\x1b[2J") == "a\\u0000b\\r\\nc\\u001b[2J"
    assert len(shown_name("\n" * 10_000)) == 255


def request(*chunks: bytes, kind: str = "") -> Request:
    """A request whose body comes in pieces."""
    left = list(chunks)

    async def receive() -> dict[str, Any]:
        body = left.pop(0) if left else b""
        return {"type": "http.request", "body": body, "more_body": bool(left)}

    scope = {"type": "http", "headers": [(b"content-type", kind.encode())], "query_string": b""}
    return Request(scope | {"path": "/v1/models/disc/score", "server": ("h", 80)}, receive)


def taken(bodies: Bodies, asked: Request) -> tuple[int, bytes]:
    """The status of what is refused, or 200 and the bytes."""

    async def take() -> tuple[int, bytes]:
        try:
            async with bodies.image(asked) as (data, _):
                return 200, data
        except HTTPException as refused:
            return refused.status_code, refused.detail.encode()

    return asyncio.run(take())


def test_text_where_a_picture_is_expected_is_told_how_to_send_one(product: Path) -> None:
    data = (product / "test" / "good" / "000.png").read_bytes()
    code = base64.b64encode(data)
    lines = base64.encodebytes(data)
    form = form_part("image", "a.txt", code.decode()) + "--x--"
    for body, kind in (
        (code, "application/x-www-form-urlencoded"),
        (lines, ""),
        (b'{"image": "' + code + b'"}', "application/json"),
        (b"[1, 2]", ""),
        (b'  "' + code + b'"', ""),
        (b"data:image/png;base64," + code, ""),
        (form.encode(), "multipart/form-data; boundary=x"),
    ):
        status, said = taken(Bodies(Limits()), request(body, kind=kind))
        assert (status, b"curl --data-binary @part.png" in said) == (415, True), body[:40]
    for body in (data, b"these are words", b"", b"AAAA" * 40):  # as `infer` would tell
        assert taken(Bodies(Limits()), request(body)) == (200, body)


def test_the_longest_body_allowed_fits_into_memory() -> None:
    assert Limits.of(64_000_000) == Limits()
    large = Limits.of(2_000_000_000)
    assert (large.body_bytes, large.held_bytes) == (2_000_000_000, 4_000_000_000)


def test_images_that_wait_are_limited_in_memory() -> None:
    bodies = Bodies(Limits(body_bytes=10, held_bytes=25))
    assert taken(bodies, request(b"12345", b"67890")) == (200, b"1234567890")
    assert bodies.held == 0
    bodies.held = 20
    assert taken(bodies, request(b"123456"))[0] == 503
    assert bodies.held == 20


def asked(
    guard: Guard,
    path: str = "/v1/parts",
    method: str = "GET",
    pieces: Sequence[bytes] = (),
    wait: float = 0.0,
    **headers: str,
) -> int:
    """The status that a guard answers with; 200 where it lets pass."""
    sent: list[Any] = []
    left = [*pieces, b""]

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.sleep(wait)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    every = {"host": "line:80", **headers}.items()
    listed = [(k.replace("_", "-").encode(), v.encode("latin-1")) for k, v in every]
    scope = {"type": "http", "method": method, "path": path, "headers": listed}
    asyncio.run(guard(scope, receive, send))
    told = dict(sent[0]["headers"])
    assert told[b"x-content-type-options"] == b"nosniff"
    return int(sent[0]["status"])


async def _through(scope: Any, receive: Any, send: Any) -> None:
    if scope["method"] == "POST":
        try:
            while (await receive()).get("more_body"):
                pass
        except HTTPException as refused:
            await send(
                {"type": "http.response.start", "status": refused.status_code, "headers": []}
            )
            return
    await send({"type": "http.response.start", "status": 200, "headers": []})


def test_a_token_is_asked_for_where_one_is_set() -> None:
    guard = Guard(_through, TOKEN)
    basic = base64.b64encode(f"ada:{TOKEN}".encode()).decode()
    assert asked(guard, authorization=f"Bearer {TOKEN}") == 200
    assert asked(guard, authorization=f"Basic {basic}") == 200
    for wrong in ("", "Bearer", f"Bearer {TOKEN}x", "Bearer ", "Basic %%%", f"Digest {TOKEN}",
                  "Bearer é", "Basic é", "Basic " + base64.b64encode(b"ada").decode()):  # fmt: skip
        assert asked(guard, authorization=wrong) == 401, wrong
    assert asked(guard) == 401
    assert asked(guard, "/v2/health/live") == asked(guard, "/v2/health/ready") == 200
    assert asked(guard, authorization=f"Bearer {TOKEN}", origin="http://evil.example") == 403
    assert asked(guard, authorization=f"Bearer {TOKEN}", origin="http://line:80") == 200


def test_other_sites_are_told_from_the_page_behind_a_proxy() -> None:
    guard = Guard(_through, TOKEN)
    known = {"authorization": f"Bearer {TOKEN}"}
    page = {**known, "origin": "https://plant.example"}  # the proxy has put its own host in
    assert asked(guard, **page, sec_fetch_site="same-origin") == 200
    assert asked(guard, **page) == 403
    assert asked(guard, "/line.js", **page) == 200
    assert asked(guard, **page, x_requested_with="line") == 200  # as over plain HTTP
    for site in ("cross-site", "same-site"):
        assert asked(guard, **known, sec_fetch_site=site, sec_fetch_dest="image") == 403
        assert asked(guard, **page, sec_fetch_site=site, x_requested_with="line") == 403
    link = {**known, "sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert asked(guard, "/", **link) == 200
    assert asked(guard, "/report", **link) == 403
    assert asked(guard, "/", "POST", **link) == 403


def test_without_a_token_only_this_machine_may_ask() -> None:
    guard = Guard(_through, "")
    for host in ("localhost:8000", "127.0.0.1", "[::1]:80"):
        assert asked(guard, host=host) == 200
    for host in ("line", "127.0.0.1.evil.example", "10.0.0.1", "", "["):
        assert asked(guard, host=host) == 403
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "127.1.2.3")] == [False, False, True]


@pytest.mark.parametrize("path", ["/v1/parts/1/feedback", "/v1/models/disc/score"])
def test_bodies_are_limited_whatever_their_framing(path: str) -> None:
    limits = Limits(10, short_bytes=10, receive_seconds=0.5, begin_seconds=0.2, bytes_a_second=20)
    guard = Guard(_through, "", limits)
    for method in ("POST", "GET", "DELETE"):
        for status, pieces, told in (
            (200, [b"12345", b"67890"], {"content_length": "10"}),
            (413, [], {"content_length": "11"}),
            (413, [], {"content_length": "9" * 19}),
            (200, [b"12345", b"67890"], {"transfer_encoding": "chunked"}),
            (413, [b"12345", b"678901"], {"transfer_encoding": "chunked"}),
            (400, [b"1"], {"transfer_encoding": "chunked", "content_length": "1"}),
            (400, [b"1"], {"content_length": "1", "content_type": "a/b; charset=none-such"}),
        ):
            found = asked(guard, path, method, pieces, host="localhost", **told)
            assert found == status, (method, told)


@pytest.mark.parametrize("path", ["/v1/parts/1/feedback", "/v1/models/disc/score"])
def test_bodies_that_come_too_slowly_are_not_waited_for(path: str) -> None:
    limits = Limits(receive_seconds=0.6, begin_seconds=0.2, bytes_a_second=100)
    guard = Guard(_through, "", limits)
    told = {"host": "localhost", "transfer_encoding": "chunked"}
    for status, pieces, pause in (
        (200, [bytes(50)] * 2, 0.1),
        (408, [b"1"] * 50, 0.1),  # fewer bytes a second than it has to bring
        (408, [bytes(50)] * 50, 0.1),  # more, and yet not all of it in time
        (408, [b"1"], 5.0),
    ):
        begun = time.monotonic()
        assert asked(guard, path, "POST", pieces, pause, **told) == status
        assert time.monotonic() - begun < 2
