"""Chunks are shared out among workers that die: in threads here, in Ray's processes elsewhere."""

import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import pytest

from anomaly.cluster import actors
from anomaly.cluster.actors import Work, WorkerDied, dispatch
from anomaly.errors import AnomalyError, DataError, OutputError

_SIZE = 17


class _Machines:
    """Workers in threads, and what they have written."""

    def __init__(self, dies: Callable[[int, set[int]], bool], at_most: int = 3) -> None:
        self._dies = dies
        self._threads = ThreadPoolExecutor(8)
        self.at_most = at_most
        self.hired = self.stopped = 0
        self.written: dict[int, dict[int, str]] = {}
        self.scored: Counter[int] = Counter()

    def room(self) -> int:
        return self.at_most

    def hire(self) -> "_Machines":
        self.hired += 1
        return self

    def score(self, chunk: int, lost: Mapping[int, str]) -> Future[Counter[str]]:
        def act() -> Counter[str]:
            if self._dies(chunk, set(range(_SIZE)) - set(lost)):
                raise WorkerDied
            self.written[chunk] = dict(lost)
            self.scored[chunk] += 1
            return Counter(ok=_SIZE - len(lost), failed=len(lost))

        return self._threads.submit(act)

    def probe(self, chunk: int, images: Sequence[int]) -> Future[Counter[str]]:
        def act() -> Counter[str]:
            if self._dies(chunk, set(images)):
                raise WorkerDied
            return Counter(wrong=1)

        return self._threads.submit(act)

    def stop(self) -> None:
        self.stopped += 1


def _run(machines: _Machines, chunks: Sequence[int], **more: Any) -> Counter[str]:
    return _counted(machines.hire, chunks, machines.room, **more)


def _counted(
    hire: Callable[[], Any], chunks: Sequence[int], room: Callable[[], int], **more: Any
) -> Counter[str]:
    counts: Counter[str] = Counter()
    work = Work(
        hire,
        score=lambda worker, chunk, lost: worker.score(chunk, lost),
        probe=lambda worker, chunk, images: worker.probe(chunk, images),
        take=lambda chunk, found: counts.update(found),
    )
    dispatch(chunks, [_SIZE] * 50, work, room, **more)
    return +counts  # without what is counted 0 times


def test_each_chunk_is_scored_once_by_no_more_workers_than_there_is_room_for() -> None:
    machines, seen = _Machines(lambda *_: False), []
    counts = _run(machines, range(2, 40), progress=lambda done, total: seen.append((done, total)))
    assert counts == {"ok": 38 * _SIZE}
    assert machines.scored == dict.fromkeys(range(2, 40), 1)
    assert machines.hired == machines.stopped == 3
    assert seen == [((i + 1) * _SIZE, 38 * _SIZE) for i in range(38)]


@pytest.mark.parametrize("poison", [{3: {0}}, {3: {16}}, {3: {5, 6, 11}, 4: {8}}])
def test_images_that_kill_workers_are_found_and_the_others_scored(
    poison: dict[int, set[int]],
) -> None:
    machines = _Machines(lambda chunk, images: bool(poison.get(chunk, set()) & images))
    counts = _run(machines, range(6))
    lost = sum(map(len, poison.values()))
    assert counts == {"ok": 6 * _SIZE - lost, "failed": lost}
    assert {c: set(found) for c, found in machines.written.items() if found} == poison
    assert "took down" in machines.written[3][min(poison[3])]
    assert machines.stopped == machines.hired


def test_workers_that_die_of_nothing_they_were_given_cost_no_image() -> None:
    rng = random.Random(0)
    machines = _Machines(lambda chunk, images: rng.random() < 0.2)
    # Without bad luck at one chunk again and again, which is said to be the machines'.
    counts = _run(_Machines(lambda chunk, images: len(images) == _SIZE and rng.random() < 0.3), [1])
    assert counts == {"ok": _SIZE}
    try:
        counts = _run(machines, range(30))
    except OutputError as error:
        assert "--resume" in str(error)  # noqa: PT017
    else:
        assert counts["ok"] + counts["failed"] == 30 * _SIZE


def test_a_chunk_that_kills_only_as_a_whole_ends_the_job() -> None:
    machines = _Machines(lambda chunk, images: chunk == 2 and len(images) == _SIZE)
    with pytest.raises(OutputError, match="chunk 2 crashed 6 workers, but no single image"):
        _run(machines, range(4))
    assert machines.stopped == machines.hired


def test_workers_that_die_of_anything_end_the_job_at_once() -> None:
    machines = _Machines(lambda *_: True)
    with pytest.raises(OutputError, match="even without its images"):
        _run(machines, range(40))
    assert machines.hired <= 3 * 4
    assert machines.written == {}


def test_a_workers_error_is_the_jobs() -> None:
    class Broken(_Machines):
        def score(self, chunk: int, lost: Mapping[int, str]) -> Future[Counter[str]]:
            told: Future[Counter[str]] = Future()
            told.set_exception(DataError("the storage doesn't answer"))
            return told

    machines = Broken(lambda *_: False)
    with pytest.raises(DataError, match="doesn't answer"):
        _run(machines, range(4))
    assert machines.stopped == machines.hired


def test_workers_come_and_go_with_the_room_for_them() -> None:
    machines = _Machines(lambda *_: False, at_most=0)  # one is always asked for

    def progress(done: int, total: int) -> None:
        machines.at_most = 4 if done > total // 2 else 0

    _run(machines, range(20), progress=progress)
    assert machines.scored == dict.fromkeys(range(20), 1)
    assert 2 <= machines.hired <= 4


def test_it_stops_when_it_is_told_to() -> None:
    machines = _Machines(lambda *_: False, at_most=1)
    counts = _run(machines, range(40), stopped=lambda: len(machines.scored) >= 3)
    assert 2 * _SIZE <= counts["ok"] <= 4 * _SIZE
    assert machines.stopped == machines.hired


def test_workers_that_wait_for_a_place_get_it_once_nothing_is_left_for_others() -> None:
    places, chunks = Semaphore(1), list(range(6))

    class Waiting(_Machines):
        """One that has a place only once another has been stopped."""

        def __init__(self) -> None:
            super().__init__(lambda *_: False)
            self._has_place = False

        def score(self, chunk: int, lost: Mapping[int, str]) -> Future[Counter[str]]:
            def act() -> Counter[str]:
                if not self._has_place:
                    assert places.acquire(timeout=20)
                    self._has_place = True
                return Counter(ok=_SIZE)

            return self._threads.submit(act)

        def stop(self) -> None:
            if self._has_place:
                places.release()

    assert _counted(Waiting, chunks, lambda: 4) == {"ok": 6 * _SIZE}


@pytest.mark.parametrize(
    ("there", "device", "most", "room"),
    [
        ([{"CPU": 16.0, "GPU": 1.0}], "cuda", None, 1),
        ([{"CPU": 16.0, "GPU": 1.0}], "cpu", None, 8),
        ([{"CPU": 4.0, "GPU": 8.0}], "cuda", None, 2),
        ([{"CPU": 16.0}], "cuda", None, 0),
        ([{"CPU": 16.0, "GPU": 4.0}], "cuda", 3, 3),
        ([{"CPU": 3.0}, {"CPU": 3.0}], "cpu", None, 2),  # not 3: none is spread over two
        ([{"CPU": 1.0}, {"CPU": 1.0}], "cpu", None, 0),
        ([{"CPU": 16.0}, {"CPU": 1.0, "GPU": 4.0}], "cuda", None, 0),
    ],
)
def test_there_is_room_for_as_many_as_have_processors_and_gpus(
    there: list[dict[str, float]],
    device: str,
    most: int | None,
    room: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actors, "_ray", lambda: _ray_of(*there))
    assert actors.Cluster(2, most, device).room() == room


def _ray_of(*there: dict[str, float]) -> SimpleNamespace:
    """What asks Ray for its machines, one of which is gone."""
    nodes = [{"Alive": True, "Resources": one} for one in there]
    gone = {"Alive": False, "Resources": {"CPU": 99.0, "GPU": 99.0}}
    ended = SimpleNamespace(said=False)
    return SimpleNamespace(
        nodes=lambda: [*nodes, gone],
        init=lambda address, **options: None,
        shutdown=lambda: setattr(ended, "said", True),
        ended=ended,
    )


def test_a_cluster_without_room_for_any_worker_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers would wait for ever, and nobody knew for what."""
    monkeypatch.setitem(sys.modules, "ray", ray := _ray_of({"CPU": 2.0}, {"CPU": 2.0}))
    with actors.joined("head:1", 2, None, "cpu") as cluster:
        assert cluster.room() == 2
    assert not caplog.messages
    for threads, device, said in ((3, "cpu", "3 processors"), (1, "cuda", "1 processor and a GPU")):
        with actors.joined("head:1", threads, None, device) as cluster:
            assert cluster.room() == 0
        assert f"no machine of the cluster at head:1 has {said}, which" in caplog.messages[-1]
    ray.ended.said = False
    here = actors.joined("local", 1, None, "cuda")
    with pytest.raises(AnomalyError, match="Ray finds no GPU on this machine"), here:
        pass
    assert ray.ended.said
