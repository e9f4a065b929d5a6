"""Lanes: results in order, errors as they come, threads as they were."""

import threading
import time

import pytest
import torch

from anomaly.runtime.parallel import in_parallel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_results_come_in_order_from_threads_that_compute_alone() -> None:
    seen = set()

    def task(i: int) -> tuple[int, int]:
        time.sleep(0.002 * (i % 3))
        seen.add(threading.get_ident())
        return i, torch.get_num_threads()

    results = list(in_parallel(task, iter(range(20)), CPU))
    assert results == [(i, 1) for i in range(20)]
    assert len(seen) == 2
    assert threading.get_ident() not in seen


def test_a_single_item_gets_all_threads() -> None:
    assert list(in_parallel(lambda _: torch.get_num_threads(), [0], CPU)) == [2]
    assert list(in_parallel(lambda x: x, [], CPU)) == []


def test_no_further_ahead_than_there_are_lanes() -> None:
    asked: list[int] = []

    def source():
        for i in range(50):
            asked.append(i)
            yield i

    results = in_parallel(lambda i: i, source(), CPU)
    next(results)
    assert len(asked) <= 4
    results.close()  # the rest is dropped


def test_errors_arrive_where_the_result_would_have() -> None:
    results = in_parallel(lambda i: 1 // (3 - i), range(6), CPU)
    assert [next(results) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
