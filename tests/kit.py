"""Small things that many tests do."""

import csv
import time
from collections.abc import Callable
from pathlib import Path


def table(folder: Path, name: str = "results.csv") -> list[dict[str, str]]:
    """The rows of a CSV file, each by its columns' names."""
    with (folder / name).open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def until(happened: Callable[[], object], seconds: float = 120) -> None:
    """Wait for something that another thread or process does."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)
