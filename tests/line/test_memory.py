"""Several models in one process, of which only some are in memory at a time."""

from __future__ import annotations

import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import Command
from running import Served, serving

import anomaly
from anomaly.line import slot as models
from anomaly.line.engine import BusyError, PictureRequest
from anomaly.line.record import Recorder
from anomaly.line.registry import ModelRegistry, back, deploy
from anomaly.line.slot import Limits
from anomaly.storage.folder import model_id

NAMES = ("bank", "gaussian")
NO_RECORD = cast(Any, SimpleNamespace(file=Path(), last=0))


@pytest.fixture
def line(run_folder: Path, padim_folder: Path, tmp_path: Path) -> Path:
    """Two models: `line/bank` and `line/gaussian`."""
    for name, run in zip(NAMES, (run_folder, padim_folder), strict=True):
        shutil.copytree(run / "model", tmp_path / "line" / name / "model")
    return tmp_path / "line"


def figures(served: Served, name: str) -> dict[str, float]:
    """A metric's values by model."""
    lines = served.ask("GET", "/metrics")[2].decode().splitlines()
    return {
        line.split('"')[1]: float(line.split()[-1])
        for line in lines
        if line.startswith(f"anomaly_{name}{{")
    }


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a process holds")
def test_two_models_take_turns_where_one_has_room(
    line: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    taken = _measured(line)
    limit = max(taken.values()) * 1.4
    assert limit < 0.9 * sum(taken.values())
    images = [product / "test" / kind / "000.png" for kind in ("good", "spot")]
    expected = {
        (name, file): anomaly.load(line / name, device="cpu").predict(file)
        for name in NAMES
        for file in images
    }
    with serving(line, "--memory", str(limit / 1e6), "--threads", "1") as served:
        assert sorted(figures(served, "model_loaded").values()) == [0.0, 1.0]
        assert 1e7 < sum(figures(served, "model_bytes").values()) < limit
        states = {one["state"] for one in served.get("/v1/models")["models"]}
        assert states == {"ready", "unloaded"}
        for name in NAMES:  # whether it is in memory or not
            assert served.get(f"/v1/models/{name}")["thresholds"]["label"] == "calibrated"

        def right(name: str, file: Path) -> bool:
            status, row = served.score(file.read_bytes(), "", name)
            wanted = expected[name, file]
            assert status == 200, row
            assert row["verdict"] == wanted.verdict
            assert row["model_id"] == model_id(line / name / "model")
            return bool(row["image_score"] == pytest.approx(wanted.score, rel=1e-4))

        for name in NAMES:  # in turn
            assert right(name, images[0])
            loaded = figures(served, "model_loaded")
            assert loaded == {one: float(one == name) for one in NAMES}
        with ThreadPoolExecutor(8) as pool:  # at once
            asked = [(name, file) for file in images * 2 for name in NAMES]
            assert all(pool.map(lambda one: right(*one), asked))
        # A new version of the one that isn't in memory, and back.
        gone = next(name for name, here in figures(served, "model_loaded").items() if not here)
        old = model_id(line / gone / "model")
        new = tmp_path / "new"
        shutil.copytree(line / gone, new)
        command("calibrate", ["--model", new, "--threshold", 1e-3, "--review-threshold", 1e-4])
        for change, expects in (
            (lambda: deploy(new / "model", line / gone), (model_id(new / "model"), "reject")),
            (lambda: back(line / gone), (old, "good")),
        ):
            change()
            _until(lambda e=expects: _model(served, gone)["model_id"] == e[0])
            _, row = served.score(images[0].read_bytes(), "", gone)
            assert (row["model_id"], row["verdict"]) == expects
        assert served.ask("GET", "/v2/health/ready")[0] == 200


def _measured(line: Path) -> dict[str, int]:
    """What each model takes in memory, where there is room for all."""
    folders = {name: line / name / "model" for name in NAMES}
    recorder = Recorder(NO_RECORD, print)
    device = torch.device("cpu")
    with ModelRegistry(
        folders, recorder, device=device, workers=1, limits=Limits(memory=10**12)
    ) as registry:
        _until(lambda: not any(slot.unusable for slot in registry.models.values()))
        assert all(one.engine for one in registry.models.values())
        return {name: one.memory for name, one in registry.models.items()}


def _model(served: Served, name: str) -> dict[str, Any]:
    return {one["name"]: one for one in served.get("/v1/models")["models"]}[name]


def _until(is_so: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("memory", [1000, 3_000_000])  # less than its files; than it takes loaded
def test_a_model_that_fits_nowhere_is_refused(line: Path, tmp_path: Path, memory: int) -> None:
    folder = line / "bank" / "model"
    files = sum(file.stat().st_size for file in folder.iterdir())
    if files > 1e6 or sys.platform != "linux":
        memory = min(memory, files - 1)
    recorder = Recorder(NO_RECORD, print)
    device = torch.device("cpu")
    registry = ModelRegistry(
        {"bank": folder}, recorder, device=device, workers=1, limits=Limits(memory=memory)
    )
    with registry:
        (one,) = registry.models.values()
        _until(lambda: one.state != "loading")
        assert (one.state, one.engine) == ("failed", None)
        assert "more than the memory limit for all models" in one.trouble
        assert "--memory" in one.trouble
        assert ("its files have" in one.trouble) == (memory < files)
        with pytest.raises(BusyError, match=r"can't be used: (its files|in memory)"):
            one.submit(b"", "", PictureRequest())


def test_parts_that_wait_are_taken_together_and_none_waits_for_ever(tmp_path: Path) -> None:
    taken: list[bytes] = []
    engine = SimpleNamespace(
        submit=lambda data, name, wanted, done: taken.append(data) or done.set_result(data),
        resident=7,
        waiting=0,
        __exit__=lambda: None,
    )
    woken: list[int] = []
    served = models.ModelSlot("disc", tmp_path, most_waiting=2, wake=lambda: woken.append(1))
    with pytest.raises(BusyError, match="still being loaded"):
        served.submit(b"", "", PictureRequest())
    version = models.Version("1", "", True, {"model_id": "1"}, {}, None, None)
    served.use(version, cast(Any, engine))
    served.let_go()
    assert (served.state, served.memory, served.short()["model_id"]) == ("unloaded", 0, "1")
    waiting = [served.submit(data, "", PictureRequest()) for data in (b"a", b"b")]
    with pytest.raises(BusyError, match="2 parts wait until disc is loaded"):
        served.submit(b"c", "", PictureRequest())
    assert (len(woken), served.waiting, taken) == (2, 2, [])
    served.use(version, cast(Any, engine))
    assert (taken, served.waiting) == ([b"a", b"b"], 0)
    assert all(one.done() for one in waiting)
    for end, reason in (
        (lambda: served.refuse("no file", stays=False), "no file"),
        (served.stop, "stopping"),
    ):
        served.let_go()
        last = served.submit(b"d", "", PictureRequest())
        end()
        with pytest.raises(BusyError, match=reason):
            last.result(1)
        assert served.state == "unloaded"  # the next one who asks has it tried again
    with pytest.raises(BusyError, match="stopping"):
        served.submit(b"e", "", PictureRequest())


@pytest.mark.parametrize(
    ("waiting", "leaves"),
    [((0, 0, 0), "first"), ((1, 0, 0), "second"), ((1, 1, 0), "third"), ((1, 1, 1), "first")],
)
def test_the_idle_leave_first_and_of_these_the_one_asked_for_longest_ago(
    waiting: tuple[int, ...], leaves: str, tmp_path: Path
) -> None:
    names = ("second", "first", "third", "new")  # in the folder, not in time
    folders = {name: tmp_path / name for name in names}
    recorder, device = Recorder(NO_RECORD, print), torch.device("cpu")
    registry = ModelRegistry(folders, recorder, device=device, workers=1, limits=Limits(memory=400))
    for i, name in enumerate(("first", "second", "third")):
        engine = SimpleNamespace(resident=100, waiting=waiting[i], __exit__=lambda: None)
        registry.models[name].engine, registry.models[name].asked = cast(Any, engine), float(i)
    registry._make_room(registry.models["new"], 100)
    assert all(registry.models[name].engine for name in names[:3])
    registry._make_room(registry.models["new"], 101)
    assert [name for name in names[:3] if not registry.models[name].engine] == [leaves]
