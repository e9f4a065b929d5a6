"""Patches in memory, as fitters take them."""

from collections.abc import Container, Iterable, Iterator

from anomaly.methods.base import PatchBatch, PatchSet


class PatchList(PatchSet):
    """Batches of patches."""

    def __init__(self, batches: Iterable[PatchBatch]) -> None:
        self.batches = list(batches)

    @property
    def count(self) -> int:
        return sum(batch.embeddings[..., 0].numel() for batch in self.batches)

    @property
    def channels(self) -> int:
        return self.batches[0].embeddings.shape[3] if self.batches else 0

    def __iter__(self) -> Iterator[PatchBatch]:
        return iter(self.batches)

    def only(self, images: Container[int]) -> "PatchList":
        kept = []
        for batch in self:
            rows = [row for row, image in enumerate(batch.images) if image in images]
            names = tuple(batch.images[row] for row in rows)
            inside = None if batch.inside is None else batch.inside[rows]
            if rows:
                kept.append(PatchBatch(batch.embeddings[rows], names, inside=inside))
        return type(self)(kept)
