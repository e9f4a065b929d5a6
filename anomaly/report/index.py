"""Categories -> the folder of an evaluation: a report for each, index.html over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from anomaly.files.writing import claim, clear, write
from anomaly.report.category import Category, Failure, folder_name
from anomaly.report.document import GLOSSARY, report_html, term
from anomaly.report.page import page
from anomaly.report.tables import COLUMNS, mean, metrics_json, on_shared_images, scores_csv
from anomaly.version import __version__

INDEX_FILES = ("index.html", "metrics.json", "scores.csv")
CATEGORY_FILES = ("report.html", "metrics.json", "scores.csv")
_SHARED = (
    "Some of these models were evaluated on the same images, so that there is no mean over them "
    "and no sum of their counts."
)
_STRIP_WIDTH, _STRIP_HEIGHT = 130, 30


def write_report(category: Category, folder: Path, *, overwrite: bool) -> Path:
    """Write one evaluation's report and the index over it; returns the report.

    Raises:
        OutputError: they exist already, or can't be written.
    """
    place = EvaluationFolder(folder, overwrite=overwrite)
    report = place.add(category)
    place.finish([category], [])
    return report


class EvaluationFolder:
    """The folder that `evaluate` writes.

        index.html, metrics.json, scores.csv             over all categories
        <category>/report.html, metrics.json, scores.csv

    Args:
        folder: made if need be.
        overwrite: replace earlier files of these names instead of refusing: those over all
            categories with the first one that is added, a category's with that category.

    Raises:
        OutputError: the folder can't be used, or an earlier evaluation is in it.
    """

    def __init__(self, folder: Path, *, overwrite: bool) -> None:
        claim(folder, INDEX_FILES, overwrite=overwrite)
        self.folder = folder
        self._overwrite = overwrite
        self._reports: dict[str, str] = {}

    def add(self, category: Category) -> Path:
        """Write one category's files; returns its report.

        Raises:
            OutputError: they exist already, or can't be written.
        """
        name = self._free_name(folder_name(category.name))
        folder = self.folder / name
        claim(folder, CATEGORY_FILES, overwrite=self._overwrite)
        if not self._reports:
            clear(self.folder, INDEX_FILES)
        clear(folder, CATEGORY_FILES)
        evaluation = category.evaluation
        write(folder / "metrics.json", metrics_json([evaluation], [category.verdicts]))
        write(folder / "scores.csv", scores_csv([evaluation], [category.thresholds]))
        write(folder / "report.html", report_html(category))
        self._reports[category.name] = f"{name}/report.html"
        return folder / "report.html"

    def finish(self, categories: Sequence[Category], failures: Sequence[Failure]) -> Path:
        """Write what goes over all categories; returns the index."""
        evaluations = [c.evaluation for c in categories]
        verdicts = [c.verdicts for c in categories]
        thresholds = [c.thresholds for c in categories]
        write(self.folder / "metrics.json", metrics_json(evaluations, verdicts))
        write(self.folder / "scores.csv", scores_csv(evaluations, thresholds))
        index = self.folder / "index.html"
        write(index, index_html(categories, failures, self._reports))
        return index

    def _free_name(self, name: str) -> str:
        """The name, or one like it that no other category has, whatever the letters' case."""
        taken = {link.split("/")[0].casefold() for link in self._reports.values()}
        free, number = name, 2
        while free.casefold() in taken:
            free, number = f"{name}-{number}", number + 1
        return free


def index_html(
    categories: Sequence[Category], failures: Sequence[Failure], links: Mapping[str, str]
) -> str:
    """The page over all categories.

    Args:
        categories: in order; their tiles aren't used.
        failures: what couldn't be evaluated.
        links: category name to its report, relative to the index.
    """
    known = {c.name: _published(c) for c in categories}
    head = ["Category", "Good", "Defective"]
    head += [term(key, title) if key in GLOSSARY else escape(title) for title, key in COLUMNS]
    head += ["False rejects", "Escapes", "To review", "Scores"]
    rows = [_row(c, known[c.name], links.get(c.name)) for c in categories]
    shared = on_shared_images([c.evaluation for c in categories])
    if len(categories) > 1 and not shared:
        rows.append(_mean_row(categories, list(known.values())))
    rows += [_failed(f, len(head)) for f in failures]
    kind = "models" if shared else "categories"
    count = f"{len(categories)} of {len(categories) + len(failures)} {kind} evaluated"
    dates = sorted({c.date for c in categories if c.date})[-1:]
    about = " · ".join([count, *dates, f"anomaly {__version__}"])
    body = f"""
<header class="top"><h1>Evaluation</h1>
<p class="soft">{escape(about)}</p></header>
<main class="sheet"><div class="card wide"><table class="overview">
<thead><tr>{"".join(f'<th scope="col">{title}</th>' for title in head)}</tr></thead>
<tbody>{"".join(rows)}</tbody></table></div>
{_notes(list(known.values()), shared=shared)}</main>"""
    return page("Evaluation", body, styles=("base.css", "index.css"))


def _published(category: Category) -> Published | None:
    if not category.own_split:
        return None
    layers = list(category.manifest.get("backbone", {}).get("layers", []))
    return published(category.settings, layers)


def _row(category: Category, paper: Published | None, link: str | None) -> str:
    evaluation = category.evaluation
    name = f"<bdi>{escape(category.name)}</bdi>"
    if link is not None:
        name = f'<a href="{escape(quote(link, errors="replace"))}">{name}</a>'
    if category.data_folder:
        name += f"<small><bdi>{escape(category.data_folder)}</bdi></small>"
    cells = [str(evaluation.n_good), str(evaluation.n_defect)]
    trained_on = str(category.settings.get("data", {}).get("category"))
    for _, key in COLUMNS:
        theirs = paper.figures.get(key, {}).get(trained_on) if paper else None
        cells.append(_figure(evaluation.metrics.values.get(key), theirs))
    verdicts = category.verdicts
    if verdicts is None:
        cells += ["–"] * 3
    else:
        cells.append(_count(verdicts.false_rejects))
        cells.append(_count(verdicts.escapes))
        cells.append(str(verdicts.good.review + verdicts.defective.review))
    cells.append(_strip(category))
    return f'<tr><th scope="row">{name}</th>{"".join(f"<td>{c}</td>" for c in cells)}</tr>'


def _mean_row(categories: Sequence[Category], papers: Sequence[Published | None]) -> str:
    ours = mean([c.evaluation for c in categories])
    complete = {str(c.settings.get("data", {}).get("category")) for c in categories} == set(
        CATEGORIES
    )
    same = papers[0] if complete and all(p is papers[0] for p in papers) else None
    cells = [_figure(ours.get(key), same.mean.get(key) if same else None) for _, key in COLUMNS]
    counts = [c.verdicts for c in categories]
    totals = [
        sum(v.false_rejects for v in counts if v),
        sum(v.escapes for v in counts if v),
        sum(v.good.review + v.defective.review for v in counts if v),
    ]
    good = sum(c.evaluation.n_good for c in categories)
    defective = sum(c.evaluation.n_defect for c in categories)
    cells = [str(good), str(defective), *cells, *map(str, totals), ""]
    listed = "".join(f"<td>{c}</td>" for c in cells)
    return f'<tr class="mean"><th scope="row">Mean, and sum of counts</th>{listed}</tr>'


def _failed(failure: Failure, columns: int) -> str:
    return (
        f'<tr class="failed"><th scope="row"><bdi>{escape(failure.name)}</bdi></th>'
        f'<td colspan="{columns - 1}">not evaluated: {escape(failure.reason)}</td></tr>'
    )


def _figure(ours: float | None, theirs: float | None) -> str:
    shown = "–" if ours is None else f"{ours:.4f}"
    if theirs is None:
        return shown
    difference = "" if ours is None else f" ({ours - theirs:+.3f})"
    return f"{shown}<small>paper {theirs:.3f}{difference}</small>"


def _count(wrong: int) -> str:
    return f'<b class="wrong">{wrong}</b>' if wrong else "0"


def _notes(papers: Sequence[Published | None], *, shared: bool) -> str:
    sources = dict.fromkeys(p.source for p in papers if p)
    lines = [
        *([_SHARED] if shared else []),
        "False rejects, escapes and reviews are counts at each model's own thresholds.",
        "Scores: good parts above the line, defective ones below; the vertical line is the "
        "threshold above which parts are rejected. The mean leaves out what is undefined.",
        *(f"Paper: {source}." for source in sources),
    ]
    return "".join(f'<p class="soft small">{escape(line)}</p>' for line in lines)


def _strip(category: Category) -> str:
    """Every score as a tick, good parts up, defective ones down, and the threshold."""
    rows = [r for r in category.evaluation.scored if r.image_score is not None]
    if not rows:
        return ""
    scores = [float(r.image_score or 0.0) for r in rows]
    limit = None if category.thresholds is None else category.thresholds.image
    marks = [*scores, *([] if limit is None else [limit])]
    low, span = min(marks), max(max(marks) - min(marks), 1e-12)

    def x(score: float) -> float:
        return round(3 + (score - low) / span * (_STRIP_WIDTH - 6), 1)

    middle = _STRIP_HEIGHT / 2
    ticks = {"sound": "", "defect": ""}
    for row, score in zip(rows, scores, strict=True):
        kind, step = ("defect", "v11") if row.sample.is_defect else ("sound", "v-11")
        ticks[kind] += f"M{x(score)} {middle + (1 if kind == 'defect' else -1)}{step}"
    line = "" if limit is None else f'<path class="limit" d="M{x(limit)} 0v{_STRIP_HEIGHT}"/>'
    paths = "".join(f'<path class="{kind}" d="{d}"/>' for kind, d in ticks.items())
    return (
        f'<svg class="strip" width="{_STRIP_WIDTH}" height="{_STRIP_HEIGHT}" role="img" '
        f'aria-label="scores from {low:.4g} to {low + span:.4g}">{paths}{line}</svg>'
    )


CATEGORIES = (
    "bottle", "cable", "capsule", "carpet", "grid", "hazelnut", "leather", "metal_nut", "pill",
    "screw", "tile", "toothbrush", "transistor", "wood", "zipper",
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A setting's published figures, shares from 0 to 1.

    Attributes:
        source: who published them, and how their setting differs from ours.
        figures: metric to category to figure.
        mean: metric to the mean over all fifteen categories.
    """

    source: str
    figures: Mapping[str, Mapping[str, float]]
    mean: Mapping[str, float]


def _listed(*percentages: float) -> dict[str, float]:
    return {name: round(p / 100, 5) for name, p in zip(CATEGORIES, percentages, strict=True)}


_PATCHCORE = (
    "embeddings pooled to 1024 dimensions; ours keep what model.embedding and model.image_score say"
)
PATCHCORE_10 = Published(
    f"PatchCore 10 %, the authors' released models ({_PATCHCORE})",
    {
        "image_auroc": _listed(
            100.0, 99.68, 97.93, 98.60, 97.91, 100.0, 100.0, 99.90, 96.67, 98.77, 99.49, 100.0,
            99.87, 99.12, 99.50,
        ),
        "pixel_auroc": _listed(
            98.48, 98.41, 98.95, 99.05, 98.80, 98.68, 99.29, 98.34, 97.80, 99.52, 95.71, 98.57,
            96.10, 95.08, 98.87,
        ),
    },
    {"image_auroc": 0.9916, "pixel_auroc": 0.9811, "aupro_30": 0.944},
)  # fmt: skip
PATCHCORE_1 = Published(
    f"PatchCore 1 %, Roth et al. 2022 ({_PATCHCORE})",
    {
        "image_auroc": _listed(
            100.0, 99.3, 98.0, 98.0, 98.6, 100.0, 100.0, 99.7, 97.0, 96.4, 99.4, 100.0, 99.9,
            99.2, 99.2,
        ),
        "pixel_auroc": {
            "bottle": 0.985, "grid": 0.986, "metal_nut": 0.984, "screw": 0.992, "zipper": 0.988,
        },
    },
    {"image_auroc": 0.990, "pixel_auroc": 0.980, "aupro_30": 0.931},
)  # fmt: skip
PADIM_550 = Published(
    "PaDiM WR50-Rd550, Defard et al. 2021",
    {
        "pixel_auroc": _listed(
            98.3, 96.7, 98.5, 99.1, 97.3, 98.2, 99.2, 97.2, 95.7, 98.5, 94.1, 98.8, 97.5, 94.9,
            98.5,
        )
    },
    {"image_auroc": 0.953, "pixel_auroc": 0.975, "aupro_30": 0.921},
)  # fmt: skip
PADIM_100 = Published(
    "PaDiM R18-Rd100, Defard et al. 2021",
    {
        "pixel_auroc": _listed(
            98.1, 95.8, 98.3, 98.9, 94.9, 97.7, 99.1, 96.7, 94.7, 97.4, 91.2, 98.7, 97.2, 93.6,
            98.2,
        )
    },
    {"pixel_auroc": 0.967, "aupro_30": 0.901},
)  # fmt: skip


_ALL_THREE = ["layer1", "layer2", "layer3"]
_BANK = {"kind": "patchcore", "coreset_size": None}
_RANDOM = {"kind": "padim", "projection": "random"}
# Figures, network, layers, and the settings of the model that they were published for.
_PUBLISHED_FOR: list[tuple[Published, str, list[str], dict[str, Any]]] = [
    (PATCHCORE_10, "wide_resnet50_2", _ALL_THREE[1:], {**_BANK, "coreset_ratio": 0.1}),
    (PATCHCORE_1, "wide_resnet50_2", _ALL_THREE[1:], {**_BANK, "coreset_ratio": 0.01}),
    (PADIM_550, "wide_resnet50_2", _ALL_THREE, {**_RANDOM, "dimensions": 550}),
    (PADIM_100, "resnet18", _ALL_THREE, {**_RANDOM, "dimensions": 100}),
]


def published(settings: Mapping[str, Any], layers: list[str]) -> Published | None:
    """The figures published for a setting; None where there are none.

    Args:
        settings: a model's config as plain values.
        layers: the layers it hooks.
    """
    data, image, backbone, model = (
        settings.get(k, {}) for k in ("data", "image", "backbone", "model")
    )
    preparation = (image.get("resize"), image.get("crop"), backbone.get("weights"))
    if preparation != (256, 224, "imagenet"):
        return None
    if model.get("smoothing") != 4 or any(
        model.get(key, 0) != 0 for key in ("halo_damping", "border_damping")
    ):
        return None
    if data.get("format") != "mvtec" or image.get("region") or image.get("ignore"):
        return None
    if model.get("kind") == "patchcore" and (
        model.get("embedding") == "sharp" or model.get("spacing_neighbours", 0)
    ):
        return None
    for figures, network, hooked, wanted in _PUBLISHED_FOR:
        as_published = all(model.get(key) == value for key, value in wanted.items())
        if as_published and (backbone.get("name"), layers) == (network, hooked):
            return figures
    return None
