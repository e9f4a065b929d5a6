"""`anomaly feedback`: what parts really were; the page of `serve` has buttons for the same."""

from __future__ import annotations

import argparse
import getpass
import json
from pathlib import Path
from typing import Any

from anomaly.errors import AnomalyError, DataError, why
from anomaly.files.writing import like, sha256_of
from anomaly.line.feedback import save_pictures
from anomaly.line.record import Record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--record", type=Path, required=True, metavar="FILE", help="the record of serve"
    )
    parser.add_argument(
        "--verdict",
        choices=("good", "defect"),
        help="what the parts really were; without it and --pictures, all that was said is listed, "
        "a line of JSON each",
    )
    parser.add_argument(
        "--images",
        type=Path,
        action="extend",
        nargs="+",
        default=[],
        metavar="FILE",
        help="image files, told by hash",
    )
    parser.add_argument(
        "--parts",
        type=_number,
        action="extend",
        nargs="+",
        default=[],
        metavar="N",
        help="numbers of parts",
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        metavar="FOLDER",
        help="write the pictures of all parts that were judged there, as good/ and defect/TYPE/ in "
        "a folder for each model",
    )
    parser.add_argument("--type", default="", help="kind of defect")
    parser.add_argument("--note", default="", help="anything else")
    parser.add_argument("--who", help="who says so (the user's name)")


def run(options: argparse.Namespace) -> int:
    """Write down, or list."""
    if not options.record.is_file():
        raise DataError(f"there is no record {options.record}{like(options.record)}")
    if (options.verdict is None) != (not options.images and not options.parts):
        raise AnomalyError("--verdict goes with --images or --parts, and these with --verdict")
    if options.pictures is not None:
        if options.verdict is not None:
            raise AnomalyError("--verdict notes something, and --pictures writes it out; give one")
        return _save(options.record, options.pictures)
    try:
        hashes = [(file, sha256_of(file)) for file in options.images]
    except OSError as error:
        raise DataError(f"{error.filename} can't be read: {why(error)}") from None
    record = Record(options.record)
    try:
        if options.verdict is None:
            for one in record.feedback():
                print(json.dumps(one))
            return 0
        said: dict[str, Any] = {
            "who": _text(options.who or _user()),
            "defect_type": _text(options.type),
            "note": _text(options.note),
        }
        for part in options.parts:
            record.check_part(part)  # before anything is noted
        for part in options.parts:
            record.add_feedback(options.verdict, part=part, **said)
            print(f"part {part}: {options.verdict}")
        for file, sha256 in hashes:
            number = record.add_feedback(options.verdict, sha256=sha256, **said)
            known = "not scored here so far" if number is None else f"part {number}"
            print(f"{file} ({known}): {options.verdict}")
        print(f"written to {options.record}")
    finally:
        record.close()
    return 0


def _save(record: Path, folder: Path) -> int:
    for model, counts in save_pictures(record, folder).items():
        lost = f", {counts['lost']} more without a picture" if counts["lost"] else ""
        place = folder / model
        print(f"{model}: {counts['good']} good, {counts['defect']} defective{lost}; in {place}")
    return 0


def _number(text: str) -> int:
    """The number of a part, as the record can have it."""
    if text.isdecimal() and len(text) < 20 and 1 <= int(text) < 2**63:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} can't be the number of a part, which are 1, 2, 3 …")


def _text(given: str) -> str:
    """A text without bytes that are none, which a command line may hold."""
    return given.encode("utf-8", "backslashreplace").decode()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return ""
