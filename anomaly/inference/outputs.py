"""What a run of `infer` writes into its folder; a run over a list of files. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from anomaly.errors import OutputError
from anomaly.files.writing import (
    FOLDERS,
    HEATMAPS,
    INFER,
    JOURNAL,
    MAPS,
    MASKS,
    WATCHED,
    claim,
    clear,
    remove_drafts,
    write,
)
from anomaly.imaging.read import Image
from anomaly.maps.anomaly_map import (
    MarkedRegion,
    SourceMap,
    marked_regions,
    outlined_areas,
    predicted_mask,
)
from anomaly.maps.heatmap import Thumbnail, encode_float32, encode_png, heatmap, shrunk, thumbnail
from anomaly.runtime import __version__

if TYPE_CHECKING:
    from anomaly.scoring.model import Model
    from anomaly.scoring.prediction import Prediction


@dataclass(frozen=True)
class Outputs:
    """The folder of a run, and what the run writes there, by the options of `anomaly infer`.

    Attributes:
        folder: the output folder.
        kinds: any of `heatmaps` or `flagged-heatmaps` (of images not called good), `page`
            (results.html), `masks` (marked areas as PNG), `regions` (regions.csv) and `maps`
            (anomaly maps as TIFF).
    """

    folder: Path
    kinds: Set[str] = frozenset({"heatmaps", "page"})

    def begin(self, *, watch: bool, resume: bool, overwrite: bool) -> bool:
        """Check that a run can use the folder; deletes nothing.

        Args:
            watch: the run follows folders.
            resume: continue an earlier run there.
            overwrite: let `clear` delete an earlier run.

        Returns:
            Whether a run over a list of files is complete already.

        Raises:
            OutputError: the folder holds another run, without `resume` or `overwrite`, or it
                can't be written to.
        """
        unfinished, watched = ((self.folder / name).exists() for name in (JOURNAL, WATCHED))
        here, other = (watched, unfinished) if watch else (unfinished, watched)
        if other and not overwrite:
            how = "without --watch" if watch else "with --watch"
            raise OutputError(
                f"{self.folder} holds an interrupted run {how}; resume it {how}, give another "
                "--output, or add --overwrite to start again"
            )
        if here and not (resume or overwrite):
            raise OutputError(
                f"{self.folder} holds an earlier run; add --resume to continue it, --overwrite to "
                "start again, or give another --output"
            )
        complete = not (watch or here) and resume and (self.folder / "results.csv").exists()
        claim(self.folder, () if resume and (here or complete) else INFER, overwrite=overwrite)
        remove_drafts(self.folder, FOLDERS)
        return complete

    def clear(self, model: Model) -> None:
        """Delete an earlier run's files, unless `pictures` raises."""
        self.pictures(model)
        clear(self.folder, INFER)

    def about(self, model: Model, inputs: Mapping[str, object]) -> dict[str, object]:
        """What the rows of a run depend on.

        Args:
            model: scores the images.
            inputs: names the images.
        """
        outputs = sorted(self.kinds - {"page"})
        return {**inputs, **about_model(model), "set of outputs": outputs}

    def pictures(self, model: Model, small: int = 0) -> PictureWriter:
        """The writer of each image's pictures.

        Args:
            model: scores the images.
            small: most pixels of small heatmaps.

        Raises:
            OutputError: the model has no thresholds, which some pictures need.
        """
        needing = self.kinds & {"flagged-heatmaps", "masks", "regions"}
        if needing and model.thresholds is None:
            raise OutputError(
                f"--write {' '.join(sorted(needing))}: the model has no thresholds; train it "
                "without --no-calibrate"
            )
        return replace(PictureWriter.of(model, small), output=self.folder, full_size=False)

    def has_heatmap(self, verdict: str) -> bool:
        """True if an image with a verdict, empty for none, gets a heatmap."""
        return "heatmaps" in self.kinds or ("flagged-heatmaps" in self.kinds and verdict != "good")

    def wanted(self, prediction: Prediction, name: str) -> Wanted:
        """The pictures of one image.

        Args:
            prediction: of the image.
            name: the path of the pictures in their folders.
        """
        kinds = self.kinds & {"regions", "maps"}
        if "masks" in self.kinds:
            kinds |= {"mask"}
        if self.has_heatmap(prediction.verdict):
            kinds |= {"heatmap", "small"} if "page" in self.kinds else {"heatmap"}
        return Wanted(kinds, name, prediction.verdict == "reject")

    def holds_picture(self, name: str) -> bool:
        """True if any picture of a name is in the folder."""
        map_name = PurePosixPath(name).with_suffix(".tiff")
        files = (HEATMAPS, name), (MASKS, name), (MAPS, map_name)
        return any((self.folder / place / file).exists() for place, file in files)


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
class Wanted:
    """The pictures to draw of one image.

    Attributes:
        kinds: any of `heatmap`, `small` (a small heatmap), `mask`, `regions` and `maps`.
        name: the path of the pictures in their folders.
        rejected: whether the image's verdict is `reject`.
    """

    kinds: Set[str]
    name: str = ""
    rejected: bool = False


@dataclass(frozen=True)
class Pictures:
    """The pictures of one image that aren't in files.

    Attributes:
        heatmap: PNG; empty if not wanted, or written.
        mask: PNG; likewise.
        regions: the marked regions, if wanted.
        small: a small copy of the heatmap, if wanted.
    """

    heatmap: bytes = b""
    mask: bytes = b""
    regions: tuple[MarkedRegion, ...] = ()
    small: Thumbnail | None = None


@dataclass(frozen=True)
class PictureWriter:
    """Draws an image's pictures.

    Attributes:
        limit: the anomaly map's value where marking starts; None takes the image's own highest
            patch score, for models without thresholds.
        review: a lower value, which a heatmap outlines fainter; None for none.
        small: most pixels of a small heatmap.
        output: the folder for folders of heatmaps, masks and maps; None to hand them back.
        full_size: heatmaps of the image's own size, not at most twice the network's input.
    """

    limit: float | None = None
    review: float | None = None
    small: int = 0
    output: Path | None = None
    full_size: bool = True

    @classmethod
    def of(cls, model: Model, small: int) -> PictureWriter:
        """The writer of a model's pictures."""
        limits = model.thresholds
        if limits is None:
            return cls(small=small)
        return cls(limits.pixel, limits.review_pixel, small)

    def write(self, image: Image, anomaly_map: SourceMap, wanted: Wanted) -> Pictures:
        """Draw one image's pictures.

        Args:
            image: the decoded file.
            anomaly_map: its anomaly map.
            wanted: what to draw.

        Raises:
            OutputError: the disk is full or not writable.
        """
        kinds, mask = wanted.kinds, b""
        limit = float(np.nanmax(anomaly_map.scores)) if self.limit is None else self.limit
        if self.full_size:
            anomaly_map = anomaly_map.held()
        # A separate method frees a large image's picture before the mask is encoded.
        heatmap, small = self._heatmap(image, anomaly_map, limit, wanted)
        if kinds <= {"heatmap", "small"}:
            return Pictures(heatmap, small=small)
        anomaly_map = anomaly_map.held()
        if "maps" in kinds:
            name = PurePosixPath(wanted.name).with_suffix(".tiff")
            self._put(MAPS, name, encode_float32(anomaly_map()))
        if not kinds & {"mask", "regions"}:
            return Pictures(heatmap, small=small)
        marked = predicted_mask(anomaly_map, limit)
        if "mask" in kinds:
            mask = self._put(MASKS, wanted.name, encode_png(marked))
        regions = marked_regions(marked, anomaly_map) if "regions" in kinds else ()
        return Pictures(heatmap, mask, regions, small)

    def _heatmap(
        self, image: Image, anomaly_map: SourceMap, limit: float, wanted: Wanted
    ) -> tuple[bytes, Thumbnail | None]:
        """The heatmap as PNG, and its small copy."""
        if not wanted.kinds & {"heatmap", "small"}:
            return b"", None
        anomaly_map = (anomaly_map if self.full_size else anomaly_map.shrunk()).held()
        image = shrunk(image, anomaly_map.view.source)
        areas = outlined_areas(anomaly_map, limit, self.review, rejected=wanted.rejected)
        picture = heatmap(image, anomaly_map, limit, areas)
        whole = b""
        if "heatmap" in wanted.kinds:
            whole = self._put(HEATMAPS, wanted.name, encode_png(picture))
        return whole, thumbnail(picture, self.small) if "small" in wanted.kinds else None

    def _put(self, folder: str, name: str | PurePosixPath, data: bytes) -> bytes:
        """Write a file; the bytes themselves where there is no folder for it."""
        if self.output is None:
            return data
        write(self.output / folder / name, data)
        return b""
