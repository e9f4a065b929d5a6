"""A property that threads ask for at the same time is made by one of them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from anomaly.runtime.parallel import locked_cached_property


class _Owner:
    made = 0

    @locked_cached_property
    def costly(self) -> list[int]:
        """What it is."""
        self.made += 1
        time.sleep(0.05)
        return [self.made]


def test_it_is_made_once_for_each_owner() -> None:
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
