"""Plain values -> a `Config`, or a message for each mistake that says what is legal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from anomaly.config.schema import Config
from anomaly.errors import ConfigError, nearest


def parse_config(
    values: Mapping[str, Any], where: str, overrides: Mapping[str, str] | None = None
) -> Config:
    """Check plain values against the schema.

    Args:
        values: as read.
        where: their source, for messages.
        overrides: sources of the values that come from elsewhere, by dotted key.

    Raises:
        ConfigError: an unknown key, a wrong type or range; a line for each mistake.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = []
        for one in error.errors():
            said = _explain(dict(one))
            lines.append(f"{_source(one['loc'], said, where, overrides or {})}: {said}")
        raise ConfigError("\n  ".join(lines)) from None


def _source(location: tuple[Any, ...], said: str, where: str, overrides: Mapping[str, str]) -> str:
    """What a mistake is in: the overrides inside the section at fault, or that it lies in.

    Of what is wrong between sections, the overrides of the keys that the message names.
    """
    key = ".".join(map(str, location))
    at_fault = [
        source
        for name, source in overrides.items()
        if (
            f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.")
            if key
            else f"{name} " in said or f"{name}=" in said
        )
    ]
    return ", ".join(at_fault) or where


# What a value has to be, by pydantic's name for the mistake.
_WANTED = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be {le} or less",
    "literal_error": "must be {expected}",
    "int": "must be a whole number",
    "float": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text (put it in quotes)",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_pattern_mismatch": "must be a name, without / and \\ and with no dot in front",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "needs at least {min_length} entries",
    "too_long": "takes at most {max_length} entries",
    "missing": "needs another entry",
    "tuple_type": "must be a list, e.g. [a, b]",
    "model_type": "must hold settings of its own: {keys}",
    "path_type": "must be a path",
}


def _explain(error: dict[str, Any]) -> str:
    location, kind = tuple(error["loc"]), error["type"]
    key = ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        return f"unknown key {key!r}; {nearest(str(location[-1]), _known_keys(location[:-1]))}"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    wanted = _WANTED.get(kind) or _WANTED.get(kind.partition("_")[0], "can't be used")
    keys = ", ".join(_known_keys(location)) if kind == "model_type" else ""
    limits = {k: f"{v:g}" if isinstance(v, float) else v for k, v in error.get("ctx", {}).items()}
    return f"{key} is {error['input']!r}: {wanted.format(keys=keys, **limits)}"


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    section: Any = Config
    for part in location:
        annotation = section.model_fields[part].annotation
        section = next(a for a in (annotation, *get_args(annotation)) if hasattr(a, "model_fields"))
    return list(section.model_fields)
