"""Another version of a model while parts come, over HTTP, and the way back."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import MadeOnce, Says, run_command
from kit import until
from running import serving

from anomaly.errors import OutputError
from anomaly.line import models
from anomaly.line.commands import back, deploy, same_model
from anomaly.storage.folder import model_id


@pytest.fixture
def line(run_folder: Path, tmp_path: Path) -> Path:
    """A folder with one model, `line/disc`."""
    shutil.copytree(run_folder / "model", tmp_path / "line" / "disc" / "model")
    return tmp_path / "line"


@pytest.fixture(scope="module")
def other(run_folder: Path, product: Path, made_once: MadeOnce) -> Path:
    """Another version, by which everything is to be rejected; with golden parts; read only."""

    def make(run: Path) -> None:
        shutil.copytree(run_folder, run)
        limits = ["--threshold", 0.001, "--review-threshold", 0.0005]
        run_command("calibrate", ["--model", run, *limits, "--yes"])
        shutil.copytree(product / "test", run / "golden")
        golden = ["--golden", run / "golden", "--overwrite"]
        run_command("evaluate", ["--model", run, *golden])

    return made_once("versions/disc-2", make)


def test_a_new_version_and_the_way_back_without_a_gap(
    line: Path, other: Path, product: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    monkeypatch.setattr(models, "_LOOK_SECONDS", 0.05)
    data = (product / "test" / "good" / "000.png").read_bytes()
    old, new = model_id(line / "disc" / "model"), model_id(other / "model")
    golden = line / "disc" / "golden"
    answers: list[tuple[int, dict[str, Any]]] = []
    done = threading.Event()

    def send() -> None:
        while not done.wait(0.02):
            answers.append(served.score(data))

    def model(wanted: str, *, refused: bool = False) -> dict[str, Any]:
        def said() -> dict[str, Any]:
            return dict(served.get("/v1/models/disc"))

        until(lambda: (said()["model_id"], said()["refused"]) == (wanted, refused))
        seen = len(answers)
        until(lambda: len(answers) >= seen + 10)
        return said()

    arguments = ["--to", line / "disc"]
    with serving(line) as served, ThreadPoolExecutor() as pool:
        senders = [pool.submit(send) for _ in range(2)]
        try:
            out = says(0, "deploy", [*arguments, "--model", other, "--yes"])
            undo = f"anomaly deploy --to {line / 'disc'} --back"
            assert all(text in out for text in ("6 golden parts", f"holds model {new} now", undo))
            assert "6 golden parts" in model(new)["checked"]
            says(0, "deploy", ["--to", line / "disc", "--back"])
            model(old)
            # Put there by hand, past the command: first with a golden part that has moved.
            shutil.rmtree(line / "disc" / "model")
            shutil.copytree(other, line / "disc", dirs_exist_ok=True)
            shutil.copy(product / "train" / "good" / "003.png", golden / "spot" / "000.png")
            refused = model(old, refused=True)
            assert (refused["state"], "spot/000.png" in refused["reason"]) == ("ready", True)
            assert served.ask("GET", "/v2/health/ready")[0] == 200
            assert served.get("/v1/alarms")["alarms"][0]["kind"] == "refused"
            assert served.figures()['anomaly_version_refused{model="disc"}'] == 1
            shutil.copy(product / "test" / "spot" / "000.png", golden / "spot" / "000.png")
            assert model(new)["reason"] == ""
        finally:
            done.set()
        assert [sender.result() for sender in senders] == [None, None]
    assert {status for status, _ in answers} == {200}  # no gap, neither there nor back
    rows = sorted((row for _, row in answers), key=lambda row: int(row["id"]))
    told = [(row["model_id"], row["verdict"]) for row in rows]
    assert set(told) == {(old, "good"), (new, "reject")}
    assert (told[0][0], told[-1][0]) == (old, new)
    changes = [a[0] != b[0] for a, b in zip(told[5:], told[:-5], strict=True)]
    assert 0 < sum(changes) <= 45  # an old one may finish among the new, but not for long


def test_a_bad_version_isnt_deployed(
    line: Path, other: Path, product: Path, tmp_path: Path, says: Says
) -> None:
    old = model_id(line / "disc" / "model")
    bad = Path(shutil.copytree(other, tmp_path / "bad"))
    shutil.copy(product / "train" / "good" / "003.png", bad / "golden" / "spot" / "000.png")
    to = ["--to", line / "disc"]
    for wrong, said in (
        (["--model", bad], "golden parts' scores or verdicts differ"),
        ([], "give either --model"),
        (["--back", "--model", other], "give either --model"),
        (["--back"], "no earlier version"),
    ):
        assert said in says(2, "deploy", [*to, *wrong])
    # A slip of the hand puts one product's model in the place of another's.
    summary = json.loads((other / "train.json").read_text())
    (line / "disc" / "train.json").write_text(json.dumps(summary | {"name": "lid"}))
    refusal = says(1, "deploy", [*to, "--model", other])
    assert "calls good: another product?" in refusal  # it rejects everything
    assert "is named disc, the line's lid: the same part?" in refusal
    for place, said in ((line, "the runs disc, which a model in it"), (bad / "model", "a model f")):
        with pytest.raises(OutputError, match=said):
            deploy(other / "model", place)
    assert sorted(one.name for one in (line / "disc").iterdir()) == ["model", "train.json"]
    assert model_id(line / "disc" / "model") == old


def test_versions_are_kept_in_order(line: Path, other: Path, run_folder: Path) -> None:
    """With golden parts and what is known of a training, which has the test split's place."""
    run, known = line / "disc", b'{"data_folder": "elsewhere"}'
    first, second = model_id(run / "model"), model_id(other / "model")
    (run / "train.json").write_bytes(known)
    deploy(other / "model", run)
    assert (run / "golden" / "golden.json").is_file()
    assert (run / "train.json").read_bytes() == (other / "train.json").read_bytes()
    deploy(run_folder / "model", run)
    assert not (run / "golden").exists()
    kept = sorted(one.name for one in (run / "earlier").iterdir())
    assert kept == [f"001-{first}", f"002-{second}"]
    for expected in (second, first):
        back(run)
        assert model_id(run / "model") == expected
        assert (run / "golden").is_dir() == (expected == second)
    assert (run / "train.json").read_bytes() == known
    withdrawn = run / "withdrawn" / f"002-{second}"
    assert (withdrawn / "golden" / "golden.json").is_file()
    with pytest.raises(OutputError, match="no earlier version"):
        back(run)
    # What was withdrawn may come again, and a folder that is new is made.
    deploy(withdrawn / "model", run)
    deploy(other / "model", line / "new" / "disc")
    assert model_id(run / "model") == model_id(line / "new" / "disc" / "model") == second


def test_an_export_takes_the_place_of_its_model_and_gives_it_back(
    line: Path, run_folder: Path, tmp_path: Path
) -> None:
    """It keeps the model's id, and yet is another version: another engine computes."""
    run, export = line / "disc", tmp_path / "export" / "model"
    shutil.copytree(run_folder / "model", export)
    for engine in ("onnx", "openvino"):
        (export / "export.json").write_text(json.dumps({"engine": engine}))
        deploy(export, run)
        assert engine in (run / "model" / "export.json").read_text()
    assert same_model(run / "model", export)
    back(run)
    back(run)
    assert model_id(run / "model") == model_id(run_folder / "model")
    assert not (run / "model" / "export.json").exists()
