"""Work handed to threads: in order, once each, with settings left as they were."""

from __future__ import annotations

import threading

import pytest
import torch

from anomaly.runtime.parallel import apply_thread_limit, parallel_map, parallel_pool

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 2, 57])
def test_results_in_the_order_of_the_items(threads: int, count: int) -> None:
    assert parallel_map(lambda i: i * i, range(count), CPU) == [i * i for i in range(count)]


def test_each_thread_computes_alone_and_the_setting_comes_back(threads: int) -> None:
    seen = parallel_map(lambda _: torch.get_num_threads(), range(20), CPU)
    assert set(seen) == {1}
    assert torch.get_num_threads() == threads
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [threads]


def test_a_thread_that_comes_while_others_compute_alone_has_all_threads(threads: int) -> None:
    seen: list[int] = []

    def caller() -> None:
        apply_thread_limit()
        seen.append(torch.get_num_threads())

    with parallel_pool(CPU):
        thread = threading.Thread(target=caller)
        thread.start()
        thread.join()
        assert torch.get_num_threads() == 1
    assert seen == [threads]
    assert torch.get_num_threads() == threads


def test_more_than_one_thread_works() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    both = threading.Barrier(2, timeout=10)
    try:
        parallel_map(lambda _: both.wait(), range(2), CPU)  # one thread alone would wait for ever
    finally:
        torch.set_num_threads(before)


def test_an_error_comes_out_and_the_setting_comes_back(threads: int) -> None:
    def task(i: int) -> int:
        if i == 13:
            raise ValueError("thirteen")
        return i

    with pytest.raises(ValueError, match="thirteen"):
        parallel_map(task, range(30), CPU)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("inference", [True, False])
def test_inference_mode_holds_in_all_threads(threads: int, inference: bool) -> None:
    with torch.inference_mode(inference), parallel_pool(CPU) as hand_out:
        results = hand_out(lambda i: torch.zeros(3) + i, range(20))
    assert {t.is_inference() for t in results} == {inference}


def test_a_gpu_takes_one_piece_after_another(threads: int) -> None:
    names = parallel_map(lambda _: threading.current_thread().name, range(9), torch.device("cuda"))
    assert set(names) == {threading.current_thread().name}
