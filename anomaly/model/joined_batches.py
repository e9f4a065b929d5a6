"""Small batches of embeddings -> larger ones of successive images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from anomaly.imaging.geometry import AnyView
from anomaly.model.tensor_file import Piece

Embedded: TypeAlias = tuple[tuple[Piece, ...], Tensor]
"""Pieces of images, and their embeddings (B, h, w, D)."""

# Of what is joined: more images are hardly quicker, and take memory.
_MOST_IMAGES, _MOST_BYTES = 16, 32 * 1024**2


def joined(batches: Iterable[Embedded], views: Mapping[int, AnyView]) -> Iterator[Embedded]:
    """Batches of more images, in the same order.

    A position's Gaussian meets 16 images in the time that it takes for 6.

    Args:
        batches: each of images of one size, all of them turned alike.
        views: how each image became the network's input, by its number.
    """
    held: list[Embedded] = []
    for one in batches:
        images = sum(len(names) for names, _ in [*held, one])
        if held and (images > _most(one) or _kind(held[0], views) != _kind(one, views)):
            yield _in_one(held)
            held = []
        held.append(one)
    if held:
        yield _in_one(held)


def _most(batch: Embedded) -> int:
    """How many images of a batch's size are joined at most."""
    names, embeddings = batch
    most = _MOST_IMAGES
    while most > 1 and most * embeddings.nbytes > _MOST_BYTES * len(names):
        most //= 2
    return most


def _kind(batch: Embedded, views: Mapping[int, AnyView]) -> tuple[object, ...]:
    """What images have in common that share a batch."""
    names, embeddings = batch
    view = views[names[0].image]
    return embeddings.shape[1:], view.size, view.whole, names[0].turn


def _in_one(batches: Sequence[Embedded]) -> Embedded:
    if len(batches) == 1:
        return batches[0]
    names = chain.from_iterable(names for names, _ in batches)
    return tuple(names), torch.cat([embeddings for _, embeddings in batches])
