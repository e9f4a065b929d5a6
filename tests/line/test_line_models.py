"""Parts of a model: how many wait, what is refused, and one answer for each, written down."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import until

from anomaly.errors import AnomalyError, OutputError
from anomaly.imaging.pool import Decoders
from anomaly.line.models import ModelSlot, Version
from anomaly.line.record import Answer, Record
from anomaly.scoring.model import Model
from anomaly.storage.models import load_model


class Gate(Record):
    """A record that writes nothing until it may."""

    may: threading.Event
    trouble = False

    def add(self, answers: Sequence[Answer]) -> list[int]:
        self.may.wait(20)
        if self.trouble:
            raise OutputError("the disk is full")
        return super().add(answers)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "line.sqlite")
    gate.may = threading.Event()
    yield gate
    gate.may.set()
    gate.close()


@pytest.fixture(scope="module")
def model(run_folder: Path) -> Model:
    return load_model(run_folder, "cpu")


def serving(model: Model, gate: Gate, **how: Any) -> ModelSlot:
    """A slot that scores parts with a model, once it is entered."""
    folder = model.folder or Path()
    slot = ModelSlot("disc", folder, gate, device=torch.device("cpu"), **how)
    slot._load = lambda: slot.use(Version.of(model, folder, ""))  # type: ignore[method-assign]
    slot._load()
    return slot


def submitted(slot: ModelSlot, data: bytes, count: int) -> list[Future[dict[str, Any]]]:
    """Parts that are decoded, so that the slot gathers all of them when it is entered."""
    futures = [slot.submit(data) for _ in range(count)]
    until(lambda: slot._decoded.qsize() == count)
    return futures


@pytest.fixture(scope="module")
def files(product: Path) -> list[Path]:
    return sorted((product / "test").rglob("*.png"))


def test_no_more_wait_than_may_and_all_that_wait_are_answered(
    model: Model, files: list[Path], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anomaly.line.models._MOST_WAITING", 4)
    told: list[int] = []
    with serving(model, gate, publish=lambda number, _: told.append(number)) as slot:
        futures = [slot.submit(file.read_bytes(), file.name) for file in files[:4]]
        with pytest.raises(AnomalyError, match="4 parts are waiting"):
            slot.submit(b"one more")
        assert not wait(futures, 0.3).done  # nothing is written yet
        gate.may.set()
        assert futures[0].result(20)["path"] == files[0].name
        assert slot.submit(b"one more").result(20)["status"] == "unsupported"
        futures.append(slot.submit(files[4].read_bytes()))
    assert all(future.done() for future in futures)
    assert slot.waiting == 0
    assert told == [1, 2, 3, 4, 5, 6]


def test_images_in_tiles_are_decoded_few_at_a_time(
    model: Model, files: list[Path], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lies here whole until it is answered; those that wait are refused at the end."""
    image = model.config.image.model_copy(update={"tile": 64})
    tiled = replace(model, config=model.config.model_copy(update={"image": image}))
    begun: list[int] = []
    submit = Decoders.submit

    def counted(self: Decoders, index: int, *more: Any) -> Any:
        begun.append(index)
        return submit(self, index, *more)

    monkeypatch.setattr(Decoders, "submit", counted)
    monkeypatch.setattr("anomaly.line.models.program_threads", lambda: 2)
    with serving(tiled, gate) as slot:
        futures = [slot.submit(file.read_bytes()) for file in files[:5]]
        assert not wait(futures, 0.3).done
        assert (begun, slot.waiting) == ([0, 1], 5)
        assert slot.refuse_waiting("it stops") == 3
        assert [str(future.exception(0)) for future in futures[2:]] == ["it stops"] * 3
        futures[2:] = [slot.submit(files[2].read_bytes())]
        gate.may.set()
        assert [future.result(60)["status"] for future in futures] == ["ok"] * 3
    assert begun == [0, 1, 5]


def test_batches_are_no_larger_than_the_model_takes_at_once(
    model: Model, files: list[Path], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    score = Model.predict_batches

    def counted(self: Model, batches: Any) -> Iterator[Any]:
        def seen() -> Iterator[Any]:
            for batch in batches:
                sizes.append(len(batch))
                yield batch

        return score(self, seen())

    monkeypatch.setattr(Model, "predict_batches", counted)
    monkeypatch.setattr("anomaly.line.models.get_threads", lambda: 1)
    gate.may.set()
    slot = serving(model, gate)
    futures = submitted(slot, files[0].read_bytes(), 9)
    with slot:
        wait(futures, 30)
    assert model.batch_size == 4 < model.config.batch_size
    assert (sum(sizes), max(sizes)) == (9, 4)


def test_a_part_that_is_being_drawn_when_scoring_fails_is_answered_once(
    model: Model, files: list[Path], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, finish = Model.predict_batches, Decoders.finish
    fails, drawn = [True], threading.Event()

    def one_and_no_more(self: Model, batches: Any) -> Iterator[Any]:
        for result in score(self, batches):
            yield result
            if fails and fails.pop():
                raise RuntimeError("CUDA out of memory")

    def later(self: Decoders, *part: Any) -> Future[Any]:
        found, held = finish(self, *part), Future[Any]()
        threading.Thread(target=lambda: held.set_result(drawn.wait(20) and found.result())).start()
        return held

    monkeypatch.setattr("anomaly.line.models.get_threads", lambda: 2)  # so two batches
    monkeypatch.setattr(Model, "predict_batches", one_and_no_more)
    monkeypatch.setattr(Decoders, "finish", later)
    gate.may.set()
    data = files[0].read_bytes()
    slot = serving(model, gate)
    both = submitted(slot, data, 2)
    with slot:
        wait(both, 20, "FIRST_COMPLETED")
        drawn.set()
        rows = [future.result(20) for future in both]
        assert sorted(row["status"] for row in rows) == ["failed", "ok"]
        reasons = [row["reason"] for row in rows if row["reason"]]
        assert reasons == ["scoring failed: RuntimeError"]
        assert slot.submit(data).result(20)["status"] == "ok"
    assert len(gate.parts()) == 3


def test_a_part_is_answered_if_it_is_written_down_though_publishing_it_fails(
    model: Model, files: list[Path], gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake")

    gate.may.set()
    with serving(model, gate, publish=fail) as slot:
        assert [slot.submit(files[0].read_bytes()).result(20)["id"] for _ in range(2)] == [1, 2]
        gate.trouble = True
        with pytest.raises(OutputError, match=r"no verdict \(the disk is full\); send it"):
            slot.submit(files[0].read_bytes()).result(20)
    until(lambda: caplog.text.count("RuntimeError: a mistake") == 2)
