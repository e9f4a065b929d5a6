"""ProductSet: models of several products behind one pass of the backbone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from anomaly.errors import ModelError
from anomaly.scoring.image_statistics import Appearance, nearest
from anomaly.scoring.pipeline import Model
from anomaly.scoring.predictor import Predictor


@dataclass(frozen=True, eq=False)
class ProductSet(Predictor):
    """Trained models of several products, as `anomaly.load` reads them. Threads may share it.

    An image goes through the backbone once. It is told to be one of the products by its mean
    embedding, unless `product` names it, and that one's model scores it.

    Attributes:
        products: the models by product. They share the network and what it is shown; see
            `anomaly.storage.load.load`.
        product: that every image shows; empty where each is told.
        folder: that they were loaded from; None where there is none.
    """

    products: Mapping[str, Model]
    product: str = ""
    folder: Path | None = None

    def __repr__(self) -> str:
        said = f", {self.product} is given" if self.product else ""
        return f"<ProductSet of {', '.join(self.products)}{said}>"

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
        """Names these very models: 16 digits that follow from their names and ids."""
        said = "".join(f"{name}\0{one.model_id}\0" for name, one in self.products.items())
        return hashlib.sha256(f"{said}{self.product}".encode()).hexdigest()[:16]

    def given(self, product: str) -> ProductSet:
        """The same models, for images that all show one product.

        One that looks like another of the products is for review.

        Args:
            product: a key of `products`.

        Raises:
            ModelError: there is no such product.
        """
        check_product(self.folder or "the set", self.products, product)
        return replace(self, product=product)

    def product_of(self, look: Appearance) -> tuple[str, str]:
        """The product that an image shows, whose model scores it.

        Args:
            look: the image as a whole.

        Returns:
            The product that was given, or the one whose training images' mean embedding is
            nearest; and why a person has to look at the image, whatever its score, empty where
            there is no reason.
        """
        seen = self._nearest(look)
        product = self.product or seen
        own, other = self.products[product], self.products[seen].appearance
        # What is far from all products is nearest to one of them, too.
        if seen != product and other is not None and not other.deviation(look):
            return product, look.blank or f"looks like {seen}, not {product}"
        return product, own.reason_to_look(look)

    def _nearest(self, look: Appearance) -> str:
        """The product that an image looks most like; the one given where that can't be told."""
        known = {
            name: one.appearance
            for name, one in self.products.items()
            if one.appearance is not None and one.appearance.tells
        }
        if len(known) < len(self.products):
            return self.product or next(iter(self.products))
        return nearest(known, look)


# What makes predictions: one model, or those of several products.
AnyModel: TypeAlias = Model | ProductSet


def check_product(folder: object, products: Mapping[str, object], product: str) -> None:
    """See that a product is one of a set's.

    Args:
        folder: of the set, for the message.
        products: of the set; empty for a single model.
        product: that somebody names.

    Raises:
        ModelError: it isn't.
    """
    if not products:
        raise ModelError(
            f"{folder} is the model of one product; leave out which one it is ({product})"
        )
    if product not in products:
        raise ModelError(f"{folder} has no product {product!r}; it has {', '.join(products)}")
