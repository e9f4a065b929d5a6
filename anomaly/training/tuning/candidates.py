"""Which settings are worth a try for a product, what each is for, and what it costs beside others.

What image scores are made of costs nothing more: all of these come from one pass over the patches.
A step changes what has to be computed anew: the bank, or the features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anomaly.config.load import parse_config
from anomaly.config.schema import METHODS, Config, readers
from anomaly.scoring.build import turns_of

_LARGER, _SMALLER = 1.5, 0.75  # of image.area's side
_GRAIN = 32  # sides that networks take, see `image.area`
_MORE_OF_THE_BANK = 0.1
# Axes of changes: of those that cost nothing to try, that good images can judge, and whose time
# can't be told from that of others.
SCORE, TURNS, POSE, NETWORK = "image score", "turns", "pose", "network"
_IMAGE_SCORES = {
    "map_top_percent": "for defects of any size",
    "map_max": "for defects of a few pixels",
    "map_top_relative": "for parts that differ as a whole, in light or grain",
}


@dataclass(frozen=True, eq=False)
class Change:
    """A few settings that differ, and why.

    Attributes:
        axis: what they are about; changes of one axis exclude each other.
        values: by dotted key.
        reason: what for, as a sentence for people.
    """

    axis: str
    values: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.values.items() if value)


def changed(config: Config, changes: Iterable[Change]) -> Config:
    """A config with some values changed.

    Raises:
        ConfigError: they don't go together.
    """
    values = config.model_dump(exclude_unset=True)
    for change in changes:
        for key, value in change.values.items():
            *sections, last = key.split(".")
            inner = values
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = value
    new = parse_config(values, "tune")
    more = (1 + len(turns_of(new))) / (1 + len(turns_of(config)))
    if more == 1:
        return new
    # Copies are many patches and bring little that is new: a bank of as many vectors is enough, and
    # costs no more where it is used.
    ratio = new.model.coreset_ratio / more
    model = new.model.model_copy(update={"coreset_ratio": min(1.0, float(f"{ratio:.3g}"))})
    return new.model_copy(update={"model": model})


def image_scores(config: Config) -> list[Change]:
    """Other image scores of the same patch scores, which cost nothing to try."""
    if config.model.smallest_defect is not None:
        return []  # beside it, no other image score has an effect
    return [
        Change(SCORE, {"model.image_score": name}, reason)
        for name, reason in _IMAGE_SCORES.items()
        if name != config.image_score_in_force
    ]


def steps(config: Config, networks: Sequence[str]) -> list[Change]:
    """Changes of the bank or of the features, one of each axis at a time.

    Args:
        config: the settings that are there.
        networks: those whose weights are at hand, see `anomaly.backbones.networks`.
    """
    method, model, image = METHODS[config.model.kind], config.model, config.image
    found: list[Change] = []
    if model.coreset_ratio < _MORE_OF_THE_BANK and model.kind in readers("model.coreset_ratio"):
        found.append(
            Change(
                "bank",
                {"model.coreset_ratio": _MORE_OF_THE_BANK},
                "for good parts with details that are rare",
            )
        )
    if image.tile is not None:
        half = max(64, image.tile // 2)
        found.append(
            Change(
                "size",
                {"image.tile": half},
                "for defects that are small beside a tile",
            )
        )
    elif image.resize is None:
        found += [
            Change("size", {"image.area": side}, reason)
            for factor, reason in (
                (_SMALLER, "for large defects on a grainy surface"),
                (_LARGER, "for defects that are small beside a patch"),
            )
            if 64 <= (side := round(image.area * factor / _GRAIN) * _GRAIN) != image.area
        ]
    if not method.one_grid and model.turned_copies == "none":
        found += [
            Change(TURNS, {"model.turned_copies": how}, reason)
            for how, reason in (
                ("quarter_turns", "for parts that lie in four ways"),
                ("quarter_turns_and_mirrors", "for parts that lie any way"),
            )
        ]
    if image.align == "none":
        found += [
            Change(POSE, {"image.align": how}, reason)
            for how, reason in (
                ("shift", "for parts that lie in other places"),
                ("rigid", "for parts that are turned, too"),
            )
        ]
    found += [
        Change(
            NETWORK,
            {"backbone.name": name, "backbone.weights": "imagenet", "backbone.layers": None},
            "another network sees other details",
        )
        for name in networks
        if name != config.backbone.name
    ]
    return found


def shares_features(one: Config, other: Config) -> bool:
    """Whether two configs make the same features."""

    def key(config: Config) -> tuple[object, ...]:
        values = config.model_dump()

        def value(dotted: str) -> object:
            section, _, name = dotted.partition(".")
            return values[section][name] if name else values[section]

        kind = config.model.kind
        embedded = tuple(value(dotted) for dotted in METHODS[kind].embedded_by)
        return (config.backbone, config.image, config.model.turned_copies, kind, embedded)

    return key(one) == key(other)


def work(config: Config) -> tuple[float, float, float]:
    """Relative computing time of a config, against one with the same network.

    Returns:
        For features of known images, and of training images; and for learning from these and
        scoring: a coreset's selection compares all patches with all that are kept.
    """
    pixels, copies = _pixels(config), 1 + len(turns_of(config))
    return pixels, pixels * copies, pixels * copies * _bank(config)


def expense(config: Config, base: Config) -> float:
    """Relative cost of a config in use (1 for the present one); exact, unlike a time."""
    network = 2.0 if config.backbone != base.backbone else 1.0
    image = network * _pixels(config) / _pixels(base)
    return 0.8 * image + 0.2 * _bank(config) / _bank(base)


def _pixels(config: Config) -> float:
    """Network pixels of an image, or of its tiles, up to a factor that images have in common."""
    image = config.image
    pixels = float((image.crop or image.resize or image.area) ** 2)
    if image.tile is not None:  # the smaller, the more of them
        pixels /= float((image.tile - image.overlap) ** 2)
    return pixels


def _bank(config: Config) -> float:
    """Vectors of the bank, up to a factor that configs have in common."""
    return config.model.coreset_ratio * (1 + len(turns_of(config))) * _pixels(config)
