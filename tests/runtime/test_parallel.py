"""Work handed to threads: in order, once each, with settings left as they were."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from anomaly.runtime import (
    apply_thread_limit,
    in_parallel,
    locked_cached_property,
    parallel_map,
    parallel_pool,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Torch's threads, which are as many afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_results_in_the_order_of_the_items() -> None:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (0, 1, 2, 57):
            assert parallel_map(lambda i: i * i, range(count), CPU) == [i * i for i in range(count)]


def test_each_thread_computes_alone_and_the_setting_comes_back() -> None:
    both = threading.Barrier(2, timeout=60)
    parallel_map(lambda _: both.wait(), range(2), CPU)  # one thread alone would wait for ever
    assert set(parallel_map(lambda _: torch.get_num_threads(), range(20), CPU)) == {1}
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 2


def test_a_thread_that_comes_while_others_compute_alone_has_all_threads() -> None:
    def caller() -> int:
        apply_thread_limit()
        return torch.get_num_threads()

    with parallel_pool(CPU), ThreadPoolExecutor(1) as other:
        assert other.submit(caller).result() == 2
        assert torch.get_num_threads() == 1


def test_an_error_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        parallel_map(lambda i: 1 // (13 - i), range(30), CPU)


def test_inference_mode_holds_in_all_threads() -> None:
    for inference in (True, False):
        with torch.inference_mode(inference), parallel_pool(CPU) as hand_out:
            results = hand_out(lambda i: torch.zeros(3) + i, range(20))
        assert {t.is_inference() for t in results} == {inference}


def test_a_gpu_takes_one_piece_after_another() -> None:
    names = parallel_map(lambda _: threading.current_thread().name, range(9), torch.device("cuda"))
    assert set(names) == {threading.current_thread().name}


def test_lanes_give_results_in_order_from_threads_that_compute_alone() -> None:
    seen = set()

    def task(i: int) -> tuple[int, int]:
        time.sleep(0.002 * (i % 3))
        seen.add(threading.get_ident())
        return i, torch.get_num_threads()

    results = list(in_parallel(task, iter(range(20)), CPU))
    assert results == [(i, 1) for i in range(20)]
    assert len(seen) == 2
    assert threading.get_ident() not in seen


def test_a_single_item_in_lanes_gets_all_threads() -> None:
    assert list(in_parallel(lambda _: torch.get_num_threads(), [0], CPU)) == [2]
    assert list(in_parallel(lambda x: x, [], CPU)) == []


def test_no_further_ahead_than_there_are_lanes() -> None:
    asked: list[int] = []

    def source() -> Iterator[int]:
        for i in range(50):
            asked.append(i)
            yield i

    results = in_parallel(lambda i: i, source(), CPU)
    next(results)
    assert len(asked) <= 4
    results.close()  # the rest is dropped


def test_errors_of_lanes_arrive_where_the_result_would_have() -> None:
    results = in_parallel(lambda i: 1 // (3 - i), range(6), CPU)
    assert [next(results) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


class _Owner:
    made = 0

    @locked_cached_property
    def costly(self) -> list[int]:
        """What it is."""
        self.made += 1
        time.sleep(0.05)
        return [self.made]


def test_a_property_that_threads_ask_for_is_made_once_for_each_owner() -> None:
    owner, together = _Owner(), threading.Barrier(8)

    def ask(_: int) -> list[int]:
        together.wait(10)
        return owner.costly

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert owner.made == 1
    assert all(one is owner.costly for one in found)
    assert _Owner().costly is not owner.costly
    assert _Owner.__dict__["costly"].__doc__ == "What it is."
