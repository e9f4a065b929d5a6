"""Files in the output folder of `infer`, and the pictures of each image. Imports no torch."""

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
from anomaly.maps.anomaly_map import MarkedRegion, SourceMap, marked_regions, predicted_mask
from anomaly.maps.heatmap import Thumbnail, encode_float32, encode_png, heatmap, shrunk, thumbnail
from anomaly.runtime import __version__

if TYPE_CHECKING:
    from anomaly.scoring.model import Model
    from anomaly.scoring.prediction import Prediction


@dataclass(frozen=True)
class Outputs:
    """The output folder of a run, and the kinds of files written there.

    Attributes:
        folder: the output folder.
        kinds: values of `--write`: `heatmaps` or `flagged-heatmaps` (only of images that aren't
            good), `page` (results.html), `masks` (marked areas as PNG), `regions` (regions.csv)
            and `maps` (anomaly maps as TIFF).
    """

    folder: Path
    kinds: Set[str] = frozenset({"heatmaps", "page"})

    def begin(self, *, watch: bool, resume: bool, overwrite: bool) -> bool:
        """Check that a run can use the folder; deletes nothing.

        Args:
            watch: the run follows folders instead of scoring a list of files.
            resume: continue the earlier run in the folder.
            overwrite: allow `clear` to delete an earlier run.

        Returns:
            True if the earlier run over a list of files is complete already.

        Raises:
            OutputError: the folder holds a run and neither `resume` nor `overwrite` is set, it
                holds a run of the other kind, or it can't be written to.
        """
        # A finished run has deleted its journal, so either file means an interrupted one.
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
        self.pictures(model)  # a refused run mustn't cost the earlier results
        clear(self.folder, INFER)

    def about(self, model: Model, inputs: Mapping[str, object]) -> dict[str, object]:
        """Facts that the rows of a run depend on; a run can be resumed only with the same.

        Args:
            model: the model that scores the images.
            inputs: facts about the images.
        """
        outputs = sorted(self.kinds - {"page"})
        return {**inputs, **about_model(model), "set of outputs": outputs}

    def pictures(self, model: Model, small: int = 0) -> PictureWriter:
        """The writer of the run's pictures.

        Args:
            model: the model that scores the images.
            small: most pixels of a small heatmap.

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
        """True if an image with this verdict (empty without one) gets a heatmap."""
        return "heatmaps" in self.kinds or ("flagged-heatmaps" in self.kinds and verdict != "good")

    def wanted(self, prediction: Prediction, name: str) -> Wanted:
        """The pictures of one image.

        Args:
            prediction: the image's prediction.
            name: path of the pictures inside the folders of heatmaps, masks and maps.
        """
        kinds = self.kinds & {"regions", "maps"}
        if "masks" in self.kinds:
            kinds |= {"mask"}
        if self.has_heatmap(prediction.verdict):
            kinds |= {"heatmap", "small"} if "page" in self.kinds else {"heatmap"}
        return Wanted(kinds, name, prediction.verdict == "reject")

    def holds_picture(self, name: str) -> bool:
        """True if the output folder holds a heatmap, mask or map of this name."""
        map_name = PurePosixPath(name).with_suffix(".tiff")
        files = (HEATMAPS, name), (MASKS, name), (MAPS, map_name)
        return any((self.folder / place / file).exists() for place, file in files)


def about_model(model: Model) -> dict[str, object]:
    """Facts that scores depend on: model, software version, device, engine and precision."""
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
        name: path of the pictures inside the folders of heatmaps, masks and maps.
        rejected: the image's verdict is `reject`.
    """

    kinds: Set[str]
    name: str = ""
    rejected: bool = False


@dataclass(frozen=True)
class Pictures:
    """The pictures and regions of one image that weren't written to files.

    Attributes:
        heatmap: the heatmap as PNG; empty if it isn't wanted or was written to a file.
        mask: the mask as PNG; empty if it isn't wanted or was written to a file.
        regions: the marked regions; empty if they aren't wanted.
        small: a small copy of the heatmap; None if it isn't wanted.
    """

    heatmap: bytes = b""
    mask: bytes = b""
    regions: tuple[MarkedRegion, ...] = ()
    small: Thumbnail | None = None


@dataclass(frozen=True)
class PictureWriter:
    """Draws an image's pictures.

    Attributes:
        limit: the anomaly map's value where marking starts; None for a model without thresholds:
            the image's own highest patch score.
        review: a lower value, where a heatmap's fainter outline starts; None for none.
        small: most pixels of a small heatmap.
        output: parent of the folders of heatmaps, masks and maps; None to return the bytes.
        full_size: draw heatmaps in the image's size, else in at most twice the network input's.
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
            wanted: the pictures to draw.

        Raises:
            OutputError: the disk is full or not writable.
        """
        kinds, mask, regions = wanted.kinds, b"", tuple[MarkedRegion, ...]()
        limit = float(np.nanmax(anomaly_map.scores)) if self.limit is None else self.limit
        if self.full_size or kinds - {"heatmap", "small"}:  # else a reduced map is enough
            anomaly_map = anomaly_map.held()
        # A separate method frees a large image's picture before the mask is encoded.
        heatmap, small = self._heatmap(image, anomaly_map, limit, wanted)
        if "maps" in kinds:
            name = PurePosixPath(wanted.name).with_suffix(".tiff")
            self._put(MAPS, name, encode_float32(anomaly_map()))
        if kinds & {"mask", "regions"}:
            marked = predicted_mask(anomaly_map, limit)
            if "mask" in kinds:
                mask = self._put(MASKS, wanted.name, encode_png(marked))
            if "regions" in kinds:
                regions = marked_regions(marked, anomaly_map)
        return Pictures(heatmap, mask, regions, small)

    def _heatmap(
        self, image: Image, anomaly_map: SourceMap, limit: float, wanted: Wanted
    ) -> tuple[bytes, Thumbnail | None]:
        """The heatmap as PNG, empty if written to a file, and its small copy."""
        if not wanted.kinds & {"heatmap", "small"}:
            return b"", None
        anomaly_map = (anomaly_map if self.full_size else anomaly_map.shrunk()).held()
        image = shrunk(image, anomaly_map.view.source)
        picture = heatmap(image, anomaly_map, limit, self.review, rejected=wanted.rejected)
        whole = b""
        if "heatmap" in wanted.kinds:
            whole = self._put(HEATMAPS, wanted.name, encode_png(picture))
        return whole, thumbnail(picture, self.small) if "small" in wanted.kinds else None

    def _put(self, folder: str, name: str | PurePosixPath, data: bytes) -> bytes:
        """Write a file and return nothing, or return its bytes if there is no output folder."""
        if self.output is None:
            return data
        write(self.output / folder / name, data)
        return b""
