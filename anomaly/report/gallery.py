"""Rows of `infer` -> results.html, the report's page for images without labels.

Its histogram and its verdicts count every score. It has pictures of images with a reason for review
first, then of those with the highest scores.
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

NAMED = 200  # at most so many images that couldn't be scored are named


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
    """The page of a run.

    Its size is bounded: eleven bytes for each score, and `SHOWN` small pictures.

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
    tally = _Tally(about, learned)
    # Earlier rows win among equals, so that the page depends on nothing but the rows.
    shown = heapq.nlargest(
        SHOWN, tally.scored(rows), lambda pair: (bool(pair[1].reason), pair[1].image_score or 0.0)
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
    """Counts and scores of a run, in memory that doesn't grow with its rows' texts.

    Args:
        about: facts of the model.
        training_images: sha256 of the training images.

    Attributes:
        scores: scores of images without a reason for review.
        odd: scores of images with a reason for review.
        new: scores of all but training images, raised above the review threshold where there is a
            reason for review.
        learned: number of training images among the rows.
        refused: number of images without a score.
        reasons: names, states and reasons of the first `NAMED` of them.
    """

    def __init__(self, about: About, training_images: frozenset[str]) -> None:
        self.scores, self.odd, self.new = array("d"), array("d"), array("d")
        self.learned = self.refused = 0
        self.reasons: list[dict[str, str]] = []
        self._training_images = training_images
        limits = about.thresholds
        # The lowest score that counts as flagged.
        self._flagged = -np.inf if limits is None else np.nextafter(limits.review, np.inf)

    def scored(self, rows: Iterable[Row]) -> Iterator[tuple[int, Row]]:
        """Count rows, and pass on those with a score, each with its number."""
        for number, row in enumerate(rows):
            learned = row.image_sha256 in self._training_images
            self.learned += learned
            if row.image_score is None:
                self.refused += 1
                # Memory stays bounded however many images fail.
                if len(self.reasons) < NAMED:
                    reason = row.reason.removeprefix(f"{row.path}: ")
                    self.reasons.append({"name": row.path, "status": row.status, "reason": reason})
                continue
            if not learned:
                least = self._flagged if row.reason else -np.inf
                self.new.append(max(row.image_score, least))
            (self.odd if row.reason else self.scores).append(row.image_score)
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
        **pictured(small),
        # A file's name may hold bytes that aren't UTF-8; a quoted link keeps them.
        "link": row.heatmap and quote(row.heatmap, errors="surrogateescape"),
        "partly": False,
    }
