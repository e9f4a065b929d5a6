"""`anomaly selfcheck`: known parts before a shift; says whether verdicts or scores have moved."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.cli import machine
from anomaly.cli.progress import ProgressLine

if TYPE_CHECKING:
    from anomaly.imaging.preprocessing import UnusableImage
    from anomaly.model.detector import AnomalyDetector
    from anomaly.model.prediction import Prediction

RECORD = "golden.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", type=Path, required=True, help="the run, or its model/ folder")
    parser.add_argument(
        "--golden", type=Path, required=True, help="a folder of known parts' images, some defective"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help=f"note today's scores in the folder's {RECORD}, for later checks to compare with",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="how far a score may move (default 0.01: by 1 %%); more for parts photographed anew",
    )
    machine.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Check, or record.

    Returns:
        0 nothing has moved (or all is recorded), 1 a score or a verdict has, or an image is
        missing or new.
    """
    from anomaly.datasets.inputs import find_inputs
    from anomaly.errors import AnomalyError
    from anomaly.files.output_lock import locked

    if not options.tolerance >= 0:
        raise AnomalyError(f"--tolerance is {options.tolerance}; it must be 0 or more")
    paths = find_inputs([options.golden], option="--golden").paths
    with locked(options.golden) if options.record else nullcontext():
        return _run(options, paths)


def _run(options: argparse.Namespace, paths: list[Path]) -> int:
    recorded = None if options.record else _read(options.golden / RECORD)

    from anomaly.files.writing import as_json, write
    from anomaly.model.checkpoint import load

    device, threads = machine.device_and_threads(options)
    model = load(options.model, device)
    found = _score(model, paths, options.golden, threads)
    if recorded is None:
        record = {"model_id": model.model_id, "images": found}
        write(options.golden / RECORD, as_json(record))
        print(f"{len(found)} images recorded in {options.golden / RECORD}")
        return 0
    if recorded["model_id"] != model.model_id:
        print(f"recorded with model {recorded['model_id']}, checked with {model.model_id}")
    moved = _moved(recorded["images"], found, options.tolerance)
    for line in moved:
        print(line)
    kept = len(found) - len({line.split(":")[0] for line in moved} & set(found))
    print(f"{kept} of {len(found)} images as recorded" + ("" if moved else ": ready"))
    return 1 if moved else 0


def _score(
    model: AnomalyDetector, paths: list[Path], folder: Path, threads: int
) -> dict[str, dict[str, Any]]:
    """What the model says today, by image."""
    found: dict[str, dict[str, Any]] = {}
    with ProgressLine() as progress:
        for result in model.score_all(paths, workers=threads):
            name = paths[result.index].relative_to(folder).as_posix()
            found[name] = _said(result)
            progress("scoring", len(found), len(paths))
    return dict(sorted(found.items()))


def _said(result: Prediction | UnusableImage) -> dict[str, Any]:
    from anomaly.imaging.preprocessing import UnusableImage

    if isinstance(result, UnusableImage):
        return {"image_score": None, "verdict": result.status}
    return {"image_score": result.score, "verdict": result.verdict}


def _moved(
    recorded: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]], tolerance: float
) -> list[str]:
    """One line for each image that isn't as recorded."""
    lines = []
    for name in sorted(recorded.keys() | found.keys()):
        if name not in found:
            lines.append(f"{name}: recorded, but missing today")
        elif name not in recorded:
            lines.append(f"{name}: new; record again with --record")
        elif change := _change(recorded[name], found[name], tolerance):
            lines.append(f"{name}: {change}")
    return lines


def _change(before: dict[str, Any], now: dict[str, Any], tolerance: float) -> str:
    old, new = before["image_score"], now["image_score"]
    score = "" if old is None or new is None else f" ({old:.4g} -> {new:.4g})"
    if before["verdict"] != now["verdict"]:
        return f"verdict {before['verdict'] or 'none'} -> {now['verdict'] or 'none'}{score}"
    if new is None:  # recorded without a score, too: that is no part to be ready with
        return f"can't be scored: {now['verdict']}"
    if old is not None and new is not None and abs(new - old) > tolerance * abs(old):
        return f"score has moved by {abs(new - old) / max(abs(old), 1e-12):.1%}{score}"
    return ""


def _read(file: Path) -> dict[str, Any]:
    from anomaly.errors import DataError, why

    try:
        record = json.loads(file.read_text("utf-8"))
        if not isinstance(record["model_id"], str) or not isinstance(record["images"], dict):
            raise TypeError("it holds something else")
        for said in record["images"].values():
            said["image_score"], said["verdict"]
    except FileNotFoundError:
        raise DataError(
            f"{file} doesn't exist: record the golden images' scores first, with --record"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} can't be read as a record of golden scores ({why(error)}); record again with "
            "--record"
        ) from None
    return dict(record)
