"""What a run of `infer` writes into its folder; a run over a list of files. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from anomaly.errors import OutputError
from anomaly.files.outputs import (
    FOLDERS,
    HEATMAPS,
    INFER,
    JOURNAL,
    MAPS,
    MASKS,
    SCALE,
    WATCHED,
)
from anomaly.files.writing import claim, clear, remove_drafts, write
from anomaly.imaging.read import Image
from anomaly.inference.journal import RunJournal
from anomaly.inference.rows import (
    Part,
    RegionRow,
    Row,
    as_csv,
    as_jsonl,
    judge_parts,
    region_rows,
)
from anomaly.maps.anomaly_map import SourceMap
from anomaly.maps.encoding import Thumbnail, encode_float32, encode_uint16, thumbnail
from anomaly.maps.heatmap import (
    colour_bar,
    display,
    encode_png,
    heatmap,
    shrunk,
    with_colour_bar,
)
from anomaly.maps.regions import MarkedRegion, marked_regions, outlined_areas, predicted_mask
from anomaly.version import __version__

if TYPE_CHECKING:
    from anomaly.scoring.pipeline import Model


Heatmaps: TypeAlias = Literal["none", "reject", "all"]
MapFiles: TypeAlias = Literal["float32", "uint16"]


@dataclass(frozen=True)
class OutputOptions:
    """What a run writes, by the options of `anomaly infer`.

    Attributes:
        heatmaps: which images have one: none, those not called good, or all.
        side_by_side: heatmaps of image, heatmap and colour bar.
        full_size: heatmaps of the image's own size, not at most twice the network's input.
        masks: whether to write marked areas as PNG.
        regions: whether to write regions.csv.
        maps: how to write anomaly maps, if at all.
        page: whether to write results.html.
    """

    heatmaps: Heatmaps = "all"
    side_by_side: bool = False
    full_size: bool = False
    masks: bool = False
    regions: bool = False
    maps: MapFiles | None = None
    page: bool = True


DEFAULTS = OutputOptions()


@dataclass(frozen=True)
class Outputs:
    """The folder of a run, and its files.

    Attributes:
        folder: the output folder.
        options: what to write.
    """

    folder: Path
    options: OutputOptions = DEFAULTS

    def begin(self, *, resume: bool, overwrite: bool) -> bool:
        """Check that a run over a list of files can use the folder; deletes nothing.

        Args:
            resume: continue an earlier run there.
            overwrite: let `clear` delete an earlier run.

        Returns:
            Whether there is nothing left to resume.

        Raises:
            OutputError: the folder holds another run, without `resume` or `overwrite`, or it
                can't be written to.
        """
        unfinished = (self.folder / JOURNAL).exists()
        if resume and (self.folder / WATCHED).exists():
            raise OutputError(f"{self.folder} holds a run with --watch; resume it with --watch")
        if unfinished and not (resume or overwrite):
            raise OutputError(
                f"{self.folder} holds an interrupted run; add --resume to continue it, "
                f"--overwrite to start again, or give another --output"
            )
        complete = resume and not unfinished and (self.folder / "results.csv").exists()
        claim(self.folder, () if resume else INFER, overwrite=overwrite)
        remove_drafts(self.folder, FOLDERS)
        return complete

    def clear(self, model: Model) -> None:
        """Delete an earlier run's files, unless `pictures` raises."""
        self.pictures(model)
        clear(self.folder, INFER)

    def about(self, model: Model, images: str | None = None) -> dict[str, object]:
        """What the rows of a run depend on.

        Args:
            model: scores the images.
            images: names the list of images; None where there is none.
        """
        options = self.options
        switches = ("side_by_side", "full_size", "masks", "regions")
        names = [name for name in switches if getattr(options, name)]
        listed = {} if images is None else {"list of images": images}
        outputs = [options.heatmaps, *names, *filter(None, [options.maps])]
        return {**listed, **about_model(model), "set of outputs": outputs}

    def pictures(self, model: Model) -> PictureWriter:
        """The writer of each image's pictures.

        Raises:
            OutputError: the model has no thresholds, which some pictures need.
        """
        options = self.options
        by_thresholds = {
            "--masks": options.masks,
            "--regions": options.regions,
            "--maps uint16": options.maps == "uint16",
            "--heatmap reject": options.heatmaps == "reject",
        }
        needing = [name for name, wanted in by_thresholds.items() if wanted]
        if needing and model.thresholds is None:
            raise OutputError(
                f"{', '.join(needing)}: the model has no thresholds; train it without "
                "--no-calibrate"
            )
        return PictureWriter(self.folder, options, model.unit)

    def write_scale(self, model: Model) -> None:
        """Write the heatmaps' colour bar.

        Raises:
            OutputError: the disk is full or not writable.
        """
        thresholds = model.thresholds
        if thresholds is not None and self.options.heatmaps != "none":
            bar = colour_bar(480, thresholds.pixel, model.unit, thresholds.review_pixel)
            write(self.folder / SCALE, encode_png(bar))

    def write_tables(
        self, journal: RunJournal, groups: Mapping[str, str], mm_per_pixel: float | None
    ) -> None:
        """Write the tables of a run; none if no image is finished.

        Args:
            journal: of the finished images.
            groups: the part of each image, by its path.
            mm_per_pixel: for the table of regions; None if unknown.

        Raises:
            OutputError: the disk is full or not writable.
        """
        rows = journal.rows()
        if not rows:
            return
        write(self.folder / "results.csv", as_csv(rows, Row))
        write(self.folder / "results.jsonl", as_jsonl(rows))
        if self.options.regions:
            regions = [
                region
                for image in journal.in_order()
                for region in region_rows(image.row.path, image.regions, mm_per_pixel)
            ]
            write(self.folder / "regions.csv", as_csv(regions, RegionRow))
        if groups:
            write(self.folder / "parts.csv", as_csv(judge_parts(rows, groups), Part))


def about_model(model: Model) -> dict[str, object]:
    """Facts that scores depend on: model, versions, device, engine, precision."""
    return {
        "model": model.model_id,
        "software version": __version__,
        "device": str(model.device),
        "engine": model.extractor.engine,
        "precision": model.extractor.precision,
    }


@dataclass(frozen=True)
class RenderOptions:
    """What a heatmap shows, and where marking starts.

    Attributes:
        heatmap: whether there is to be one.
        verdict: `good`, `review` or `reject`; empty without thresholds.
        score: the image score.
        times: the score in multiples of the reject threshold; None without thresholds.
        small: pixels that a small copy of it may have; 0 for no copy.
        limit: the anomaly map's value where marking starts; None takes the image's own highest
            patch score, for models without thresholds: they have no masks, regions or 16-bit maps.
        review: a lower value, which a heatmap outlines fainter; None for none.
    """

    heatmap: bool = True
    verdict: str = ""
    score: float = math.nan
    times: float | None = None
    small: int = 0
    limit: float | None = None
    review: float | None = None


PLAIN = RenderOptions()


@dataclass(frozen=True)
class RenderResult:
    """Results of writing an image's pictures.

    Attributes:
        regions: the marked regions, if wanted.
        small: the small copy of the heatmap, if wanted.
    """

    regions: tuple[MarkedRegion, ...] = ()
    small: Thumbnail | None = None


@dataclass(frozen=True)
class PictureWriter:
    """Writes an image's pictures.

    Attributes:
        output: the folder for folders of heatmaps, masks and maps.
        options: what to write; `RenderOptions` decides on the heatmap.
        unit: of the scores.
    """

    output: Path
    options: OutputOptions = DEFAULTS
    unit: str = ""

    def write(
        self, image: Image, anomaly_map: SourceMap, name: str, render: RenderOptions = PLAIN
    ) -> RenderResult:
        """Write one image's files.

        Args:
            image: the decoded file.
            anomaly_map: its anomaly map.
            name: the path of the pictures in their folders.
            render: what the heatmap shows.

        Returns:
            The marked regions and a small heatmap, if wanted.

        Raises:
            OutputError: the disk is full or not writable.
        """
        options = self.options
        limit = float(np.nanmax(anomaly_map.scores)) if render.limit is None else render.limit
        # A separate method frees a large image's picture before the mask is encoded.
        small = self._write_heatmap(image, anomaly_map, limit, name, render)
        if not (options.masks or options.regions or options.maps):
            return RenderResult(small=small)
        anomaly_map = anomaly_map.held()
        if options.maps == "uint16":
            write(self.output / MAPS / name, encode_uint16(anomaly_map, image.size, limit))
        elif options.maps == "float32":
            file = self.output / MAPS / PurePosixPath(name).with_suffix(".tiff")
            write(file, encode_float32(anomaly_map()))
        if not (options.masks or options.regions):
            return RenderResult(small=small)
        mask = predicted_mask(anomaly_map, limit)
        if options.masks:
            write(self.output / MASKS / name, encode_png(mask))
        return RenderResult(marked_regions(mask, anomaly_map) if options.regions else (), small)

    def _write_heatmap(
        self,
        image: Image,
        anomaly_map: SourceMap,
        limit: float,
        name: str,
        render: RenderOptions,
    ) -> Thumbnail | None:
        if not render.heatmap:
            return None
        anomaly_map = (anomaly_map if self.options.full_size else anomaly_map.shrunk()).held()
        image = shrunk(image, anomaly_map.view.source)
        rejected = render.verdict == "reject"
        areas = outlined_areas(anomaly_map, limit, render.review, rejected=rejected)
        picture = heatmap(image, anomaly_map, limit, areas)
        if self.options.side_by_side:
            caption = _caption(render)
            picture = with_colour_bar(
                display(image), picture, limit, self.unit, render.review, caption
            )
        write(self.output / HEATMAPS / name, encode_png(picture))
        return thumbnail(picture, render.small) if render.small else None


def _caption(render: RenderOptions) -> str:
    caption = f"score {render.score:.4g}"
    if render.times is not None:
        caption += f" = {render.times:.2f} x the reject threshold"
    return f"{render.verdict}: {caption}" if render.verdict else caption


def picture_exists(output: Path, name: str) -> bool:
    """Whether any picture of a name is in an output folder."""
    map_name = PurePosixPath(name).with_suffix(".tiff")
    files = (HEATMAPS, name), (MASKS, name), (MAPS, name), (MAPS, map_name)
    return any((output / folder / file).exists() for folder, file in files)
