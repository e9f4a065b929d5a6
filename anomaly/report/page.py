"""One self-contained HTML page: style, scripts, data, and a policy that allows nothing else.

Whatever comes from file names or settings reaches a page in one of two ways: escaped by `html`
here, or as JSON that scripts put in place as text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from anomaly.calibration.rates import percent
from anomaly.calibration.thresholds import Thresholds
from anomaly.desk.advice import flagged_line
from anomaly.errors import counted
from anomaly.imaging.pool import read_one
from anomaly.imaging.read import Decoding, read_image
from anomaly.maps.heatmap import OPACITY, Thumbnail, colour_stops, display, thumbnail
from anomaly.scoring.build import to_dict
from anomaly.scoring.model import Model

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="anomaly">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
{scripts}</body>
</html>
"""


def page(
    title: str,
    body: str,
    *,
    styles: Sequence[str],
    scripts: Sequence[str] = (),
    data: Mapping[str, Any] | None = None,
) -> str:
    """Put a page together.

    Args:
        title: plain text.
        body: HTML whose variable parts have been escaped.
        styles: names of assets.
        scripts: names of assets, in order; they share one module.
        data: what the scripts read from the element `data`; None where there are none.
    """
    style, code, script = "".join(map(asset, styles)), "".join(map(asset, scripts)), ""
    if data is not None:
        script = f'<script type="application/json" id="data">{embedded(data)}</script>\n'
        script += f'<script type="module">{code}</script>\n'
    about = {"policy": _policy(style, code), "title": html.escape(title), "style": style}
    return _PAGE.format(body=body, scripts=script, **about)


def table_page(title: str, heading: str, about: str, content: str) -> str:
    """A page of tables and pictures.

    Args:
        title: plain text.
        heading: plain text.
        about: HTML of a line below the heading.
        content: HTML of everything else.
    """
    body = (
        f'<div class="explained"><header class="top"><h1>{html.escape(heading)}</h1>'
        f'<p class="soft">{about}</p></header><main class="sheet">{content}</main></div>'
    )
    return page(title, body, styles=("base.css", "index.css", "pictures.css"))


def figure_html(picture: str, caption: str) -> str:
    """A picture with a caption, both HTML."""
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def photograph_html(
    label: str, photo: bytes, size: tuple[int, int], caption: str, marks: str = ""
) -> str:
    """A JPEG file with a caption.

    Args:
        label: what it shows, plain text.
        photo: the file.
        size: (width, height), the unit of the marks' coordinates.
        caption: HTML.
        marks: SVG that lies over it.
    """
    href = f"data:image/jpeg;base64,{base64.b64encode(photo).decode()}"
    picture = (
        f'<svg class="picture" viewBox="0 0 {size[0]} {size[1]}" role="img" '
        f'aria-label="{html.escape(label)}"><image href="{href}" width="100%" height="100%" '
        f'preserveAspectRatio="none"/>{marks}</svg>'
    )
    return figure_html(picture, caption)


def command_line(*words: str) -> str:
    """A shell command of these words."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def table_html(titles: Iterable[str], rows: Iterable[str]) -> str:
    """A table with a line of titles, given as HTML, and rows by `row_html`."""
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    return (
        f'<div class="card wide"><table class="overview"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def row_html(name: str, cells: Iterable[object]) -> str:
    """A row of a table: its name and cells as HTML."""
    listed = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{name}</th>{listed}</tr>'


def utc_now() -> str:
    """The time as pages show it."""
    return shown_time(datetime.now(UTC).isoformat())


def shown_time(utc: str) -> str:
    """A time (ISO 8601, UTC) in the form shown on pages."""
    return f"{utc[:16].replace('T', ' ')} UTC"


def asset(name: str) -> str:
    """The text of a file in assets/."""
    text = files("anomaly.report").joinpath("assets", name).read_text("utf-8")
    return text.replace("\r\n", "\n")


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element whatever the strings in it are."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(style: str, code: str) -> str:
    """Nothing from anywhere, but these very styles and scripts and the pictures in the page."""
    script = _fingerprint(code) if code else "'none'"
    return (
        f"default-src 'none'; img-src data:; style-src {_fingerprint(style)}; "
        f"script-src {script}; base-uri 'none'; form-action 'none'"
    )


def _fingerprint(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


_PIXELS = 1_440_000  # of a picture to draw on


def region_page(path: Path, decoding: Decoding) -> str:
    """The page: polygons are drawn over the picture, and shown as YAML.

    Args:
        path: the image.
        decoding: how it is decoded.

    Raises:
        ImageError: the image can't be used.
    """
    small = thumbnail(display(read_one(read_image, path, decoding, about=path)), _PIXELS)
    width, height = small.source
    photo = f"data:image/jpeg;base64,{pictured(small)['photo']}"
    return page(
        f"Where to look: {path.name}",
        asset("region.html"),
        styles=("base.css", "report.css", "region.css"),
        scripts=("region.js",),
        data={"name": path.name, "width": width, "height": height, "photo": photo},
    )


def pictured(small: Thumbnail | None) -> dict[str, Any]:
    """A picture as the page's scripts take it; None where there is none."""
    if small is None:
        return {"size": None, "source": None, "photo": ""}
    photo = base64.b64encode(small.photo).decode()
    return {"size": small.size, "source": small.source, "photo": photo}


_STYLES = ("base.css", "report.css")
_SCRIPTS = (
    *("parts.js", "histogram.js", "counts.js", "curves.js"),
    *("tiles.js", "viewer.js", "main.js"),
)


@dataclass(frozen=True)
class About:
    """The model behind a page.

    Attributes:
        method: by the name that it has in the literature.
        unit: of its scores.
        thresholds: the model's own; None where it has none.
        folder: of the model, as the user named it; empty for one that is in memory alone.
        model_id: names this very model.
        settings: the model's config as plain values.
    """

    method: str
    unit: str
    thresholds: Thresholds | None
    folder: str
    model_id: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, model: Model, folder: str | Path) -> About:
        """That of a model, with its folder as the user named it."""
        settings = to_dict(model.config)
        unit, limits = model.unit, model.thresholds
        return cls(model.method, unit, limits, str(folder), model.model_id, settings)


def model_page(
    name: str,
    model: About,
    title: str,
    counted: str,
    facts: Mapping[str, Mapping[str, Any]],
    data: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> str:
    """The page of images that one model has scored.

    Args:
        name: of the model.
        model: what is known of it.
        title: of the page.
        counted: how many images there are, in words.
        facts: tables of names and values, by title; empty values are left out.
        data: what the page's scripts read of the images.
        notes: on the thresholds, for people.
    """
    limits = model.thresholds
    command = ""
    if model.folder:  # absolute, so that the command holds in any working directory
        folder = str(Path(model.folder).absolute())
        command = command_line("anomaly", "calibrate", "--model", folder)
    network = str(model.settings.get("backbone", {}).get("name", ""))
    model_id = f"model {model.model_id}" if model.model_id else ""
    about = {
        "name": name,
        "subtitle": " · ".join(filter(None, [model.method, network, counted, model_id])),
        "unit": model.unit,
        "thresholds": {
            "review": limits and limits.review,
            "reject": limits and limits.image,
            "pixel": limits and limits.pixel,
            "review_pixel": limits and limits.review_pixel,
            "lines": [*limits.lines(), *notes] if limits else [],
        },
        "colours": {"stops": colour_stops(), "opacity": OPACITY},
        "command": command,
        "facts": [
            {"title": title, "rows": [[k, str(v)] for k, v in rows.items() if v not in (None, "")]}
            for title, rows in facts.items()
        ],
    }
    return page(
        title, asset("report.html"), styles=_STYLES, scripts=_SCRIPTS, data={**about, **data}
    )


def promise_shown(model: About, scores: ArrayLike, *, all_good: bool) -> dict[str, Any]:
    """The promise of thresholds beside the shares of these images, as a table for a page.

    Args:
        model: what is known of it; without thresholds, or images, there is nothing to show.
        scores: (n,) of images.
        all_good: whether somebody has said that none of the images is defective.
    """
    values, thresholds = np.asarray(scores), model.thresholds
    if thresholds is None or not len(values):
        return {"head": [], "rows": [], "line": ""}
    both = {"flagged": thresholds.to_review, "rejected": thresholds.to_reject}
    counts = {name: int((values > limit.value).sum()) for name, limit in both.items()}
    rows = [
        [
            name,
            percent(limit.false_rejects.expected),
            percent(limit.false_rejects.at_most),
            f"{percent(counts[name] / len(values))} ({counts[name]})",
        ]
        for name, limit in both.items()
    ]
    promised, place = both["flagged"].false_rejects, model.folder or "RUN"
    line = flagged_line(counts["flagged"], len(values), promised, place, all_good=all_good)
    images = counted(len(values), "good image" if all_good else "image")
    return {"head": ["", "promised of good parts", "at most", images], "rows": rows, "line": line}
