"""An explanation of a score -> one page for people, its pictures, and explanation.json."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from anomaly.calibration.rates import percent, rate_above
from anomaly.files.writing import as_json, claim, clear, write
from anomaly.inference.results import RegionRow
from anomaly.maps.heatmap import RgbImage, display, encode_png, jpeg, thumbnail
from anomaly.report import page as pages
from anomaly.runtime import __version__

if TYPE_CHECKING:
    from anomaly.calibration.thresholds import Thresholds
    from anomaly.scoring.model import Prediction

_TITLES = {"good": "Good", "review": "To review", "reject": "Rejected"}
_PIXELS = 1_000_000  # largest number of pixels of a picture on the page
_REGIONS = 4  # regions on the page, as many as have crops; explanation.json has all
_AFFORDABLE = 0.2  # largest share of good parts for review at which a threshold is proposed
FACTS, PAGE = "explanation.json", "explanation.html"


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """Evidence for an image's score, in pictures and figures.

    Attributes:
        prediction: the model's prediction, with the image.
        model: name, id and folder of the model; an empty folder for a model in memory.
        pictures: (H, W, 3) uint8 RGB by name: `score_gradient` (the pixels that move the score) and
            `feature_maps_<layer>` for each hooked layer.
        regions: marked regions, as in regions.csv.
        patches: for each worst patch its place, score, region, and the good patches like it.
        crops: for each worst patch its picture (150, 150, 3), then those of the good patches.
        missing: names of training images that couldn't be shown: moved or changed since training.
    """

    prediction: Prediction
    model: Mapping[str, str]
    pictures: dict[str, RgbImage]
    regions: list[RegionRow]
    patches: list[dict[str, Any]]
    crops: list[list[RgbImage]]
    missing: list[str]

    def __repr__(self) -> str:
        return f"<Explanation of {self.prediction!r}: {', '.join(self.pictures)}>"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for notebooks."""
        return f'<iframe srcdoc="{escape(self.html())}" width="100%" height="900"></iframe>'

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write `explanation.html`, the pictures as PNG files, and `explanation.json`.

        Raises:
            OutputError: the files exist already, or can't be written.
        """
        folder = Path(folder)
        clear(folder, claim_folder(folder, overwrite=overwrite))
        for name, picture in self.pictures.items():
            write(folder / f"{name}.png", encode_png(picture))
        write(folder / PAGE, self.html())
        write(folder / FACTS, as_json(self.facts()))

    def html(self) -> str:
        """The page: verdict, photograph, anomaly map, regions, good patches, next steps.

        It loads nothing from elsewhere and fits on a sheet of A4.
        """
        prediction = self.prediction
        name = prediction.name if prediction.path is None else prediction.path.name
        title = _TITLES.get(prediction.verdict, "No verdict")
        about = f"<bdi>{escape(prediction.name)}</bdi> · explained {pages.utc_now()}"
        lines = "".join(f"<p>{escape(line)}</p>" for line in verdict_lines(prediction))
        content = f"""
<section class="answer {prediction.verdict}"><h2>{title}</h2>{lines}</section>
<div class="pair">{_photograph(self)}{_map(prediction)}</div>
{_regions(self.regions)}
{"".join(_compared(self))}
<h2>What to do next</h2><ul>{"".join(map(_step, next_steps(self)))}</ul>
<p class="soft small">{_model(self)}</p>"""
        return pages.table_page(f"{title}: {name}", name, about, content)

    def facts(self) -> dict[str, Any]:
        """The content of explanation.json: plain values, and the pictures' file names."""
        prediction, limits = self.prediction, self.prediction.thresholds
        of_model = {"threshold": limits.image, "threshold_label": limits.label} if limits else {}
        return {
            "image": prediction.name,
            "model_id": self.model["model id"],
            "image_score": prediction.score,
            "verdict": prediction.verdict,
            "reason": prediction.reason,
            **of_model,
            "regions": list(map(asdict, self.regions)),
            "patches": self.patches,
            "pictures": [f"{name}.png" for name in self.pictures],
            "not_shown": self.missing,
        }


def verdict_lines(prediction: Prediction) -> list[str]:
    """Sentences that compare a prediction's score with the model's thresholds."""
    score, limits = prediction.score, prediction.thresholds
    # The reason comes first: it, not the score, decides the verdict then.
    odd = [f"Reason for a person to look: {prediction.reason}."] if prediction.reason else []
    if limits is None:
        return [f"Score {score:.4g}. The model has no thresholds to compare it with.", *odd]
    shown, review, reject = _distinct(score, limits.review, limits.image)
    borders = f"parts above {reject} are rejected"
    if limits.review < limits.image:
        borders = f"parts above {review} are for a person to look at, {borders}"
    return [*odd, f"Score {shown}; {borders}. {_rarity(score, limits)}"]


def _distinct(*values: float) -> list[str]:
    """Numbers with four significant digits, or more where different numbers would look equal."""
    for digits in range(4, 18):
        texts = [f"{value:.{digits}g}" for value in values]
        if len(set(texts)) == len(set(values)):
            break
    return texts


def _rarity(score: float, limits: Thresholds) -> str:
    """A sentence with the number of the thresholds' good images that score at least as high."""
    count = sum(good >= score for good in limits.good.image)
    scores = "score" if count > 1 else "scores"
    return f"{count or 'None'} of {limits.images} good images {scores} as high."


def _photograph(explanation: Explanation) -> str:
    """HTML of the image with a numbered frame around each marked region."""
    prediction = explanation.prediction
    assert prediction.image is not None
    photo = thumbnail(display(prediction.image), _PIXELS)
    scale = photo.size[0] / photo.source[0]
    font = 0.05 * max(photo.size)
    marks = ""
    for region in explanation.regions[:_REGIONS]:
        x, y, width, height = (
            round(side * scale, 1) for side in (region.x, region.y, region.width, region.height)
        )
        top = y - 4 if y > font else y + height + font  # below a frame at the upper border
        marks += f'<rect class="frame" x="{x}" y="{y}" width="{width}" height="{height}"/>'
        marks += f'<text x="{x}" y="{top:.1f}" font-size="{font:.1f}">{region.region}</text>'
    places = ("Nothing is marked", "Framed: the marked place", "Framed: marked places, worst first")
    caption = f"The photograph. {places[min(len(explanation.regions), 2)]}."
    return pages.photograph_html("the photograph", photo.photo, photo.size, caption, marks)


def _map(prediction: Prediction) -> str:
    """HTML of the heatmap, with a legend of its lines."""
    limits = prediction.thresholds
    lines = ""
    if prediction.verdict != "good":
        lines = "White lines surround marked regions, fainter lines regions for review."
    # The image score can exceed its threshold although no pixel exceeds its own.
    if limits is not None and prediction.verdict == "reject" and not prediction.regions:
        lines = (
            "No single place is unusual enough to be marked, but all places together are. A faint "
            "line surrounds the most unusual place."
        )
    if np.isnan(prediction.anomaly_map).any():
        lines += " Darkened: where the network doesn't look."
    small = thumbnail(prediction.heatmap(), _PIXELS)
    caption = f"The anomaly map over it: the brighter, the less like good parts. {lines}"
    return pages.photograph_html("the anomaly map over it", small.photo, small.size, caption)


def _regions(regions: list[RegionRow]) -> str:
    """HTML table of the marked regions' sizes; empty without regions."""
    if not regions:
        return ""
    titles = ["Marked", "Width × height", "Uncertain by one patch", "Area", "Highest value"]
    rows = [
        pages.row_html(str(r.region), [*_sizes(r), f"{r.peak_score:.4g}"])
        for r in regions[:_REGIONS]
    ]
    rest = len(regions) - _REGIONS
    more = f"<p>{rest} more: explanation.json has all.</p>" if rest > 0 else ""
    return pages.table_html(titles, rows) + more


def _sizes(region: RegionRow) -> list[str]:
    """Cells with a region's size, uncertainty and area, in pixels, and in mm if these are known."""
    pixels = [
        f"{region.width} × {region.height} px",
        f"± {region.width_uncertainty:.3g} × {region.height_uncertainty:.3g} px",
        f"{region.area:,} px",
    ]
    if region.area_mm2 is None:
        return pixels
    metric = [
        f"{region.width_mm:.3g} × {region.height_mm:.3g} mm",
        f"± {region.width_uncertainty_mm:.2g} × {region.height_uncertainty_mm:.2g} mm",
        f"{region.area_mm2:,.{'3g' if region.area_mm2 < 100 else '0f'}} mm²",
    ]
    return [f"{mm}<small>{px}</small>" for mm, px in zip(metric, pixels, strict=True)]


def _compared(explanation: Explanation) -> Iterator[str]:
    """HTML: a heading, then a row for each worst patch, with the good patches compared."""
    has_nearest = explanation.prediction.nearest is not None
    good = "the good patches most like it" if has_nearest else "the same place on good parts"
    place = "Each marked place" if explanation.regions else "The most unusual place"
    yield f"<h2>{place} beside {good}</h2>"
    for facts, crops in zip(explanation.patches, explanation.crops, strict=True):
        number = f"{facts['region']}: this image" if facts["region"] else "This image"
        captions = [f"<b>{number}</b><br>score {facts['score']:.4g}"]
        for patch in facts["compared_with"]:
            distance = patch["distance"]
            text = "" if distance is None else f"distance {distance:.4g}<br>"
            captions.append(f"{text}<bdi>{escape(PurePath(patch['image']).name)}</bdi>")
        figures = map(_crop, crops, captions)
        yield f'<div class="crops">{"".join(figures)}</div>'


def _crop(picture: RgbImage, caption: str) -> str:
    """HTML of a crop (H, W, 3), with a caption below it."""
    photo = jpeg(picture[..., ::-1])
    size = picture.shape[1], picture.shape[0]
    return pages.photograph_html("a patch and its surroundings", photo, size, caption)


def next_steps(explanation: Explanation) -> list[tuple[str, str]]:
    """Next steps for the page's reader: a sentence each, and a command or an empty text."""
    prediction, folder = explanation.prediction, explanation.model["folder"] or "RUN"
    image = str(prediction.path or "IMAGE")
    if prediction.thresholds is None:
        command = shlex.join(["anomaly", "calibrate", "--model", folder, "--good", "FOLDER"])
        return [("Find thresholds with good images that the model hasn't learned from:", command)]
    if prediction.reason:
        return [
            ("Look at the part: its photograph is unlike those that the model has learned.", ""),
            ("Check the camera, the light and the part's place; take another photograph.", ""),
        ]
    learn = ("--good", "FOLDER", "--output", "NEW_RUN")
    update = shlex.join(["anomaly", "update", "--model", folder, *learn])
    tune = "anomaly tune --config CONFIG --defects FOLDER"
    if prediction.verdict == "good":
        keep = shlex.join(["anomaly", "explain", image, "--model", folder, "--keep"])
        return [
            _catching_threshold(prediction.score, prediction.thresholds, folder),
            ("Keep it as a known defect, which later versions have to catch:", keep),
            ("Do defects like this pass often? Find settings that catch them:", tune),
        ]
    return [
        ("Look at the part, at what is marked first, and judge it.", ""),
        (
            "Is it defective? Then the verdict is right. Keep the photograph with your known "
            "defects, on which settings can be tuned:",
            tune,
        ),
        (
            "Is it good? Put the photograph into a folder of confirmed good parts, and let the "
            "model learn them:",
            update,
        ),
    ]


def _catching_threshold(score: float, limits: Thresholds, folder: str) -> tuple[str, str]:
    """The next step that lowers the review threshold until it catches an image.

    Returns:
        A sentence with the threshold and the share of good images above it; the command, empty
        where the share is above 20 %.
    """
    # Five digits, below the score, so that this exceeds the threshold as it is printed.
    step = 10.0 ** (math.floor(math.log10(max(score, 1e-30))) - 4)
    threshold = float(f"{(math.ceil(score / step) - 1) * step:.5g}")
    above = rate_above(limits.good.image, threshold, limits.good.groups)
    text = (
        f"Is it defective? A review threshold of {threshold:.5g} would catch it; of "
        f"{above.images} good images, {above.count} ({percent(above.expected)}, {above.interval} "
        "with 95 % confidence) score higher"
    )
    # So many good parts would go to review that no command is proposed.
    if above.expected > _AFFORDABLE:
        return f"{text}, which is too many.", ""
    limit, review = f"{limits.image:.5g}", f"{threshold:.5g}"
    both = ("--threshold", limit, "--review-threshold", review)
    return f"{text}:", shlex.join(["anomaly", "calibrate", "--model", folder, *both])


def _step(step: tuple[str, str]) -> str:
    """HTML of a next step, from `next_steps`."""
    text, command = map(escape, step)
    return f"<li>{text} <code>{command}</code></li>" if command else f"<li>{text}</li>"


def _model(explanation: Explanation) -> str:
    """HTML line with the model's name, id and folder, the thresholds' origin, and the version."""
    model, limits = explanation.model, explanation.prediction.thresholds
    basis = "" if limits is None else limits.lines()[0]
    parts = [f"Model {model['name']}", model["model id"], model["folder"], basis]
    shown = [f"<bdi>{escape(part)}</bdi>" for part in (*parts, f"anomaly {__version__}") if part]
    return " · ".join(shown)


def claim_folder(folder: Path, *, overwrite: bool) -> list[str]:
    """Make a folder for an explanation if it is missing; refuse one that can't take it.

    Args:
        folder: the folder to write into.
        overwrite: True accepts an earlier explanation there.

    Returns:
        Names of the page's files, and of feature maps that an earlier explanation has written.

    Raises:
        OutputError: the folder holds an explanation already, or can't be written to.
    """
    maps = [file.name for file in folder.glob("feature_maps_*.png")]
    names = [FACTS, PAGE, "score_gradient.png", *maps]
    claim(folder, names, overwrite=overwrite)
    return names
