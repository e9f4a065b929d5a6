"""Answers of the service over HTTP: the same rows as `infer`, and what people say of them."""

from __future__ import annotations

import base64
import json
import shutil
import zlib
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import cv2
import numpy as np
import pytest
from conftest import Says
from picture_files import png
from running import Served, serving

import anomaly

SCORE = "/v1/models/disc/score"
_OTHERWISE = ("path", "heatmap", "time", "milliseconds", "image_score", "calibrated_score")


def test_an_answer_is_the_row_that_infer_writes(
    served: Served, product: Path, tmp_path: Path, says: Says
) -> None:
    """Of good parts, defective ones, and files that can't be used."""
    folder = Path(shutil.copytree(product / "test", tmp_path / "images"))
    whole = (folder / "good" / "000.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[:-30])
    (folder / "empty.png").write_bytes(b"")
    (folder / "words.png").write_bytes(b"these are words")
    black = zlib.compress(bytes(40_001 * 200))
    (folder / "large.png").write_bytes(png(40_000, 40_000, 8, 0, [black]))
    arguments = ["--model", served.folder / "disc", "--input", folder, "--output", tmp_path / "out"]
    says(3, "infer", [*arguments, "--device", "cpu"])
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert len(lines) == 10
    for wanted in map(json.loads, lines):
        path = Path(wanted["path"])
        status, row = served.score(path.read_bytes(), f"?name={path.name}")
        assert status == (200 if wanted["status"] == "ok" else 422)
        assert row["path"] == path.name
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


def _picture(text: str, flag: int = cv2.IMREAD_COLOR) -> Any:
    return cv2.imdecode(np.frombuffer(base64.b64decode(text), np.uint8), flag)


def test_a_body_is_the_file_and_text_is_told_how_to_send_one(served: Served, product: Path) -> None:
    data = (product / "test" / "good" / "000.png").read_bytes()
    code = base64.b64encode(data)
    before = {*served.folder.parent.rglob("*.png")}
    harm = "../../<img src=x onerror=x>\x1b[2J\u202e.png"
    status, row = served.score(data, f"?name={quote(harm)}")
    assert (status, row["image_sha256"]) == (200, sha256(data).hexdigest())
    assert row["path"] == "../../<img src=x onerror=x>\\u001b[2J\\u202e.png"
    assert served.get(f"/v1/parts/{row['id']}")["path"] == row["path"]
    assert {*served.folder.parent.rglob("*.png")} == before  # a name leads nowhere
    send = "curl --data-binary @part.png"
    form = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + data
    for body, headers, status, said in (
        (form + b"\r\n--x--", {"Content-Type": "multipart/form-data; boundary=x"}, 415, send),
        (form, {}, 415, send),
        (code, {"Content-Type": "application/x-www-form-urlencoded"}, 415, send),
        (base64.encodebytes(data), {}, 415, send),
        (b'{"image": "' + code + b'"}', {"Content-Type": "application/json"}, 415, send),
        (b"[1, 2]", {}, 415, send),
        (b'  "' + code + b'"', {}, 415, send),
        (b"data:image/png;base64," + code, {}, 415, send),
        (data, {"Content-Type": "image/png; charset=none-such"}, 200, ""),
        (b"these are words", {}, 422, ""),  # as `infer` would tell
        (b"AAAA" * 40, {}, 422, ""),
        (b"", {}, 422, ""),
    ):
        answer = served.ask("POST", SCORE, body, headers)
        assert (answer[0], said in answer[2].decode()) == (status, True), (body[:80], answer)
    assert len(served.score(data, "?name=" + "%0a" * 2000)[1]["path"]) == 255


def test_metrics_count_what_was_answered(served: Served, product: Path) -> None:
    before = served.figures()
    data = (product / "test" / "spot" / "000.png").read_bytes()
    assert served.score(data)[0] == 200
    assert served.score(data[:-40])[0] == 422
    after = served.figures()
    for name, more in (
        ('anomaly_parts_total{model="disc",status="ok",verdict="reject"}', 1),
        ('anomaly_parts_total{model="disc",status="unreadable",verdict=""}', 1),
    ):
        assert after[name] - before.get(name, 0.0) == more
    assert after['anomaly_waiting_parts{model="disc"}'] == after["anomaly_held_bytes{}"] == 0
    name = 'anomaly_part_seconds_total{model="disc",status="ok",verdict="reject"}'
    assert 0 < after[name] - before.get(name, 0.0) < 60


def test_people_say_what_a_part_is(served: Served, product: Path) -> None:
    _, row = served.score((product / "test" / "spot" / "001.png").read_bytes())
    part = f"/v1/parts/{row['id']}"
    judge = f"{part}/feedback"
    for said in ("defect", "good"):
        status, answer = served.post(judge, verdict=said, note="by hand", who="Ada")
        assert (status, answer["feedback"]["verdict"]) == (200, said)
    assert served.get(part)["feedback"]["note"] == "by hand"
    assert served.get("/v1/parts?limit=1&verdict=reject")["parts"][0]["id"] == row["id"]
    assert served.ask("GET", f"{part}/heatmap")[2][:2] == b"\xff\xd8"
    _, unread = served.score(b"no picture")
    for number, wanted in ((unread["id"], "could be read"), (10**6, "doesn't exist")):
        status, answer = served.post(f"/v1/parts/{number}/feedback", verdict="good")
        assert (status, wanted in answer["detail"]) == (409, True)
    for method, path, body, wanted in (
        ("POST", judge, b'{"verdict": "perhaps"}', "should be 'good', 'defect' or"),
        ("POST", judge, b"{", "JSON decode error"),
        ("POST", judge, b"[1]", "should be a valid dictionary"),
        ("POST", f"{SCORE}?include=everything", b"x", "should be 'heatmap', 'mask' or 'regions'"),
        ("GET", f"/v1/parts/{2**70}", None, "number"),
        ("GET", "/v1/counts?since=hello", None, "ISO 8601"),
        ("GET", "/v1/counts?since=0001-01-01T00:00%2B23:00", None, "ISO 8601"),
    ):
        status, _, said = served.ask(method, path, body, {"Content-Type": "application/json"})
        assert (status, wanted in said.decode()) == (400, True), (path, said)
    for kind in ("", "/heatmap", "/photograph"):
        assert served.ask("GET", f"/v1/parts/1000000{kind}")[0] == 404
    # Times of another zone, or of less precision, mean the same.
    times = ("2020-01-01", "2020-01-01T02:00%2B02:00", "2020-01-01T00:00Z")
    counts = [served.get(f"/v1/counts?since={time}") for time in times]
    assert counts[0]
    assert counts == [counts[0]] * 3


def test_only_this_machine_may_ask_without_a_token(
    served: Served, says: Says, tmp_path: Path
) -> None:
    arguments = ["--models", served.folder, "--record", tmp_path / "r.sqlite"]
    assert "token" in says(2, "serve", [*arguments, "--host", "0.0.0.0"])
    short = tmp_path / "token"
    short.write_text("secret\n")
    assert "16 characters" in says(2, "serve", [*arguments, "--token-file", short])


def test_health_alarms_and_figures_say_what_is_wrong(run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, tmp_path / "line" / "disc")
    (tmp_path / "line" / "disc" / "model" / "scorer.safetensors").unlink()
    file = tmp_path / "line" / "line.sqlite"

    def said() -> tuple[str, list[tuple[str, str, str]], float]:
        health = json.loads(served.ask("GET", "/v2/health/ready")[2])
        assert str(tmp_path) not in str(health)  # clients without a token ask, too
        alarms = served.get("/v1/alarms")["alarms"]
        named = [(alarm["kind"], alarm["model"], alarm["severity"]) for alarm in alarms]
        return health["reason"], named, served.figures()["anomaly_record_trouble{}"]

    failed = ("failed", "disc", "error")
    with serving(tmp_path / "line") as served:
        assert said() == ("disc has failed", [failed], 0)
        (alarm,) = served.get("/v1/alarms")["alarms"]
        assert "scorer.safetensors" in alarm["reason"]
        assert served.score(b"x")[0] == 503
        file.rename(tmp_path / "away")
        reason, alarms, trouble = said()
        assert "parts can't be recorded" in reason
        assert (alarms[0], trouble) == (("unwritable", "", "error"), 1)
        (tmp_path / "away").rename(file)
        assert said() == ("disc has failed", [failed], 0)
