"""One self-contained HTML page: style, scripts, data, and a policy that allows nothing else.

Whatever comes from file names or settings reaches a page in one of two ways: escaped by `html`
here, or as JSON that scripts put in place as text.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import html
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import ArrayLike

from anomaly.calibration.rates import percent
from anomaly.calibration.thresholds import Thresholds
from anomaly.desk.advice import command, flagged_line
from anomaly.errors import ImageError, counted
from anomaly.imaging.pool import read_one
from anomaly.imaging.read import Decoding, read_image
from anomaly.inference.results import Row
from anomaly.maps.heatmap import (
    OPACITY,
    SHOWN,
    Thumbnail,
    Thumbnails,
    colour_stops,
    display,
    thumbnail,
)
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
    """A whole page as HTML.

    Args:
        title: plain text.
        body: HTML whose variable parts have been escaped.
        styles: names of assets.
        scripts: names of assets, in order; they share one module.
        data: values that the scripts read from the element `data`; None for a page without scripts.
    """
    style = "".join(map(asset, styles))
    code = "".join(map(asset, scripts))
    elements = ""
    if data is not None:
        elements = f'<script type="application/json" id="data">{embedded(data)}</script>\n'
        elements += f'<script type="module">{code}</script>\n'
    head = {"policy": _policy(style, code), "title": html.escape(title), "style": style}
    return _PAGE.format(body=body, scripts=elements, **head)


def table_page(title: str, heading: str, about: str, content: str) -> str:
    """A page of tables and pictures.

    Args:
        title: plain text.
        heading: plain text.
        about: HTML of a line below the heading.
        content: HTML below that line.
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
        label: subject of the picture for screen readers, plain text.
        photo: content of the file.
        size: (width, height) in pixels, the coordinates of the marks.
        caption: HTML.
        marks: SVG elements over the picture.
    """
    href = f"data:image/jpeg;base64,{base64.b64encode(photo).decode()}"
    picture = (
        f'<svg class="picture" viewBox="0 0 {size[0]} {size[1]}" role="img" '
        f'aria-label="{html.escape(label)}"><image href="{href}" width="100%" height="100%" '
        f'preserveAspectRatio="none"/>{marks}</svg>'
    )
    return figure_html(picture, caption)


def table_html(titles: Iterable[str], rows: Iterable[str]) -> str:
    """A table of titles (HTML) and rows (from `row_html`)."""
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    return (
        f'<div class="card wide"><table class="overview"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def row_html(name: str, cells: Iterable[object]) -> str:
    """A row of a table; name and cells are HTML."""
    listed = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{name}</th>{listed}</tr>'


def utc_now() -> str:
    """The present time in the form shown on pages."""
    return shown_time(datetime.now(UTC).isoformat())


def shown_time(utc: str) -> str:
    """A time (ISO 8601, UTC) in the form shown on pages."""
    return f"{utc[:16].replace('T', ' ')} UTC"


def asset(name: str) -> str:
    """The text of a file in assets/."""
    return files("anomaly.report").joinpath("assets", name).read_text("utf-8")


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element, whatever strings it holds."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # As escapes of JSON, so that no string can end the element.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(style: str, code: str) -> str:
    """Content security policy: this very style and code, pictures in the page, nothing else."""
    script = _fingerprint(code) if code else "'none'"
    return (
        f"default-src 'none'; img-src data:; style-src {_fingerprint(style)}; "
        f"script-src {script}; base-uri 'none'; form-action 'none'"
    )


def _fingerprint(text: str) -> str:
    """The hash by which a policy allows an inline style or script."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


_PIXELS = 1_440_000  # most pixels of the picture on the page for regions


def region_page(path: Path, decoding: Decoding) -> str:
    """A page for drawing polygons over a picture, with the YAML of the region.

    Args:
        path: image file.
        decoding: limits and bit depth of the decoder.

    Raises:
        ImageError: the image can't be decoded.
    """
    # In a decoding process, whose memory and time are limited.
    small = thumbnail(display(read_one(read_image, path, decoding, about=path)), _PIXELS)
    width, height = small.source
    photo = f"data:image/jpeg;base64,{picture_data(small)['photo']}"
    data = {"name": path.name, "width": width, "height": height, "photo": photo}
    return page(
        f"Where to look: {path.name}",
        asset("region.html"),
        styles=(*_STYLES, "region.css"),
        scripts=("region.js",),
        data=data,
    )


def picture_data(small: Thumbnail | None) -> dict[str, Any]:
    """A small picture as plain values for the page's scripts, empty for None."""
    if small is None:
        return {"size": None, "source": None, "photo": ""}
    photo = base64.b64encode(small.photo).decode()
    return {"size": small.size, "source": small.source, "photo": photo}


_STYLES = ("base.css", "report.css")
# In the order in which one uses the other.
_SCRIPTS = (
    *("parts.js", "histogram.js", "counts.js", "curves.js"),
    *("tiles.js", "viewer.js", "main.js"),
)


@dataclass(frozen=True)
class About:
    """The model behind a page.

    Attributes:
        method: name of the method in the literature.
        unit: unit of the scores.
        thresholds: the model's own; None where it has none.
        folder: folder of the model, as the user named it; empty for a model in memory.
        model_id: identifier of the model, from its content.
        settings: the model's settings by dotted key, such as `image.area`.
        engine: program that runs the network: torch, onnx or openvino.
    """

    method: str
    unit: str
    thresholds: Thresholds | None
    folder: str
    model_id: str
    settings: Mapping[str, Any]
    engine: str = "torch"

    @classmethod
    def of(cls, model: Model, folder: str | Path) -> About:
        """Facts of a model; `folder` is as the user named it, or empty."""
        return cls(
            model.method,
            model.unit,
            model.thresholds,
            str(folder),
            model.model_id,
            dict(_flattened(to_dict(model.config))),
            model.extractor.engine,
        )

    @property
    def run(self) -> Path | None:
        """The folder for commands that change the model; None for an export, or without a folder.

        It is absolute, so that a command holds in any working directory.
        """
        return Path(self.folder).absolute() if self.folder and self.engine == "torch" else None


def _flattened(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested settings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def model_page(
    name: str,
    model: About,
    title: str,
    numbers: str,
    facts: Mapping[str, Mapping[str, Any]],
    data: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> str:
    """The page of images that one model has scored.

    Args:
        name: name of the model.
        model: facts of the model.
        title: title of the page.
        numbers: numbers of images, in words.
        facts: tables of names and values, by title; empty values are left out.
        data: scores, pictures and figures of the images, for the page's scripts; see `report_html`
            and `gallery_html`.
        notes: remarks on the thresholds, for people.
    """
    limits = model.thresholds
    network = str(model.settings.get("backbone.name", ""))
    model_id = f"model {model.model_id}" if model.model_id else ""
    about = {
        "name": name,
        "subtitle": " · ".join(filter(None, [model.method, network, numbers, model_id])),
        "unit": model.unit,
        "thresholds": {
            "review": limits and limits.review,
            "reject": limits and limits.image,
            "pixel": limits and limits.pixel,
            "review_pixel": limits and limits.review_pixel,
            "lines": [*limits.lines(), *notes] if limits else [],
        },
        "colours": {"stops": colour_stops(), "opacity": OPACITY},
        "command": command("calibrate", "--model", model.run) if model.run else "",
        "facts": [
            {"title": title, "rows": [[k, str(v)] for k, v in rows.items() if v not in (None, "")]}
            for title, rows in facts.items()
        ],
    }
    return page(
        title, asset("report.html"), styles=_STYLES, scripts=_SCRIPTS, data={**about, **data}
    )


def promise_shown(model: About, scores: ArrayLike, *, all_good: bool) -> dict[str, Any]:
    """The rates that thresholds promise beside the rates on images, as a table for a page.

    Args:
        model: facts of the model; without thresholds the table is empty.
        scores: (n,) scores of images without a reason for review; without any the table is empty.
        all_good: True where people have labelled all images good; advice is left out then, as it
            would ask to look at them.
    """
    values = np.asarray(scores)
    thresholds = model.thresholds
    if thresholds is None or not len(values):
        return {"head": [], "rows": [], "line": ""}
    limits = {"flagged": thresholds.to_review, "rejected": thresholds.to_reject}
    counts = {name: int((values > limit.value).sum()) for name, limit in limits.items()}
    rows = [
        [
            name,
            percent(limit.false_rejects.expected),
            percent(limit.false_rejects.at_most),
            f"{percent(counts[name] / len(values))} ({counts[name]})",
        ]
        for name, limit in limits.items()
    ]
    promised = limits["flagged"].false_rejects
    line = flagged_line(counts["flagged"], len(values), promised, model.run or "RUN")
    images = counted(len(values), "good image" if all_good else "image")
    head = ["", "promised of good parts", "at most", images]
    return {"head": head, "rows": rows, "line": "" if all_good else line}


NAMED = 200  # most images without a score that a page names


def gallery_html(
    name: str,
    about: About,
    inputs: str,
    rows: Iterable[Row],
    output: Path,
    thumbnails: Thumbnails,
    facts: Mapping[str, Any],
    learned: frozenset[str],
) -> str:
    """The page of a run of `infer`, whose images have no labels.

    Its histogram and its counts take in every score. Pictures are of images with a reason for
    review first, then of those with the highest scores. Its size is bounded: eleven bytes for each
    score, and `SHOWN` small pictures.

    Args:
        name: name of the model.
        about: facts of the model.
        inputs: the images' folders, as the user named them.
        rows: one row an image, in any number: read once.
        output: the folder that heatmaps of rows are relative to.
        thumbnails: small heatmaps in memory; others are made from the heatmaps' files.
        facts: names and values of a table on the run.
        learned: sha256 of the training images.
    """
    tally = _Tally(learned)

    def priority(numbered: tuple[int, Row]) -> tuple[bool, float]:
        row = numbered[1]
        return bool(row.reason), row.image_score or 0.0

    # `nlargest` keeps the earlier of equal rows, so the page depends on the rows alone.
    shown = heapq.nlargest(SHOWN, tally.scored(rows), priority)
    images = [_image(row, output, thumbnails) for _, row in sorted(shown)]
    scores = tally.new + tally.known
    scored = len(scores) + len(tally.odd)
    total = scored + tally.refused
    left_out = ""
    if tally.learned:
        left_out = (
            f"{tally.learned} of the {total} images were used to train the model: their good "
            "verdicts say nothing about new images, so the promise isn't compared with them. "
        )
    if scored > len(shown):
        left_out += (
            "Pictures are shown only for images that a person has to look at and for the highest "
            f"scores of {scored} images. The counts on the left are of all images; results.csv has "
            "a row for each."
        )
    data = {
        "labelled": False,
        "promise": promise_shown(about, tally.new, all_good=False),
        "provenance": [("scored until", utc_now()), ("input", inputs)],
        "types": [],
        "images": images,
        "scores": _encoded(scores),
        "odd": _encoded(tally.odd),
        "left_out": left_out,
        "refused": {"rows": tally.reasons, "count": tally.refused},
        "figures": [],
        "glossary": {},
    }
    tables = {"Run": facts, "Settings": about.settings}
    numbers = f"{scored} of {total} images scored"
    return model_page(name, about, f"{name} – {inputs}", numbers, tables, data)


class _Tally:
    """Counts and scores of a run, in memory that doesn't grow with its rows' texts.

    Args:
        training_images: sha256 of the training images.

    Attributes:
        new: scores of new images without a reason for review.
        known: scores of training images without a reason for review.
        odd: scores of images with a reason for review.
        learned: number of training images with a score.
        refused: number of images without a score.
        reasons: name, status and reason of each image without a score, up to `NAMED`.
    """

    def __init__(self, training_images: frozenset[str]) -> None:
        self.new, self.known, self.odd = array("d"), array("d"), array("d")
        self.learned = self.refused = 0
        self.reasons: list[dict[str, str]] = []
        self._training_images = training_images

    def scored(self, rows: Iterable[Row]) -> Iterator[tuple[int, Row]]:
        """Count rows, and pass on those with a score, each with its number."""
        for number, row in enumerate(rows):
            if row.image_score is None:
                self.refused += 1
                # Memory stays bounded however many images fail.
                if len(self.reasons) < NAMED:
                    reason = row.reason.removeprefix(f"{row.path}: ")
                    self.reasons.append({"name": row.path, "status": row.status, "reason": reason})
                continue
            learned = row.image_sha256 in self._training_images
            self.learned += learned
            scores = self.known if learned else self.new
            (self.odd if row.reason else scores).append(row.image_score)
            yield number, row


def _encoded(scores: array[float]) -> str:
    """Scores in ascending order, as base64 of little-endian doubles, whose digits all count."""
    return base64.b64encode(np.sort(np.frombuffer(scores, "<f8")).tobytes()).decode()


def _image(row: Row, output: Path, thumbnails: Thumbnails) -> dict[str, Any]:
    """A row and its small heatmap, for the page's scripts."""
    small = thumbnails.get(row.heatmap)
    if small is None and row.heatmap:  # drawn before the run was resumed
        with suppress(ImageError):  # somebody has overwritten the file
            small = thumbnail(read_image(output / row.heatmap).pixels, thumbnails.pixels)
    return {
        "name": row.path,
        "type": "",
        "defect": False,
        "score": row.image_score,
        "sha256": row.image_sha256,
        "odd": row.reason,
        **picture_data(small),
        # A file's name may hold bytes that aren't UTF-8; a quoted link keeps them.
        "link": row.heatmap and quote(row.heatmap, errors="surrogateescape"),
        "partly": False,
    }
