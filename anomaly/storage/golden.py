"""Known parts and what a model has said of them: has anything moved since?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from anomaly.errors import DataError, why
from anomaly.files.outputs import GOLDEN
from anomaly.files.writing import as_json, from_json, write
from anomaly.imaging.loading import UnusableImage

if TYPE_CHECKING:
    from anomaly.scoring.pipeline import Model

Answers: TypeAlias = dict[str, dict[str, Any]]


def golden_of(model: Path) -> Path | None:
    """The folder of the golden parts that are recorded beside a model folder, if there are any."""
    golden = model.parent / "golden"
    return golden if model.name == "model" and (golden / GOLDEN).is_file() else None


def score_golden(
    model: Model,
    paths: Sequence[Path],
    folder: Path,
    workers: int,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Answers:
    """What a model says today.

    Args:
        model: the model.
        paths: the golden images.
        folder: where they are.
        workers: decoding processes.
        progress: called with images done, and how many there are.

    Returns:
        `image_score` and `verdict`, or None and the status, by the image's place in the folder.
    """
    answers: Answers = {}
    for result in model.score_all(paths, workers=workers):
        name = paths[result.index].relative_to(folder).as_posix()
        if isinstance(result, UnusableImage):
            answers[name] = {"image_score": None, "verdict": result.status}
        else:
            answers[name] = {"image_score": result.score, "verdict": result.verdict}
        progress(len(answers), len(paths))
    return dict(sorted(answers.items()))


def moved_since(recorded: Answers, current: Answers, tolerance: float) -> dict[str, str]:
    """What has become of each image that isn't as recorded, by name, in the order of names.

    Args:
        recorded: what was said then.
        current: what is said now.
        tolerance: share by which a score may move.
    """
    moved = {}
    for name in sorted(recorded.keys() | current.keys()):
        if name not in current:
            moved[name] = "recorded, but missing today"
        elif name not in recorded:
            moved[name] = "new; record again with --record"
        elif change := _change(recorded[name], current[name], tolerance):
            moved[name] = change
    return moved


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


def write_record(folder: Path, model_id: str, current: Answers) -> None:
    """Note what a model says of the golden images in their folder.

    Args:
        folder: where they are.
        model_id: the model's.
        current: what it says, as `score_golden` returns it.

    Raises:
        OutputError: no room, no permission.
    """
    write(folder / GOLDEN, as_json({"model_id": model_id, "images": current}))


def read_record(folder: Path) -> dict[str, Any]:
    """What `write_record` has noted in a folder of golden images.

    Returns:
        `model_id`, and as `images` what the model said of each, by name.

    Raises:
        DataError: nothing is noted there, or the record is damaged.
    """
    file = folder / GOLDEN
    try:
        record = from_json(file.read_text("utf-8"))
        if not isinstance(record["model_id"], str) or not isinstance(record["images"], dict):
            raise TypeError("it holds something else")
        for answer in record["images"].values():
            answer["image_score"], answer["verdict"]
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
