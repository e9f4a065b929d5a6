"""Defects that were called good: kept from the page, and in the way of versions that miss them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from browser import running_browser
from conftest import Command, write_part
from running import Served, serving

from anomaly.errors import OutputError
from anomaly.line.registry import back, deploy
from anomaly.storage.golden import keep_missed


@pytest.fixture
def faint(tmp_path: Path) -> Path:
    """A part that the model calls good; somebody calls it defective."""
    write_part(tmp_path / "faint.png", seed=4242)
    return tmp_path / "faint.png"


def _post(served: Served, path: str, **body: str) -> tuple[int, str]:
    sent = json.dumps(body).encode()
    status, _, said = served.ask("POST", path, sent, {"Content-Type": "application/json"})
    return status, said.decode()


def test_the_page_keeps_a_defect_that_was_called_good(
    run_folder: Path, product: Path, tmp_path: Path, faint: Path
) -> None:
    run = Path(shutil.copytree(run_folder, tmp_path / "models" / "disc"))
    with (
        running_browser(tmp_path / "profile") as page,
        serving(run.parent, "--record", str(tmp_path / "line.sqlite")) as served,
    ):
        rejected = served.score((product / "test" / "spot" / "000.png").read_bytes())[1]["id"]
        assert _post(served, f"/v1/parts/{rejected}/feedback", verdict="defect")[0] == 200
        assert _post(served, f"/v1/parts/{rejected}/missed")[0] == 409
        number = served.score(faint.read_bytes())[1]["id"]
        status, said = _post(served, f"/v1/parts/{number}/missed")
        assert (status, "isn't a defect that was called good" in said) == (409, True)
        page.open(f"http://127.0.0.1:{served.port}/")
        page.until("document.getElementById('state').textContent", "live")
        page.until("document.querySelector('#strip button')?.dataset.part", str(number))
        hidden = "document.getElementById('missed').hidden"
        assert page.evaluate(hidden) is True
        page.until("performance.now() > 700", True)
        page.press("d")
        page.until(hidden, False, seconds=20)
        page.press("m")
        page.until(hidden, True, seconds=20)
        assert "known missed defect: part-" in served.get(f"/v1/parts/{number}")["feedback"]["note"]
        (kept,) = (run / "golden" / "missed").iterdir()
        assert kept.read_bytes() == faint.read_bytes()
        # The model goes on with it: checked anew, and ready.
        page.until(
            "fetch('/v1/models/disc').then(a => a.json()).then(m => m.checked.includes('known'))",
            True,
            seconds=60,
        )
        assert served.ask("GET", "/v2/health/ready")[0] == 200
        assert "known defects caught: 0 of 1" in served.get("/v1/models/disc")["checked"]


def test_a_version_that_lets_it_pass_isnt_deployed(
    run_folder: Path, tmp_path: Path, faint: Path, command: Command
) -> None:
    """Known defects of the version there count, and go with the new one, and back."""
    run = Path(shutil.copytree(run_folder, tmp_path / "line"))
    new = Path(shutil.copytree(run_folder, tmp_path / "new"))
    kept = keep_missed(run / "model", "faint.png", faint.read_bytes()).name
    assert command("calibrate", ["--model", new, "--threshold", 9.0, "--device", "cpu"])[0] == 0
    arguments = ["--model", new, "--to", run, "--device", "cpu"]
    code, _, err = command("deploy", arguments)
    assert (code, f"this version calls known defects good (missed/{kept} (" in err) == (2, True)
    assert not (run / "earlier").exists()
    assert command("deploy", [*arguments, "--force"])[0] == 0
    assert (run / "golden" / "missed" / kept).read_bytes() == faint.read_bytes()
    assert json.loads((run / "golden" / "golden.json").read_text())["images"] == {}
    write_part(tmp_path / "other.png", seed=4343)
    later = keep_missed(run / "model", "other.png", (tmp_path / "other.png").read_bytes()).name
    back(run)
    assert sorted(p.name for p in (run / "golden" / "missed").iterdir()) == sorted([kept, later])
    # One that catches them needs no word.
    third = Path(shutil.copytree(run_folder, tmp_path / "third"))
    assert command("calibrate", ["--model", third, "--threshold", 1e-4, "--device", "cpu"])[0] == 0
    assert command("deploy", ["--model", third, "--to", run, "--device", "cpu"])[0] == 0


@pytest.mark.parametrize("place", ["golden", "golden/missed/part.png", "train.json"])
def test_links_in_a_run_are_not_followed(run_folder: Path, tmp_path: Path, place: str) -> None:
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    (run / place).unlink(missing_ok=True)
    (run / place).parent.mkdir(parents=True, exist_ok=True)
    (run / place).symlink_to(tmp_path)
    with pytest.raises(OutputError, match="is a link"):
        deploy(run / "model", tmp_path / "line")
    assert not (tmp_path / "line").exists()


def test_what_somebody_has_agreed_to_is_deployed(
    run_folder: Path, tmp_path: Path, faint: Path, command: Command
) -> None:
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    keep_missed(run / "model", "faint.png", faint.read_bytes())
    arguments = ["--model", run, "--to", tmp_path / "line", "--device", "cpu"]
    assert command("deploy", arguments)[0] == 2
    check = ["--model", run, "--golden", run / "golden", "--device", "cpu"]
    assert command("selfcheck", [*check, "--record"])[0] == 0  # as `update --force` does
    assert command("deploy", arguments)[0] == 0
    assert (tmp_path / "line" / "golden" / "missed").is_dir()
    shutil.rmtree(tmp_path / "line")
    deploy(run / "model", tmp_path / "line")
    assert (tmp_path / "line" / "golden" / "missed").is_dir()
