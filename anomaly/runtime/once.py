"""A property that is made once, whichever threads ask for it first. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

Made = TypeVar("Made")


class made_once(cached_property[Made]):  # noqa: N801 – used as a decorator
    """`functools.cached_property` for what takes seconds or much memory to make.

    Since Python 3.12 that has no lock: as many threads as ask at the same time each make their own.
    Here the others wait for the first one's.
    """

    def __init__(self, make: Callable[[Any], Made]) -> None:
        super().__init__(make)
        self._making = threading.RLock()

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Made:  # type: ignore[override]
        with self._making:
            made: Made = super().__get__(instance, owner)
            return made
