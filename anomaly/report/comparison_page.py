"""A comparison of two evaluations as a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from anomaly.report.comparison import Change, Comparison, summary
from anomaly.report.page import page
from anomaly.report.tables import COLUMNS

_SHOWN = 100


def comparison_html(comparison: Comparison) -> str:
    """The page: figures, images with another verdict, and the others that moved furthest."""
    changed = [c for c in comparison.changes if c.changed]
    rest = [c for c in comparison.changes if not c.changed]
    a, b = (escape(name) for name in comparison.names)
    body = f"""
<header class="top"><h1>Comparison</h1><p class="soft"><b>A</b> <bdi>{a}</bdi> · <b>B</b>
<bdi>{b}</bdi> · {escape(summary(comparison))}</p></header><main class="sheet">
<h2>Figures</h2>{_figures_table(comparison)}
<h2>Another verdict: {len(changed)} of {len(comparison.changes)} images</h2>
{_images_table(changed)}
<h2>Same verdict, moved furthest</h2>{_images_table(rest[:_SHOWN])}
<p class="soft small">“Of threshold” is a score over its own model's threshold: scores of two
models can't be compared otherwise. comparison.csv has every image.</p></main>"""
    return page("Comparison", body, styles=("base.css", "index.css"))


def _figures_table(comparison: Comparison) -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title, _ in COLUMNS)
    rows = ""
    for name, (first, second) in comparison.figures.items():
        cells = "".join(f"<td>{_pair(first.get(key), second.get(key))}</td>" for _, key in COLUMNS)
        rows += f'<tr><th scope="row"><bdi>{escape(name)}</bdi></th>{cells}</tr>'
    return (
        '<div class="card wide"><table class="overview"><thead><tr><th scope="col">Category</th>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _pair(first: float | None, second: float | None) -> str:
    shown = " → ".join("–" if v is None else f"{v:.4f}" for v in (first, second))
    if first is None or second is None:
        return shown
    tone = "better" if second > first else "worse" if second < first else "soft"
    return f'{shown}<small class="{tone}">{second - first:+.4f}</small>'


def _images_table(changes: Sequence[Change]) -> str:
    if not changes:
        return '<p class="soft">None.</p>'
    rows = "".join(map(_image_row, changes))
    titles = ("Image", "Type", "Verdict A → B", "Score A → B", "Of threshold A → B")
    head = "".join(f'<th scope="col" class="left">{title}</th>' for title in titles)
    return (
        f'<div class="card wide"><table class="overview"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _image_row(change: Change) -> str:
    tone = {True: "better", False: "worse", None: ""}[change.better]
    verdicts = " → ".join(v or "–" for v in change.verdicts)
    scores = " → ".join("–" if s is None else f"{s:.4g}" for s in change.scores)
    ratios = " → ".join("–" if r is None else f"{r:.3f}" for r in change.ratios)
    return (
        f'<tr><td class="names left"><bdi>{escape(change.category)}</bdi> '
        f"<bdi>{escape(change.path)}</bdi></td>"
        f'<td class="left"><bdi>{escape(change.defect_type)}</bdi></td>'
        f'<td class="left {tone}">{escape(verdicts)}</td>'
        f'<td class="left">{scores}</td><td class="left">{ratios}</td></tr>'
    )
