"""From people's judgements to a model that knows better: another lamp, seen through to the end."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Says, write_part
from running import answer, serving
from test_record import PNG

from anomaly.errors import DataError
from anomaly.files.writing import sha256_of
from anomaly.line.record import Record, confirmed_parts
from anomaly.storage.models import load_model


def part(folder: Path, seed: int, mark: tuple[int, int] | None = None) -> Path:
    """A part under another lamp, darker than the one that the model knows."""
    file = folder / f"{seed}.png"
    write_part(file, seed, mark)
    picture = cv2.imread(str(file)).astype(np.float32)
    cv2.imwrite(str(file), np.rint(picture * (0.55, 0.6, 0.7)).astype(np.uint8))
    return file


def test_what_people_say_is_learned(run_folder: Path, tmp_path: Path, says: Says) -> None:
    models = tmp_path / "models"
    shutil.copytree(run_folder, models / "disc")
    goods = [part(tmp_path, 800 + i) for i in range(8)]
    defects = [part(tmp_path, 900 + i, mark=(30, 40 + 10 * i)) for i in range(2)]
    with serving(models) as served:
        for file in (*goods, *defects):
            _, row = served.score(file.read_bytes())
            assert row["verdict"] != "good"
            verdict = "good" if file in goods else "defect"
            assert served.post(f"/v1/parts/{row['id']}/feedback", verdict=verdict)[0] == 200
        served.score(part(tmp_path, 850).read_bytes())  # nobody says anything of it
        # The record is in use all the while.
        new, record = models / "disc_lamp", models / "line.sqlite"
        arguments = ["--model", models / "disc", "--feedback", record, "--output", new]
        out = says(0, "update", arguments)
    judged = [len([*(new / "judged" / kind).iterdir()]) for kind in ("good", "defect")]
    assert judged == [8, 2]
    refusal = says(2, "update", [*arguments, "--overwrite"])
    assert "isn't from an earlier run, so it isn't deleted" in refusal
    assert "learned 8 good images" in out
    assert "known defects caught: 5 of 5 before, 5 after" in out  # the test split's, too
    assert "past parts flagged: 1 of 1 before, 0 after" in out
    detector = load_model(new, "cpu")
    learned = {*detector.manifest["training_images"].values()}
    assert {sha256_of(file) for file in goods} <= learned
    assert not {sha256_of(file) for file in defects} & learned
    fresh = [part(tmp_path, 870 + i) for i in range(8)]
    assert [p.verdict for p in detector.predict(fresh)].count("good") >= 6
    assert "good" not in [p.verdict for p in detector.predict(defects)]


def test_only_what_a_person_has_confirmed_of_this_model_is_taken(tmp_path: Path) -> None:
    """Pictures of judged parts are a data set, for whatever takes files."""
    with closing(Record(tmp_path / "line.sqlite", goods=0)) as record:
        record.add([replace(answer("reject", number), file=PNG) for number in range(1, 7)])
        record.add([answer("good", 9)])
        for part, verdict, kind in (
            (1, "good", ""),
            (2, "good", ""),
            (2, "defect", "scratch"),  # the last word
            (3, "defect", "../edge/nick"),
            (7, "good", ""),  # its picture isn't kept
        ):
            record.add_feedback(verdict, who="a", part=part, defect_type=kind)
    to = tmp_path / "pictures"
    found = confirmed_parts(record.file, {"0" * 16}, to)
    assert [sample.name for sample in found.good] == ["part 1"]
    names = ["part 2 (scratch)", "part 3 (../edge/nick)"]
    assert [sample.name for sample in found.defects] == names
    assert [sample.name for sample in found.past] == ["part 6", "part 5", "part 4"]
    assert found.lost == 1
    written = {p.relative_to(to / "judged").as_posix() for p in (to / "judged").rglob("*.png")}
    kinds = {"defect/scratch/part-2.png", "defect/_._edge_nick/part-3.png"}
    assert written == {"good/part-1.png", *kinds}
    assert found.good[0].path.read_bytes() == PNG
    with pytest.raises(DataError, match="holds no picture of a part scored by this model"):
        confirmed_parts(record.file, {"1" * 16}, to)
    (tmp_path / "other.sqlite").write_bytes(b"no record")
    with pytest.raises(DataError, match="can't be read as a record"):
        confirmed_parts(tmp_path / "other.sqlite", {"0" * 16}, to)
