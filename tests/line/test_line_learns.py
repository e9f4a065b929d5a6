"""From people's judgements to a model that knows better: another lamp, seen through to the end."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Command, write_part
from running import serving

from anomaly.files.writing import sha256_of
from anomaly.line.feedback import confirmed_parts
from anomaly.line.record import Keeping, Record
from anomaly.storage.load import load_model


def part(folder: Path, seed: int, mark: tuple[int, int] | None = None) -> Path:
    """A part under another lamp, darker than the one that the model knows."""
    file = folder / f"{seed}.png"
    write_part(file, seed, mark)
    picture = cv2.imread(str(file)).astype(np.float32)
    cv2.imwrite(str(file), np.rint(picture * (0.55, 0.6, 0.7)).astype(np.uint8))
    return file


def test_what_people_say_is_learned(run_folder: Path, tmp_path: Path, command: Command) -> None:
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
        code, out, err = command("update", [*arguments])
    assert code == 0, err
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
    from test_record import answer

    record = Record(tmp_path / "line.sqlite")
    files = [answer("reject", number) for number in range(1, 7)]
    record.add(files)
    record.add_feedback("good", who="a", part=1)
    record.add_feedback("good", who="a", part=2)
    record.add_feedback("defect", who="b", part=2, defect_type="scratch")  # the last word
    record.close()
    (tmp_path / "pictures").mkdir()
    found = confirmed_parts(tmp_path / "line.sqlite", {"0" * 16}, tmp_path / "pictures")
    assert [sample.name for sample in found.good] == ["part 1"]
    assert [sample.name for sample in found.defects] == ["part 2 (scratch)"]
    assert [sample.name for sample in found.past] == ["part 6", "part 5", "part 4", "part 3"]
    assert found.good[0].path.read_bytes() == bytes(1000)
    with pytest.raises(Exception, match="holds no part scored by this model"):
        confirmed_parts(tmp_path / "line.sqlite", {"1" * 16}, tmp_path / "pictures")
    (tmp_path / "other.sqlite").write_bytes(b"no record")
    with pytest.raises(Exception, match="can't be read as a record"):
        confirmed_parts(tmp_path / "other.sqlite", {"0" * 16}, tmp_path / "pictures")


def test_pictures_of_judged_parts_are_written_as_a_data_set(
    tmp_path: Path, command: Command
) -> None:
    """For whatever takes files: a model of another record, training anew."""
    from test_record import answer

    png = part(tmp_path, 1).read_bytes()
    record = Record(tmp_path / "line.sqlite", Keeping(goods=0))
    files = [replace(answer("reject", number), file=png) for number in range(1, 6)]
    record.add([*files, replace(files[0], model="lid"), answer("good", 9)])
    record.add_feedback("defect", who="a", part=1)
    record.add_feedback("good", who="a", part=1)  # the last word
    record.add_feedback("defect", who="b", part=2)
    record.add_feedback("defect", who="b", part=3, defect_type="../edge/nick")
    record.add_feedback("good", who="b", part=7)  # its picture isn't kept
    record.close()
    to = tmp_path / "judged"
    arguments = ["--record", tmp_path / "line.sqlite", "--pictures", to]
    code, out, _ = command("feedback", arguments)
    assert code == 0
    assert "disc: 1 good, 2 defective, 1 more without a picture; in " in out
    assert "lid: 1 good, 0 defective; in " in out
    written = {file.relative_to(to).as_posix() for file in to.rglob("*") if file.is_file()}
    assert written == {
        "disc/good/part-1.png",
        "disc/defect/part-2.png",
        "disc/defect/_._edge_nick/part-3.png",
        "lid/good/part-6.png",
    }
    assert (to / "disc" / "good" / "part-1.png").read_bytes() == png
    code, _, err = command("feedback", arguments)
    assert (code, "exists already; give another folder" in err) == (2, True)
    Record(tmp_path / "empty.sqlite").close()
    code, _, err = command("feedback", ["--record", tmp_path / "empty.sqlite", "--pictures", to])
    assert (code, "holds no judged part" in err) == (2, True)
