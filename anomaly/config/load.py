"""Config files and `--set` overrides -> a checked `Config`."""

from __future__ import annotations

import logging
import os
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from anomaly.config.schema import Config, readers
from anomaly.errors import ConfigError, nearest, why
from anomaly.files.writing import at_home

log = logging.getLogger(__name__)

# Folders that are searched for a bare name after the working directory: its configs/, then the
# program's, which lie in the package once it is installed and beside it in a checkout.
_PACKAGE = Path(__file__).parents[1]
FOLDERS = (Path("configs"), _PACKAGE / "configs", _PACKAGE.parent / "configs")

# Characters of a file, and digits of a number: far more than settings need.
_LONGEST, _MOST_DIGITS = 1_000_000, 40


def parse_config(values: Mapping[str, Any], where: str, overrides: Sequence[str] = ()) -> Config:
    """A config from plain values, which are checked against the schema.

    Args:
        values: settings by key, as YAML gives them.
        where: the source of the settings, for messages.
        overrides: `key=value` from `--set`, with dotted keys; each replaces or adds a setting.

    Raises:
        ConfigError: the values are no mapping, or a key is unknown or a value can't be used. The
            message has a line for each mistake.
    """
    values = dict(_checked_mapping(values, where))
    sources = {}  # the text of each `--set` by its dotted key
    for override in overrides:
        key, value = _read_override(override)
        values = _with_value(values, key.split("."), value)
        sources[key] = f"--set {override}"
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = []
        for mistake in error.errors():
            message = _explained(dict(mistake))
            source = _culprits(mistake["loc"], message, sources) or where
            lines.append(f"{source}: {message}")
        raise ConfigError("\n  ".join(lines)) from None


def _culprits(location: tuple[Any, ...], message: str, overrides: Mapping[str, str]) -> str:
    """The overrides that cause a mistake, joined by commas; empty where the file causes it.

    An override causes it if its key is that of the mistake, or lies within or around it. Where
    settings of several sections don't go together, pydantic gives no location; then overrides whose
    keys stand in the message cause it.

    Args:
        location: the keys that lead to the mistake, from pydantic.
        message: the mistake in words.
        overrides: the text of each `--set`, by its dotted key.
    """
    key = ".".join(map(str, location))

    def is_at_fault(name: str) -> bool:
        if not key:
            return f"{name} " in message or f"{name}=" in message
        return f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.")

    return ", ".join(source for name, source in overrides.items() if is_at_fault(name))


# The requirement on a value, by pydantic's name for the mistake or by the first part of that name.
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
    "bool": "must be true or false",
    "string_pattern_mismatch": "must be a name, without / and \\ and with no dot in front",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "needs at least {min_length} entries",
    "too_long": "takes at most {max_length} entries",
    "missing": "needs another entry",
    "tuple_type": "must be a list, e.g. [a, b]",
    "model_type": "must hold settings of its own: {keys}",
    "path_type": "must be a path",
}


# Settings and values that are no longer supported: what to do instead.
GONE = {
    "data.category as a list": "train a model for each category",
    "data.format=coco": "write a CSV list of the images and use data.format=csv",
    "model.arrangement": "leave it out; an image is scored by its patches alone",
    "model.border_damping": "remove it: the border counts like the rest of the image",
    "model.kind=subspace": "use model.kind=patchcore",
    "rules": "use model.smallest_defect for small defects",
    "zones": "use image.region and image.ignore for what counts",
}


_SHORT = reprlib.Repr()  # shortens values in messages, however long or deep
_SHORT.maxstring = _SHORT.maxother = 200


def _explained(error: dict[str, Any]) -> str:
    """A mistake, described by pydantic, in words: the key, its value, and the requirement."""
    location, kind = tuple(error["loc"]), error["type"]
    key = ".".join(str(part) for part in location)
    value = error["input"]
    # A key may be gone, one of its values, or a type of value.
    for name in (key, f"{key}={value}", f"{key} as a {type(value).__name__}"):
        if name in GONE:
            return f"{name} is no longer supported; {GONE[name]}"
    if kind in ("extra_forbidden", "invalid_key"):
        alike = nearest(str(location[-1])[:200], _known_keys(location[:-1]))
        return f"unknown key {key[:200]!r}; {alike}"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "missing" and isinstance(location[-1], str):
        return f"{key[:200]} is missing"
    wanted = _WANTED.get(kind) or _WANTED.get(kind.partition("_")[0], "can't be used")
    keys = ", ".join(_known_keys(location)) if kind == "model_type" else ""
    limits = {k: f"{v:g}" if isinstance(v, float) else v for k, v in error.get("ctx", {}).items()}
    return f"{key[:200]} is {_SHORT.repr(value)}: {wanted.format(keys=keys, **limits)}"


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    """The keys of the section to which `location`, a chain of keys, leads."""
    section: Any = Config
    for part in location:
        annotation = section.model_fields[part].annotation
        # The section's type itself, or in a union with None.
        section = next(c for c in (annotation, *get_args(annotation)) if hasattr(c, "model_fields"))
    return list(section.model_fields)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """A config from a YAML file, its bases and the command line's overrides.

    Args:
        path: a file, or a bare name that is looked up in `FOLDERS`. A file may name another one
            that it builds on (`base: other.yaml`, relative to itself or to one of `FOLDERS`).
        overrides: `key=value` with dotted keys; the value is read as YAML.

    Raises:
        ConfigError: there is no such file, it isn't YAML, a key is unknown, a value can't be used,
            or an override isn't read.
    """
    file = find_config(path)
    values = _read_with_base(file, seen=())
    values.setdefault("name", file.stem)
    log.debug("settings from %s, changed by %s", file.absolute(), ", ".join(overrides) or "nothing")
    config = parse_config(values, str(file), overrides)
    for override in overrides:
        _refuse_unread(override.partition("=")[0].strip(), override, config)
    return config


def _refuse_unread(key: str, override: str, config: Config) -> None:
    """Refuse an override that the config's method or score doesn't read; a file may hold it."""
    owners, kind = readers(key), config.model.kind
    if owners and kind not in owners:
        raise ConfigError(
            f"--set {override} has no effect with model.kind={kind}: it is for {owners[0]}; "
            "remove it"
        )
    if key == "model.image_score" and config.model.smallest_defect is not None:
        raise ConfigError(
            f"--set {override} has no effect beside model.smallest_defect; remove one of them"
        )


def find_config(path: str | Path) -> Path:
    """The config file that a path or a bare name means; a bare name may lie in one of `FOLDERS`.

    Raises:
        ConfigError: there is none; the message names those with a similar name.
        AnomalyError: there is no home folder for its `~`.
    """
    given = at_home(Path(path))
    folders = [] if len(given.parts) > 1 else [each for each in FOLDERS if each.is_dir()]
    if file := _first_file(given, [Path(), *folders]):
        return file
    if given.is_dir():
        raise ConfigError(
            f"{given} is a folder; --config takes one YAML file, and `anomaly start` writes one "
            "for a folder of images"
        )
    known = [file.name for folder in FOLDERS for file in folder.glob("*.yaml")]
    looked = ", ".join(map(str, folders)) or "nowhere else"
    hint = f"; {nearest(given.name, known)}" if known else ""
    raise ConfigError(f"no config {given} (also looked in: {looked}){hint}")


def _first_file(name: Path, places: Iterable[Path]) -> Path | None:
    """The first file of a name in some folders; a name without a suffix may lack `.yaml`."""
    names = [name] if name.suffix or not name.name else [name, name.with_suffix(".yaml")]
    files = (place / each for place in places for each in names)
    # Not Path.is_file, which raises for a name that is too long.
    return next((file for file in files if os.path.isfile(file)), None)  # noqa: PTH113


def _read_with_base(file: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The settings in a YAML file and its bases; `seen` are the files that build on this one.

    Raises:
        ConfigError: a file can't be read or is no YAML mapping; a base isn't there, or leads back.
    """
    if file.resolve() in seen:
        raise ConfigError(
            f"{file}: its `base` leads back to itself; remove one of the `base` lines"
        )
    try:
        with file.open("rb") as stream:
            text = stream.read(_LONGEST + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} can't be read: {why(error)}") from None
    values = parse_yaml(text, str(file))
    values = dict(_checked_mapping({} if values is None else values, str(file)))
    base = values.pop("base", None)
    if base is None:
        return values
    places = [file.parent, *FOLDERS]
    if (base_file := _first_file(Path(str(base)), places)) is None:
        looked = ", ".join(str(place) for place in places if place.is_dir())
        raise ConfigError(
            f"{file}: there is no base {str(base)[:200]} (looked in: {looked}); correct the "
            "`base` line"
        )
    return _merge(_read_with_base(base_file, (*seen, file.resolve())), values)


def _checked_mapping(values: Any, where: str) -> Any:
    """The values, which must be a mapping."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must hold `key: value` lines, not a {type(values).__name__}")
    return values


def parse_yaml(text: str, where: str, *, lines: bool = True) -> Any:
    """The values in a YAML text.

    Args:
        text: a file's text, or the text of one value.
        where: the source of the text, for messages.
        lines: name the line of a mistake in messages.

    Raises:
        ConfigError: the text isn't YAML, is larger or deeper than settings need, or holds a key
            twice, a tag, an alias, or a number that YAML would misread (010 as 8) or of over 40
            digits.
    """
    if len(text) > _LONGEST:
        raise ConfigError(
            f"{where}: this is longer than {_LONGEST:,} bytes; keep only settings in it"
        )
    try:
        return _Loader(text).get_single_data()
    except _RefusedError as error:
        mistake, line = error.args
    except RecursionError:
        mistake, line = "this is nested too deep; check brackets and indents", 1
    except (yaml.YAMLError, ValueError) as error:
        mistake = (
            "this isn't valid YAML; write `key: value` lines, indented by blanks, and put values "
            "that hold `: ` or brackets in quotes"
        )
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1  # of a control character
        if mark := getattr(error, "problem_mark", None):
            line = f"{mark.line + 1}, column {mark.column + 1}"
    raise ConfigError(f"{where}{f' line {line}' if lines else ''}: {mistake}")


class _RefusedError(ConfigError):
    """A refusal by `_Loader`; its arguments are the mistake in words and its line, from 1."""


class _Loader(yaml.SafeLoader):
    """A reader of YAML that refuses keys given twice, misleading numbers, and aliases.

    Aliases of aliases can make a short text fill the memory.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node of the text; an alias and a key given twice are refused."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise _RefusedError(f"this has the alias *{event.anchor}; write its value", line)
        node = super().compose_node(parent, index)
        seen: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            if str(key.value) in seen:  # the first one would be lost
                raise _RefusedError(
                    f"{key.value} is also in line {seen[key.value]}; write all of its settings in "
                    "one place",
                    line,
                )
            seen[str(key.value)] = line
        return node

    def number(self, node: yaml.ScalarNode) -> float:
        """The number of a node; YAML's misleading forms are refused: 010 is 8, 1:30 is 90."""
        text = node.value
        if re.match(r"[-+]?0[0-9_xb]|.*:", text) or len(text) > _MOST_DIGITS:
            raise _RefusedError(
                f"{text[:_MOST_DIGITS]} isn't a plain number; write it in at most {_MOST_DIGITS} "
                "digits, without a leading 0 or `:`, or put text in quotes",
                node.start_mark.line + 1,
            )
        whole = node.tag.endswith("int")
        return self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.number)
# No setting is a date, so what looks like one stays text.
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: node.value)


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from two sources, section by section; where both have one, that of `above` holds."""
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        both = isinstance(lower, dict) and isinstance(value, dict)
        merged[key] = _merge(lower, value) if both else value  # type: ignore[arg-type]
    return merged


# Settings whose values are text even where they look like numbers: a folder may be called 2024.
_TEXTS = ("name", "data.root", "data.category", "backbone.name", "backbone.weights")


def _read_override(override: str) -> tuple[str, Any]:
    """The dotted key and the value of an override; one without a key or `=` is refused."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"--set {override}: must look like key=value, e.g. --set model.kind=padim"
        )
    plain = text.strip()
    if key.strip() in _TEXTS and re.match(r"[-+.0-9]", plain):
        value: Any = plain
    else:
        value = parse_yaml(text, f"--set {override[:300]}", lines=False)
        if isinstance(value, str) and plain[0] not in "'\"|>":
            value = plain  # the text as typed: ` #` begins no comment here
    return key.strip(), value


def _with_value(values: Mapping[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of settings with a value set at a chain of keys; missing sections are made."""
    key, *inner = keys
    if inner:
        section = values.get(key)
        value = _with_value(section if isinstance(section, dict) else {}, inner, value)
    return {**values, key: value}
