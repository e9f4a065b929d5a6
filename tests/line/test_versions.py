"""Another version of a model while parts come, over HTTP, and the way back."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from running import Served, serving

from anomaly.errors import OutputError
from anomaly.line.registry import back, deploy
from anomaly.storage.folder import model_id


@pytest.fixture
def line(run_folder: Path, tmp_path: Path) -> Path:
    """A folder with one model, `line/disc`."""
    shutil.copytree(run_folder / "model", tmp_path / "line" / "disc" / "model")
    return tmp_path / "line"


@pytest.fixture
def other(run_folder: Path, tmp_path: Path, product: Path, command: Command) -> Path:
    """Another version, by which everything is to be rejected; with golden parts."""
    run = tmp_path / "disc-2"
    shutil.copytree(run_folder, run)
    arguments = ["--model", run, "--threshold", 0.001, "--review-threshold", 0.0005]
    assert command("calibrate", arguments)[0] == 0
    shutil.copytree(product / "test", run / "golden")
    arguments = ["--model", run, "--golden", run / "golden", "--record", "--device", "cpu"]
    assert command("selfcheck", arguments)[0] == 0
    return run


def until(served: Served, is_so: Callable[[dict[str, Any]], bool], seconds: float = 120.0) -> Any:
    """What the list says of the model once it is so."""
    end = time.monotonic() + seconds
    while True:
        (model,) = served.get("/v1/models")["models"]
        if is_so(model):
            return model
        assert time.monotonic() < end, model
        time.sleep(0.05)


@pytest.fixture
def sending(product: Path) -> Iterator[Callable[[Served], list[tuple[int, Any]]]]:
    """Sends a good part over and over until the test ends; the answers so far."""
    data = (product / "test" / "good" / "000.png").read_bytes()
    done, threads = threading.Event(), []

    def start(served: Served) -> list[tuple[int, Any]]:
        answers: list[tuple[int, Any]] = []

        def send() -> None:
            while not done.is_set():
                answers.append(served.score(data))

        threads.extend(threading.Thread(target=send) for _ in range(3))
        for thread in threads:
            thread.start()
        return answers

    def stop() -> None:
        done.set()
        for thread in threads:
            thread.join()

    start.stop = stop  # type: ignore[attr-defined]
    yield start
    stop()


def test_a_new_version_and_the_way_back_without_a_gap(
    line: Path, other: Path, sending: Any, command: Command
) -> None:
    old, new = model_id(line / "disc" / "model"), model_id(other / "model")
    with serving(line) as served:
        answers = sending(served)
        code, out, _ = command("deploy", ["--model", other, "--to", line / "disc", "--yes"])
        assert (code, "6 golden parts" in out, f"holds model {new} now" in out) == (0, True, True)
        until(served, lambda model: model["model_id"] == new)
        seen = len(answers)
        while len(answers) < seen + 10:
            time.sleep(0.01)
        assert "6 golden parts" in served.get("/v1/models/disc")["checked"]
        assert command("deploy", ["--to", line / "disc", "--back"])[0] == 0
        until(served, lambda model: model["model_id"] == old)
        seen = len(answers)
        while len(answers) < seen + 10:
            time.sleep(0.01)
        sending.stop()
    assert {status for status, _ in answers} == {200}  # no gap, neither there nor back
    told = [(row["model_id"], row["verdict"]) for _, row in sorted(answers, key=_number)]
    assert set(told) == {(old, "good"), (new, "reject")}
    changes = [a[0] != b[0] for a, b in zip(told[10:], told[:-10], strict=True)]
    assert told[0][0] == told[-1][0] == old
    assert 0 < sum(changes) <= 60  # an old one may finish among the new, but not for long
    kept = sorted(p.relative_to(line / "disc").as_posix() for p in line.glob("disc/*/*"))
    assert f"withdrawn/001-{new}" in kept
    assert not any(name.startswith("earlier/") for name in kept)
    code, _, err = command("deploy", ["--to", line / "disc", "--back"])
    assert (code, "no earlier version" in err) == (2, True)


def _number(answer: tuple[int, Any]) -> int:
    return int(answer[1]["id"])


@pytest.mark.slow
def test_thresholds_of_the_very_run_that_is_served_can_be_changed(
    line: Path, command: Command
) -> None:
    run = line / "disc"
    old = model_id(run / "model")
    with serving(run) as served:  # its record lies in the run, too
        code, _, err = command("calibrate", ["--model", run, "--threshold", 3.0])
        assert code == 0, err
        assert until(served, lambda model: model["model_id"] != old)["state"] == "ready"
    assert (run / "line.sqlite").is_file()


def test_a_bad_version_is_refused_and_the_old_one_goes_on(
    line: Path, other: Path, product: Path, command: Command
) -> None:
    old = model_id(line / "disc" / "model")
    shutil.copy(product / "train" / "good" / "003.png", other / "golden" / "spot" / "000.png")
    data = (product / "test" / "spot" / "000.png").read_bytes()
    arguments = ["--model", other, "--to", line / "disc"]
    code, _, err = command("deploy", arguments)
    assert (code, "golden parts' scores or verdicts differ" in err) == (2, True)
    assert model_id(line / "disc" / "model") == old
    with serving(line) as served:
        # Put there by hand, past the command.
        shutil.rmtree(line / "disc" / "model")
        shutil.copytree(other, line / "disc", dirs_exist_ok=True)
        model = until(served, lambda model: model["refused"])
        assert (model["state"], model["model_id"]) == ("ready", old)
        assert "spot/000.png" in model["reason"]
        assert served.ask("GET", "/v2/health/ready")[0] == 200
        assert served.score(data)[1]["model_id"] == old
        metrics = served.ask("GET", "/metrics")[2].decode()
        assert 'anomaly_version_refused{model="disc"} 1.0' in metrics
        # A damaged file, then the golden part as it was: the new version is taken.
        shutil.copy(product / "test" / "spot" / "000.png", other / "golden" / "spot" / "000.png")
        shutil.copytree(other, line / "disc", dirs_exist_ok=True)
        model = until(served, lambda model: model["model_id"] != old)
        assert (model["refused"], model["reason"]) == (False, "")
        row = served.score(data)[1]
        assert row["model_id"] == model["model_id"] == model_id(other / "model")


@pytest.mark.slow
def test_versions_are_kept_in_order(
    line: Path, other: Path, run_folder: Path, command: Command
) -> None:
    run = line / "disc"
    first, second = model_id(run / "model"), model_id(other / "model")
    arguments = ["--device", "cpu", "--to", run]
    assert command("deploy", [*arguments, "--model", run_folder])[0] == 0  # it is there already
    assert not (run / "earlier").exists()
    said = command("deploy", [*arguments, "--model", other, "--yes"])
    assert (said[0], f"anomaly deploy --to {run} --back" in said[1] + said[2]) == (0, True)
    assert (run / "golden" / "golden.json").is_file()
    assert command("deploy", [*arguments, "--model", run_folder])[0] == 0
    assert not (run / "golden").exists()
    kept = sorted(one.name for one in (run / "earlier").iterdir())
    assert kept == [f"001-{first}", f"002-{second}"]
    for expected in (second, first):
        assert command("deploy", [*arguments, "--back"])[0] == 0
        assert model_id(run / "model") == expected
        assert (run / "golden").is_dir() == (expected == second)
    assert json.loads((run / "withdrawn" / f"002-{second}" / "golden" / "golden.json").read_text())
    # What was withdrawn may come again, and a folder that is new is made.
    assert command("deploy", [*arguments, "--model", run / "withdrawn" / f"002-{second}"])[0] == 0
    said = command("deploy", ["--model", other, "--to", line / "new" / "disc"])
    assert (said[0], "--back" in said[1] + said[2]) == (0, False)  # there is nothing to go back to
    assert model_id(line / "new" / "disc" / "model") == second
    for wrong in ([], ["--back", "--model", other]):
        assert command("deploy", [*arguments, *wrong])[0] == 2
    code, _, err = command("deploy", ["--to", run / "model", "--model", run_folder])
    assert (code, "is a model folder" in err) == (2, True)


def test_a_folder_of_runs_is_no_run(line: Path, other: Path, command: Command) -> None:
    code, _, err = command("deploy", ["--model", other, "--to", line, "--device", "cpu"])
    assert (code, "holds the runs disc, which a model in it would hide" in err) == (2, True)
    assert sorted(entry.name for entry in line.iterdir()) == ["disc"]


def test_what_is_known_of_a_training_goes_with_its_version(
    line: Path, other: Path, command: Command
) -> None:
    """The test split that no threshold may see is that of the model in use."""
    first, second = b'{"data_folder": "elsewhere"}', (other / "train.json").read_bytes()
    (line / "disc" / "train.json").write_bytes(first)
    assert command("deploy", ["--model", other, "--to", line / "disc", "--yes"])[0] == 0
    assert (line / "disc" / "train.json").read_bytes() == second
    assert command("deploy", ["--to", line / "disc", "--back"])[0] == 0
    assert (line / "disc" / "train.json").read_bytes() == first


@pytest.mark.slow
def test_an_export_takes_the_place_of_its_model_and_gives_it_back(
    line: Path, run_folder: Path, tmp_path: Path
) -> None:
    """It keeps the model's id, and yet is another version: another engine computes."""
    run, export = line / "disc", tmp_path / "export" / "model"
    shutil.copytree(run_folder / "model", export)
    (export / "export.json").write_text('{"engine": "onnx"}')
    deploy(export, run)
    assert (run / "model" / "export.json").is_file()
    with pytest.raises(OutputError, match="holds this model already"):
        deploy(export, run)
    (export / "export.json").write_text('{"engine": "openvino"}')
    deploy(export, run)
    back(run)
    back(run)
    assert model_id(run / "model") == model_id(run_folder / "model")
    assert not (run / "model" / "export.json").exists()


def test_a_version_of_another_name_is_told(line: Path, other: Path, command: Command) -> None:
    """A slip of the hand puts one product's model in the place of another's."""
    shutil.copy(other / "train.json", line / "disc")
    arguments = ["--model", other, "--to", line / "disc", "--device", "cpu"]
    code, _, err = command("deploy", arguments)  # it rejects everything
    assert (code, "calls good: another product?" in err) == (1, True)
    code, _, err = command("deploy", [*arguments, "--yes"])
    assert (code, "same product" in err) == (0, False)
    summary = json.loads((other / "train.json").read_text())
    (line / "disc" / "train.json").write_text(json.dumps(summary | {"name": "lid"}))
    (first,) = (line / "disc" / "earlier").iterdir()
    arguments = ["--model", first, "--to", line / "disc"]
    code, _, err = command("deploy", [*arguments, "--device", "cpu"])
    assert code == 0
    assert (
        f"is named {summary['name']}, the previous one lid; check that both are for the same" in err
    )
