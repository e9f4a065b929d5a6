"""The report in a real browser: what moves, what it counts, what keys reach, what can't hurt."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from browser import Browser, running_browser
from families import quick_and_slow
from pixel_map import pixel_map
from report_cases import HOSTILE, LIMIT, case, limits, picture, with_odd

from anomaly.datasets import Sample
from anomaly.evaluation.evaluate import Scored
from anomaly.evaluation.metrics.images import confusion
from anomaly.evaluation.weaknesses import Weakness
from anomaly.imaging.read import Image
from anomaly.report.category import Category, Tile, Tiles
from anomaly.report.document import FIGURES, report_html
from anomaly.report.index import index_html


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    """The window; whatever a test does in it must be silent and stay inside the page."""
    window.events.clear()
    window.prefer()
    yield window
    assert window.complaints() == []
    assert all(url.startswith("file://") and url.endswith(".html") for url in window.requests())


def opened(browser: Browser, folder: Path, category: Category) -> Path:
    file = folder / "report.html"
    file.write_text(report_html(category), "utf-8")
    browser.open(file)
    return file


def verdict(score: float, review: float, reject: float) -> str:
    """What the page must say, written down once more."""
    return "reject" if score > reject else "review" if score > review else "good"


def expected(category: Category, review: float, reject: float) -> dict[str, Any]:
    rows = category.evaluation.scored
    verdicts = [verdict(row.image_score or 0.0, review, reject) for row in rows]
    verdicts = [
        "review" if row.outlier and said == "good" else said
        for row, said in zip(rows, verdicts, strict=True)
    ]
    counts = confusion(
        verdicts, [r.sample.is_defect for r in rows], [r.sample.defect_type for r in rows]
    )
    return {
        "outcomes": [
            counts.false_rejects,
            counts.escapes,
            counts.good.review + counts.defective.review,
        ],
        "types": {name: [n.good, n.review, n.reject] for name, n in counts.by_type.items()},
        "tiles": Counter(verdicts),
    }


def shown(browser: Browser) -> dict[str, Any]:
    found = browser.evaluate(
        """({
          outcomes: [...document.querySelectorAll('.outcome b')].map((n) => Number(n.textContent)),
          types: Object.fromEntries([...document.querySelectorAll('#types tbody tr')].map((row) =>
            [row.dataset.type, [...row.cells].slice(2).map((c) => Number(c.textContent))])),
          tiles: [...document.querySelectorAll('.tile .verdict')].map(
            (n) => n.textContent.slice(2)),
        })"""
    )
    return dict(found) | {"tiles": Counter(found["tiles"])}


def set_slider(browser: Browser, side: str, value: float) -> float:
    """Move a slider as a hand would, and let go; returns where it came to stand."""
    script = (
        f"(() => {{ const s = document.getElementById('{side}'); s.value = {value};"
        "s.dispatchEvent(new Event('input')); s.dispatchEvent(new Event('blur'));"
        "return Number(s.value); })()"
    )
    return float(browser.evaluate(script))


def shown_names(browser: Browser) -> list[str]:
    return list(
        browser.evaluate(
            "[...document.querySelectorAll('.tiles li:not([hidden]) .tile')].map((t) => t.title)"
        )
    )


def test_counts_are_those_of_python_wherever_the_sliders_stand(
    browser: Browser, tmp_path: Path
) -> None:
    category = case(60, thresholds=limits())
    scores = [row.image_score or 0.0 for row in category.evaluation.scored]
    category = with_odd(category, (0, 3, 7, int(np.argmax(scores))), "too dark")
    opened(browser, tmp_path, category)
    assert shown(browser) == expected(category, LIMIT, LIMIT)
    own = category.verdicts
    assert own is not None
    assert shown(browser)["outcomes"][:2] == [own.false_rejects, own.escapes]
    review = set_slider(browser, "review", 7.5)
    assert shown(browser) == expected(category, review, LIMIT)
    reject = set_slider(browser, "reject", 11.25)
    assert (review, reject) == (7.5, 11.25)
    assert shown(browser) == expected(category, review, reject)
    # One gives way to the other.
    reject = set_slider(browser, "reject", 6.0)
    assert shown(browser) == expected(category, reject, reject)
    # A score exactly at a threshold isn't above it.
    score = category.evaluation.scored[0].image_score
    browser.evaluate(
        f"(() => {{ const n = document.getElementById('reject-number'); n.value = '{score!r}';"
        "n.dispatchEvent(new Event('input')); })()"
    )
    assert score is not None
    assert shown(browser) == expected(category, reject, score)
    browser.click("#reset")
    assert shown(browser) == expected(category, LIMIT, LIMIT)


def test_the_models_own_thresholds_are_shown_and_explained(
    browser: Browser, tmp_path: Path
) -> None:
    category = case(60, thresholds=limits(11.0, review=8.5))
    opened(browser, tmp_path, category)
    assert shown(browser) == expected(category, 8.5, 11.0)
    own = category.verdicts
    assert own is not None
    assert shown(browser)["outcomes"][2] == own.good.review + own.defective.review > 0
    origin = browser.evaluate("document.getElementById('origin').textContent")
    assert all(line[1:] in origin for line in category.thresholds.lines())
    command = browser.evaluate("document.getElementById('command').value")
    assert command.endswith("--threshold 11 --review-threshold 8.5")


def test_sliders_move_by_keyboard_and_say_what_they_are(browser: Browser, tmp_path: Path) -> None:
    category = case(thresholds=limits())
    opened(browser, tmp_path, category)
    browser.evaluate("document.getElementById('review').focus()")
    for _ in range(5):
        browser.press("ArrowLeft")
    value = float(browser.evaluate("document.getElementById('review').value"))
    assert value < LIMIT
    assert shown(browser) == expected(category, value, LIMIT)
    assert browser.evaluate(
        "document.getElementById('review').getAttribute('aria-valuetext')"
    ).endswith("distance")
    labels = browser.evaluate(
        "[...document.querySelectorAll('input, select, textarea')].every((n) => n.labels.length)"
    )
    assert labels


def test_odd_images_say_why_a_person_has_to_look(browser: Browser, tmp_path: Path) -> None:
    category = with_odd(case(12, thresholds=limits()), (5,), "<b>far too dark</b>")
    opened(browser, tmp_path, category)
    flagged = "[...document.querySelectorAll('.flag:not([hidden])')].map((n) => n.textContent)"
    assert browser.evaluate(flagged).count("unlike training") == 1
    browser.evaluate("document.querySelector('.tile.review').click()")
    assert "<b>far too dark</b>" in browser.evaluate(
        "document.getElementById('viewer-odd').textContent"
    )


def test_a_model_without_thresholds_rejects_nothing_at_first(
    browser: Browser, tmp_path: Path
) -> None:
    category = case(thresholds=None)
    opened(browser, tmp_path, category)
    assert shown(browser)["tiles"] == {"good": 30}
    assert "no threshold" in browser.evaluate("document.getElementById('origin').textContent")


def test_filters_and_order(browser: Browser, tmp_path: Path) -> None:
    category = case(60, thresholds=limits())
    opened(browser, tmp_path, category)
    rows = sorted(category.evaluation.scored, key=lambda r: -(r.image_score or 0))
    scores = {r.sample.name: r.image_score or 0 for r in rows}
    names = shown_names(browser)
    assert [scores[n] for n in names] == [r.image_score for r in rows]
    browser.click("[data-outcome='false-reject'].chip")
    assert sorted(shown_names(browser)) == sorted(
        r.sample.name for r in rows if not r.sample.is_defect and scores[r.sample.name] > LIMIT
    )
    browser.click("[data-outcome='escape'].chip")
    escapes = [r for r in rows if r.sample.is_defect and scores[r.sample.name] <= LIMIT]
    assert sorted(shown_names(browser)) == sorted(r.sample.name for r in escapes)
    browser.evaluate(
        "(() => { const s = document.getElementById('type-filter'); s.value = 'stain';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    stains = [r.sample.name for r in escapes if r.sample.defect_type == "stain"]
    assert sorted(shown_names(browser)) == sorted(stains)
    # The filter follows the threshold.
    set_slider(browser, "reject", 30)
    all_stains = [r.sample.name for r in rows if r.sample.defect_type == "stain"]
    set_slider(browser, "review", 30)
    assert sorted(shown_names(browser)) == sorted(all_stains)
    browser.click("[data-outcome='all'].chip")
    browser.evaluate(
        "(() => { const s = document.getElementById('order'); s.value = '1';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    shown_scores = [scores[name] for name in shown_names(browser)]
    assert shown_scores == sorted(shown_scores)


def test_images_are_found_by_their_names(browser: Browser, tmp_path: Path) -> None:
    names = ["test/good/Station 4 left part 17.png", "test/scratch/station 4 part 18.png"]
    category = case(30, thresholds=limits(), names=names)
    opened(browser, tmp_path, category)
    file = "[...document.querySelectorAll('.tile .file')].map((n) => n.textContent)"
    assert {"Station…ft part 17.png", "0003.png"} <= set(browser.evaluate(file))

    def search(text: str) -> list[str]:
        browser.evaluate(
            f"(() => {{ const s = document.getElementById('search'); s.value = {json.dumps(text)};"
            "s.dispatchEvent(new Event('input')); })()"
        )
        return shown_names(browser)

    assert search("17 STATION") == names[:1]
    assert sorted(search("station")) == sorted(names)
    assert search("nothing like it") == []
    assert browser.evaluate("document.getElementById('shown').textContent").startswith("No image")
    assert len(search("scratch")) == sum(
        "scratch" in row.sample.name for row in category.evaluation.scored
    )
    assert len(search("")) == 30


def test_the_page_says_when_and_of_which_data(browser: Browser, tmp_path: Path) -> None:
    category = replace(
        case(thresholds=limits()),
        date="2026-11-22 01:00 UTC",
        data_folder="/d/disc",
        training={"time": "2026-11-21T07:08:09+00:00"},
    )
    opened(browser, tmp_path, category)
    said = browser.evaluate("document.getElementById('provenance').textContent")
    assert said == (
        "evaluated 2026-11-22 01:00 UTC · data in /d/disc · model in runs/my disc · "
        "trained 2026-11-21 07:08 UTC"
    )


def test_what_to_mend_is_at_the_top(browser: Browser, tmp_path: Path) -> None:
    named = [f"{i} defects <b>pass</b>." for i in range(4)]
    weak = tuple(Weakness(what, "Mend it:", "anomaly tune", "more") for what in named)
    opened(browser, tmp_path, replace(case(), weaknesses=weak))
    texts = browser.evaluate(
        "[...document.querySelectorAll('#weaknesses li')].map((item) => item.innerText)"
    )
    assert [text.split(" Mend it:")[0] for text in texts] == named
    assert all("anomaly tune" in text and "Expected: more." in text for text in texts)
    box = "document.querySelector({!r}).getBoundingClientRect()"
    assert browser.evaluate(f"{box.format('#weaknesses')}.bottom <= {box.format('main')}.top")
    opened(browser, tmp_path, case())
    assert browser.evaluate(f"{box.format('#weaknesses')}.height") == 0


def test_every_figure_explains_itself_by_mouse_and_keyboard(
    browser: Browser, tmp_path: Path
) -> None:
    file = opened(browser, tmp_path, case(40, thresholds=limits()))
    index = tmp_path / "index.html"
    index.write_text(index_html([case(40, thresholds=limits())], [], {}), "utf-8")
    for page, figures in (
        (file, "#figures dt"),
        (index, "thead th:nth-child(n+7):nth-child(-n+9)"),
    ):
        browser.open(page)
        terms = browser.evaluate(
            f"[...document.querySelectorAll({figures!r})]"
            ".map((n) => n.querySelector('.term').title)"
        )
        assert len(terms) >= 3
        assert all(len(about) > 60 for about in terms)
        browser.evaluate("document.querySelector('.term[popovertarget*=auroc]').focus()")
        browser.press("Enter")
        shown = "document.querySelector('.about:popover-open')"
        assert browser.evaluate(f"{shown}.textContent.includes('ROC curve')")
        box = browser.evaluate(f"{shown}.getBoundingClientRect().toJSON()")
        assert box["left"] >= 0
        assert box["right"] <= 1366
        browser.press("Escape")
        assert browser.evaluate(f"{shown} === null")


def test_full_size_shows_every_pixel_of_a_tall_image(browser: Browser, tmp_path: Path) -> None:
    tall = _tall_tile()
    opened(browser, tmp_path, case(4, thresholds=limits(), tiles=[tall]))
    browser.evaluate("document.querySelector('.tile').focus()")
    browser.press("Enter")
    boxes = (
        "[...document.querySelectorAll('#viewer .stack')].map((n) => n.getBoundingClientRect())"
        ".map((r) => [Math.round(r.width), Math.round(r.height)])"
    )
    assert max(browser.evaluate(boxes)[0]) < 768
    assert browser.evaluate("document.activeElement.id") == "full"
    browser.press("z")
    assert browser.evaluate(boxes) == [[500, 1254], [500, 1254]]
    kept = "[...document.querySelectorAll('#viewer .photo')].map((n) => n.naturalHeight)"
    browser.until(kept, [1254, 1254])
    # One frame scrolls, also by key, and the other one follows.
    frames = "[...document.querySelectorAll('#viewer .frame')]"
    browser.evaluate(f"{frames}[0].scrollTo(0, 300)")
    browser.until(f"{frames}.map((n) => n.scrollTop)", [300, 300])
    name = browser.evaluate("document.getElementById('viewer-name').textContent")
    browser.evaluate(f"{frames}[0].focus()")
    browser.press("ArrowRight")
    assert browser.evaluate("document.getElementById('viewer-name').textContent") == name
    browser.evaluate("document.getElementById('next').focus()")
    browser.press("ArrowRight")
    assert browser.evaluate("document.getElementById('viewer-name').textContent") != name
    assert browser.evaluate(boxes) == [[500, 1254], [500, 1254]]
    browser.press("z")
    assert max(browser.evaluate(boxes)[0]) < 768
    browser.press("Escape")
    assert not browser.evaluate("document.getElementById('viewer').open")


def _tall_tile() -> Tile:
    pixels = np.random.default_rng(0).integers(90, 160, (1254, 500, 3), dtype=np.uint8)
    image = Image(pixels, 255.0, "rgb8", "png", "")
    flat = pixel_map(np.full((1254, 500), 2.0))
    with Tiles(190, LIMIT, 1) as tiles:
        prediction = SimpleNamespace(index=0, image=image, source_map=flat)
        tiles.add(prediction, flat(), None)  # type: ignore[arg-type]
        return tiles.finished()[0]


def test_one_defect_shows_beside_a_thousand_good_parts(browser: Browser, tmp_path: Path) -> None:
    category = case(1001, thresholds=limits(), tiles=[picture(0, 8.0, defect=False)])
    rows = [
        replace(row, sample=replace(row.sample, defect_type="good"), image_score=8.0 + i % 7 / 1e3)
        for i, row in enumerate(category.evaluation.scored)
    ]
    rows[-1] = replace(category.evaluation.scored[2], image_score=14.0)
    category = replace(category, evaluation=replace(category.evaluation, scored=tuple(rows)))
    opened(browser, tmp_path, category)
    bars = browser.evaluate(
        "Object.fromEntries(['sound', 'defect'].map((kind) => [kind, "
        "[...document.querySelectorAll(`.bar.${kind}`)].map((n) => "
        "[n.height.baseVal.value, n.textContent])]))"
    )
    (good,), (defect,) = bars["sound"], bars["defect"]
    assert good[1].startswith("1000 good from ")
    assert defect[1].startswith("1 defective from ")
    assert good[0] > defect[0] > 5  # pixels
    assert "logarithmic" in browser.evaluate("document.getElementById('bars').textContent")


def test_everything_is_reached_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, case(thresholds=limits()))
    set_slider(browser, "review", 8)
    reached = set()
    for _ in range(40):
        browser.press("Tab")
        reached.add(
            browser.evaluate(
                "document.activeElement.id || document.activeElement.className.split(' ')[0]"
            )
        )
        outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or browser.evaluate("document.activeElement === document.body")
    wanted = {"review", "reject", "review-number", "reject-number", "command", "copy", "tab-images"}
    assert wanted | {"chip", "type-filter", "order", "opacity", "outline", "tile"} <= reached


def test_next_and_previous_image_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, case(thresholds=limits()))
    names = shown_names(browser)
    browser.evaluate("document.querySelector('.tile').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    browser.press("ArrowLeft")
    assert browser.evaluate("document.activeElement.title") == names[1]
    browser.press("Enter")
    assert browser.evaluate("document.getElementById('viewer').open")
    name = "document.getElementById('viewer-name').textContent"
    assert browser.evaluate(name) == names[1]
    browser.press("ArrowRight")
    assert browser.evaluate(name) == names[2]
    for _ in range(40):
        browser.press("ArrowLeft")
    assert browser.evaluate(name) == names[0]
    browser.press("Escape")
    assert not browser.evaluate("document.getElementById('viewer').open")
    browser.until("document.activeElement.title", names[0])
    browser.press("End")
    assert browser.evaluate("document.activeElement.title") == names[-1]


def test_tabs_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, case(thresholds=limits()))
    browser.evaluate("document.getElementById('tab-images').focus()")
    hidden = (
        "['images', 'curves', 'model'].map((n) => document.getElementById('panel-' + n).hidden)"
    )
    browser.press("ArrowRight")
    assert browser.evaluate(hidden) == [True, False, True]
    browser.press("ArrowRight")
    assert browser.evaluate(hidden) == [True, True, False]
    assert "resnet18" in browser.evaluate("document.getElementById('facts').textContent")


def test_the_command_carries_the_thresholds(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, case(thresholds=limits(10.123456789)))
    command = "document.getElementById('command').value"
    start = f"anomaly calibrate --model '{Path.cwd()}/runs/my disc' --threshold "
    assert browser.evaluate(command) == start + "10.1235"
    offered = "document.getElementById('take').checkVisibility()"
    assert browser.evaluate(offered) is False  # until a threshold is moved
    review = set_slider(browser, "review", 7)
    assert browser.evaluate(command) == start + f"10.1235 --review-threshold {review:g}"
    assert browser.evaluate(offered) is True
    browser.click("#copy")
    assert browser.evaluate(
        "new Promise((d) => setTimeout(d, 100)).then(() => "
        "document.getElementById('copied').textContent)"
    )


def test_half_a_typed_number_leaves_the_other_threshold(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, case(60, thresholds=limits(11.0, review=8.5)))
    command = "document.getElementById('command').value.split('--threshold ')[1]"
    browser.evaluate("document.getElementById('reject-number').select()")
    typed = []
    for key in "12.5":
        browser.press(key)
        typed.append(browser.evaluate(command))
    assert typed[0] == "1"  # review gives way for as long as reject is 1
    assert typed[-1] == "12.5 --review-threshold 8.5"
    browser.press("ArrowUp")
    browser.press("ArrowDown")
    browser.press("ArrowDown")
    step = float(browser.evaluate("document.getElementById('reject').step"))
    assert browser.evaluate(command) == f"{12.5 - step:.6g} --review-threshold 8.5"
    # What has been left stays: review comes back only while reject is held.
    set_slider(browser, "reject", 6.0)
    set_slider(browser, "reject", 11.0)
    assert browser.evaluate(command) == "11 --review-threshold 6"


def test_copied_is_said_of_the_command_that_was(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, case(thresholds=limits(10.0)))
    set_slider(browser, "review", 8)
    browser.click("#copy")
    browser.until("document.getElementById('copied').textContent !== ''", True)
    set_slider(browser, "review", 7)
    assert browser.evaluate("document.getElementById('copied').textContent") == ""


def test_opacity_and_outlines(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, case(thresholds=limits()))
    heat = "getComputedStyle(document.querySelector('.heat')).opacity"
    assert browser.evaluate(heat) == "0.65"
    browser.evaluate(
        "(() => { const s = document.getElementById('opacity'); s.value = 0;"
        "s.dispatchEvent(new Event('input')); })()"
    )
    assert browser.evaluate(heat) == "0"
    outline = "getComputedStyle(document.querySelector('.stack svg')).display"
    assert browser.evaluate(outline) == "none"  # until they are wanted
    browser.click("#outline")
    assert browser.evaluate(outline) == "block"


def test_curve_points_follow_the_threshold(browser: Browser, tmp_path: Path) -> None:
    category = case(60, thresholds=limits())
    opened(browser, tmp_path, category)
    counts = category.verdicts
    assert counts is not None
    recall = counts.defective.reject / counts.defective.total
    text = browser.evaluate("document.querySelector('.curve li.reject').textContent")
    assert f"recall {float(f'{100 * recall:.3g}'):g} %" in text


def test_intervals_say_what_they_are(browser: Browser, tmp_path: Path) -> None:
    category = case(12, thresholds=limits())
    opened(browser, tmp_path, category)
    found = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#figures > div')].map((n) => "
        "[n.querySelector('b').textContent, [n.querySelector('small')?.textContent ?? '', "
        "n.querySelector('dd').title, n.querySelector('.about').textContent]]))"
    )
    for label, key in FIGURES:
        interval = category.evaluation.intervals.get(key)
        if interval is None or label not in found:
            continue
        small, title, about = found[label]
        low, high = interval
        vague = high - low > 0.995
        assert small == ("too few images" if vague else f"95 %: {low:.3f} – {high:.3f}")
        assert ("anything from 0 to 1" if vague else "at least 95 % confidence") in title
        assert about.endswith(title)  # where the keyboard gets to it
    assert found["Image AUROC"][0]


def test_each_type_of_defect_has_its_figures(browser: Browser, tmp_path: Path) -> None:
    category = case(60, thresholds=limits())
    opened(browser, tmp_path, category)
    browser.click("#tab-curves")
    shown = browser.evaluate(
        "[...document.querySelectorAll('#by-type tbody tr')].map("
        "(row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert shown == [
        [name, "15", *(f"{figures.values[key]:.4f}" for key in figures.values)]
        for name, figures in category.evaluation.by_type.items()
    ]


def test_the_index_fits_a_laptop(browser: Browser, tmp_path: Path) -> None:
    names = ["sample_brushed_plate", "sample_woven_fabric", "bottle"]
    file = tmp_path / "index.html"
    categories = [case(40, name=name, thresholds=limits()) for name in names]
    file.write_text(index_html(categories, [], {}), "utf-8")
    browser.open(file, width=1280)
    assert browser.evaluate(
        "[...document.querySelectorAll('.wide')].every((n) => n.scrollWidth <= n.clientWidth)"
    )


def test_hostile_names_are_only_text(browser: Browser, tmp_path: Path) -> None:
    category = case(thresholds=limits(), name=HOSTILE[1], names=HOSTILE)
    rows = list(category.evaluation.scored)
    for i, name in enumerate(HOSTILE):
        sample = rows[i + 10].sample
        rows[i + 10] = Scored(replace(sample, defect_type=name), rows[i + 10].image_score)
    rows.append(Scored(Sample(Path("x"), HOSTILE[0], HOSTILE[0]), None, HOSTILE[1]))
    category = replace(
        category,
        evaluation=replace(category.evaluation, scored=tuple(rows)),
        model=HOSTILE[1],
        settings={"model": {HOSTILE[0]: HOSTILE[1]}},
    )
    opened(browser, tmp_path, category)
    for _ in range(len(HOSTILE)):
        browser.evaluate("document.querySelector('.tile').click()")
        browser.press("ArrowRight")
    browser.press("Escape")
    browser.click("#tab-model")
    assert browser.evaluate("window.hacked === undefined")
    assert browser.evaluate("document.querySelectorAll('script').length") == 2
    names = browser.evaluate("[...document.querySelectorAll('.tile')].map((t) => t.title)")
    for name in HOSTILE[:3]:
        assert name in names
    assert "line\\u000abreak\\u2028.png" in names
    assert "\\u202egnp.elbisrever\\u202c.png" in names
    file = tmp_path / "page.html"
    page = index_html([category], [], {category.name: HOSTILE[1]})
    file.write_text(page, "utf-8", errors="replace")
    browser.open(file)
    assert browser.evaluate("window.hacked === undefined")
    assert browser.evaluate("document.querySelectorAll('script, img').length") == 0


def test_the_policy_forbids_what_is_not_in_the_page(browser: Browser, tmp_path: Path) -> None:
    file = opened(browser, tmp_path, case(thresholds=limits()))
    browser.events.clear()
    blocked = browser.evaluate(
        """new Promise((done) => {
          document.addEventListener('securitypolicyviolation', (e) => done(e.violatedDirective));
          const image = document.createElement('img'); image.src = 'http://127.0.0.1:9/x.png';
          document.body.append(image);
        })"""
    )
    assert blocked == "img-src"
    browser.events.clear()  # the browser says on the console that it obeyed
    assert "http" not in file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "").replace(
        "http-equiv", ""
    )


@pytest.mark.parametrize("scheme", quick_and_slow(["light", "dark"], "light"))
def test_text_can_be_read(browser: Browser, tmp_path: Path, scheme: str) -> None:
    """Every text's contrast with its ground is at least 4.5 to 1 (WCAG 2.2, AA)."""
    browser.prefer(prefers_color_scheme=scheme)
    opened(browser, tmp_path, case(thresholds=limits(9.0)))
    weak = browser.evaluate(
        """(() => {
          const channels = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
          const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => { v /= 255;
            return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const ground = (n) => { for (; n; n = n.parentElement) {
            const c = channels(getComputedStyle(n).backgroundColor);
            if (c.length && (c.length < 4 || c[3] === 1)) return c; } return [255, 255, 255]; };
          const weak = [];
          for (const n of document.querySelectorAll('.rail *, .masthead *, .toolbar *, .tile *')) {
            const own = [...n.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim());
            const left_out = n.closest('svg, .unseen, :disabled, .zero, option');
            if (!own || left_out || !n.offsetParent) continue;
            const [a, b] = [light(channels(getComputedStyle(n).color)), light(ground(n))];
            const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (ratio < 4.5) weak.push([n.className, n.textContent, ratio]);
          }
          return weak;
        })()"""
    )
    assert weak == []


def test_narrow_windows_do_not_scroll_sideways(browser: Browser, tmp_path: Path) -> None:
    file = opened(browser, tmp_path, case(thresholds=limits()))
    for width in (360, 768, 1024, 1366, 1920):
        browser.open(file, width=width)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_print_shows_every_part(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, case(60, thresholds=limits()))
    browser.call("Emulation.setEmulatedMedia", media="print")
    displayed = browser.evaluate(
        "['panel-images', 'panel-curves', 'panel-model'].every((id) => "
        "getComputedStyle(document.getElementById(id)).display !== 'none')"
    )
    assert displayed
    assert browser.evaluate(
        "[...document.querySelectorAll('.tiles li')].filter((n) => n.offsetParent).length"
    ) == 48  # fmt: skip
    assert browser.evaluate("document.getElementById('not-printed').textContent").startswith(
        "The first 48 of 60"
    )
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.print_to(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 20_000


@pytest.mark.clock  # what it allows is wall time, and a busy machine takes longer
def test_1500_images_open_fast_and_follow_the_slider(browser: Browser, tmp_path: Path) -> None:
    tiles = [picture(i, 8.0 + i % 9, i % 2 == 1, size=264) for i in range(12)]
    category = case(1500, thresholds=limits(), tiles=tiles)
    file = tmp_path / "report.html"
    file.write_text(report_html(category), "utf-8")
    assert file.stat().st_size < 40e6
    seconds = browser.open(file)
    moved = browser.evaluate(
        """(async () => {
          const slider = document.getElementById('reject'), times = [];
          for (let i = 0; i < 20; i++) {
            const start = performance.now();
            slider.value = 6 + i * 0.4;
            slider.dispatchEvent(new Event('input'));
            document.body.offsetHeight;
            times.push(performance.now() - start);
            await new Promise(requestAnimationFrame);
          }
          return times.sort((a, b) => a - b);
        })()"""
    )
    (tmp_path / "timings.json").write_text(json.dumps({"open": seconds, "moves": moved}))
    # Half as fast again as promised, for machines that do other things at the same time.
    assert seconds < 3
    assert moved[len(moved) // 2] < 150
