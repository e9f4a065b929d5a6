"""Model x test images -> report.html, metrics.json, scores.csv and a table on screen."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.calibration.rates import rate_of
from anomaly.calibration.thresholds import Thresholds
from anomaly.datasets.samples import GOOD, Sample
from anomaly.desk.advice import Run, Weakness, evaluation_weaknesses, review_rates
from anomaly.errors import AnomalyError, counted
from anomaly.evaluation.evaluate import Evaluation, Mask, score_test_split
from anomaly.evaluation.metrics import NO_DEFECT_MASKS, NO_MASKS, Confusion
from anomaly.files.tables import csv_rows, csv_text, text_table
from anomaly.files.writing import as_json, claim, clear, write
from anomaly.maps.anomaly_map import predicted_mask
from anomaly.maps.heatmap import QUALITY, display, encoded, outlines, overlay, pixels_for, thumbnail
from anomaly.report.page import (
    About,
    asset,
    model_page,
    picture_data,
    promise_shown,
    shown_time,
    utc_now,
)
from anomaly.runtime import Progress, __version__
from anomaly.scoring.model import Model, Prediction, Scored
from anomaly.storage.folder import find_model
from anomaly.storage.thresholds import models_scoring_alike
from anomaly.training.runs import training_record

# Of all pictures of a page, about 30 MB: 190 images of 500 x 1254 keep their size.
_PIXELS = 120_000_000
_HEAT_SIDE = 160  # pixels of a small heatmap's longer side

FIGURES = {
    "image_auroc": "Image AUROC",
    "image_ap": "Image AP",
    "image_f1_max": "Image F1-max",
    "recall_at_frr_0.01": "Recall at 1 % false rejects",
    "pixel_auroc": "Pixel AUROC",
    "pixel_ap": "Pixel AP",
    "aupro_30": "AUPRO 0.3",
    "aupro_05": "AUPRO 0.05",
}
_ON_SCREEN = ("image_auroc", "image_ap", "image_f1_max", "pixel_auroc", "pixel_ap", "aupro_30")


@dataclass(frozen=True, repr=False)
class Category:
    """An evaluation with its origin and its pictures.

    Attributes:
        evaluation: scores and figures.
        about: facts of the model.
        training: content of the run's train.json; empty without one.
        data_folder: folder of the test images.
        date: time of the evaluation, in UTC.
        tiles: pictures for the page's scripts, by the images' indices in the test split; empty
            once the report is written.
        weaknesses: weaknesses of the model, the most important first.
        rates: lines on other review rates; none where no defect passes.
    """

    evaluation: Evaluation
    about: About
    training: Mapping[str, Any] = field(default_factory=dict)
    data_folder: str = ""
    date: str = ""
    tiles: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    weaknesses: tuple[Weakness, ...] = ()
    rates: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return table([self.evaluation])

    @property
    def name(self) -> str:
        """The category's name."""
        return self.evaluation.name

    @property
    def metrics(self) -> dict[str, float | None]:
        """Image and pixel figures by name; None where one is undefined."""
        return dict(self.evaluation.metrics.values)

    @property
    def scored(self) -> tuple[Scored, ...]:
        """Every test image and its score."""
        return self.evaluation.scored

    def report(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write figures and scores, and this model's report in a folder beside them.

        Returns:
            The report's HTML file.

        Raises:
            OutputError: the folder has a report already, or can't be written to.
        """
        return write_evaluation(Path(folder), [self], overwrite=overwrite)

    @property
    def verdicts(self) -> Confusion | None:
        """Counts at the model's own thresholds; None where it has none."""
        return self.evaluation.verdicts


FIGURE_FILES = ("metrics.json", "scores.csv")
_REPORT_FILES = ("report.html", *FIGURE_FILES)


def folder_name(name: str) -> str:
    """A folder's name, legal on every system, for a category's name."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "model"


def write_evaluation(folder: Path, categories: Sequence[Category], *, overwrite: bool) -> Path:
    """Write the last category's report and figures, and the figures over all categories.

        metrics.json, scores.csv                         over all categories
        <category>/report.html, metrics.json, scores.csv

    Called after each category, so that figures of the finished ones survive an interruption.

    Args:
        folder: made if need be.
        categories: the categories so far, one at least; only the last one's report isn't written.
        overwrite: replace earlier files of these names; False refuses them.

    Returns:
        The HTML file of the last category's report.

    Raises:
        OutputError: the folder has such files already, or can't be written to.
    """
    used: set[str] = set()
    for category in categories:
        name = folder_name(category.name)
        # Two names may become one, also on a system that ignores case.
        while name.casefold() in used:
            name += "_"
        used.add(name.casefold())
    # After the loop `name` and `category` are the last category's.
    own = folder / name
    claim(own, _REPORT_FILES, overwrite=overwrite)
    clear(own, _REPORT_FILES)
    if len(categories) == 1:  # else the figures over all are those of this call's predecessor
        claim(folder, FIGURE_FILES, overwrite=overwrite)
        clear(folder, FIGURE_FILES)
    _write_figures(own, [category.evaluation])
    write(own / "report.html", report_html(category))
    _write_figures(folder, [category.evaluation for category in categories])
    return own / "report.html"


def _write_figures(folder: Path, evaluations: Sequence[Evaluation]) -> None:
    write(folder / "metrics.json", metrics_json(evaluations))
    write(folder / "scores.csv", scores_csv(evaluations))


def evaluated(
    model: Model,
    samples: Sequence[Sample],
    data_folder: str,
    *,
    tested: Sequence[object] = (),
    progress: Progress = lambda done, total: None,
    folder: Path | None = None,
) -> Category:
    """Score test images and draw them for the report.

    Args:
        model: the trained model.
        samples: test images.
        data_folder: folder of the test images, for people.
        tested: options of proposed commands that name the defects among the test images; empty for
            a data set's test split, which commands find by themselves.
        progress: called with (done, total).
        folder: the run or model folder, as the user named it; None takes the model's own.

    Raises:
        DataError: there are no test images, or a label or mask contradicts an image.
    """
    pixels = pixels_for(len(samples), _PIXELS)
    tiles: dict[int, dict[str, Any]] = {}

    def add_tile(prediction: Prediction, mask: Mask | None) -> None:
        tiles[prediction.index] = tile(prediction, mask, pixels)

    evaluation = score_test_split(model, samples, progress=progress, visit=add_tile)
    # A user's own name for the folder is the better one in commands that the report proposes.
    folder = folder or model.folder
    training = {} if folder is None else training_of(folder, model.model_id)
    # The proposed commands take no export.
    named = folder if folder and model.extractor.engine == "torch" else Path("RUN")
    run = Run(model, named, training, tested)
    return Category(
        evaluation=evaluation,
        about=About.of(model, folder or ""),
        training=training,
        data_folder=data_folder,
        date=utc_now(),
        tiles=tiles,
        weaknesses=evaluation_weaknesses(run, evaluation),
        rates=review_rates(run, evaluation),
    )


def training_of(folder: Path, model_id: str) -> dict[str, Any]:
    """The record of a model's training; empty where the record in the folder is another model's."""
    record = training_record(folder)
    if record.get("model_id", model_id) == model_id:
        return record
    # Other thresholds give a model another identifier; the training is still its own.
    with suppress(AnomalyError):
        if record["model_id"] in models_scoring_alike(find_model(folder)):
            return record
    return {}


def tile(prediction: Prediction, mask: Mask | None, pixels: int) -> dict[str, Any]:
    """The pictures of one image, as the page's scripts take them.

    Args:
        prediction: prediction with the decoded image.
        mask: ground-truth mask (H0, W0), or None.
        pixels: most pixels of the picture.

    Returns:
        The photograph; `heat`, a WebP picture with opacity to be stretched over it, empty where
        nothing is coloured; `truth` and `marked`, outlines of the ground-truth and of the
        predicted mask as SVG paths in the photograph's pixels; `partly`, True where the network
        sees a part of the image only.
    """
    assert prediction.image is not None
    anomaly_map, limits = prediction.anomaly_map, prediction.thresholds
    # Without thresholds only the highest value is marked.
    threshold = float(np.nanmax(anomaly_map)) if limits is None else limits.pixel
    small = thumbnail(display(prediction.image), pixels)
    marked = predicted_mask(replace(prediction.source_map, values=anomaly_map), threshold) > 0
    return {
        **picture_data(small),
        "heat": base64.b64encode(_heat(anomaly_map, threshold)).decode(),
        "truth": "" if mask is None else _outline(mask, small.size),
        "marked": _outline(marked, small.size),
        "partly": bool(np.isnan(anomaly_map).any()),
    }


def _heat(anomaly_map: NDArray[np.float32], threshold: float) -> bytes:
    """The heatmap's colours as a small WebP picture; empty where nothing is coloured."""
    # A smooth map needs no more pixels.
    height, width = anomaly_map.shape
    scale = min(1.0, _HEAT_SIDE / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    small = np.asarray(cv2.resize(anomaly_map, size, interpolation=cv2.INTER_AREA), np.float32)
    colours = overlay(small, threshold)  # RGBA, which OpenCV wants as BGRA
    if not colours[..., 3].any():
        return b""
    return encoded(".webp", colours[..., [2, 1, 0, 3]], cv2.IMWRITE_WEBP_QUALITY, QUALITY)


def _outline(mask: Mask, size: tuple[int, int]) -> str:
    """A mask's outlines in a picture of `size` (width, height), as an SVG path of closed lines."""
    # Averaged, not sampled: a defect of a single pixel must still show.
    small = cv2.resize(mask.astype(np.float32), size, interpolation=cv2.INTER_AREA) > 0
    parts = []
    for line in outlines(small):
        # Within 0.6 pixels: a straight edge becomes two points.
        points = cv2.approxPolyDP(line, 0.6, closed=True).reshape(-1, 2)
        steps = np.diff(points, axis=0)
        start = f"M{points[0, 0]}.5 {points[0, 1]}.5"
        # A single pixel still gets a dot: a closed line of no length with round caps.
        parts.append(start + "".join(f"l{x} {y}" for x, y in steps) + "z")
    return "".join(parts)


def report_html(category: Category) -> str:
    """The page of one category, which has a tile for each scored image."""
    evaluation, model = category.evaluation, category.about
    types = {row.sample.defect_type for row in evaluation.scored}
    refused = [
        # The name stands beside the reason, so the path before it goes.
        {"name": row.sample.name, "reason": row.reason.removeprefix(f"{row.sample.path}: ")}
        for row in evaluation.scored
        if row.score is None
    ]
    numbers = f"{evaluation.n_good} good and {evaluation.n_defect} defective test images"
    good = [score for row, score in evaluation.usable if not (row.reason or row.sample.is_defect)]
    trained = category.training.get("time")
    provenance = {
        "evaluated": category.date,
        "data in": category.data_folder,
        "model in": model.folder,
        "trained": trained and shown_time(trained),
    }
    data = {
        "labelled": True,
        # The list of weaknesses says so where a promise isn't kept.
        "promise": promise_shown(model, good, all_good=True),
        "provenance": [(label, text) for label, text in provenance.items() if text],
        "types": sorted(types, key=lambda name: (name != GOOD, name)),
        "good": GOOD,
        "images": [
            {
                "name": row.sample.name,
                "type": row.sample.defect_type,
                "defect": row.sample.is_defect,
                "score": row.score,
                "sha256": row.sha256,
                "odd": row.reason,
                **category.tiles[index],
            }
            for index, row in enumerate(evaluation.scored)
            if row.score is not None
        ],
        "refused": {"rows": refused, "count": len(refused)},
        "figures": list(_figures(category)),
        "weaknesses": [asdict(weakness) for weakness in category.weaknesses],
        "by_type": list(_by_type(evaluation)),
        "glossary": glossary(),
    }
    title = f"{category.name} – inspection report"
    notes = list(filter(None, [optimism_warning(evaluation)]))
    return model_page(category.name, model, title, numbers, _facts(category), data, notes)


def _figures(category: Category) -> Iterator[dict[str, Any]]:
    """The page's head: escapes, false rejects, and figures or reasons why they are undefined."""
    metrics = category.evaluation.metrics
    if counts := category.verdicts:
        for label, key, wrong, total in (
            ("Escapes", "escapes", counts.escapes, counts.defective.total),
            ("False rejects", "false_rejects", counts.false_rejects, counts.good.total),
        ):
            if rate := _rate(wrong, total):
                yield {"label": label, "key": key, **rate, "value": f"{wrong} of {total}"}
    for key, label in FIGURES.items():
        # No rows for pixel figures of a data set without masks.
        if key in metrics.values and metrics.reasons.get(key) not in (NO_MASKS, NO_DEFECT_MASKS):
            yield {
                "label": label,
                "key": key,
                "value": metrics.values[key],
                "interval": category.evaluation.intervals.get(key),
                "reason": metrics.reasons.get(key, ""),
            }


def _by_type(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    types = [row.sample.defect_type for row, _ in evaluation.usable]
    for name, metrics in evaluation.by_type.items():
        images = types.count(name)
        yield {"type": name, "images": images, **metrics.values, "reasons": metrics.reasons}


def _facts(category: Category) -> dict[str, dict[str, Any]]:
    """Tables of names and values for the model's part of the page, by title."""
    training = category.training
    settings = dict(category.about.settings)
    # Hashes of the images that `tune` used; people need their number only.
    if chosen_by := settings.get("chosen_by"):
        settings["chosen_by"] = f"{len(chosen_by)} images"
    trained = {
        "model id": category.about.model_id,
        "images": training.get("images", {}).get("learned"),
        "patches": training.get("patches"),
        "memory bank vectors": training.get("bank_vectors"),
        "seconds": training.get("seconds", {}).get("total"),
    }
    measured = {"anomaly": __version__, "engine": category.about.engine}
    return {"Settings": settings, "Training": trained, "Evaluation": measured}


def optimism_warning(evaluation: Evaluation) -> str:
    """A warning that test images were used to choose settings or thresholds; empty if none were."""
    limits = evaluation.thresholds
    images = len(evaluation.scored)
    notes = []
    if count := evaluation.n_settings_images:
        notes.append(
            f"{count} of {images} test images were used to choose the settings (tune), so figures "
            "are slightly better than on new parts; test with other images (--good, --defects)"
        )
    if count := evaluation.n_threshold_images:
        notes.append(
            f"{count} of {images} test images were used to choose the thresholds, so verdicts are "
            "better here than on new parts"
        )
    # By hand: nothing records the images that somebody looked at.
    if not notes and limits is not None and limits.label == "by hand":
        notes = [
            "the thresholds were set by hand: if they were chosen by these test images, verdicts "
            "are better here than on new parts"
        ]
    return ". ".join(notes)


@cache
def glossary() -> dict[str, str]:
    """The meaning of each figure, by its key, for people."""
    return dict(json.loads(asset("glossary.json")))


def metrics_json(evaluations: Sequence[Evaluation]) -> str:
    """`{"categories": {name: figures}, "mean": figures}`; docs/outputs.md describes the figures.

    An undefined figure is null, its reason is under `undefined`, and the mean leaves it out.
    """
    categories = {e.name: _category(e) for e in evaluations}
    return as_json(_rounded({"categories": categories, "mean": _mean(evaluations)}))


def _rounded(value: Any) -> Any:
    """A JSON value with numbers of nine digits: float32 has no more (1, not 0.99999999999)."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.9g}"))


def scores_csv(evaluations: Sequence[Evaluation]) -> str:
    """A row for each test image (one at least); docs/outputs.md describes the columns."""
    rows = [_score_row(e, image) for e in evaluations for image in e.scored]
    return csv_text([rows[0].keys(), *(row.values() for row in rows)])


def _score_row(evaluation: Evaluation, image: Scored) -> dict[str, object]:
    """The columns of one test image in scores.csv."""
    score, limits = image.score, evaluation.thresholds
    return {
        "category": evaluation.name,
        "path": image.sample.name,
        "defect_type": image.sample.defect_type,
        "is_defect": int(image.sample.is_defect),
        "image_score": score,
        "calibrated_score": None if score is None or limits is None else limits.calibrated(score),
        "review_threshold": limits and limits.review,
        "threshold": limits and limits.image,
        "verdict": image.verdict(limits),
        "reason": image.reason,
        "image_sha256": image.sha256,
    }


def passed_in_evaluation(scores: str, thresholds: Thresholds) -> str:
    """A line on the defects that passed in an evaluation; empty if it had other thresholds.

    Args:
        scores: content of the evaluation's scores.csv.
        thresholds: the model's present thresholds.

    Raises:
        ValueError: the text isn't such a table.
        KeyError: columns are missing.
    """
    header, *lines = csv_rows(scores)
    # As text: `csv_text` writes numbers by `repr`, whose digits are exact.
    limits = [repr(thresholds.review), repr(thresholds.image)]
    verdicts = [
        row["verdict"]
        for row in (dict(zip(header, line, strict=True)) for line in lines)
        if row["is_defect"] == "1" and row["verdict"]
        if [row["review_threshold"], row["threshold"]] == limits
    ]
    if not verdicts:
        return ""
    passed = f"{verdicts.count('good')} of {counted(len(verdicts), 'defect')}"
    return f"in evaluation, {passed} passed as good at these thresholds"


def table(evaluations: Sequence[Evaluation]) -> str:
    """The figures for people: one line a category, and their mean."""
    figures = [e.metrics.values for e in evaluations]
    columns = [name for name in _ON_SCREEN if any(f.get(name) is not None for f in figures)]
    header = ["", "good", "defect", *(FIGURES[name] for name in columns)]
    lines = [
        [e.name, str(e.n_good), str(e.n_defect), *(_shown(f.get(name)) for name in columns)]
        for e, f in zip(evaluations, figures, strict=True)
    ]
    if len(evaluations) > 1:
        means = _mean(evaluations)
        lines.append(["mean", "", "", *(_shown(means.get(name)) for name in columns)])
    head, *texts = text_table([header, *lines])
    return "\n".join([head, "─" * len(head), *texts])


def at_thresholds(name: str, counts: Confusion) -> str:
    """Verdicts on test images at a model's own thresholds, in one line."""
    good, bad = counts.good, counts.defective
    clauses = [f"of {good.total} good ones {good.reject} rejected and {good.review} to review"]
    if bad.total:
        clauses.append(
            f"of {bad.total} defective ones {bad.reject} rejected, {bad.review} to review, "
            f"{bad.good} called good (escapes)"
        )
    return f"{name} at its thresholds: {'; '.join(clauses)}"


def undefined_figures(evaluations: Sequence[Evaluation]) -> list[str]:
    """Reasons for missing figures, one line for each reason of each category."""
    lines = []
    for e in evaluations:
        for reason in dict.fromkeys(e.metrics.reasons.values()):  # each once, in order
            missing = [key for key, cause in e.metrics.reasons.items() if cause == reason]
            text = f"{', '.join(missing)} undefined"
            if reason in (NO_MASKS, NO_DEFECT_MASKS):
                text = "no pixel figures"
            lines.append(f"{e.name}: {text}: {reason}")
    return lines


def _category(evaluation: Evaluation) -> dict[str, Any]:
    """The entry of one category in metrics.json."""
    metrics, counts = evaluation.metrics, evaluation.verdicts
    missing = {} if counts else {"verdicts": "the model has no thresholds"}
    return {
        **metrics.values,
        "n_good": evaluation.n_good,
        "n_defect": evaluation.n_defect,
        "n_threshold_images": evaluation.n_threshold_images,
        "n_not_scored": len(evaluation.scored) - evaluation.n_good - evaluation.n_defect,
        "n_settings_images": evaluation.n_settings_images,
        "undefined": metrics.reasons | missing,
        "intervals": evaluation.intervals,
        "by_type": {
            name: {**metrics.values, "undefined": metrics.reasons}
            for name, metrics in evaluation.by_type.items()
        },
        "verdicts": counts and _verdicts(counts),
    }


def _verdicts(counts: Confusion) -> dict[str, Any]:
    """Counts and rates of verdicts, as in metrics.json."""
    return {
        "false_rejects": counts.false_rejects,
        "good_to_review": counts.good.review,
        "escapes": counts.escapes,
        "caught": counts.caught,
        "false_reject_rate": _rate(counts.false_rejects, counts.good.total),
        "good_to_review_rate": _rate(counts.good.review, counts.good.total),
        "escape_rate": _rate(counts.escapes, counts.defective.total),
        **asdict(counts),
    }


def _rate(count: int, images: int) -> dict[str, Any] | None:
    """A share with its Clopper–Pearson interval; None without images."""
    # The interval holds since thresholds are chosen without the test images.
    if not images:
        return None
    rate = rate_of(count, images, count / images)
    return {"value": rate.expected, "interval": (rate.low, rate.high)}


def _mean(evaluations: Sequence[Evaluation]) -> dict[str, float | None]:
    """Each figure's mean over the evaluations that define it; None where none does."""
    means: dict[str, float | None] = {}
    for key in dict.fromkeys(key for e in evaluations for key in e.metrics.values):
        values = [v for e in evaluations if (v := e.metrics.values.get(key)) is not None]
        means[key] = sum(values) / len(values) if values else None
    return means


def _shown(value: float | None) -> str:
    """A figure with four decimals, or a dash where it is undefined."""
    return "–" if value is None else f"{value:.4f}"
