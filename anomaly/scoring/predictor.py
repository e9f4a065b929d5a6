"""Predictor: images -> predictions, whole or tile by tile, by one model or by several."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast, overload

import numpy as np

from anomaly.errors import DataError, ImageError
from anomaly.imaging.array_input import ArrayFormat, AxisOrder, Channels, ImageLike, is_one, sources
from anomaly.imaging.decoder_pool import Decoders, load_shared
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.geometry import Tiling
from anomaly.imaging.loading import (
    NetworkInput,
    UnusableImage,
    by_shape,
    drop_outside_region,
    to_unusable,
)
from anomaly.imaging.read import Image
from anomaly.runtime.parallel import in_parallel
from anomaly.runtime.threads import apply_thread_limit
from anomaly.scoring.image_statistics import Appearance
from anomaly.scoring.prediction import Patches, Prediction

if TYPE_CHECKING:
    pass
    from anomaly.scoring.pipeline import Model


_TILES_AT_ONCE = 4

# Patches and image scores of some tiles, by product.
_Found: TypeAlias = dict[str, tuple[list[Patches], list[float]]]


def score_tiles(predictor: Predictor, item: NetworkInput) -> Prediction:
    """Score one large image.

    Which product it is shows once all its tiles have been seen, so every model scores them all.

    Args:
        predictor: has the models.
        item: the image, not rendered yet.
    """

    def scored(
        batch: list[NetworkInput],
    ) -> tuple[list[NetworkInput], Sequence[Appearance], _Found]:
        with predictor.lead.embedder.inference_mode():
            embedded = predictor.lead.embedded(batch)
            layout = batch[0].layout
            found = {p: model.patches_of(embedded, layout) for p, model in predictor.models.items()}
        return batch, embedded.looks, found

    rows, columns = (len(pieces) for pieces in item.view.axes)
    mosaics = {product: _Mosaic(rows, columns) for product in predictor.models}
    whole: Appearance | None = None
    # Tiles are many and large: smaller batches keep what is in memory small.
    tiles = item.tiles(min(predictor.batch_size, _TILES_AT_ONCE))
    for batch, looks, found in in_parallel(scored, tiles, predictor.lead.device):
        for look in looks:
            whole = look if whole is None else whole + look
        for product, (patches, scores) in found.items():
            mosaics[product].put(batch, patches, scores)
    assert whole is not None
    product, reason = predictor.product_of(whole)
    model, mosaic = predictor.models[product], mosaics[product]
    return model.prediction(item, whole, mosaic.patches, mosaic.best, product, reason)


class _Mosaic:
    """The patches of a large image, put together from those of its tiles.

    Args:
        rows: of tiles.
        columns: of tiles.

    Attributes:
        best: the highest image score of a tile; NaN once one of them is.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self._times = (rows, columns)
        self._patches: Patches | None = None
        self.best = -math.inf

    @property
    def patches(self) -> Patches:
        """Of the whole image, once its tiles have been put in."""
        assert self._patches is not None
        return self._patches

    def put(
        self, tiles: Sequence[NetworkInput], patches: Sequence[Patches], scores: Sequence[float]
    ) -> None:
        """Fill in some tiles."""
        self.best = float(np.max([self.best, *scores]))  # NaN stays NaN
        for tile, part in zip(tiles, patches, strict=True):
            whole = self._patches = self._patches or self._room(part)
            height, width = part.scores.shape
            row, column = tile.tile
            here = np.s_[row * height : (row + 1) * height, column * width : (column + 1) * width]
            whole.scores[here] = part.scores
            if whole.nearest is not None and part.nearest is not None:
                whole.nearest[here] = part.nearest

    def _room(self, part: Patches) -> Patches:
        nearest = None if part.nearest is None else np.tile(part.nearest, self._times)
        return Patches(np.tile(part.scores, self._times), nearest)


log = logging.getLogger(__name__)


class Predictor:
    """What makes predictions: one model, or several that share what the backbone makes of images.

    An image goes through the backbone once. A subclass says which models there are, and which of
    them scores an image that looks as this one does. Nothing in it changes while it runs, so
    threads may share it.
    """

    @property
    def models(self) -> Mapping[str, Model]:
        """The models that may score an image, by product; a single one by an empty name."""
        raise NotImplementedError

    def product_of(self, look: Appearance) -> tuple[str, str]:
        """The product that an image shows, whose model scores it.

        Args:
            look: the image as a whole.

        Returns:
            The product, a key of `models`; and why a person has to look at the image, whatever its
            score, empty where there is no reason.
        """
        raise NotImplementedError

    @property
    def lead(self) -> Model:
        """One of the models, for what all of them share: backbone, image settings, device."""
        return next(iter(self.models.values()))

    @property
    def batch_size(self) -> int:
        """Images that go through the network together, unless somebody says otherwise."""
        return self.lead.embedder.max_batch_size(self.lead.config.batch_size)

    @property
    def only_product(self) -> str:
        """The product of every image; empty for a single model, and where images are told."""
        return next(iter(self.models)) if len(self.models) == 1 else ""

    def array_format(
        self,
        channels: Channels = "rgb",
        full_scale: float | None = None,
        layout: AxisOrder | None = None,
    ) -> ArrayFormat:
        """How arrays are to be taken as images; what they don't say comes from the config."""
        image = self.lead.config.image
        return ArrayFormat(channels, full_scale, layout, image.bit_depth, image.max_pixels)

    @overload
    def predict(  # type: ignore[overload-overlap]  # a str is a collection, too
        self, images: ImageLike, given: ArrayFormat | None = None
    ) -> Prediction: ...

    @overload
    def predict(
        self, images: Iterable[ImageLike], given: ArrayFormat | None = None
    ) -> list[Prediction]: ...

    def predict(
        self, images: ImageLike | Iterable[ImageLike], given: ArrayFormat | None = None
    ) -> Prediction | list[Prediction]:
        """Score one image, or several; see `anomaly.AnomalyDetector.predict`.

        Raises:
            ImageError: an image can't be used; says which and why.
        """
        if is_one(images):
            (result,) = map(_scored, self.results([images], given))
            return result
        every = map(_scored, self.results(cast(Iterable[ImageLike], images), given))
        return sorted(every, key=lambda one: one.index)

    def results(
        self, images: Iterable[ImageLike], given: ArrayFormat | None = None
    ) -> Iterator[Prediction | UnusableImage]:
        """Score images; one that can't be used has a result, too.

        Args:
            images: files, arrays, PIL images or tensors; read only a few batches ahead of what
                is yielded.
            given: what arrays among them are; by default RGB of the dtype's full scale.

        Yields:
            One result for each image, `UnusableImage` for those that can't be used; in another
            order than the images', as `index` tells.
        """
        given = given or self.array_format()
        loaded = self.fitting(load_shared(sources(images, given), self.lead.loading))
        return self.predict_batches(by_shape(loaded, self.batch_size))

    def score_all(
        self,
        images: Sequence[Path | Image],
        *,
        batch_size: int | None = None,
        workers: int = 2,
        keep_images: bool = False,
    ) -> Iterator[Prediction | UnusableImage]:
        """Score images with decoding processes of their own, and tell of those that can't be used.

        Args:
            images: files, or pixels that are decoded already.
            batch_size: images at once; by default the model's.
            workers: decoding processes.
            keep_images: whether the predictions are to have the decoded images.

        Yields:
            One result for each image, `UnusableImage` for those that can't be used. With images of
            several shapes the order isn't that of `images`; `index` tells.
        """
        task = Task(self.lead.loading, keep_image=keep_images)
        with Decoders(min(workers, len(images)), task) as decoders:
            loaded = self.fitting(decoders.load_all(enumerate(images)))
            yield from self.predict_batches(by_shape(loaded, batch_size or self.batch_size))

    def fitting(
        self, items: Iterable[NetworkInput | UnusableImage]
    ) -> Iterator[NetworkInput | UnusableImage]:
        """Refuse images whose patches all lie outside the region, so that no batch holds any.

        Args:
            items: loaded images; those refused already pass through.
        """
        return drop_outside_region(items, self.lead.embedder.grid, self.lead.region)

    def predict_batches(
        self, batches: Iterable[list[NetworkInput] | UnusableImage]
    ) -> Iterator[Prediction | UnusableImage]:
        """Score loaded images, as `anomaly.imaging.loading.by_shape` gathers them.

        Args:
            batches: images of one network size each, gathered from what `fitting` lets pass.

        Yields:
            One result for each image, in the batches' order.
        """
        apply_thread_limit()
        tiled = self.lead.config.image.tile is not None
        # A large image's tiles go side by side already.
        together = map if tiled else partial(in_parallel, device=self.lead.device)
        for results in together(self._attempt, batches):
            yield from results

    def _attempt(
        self, batch: list[NetworkInput] | UnusableImage
    ) -> Sequence[Prediction | UnusableImage]:
        if isinstance(batch, UnusableImage):
            return [batch]
        try:
            scored = self.score(batch)
        except (ImageError, DataError) as error:
            # A large image that has vanished between two tiles; another grid than PaDiM's.
            return [to_unusable(item.index, item.name, error) for item in batch]
        return [one if math.isfinite(one.score) else _unscored(one) for one in scored]

    def score(self, batch: Sequence[NetworkInput]) -> list[Prediction]:
        """Score loaded images of one network size, or large images in tiles.

        Raises:
            DataError: the region to look at holds none of an image's patches, or the scorer
                doesn't take its grid.
        """
        if isinstance(batch[0].view, Tiling):
            return [score_tiles(self, item) for item in batch]
        done: dict[int, Prediction] = {}
        with self.lead.embedder.inference_mode():
            embedded = self.lead.embedded(batch)
            products = [self.product_of(look) for look in embedded.looks]
            for product in dict.fromkeys(name for name, _ in products):
                places = [place for place, (name, _) in enumerate(products) if name == product]
                model, mine = self.models[product], embedded.only(places)
                every = zip(places, *model.patches_of(mine, batch[0].layout), strict=True)
                for place, patches, score in every:
                    item, look = batch[place], embedded.looks[place]
                    reason = products[place][1]
                    done[place] = model.prediction(item, look, patches, score, product, reason)
        return [done[place] for place in range(len(batch))]


def _unscored(one: Prediction) -> UnusableImage:
    return UnusableImage(
        one.index,
        "failed",
        f"{one.name}: its score isn't a finite number, so the model is damaged or numbers overflow "
        "in its network; try another image, --precision fp32, or train again",
    )


def _scored(result: Prediction | UnusableImage) -> Prediction:
    if isinstance(result, UnusableImage):
        raise ImageError(result.reason, result.status)
    return result
