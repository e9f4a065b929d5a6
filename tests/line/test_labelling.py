"""Which parts are judged first, the masks that people draw, and what learns from both."""

from __future__ import annotations

import itertools
import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import Command, write_part
from numpy.typing import NDArray
from running import Served, serving
from test_record import answer

from anomaly.datasets import ground_truth, open_dataset
from anomaly.errors import DataError
from anomaly.line.engine import photograph
from anomaly.line.feedback import confirmed_parts, mask_of, queue
from anomaly.line.period import Period, parts_of
from anomaly.line.record import Answer, Keeping, Record
from anomaly.training.tuning import search


def scored(verdict: str, score: float, number: int, reason: str = "") -> Answer:
    """A part of a model whose thresholds are 1 and 2."""
    part = answer(verdict, number)
    return replace(part, row=replace(part.row, image_score=score, reason=reason))


def test_what_is_most_in_doubt_is_judged_first(tmp_path: Path) -> None:
    file = tmp_path / "line.sqlite"
    parts = [
        scored("reject", 9.0, 1), scored("reject", 2.1, 2), scored("good", 0.99, 3),
        scored("review", 1.2, 4), scored("review", 1.9, 5),
        scored("review", 0.5, 6, "another product?"), scored("good", 0.5, 7),
        scored("reject", 3.0, 8), scored("review", 1.9, 5),  # the same image, sent again
    ]  # fmt: skip
    with closing(Record(file, Keeping(goods=1.0))) as record:
        record.add([*parts, replace(scored("reject", 9.0, 9), model="lid")])
        record.add_feedback("defect", who="a", part=8, defect_type="scratch")
        record.add_feedback("defect", who="a", part=10, defect_type="nick")
        told = queue(file, "disc")
        assert [(part["id"], part["why"]) for part in told["parts"]] == [
            (9, "review"), (4, "review"), (3, "near"), (2, "near"), (6, "unlike"), (7, "check"),
            (1, "reject"),
        ]  # fmt: skip
        assert (told["left"], told["kinds"]) == (7, ["scratch"])
        assert queue(file, limit=2)["kinds"] == ["nick", "scratch"]
        assert [part["id"] for part in queue(file, limit=2)["parts"]] == [9, 4]
        for number in (9, 3, 7):
            record.add_feedback("good", who="a", part=number)
        record.add_feedback("", who="a", part=3)
        assert [part["id"] for part in queue(file)["parts"]] == [4, 3, 2, 6, 1]


def test_good_parts_are_checked_by_chance_and_the_check_ends(tmp_path: Path) -> None:
    file = tmp_path / "line.sqlite"
    with closing(Record(file, Keeping(goods=1.0))) as record:
        record.add([scored("good", 0.5, number) for number in range(200)])
        drawn = [part["id"] for part in queue(file)["parts"]]
        assert (len(drawn), max(drawn) - min(drawn) > 50) == (10, True)
        for number in drawn:
            record.add_feedback("good", who="a", part=number)
        assert queue(file)["parts"] == []


def test_a_withdrawn_judgement_counts_for_nobody(tmp_path: Path) -> None:
    file = tmp_path / "line.sqlite"
    with closing(Record(file)) as record:
        record.add([answer("reject", 1), answer("reject", 2)])
        record.add_feedback("defect", who="a", part=1, defect_type="scratch", mark=b"png")
        record.add_feedback("good", who="a", part=2)
        record.add_feedback("", who="a", part=1)
        assert (record.part(1) or {})["feedback"] is None
        assert len(list(record.feedback())) == 3  # what was said stays
        (tmp_path / "kept").mkdir()
        confirmed = confirmed_parts(file, ["0" * 16], tmp_path / "kept")
        assert [sample.name for sample in confirmed.past] == ["part 1"]
        assert (len(confirmed.good), len(confirmed.defects)) == (1, 0)
        with parts_of(file, Period.of("2026-01-01", "2026-01-02")) as db:
            rows = db.execute("SELECT judged, kind FROM seen").fetchall()
        assert rows == [("", ""), ("good", "")]


def drawn(
    size: tuple[int, int], rectangles: list[list[float]], strokes: list[tuple[float, Any]]
) -> NDArray[np.bool_]:
    """What was drawn, by looking at each pixel and many points on each stroke's way."""
    y, x = np.mgrid[: size[0], : size[1]]
    mask = np.zeros(size, bool)
    for left, top, right, bottom in rectangles:
        mask |= (x + 1 > left) & (x < right) & (y + 1 > top) & (y < bottom)
    for radius, points in strokes:
        pairs = list(itertools.pairwise(points)) or [(points[0], points[0])]
        for (x0, y0), (x1, y1) in pairs:
            for share in np.linspace(0, 1, 400):
                middle = x0 + share * (x1 - x0) - 0.5, y0 + share * (y1 - y0) - 0.5
                mask |= np.hypot(x - middle[0], y - middle[1]) <= radius
    return mask


def picture(height: int, width: int) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
    return bytes(cv2.imencode(".png", pixels)[1])


def pixels_of(png: bytes) -> NDArray[np.bool_]:
    values = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_UNCHANGED)
    assert set(np.unique(values)) <= {0, 255}
    return np.asarray(values > 0)


def test_a_mask_is_what_was_drawn() -> None:
    rectangles = [[10.2, 5.0, 20.0, 9.5], [-5.0, 70.0, 3.3, 999.0]]
    strokes = [(4.3, [(30.0, 20.0), (60.5, 41.0), (60.5, 55.2)]), (3.0, [(99.0, 2.0)])]
    mask = pixels_of(mask_of(picture(80, 100), 100, rectangles, strokes))
    expected = drawn((80, 100), rectangles, strokes)
    assert (mask != expected).sum() <= 3  # on the very edge, where points on the way lie apart
    # On a photograph that was made small, pixels stand for more of the image's.
    file = picture(1600, 2600)
    shown = cv2.imdecode(np.frombuffer(photograph(file, 10**8, None), np.uint8), cv2.IMREAD_COLOR)
    assert shown.shape == (800, 1300, 3)
    mask = pixels_of(mask_of(file, shown.shape[1], [[100, 100, 101, 102]]))
    assert np.argwhere(mask).tolist() == [[y, x] for y in range(200, 204) for x in (200, 201)]

    for edges, message in (((200, 0, 300, 20), "nothing"), ((0, 0, 100, 80), "nearly all")):
        with pytest.raises(DataError, match=f"covers {message}"):
            mask_of(picture(80, 100), 100, [edges])
    with pytest.raises(DataError, match="too many or too long"):
        mask_of(picture(80, 100), 100, [], [(9e5, [(0.0, 0.0), (9.0, 9.0)] * 50_000)])


def post(served: Served, path: str, **body: Any) -> tuple[int, Any]:
    sent, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    status, _, said = served.ask("POST", path, sent, kind)
    return status, json.loads(said)


@pytest.mark.slow
def test_parts_that_were_judged_and_marked_are_a_data_set(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judged on the service, written as files, and read by what learns, tests and explains."""
    models = tmp_path / "models"
    run = Path(shutil.copytree(run_folder, models / "disc"))
    for i in range(6):
        write_part(tmp_path / f"{i}.png", seed=600 + i, mark=(20 + 3 * i, 30))
        write_part(tmp_path / f"good_{i}.png", seed=700 + i)
    options = ["--record", tmp_path / "line.sqlite", "--keep-good", 1]
    mark = {"width": 120, "rectangles": [[24, 18, 48, 34]]}
    with serving(models, *map(str, options)) as served:
        for i in range(6):
            number = served.score((tmp_path / f"{i}.png").read_bytes())[1]["id"]
            more = {"mark": mark, "defect_type": "spot"}
            path = f"/v1/parts/{number}/feedback"
            assert post(served, path, verdict="good", mark=mark)[0] == 409
            assert post(served, path, verdict="defect", **more)[0] == 200
            post(served, path, verdict="defect", defect_type="spot", note="its mark stays")
            good = served.score((tmp_path / f"good_{i}.png").read_bytes())[1]
            assert post(served, f"/v1/parts/{good['id']}/feedback", verdict="good")[0] == 200
        # A good part becomes a golden one, with its score; the service goes on with both.
        assert good["verdict"] == "good"
        status, said = post(served, f"/v1/parts/{good['id']}/golden")
        assert (status, "golden part: part-" in said["feedback"]["note"]) == (200, True)
        (kept,) = (run / "golden").glob("*.png")
        recorded = json.loads((run / "golden" / "golden.json").read_text())["images"]
        assert recorded[kept.name]["image_score"] == pytest.approx(good["image_score"], rel=1e-3)
        post(served, path, verdict="good")
        status, said = post(served, f"/v1/parts/{number}/golden")
        assert (status, "judges rightly" in said["detail"]) == (409, True)
        post(served, path, verdict="defect")  # its mark belongs to what was taken back
    check = ["--model", run, "--golden", run / "golden", "--device", "cpu"]
    assert command("selfcheck", check)[0] == 0
    judged = tmp_path / "judged" / "disc"
    arguments = ["--record", options[1], "--pictures", judged.parent]
    assert "6 good, 6 defective, 5 with a mask" in command("feedback", arguments)[1]
    marked = [s for s in open_dataset("good_defect", judged).test if s.mask_path]
    assert [sample.defect_type for sample in marked] == ["spot"] * 5
    expected = np.zeros((96, 120), bool)
    expected[18:34, 24:48] = True
    for sample in marked:
        np.testing.assert_array_equal(ground_truth(sample, (96, 120)), expected)
    named = ["--good", judged / "good", "--defects", judged / "defect"]
    masks = ["--masks", judged / "ground_truth", "--output", tmp_path / "evaluation"]
    code, out, err = command("evaluate", ["--model", run, *named, *masks, "--device", "cpu"])
    assert (code, "pixel AUROC" in out) == (0, True), err
    monkeypatch.setattr(search, "networks_on_disk", list)
    data = ("data.format=good_defect", f"data.root={judged}", "data.category=null")
    settings = [option for value in data for option in ("--set", value)]
    tune = ["--config", run / "model" / "config.yaml", *settings, "--budget", "10s"]
    code, out, err = command("tune", [*tune, "--output", tmp_path / "t.yaml", "--device", "cpu"])
    assert (code, "of 6" in out) == (0, True), err
    assert command("missed", [judged / "defect", "--model", run, "--device", "cpu"])[0] == 0
