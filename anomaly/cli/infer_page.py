"""The page of a run of `infer`, with and without `--watch`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from anomaly.report.gallery import write_gallery

if TYPE_CHECKING:
    from anomaly.inference.rows import Row
    from anomaly.maps.encoding import Thumbnails
    from anomaly.scoring.predictor import AnyModel


def write_page(
    options: argparse.Namespace,
    model: AnyModel,
    rows: Callable[[], Iterable[Row]],
    thumbnails: Thumbnails,
    about: Mapping[str, Any],
) -> str:
    """Write the page of all that was scored, and say where it is, as the end of a sentence.

    Args:
        options: of the command.
        model: that has scored the images.
        rows: gives one row for each image; called for each page.
        thumbnails: what the run has drawn small.
        about: what the rows depend on, see `Outputs.about`.

    Raises:
        OutputError: no room, no permission.
    """
    named = ", ".join(map(str, options.input or [options.list]))
    file = write_gallery(model, options.model, named, rows, options.output, thumbnails, about)
    pages = "one page" if len(model.models) == 1 else "a page for each product"
    return f", all on {pages} in {file}"
