"""Predictor: images -> predictions, whole or tile by tile, by one model or by several products'."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from anomaly.errors import DataError, ImageError, ModelError
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
from anomaly.runtime.devices import check_fork
from anomaly.runtime.parallel import apply_thread_limit, in_parallel
from anomaly.scoring.image_statistics import ImageStatistics, nearest
from anomaly.scoring.prediction import Patches, Prediction

if TYPE_CHECKING:
    from anomaly.scoring.pipeline import Model

# Tiles are large: small batches keep what is in memory small.
_TILES_AT_ONCE = 4

# What makes predictions: one model, or those of several products.
AnyModel: TypeAlias = "Model | ProductSet"


class Predictor:
    """Makes predictions with one model, or with several that share the backbone.

    An image goes through the backbone once. A subclass says which models there are, and which of
    them scores an image. Nothing in it changes while it runs, so
    threads may share it.
    """

    @property
    def models(self) -> Mapping[str, Model]:
        """The models that may score an image, by product; a single one by an empty name."""
        raise NotImplementedError

    def product_of(self, statistics: ImageStatistics) -> tuple[str, str]:
        """The product that an image shows, whose model scores it.

        Args:
            statistics: of the image as a whole.

        Returns:
            The product, a key of `models`; and why a person has to look at the image, whatever its
            score, empty where there is no reason.
        """
        raise NotImplementedError

    @property
    def reference_model(self) -> Model:
        """The model that stands for what all models share: backbone, image settings, device."""
        return next(iter(self.models.values()))

    @property
    def batch_size(self) -> int:
        """Default number of images computed together."""
        return self.reference_model.embedder.max_batch_size(self.reference_model.config.batch_size)

    @property
    def only_product(self) -> str:
        """The product of every image; empty for a single model, and where it is recognised."""
        return next(iter(self.models)) if len(self.models) == 1 else ""

    def array_format(
        self,
        channels: Channels = "rgb",
        full_scale: float | None = None,
        layout: AxisOrder | None = None,
    ) -> ArrayFormat:
        """The format of arrays; the config fills in what isn't given."""
        image = self.reference_model.config.image
        return ArrayFormat(channels, full_scale, layout, image.bit_depth, image.max_pixels)

    def predict(
        self, images: ImageLike | Iterable[ImageLike], given: ArrayFormat | None = None
    ) -> Prediction | list[Prediction]:
        """Score one image, or several; see `anomaly.AnomalyDetector.predict`.

        Raises:
            ImageError: an image can't be used; says which and why.
        """
        if is_one(images):
            (prediction,) = map(_usable, self.results([images], given))
            return prediction
        results = self.results(cast(Iterable[ImageLike], images), given)
        return sorted(map(_usable, results), key=lambda prediction: prediction.index)

    def results(
        self, images: Iterable[ImageLike], given: ArrayFormat | None = None
    ) -> Iterator[Prediction | UnusableImage]:
        """Results of images; unusable images have one too.

        Args:
            images: files, arrays, PIL images or tensors; read only a few batches ahead of what
                is yielded.
            given: what arrays among them are; by default RGB of the dtype's full scale.

        Yields:
            One result for each image, `UnusableImage` for those that can't be used; in another
            order than the images', as `index` tells.
        """
        given = given or self.array_format()
        loaded = self.fitting(load_shared(sources(images, given), self.reference_model.loading))
        return self.predict_batches(by_shape(loaded, self.batch_size))

    def score_all(
        self,
        images: Sequence[Path | Image],
        *,
        batch_size: int | None = None,
        workers: int = 2,
        keep_images: bool = False,
    ) -> Iterator[Prediction | UnusableImage]:
        """Score images with new decoding processes, and report unusable ones.

        Args:
            images: files, or pixels that are decoded already.
            batch_size: images at once; by default the model's.
            workers: decoding processes.
            keep_images: whether the predictions are to have the decoded images.

        Yields:
            One result for each image, `UnusableImage` for those that can't be used. With images of
            several shapes the order isn't that of `images`; `index` tells.
        """
        task = Task(self.reference_model.loading, keep_image=keep_images)
        with Decoders(min(workers, len(images)), task) as decoders:
            loaded = self.fitting(decoders.load_all(enumerate(images)))
            yield from self.predict_batches(by_shape(loaded, batch_size or self.batch_size))

    def fitting(
        self, items: Iterable[NetworkInput | UnusableImage]
    ) -> Iterator[NetworkInput | UnusableImage]:
        """Refuse images whose patches all lie outside the region.

        Args:
            items: loaded images; those refused already pass through.
        """
        model = self.reference_model
        return drop_outside_region(items, model.embedder.grid, model.region)

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
        check_fork(self.reference_model.device)
        tiled = self.reference_model.config.image.tile is not None
        # A large image's tiles go side by side already.
        together = map if tiled else partial(in_parallel, device=self.reference_model.device)
        for results in together(self._attempt, batches):
            yield from results

    def _attempt(
        self, batch: list[NetworkInput] | UnusableImage
    ) -> Sequence[Prediction | UnusableImage]:
        if isinstance(batch, UnusableImage):
            return [batch]
        try:
            predictions = self.score(batch)
        except (ImageError, DataError) as error:
            # A large image that has vanished between two tiles; another grid than PaDiM's.
            return [to_unusable(item.index, item.name, error) for item in batch]
        return [p if math.isfinite(p.score) else _without_score(p) for p in predictions]

    def score(self, batch: Sequence[NetworkInput]) -> list[Prediction]:
        """Score loaded images of one network size, or large images in tiles.

        Raises:
            DataError: the region to look at holds none of an image's patches, or the scorer
                doesn't take its grid.
        """
        if isinstance(batch[0].view, Tiling):
            return [self._score_tiles(item) for item in batch]
        predictions: dict[int, Prediction] = {}
        with self.reference_model.embedder.inference_mode():
            embedded = self.reference_model.embedded(batch)
            products = [self.product_of(statistics) for statistics in embedded.statistics]
            # One call of a scorer for all images of its product.
            for product in dict.fromkeys(name for name, _ in products):
                places = [place for place, (name, _) in enumerate(products) if name == product]
                model = self.models[product]
                scored = model.patches_of(embedded.only(places))
                for place, patches, scores in zip(places, *scored, strict=True):
                    predictions[place] = model.prediction(
                        batch[place], embedded.statistics[place], patches, scores, products[place]
                    )
        return [predictions[place] for place in range(len(batch))]

    def _score_tiles(self, item: NetworkInput) -> Prediction:
        """Score one large image in tiles.

        Which product it is shows once all its tiles have been seen, so every model scores them all.
        """

        def score(tiles: list[NetworkInput]) -> _ScoredTiles:
            with self.reference_model.embedder.inference_mode():
                embedded = self.reference_model.embedded(tiles)
                scored = {name: model.patches_of(embedded) for name, model in self.models.items()}
                return tiles, embedded.statistics, scored

        rows, columns = (len(pieces) for pieces in item.view.axes)
        tilings = {product: _TiledPatches(rows, columns) for product in self.models}
        whole: ImageStatistics | None = None
        batches = item.tiles(min(self.batch_size, _TILES_AT_ONCE))
        for tiles, statistics, by_product in in_parallel(
            score, batches, self.reference_model.device
        ):
            for tile in statistics:
                whole = tile if whole is None else whole + tile
            for product, (patches, scores) in by_product.items():
                tilings[product].put(tiles, patches, scores)
        assert whole is not None
        product, reason = self.product_of(whole)
        tiling = tilings[product]
        return self.models[product].prediction(
            item, whole, tiling.patches, tiling.best, (product, reason)
        )


def _usable(result: Prediction | UnusableImage) -> Prediction:
    """The prediction; raises the error of an unusable image."""
    if isinstance(result, UnusableImage):
        raise ImageError(result.reason, result.status)
    return result


def _without_score(prediction: Prediction) -> UnusableImage:
    return UnusableImage(
        prediction.index,
        "failed",
        f"{prediction.name}: its score isn't a finite number, so the model is damaged or numbers "
        "overflow in its network; try another image, --precision fp32, or train again",
    )


# Tiles, the statistics of each, and by product the patches and scores of each.
_ScoredTiles: TypeAlias = tuple[
    list[NetworkInput],
    Sequence[ImageStatistics],
    dict[str, tuple[list[Patches], list[float]]],
]


class _TiledPatches:
    """Collects the patches of a large image from its tiles.

    Args:
        rows: of tiles.
        columns: of tiles.

    Attributes:
        best: the highest score of a tile; NaN once one of them is.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self._times = (rows, columns)
        self._patches: Patches | None = None
        self.best = -math.inf

    @property
    def patches(self) -> Patches:
        """The patches of the whole image, after all tiles were added."""
        assert self._patches is not None
        return self._patches

    def put(
        self, tiles: Sequence[NetworkInput], patches: Sequence[Patches], scores: list[float]
    ) -> None:
        """Fill in some tiles."""
        self.best = float(np.max([self.best, *scores]))  # NaN stays NaN
        for tile, part in zip(tiles, patches, strict=True):
            if self._patches is None:  # all tiles have one grid
                nearest = None if part.nearest is None else np.tile(part.nearest, self._times)
                self._patches = Patches(np.tile(part.scores, self._times), nearest)
            height, width = part.scores.shape
            row, column = tile.tile
            here = np.s_[row * height : (row + 1) * height, column * width : (column + 1) * width]
            self._patches.scores[here] = part.scores
            if self._patches.nearest is not None and part.nearest is not None:
                self._patches.nearest[here] = part.nearest


@dataclass(frozen=True, eq=False)
class ProductSet(Predictor):
    """Trained models of several products, as `anomaly.load` reads them. Threads may share it.

    An image goes through the backbone once. It is recognised as one of the products by its mean
    embedding, unless `product` names it, and that one's model scores it.

    Attributes:
        products: the models by product. They share the network and what it is shown; see
            `anomaly.storage.load.load`.
        product: that every image shows; empty where each is recognised.
        folder: that they were loaded from; None where there is none.
    """

    products: Mapping[str, Model]
    product: str = ""
    folder: Path | None = None

    def __repr__(self) -> str:
        given = f", {self.product} is given" if self.product else ""
        return f"<ProductSet of {', '.join(self.products)}{given}>"

    @property
    def models(self) -> Mapping[str, Model]:
        """The models that may score an image, by product; the given one alone, if one is."""
        return {self.product: self.products[self.product]} if self.product else self.products

    @property
    def name(self) -> str:
        """The folder's name."""
        return "" if self.folder is None else self.folder.absolute().name

    @property
    def model_id(self) -> str:
        """The set's id: 16 digits from the models' names and ids."""
        ids = "".join(f"{name}\0{model.model_id}\0" for name, model in self.products.items())
        return hashlib.sha256(f"{ids}{self.product}".encode()).hexdigest()[:16]

    def given(self, product: str) -> ProductSet:
        """The same models with a fixed product.

        One that looks like another of the products is for review.

        Args:
            product: a key of `products`.

        Raises:
            ModelError: there is no such product.
        """
        check_product(self.folder or "the set", self.products, product)
        return replace(self, product=product)

    def product_of(self, statistics: ImageStatistics) -> tuple[str, str]:
        """The product that an image shows, whose model scores it.

        Args:
            statistics: of the image as a whole.

        Returns:
            The product that was given, or the one whose training images' mean embedding is
            nearest; and why a person has to look at the image, whatever its score, empty where
            there is no reason.
        """
        seen = self._nearest(statistics)
        product = self.product or seen
        other = self.products[seen].training_statistics
        # What is far from all products is nearest to one of them, too.
        if seen != product and other is not None and not other.deviation(statistics):
            return product, statistics.blank or f"looks like {seen}, not {product}"
        return product, self.products[product].review_reason(statistics)

    def _nearest(self, statistics: ImageStatistics) -> str:
        """The product nearest to an image; the given product if it can't be recognised."""
        known = {
            name: model.training_statistics
            for name, model in self.products.items()
            if model.training_statistics is not None and model.training_statistics.is_reliable
        }
        if len(known) < len(self.products):
            return self.product or next(iter(self.products))
        return nearest(known, statistics)


def check_product(folder: object, products: Mapping[str, object], product: str) -> None:
    """Refuse a product that the set doesn't have.

    Args:
        folder: of the set, for the message.
        products: of the set; empty for a single model.
        product: the name given.

    Raises:
        ModelError: it isn't.
    """
    if not products:
        raise ModelError(f"{folder} is the model of one product; leave the product out ({product})")
    if product not in products:
        raise ModelError(f"{folder} has no product {product!r}; it has {', '.join(products)}")
