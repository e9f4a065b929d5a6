"""The report in a real browser: what moves, what it counts, what keys reach, what can't hurt."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from browser import Browser
from report_cases import HOSTILE, LIMIT, case, limits
from sklearn.metrics import precision_recall_curve, roc_curve

from anomaly.datasets.samples import Sample
from anomaly.desk.advice import Weakness
from anomaly.evaluation.metrics import confusion
from anomaly.report.report import Category, report_html
from anomaly.scoring.model import Scored


def opened(browser: Browser, folder: Path, category: Category) -> Path:
    file = folder / "report.html"
    file.write_text(report_html(category), "utf-8")
    browser.open(file)
    return file


def rescored(category: Category, rows: list[Scored]) -> Category:
    return replace(category, evaluation=replace(category.evaluation, scored=tuple(rows)))


def verdict(row: Scored, review: float, reject: float) -> str:
    """The verdict that the page must show, written down once more."""
    score = row.score or 0.0
    return "reject" if score > reject else "review" if score > review or row.reason else "good"


def expected(category: Category, review: float, reject: float) -> dict[str, Any]:
    rows = [
        (verdict(row, review, reject), row.sample.is_defect, row.sample.defect_type)
        for row in category.evaluation.scored
    ]
    counts = confusion(rows)
    waiting = counts.good.review + counts.defective.review
    return {
        "outcomes": [counts.false_rejects, counts.escapes, waiting],
        "types": {name: [n.good, n.review, n.reject] for name, n in counts.by_type.items()},
        "tiles": Counter(verdict for verdict, *_ in rows),
    }


def shown(browser: Browser) -> dict[str, Any]:
    types = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#types tbody tr')].map((row) =>"
        "[row.dataset.type, [...row.cells].slice(2).map((c) => Number(c.textContent))]))"
    )
    return {
        "outcomes": [int(text) for text in browser.texts(".outcome b")],
        "types": types,
        "tiles": Counter(text[2:] for text in browser.texts(".tile .verdict")),
    }


def slide(browser: Browser, side: str, value: float) -> float:
    """Move a slider as a hand would, and let go; returns where it came to stand."""
    return float(browser.set(side, value, "input", "blur"))


def names(browser: Browser) -> list[str]:
    """The names of the tiles that are shown."""
    tiles = "[...document.querySelectorAll('.tiles li:not([hidden]) .tile')]"
    return list(browser.evaluate(f"{tiles}.map((t) => t.title)"))


def test_counts_are_those_of_python_wherever_the_sliders_stand(
    browser: Browser, tmp_path: Path
) -> None:
    category = case(60, thresholds=limits(11.0, review=8.5))
    rows = list(category.evaluation.scored)
    for i in (0, 3, 7, int(np.argmax([row.score or 0.0 for row in rows]))):
        rows[i] = replace(rows[i], reason="too dark")
    category = rescored(category, rows)
    opened(browser, tmp_path, category)
    # The model's own thresholds, which say where they are from.
    assert shown(browser) == expected(category, 8.5, 11.0)
    own = category.verdicts
    assert own is not None
    waiting = own.good.review + own.defective.review
    assert shown(browser)["outcomes"] == [own.false_rejects, own.escapes, waiting]
    assert all(
        line[1:] in browser.text("origin") for line in category.evaluation.thresholds.lines()
    )
    recall = 100 * own.defective.reject / own.defective.total
    assert f"recall {float(f'{recall:.3g}'):g} %" in browser.texts(".curve li.reject")[0]
    review = slide(browser, "review", 7.5)
    reject = slide(browser, "reject", 11.25)
    assert (review, reject) == (7.5, 11.25)
    assert shown(browser) == expected(category, review, reject)
    # One gives way to the other, and a score exactly at a threshold isn't above it.
    low = slide(browser, "reject", 6.0)
    assert shown(browser) == expected(category, low, low)
    score = category.evaluation.scored[0].score
    assert score is not None
    browser.set("reject-number", repr(score))
    assert shown(browser) == expected(category, low, score)
    browser.click("#reset")
    assert shown(browser) == expected(category, 8.5, 11.0)
    browser.click("#tab-curves")
    drawn = browser.evaluate(
        "[...document.querySelectorAll('polyline')].map((n) =>[...n.points].map((p) => [p.x, p.y]))"
    )
    roc, pr = ([((x - 54) / 300, 1 - (y - 8) / 300) for x, y in line] for line in drawn)
    labels = [row.sample.is_defect for row in category.evaluation.scored]
    scores = [row.score for row in category.evaluation.scored]
    x, y, _ = roc_curve(labels, scores, drop_intermediate=False)
    np.testing.assert_allclose(roc, np.column_stack([x, y]), atol=1e-3)
    precision, recall, _ = precision_recall_curve(labels, scores)
    np.testing.assert_allclose(pr, np.column_stack([recall, precision])[::-1], atol=1e-3)
    lines = "[...document.querySelectorAll('#by-type tbody tr')]"
    cells = browser.evaluate(f"{lines}.map((row) => [...row.cells].map((c) => c.textContent))")
    assert cells == [
        [name, "15", *(f"{value:.4f}" for value in figures.values.values())]
        for name, figures in category.evaluation.by_type.items()
    ]


def test_tiles_are_drawn_filtered_ordered_and_found(browser: Browser, tmp_path: Path) -> None:
    named = ["test/good/Station 4 left part 17.png", "test/scratch/station 4 part 18.png"]
    category = case(60, thresholds=limits(), names=named)
    opened(browser, tmp_path, category)
    rows = category.evaluation.scored
    scores = {row.sample.name: row.score or 0 for row in rows}
    assert [scores[name] for name in names(browser)] == sorted(scores.values(), reverse=True)
    assert {"Station…ft part 17.png", "0003.png"} <= set(browser.texts(".tile .file"))
    heat = "getComputedStyle(document.querySelector('.heat')).opacity"
    assert browser.evaluate(heat) == "0.65"
    browser.set("opacity", 0)
    assert browser.evaluate(heat) == "0"
    outline = "getComputedStyle(document.querySelector('.stack svg')).display"
    assert browser.evaluate(outline) == "none"  # until they are wanted
    browser.click("#outline")
    assert browser.evaluate(outline) == "block"

    def those(defect: bool, *, above: bool, kind: str = "") -> list[str]:
        return sorted(
            row.sample.name
            for row in rows
            if row.sample.is_defect == defect and (scores[row.sample.name] > LIMIT) == above
            if not kind or row.sample.defect_type == kind
        )

    browser.click("[data-outcome='false-reject'].chip")
    assert sorted(names(browser)) == those(False, above=True)
    browser.click("[data-outcome='escape'].chip")
    assert sorted(names(browser)) == those(True, above=False)
    browser.set("type-filter", "stain", "change")
    assert sorted(names(browser)) == those(True, above=False, kind="stain")
    slide(browser, "reject", 30)  # the filter follows the threshold
    slide(browser, "review", 30)
    assert len(names(browser)) == sum(row.sample.defect_type == "stain" for row in rows)
    browser.set("type-filter", "", "change")
    browser.click("[data-outcome='all'].chip")
    browser.set("order", "1", "change")
    assert [scores[name] for name in names(browser)] == sorted(scores.values())
    for words, found in (
        ("17 STATION", named[:1]),
        ("station", named),
        ("scratch", [name for name in scores if "scratch" in name]),
        ("", list(scores)),
        ("nothing like it", []),
    ):
        browser.set("search", words)
        assert sorted(names(browser)) == sorted(found)
    assert browser.text("shown").startswith("No image")


def test_the_head_says_what_was_measured_and_what_to_mend(browser: Browser, tmp_path: Path) -> None:
    named = [f"{i} defects <b>pass</b>." for i in range(4)]
    category = case(12, thresholds=limits())
    intervals = {"image_auroc": (0.4, 1.0), "image_ap": (0.0, 1.0)}
    category = replace(
        category,
        evaluation=replace(category.evaluation, intervals=intervals),
        date="2026-11-22 01:00 UTC",
        data_folder="/d/disc",
        training={"time": "2026-11-21T07:08:09+00:00"},
        weaknesses=tuple(Weakness(what, "Mend it:", "anomaly tune") for what in named),
    )
    opened(browser, tmp_path, category)
    assert browser.text("provenance") == (
        "evaluated 2026-11-22 01:00 UTC · data in /d/disc · model in runs/my disc · "
        "trained 2026-11-21 07:08 UTC"
    )
    mend = browser.texts("#weaknesses li")
    assert [text.split(" Mend it:")[0] for text in mend] == named
    assert all("anomaly tune" in text for text in mend)
    box = "document.querySelector({!r}).getBoundingClientRect()"
    assert browser.evaluate(f"{box.format('#weaknesses')}.bottom <= {box.format('main')}.top")
    small = browser.texts("#figures small")
    assert small[-2:] == ["95 %: 0.400 – 1.000", "too few images"]
    titles = browser.evaluate("[...document.querySelectorAll('#figures dd')].map((n) => n.title)")
    about = browser.texts("#figures .about")  # where the keyboard gets to it
    assert all(text.endswith(title) for text, title in zip(about, titles, strict=True))
    opened(browser, tmp_path, case(thresholds=None))
    assert browser.evaluate(f"{box.format('#weaknesses')}.height") == 0
    assert shown(browser)["tiles"] == {"good": 30}  # no thresholds, no rejects
    assert "no threshold" in browser.text("origin")


def test_one_defect_shows_beside_hundreds_of_good_parts(browser: Browser, tmp_path: Path) -> None:
    category = case(301, thresholds=limits())
    rows = [
        replace(row, sample=replace(row.sample, defect_type="good"), score=8.0 + i % 7 / 1e3)
        for i, row in enumerate(category.evaluation.scored)
    ]
    rows[-1] = replace(category.evaluation.scored[2], score=14.0)
    opened(browser, tmp_path, rescored(category, rows))
    assert browser.texts(".bar.sound")[0].startswith("300 good from ")
    assert browser.texts(".bar.defect")[0].startswith("1 defective from ")
    heights = "[...document.querySelectorAll('.bar')].map((n) => n.height.baseVal.value)"
    good, defect = browser.evaluate(heights)
    assert good > defect > 5  # pixels
    assert "logarithmic" in browser.text("bars")


def test_everything_is_reached_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    category = case(thresholds=limits())
    opened(browser, tmp_path, category)
    browser.evaluate("document.getElementById('review').focus()")
    for _ in range(5):
        browser.press("ArrowLeft")
    value = float(browser.evaluate("document.getElementById('review').value"))
    assert value < LIMIT
    assert shown(browser) == expected(category, value, LIMIT)
    said = "document.getElementById('review').getAttribute('aria-valuetext')"
    assert browser.evaluate(said).endswith("distance")
    inputs = "[...document.querySelectorAll('input, select, textarea')]"
    assert browser.evaluate(f"{inputs}.every((n) => n.labels.length)")
    here, reached = "document.activeElement", set()
    for _ in range(40):
        browser.press("Tab")
        reached.add(browser.evaluate(f"{here}.id || {here}.className.split(' ')[0]"))
        outline = f"getComputedStyle({here}).outlineStyle !== 'none' || {here} === document.body"
        assert browser.evaluate(outline)
    wanted = {"review", "reject", "review-number", "reject-number", "command", "copy", "tab-images"}
    assert wanted | {"chip", "type-filter", "order", "opacity", "outline", "tile"} <= reached
    browser.evaluate("document.getElementById('tab-images').focus()")
    panels = (
        "['images', 'curves', 'model'].filter((n) => !document.getElementById(`panel-${n}`).hidden)"
    )
    for panel in ("curves", "model", "images"):
        browser.press("ArrowRight")
        assert browser.evaluate(panels) == [panel]
    assert "resnet18" in browser.text("facts")
    # From image to image.
    tiles, title = names(browser), f"{here}.title"
    browser.evaluate("document.querySelector('.tile').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        browser.press(key)
    assert browser.evaluate(title) == tiles[1]
    browser.press("Enter")
    assert browser.text("viewer-name") == tiles[1]
    browser.press("ArrowRight")
    assert browser.text("viewer-name") == tiles[2]
    for _ in range(4):
        browser.press("ArrowLeft")
    assert browser.text("viewer-name") == tiles[0]  # there is none before it
    browser.press("Escape")
    browser.until(title, tiles[0])
    browser.press("End")
    assert browser.evaluate(title) == tiles[-1]


def test_the_command_carries_the_thresholds(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, case(60, thresholds=limits(11.123456789, review=8.5)))
    command = "document.getElementById('command').value"
    start = f"anomaly calibrate --model '{Path.cwd()}/runs/my disc' --threshold "
    assert browser.evaluate(command) == start + "11.1235 --review-threshold 8.5"
    offered = "document.getElementById('take').checkVisibility()"
    assert browser.evaluate(offered) is False  # until a threshold is moved
    # Half a typed number leaves the other threshold as it is once the number is whole.
    browser.evaluate("document.getElementById('reject-number').select()")
    typed = []
    for key in "12.5":
        browser.press(key)
        typed.append(browser.evaluate(command).removeprefix(start))
    assert (typed[0], typed[-1]) == ("1", "12.5 --review-threshold 8.5")
    assert browser.evaluate(offered) is True
    browser.press("ArrowDown")
    step = float(browser.evaluate("document.getElementById('reject').step"))
    assert browser.evaluate(command) == f"{start}{12.5 - step:.6g} --review-threshold 8.5"
    # What has been left stays: review comes back only while reject is held.
    slide(browser, "reject", 6.0)
    slide(browser, "reject", 11.0)
    assert browser.evaluate(command) == start + "11 --review-threshold 6"
    browser.click("#copy")
    browser.until("document.getElementById('copied').textContent !== ''", True)
    slide(browser, "review", 7)
    assert browser.text("copied") == ""  # it was another command


def test_hostile_names_are_only_text(browser: Browser, tmp_path: Path) -> None:
    category = case(thresholds=limits(), name=HOSTILE[1], names=HOSTILE)
    rows = list(category.evaluation.scored)
    for i, name in enumerate(HOSTILE):
        sample = rows[i + 10].sample
        rows[i + 10] = Scored(replace(sample, defect_type=name), rows[i + 10].score, name)
    rows.append(Scored(Sample(Path("x"), HOSTILE[0], HOSTILE[0]), None, HOSTILE[1]))
    settings = {HOSTILE[0]: HOSTILE[1]}
    about = replace(category.about, folder=HOSTILE[1], settings=settings)
    category = replace(rescored(category, rows), about=about)
    opened(browser, tmp_path, category)
    browser.evaluate("document.querySelector('.tile').click()")
    for _ in HOSTILE:
        browser.press("ArrowRight")
    browser.press("Escape")
    browser.click("#tab-model")
    assert browser.evaluate("window.hacked === undefined")
    assert browser.evaluate("document.querySelectorAll('script').length") == 2
    titles = browser.evaluate("[...document.querySelectorAll('.tile')].map((t) => t.title)")
    shown_as = {*HOSTILE[:3], "line\\u000abreak\\u2028.png", "\\u202egnp.elbisrever\\u202c.png"}
    assert shown_as <= set(titles)


def test_the_policy_forbids_what_is_not_in_the_page(browser: Browser, tmp_path: Path) -> None:
    file = opened(browser, tmp_path, case(4, thresholds=limits()))
    blocked = browser.evaluate(
        """new Promise((done) => {
          const found = [];
          document.addEventListener('securitypolicyviolation', (e) => {
            if (found.push(e.violatedDirective) === 3) done(found.sort()); });
          const image = document.createElement('img'); image.src = 'http://127.0.0.1:9/x.png';
          const script = document.createElement('script'); script.textContent = 'hacked = 1';
          document.body.append(image, script);
          fetch('http://127.0.0.1:9/').catch(() => {});
        })"""
    )
    assert blocked == ["connect-src", "img-src", "script-src-elem"]
    browser.events.clear()  # the browser says on the console that it obeyed
    rest = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert "http" not in rest.replace("http-equiv", "")


def test_it_can_be_read_on_any_screen_and_on_paper(browser: Browser, tmp_path: Path) -> None:
    category = case(60, thresholds=limits(9.0))
    for scheme in ("light", "dark"):
        browser.prefer(prefers_color_scheme=scheme)
        opened(browser, tmp_path, category)
        assert browser.faint(".rail *, .masthead *, .toolbar *, .tile *") == []
    browser.fits(360, 768, 1024, 1366, 1920)
    browser.call("Emulation.setEmulatedMedia", media="print")
    panels = (
        "['panel-images', 'panel-curves', 'panel-model'].map((id) => document.getElementById(id))"
    )
    assert browser.evaluate(f"{panels}.every((n) => getComputedStyle(n).display !== 'none')")
    printed = "[...document.querySelectorAll('.tiles li')].filter((n) => n.offsetParent).length"
    assert browser.evaluate(printed) == 48
    assert browser.text("not-printed").startswith("The first 48 of 60")
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.print_to(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 20_000
