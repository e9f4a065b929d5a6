"""What differs between two evaluations -> comparison.html, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from anomaly.calibration.rates import binomial, percent, rate_of
from anomaly.files.writing import claim, clear, write
from anomaly.report.category import Tile
from anomaly.report.comparison import (
    KINDS,
    Change,
    Comparison,
    compare,
    comparison_csv,
    summary,
)
from anomaly.report.page import (
    figure_html,
    image_layer,
    picture_svg,
    row_html,
    table_html,
    table_page,
)
from anomaly.report.tables import COLUMNS

_FILES = ("comparison.html", "comparison.csv")
_SHOWN = 30  # images whose verdict is the same
_CHANCE = 0.05  # of a p-value: above, a difference may be chance
# What is counted of the images in both: whether they are good, and their verdict.
_COUNTED: dict[str, tuple[bool, str]] = {
    "False rejects": (True, "reject"),
    "Good to review": (True, "review"),
    "Escapes": (False, "good"),
}


def write_comparison(first: Path, second: Path, output: Path, *, overwrite: bool) -> Comparison:
    """Compare two evaluations and write comparison.csv and comparison.html.

    Args:
        first: an evaluation's folder.
        second: another one's.
        output: where to write.
        overwrite: replace an earlier comparison there.

    Raises:
        DataError: one of them is no evaluation, or they have no image in common.
        OutputError: an earlier comparison is there, or there is no room.
    """
    comparison = compare(first, second)
    claim(output, _FILES, overwrite=overwrite)
    clear(output, _FILES)
    write(output / "comparison.csv", comparison_csv(comparison))
    write(output / "comparison.html", comparison_html(comparison))
    return comparison


def comparison_html(comparison: Comparison) -> str:
    """The page: both models, figures, pictures of what changed, and what moved furthest."""
    changes = comparison.changes
    changed = [c for c in changes if c.changed]
    pictured = [c for c in changed if any(_pictures(comparison, c))]
    listed = [c for c in changed if c not in pictured]
    a, b = (escape(name) for name in comparison.names)
    about = f"<b>A</b> <bdi>{a}</bdi> · <b>B</b> <bdi>{b}</bdi> · {escape(summary(comparison))}"
    rest = f"<h2>Other changed verdicts</h2>{_images_table(listed)}" if listed else ""
    content = f"""
<h2>What changed</h2>{_paired_table(changes)}
<h2>What is compared</h2>{"".join(_origins(comparison))}
{"".join(_cards(comparison, pictured))}{rest}
<h2>Figures</h2>{_figures_table(comparison)}
<h2>Same verdict, moved furthest</h2>{_images_table(changes[len(changed) :][:_SHOWN])}
<p class="soft small">“Of threshold” is a score over its own model's threshold: scores of two
models can't be compared otherwise. Counts are of the images in both, at each model's own
thresholds. Flagged parts are rejected or for review. comparison.csv has every image.</p>"""
    return table_page("Comparison", "Comparison", about, content)


def mcnemar(better: int, worse: int) -> float:
    """The p-value of the exact two-sided McNemar test.

    Args:
        better: paired images on which only the second verdict is right.
        worse: those on which only the first one is.
    """
    fewer = binomial(better + worse, 0.5)[: min(better, worse) + 1]
    return min(1.0, 2 * float(fewer.sum()))


def _paired_table(changes: Sequence[Change]) -> str:
    """How many images are now right or wrong, and whether chance explains it."""
    rows = []
    for name, good, kinds in (
        ("Defects caught", False, (0, 1)),
        ("Good parts flagged", True, (3, 2)),
    ):
        own = [c for c in changes if "" not in c.verdicts and good == (c.defect_type == "good")]
        flagged = [sum(c.verdicts[i] != "good" for c in own) for i in (0, 1)]
        better, worse = (sum(c.kind == kind for c in own) for kind in kinds)
        cells = [len(own), *flagged, better, worse, _chance(better, worse)]
        rows.append(row_html(name, cells))
    titles = ("", "Images in both", "A", "B", "Better in B", "Worse in B", "May that be chance?")
    return f'<div class="chances">{table_html(titles, rows)}</div>'


def _chance(better: int, worse: int) -> str:
    """What a count of changes says of parts to come."""
    if not better + worse:
        return "nothing changed"
    rate, p = rate_of(better, better + worse, better / (better + worse)), mcnemar(better, worse)
    answer = "Yes" if p > _CHANCE else "Hardly"
    exact = "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"
    return (
        f"{answer}: {exact} (exact McNemar test). B is right in {better} of {better + worse} "
        f"images on which A and B differ; among parts to come, in {percent(rate.low)} to "
        f"{percent(rate.high)} of such cases (95 % confidence)"
    )


def _origins(comparison: Comparison) -> Iterator[str]:
    """For each category a table of both models, with the settings that differ."""
    for name, reports in comparison.reports.items():
        folders = [{"evaluation": folder} for folder in comparison.names]
        rows = [{**f, **r.origin} for f, r in zip(folders, reports, strict=True)]
        settings = [r.settings for r in reports]
        first, second = settings
        differ = [key for key in {**first, **second} if first.get(key) != second.get(key)]
        lines = [_origin_row(key.capitalize(), rows, key) for key in {**rows[0], **rows[1]}]
        lines += [_origin_row(key, settings, key) for key in differ if all(settings)]
        table = table_html([f"<bdi>{escape(name)}</bdi>", "A", "B"], lines)
        yield f'<div class="listed">{table}</div>'


def _origin_row(title: str, both: Sequence[Mapping[str, str]], key: str) -> str:
    values = [f"<bdi>{escape(side.get(key, '–'))}</bdi>" for side in both]
    return row_html(escape(title), values)


def _pictures(comparison: Comparison, change: Change) -> list[Tile | None]:
    """What both reports show of an image."""
    reports = comparison.reports.get(change.category, ())
    return [report.pictures.get(change.path) for report in reports]


def _cards(comparison: Comparison, changes: Sequence[Change]) -> Iterator[str]:
    """Pictures of what changed, under a heading for each kind of change."""
    count = [c.kind for c in comparison.changes]
    numbered = enumerate(changes)
    for kind, group in groupby(numbered, lambda at: at[1].kind):
        cards = [_card(c, _pictures(comparison, c), f"photo-{i}") for i, c in group]
        shown = f"{len(cards)} of " if len(cards) < count.count(kind) else ""
        yield f"<h2>{KINDS[kind]}: {shown}{count.count(kind)}</h2>"
        yield f'<div class="cards">{"".join(cards)}</div>'


def _card(change: Change, pictures: Sequence[Tile | None], photo: str) -> str:
    """An image: its photograph, and what each model made of it.

    Args:
        change: the image.
        pictures: of both reports, one of them at least.
        photo: the id of its photograph in the page.
    """
    first = next(filter(None, pictures))
    layers = [image_layer(first.photo, attributes=f'id="{photo}"'), _path(first.truth, "truth")]
    outlined = ", the defect outlined" if first.truth else ""
    figures = [figure_html(picture_svg(change.path, first.size, layers), f"Photograph{outlined}")]
    for side, picture, score, verdict in zip(
        "AB", pictures, change.scores, change.verdicts, strict=True
    ):
        drawn = '<p class="soft small">its report has no picture</p>'
        if picture is not None:
            heat = image_layer(picture.heat, "webp", 'class="heat"')
            layers = [f'<use href="#{photo}"/>', heat, _path(picture.marked, "marked")]
            drawn = picture_svg(f"{side}: {change.path}", picture.size, layers)
        caption = f"<b>{side}</b> {escape(verdict)}, score {_score(score)}"
        figures.append(figure_html(drawn, caption))
    path, kind = escape(change.path), escape(change.defect_type)
    return (
        f'<section class="card changed"><h3><bdi>{path}</bdi> <small><bdi>{kind}</bdi></small></h3>'
        f'<div class="trio">{"".join(figures)}</div></section>'
    )


def _path(outline: str, kind: str) -> str:
    drawn = escape(outline)
    return f'<path class="halo" d="{drawn}"/><path class="{kind}" d="{drawn}"/>' if outline else ""


def _score(score: float | None) -> str:
    return "–" if score is None else f"{score:.4g}"


def _figures_table(comparison: Comparison) -> str:
    titles = ["Category", *(title for title, _ in COLUMNS), *_COUNTED]
    rows = []
    for name, (first, second) in comparison.figures.items():
        own = [change for change in comparison.changes if change.category == name]
        figures = [_pair(first.get(key), second.get(key)) for _, key in COLUMNS]
        counts = [_count_pair(own, *what) for what in _COUNTED.values()]
        rows.append(row_html(f"<bdi>{escape(name)}</bdi>", [*figures, *counts]))
    return table_html(titles, rows)


def _pair(first: float | None, second: float | None) -> str:
    shown = "<br>→ ".join("–" if v is None else f"{v:.4f}" for v in (first, second))
    if first is None or second is None:
        return shown
    return shown + _difference(f"{second - first:+.4f}", second - first)


def _count_pair(changes: Sequence[Change], good: bool, verdict: str) -> str:
    """How many images of one kind have a verdict, in both; fewer are better."""
    if not all(any(c.verdicts[i] for c in changes) for i in (0, 1)):
        return "–"
    of_kind = [c for c in changes if good == (c.defect_type == "good")]
    first, second = (sum(c.verdicts[i] == verdict for c in of_kind) for i in (0, 1))
    return f"{first}<br>→ {second}" + _difference(f"{second - first:+d}", first - second)


def _difference(text: str, gain: float) -> str:
    tone = "better" if gain > 0 else "worse" if gain < 0 else "soft"
    return f'<small class="{tone}">{text}</small>'


def _images_table(changes: Sequence[Change]) -> str:
    if not changes:
        return '<p class="soft">None.</p>'
    titles = ("Image", "Type", "Verdict A → B", "Score A → B", "Of threshold A → B")
    return f'<div class="listed">{table_html(titles, map(_image_row, changes))}</div>'


def _image_row(change: Change) -> str:
    tone = {True: "better", False: "worse", None: "soft"}[change.better]
    name = f"<bdi>{escape(change.category)}</bdi> <bdi>{escape(change.path)}</bdi>"
    verdicts = escape(" → ".join(v or "–" for v in change.verdicts))
    cells = (
        f"<bdi>{escape(change.defect_type)}</bdi>",
        f'<span class="{tone}">{verdicts}</span>',
        " → ".join(map(_score, change.scores)),
        " → ".join("–" if r is None else f"{r:.3f}" for r in change.ratios),
    )
    return row_html(name, cells)
