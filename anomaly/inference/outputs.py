"""What a run of `infer` writes into its folder; a run over a list of files. Imports no torch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from anomaly.errors import OutputError
from anomaly.files import storage
from anomaly.files.outputs import (
    FOLDERS,
    HEATMAPS,
    INFER,
    JOURNAL,
    MAPS,
    MASKS,
    SCALE,
    SCALES,
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
    as_parquet,
    judge_parts,
    region_rows,
)
from anomaly.maps.anomaly_map import SourceMap
from anomaly.maps.encoding import Thumbnail, encode_float32, encode_uint16, thumbnail
from anomaly.maps.heatmap import RgbImage, colour_bar, display, encode_png, heatmap, with_colour_bar
from anomaly.maps.regions import MARKED, MarkedRegion, marked_regions, outlined_areas
from anomaly.version import __version__

if TYPE_CHECKING:
    from anomaly.scoring.products import AnyModel


Heatmaps: TypeAlias = Literal["none", "reject", "all"]
MapFiles: TypeAlias = Literal["float32", "uint16"]


@dataclass(frozen=True)
class Outputs:
    """What is to be written.

    Attributes:
        folder: where.
        heatmaps: which images have one: none, those not called good, or all.
        side_by_side: heatmaps of image, heatmap and colour bar.
        masks: what is marked, as PNG.
        regions: whether to write regions.csv.
        maps: how to write anomaly maps, if at all.
        parquet: whether to write results.parquet; needs pyarrow.
        page: whether to write results.html.
    """

    folder: Path
    heatmaps: Heatmaps = "all"
    side_by_side: bool = False
    masks: bool = False
    regions: bool = False
    maps: MapFiles | None = None
    parquet: bool = False
    page: bool = True

    def begin(self, *, resume: bool, overwrite: bool) -> bool:
        """See that the folder can take a run over a list of files; nothing there is lost yet.

        Args:
            resume: go on with what an earlier run there has left.
            overwrite: let `clear` delete that.

        Returns:
            Whether there is nothing left to resume.

        Raises:
            OutputError: the folder holds another run, and nothing says what is to become of that;
                it can't be written to; or pyarrow is missing.
        """
        if self.parquet and importlib.util.find_spec("pyarrow") is None:
            raise OutputError("--parquet needs pyarrow: pip install 'anomaly[parquet]'")
        unfinished = (self.folder / JOURNAL).exists()
        if resume and (self.folder / WATCHED).exists():
            raise OutputError(f"{self.folder} holds a run with --watch; resume it with --watch")
        if unfinished and not (resume or overwrite):
            raise OutputError(
                f"{self.folder} holds a run that was broken off; add --resume to go on with it, "
                "--overwrite to start again, or give another --output"
            )
        complete = resume and not unfinished and (self.folder / "results.csv").exists()
        claim(self.folder, () if resume else INFER, overwrite=overwrite)
        remove_drafts(self.folder, FOLDERS)
        return complete

    def clear(self, model: AnyModel) -> None:
        """Delete what an earlier run has left, unless `pictures` raises: a new one can't begin."""
        self.pictures(model)
        clear(self.folder, INFER)

    def about(self, model: AnyModel, images: str | None = None) -> dict[str, object]:
        """What the rows of a run depend on.

        Args:
            model: says what is good.
            images: names the list of images; None where there is none.
        """
        names = [n for n in ("side_by_side", "masks", "regions", "parquet") if getattr(self, n)]
        listed = {} if images is None else {"list of images": images}
        return listed | {
            "model": model.model_id,
            "software version": __version__,
            "device": str(model.lead.device),
            "engine": model.lead.extractor.engine,
            "precision": model.lead.extractor.precision,
            "set of outputs": [self.heatmaps, *names, *([self.maps] if self.maps else [])],
        }

    def pictures(self, model: AnyModel) -> PictureWriter:
        """What is written for each image.

        Raises:
            OutputError: a model has no thresholds, which some of it needs.
        """
        asked = {
            "--masks": self.masks,
            "--regions": self.regions,
            "--maps uint16": self.maps == "uint16",
            "--heatmap reject": self.heatmaps == "reject",
        }
        needing = [name for name, wanted in asked.items() if wanted]
        if needing and not have_thresholds(model):
            raise OutputError(
                f"{', '.join(needing)}: the model has no thresholds; train it without "
                "--no-calibrate"
            )
        return PictureWriter(
            self.folder,
            beside=model.lead.unit if self.side_by_side else None,
            masks=self.masks,
            regions=self.regions,
            maps=self.maps,
        )

    def write_scale(self, model: AnyModel) -> None:
        """Write what the heatmaps' colours mean, once: it is the same for every picture of a model.

        Raises:
            OutputError: no room, no permission.
        """
        several = len(model.models) > 1
        for product, one in model.models.items():
            thresholds = one.thresholds
            if thresholds is not None and self.heatmaps != "none":
                bar = colour_bar(480, thresholds.pixel, one.unit, thresholds.review_pixel)
                place = self.folder / SCALES / f"{product}.png" if several else self.folder / SCALE
                write(place, encode_png(bar))

    def write_tables(
        self, journal: RunJournal, groups: Mapping[str, str], mm_per_pixel: float | None
    ) -> None:
        """Write the tables of a run; none where nothing is finished.

        Args:
            journal: what is finished.
            groups: the part that an image shows, by its path.
            mm_per_pixel: for the table of regions; None where it isn't known.

        Raises:
            OutputError: no room, no permission.
        """
        rows = journal.rows()
        if not rows:
            return
        write(self.folder / "results.csv", as_csv(rows, Row))
        write(self.folder / "results.jsonl", as_jsonl(rows))
        if self.parquet:
            write(self.folder / "results.parquet", as_parquet(rows))
        if self.regions:
            found = [
                region
                for one in journal.in_order()
                for region in region_rows(one.row.path, one.regions, mm_per_pixel)
            ]
            write(self.folder / "regions.csv", as_csv(found, RegionRow))
        if groups:
            write(self.folder / "parts.csv", as_csv(judge_parts(rows, groups), Part))


@dataclass(frozen=True)
class ShardPictures:
    """Which pictures a job's processes write; each of them loads the model itself.

    Attributes:
        heatmaps: which images have one; None for those not called good, or none where the model
            has no thresholds.
        side_by_side: heatmaps of image, heatmap and colour bar.
        masks: what is marked, as PNG.
        maps: how to write anomaly maps, if at all.
    """

    heatmaps: Heatmaps | None = None
    side_by_side: bool = False
    masks: bool = False
    maps: MapFiles | None = None

    def outputs(self, model: AnyModel, dest: str, folder: Path) -> Outputs:
        """What a process writes.

        Args:
            model: says what is good.
            dest: where the job's results go.
            folder: a temporary one, for pictures on their way to object storage.
        """
        return Outputs(
            storage.local(dest) or folder,
            heatmaps=self.heatmaps or ("reject" if have_thresholds(model) else "none"),
            side_by_side=self.side_by_side,
            masks=self.masks,
            maps=self.maps,
        )


def have_thresholds(model: AnyModel) -> bool:
    """Whether all models that may score an image have thresholds."""
    return all(one.thresholds is not None for one in model.models.values())


@dataclass(frozen=True)
class RenderOptions:
    """What a heatmap shows, and where marking starts.

    Attributes:
        heatmap: whether there is to be one.
        verdict: `good`, `review` or `reject`; empty without thresholds.
        score: the image score.
        times: that, in multiples of the reject threshold; None without thresholds.
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
    """What writing the pictures has found.

    Attributes:
        regions: what is marked, where that is wanted.
        small: the small copy of the heatmap, where that is wanted.
    """

    regions: tuple[MarkedRegion, ...] = ()
    small: Thumbnail | None = None


@dataclass(frozen=True)
class PictureWriter:
    """What to write, and where.

    Attributes:
        output: the folder for folders of heatmaps, masks and maps.
        beside: what the scores are, to show image, heatmap and colour bar side by side; None for
            the image under its heatmap alone.
        masks: whether to write predicted masks.
        regions: whether to find the masks' regions.
        maps: how to write anomaly maps, if at all.
    """

    output: Path
    beside: str | None = None
    masks: bool = False
    regions: bool = False
    maps: Literal["float32", "uint16"] | None = None

    def write(
        self, image: Image, found: SourceMap, name: str, options: RenderOptions = PLAIN
    ) -> RenderResult:
        """Write one image's files.

        Args:
            image: the decoded file.
            found: its anomaly map.
            name: the heatmap's path in its folder; the others have the same in theirs.
            options: what the heatmap says of the image.

        Returns:
            The marked regions and a small heatmap, where they are wanted.

        Raises:
            OutputError: no room, no permission.
        """
        if not (options.heatmap or self.masks or self.regions or self.maps):
            return RenderResult()
        found = found.held()
        limit = float(np.nanmax(found.scores)) if options.limit is None else options.limit
        if self.maps == "uint16":
            write(self.output / MAPS / name, encode_uint16(found, image.size, limit))
        elif self.maps == "float32":
            file = self.output / MAPS / PurePosixPath(name).with_suffix(".tiff")
            write(file, encode_float32(found()))
        if not (options.heatmap or self.masks or self.regions):
            return RenderResult()
        rejected = options.verdict == "reject"
        areas = outlined_areas(found, limit, options.review, rejected=rejected)
        # In a method of its own: of a large image the picture is gone before the mask is encoded.
        small = self._write_heatmap(image, found, limit, areas, name, options)
        if not (self.masks or self.regions):
            return RenderResult(small=small)
        mask = np.where(areas == MARKED, areas, np.uint8(0))
        if self.masks:
            write(self.output / MASKS / name, encode_png(mask))
        return RenderResult(marked_regions(mask, found) if self.regions else (), small)

    def _write_heatmap(
        self,
        image: Image,
        found: SourceMap,
        limit: float,
        areas: NDArray[np.uint8],
        name: str,
        options: RenderOptions,
    ) -> Thumbnail | None:
        if not options.heatmap:
            return None
        picture = self._captioned(image, heatmap(image, found, limit, areas), limit, options)
        write(self.output / HEATMAPS / name, encode_png(picture))
        return thumbnail(picture, options.small) if options.small else None

    def _captioned(
        self, image: Image, picture: RgbImage, limit: float, options: RenderOptions
    ) -> RgbImage:
        if self.beside is None:
            return picture
        caption = f"score {options.score:.4g}"
        if options.times is not None:
            caption += f" = {options.times:.2f} x the reject threshold"
        if options.verdict:
            caption = f"{options.verdict}: {caption}"
        return with_colour_bar(display(image), picture, limit, self.beside, options.review, caption)


def picture_exists(output: Path, name: str) -> bool:
    """Whether any picture of a name is in an output folder."""
    map_name = PurePosixPath(name).with_suffix(".tiff")
    files = (HEATMAPS, name), (MASKS, name), (MAPS, name), (MAPS, map_name)
    return any((output / folder / file).exists() for folder, file in files)
