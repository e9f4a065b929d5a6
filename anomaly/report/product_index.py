"""What a run of `infer` with several products has found of each, with links to their pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from html import escape
from urllib.parse import quote

from anomaly.files.own_outputs import PAGES
from anomaly.inference.counts import counts_of, say_counts, total_of
from anomaly.inference.rows import Row
from anomaly.report.page import page, utc_now

_VERDICTS = {"good": "Good", "review": "To review", "reject": "Rejected"}


def product_index(products: Iterable[str], inputs: str, rows: Iterable[Row]) -> str:
    """The page over the products' pages.

    Args:
        products: by name, in order; each has a page.
        inputs: what was scored, as the user named it.
        rows: one for each image; those without a product couldn't be scored.
    """
    counts: dict[str, Counter[str]] = {product: Counter() for product in ["", *products]}
    for row in rows:
        counts[row.product] += counts_of([row])
    without = counts.pop("")
    everything = sum(counts.values(), without)
    lines = "".join(_line(product, found) for product, found in counts.items())
    head = "".join(f'<th scope="col">{title}</th>' for title in ("Images", *_VERDICTS.values()))
    refused = ""
    if missed := total_of(without) - without["ok"]:
        refused = f"{missed} couldn't be scored: each page names them. "
    body = f"""
<header class="top"><h1>Products</h1><p class="soft"><bdi>{escape(inputs)}</bdi> ·
{escape(say_counts(everything))} · {utc_now()}</p></header><main class="sheet">
<div class="card wide"><table class="overview"><thead><tr><th scope="col">Product</th>{head}</tr>
</thead><tbody>{lines}</tbody></table></div>
<p class="soft small">{refused}Scores of several products have no common scale, so that each has
a page of its own. results.csv has a row for each image.</p></main>"""
    return page(f"Products – {inputs}", body, styles=("base.css", "index.css"))


def _line(product: str, counts: Counter[str]) -> str:
    link = f'<a href="{PAGES}/{quote(product)}.html"><bdi>{escape(product)}</bdi></a>'
    cells = [counts["ok"], *(counts[verdict] for verdict in _VERDICTS)]
    shown = "".join(f"<td>{count}</td>" for count in cells)
    return f'<tr><th scope="row">{link}</th>{shown}</tr>'
