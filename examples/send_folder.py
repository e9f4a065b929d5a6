"""Send every image that a camera writes into a folder to `anomaly serve`; needs Python alone.

    python examples/send_folder.py camera http://127.0.0.1:8000/v1/models/plate/score

A token that the service asks for is taken from ANOMALY_TOKEN. While the service is busy or away,
images wait; while the folder is away, so does this program. Ctrl-C ends it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

KINDS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
WRITTEN_SECONDS = 0.5  # after which a file that hasn't changed is whole
PAUSE_SECONDS = 1.0


def arriving(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Image files as they come, with their bytes; one that is written again comes again.

    A file is whole once its time and size have stayed the same between two looks. Only this
    machine's clock counts: that of a share may be wrong.
    """
    seen: dict[Path, tuple[object, float]] = {}  # state and since when; for ever once it was sent
    told = ""
    while True:
        trouble, files = "", []
        try:
            files = sorted(file for file in folder.iterdir() if file.suffix.lower() in KINDS)
        except OSError as error:  # the share is away
            trouble = str(error)
        for file in files:
            try:
                state, now = state_of(file), time.monotonic()
                if file not in seen or seen[file][0] != state:
                    seen[file] = state, now
                elif now - seen[file][1] > WRITTEN_SECONDS:
                    data = file.read_bytes()
                    if state_of(file) == state:
                        seen[file] = state, math.inf
                        yield file, data
            except FileNotFoundError:  # renamed or taken away meanwhile
                continue
            except OSError as error:  # another program still has it
                trouble = str(error)
        if trouble and trouble != told:
            print(f"{trouble}; trying again", file=sys.stderr)
        told = trouble
        time.sleep(0.1)


def state_of(file: Path) -> tuple[int, int]:
    """What changes when a file is written: its time and size."""
    found = file.stat()
    return found.st_mtime_ns, found.st_size


def score(file: Path, data: bytes, address: str) -> dict[str, Any]:
    """The row of an image, for which a busy service is asked again and again."""
    request = Request(f"{address}?name={quote(file.name)}", data)
    if token := os.environ.get("ANOMALY_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    told = ""
    while True:
        try:
            with urlopen(request, timeout=90) as answer:
                return dict(json.load(answer))
        except HTTPError as refused:
            try:
                said = json.load(refused)
            except ValueError:  # of something between here and the service
                said = {"detail": refused.reason}
            if refused.code == 422:  # an image that can't be used has a row, too
                return dict(said)
            if refused.code < 500:
                sys.exit(f"{address} refuses {file}: {refused.code}, {said['detail']}")
            why = said["detail"]
        except (OSError, HTTPException):
            why = "it isn't reached"
        if why != told:
            print(f"{address}: {why}; trying again", file=sys.stderr)
            told = why
        time.sleep(PAUSE_SECONDS)


def main(arguments: list[str]) -> None:
    """Send, and print each verdict."""
    folder, address = Path(arguments[0]), arguments[1]
    if not folder.is_dir():
        sys.exit(f"{folder} isn't a folder")
    for file, data in arriving(folder):
        row = score(file, data, address)
        print(f"{row['id']}  {file.name}  {row['verdict'] or row['status']}", flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(sys.argv[1:])
