"""What a run of `infer` writes into its folder; a run over a list of files. Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from anomaly.datasets.inputs import Found, picture_names
from anomaly.errors import OutputError
from anomaly.files import storage
from anomaly.files.own_outputs import FOLDERS, INFER, JOURNAL, SCALE, SCALES, WATCHED
from anomaly.files.writing import claim, clear, remove_drafts, write
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.inference.artifacts import Pictures
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
from anomaly.inference.run import Inputs, infer
from anomaly.maps.colour_bar import colour_bar
from anomaly.maps.heatmap import encode_png
from anomaly.maps.thumbnails import Thumbnails
from anomaly.version import __version__

if TYPE_CHECKING:
    from anomaly.model.products import AnyModel


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

    def pictures(self, model: AnyModel) -> Pictures:
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
        return Pictures(
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


def infer_files(
    model: AnyModel,
    found: Found,
    folders: Sequence[Path],
    outputs: Outputs,
    journal: RunJournal,
    decoders: Decoders,
    *,
    stopped: Callable[[], bool],
    progress: Callable[[int, int], None],
) -> Thumbnails | None:
    """Score the files of a list that its journal doesn't know yet, and write the tables.

    Args:
        model: says what is good.
        found: the files.
        folders: those that were named; pictures are named by the way from there.
        outputs: what to write, its folder begun.
        journal: of the run.
        decoders: started.
        stopped: asked all the time; the journal then lacks some of the files.
        progress: called with images done in this run, and how many there are to do.

    Returns:
        Small heatmaps for the page, if there is to be one.

    Raises:
        OutputError: results can't be written; those that could are kept, and the run can go on.
    """
    paths = found.paths
    inputs = Inputs(paths, picture_names(paths, folders), outputs.heatmaps)
    thumbnails = Thumbnails(len(paths)) if outputs.page else None
    decoders.begin(Task(model.lead.loading, outputs.pictures(model)))
    failure: OutputError | None = None
    try:
        with journal:
            outputs.write_scale(model)
            infer(
                model,
                inputs,
                journal,
                decoders,
                stopped=stopped,
                progress=progress,
                thumbnails=thumbnails,
            )
    except OutputError as error:
        failure = error
    finally:
        # Whatever stopped the run, the rows that exist are kept.
        try:
            mm_per_pixel = model.lead.config.image.mm_per_pixel
            outputs.write_tables(journal, found.groups, mm_per_pixel)
        except OutputError as error:
            failure = failure or error
    if failure is not None:
        raise _broken_off(failure, len(journal.done), len(paths))
    return thumbnails


def _broken_off(failure: OutputError, done: int, total: int) -> OutputError:
    """What to tell of a run that couldn't write."""
    told = OutputError(
        f"{failure}; {done} of {total} images are done and kept: once that is mended, go on with "
        "--resume"
    )
    told.exit_code = 3 if done else 2
    return told
