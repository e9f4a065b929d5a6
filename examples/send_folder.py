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
WRITTEN_SECONDS = 0.5  # after which a file that hasn't changed is taken to be complete
PAUSE_SECONDS = 1.0  # between tries to reach the service


def arriving(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Image files with their bytes, as they come; a file that is written again comes again.

    A file is complete once its time and size have stayed the same between two looks. Their age is
    measured by this machine's clock, because that of a share may be wrong.
    """
    seen: dict[Path, tuple[object, float]] = {}  # state, and since when; infinity once it was sent
    reported = ""
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
            except OSError as error:  # another program still writes it
                trouble = str(error)
        if trouble and trouble != reported:
            print(f"{trouble}; trying again", file=sys.stderr)
        reported = trouble
        time.sleep(0.1)


def state_of(file: Path) -> tuple[int, int]:
    """Time and size of a file, which change when it is written."""
    entry = file.stat()
    return entry.st_mtime_ns, entry.st_size


def score(file: Path, data: bytes, address: str) -> dict[str, Any]:
    """The service's row about an image; a service that is busy or away is asked until it answers.

    An image that can't be used has a row, too. Any other refusal ends the program.
    """
    request = Request(f"{address}?name={quote(file.name)}", data)
    if token := os.environ.get("ANOMALY_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    reported = ""
    while True:
        try:
            with urlopen(request, timeout=90) as answer:
                return dict(json.load(answer))
        except HTTPError as refusal:
            try:
                body = json.load(refusal)
            except ValueError:  # a proxy has answered, not the service
                body = {"detail": refusal.reason}
            if refusal.code == 422:
                return dict(body)
            if refusal.code < 500:
                sys.exit(f"{address} refuses {file}: {refusal.code}, {body['detail']}")
            trouble = body["detail"]
        except (OSError, HTTPException):
            trouble = "it isn't reached"
        if trouble != reported:
            print(f"{address}: {trouble}; trying again", file=sys.stderr)
            reported = trouble
        time.sleep(PAUSE_SECONDS)


def main(arguments: list[str]) -> None:
    """Send each image of a folder, and print its verdict.

    Args:
        arguments: the folder, and the address of a model's route.
    """
    folder, address = Path(arguments[0]), arguments[1]
    if not folder.is_dir():
        sys.exit(f"{folder} isn't a folder; give the folder that the camera writes to")
    for file, data in arriving(folder):
        row = score(file, data, address)
        print(f"{row['id']}  {file.name}  {row['verdict'] or row['status']}", flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(sys.argv[1:])
