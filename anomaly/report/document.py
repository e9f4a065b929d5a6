"""A category -> report.html: figures, thresholds and images as one page that opens from disk."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from anomaly.calibration import Thresholds
from anomaly.calibration.production import flagged_line
from anomaly.calibration.rates import percent, rate_of
from anomaly.datasets import GOOD
from anomaly.errors import counted
from anomaly.evaluation.metrics.images import image_curves
from anomaly.evaluation.metrics.pixels import NO_DEFECT_MASKS, NO_MASKS
from anomaly.maps.heatmap import OPACITY, colour_stops
from anomaly.report.page import asset, command_line, page, shown_time
from anomaly.report.tables import flattered
from anomaly.scoring.build import flatten
from anomaly.version import __version__

if TYPE_CHECKING:
    from anomaly.evaluation.metrics.curves import Curve
    from anomaly.report.category import Category, Tile
    from anomaly.report.gallery import Run
    from anomaly.scoring.scored import Scored


_STYLES = ("base.css", "report.css")
_SCRIPTS = (
    *("parts.js", "histogram.js", "counts.js", "curves.js"),
    *("tiles.js", "viewer.js", "main.js"),
)
FIGURES = (
    ("Image AUROC", "image_auroc"),
    ("Image AP", "image_ap"),
    ("Image F1-max", "image_f1_max"),
    ("Recall at 1 % false rejects", "recall_at_frr_0.01"),
    ("Pixel AUROC", "pixel_auroc"),
    ("Pixel AP", "pixel_ap"),
    ("AUPRO 0.3", "aupro_30"),
    ("AUPRO 0.05", "aupro_05"),
    ("AUPIMO", "aupimo"),
)


def report_html(category: Category) -> str:
    """The page of one category.

    Args:
        category: with a tile for each scored image.
    """
    evaluation = category.evaluation
    types = {row.sample.defect_type for row in evaluation.scored}
    refused = [
        {"name": row.sample.name, "reason": row.reason.removeprefix(f"{row.sample.path}: ")}
        for row in evaluation.scored
        if row.score is None
    ]
    counted = f"{evaluation.n_good} good and {evaluation.n_defect} defective test images"
    usable = evaluation.usable
    good = [score for row, score in usable if not (row.sample.is_defect or row.outlier)]
    data = {
        "labelled": True,
        # What differs from the promise is in the list of weaknesses.
        "promise": promise_shown(category, good, all_good=True) | {"line": ""},
        "provenance": [
            *([("evaluated", category.date)] if category.date else []),
            *([("data in", category.data_folder)] if category.data_folder else []),
            *([("model in", category.model)] if category.model else []),
            *([("trained", shown_time(when))] if (when := category.training.get("time")) else []),
        ],
        "types": sorted(types, key=lambda name: (name != GOOD, name)),
        "good": GOOD,
        "images": list(_images(category)),
        "refused": {"rows": refused, "count": len(refused)},
        "figures": list(_figures(category)),
        "curves": _curves(category),
        "weaknesses": [asdict(weakness) for weakness in category.weaknesses],
        "by_type": list(_by_type(category)),
        "glossary": glossary(),
        "training_images": sorted(category.manifest.get("training_images", {}).items()),
    }
    title = f"{category.name} – inspection report"
    note = flattered(evaluation)
    return model_page(category, title, counted, _facts(category), data, [note] if note else [])


def model_page(
    model: Category | Run,
    title: str,
    counted: str,
    facts: Mapping[str, Mapping[str, Any]],
    data: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> str:
    """The page of images that one model has scored.

    Args:
        model: what is known of the model.
        title: of the page.
        counted: how many images there are, in words.
        facts: tables of names and values, by title; empty values are left out.
        data: what the page's scripts read of the images.
        notes: on the thresholds, for people.
    """
    network = str(model.settings.get("backbone", {}).get("name", ""))
    model_id = f"model {model.model_id}" if model.model_id else ""
    about = {
        "name": model.name,
        "subtitle": " · ".join(filter(None, [model.method, network, counted, model_id])),
        "unit": model.unit,
        "thresholds": _limits(model.thresholds, notes),
        "colours": {"stops": colour_stops(), "opacity": OPACITY},
        "command": _command(model.model),
        "facts": [
            {"title": title, "rows": [[k, str(v)] for k, v in rows.items() if v not in (None, "")]}
            for title, rows in facts.items()
        ],
    }
    return page(
        title, asset("report.html"), styles=_STYLES, scripts=_SCRIPTS, data={**about, **data}
    )


def _command(model: str) -> str:
    """The shell command that sets thresholds of a model, but for the thresholds.

    Empty for a model that is in memory alone.
    """
    if not model:
        return ""
    folder = str(Path(model).absolute())  # holds in any working directory
    return command_line("anomaly", "calibrate", "--model", folder)


def _limits(thresholds: Thresholds | None, notes: Sequence[str]) -> dict[str, Any]:
    """A model's thresholds as a page has them."""
    if thresholds is None:
        return {"review": None, "reject": None, "pixel": None, "review_pixel": None, "lines": []}
    return {
        "review": thresholds.review,
        "reject": thresholds.image,
        "pixel": thresholds.pixel,
        "review_pixel": thresholds.review_pixel,
        "lines": [*thresholds.lines(), *notes],
    }


def promise_shown(model: Category | Run, scores: ArrayLike, *, all_good: bool) -> dict[str, Any]:
    """What thresholds promise of good parts beside what these images show, as a table for a page.

    Args:
        model: what is known of it; without thresholds, or images, there is nothing to show.
        scores: (n,) of images.
        all_good: whether somebody has said that none of the images is defective.
    """
    values, thresholds = np.asarray(scores), model.thresholds
    if thresholds is None or not len(values):
        return {"head": [], "rows": [], "line": ""}
    both = {"flagged": thresholds.calibration.review, "rejected": thresholds.calibration.reject}
    rows, lines = [], []
    for name, threshold in both.items():
        rate, count = threshold.false_rejects, int((values > threshold.value).sum())
        promised = percent(rate.expected), percent(rate.at_most)
        rows.append([name, *promised, f"{percent(count / len(values))} ({count})"])
        place = model.model or "RUN"
        lines.append(flagged_line(count, len(values), rate, place, all_good=all_good))
    images = counted(len(values), "good image" if all_good else "image")
    head = ["", "promised of good parts", "at most", images]
    return {"head": head, "rows": rows, "line": lines[0]}


def _images(category: Category) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(category.evaluation.scored):
        if row.score is not None:
            yield _image(row, category.tiles[index])


def _image(row: Scored, tile: Tile) -> dict[str, Any]:
    return {
        "name": row.sample.name,
        "type": row.sample.defect_type,
        "defect": row.sample.is_defect,
        "score": row.score,
        "sha256": row.sha256,
        "odd": row.reason if row.outlier else "",
        "size": tile.size,
        "source": tile.source,
        "photo": base64.b64encode(tile.photo).decode(),
        "heat": base64.b64encode(tile.heat).decode(),
        "truth": tile.truth,
        "marked": tile.marked,
        "partly": tile.partly,
    }


def _figures(category: Category) -> Iterator[dict[str, Any]]:
    metrics = category.evaluation.metrics
    if counts := category.verdicts:
        for label, key, wrong, of in (
            ("Escapes", "escapes", counts.escapes, counts.defective.total),
            ("False rejects", "false_rejects", counts.false_rejects, counts.good.total),
        ):
            if of:
                rate = rate_of(wrong, of, wrong / of)
                value, interval = f"{wrong} of {of}", (rate.low, rate.high)
                yield {"label": label, "key": key, "value": value, "interval": interval}
    for label, key in FIGURES:
        if key in metrics.values and metrics.reasons.get(key) not in (NO_MASKS, NO_DEFECT_MASKS):
            yield {
                "label": label,
                "key": key,
                "value": metrics.values[key],
                "interval": category.evaluation.intervals.get(key),
                "reason": metrics.reasons.get(key, ""),
            }


def _by_type(category: Category) -> Iterator[dict[str, Any]]:
    kinds = [row.sample.defect_type for row, _ in category.evaluation.usable]
    for name, metrics in category.evaluation.by_type.items():
        counted = {"type": name, "images": kinds.count(name)}
        yield {**counted, **metrics.values, "reasons": metrics.reasons}


def _curves(category: Category) -> dict[str, Any]:
    usable = category.evaluation.usable
    both = image_curves([score for _, score in usable], [row.sample.is_defect for row, _ in usable])
    roc, pr = map(_points, both) if both else (None, None)
    return {"roc": roc, "pr": pr}


def _points(curve: Curve) -> list[list[float]]:
    return [[round(x, 5), round(y, 5)] for x, y in zip(curve.x, curve.y, strict=True)]


def _facts(category: Category) -> dict[str, dict[str, Any]]:
    """Tables of names and values for the model's part of the page, by title."""
    manifest, training = category.manifest, category.training
    backbone = manifest.get("backbone", {})
    scored = len(category.evaluation.scored)
    rate = f"{scored / category.seconds:.1f}" if category.seconds > 0 else "–"
    images = training.get("images", {})
    timings = {
        f"training: {stage}": f"{s:.1f} s" for stage, s in training.get("seconds", {}).items()
    }
    timings["evaluation: engine"] = category.engine
    timings["evaluation"] = f"{category.seconds:.1f} s"
    timings["evaluation, images a second"] = rate
    if training.get("peak_memory_bytes"):
        timings["training: memory at most"] = f"{training['peak_memory_bytes'] / 1e9:.2f} GB"
    hashes = {
        "model id": category.model_id,
        "backbone weights": backbone.get("weights_sha256") or "–",
        "training images": _digest(manifest.get("training_images", {}).values()),
        "test images": _digest(row.sha256 for row in category.evaluation.scored),
    }
    learned = {
        "images learned from": images.get("learned", len(manifest.get("training_images", {}))),
        "patches": training.get("patches"),
        "memory bank vectors": training.get("bank_vectors"),
    }
    made = manifest.get("made_with", {})
    software = {"anomaly": __version__, "python": made.get("python"), **made.get("packages", {})}
    machine = {k: v for k, v in made.items() if k not in ("packages", "python")}
    settings = dict(flatten(category.settings))
    if chosen_by := settings.get("chosen_by"):
        settings["chosen_by"] = f"{len(chosen_by)} images"
    return {
        "Settings": settings,
        "Learned": learned,
        "Timings": timings,
        "Hashes (sha256)": hashes,
        "Made with": software | machine,
    }


def _digest(hashes: Any) -> str:
    """One hash for a set of files, whatever their names and order."""
    known = sorted(h for h in hashes if h)
    return hashlib.sha256("".join(known).encode()).hexdigest() if known else "–"


@cache
def glossary() -> dict[str, str]:
    """What each figure means, by its key, for people."""
    return dict(json.loads(asset("glossary.json")))


def term(key: str, title: str) -> str:
    """A figure's name as HTML that explains itself: under the mouse, and at a press or a key."""
    about, spot = escape(glossary()[key]), escape(f"about-{key}")
    return (
        f'<button class="term" type="button" popovertarget="{spot}" title="{about}">'
        f'{escape(title)}</button><span id="{spot}" popover class="about">'
        f"<b>{escape(title)}</b>{about}</span>"
    )
