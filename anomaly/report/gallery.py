"""The rows of a run of `infer` -> results.html: the report's page for images without labels.

Every score counts in its histogram and verdicts; pictures are there of the images with the
highest scores and of those with a reason for review.
"""

from __future__ import annotations

import base64
import heapq
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from anomaly.errors import ImageError
from anomaly.imaging.read import read_image
from anomaly.inference.rows import Row
from anomaly.maps.heatmap import SHOWN, Thumbnails, thumbnail
from anomaly.report.page import About, model_page, pictured, promise_shown, utc_now
from anomaly.scoring.build import flatten

NAMED = 200  # images named that couldn't be scored


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
    """The page over a run.

    It is bounded: eleven bytes for each score, and `SHOWN` small pictures.

    Args:
        name: of the model.
        about: the model.
        inputs: what was scored, as the user named it.
        rows: one for each image, in any number: they are gone through once.
        output: the folder that the rows' heatmaps are relative to.
        thumbnails: small heatmaps as far as they are at hand; others are made from the files.
        facts: what else there is to say, by name.
        learned: sha256 of the images that the model was learned from.
    """
    tally = _Tally(about, learned)
    # Earlier ones win among equals, so that the page hangs on the rows alone.
    shown = heapq.nlargest(
        SHOWN, tally.scored(rows), lambda at: (bool(at[1].reason), at[1].image_score or 0.0)
    )
    images = [_image(row, output, thumbnails) for _, row in sorted(shown)]
    scored = len(tally.scores) + len(tally.odd)
    total = scored + tally.refused
    left_out = ""
    if tally.learned:
        left_out = (
            f"{tally.learned} of the {total} images were used to train the model: their good "
            "verdicts say nothing about new images, and the promise is compared with the other "
            f"{len(tally.new)}. "
        )
    if scored > len(shown):
        left_out += (
            "Pictures are shown only for images that a person has to look at and for the highest "
            f"scores of {scored} images. All images are counted on the left; results.csv has a row "
            "for each."
        )
    data = {
        "labelled": False,
        "promise": promise_shown(about, tally.new, all_good=False),
        "provenance": [("scored until", utc_now()), ("input", inputs)],
        "types": [],
        "images": images,
        "scores": _encoded(tally.scores),
        "odd": _encoded(tally.odd),
        "left_out": left_out,
        "refused": {"rows": tally.reasons, "count": tally.refused},
        "figures": [],
        "glossary": {},
    }
    tables = {"Run": facts, "Settings": dict(flatten(about.settings))}
    counted = f"{scored} of {total} images scored"
    return model_page(name, about, f"{name} – {inputs}", counted, tables, data)


class _Tally:
    """Numbers and rows of a run that its page needs.

    Attributes:
        new: the scores of images that the model hasn't learned, raised above the review threshold
            where there is a reason for review.
    """

    def __init__(self, about: About, learned: frozenset[str]) -> None:
        self.scores, self.odd = array("d"), array("d")  # without and with a reason for review
        self.learned = self.refused = 0
        self.reasons: list[dict[str, str]] = []
        self.new = array("d")
        self._learned = learned
        limits = about.thresholds
        self._odd = -np.inf if limits is None else np.nextafter(limits.review, np.inf)

    def scored(self, rows: Iterable[Row]) -> Iterator[tuple[int, Row]]:
        """Count rows, and pass on those with a score, numbered."""
        for number, row in enumerate(rows):
            learned = row.image_sha256 in self._learned
            self.learned += learned
            if row.image_score is None:
                self.refused += 1
                if len(self.reasons) < NAMED:
                    reason = row.reason.removeprefix(f"{row.path}: ")
                    self.reasons.append({"name": row.path, "status": row.status, "reason": reason})
                continue
            if not learned:
                least = self._odd if row.reason else -np.inf
                self.new.append(max(row.image_score, least))
            (self.odd if row.reason else self.scores).append(row.image_score)
            yield number, row


def _encoded(scores: array[float]) -> str:
    """Ascending, as little-endian doubles: no digit of a score is lost at a threshold."""
    return base64.b64encode(np.sort(np.frombuffer(scores, "<f8")).tobytes()).decode()


def _image(row: Row, output: Path, thumbnails: Thumbnails) -> dict[str, Any]:
    small = thumbnails.get(row.heatmap)
    if small is None and row.heatmap:  # of an earlier part of the run
        with suppress(ImageError):  # exchanged for what is no image
            small = thumbnail(read_image(output / row.heatmap).pixels, thumbnails.pixels)
    return {
        "name": row.path,
        "type": "",
        "defect": False,
        "score": row.image_score,
        "sha256": row.image_sha256,
        "odd": row.reason,
        **pictured(small),
        "link": row.heatmap and quote(row.heatmap, errors="surrogateescape"),
        "partly": False,
    }
