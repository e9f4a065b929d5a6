"""Users with a token each: who may ask, and who is noted beside what is said of a part."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import running_browser
from conftest import Command
from running import Served, serving

from anomaly.line.serve import read_users

ADA, BOB = "0123456789abcdef", "fedcba9876543210"
USERS = f"# the early shift\nAda Lovelace: {ADA}\n\n'Bob': \"{BOB}\"\n"


def test_a_file_of_users_is_yaml_and_plain_lines(tmp_path: Path) -> None:
    (tmp_path / "users").write_text(USERS, "utf-8-sig")
    assert read_users(tmp_path / "users") == {"Ada Lovelace": ADA, "Bob": BOB}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("# nobody\n", "has no users"),
        (f"Ada: {ADA}\n{BOB}\n", "line 2 must be `name: token`"),
        (f": {ADA}\n", "line 1 must be"),
        (f"Ada: {ADA[:15]}\n", "line 1 must have 16 characters"),
        (f"Ada: {ADA}é\n", "line 1 must have 16 characters or more, all plain ASCII"),
        (f"Ada: {ADA}\nAda: {BOB}\n", "line 2 has the name or the token of an earlier line"),
        (f"Ada: {ADA}\nBob: {ADA}\n", "line 2 has the name or the token of an earlier line"),
        (USERS, "give either --users, or a token for all"),
    ],
)
def test_users_that_are_wrong_are_refused_without_their_tokens(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    (tmp_path / "users").write_text(text, "utf-8")
    if text == USERS:
        monkeypatch.setenv("ANOMALY_TOKEN", BOB)
    code, out, err = command("serve", ["--models", tmp_path, "--users", tmp_path / "users"])
    assert (code, reason in err) == (2, True), err
    assert not any(token in out + err for token in (ADA[:15], BOB))


@pytest.fixture(scope="module")
def line(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("users")
    (folder / "users").write_text(USERS)
    shutil.copytree(run_folder, folder / "models" / "disc")
    with serving(folder / "models", "--users", str(folder / "users")) as served:
        yield served


def login(user: str, token: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{token}".encode()).decode()}


def test_a_name_goes_with_its_own_token_alone(line: Served) -> None:
    for shown, user in (
        ({"Authorization": f"Bearer {ADA}"}, "Ada Lovelace"),
        (login("Ada Lovelace", ADA), "Ada Lovelace"),
        (login("Bob", BOB), "Bob"),
        (login("Bob", ADA), None),
        (login("Ada Lovelace", BOB), None),
        (login("", ADA), None),
        (login("Eve", ADA), None),
        (login("Bob", ""), None),
        ({"Authorization": f"Bearer {ADA[:-1]}"}, None),
        ({}, None),
    ):
        status, _, body = line.ask("GET", "/v1/user", headers=shown)
        assert status == (401 if user is None else 200), shown
        assert user is None or json.loads(body) == {"user": user}


def test_feedback_is_by_whose_token_it_was(line: Served, product: Path, tmp_path: Path) -> None:
    line.token = BOB
    number = line.score((product / "test" / "spot" / "000.png").read_bytes())[1]["id"]
    body = json.dumps({"verdict": "defect", "who": "Ada Lovelace"}).encode()
    kind = {"Content-Type": "application/json", **login("Bob", BOB)}
    status, _, answer = line.ask("POST", f"/v1/parts/{number}/feedback", body, kind)
    assert (status, json.loads(answer)["feedback"]["who"]) == (200, "Bob")
    with running_browser(tmp_path / "profile") as page:
        page.call("Network.setExtraHTTPHeaders", headers={"Authorization": f"Bearer {ADA}"})
        page.open(f"http://127.0.0.1:{line.port}/")
        who = "document.getElementById('who')"
        page.until(f"{who}.readOnly && {who}.value", "Ada Lovelace")
