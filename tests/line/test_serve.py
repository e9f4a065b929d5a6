"""The service as a process, over HTTP: the same rows as `infer`, and limits that hold."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import struct
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import Command
from running import Served

import anomaly

_OTHERWISE = ("path", "heatmap", "time", "milliseconds", "image_score", "calibrated_score")


@pytest.fixture
def images(product: Path, tmp_path: Path) -> dict[str, Path]:
    """Good parts, defective ones, and files that can't be used."""
    folder = tmp_path / "images"
    shutil.copytree(product / "test", folder)
    whole = (folder / "good" / "000.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[:-30])
    (folder / "empty.png").write_bytes(b"")
    (folder / "words.png").write_bytes(b"these are words")
    (folder / "large.png").write_bytes(_bomb(40_000, 40_000))
    return {str(file): file for file in sorted(folder.rglob("*.png"))}


def _bomb(width: int, height: int) -> bytes:
    """A small PNG file of very many pixels, all black."""
    packed = zlib.compressobj()
    row = bytes(1 + width)
    data = b"".join(packed.compress(row) for _ in range(200)) + packed.flush()

    def chunk(kind: bytes, body: bytes) -> bytes:
        checked = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + checked

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def test_an_answer_is_the_row_that_infer_writes(
    served: Served, images: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    folder = next(iter(images.values())).parents[0]
    arguments = ["--model", served.folder / "disc", "--input", folder, "--output", tmp_path / "out"]
    assert command("infer", [*arguments, "--device", "cpu"])[0] == 3
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    expected = {row["path"]: row for row in map(json.loads, lines)}
    assert expected.keys() == images.keys()
    for path, file in images.items():
        status, row = served.score(file.read_bytes(), f"?name={file.name}")
        wanted = expected[path]
        assert status == (200 if wanted["status"] == "ok" else 422)
        assert row["path"] == file.name
        if wanted["image_score"] is None:
            assert row["image_score"] is None
        else:
            assert row["image_score"] == pytest.approx(wanted["image_score"], rel=1e-4)
        assert row.pop("id") > 0
        assert row.keys() == wanted.keys()
        wanted["reason"] = wanted["reason"].removeprefix(f"{path}: ")
        told = {key: value for key, value in row.items() if key not in _OTHERWISE}
        assert told == {key: value for key, value in wanted.items() if key not in _OTHERWISE}


def test_pictures_and_regions_come_on_request(served: Served, product: Path) -> None:
    file = product / "test" / "spot" / "000.png"
    query = "?include=heatmap&include=mask&include=regions"
    status, answer = served.score(file.read_bytes(), query)
    assert status == 200
    prediction = anomaly.load(served.folder / "disc", device="cpu").predict(file)
    assert (_picture(answer["heatmap_png"]) == prediction.heatmap()[..., ::-1]).all()
    mask = _picture(answer["mask_png"], cv2.IMREAD_GRAYSCALE)
    assert (mask > 0).mean() == pytest.approx(prediction.mask.mean(), abs=1e-3)
    assert len(answer["regions"]) == len(prediction.regions) > 0
    assert answer["regions"][0]["peak_x"] == prediction.regions[0].peak_x
    assert served.score(file.read_bytes(), "?include=everything")[0] == 400


def _picture(text: str, flag: int = cv2.IMREAD_COLOR) -> Any:
    return cv2.imdecode(np.frombuffer(base64.b64decode(text), np.uint8), flag)


HOSTILE = "../../etc/<img src=x onerror=alert(1)>\n\x1b[2J\u202e.png"


def test_a_form_and_a_name_that_means_harm(served: Served, product: Path) -> None:
    data = (product / "test" / "good" / "000.png").read_bytes()
    named = HOSTILE.replace("\n", " ")
    body = b"--xx\r\nContent-Disposition: form-data; name=note\r\n\r\nhello\r\n--xx\r\n"
    body += f'Content-Disposition: form-data; name="image"; filename="{named}"\r\n'.encode()
    body += b"Content-Type: image/png\r\n\r\n" + data + b"\r\n--xx--\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=xx"}
    before = _files(served.folder)
    status, _, answer = served.ask("POST", "/v1/models/disc/score", body, kind)
    row = json.loads(answer)
    assert (status, row["status"]) == (200, "ok")
    assert row["path"].isprintable()
    assert "<img" in row["path"]
    assert _files(served.folder) == before
    stored = served.get(f"/v1/parts/{row['id']}")
    assert stored["path"] == row["path"]
    status, _, answer = served.ask("POST", "/v1/models/disc/score", b"--xx--\r\n", kind)
    assert (status, "no file" in answer.decode()) == (400, True)


def _files(folder: Path) -> list[str]:
    return sorted(str(file) for file in folder.parent.rglob("*") if "line.sqlite" not in file.name)


def test_a_body_that_is_too_long_is_refused_before_it_is_read(served: Served) -> None:
    for told in (f"Content-Length: {5 * 10**9}", "Transfer-Encoding: chunked"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as line:
            head = f"POST /v1/models/disc/score HTTP/1.1\r\nHost: localhost\r\n{told}\r\n\r\n"
            line.sendall(head.encode())
            if "chunked" in told:
                for _ in range(3):
                    line.sendall(b"f4240\r\n" + bytes(1_000_000) + b"\r\n")
            answer = b""
            while chunk := line.recv(65536):
                answer += chunk
            assert answer.startswith(b"HTTP/1.1 413 "), answer
            assert b"2 MB" in answer


def test_what_is_asked_of_models_and_health(served: Served) -> None:
    assert served.get("/v2/health/live") == {"live": True}
    (one,) = served.get("/v1/models")["models"]
    assert (one["name"], one["state"], one["method"]) == ("disc", "ready", "PatchCore")
    model = served.get("/v1/models/disc")
    assert model["thresholds"]["label"] == "calibrated"
    assert model["config"]["image"]["area"] == 64
    assert any("reject threshold" in line for line in model["calibration"])
    status, _, body = served.ask("GET", "/v1/models/disk")
    assert (status, "did you mean 'disc'" in body.decode()) == (404, True)


def test_the_description_has_examples_of_what_is_answered(served: Served, product: Path) -> None:
    description = served.get("/openapi.json")
    score = description["paths"]["/v1/models/{name}/score"]["post"]
    examples = {
        code: score["responses"][code]["content"]["application/json"]["example"]
        for code in ("200", "422")
    }
    data = (product / "test" / "good" / "000.png").read_bytes()
    _, answer = served.score(data, "?include=regions")
    assert answer.keys() == examples["200"].keys()
    _, refused = served.score(data[:-40])
    assert refused.keys() == examples["422"].keys()
    assert "multipart/form-data" in score["requestBody"]["content"]


def test_metrics_count_what_was_answered(served: Served, product: Path) -> None:
    def counted() -> dict[str, float]:
        lines = served.ask("GET", "/metrics")[2].decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
        }

    before = counted()
    data = (product / "test" / "spot" / "000.png").read_bytes()
    assert served.score(data)[0] == 200
    assert served.score(data[:-40])[0] == 422
    after = counted()
    for name, more in (
        ('anomaly_parts_total{model="disc",status="ok",verdict="reject"}', 1),
        ('anomaly_parts_total{model="disc",status="unreadable",verdict=""}', 1),
        ('anomaly_part_seconds_count{model="disc"}', 2),
        ('anomaly_http_answers_total{code="422"}', 1),
    ):
        assert after[name] - before.get(name, 0.0) == more
    assert after['anomaly_waiting_parts{model="disc"}'] == after["anomaly_held_bytes"] == 0
    assert after['anomaly_score{model="disc",quantile="0.99"}'] > 0


def test_people_say_what_a_part_is(served: Served, product: Path) -> None:
    _, row = served.score((product / "test" / "spot" / "001.png").read_bytes())
    path = f"/v1/parts/{row['id']}/feedback"
    for said in ("defect", "good"):
        body = json.dumps({"verdict": said, "note": "seen by hand", "who": "Ada"}).encode()
        kind = {"Content-Type": "application/json"}
        status, _, answer = served.ask("POST", path, body, kind)
        assert (status, json.loads(answer)["feedback"]["verdict"]) == (200, said)
    stored = served.get(f"/v1/parts/{row['id']}")
    assert stored["feedback"]["note"] == "seen by hand"
    assert served.get("/v1/parts?limit=1&verdict=reject")["parts"][0]["id"] == row["id"]
    assert served.ask("GET", f"/v1/parts/{row['id']}/heatmap")[2][:2] == b"\xff\xd8"
    _, unread = served.score(b"no picture")
    for number, wanted in ((unread["id"], "could be read"), (10**6, "doesn't exist")):
        status, _, answer = served.ask("POST", f"/v1/parts/{number}/feedback", body, kind)
        assert (status, wanted in answer.decode()) == (409, True)
    assert served.ask("POST", path, b'{"verdict": "perhaps"}', kind)[0] == 400
    assert served.ask("GET", f"/v1/parts/{2**70}")[0] == 400
    for body in (b"{", b"[1]"):
        status, _, answer = served.ask("POST", path, body, kind)
        assert (status, b"isn't a JSON object" in answer) == (400, True)
    for since in ("hello", "0001-01-01T00:00%2B23:00"):
        status, _, answer = served.ask("GET", f"/v1/counts?since={since}")
        assert (status, b"ISO 8601" in answer) == (400, True)
    # Times of another zone, or of less precision, mean the same.
    times = ("2020-01-01", "2020-01-01T02:00%2B02:00", "2020-01-01T00:00Z")
    counts = [served.get(f"/v1/counts?since={time}") for time in times]
    assert counts[0]
    assert counts[0] == counts[1] == counts[2]


def test_pages_of_other_sites_may_not_ask(served: Served) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Host": "["}):
        assert served.ask("GET", "/v1/parts", headers=headers)[0] == 403
    status, headers, _ = served.ask(
        "GET", "/", headers={"Origin": f"http://127.0.0.1:{served.port}"}
    )
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]


def test_only_this_machine_may_ask_without_a_token(
    served: Served, command: Command, tmp_path: Path
) -> None:
    arguments = ["--models", served.folder, "--record", tmp_path / "r.sqlite"]
    code, _, err = command("serve", [*arguments, "--host", "0.0.0.0"])
    assert (code, "token" in err) == (2, True)
    short = tmp_path / "token"
    short.write_text("secret\n")
    code, _, err = command("serve", [*arguments, "--token-file", short])
    assert (code, "16 characters" in err) == (2, True)
    code, _, err = command("serve", ["--models", served.folder])
    assert (code, "in use" in err or "another" in err) == (2, True)
