"""The page of an explanation: what it says, against the model's own files, and what it may hold."""

from __future__ import annotations

import base64
import json
import re
import shlex
import shutil
from dataclasses import replace
from html import escape, unescape
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from browser import Browser
from conftest import Says
from kit import table

from anomaly.explain.evidence import explained
from anomaly.explain.page import Explanation, next_steps, verdict_lines
from anomaly.storage.models import load_model

CPU = torch.device("cpu")
NAME = "部品 <b onclick=x>&\"' Прокат é.png"


@pytest.fixture(scope="module")
def why(run_folder: Path, product: Path) -> Explanation:
    """The explanation of a part with a red square."""
    return explained(load_model(run_folder, CPU), product / "test" / "spot" / "000.png")


def text_of(page: str) -> str:
    body = re.sub(r"<(style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", body)))


def test_the_verdict_is_said_with_the_thresholds_and_the_good_images(
    run_folder: Path, why: Explanation
) -> None:
    """Recounted from the scores in the model's folder."""
    scores = sorted(json.loads((run_folder / "model" / "calibration.json").read_text())["image"])
    limits = why.prediction.thresholds
    assert limits is not None
    for score in (scores[-1] + 1, scores[-1], scores[-3], limits.image * (1 + 1e-6)):
        (line,) = verdict_lines(replace(why.prediction, score=score))
        count = sum(good >= score for good in scores)
        verb = "scores" if count < 2 else "score"
        assert line.endswith(f"{count or 'None'} of {len(scores)} good images {verb} as high.")
        shown = float(line.split()[1].strip(";"))
        borders = [float(text.split()[0]) for text in line.split("parts above ")[1:]]
        assert shown == pytest.approx(score, rel=1e-3)
        assert borders == [pytest.approx(limits.image, rel=1e-3)]  # 12 images leave no review zone
        assert (shown > borders[-1]) == (score > limits.image)  # also where it is just above


def test_regions_have_their_sizes_in_pixels_and_millimetres(
    run_folder: Path, product: Path, inferred: Path
) -> None:
    """Those of `infer`."""
    model, image = load_model(run_folder, CPU), product / "test" / "spot" / "000.png"
    scaled = model.config.image.model_copy(update={"mm_per_pixel": 0.05})
    model = replace(model, config=model.config.model_copy(update={"image": scaled}))
    why = explained(model, image)
    page = why.html()
    text = text_of(page)
    rows = [row for row in table(inferred, "regions.csv") if row["path"] == str(image)]
    assert rows
    for row in rows:
        width, height = int(row["width"]), int(row["height"])
        patch = float(row["width_uncertainty"])
        assert f"{row['region']} {width * 0.05:.3g} × {height * 0.05:.3g} mm" in text
        assert f"{width} × {height} px ± {patch * 0.05:.2g} × " in text
        assert f"± {patch:.3g} × " in text
    assert [one.area_mm2 for one in why.regions] == pytest.approx(
        [int(row["area"]) * 0.05**2 for row in rows]
    )
    facts = why.facts()
    assert len(facts["regions"]) == len(rows) == page.count('class="frame"')
    assert facts["patches"][0]["region"] == 1


def test_each_flagged_patch_stands_beside_the_good_ones(why: Explanation) -> None:
    rows = re.findall(r'<div class="crops">(.*?)</div>', why.html(), re.DOTALL)
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
    run_folder: Path, product: Path, tmp_path: Path
) -> None:
    image = tmp_path / NAME
    shutil.copy(product / "test" / "good" / "000.png", image)
    page = explained(load_model(run_folder, CPU), image).html()
    assert escape(NAME) in page
    assert "<b onclick" not in page
    assert not re.search(r"""(href|src)=["'](?!data:|#)""", page)
    assert re.search(r"img-src data:;.*script-src 'none'", page)
    keep = re.search(r"<code>(anomaly explain .*?)</code>", page)
    assert keep
    words = shlex.split(unescape(keep[1]))
    assert words == ["anomaly", "explain", str(image), "--model", str(run_folder), "--keep"]


def test_what_to_do_next_follows_from_the_verdict(why: Explanation) -> None:
    blind = replace(why, prediction=replace(why.prediction, thresholds=None))
    odd = replace(why, prediction=replace(why.prediction, reason="a blank image"))
    commands = [[step[1] for step in next_steps(one)] for one in (why, blind, odd)]
    words = [[line.split()[1] for line in lines if line] for lines in commands]
    assert words == [["tune", "update"], ["calibrate"], []]
    assert "Reason for a person to look: a blank image." in text_of(odd.html())
    assert "The model has no thresholds" in replace(blind, regions=[]).html()


def test_the_page_needs_no_output_folder_and_refuses_an_earlier_one(
    run_folder: Path,
    product: Path,
    tmp_path: Path,
    says: Says,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [product / "test" / "spot" / "000.png", "--model", run_folder]
    page = Path("explained/000/explanation.html")
    assert f"Look at {page}" in says(0, "explain", arguments)
    assert page.is_file()
    assert "--overwrite" in says(2, "explain", arguments)


def test_it_opens_silently_fits_narrow_windows_and_one_sheet(
    browser: Browser, why: Explanation, tmp_path: Path
) -> None:
    sizes = dict.fromkeys(("width_mm", "height_mm", "area_mm2"), 1.0)
    sizes |= dict.fromkeys(("width_uncertainty_mm", "height_uncertainty_mm"), 0.5)
    regions = [replace(why.regions[0], **sizes)] * 5
    fullest = replace(why, regions=regions, patches=why.patches[:1] * 4, crops=why.crops[:1] * 4)
    file = tmp_path / "explanation.html"
    file.write_text(fullest.html(), "utf-8")
    browser.open(file)
    browser.fits(360, 820, 1366)
    browser.print_to(tmp_path / "page.pdf")
    printed = (tmp_path / "page.pdf").read_bytes()
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1
