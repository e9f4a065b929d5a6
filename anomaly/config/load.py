"""Config files and settings on the command line -> a checked `Config`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from anomaly.config.schema import Config, readers
from anomaly.errors import ConfigError, nearest, why
from anomaly.files.writing import at_home

log = logging.getLogger(__name__)

# Where a bare name is looked for after the working directory: its configs/, then our own, inside
# the package once it is installed and beside it in a checkout.
_PACKAGE = Path(__file__).parents[1]
FOLDERS = (Path("configs"), _PACKAGE / "configs", _PACKAGE.parent / "configs")

# What PyYAML raises for text that isn't YAML: a date like 2020-13-45 is a ValueError.
_NO_YAML = (yaml.YAMLError, ValueError, RecursionError)


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
        for mistake in error.errors():
            message = _explain(dict(mistake))
            source = _source(mistake["loc"], message, overrides or {}) or where
            lines.append(f"{source}: {message}")
        raise ConfigError("\n  ".join(lines)) from None


def _source(location: tuple[Any, ...], message: str, overrides: Mapping[str, str]) -> str:
    """The overrides that a mistake lies in; empty where it lies in the file.

    They are those of the section at fault, within it or around it. If settings of several sections
    don't go together (no location), they are those of the keys that the message names.
    """
    key = ".".join(map(str, location))

    def is_at_fault(name: str) -> bool:
        if not key:
            return f"{name} " in message or f"{name}=" in message
        return f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.")

    return ", ".join(source for name, source in overrides.items() if is_at_fault(name))


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


def load_config(
    path: str | Path, overrides: Sequence[str] = (), folders: Sequence[Path] = FOLDERS
) -> Config:
    """Read a YAML config, its bases and the command line's overrides.

    Args:
        path: a file, or a bare name that is looked up in `folders`. A file may name another one
            that it builds on (`base: other.yaml`, relative to itself or to one of `folders`).
        overrides: `key=value` with dotted keys; the value is read as YAML.
        folders: where a bare name is looked for after the working directory.

    Raises:
        ConfigError: no such file, no YAML, an unknown key, a wrong type or range.
    """
    file = find_config(path, folders)
    values = _read_with_base(file, folders, seen=())
    values.setdefault("name", file.stem)
    changed = f", changed by {', '.join(overrides)}" if overrides else ""
    log.debug("settings from %s%s", file.absolute(), changed)
    sources = {_apply(values, override): f"--set {override}" for override in overrides}
    config = parse_config(values, str(file), sources)
    _warn_of_unused(config, sources)
    return config


def _warn_of_unused(config: Config, sources: Mapping[str, str]) -> None:
    """Warn of settings on the command line that the method doesn't read; a base may have any."""
    kind = config.model.kind
    for key, source in sources.items():
        if (owners := readers(key)) and kind not in owners:
            log.warning(
                "%s has no effect with model.kind=%s: it is for %s", source, kind, owners[0]
            )
    if "model.image_score" in sources and config.image_score_in_force != config.model.image_score:
        log.warning(
            "%s has no effect with model.kind=%s, which takes %s",
            sources["model.image_score"],
            kind,
            config.image_score_in_force,
        )


def find_config(path: str | Path, folders: Sequence[Path]) -> Path:
    """The config file meant by `path`: itself, or a bare name inside one of `folders`.

    Raises:
        ConfigError: there is none; the message names those that are alike.
        AnomalyError: its `~` stands for nobody's home folder.
    """
    given = at_home(Path(path))
    names = [given] if given.suffix or not given.name else [given, given.with_suffix(".yaml")]
    folders = [folder for folder in folders if folder.is_dir()]
    places = [Path(), *([] if len(given.parts) > 1 else folders)]
    for place in places:
        for name in names:
            if (place / name).is_file():
                return place / name
    if given.is_dir():
        raise ConfigError(
            f"{given} is a folder; --config takes one YAML file, and `anomaly start` writes one "
            "for a folder of images"
        )
    known = [f.name for folder in folders for f in folder.glob("*.yaml")]
    looked = ", ".join(str(p) for p in places[1:]) or "nowhere else"
    hint = f"; {nearest(given.name, known)}" if known else ""
    raise ConfigError(f"no config {given} (also looked in: {looked}){hint}")


def _read_with_base(file: Path, folders: Sequence[Path], seen: tuple[Path, ...]) -> dict[str, Any]:
    if file.resolve() in seen:
        raise ConfigError(
            f"{file}: its `base` leads back to itself; remove one of the `base` lines"
        )
    values = _read_yaml(file)
    base = values.pop("base", None)
    if base is None:
        return values
    places = [file.parent, *folders]
    base_file = next((at for place in places if (at := place / str(base)).is_file()), None)
    if base_file is None:
        looked = ", ".join(str(place) for place in places if place.is_dir())
        raise ConfigError(
            f"{file}: there is no base {base} (looked in: {looked}); correct the `base` line"
        )
    return _merge(_read_with_base(base_file, folders, (*seen, file.resolve())), values)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} can't be read: {why(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    except _NO_YAML as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{file}{place} isn't valid YAML: write `key: value` lines, indented by blanks, and "
            "put dates and values that hold `: ` or brackets in quotes"
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold `key: value` lines, not a {type(values).__name__}")
    return values


class _Loader(yaml.SafeLoader):
    """Reads YAML, and refuses a key that stands twice: the first one would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """See yaml.SafeLoader."""
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            line = key.start_mark.line + 1
            if seen.setdefault(key.value, line) != line:
                raise ConfigError(
                    f"{key.value} stands twice, in line {seen[key.value]} and in line {line}; "
                    "write all of its settings in one place"
                )
        return super().construct_mapping(node, deep)


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        both = isinstance(lower, dict) and isinstance(value, dict)
        merged[key] = _merge(lower, value) if both else value  # type: ignore[arg-type]
    return merged


# Settings whose values are text, whatever they look like.
_TEXTS = ("name", "data.root", "data.category", "backbone.name", "backbone.weights")


def _apply(values: dict[str, Any], override: str) -> str:
    """Set what an override says; returns its dotted key."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"--set {override}: must look like key=value, e.g. --set model.kind=padim"
        )
    try:
        value = yaml.safe_load(text)
    except _NO_YAML:
        raise ConfigError(f"--set {override}: {text!r} isn't a YAML value") from None
    plain = text.strip()
    if (isinstance(value, str) and plain[0] not in "'\"|>") or (
        key.strip() in _TEXTS and isinstance(value, int | float | date)
    ):
        value = plain  # ` #` is no comment here, and a folder may be called 2024
    *sections, last = key.strip().split(".")
    inner = values
    for section in sections:
        child = inner.get(section)
        # The shared parts of a parsed YAML file must not change under another reader.
        inner[section] = dict(child) if isinstance(child, dict) else {}
        inner = inner[section]
    inner[last] = value
    return key.strip()
