"""The page of an explanation: what it says, against the model's own files, and what it may hold."""

from __future__ import annotations

import base64
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html import escape, unescape
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from browser import Browser, running_browser
from conftest import Command, train_arguments

from anomaly.explain.page import next_steps, verdict_lines
from anomaly.explain.score import Explanation, explained
from anomaly.storage.load import load_model

NAME = "部品 <b onclick=x>&\"' Прокат é.png"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def explanation(run: Path, image: Path) -> Explanation:
    return explained(load_model(run, torch.device("cpu")), image)


def text_of(page: str) -> str:
    body = re.sub(r"<(style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", body)))


def test_the_verdict_is_said_with_the_thresholds_and_the_good_images(
    run_folder: Path, product: Path
) -> None:
    """Recounted from the scores in the model's folder."""
    model = load_model(run_folder, torch.device("cpu"))
    scores = sorted(json.loads((run_folder / "model" / "calibration.json").read_text())["image"])
    assert model.thresholds is not None
    why = explanation(run_folder, product / "test" / "spot" / "000.png")
    review, reject = model.thresholds.review, model.thresholds.image
    for score, count in [
        (scores[-1] + 1, "None of {} good images scores"),
        (scores[-1], "1 of {} good images scores"),
        (scores[-3], "3 of {} good images score"),
    ]:
        (line,) = verdict_lines(replace(why.prediction, score=score))
        assert line.endswith(f"{count.format(len(scores))} as high.")
        assert float(line.split()[1].strip(";")) == pytest.approx(score, rel=1e-3)
        assert float(line.split("parts above ")[-1].split()[0]) == pytest.approx(reject, rel=1e-3)
        assert float(line.split("parts above ")[1].split()[0]) == pytest.approx(review, rel=1e-3)


def test_a_score_just_above_the_threshold_looks_higher(run_folder: Path, product: Path) -> None:
    why = explanation(run_folder, product / "test" / "spot" / "000.png")
    assert why.prediction.thresholds is not None
    limit = why.prediction.thresholds.image
    (line,) = verdict_lines(replace(why.prediction, score=limit * (1 + 1e-6)))
    score, reject = line.split()[1].strip(";"), line.split("parts above ")[-1].split()[0]
    assert float(score) > float(reject)


def test_regions_have_their_sizes_in_pixels_and_millimetres(
    product: Path, tmp_path: Path, command: Command
) -> None:
    scaled = train_arguments(product, tmp_path / "run", "image.mm_per_pixel=0.05")
    assert command("train", scaled)[0] == 0
    image = product / "test" / "spot" / "000.png"
    arguments = [image, "--model", tmp_path / "run", "--output", tmp_path / "why"]
    assert command("explain", arguments)[0] == 0
    page = (tmp_path / "why" / "explanation.html").read_text()
    text = text_of(page)
    infer = ["--model", tmp_path / "run", "--input", image, "--output", tmp_path / "out"]
    assert command("infer", [*infer, "--regions"])[0] in (0, 3)
    header, *lines = (tmp_path / "out" / "regions.csv").read_text().splitlines()
    assert lines
    for line in lines:
        row = dict(zip(header.split(","), line.split(","), strict=True))
        width, height = int(row["width"]), int(row["height"])
        patch = float(row["width_uncertainty"])
        assert f"{row['region']} {width * 0.05:.3g} × {height * 0.05:.3g} mm" in text
        assert f"{width} × {height} px ± {patch * 0.05:.2g} × " in text
        assert f"± {patch:.3g} × " in text
    facts = json.loads((tmp_path / "why" / "explanation.json").read_text())
    assert len(facts["regions"]) == len(lines)
    assert facts["patches"][0]["region"] == 1
    assert page.count('class="frame"') == len(lines)


def test_each_flagged_patch_stands_beside_the_good_ones(run_folder: Path, product: Path) -> None:
    why = explanation(run_folder, product / "test" / "spot" / "000.png")
    page = why.html()
    rows = re.findall(r'<div class="crops">(.*?)</div>', page, re.DOTALL)
    assert len(rows) == len(why.patches)
    for row, patch, crops in zip(rows, why.patches, why.crops, strict=True):
        near = patch["compared_with"]
        said = text_of(row)
        assert f"{patch['region']}: this image score {patch['score']:.4g}" in said
        for good in near:
            assert f"distance {good['distance']:.4g} {Path(good['image']).name}" in said
        pictures = re.findall(r"base64,([\w+/=]+)", row)
        assert len(pictures) == len(crops) == 1 + len(near)
        for data, crop in zip(pictures, crops, strict=True):
            read = cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), -1)[..., ::-1]
            assert np.abs(read.astype(int) - crop).mean() < 6


def test_names_of_any_script_stay_text_and_commands_can_be_pasted(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    image = tmp_path / NAME
    shutil.copy(product / "test" / "good" / "000.png", image)
    assert command("explain", [image, "--model", run_folder, "--output", tmp_path / "why"])[0] == 0
    page = (tmp_path / "why" / "explanation.html").read_text("utf-8")
    assert escape(NAME) in page
    assert "<b onclick" not in page
    assert not re.search(r"""(href|src)=["'](?!data:|#)""", page)
    assert re.search(r"img-src data:;.*script-src 'none'", page)
    missed = re.search(r"<code>(anomaly missed .*?)</code>", page)
    assert missed
    words = shlex.split(unescape(missed[1]))
    assert words == ["anomaly", "missed", str(image), "--model", str(run_folder), "--keep"]


def test_what_to_do_next_follows_from_the_verdict(run_folder: Path, product: Path) -> None:
    flagged = explanation(run_folder, product / "test" / "spot" / "000.png")
    commands = [[step[1] for step in next_steps(flagged)]]
    blind = replace(flagged, prediction=replace(flagged.prediction, thresholds=None))
    commands.append([step[1] for step in next_steps(blind)])
    odd = replace(flagged, prediction=replace(flagged.prediction, reason="a blank image"))
    commands.append([step[1] for step in next_steps(odd)])
    words = [[line.split()[1] for line in lines if line] for lines in commands]
    assert words == [["tune", "update"], ["calibrate"], []]
    assert "Reason for a person to look: a blank image." in text_of(odd.html())
    assert "The model has no thresholds" in replace(blind, regions=[]).html()


def test_the_page_needs_no_output_folder_and_refuses_an_earlier_one(
    run_folder: Path,
    product: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    image = product / "test" / "spot" / "000.png"
    code, out, _ = command("explain", [image, "--model", run_folder])
    assert code == 0
    page = Path("explained/000/explanation.html")
    assert page.is_file()
    assert f"Look at {page}" in out
    code, _, err = command("explain", [image, "--model", run_folder])
    assert (code, "--overwrite" in err) == (2, True)


def test_it_opens_silently_fits_narrow_windows_and_one_sheet(
    window: Browser, run_folder: Path, product: Path, tmp_path: Path
) -> None:
    window.events.clear()
    why = explanation(run_folder, product / "test" / "spot" / "000.png")
    region = replace(
        why.regions[0],
        **dict.fromkeys(("width_mm", "height_mm", "area_mm2"), 1.0),
        **dict.fromkeys(("width_uncertainty_mm", "height_uncertainty_mm"), 0.5),
    )
    fullest = {"patches": why.patches, "crops": why.crops, "regions": [region] * 2}
    why = replace(
        why, **{name: (values * 4)[: 4 + (name == "regions")] for name, values in fullest.items()}
    )
    file = tmp_path / "explanation.html"
    file.write_text(why.html(), "utf-8")
    for width in (360, 820, 1366):
        window.open(file, width=width)
        assert window.evaluate("document.documentElement.scrollWidth") <= width
    assert window.complaints() == []
    assert set(window.requests()) == {file.as_uri()}
    window.print_to(tmp_path / "page.pdf")
    printed = (tmp_path / "page.pdf").read_bytes()
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1
