"""A model learns confirmed good parts of another lamp; it refuses what would let defects pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Says, write_part
from kit import tiny

import anomaly
from anomaly.datasets.samples import Sample
from anomaly.desk.update import learn
from anomaly.errors import AnomalyError
from anomaly.files.writing import sha256_of
from anomaly.storage.models import load_model

Update = Callable[..., tuple[str, Path]]


def relit(
    file: Path, to: Path, tint: tuple[float, ...] = (0.75, 0.9, 1.0), fall: float = 0.3
) -> Path:
    """The same part under another lamp: warmer, and darker to the right."""
    picture = cv2.imread(str(file)).astype(np.float32)
    light = 1 - fall * np.linspace(0, 1, picture.shape[1])[None, :, None]
    to.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(to), np.rint(picture * tint * light).astype(np.uint8))
    return to


@pytest.fixture(scope="module")
def lamp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parts under the other lamp: `good` to learn, `other` good ones, `defects`; read only."""
    folder = tmp_path_factory.mktemp("lamp")
    for kind, count, seed in (("good", 12, 500), ("other", 10, 600), ("defects", 4, 700)):
        for i in range(count):
            mark = (30, 30 + 10 * i) if kind == "defects" else None
            write_part(folder / "plain.png", seed + i, mark)
            relit(folder / "plain.png", folder / kind / f"{i:03}.png")
    return folder


def verdicts(model: Path, folder: Path) -> list[str]:
    return [p.verdict for p in load_model(model, "cpu").predict(sorted(folder.glob("*.png")))]


@pytest.fixture
def update(says: Says, tmp_path: Path) -> Update:
    """Runs the command into tmp_path / "new", to an exit code; all that it says, and the run."""

    def run(code: int, model: Path, *options: object, output: str = "new") -> tuple[str, Path]:
        to = tmp_path / output
        arguments = ["--model", model, "--output", to, *options]
        return says(code, "update", arguments), to

    return run


def test_good_parts_under_another_lamp_are_learned_and_golden_parts_go_along(
    run_folder: Path, lamp: Path, tmp_path: Path, update: Update, says: Says
) -> None:
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    golden = shutil.copytree(lamp / "other", run / "golden")
    says(0, "evaluate", ["--model", run, "--golden", golden, "--overwrite"])
    before = {f.name: sha256_of(f) for f in (run / "model").iterdir()}
    assert "good" not in verdicts(run, lamp / "other")  # too dark, whatever the score
    given = ["--good", lamp / "good", "--defects", lamp / "defects"]
    said, new = update(0, run, *given)
    assert "learned 12 good images" in said
    assert "known defects caught: 7 of 7 before, 7 after" in said  # those of the test split, too
    changed = next(line for line in said.splitlines() if line.startswith("golden parts"))
    assert changed.startswith("golden parts flagged: 10 of 10 before")
    # 12 images vouch for at most 22 %.
    assert int(changed.split()[-2]) == 10 - verdicts(new, lamp / "other").count("good") <= 2
    assert "good" not in verdicts(new, lamp / "defects")
    assert {f.name: sha256_of(f) for f in (run / "model").iterdir()} == before
    parent, child = load_model(run, "cpu"), load_model(new, "cpu")
    assert child.manifest["parent"] == parent.model_id
    assert len(child.manifest["training_images"]) == 24
    assert child.thresholds is not None
    assert child.thresholds.images == 24
    text = (new / "model" / "history.jsonl").read_text("utf-8")
    (line,) = [json.loads(line) for line in text.splitlines()]
    assert (line["model_before"], line["model_after"]) == (parent.model_id, child.model_id)
    assert sorted(line["images"]["learned"]) == [f"{i:03}.png" for i in range(12)]
    # What can be done with a trained model can be done with it: its data set is known, too.
    says(0, "evaluate", ["--model", new, "--output", tmp_path / "figures"])
    said = says(0, "evaluate", ["--model", new, "--golden", new / "golden"])
    assert "10 of 10 images score as recorded" in said
    # All of it is known now.
    said, _ = update(2, new, *given, output="newer")
    assert "none of 12 good images can be used: 12 that the model has" in said
    # Golden parts say what another model has said of them: a service would refuse this one.
    assert "exist already" in update(2, run_folder, *given)[0]
    update(0, run_folder, *given, "--overwrite")
    assert sorted(file.name for file in new.iterdir()) == ["model", "train.json"]


def test_images_that_the_model_was_calibrated_with_count_once(
    padim_folder: Path, tmp_path: Path, update: Update, says: Says
) -> None:
    run = shutil.copytree(padim_folder, tmp_path / "calibrated")
    for i in range(12):
        write_part(tmp_path / "more" / f"{i}.png", seed=550 + i)
    says(0, "calibrate", ["--model", run, "--good", tmp_path / "more"])
    _, new = update(0, run, "--good", tmp_path / "more", "--include-suspects")
    thresholds = load_model(new, "cpu").thresholds
    assert thresholds is not None
    assert thresholds.images == len(set(thresholds.good.hashes)) == 12


def test_what_is_usual_is_learned_once_there_are_images_enough(
    product: Path, tmp_path: Path, update: Update
) -> None:
    """Six training images don't show it, and twelve more do."""
    few = sorted((product / "train" / "good").iterdir())[:6]
    detector = anomaly.fit(few, tiny(), device="cpu")
    assert detector.model.training_statistics is not None
    assert not detector.model.training_statistics.is_reliable
    detector.save(tmp_path / "run" / "model")
    for i in range(12):
        write_part(tmp_path / "good" / f"{i}.png", seed=700 + i)
    _, new = update(0, tmp_path / "run", "--good", tmp_path / "good")
    learned = load_model(new, "cpu")
    assert learned.training_statistics is not None
    assert learned.training_statistics.images == 18
    white = np.full((96, 120), 255, np.uint8)
    white[0, 0] = 254
    assert "brightness" in learned.predict(white).reason
    assert learned.predict(tmp_path / "good" / "0.png").reason == ""
    assert [learned.predict(file).reason for file in few] == [""] * 6


def test_views_of_one_part_are_held_out_together(
    run_folder: Path, lamp: Path, tmp_path: Path
) -> None:
    files = sorted((lamp / "good").iterdir())
    views = [Sample(file, file.name, group=f"part {i // 3}") for i, file in enumerate(files)]
    model = load_model(run_folder, "cpu")
    good = learn(model, views, scratch=tmp_path, include_suspects=True).good
    assert (len(good.names), good.groups) == (12, 4)


def test_an_update_that_lets_a_defect_pass_is_refused(
    run_folder: Path, tmp_path: Path, update: Update
) -> None:
    """People call defects good until the model does, too."""
    (tmp_path / "good").mkdir()
    for i in range(6):
        write_part(tmp_path / "good" / f"{i}.png", seed=900 + i, mark=(40, 50))
    for i in range(4):
        write_part(tmp_path / "defects" / f"{i}.png", seed=950 + i, mark=(40, 50))
    shutil.copytree(tmp_path / "defects", tmp_path / "again")  # copies make no more of them
    defects = ["--defects", tmp_path / "defects", tmp_path / "again"]
    given = ["--good", tmp_path / "good", *defects, "--include-suspects"]
    assert verdicts(run_folder, tmp_path / "defects") == 4 * ["reject"]
    said, new = update(1, run_folder, *given)
    assert "known defects now caught would be called good (" in said
    assert "again/0.png: reject -> " in said
    assert not new.exists()
    assert "known defects caught: 7 of 7 before" in said
    with pytest.raises(AnomalyError, match="now caught would be called good"):
        anomaly.load(run_folder, "cpu").update(
            tmp_path / "good", defects=tmp_path / "defects", include_suspects=True
        )
    update(0, run_folder, *given, "--yes")
    assert "good" in verdicts(new, tmp_path / "defects")


def test_suspects_are_left_out_unless_somebody_insists(
    run_folder: Path, lamp: Path, tmp_path: Path, update: Update
) -> None:
    shutil.copytree(lamp / "good", tmp_path / "good")
    shutil.copy(lamp / "defects" / "001.png", tmp_path / "good" / "005b.png")
    (tmp_path / "good" / "text.png").write_bytes(b"no picture")
    said, new = update(3, run_folder, "--good", tmp_path / "good")
    for text in (
        "text.png",
        "suspect, not learned: 005b.png",
        "add --include-suspects",
        "known defects caught: 3 of 3 before, 3 after",
    ):
        assert text in said
    manifest = load_model(new, "cpu").manifest
    assert "005b.png" not in manifest["training_images"]
    assert manifest["refused_images"] == {"005b.png": 18, "text.png": 25}
    assert verdicts(new, lamp / "defects").count("good") == 0
    # Names of the images that bank vectors come from stay theirs.
    scorer = load_model(new, "cpu").scorer
    images = scorer.tensors()["origins"][:, 0].tolist()
    assert (18 in images, max(images)) == (False, 24)
    only = tmp_path / "only"
    only.mkdir()
    shutil.copy(lamp / "defects" / "001.png", only / "bad.png")
    said, other = update(2, run_folder, "--good", only, output="other")
    assert ("may be defects" in said, other.exists()) == (True, False)


def test_a_folder_of_defects_is_told_by_the_threshold_that_rises(
    resnet_folder: Path, tmp_path: Path, update: Update
) -> None:
    """Among defects of one kind none stands out, so there are no suspects."""
    for i in range(8):
        write_part(tmp_path / "lot" / f"{i}.png", seed=900 + i, mark=(40 + i, 50))
    said, new = update(0, resnet_folder, "--good", tmp_path / "lot")
    assert "before the update: 0 good, 0 review, 8 reject" in said
    before, after = (load_model(run, "cpu").thresholds for run in (resnet_folder, new))
    assert before is not None
    assert after is not None
    assert f"reject threshold rises from {before.image:.4g} to {after.image:.4g}" in said


def test_what_may_not_be_learned(
    run_folder: Path, product: Path, lamp: Path, tmp_path: Path, update: Update
) -> None:
    def refused(*options: object, model: Path = run_folder) -> str:
        said, new = update(2, model, *options)
        assert not new.exists()
        return said

    assert "3 of the test split" in refused("--good", product / "test" / "good")
    twice = ["--good", lamp / "good", "--defects", lamp / "good" / "000.png"]
    assert "as good and as a defect" in refused(*twice)
    bad = shutil.copytree(lamp / "defects", tmp_path / "nIO")
    assert "nIO would be taken as good" in refused("--good", bad)
    run = shutil.copytree(run_folder, tmp_path / "run")
    (run / "model" / "thresholds.json").write_text("null\n")
    assert "was changed since it was written" in refused("--good", lamp / "good", model=run)
    said, _ = update(2, run, "--good", lamp / "good", output="run")
    assert "holds the source model and isn't replaced" in said
