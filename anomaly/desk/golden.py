"""Golden parts: known parts whose recorded scores show if the line, or the model, has changed.

Those in the subfolder `missed` are defects that a model has called good. Their scores may change:
one counts as moved if it was caught and now passes, or can't be scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from anomaly.datasets.samples import GOOD, Sample
from anomaly.errors import DataError, some, why
from anomaly.files.writing import GOLDEN, as_json, from_json, locked, sha256_of, short_name, write
from anomaly.imaging.read import list_images, suffix_of
from anomaly.runtime import Progress
from anomaly.scoring.model import Model, score
from anomaly.storage.folder import model_id, read_manifest

MISSED = "missed"
_RECORD = "with anomaly evaluate --golden FOLDER --overwrite"


def golden_of(model: Path) -> Path | None:
    """The folder of the golden parts beside a model folder; None if none are recorded there."""
    golden = model.parent / "golden"
    return golden if model.name == "model" and (golden / GOLDEN).is_file() else None


def golden_samples(model: Path | None) -> list[Sample]:
    """The golden parts beside a model folder; the missed ones are defects."""
    golden = None if model is None else golden_of(model)
    return [] if golden is None else _samples_in(golden)


def _samples_in(golden: Path) -> list[Sample]:
    """The images in a folder of golden parts, named by their place there."""
    names = {path: path.relative_to(golden).as_posix() for path in list_images(golden)}
    return [Sample(path, n, MISSED if is_missed(n) else GOOD) for path, n in names.items()]


@dataclass(frozen=True)
class Answer:
    """A model's answer on one golden part.

    Attributes:
        image_score: the image score; None if the image can't be scored.
        verdict: the verdict, empty without thresholds; without a score, the image's status.
    """

    image_score: float | None
    verdict: str


@dataclass(frozen=True)
class Check:
    """Scores of golden parts today, compared with their record.

    Attributes:
        answers: answers of today, by the image's name.
        moved: the change of each image that isn't as recorded, by name.
        recorded_by: id of the model that made the record.
    """

    answers: Mapping[str, Answer]
    moved: dict[str, str]
    recorded_by: str

    @property
    def parts(self) -> set[str]:
        """Names of the images that aren't missed defects."""
        return {name for name in self.answers if not is_missed(name)}

    @property
    def missed(self) -> str:
        """A line on the missed defects: how many are caught now, and which pass; else empty."""
        missed = {name: answer for name, answer in self.answers.items() if is_missed(name)}
        passing = [
            f"{name} ({answer.image_score:.4g})"
            for name, answer in missed.items()
            if answer.verdict == "good"
        ]
        which = f"; not caught yet: {some(passing, most=10)}" if passing else ""
        caught = len(missed) - len(passing)
        return f"known defects caught: {caught} of {len(missed)}{which}" if missed else ""


def check(
    model: Model,
    golden: Path,
    tolerance: float = 0.01,
    progress: Progress = lambda done, total: None,
) -> Check:
    """Score golden parts, and compare with their record; see `moved_since` for the tolerance.

    Raises:
        DataError: nothing is recorded, or the record is damaged.
    """
    recorded_by, recorded = read_record(golden)
    answers = score_golden(model, golden, progress)
    return Check(answers, moved_since(recorded, answers, tolerance), recorded_by)


def score_golden(
    model: Model, golden: Path, progress: Progress = lambda done, total: None
) -> dict[str, Answer]:
    """Answers on the images in a folder of golden parts, by their place there, sorted."""
    answers = {}
    for image in score(model, _samples_in(golden), progress=progress):
        verdict = image.status if image.score is None else image.verdict(model.thresholds)
        answers[image.sample.name] = Answer(image.score, verdict)
    return dict(sorted(answers.items()))


def moved_since(
    recorded: Mapping[str, Answer], current: Mapping[str, Answer], tolerance: float
) -> dict[str, str]:
    """The change of each image that isn't as recorded, by name, in the order of names.

    A score may move by `tolerance`, a share of the recorded one.
    """
    moved = {}
    for name in sorted(recorded.keys() | current.keys()):
        if name not in current:
            moved[name] = "recorded, but missing today"
        elif is_missed(name):
            moved[name] = _defect_moved(recorded.get(name), current[name])
        elif name not in recorded:
            moved[name] = "new; record again with --overwrite"
        else:
            moved[name] = _part_moved(recorded[name], current[name], tolerance)
    return {name: change for name, change in moved.items() if change}


def _part_moved(before: Answer, now: Answer, tolerance: float) -> str:
    """The change of a part's verdict or score, in words; empty without one."""
    old, new = before.image_score, now.image_score
    score = "" if old is None or new is None else f" ({old:.4g} -> {new:.4g})"
    if before.verdict != now.verdict:
        return f"verdict {before.verdict or 'none'} -> {now.verdict or 'none'}{score}"
    if new is None:  # a part without a score can't show that the line is ready
        return f"can't be scored: {now.verdict}"
    if old is not None and abs(new - old) > tolerance * abs(old):
        return f"score has moved by {abs(new - old) / max(abs(old), 1e-12):.1%}{score}"
    return ""


def _defect_moved(before: Answer | None, now: Answer) -> str:
    """The fault of a missed defect's verdict: it was caught and passes; empty without one."""
    if now.image_score is None:
        return f"can't be scored: {now.verdict}"
    if now.verdict == "good" and before and before.verdict in ("review", "reject"):
        return f"a known defect that was caught passes (score {now.image_score:.4g})"
    return ""


def is_missed(name: str) -> bool:
    """True for the name of a defect that a model has called good."""
    return name.startswith(f"{MISSED}/")


def missed_parts(golden: Path) -> list[Path]:
    """The missed defects in a folder of golden parts; none without the folder."""
    folder = golden / MISSED
    return list_images(folder) if folder.is_dir() else []


def keep_missed(folder: Path, name: str, file: bytes) -> Path:
    """Keep a defect that a model has called good, among the golden parts of the model's run.

    Its score isn't recorded: the run is as ready for the line as before.

    Args:
        folder: the model folder, `model/` of a run.
        name: the image's file name.
        file: the file's bytes.

    Returns:
        The golden part's path; the earlier one for a defect that was kept already.

    Raises:
        DataError: the model has learned from the image, isn't in a run, or other golden parts there
            aren't recorded.
        OutputError: no room, or somebody else is changing the run.
    """
    if folder.name != "model":
        raise DataError(f"{folder} is in no run, so it has no golden parts; give the run's folder")
    golden = folder.parent / "golden"
    sha256 = hashlib.sha256(file).hexdigest()
    # A defect among the training images will be missed again, whatever is kept of it.
    for learned, hashed in read_manifest(folder)["training_images"].items():
        if hashed == sha256:
            raise DataError(
                f"{name} is the training image {learned}: the model has learned that it is good; "
                "take it out of the training images, and train again"
            )
    with locked(folder.parent):
        for part in missed_parts(golden):  # kept already, under whatever name
            if sha256_of(part) == sha256:
                return part
        stem = short_name(f"{Path(name).stem}-{sha256[:8]}")
        place = golden / MISSED / f"{stem}.{suffix_of(file)}"
        _write_missed(place, file, model_id(folder))
        return place


def carry_missed(source: Path, target: Path, model: str) -> None:
    """Copy missed defects to the golden parts of another version, except those already there.

    Args:
        source: folder of the present version's golden parts; may be missing.
        target: folder of the other version's golden parts; may be missing.
        model: id of the other version.

    Raises:
        DataError: golden parts in `target` aren't recorded.
    """
    for part in missed_parts(source):
        if not (target / MISSED / part.name).exists():
            _write_missed(target / MISSED / part.name, part.read_bytes(), model)


def _write_missed(place: Path, file: bytes, model: str) -> None:
    """Write a missed defect; golden parts without a record get an empty one.

    Raises:
        DataError: there is no record, but there are parts that aren't missed defects.
    """
    golden = place.parents[1]
    if not (golden / GOLDEN).is_file():
        parts = _samples_in(golden) if golden.is_dir() else []
        if others := [part.name for part in parts if not part.is_defect]:
            raise DataError(
                f"{golden} holds images whose scores aren't recorded ({some(others)}); "
                f"record them first {_RECORD}"
            )
        write_record(golden, model, {})
    write(place, file)


def write_record(folder: Path, model_id: str, answers: Mapping[str, Answer]) -> None:
    """Record a model's answers on golden parts, by their place in the folder.

    Raises:
        OutputError: no room, no permission.
    """
    images = {name: asdict(answer) for name, answer in answers.items()}
    write(folder / GOLDEN, as_json({"model_id": model_id, "images": images}))


def read_record(folder: Path) -> tuple[str, dict[str, Answer]]:
    """The record in a folder of golden parts: the model's id, and its answers by name.

    Raises:
        DataError: there is no record, or it is damaged.
    """
    file = folder / GOLDEN
    try:
        record = from_json(file.read_text("utf-8"))
        answers = {name: Answer(**answer) for name, answer in record["images"].items()}
        return str(record["model_id"]), answers
    except FileNotFoundError:
        raise DataError(
            f"{file} doesn't exist: record first what the model says of these parts, {_RECORD}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file} can't be read as a record of golden scores ({why(error)}); record again "
            f"{_RECORD}"
        ) from None
