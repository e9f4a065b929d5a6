"""Image files that arrive in folders: each is given once, when it is fully written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anomaly.imaging.image import is_image, list_files


@dataclass(frozen=True)
class Stamp:
    """What changes when a file is written to.

    Attributes:
        size: in bytes.
        time: of the last change, in nanoseconds.
    """

    size: int
    time: int


def stamp_of(path: Path) -> Stamp | None:
    """A file's stamp; None where there is none, or it may not be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return Stamp(status.st_size, status.st_mtime_ns)


class Arrivals:
    """Follows folders. What it remembers are the files that are in them now.

    Args:
        folders: searched with their subfolders.
        done: files that were given earlier, with the stamps that they had then.
        settle: for how many seconds a file mustn't have changed to be taken as fully written.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        done: Mapping[Path, Stamp],
        settle: float = 0.0,
    ) -> None:
        self._folders = folders
        self._given = dict(done)
        self._settle = settle
        # The stamps of files that may still be written to, and since when they have them.
        self._written: dict[Path, tuple[Stamp, float]] = {}

    def poll(self, now: float = 0.0) -> dict[Path, Stamp]:
        """The files that are there, unchanged since an earlier poll, and not given yet.

        A file that has changed since it was given is another one under the same name.

        Args:
            now: seconds on any clock that only goes forward.

        Returns:
            Stamps by file, the oldest file first.

        Raises:
            DataError: a folder can't be listed; what arrives is given later.
        """
        files = {file for folder in self._folders for file in list_files(folder, tell=False)}
        listed = filter(is_image, files)
        stamps = {path: stamp for path in listed if (stamp := stamp_of(path)) is not None}
        new = {path: stamp for path, stamp in stamps.items() if self._given.get(path) != stamp}
        before, self._written = self._written, {}
        ready = {}
        for path, stamp in new.items():
            known, since = before.get(path, (None, now))
            if known != stamp:
                self._written[path] = stamp, now
            elif now - since < self._settle:
                self._written[path] = stamp, since
            else:
                ready[path] = stamp
        self._given = {path: stamp for path, stamp in self._given.items() if path in stamps}
        self._given.update(ready)
        return dict(sorted(ready.items(), key=lambda one: (one[1].time, one[0])))
