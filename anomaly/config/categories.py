"""`data.category`: one data set, or those of several products, each with a model of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BeforeValidator

if TYPE_CHECKING:
    from anomaly.config.schema import Config

# A product's name becomes that of a folder in the run's, where these mean something else.
_TAKEN = ("model", "suspects")


def _known_categories(value: Any) -> Any:
    """A category as it is; a list of them only if each can be a folder of its own.

    Raises:
        ValueError: it can't.
    """
    match value:
        case None | str():
            return value
        case list() | tuple() if value:
            listed = list(value)
        case list() | tuple():
            raise ValueError("data.category is an empty list; name a category, or leave it out")
        case _:
            raise ValueError(
                f"data.category is {value!r}: must be text (put it in quotes), or a list of names, "
                "e.g. [bottle, hazelnut]"
            )
    for name in listed:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"data.category lists {name!r}, which isn't a name (put it in quotes)")
        if name in _TAKEN or name.startswith(".") or set(name) & set("/\\\0") or len(name) > 100:
            raise ValueError(
                f"data.category lists {name!r}, which can't be the name of a folder for its run; "
                "rename that folder, or train it with a config of its own"
            )
    folded = [name.casefold() for name in listed]  # not all file systems tell cases apart
    if twice := [name for name in listed if folded.count(name.casefold()) > 1]:
        raise ValueError(f"data.category lists {twice[-1]!r} twice; name each category once")
    return tuple(listed)


Categories: TypeAlias = Annotated[str | tuple[str, ...] | None, BeforeValidator(_known_categories)]


def by_product(config: Config) -> dict[str, Config]:
    """A config for each category that one lists, named after it; empty where it lists none."""
    listed = config.data.category if isinstance(config.data.category, tuple) else ()
    alone = {name: config.data.model_copy(update={"category": name}) for name in listed}
    return {
        name: config.model_copy(update={"name": name, "data": data}) for name, data in alone.items()
    }
