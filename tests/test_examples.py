"""The examples run as they are."""

from __future__ import annotations

import importlib
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from conftest import REPOSITORY


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_camera_judges_each_frame_and_keeps_what_is_not_good(elsewhere: Path) -> None:
    camera = importlib.import_module("camera")
    counts = camera.main([])
    assert counts.total() == 5
    pictures = list((elsewhere / "camera" / "kept").iterdir())
    assert len(pictures) == counts.total() - counts["good"]
    assert any("000004" in picture.name for picture in pictures)  # the one with a nick
    assert counts["good"] > 0
    with pytest.raises(SystemExit, match="no camera or video"):
        camera.inspect(None, "nothing.avi", elsewhere)


def test_a_folder_is_sent_though_the_service_is_away_at_first(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sender = importlib.import_module("send_folder")
    monkeypatch.setattr(sender, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(sender, "WRITTEN_SECONDS", 0.0)
    monkeypatch.setenv("ANOMALY_TOKEN", "0123456789abcdef")
    asked: list[tuple[str, str, bytes]] = []
    answers = [
        (503, {"detail": "64 parts wait"}),
        (422, {"id": 1, "verdict": "", "status": "unreadable"}),
        (200, {"id": 2, "verdict": "reject", "status": "ok"}),
        (404, {"detail": "no model"}),
    ]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, self.headers["Authorization"], body))
            status, said = answers[len(asked) - 1]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *_: object) -> None:
            pass

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    (elsewhere / "camera").mkdir()
    for name in ("a b.png", "c.PNG", "d.png", "notes.txt"):
        (elsewhere / "camera" / name).write_bytes(name.encode())
        os.utime(elsewhere / "camera" / name, (1e9, 1e9))

    def late() -> None:
        time.sleep(0.3)
        server = HTTPServer(address, Handler)
        for _ in answers:
            server.handle_request()
        server.server_close()

    thread = threading.Thread(target=late)
    thread.start()
    with pytest.raises(SystemExit, match=r"refuses camera/d.png: 404, no model"):
        sender.main(["camera", f"http://127.0.0.1:{address[1]}/score"])
    thread.join()
    assert [(path, body) for path, _, body in asked] == [
        ("/score?name=a%20b.png", b"a b.png"),
        ("/score?name=a%20b.png", b"a b.png"),
        ("/score?name=c.PNG", b"c.PNG"),
        ("/score?name=d.png", b"d.png"),
    ]
    assert {token for _, token, _ in asked} == {"Bearer 0123456789abcdef"}
    out, err = capsys.readouterr()
    assert out.splitlines() == ["1  a b.png  unreadable", "2  c.PNG  reject"]
    assert err.count("isn't reached") == 1
    assert "64 parts wait" in err
