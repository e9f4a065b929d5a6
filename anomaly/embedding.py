"""Images -> patch embeddings: normalise, hook features, align. Training reads them through here."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from anomaly.aligner import Align
from anomaly.backbones import Normalisation
from anomaly.errors import DataError, OutputError
from anomaly.features import FeatureExtractor
from anomaly.loading import Loaded, Loading, Refused, by_shape, load_all
from anomaly.scorers.base import PatchBatch

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Embedder:
    """The stages between a rendered image and its patch embeddings."""

    extractor: FeatureExtractor
    normalise: Normalisation
    align: Align
    device: torch.device

    def maps(self, batch: Sequence[Loaded]) -> list[Tensor]:
        """Feature maps (B, C_i, h_i, w_i) of images of one size."""
        pixels = torch.from_numpy(np.stack([item.pixels for item in batch]))
        images = pixels.permute(0, 3, 1, 2).to(self.device)  # (B, H, W, 3) is channels_last
        return [m.values for m in self.extractor(self.normalise(images))]

    def __call__(self, batch: Sequence[Loaded]) -> Tensor:
        """Patch embeddings (B, h, w, D) of images of one size."""
        with torch.inference_mode():
            return self.align(self.maps(batch))


class TrainingPatches:
    """The patch embeddings of the training images, batch by batch, as often as wanted.

    The first reading runs the network and, with `spill`, writes the feature maps to a temporary
    file; further readings align them from there. Feature maps before alignment are half the size
    of the embeddings (the coarse layer isn't up-sampled yet), and the same bytes as in the first
    reading, so that a fitter sees the same patches each time.

    Attributes:
        seconds: time spent decoding and in the network, so far.
        refused: files that couldn't be used, after the first reading.
        hashes: sha256 of each file used, by its index, after the first reading.
        count: how many patches one reading gives, after the first one.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        loading: Loading,
        embedder: Embedder,
        *,
        batch_size: int,
        workers: int,
        spill: Path | None,
        progress: Progress,
    ) -> None:
        self._paths = paths
        self._loading = loading
        self._embedder = embedder
        self._batch_size = batch_size
        self._workers = workers
        self._spill = spill
        self._progress = progress
        self._file: IO[bytes] | None = None
        self._written: list[tuple[tuple[int, ...], list[tuple[torch.Size, torch.dtype]]]] = []
        self.seconds = 0.0
        self.refused: list[Refused] = []
        self.hashes: dict[int, str] = {}
        self.count = 0

    def __iter__(self) -> Iterator[PatchBatch]:
        with torch.inference_mode():
            source = self._read_back() if self._file is not None else self._compute()
            count = 0
            for images, maps in source:
                embeddings = self._embedder.align(maps)
                count += embeddings.shape[:3].numel()
                yield PatchBatch(embeddings, images)
            self.count = count

    def close(self) -> None:
        """Delete the temporary file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _compute(self) -> Iterator[tuple[tuple[int, ...], list[Tensor]]]:
        self.refused = []
        # Stays open for the later readings, until `close`.
        file = None if self._spill is None else tempfile.TemporaryFile(dir=self._spill)  # noqa: SIM115
        self._written = []
        done = 0
        started = time.perf_counter()
        loaded = load_all(self._paths, self._loading, self._workers)
        for batch in by_shape(loaded, self._batch_size):
            if isinstance(batch, Refused):
                self.refused.append(batch)
                done += 1
                continue
            images = tuple(item.index for item in batch)
            self.hashes.update((item.index, item.image.sha256) for item in batch)
            maps = self._embedder.maps(batch)
            if file is not None:
                self._write(file, images, maps)
            done += len(images)
            self._progress(done, len(self._paths))
            self.seconds += time.perf_counter() - started
            yield images, maps
            started = time.perf_counter()
        if done == len(self.refused):
            reasons = "\n  ".join(item.reason for item in self.refused[:3])
            raise DataError(f"none of the {done} training images can be used:\n  {reasons}")
        self._file = file

    def _write(self, file: IO[bytes], images: tuple[int, ...], maps: list[Tensor]) -> None:
        try:
            for m in maps:
                file.write(_bytes_of(m).numpy().data)
        except OSError as error:
            raise OutputError(
                f"no room for temporary feature maps in {self._spill} ({error.strerror}); free "
                "some disk space or write to another disk with --output"
            ) from None
        self._written.append((images, [(m.shape, m.dtype) for m in maps]))

    def _read_back(self) -> Iterator[tuple[tuple[int, ...], list[Tensor]]]:
        assert self._file is not None
        self._file.seek(0)
        for images, layout in self._written:
            yield images, [_read_map(self._file, shape, dtype) for shape, dtype in layout]


def _bytes_of(values: Tensor) -> Tensor:
    return values.permute(0, 2, 3, 1).contiguous().cpu().flatten().view(torch.uint8)


def _read_map(file: IO[bytes], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    batch, channels, height, width = shape
    flat = np.fromfile(file, np.uint8, shape.numel() * dtype.itemsize)
    values = torch.from_numpy(flat).view(dtype)
    return values.view(batch, height, width, channels).permute(0, 3, 1, 2)
