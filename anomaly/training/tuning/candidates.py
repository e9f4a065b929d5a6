"""Settings worth a try for a product: each one's purpose and its cost beside others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anomaly.config.load import parse_config
from anomaly.config.schema import METHODS, Config, readers
from anomaly.scoring.build import turns_of

_LARGER, _SMALLER = 1.5, 0.75  # of image.area's side
_GRAIN = 32  # sides that networks take, see `image.area`
# Axes of changes. Good images alone can judge turns and poses; the time of a network can't be
# foreseen; the best image score may depend on everything else.
TURNS, POSE, NETWORK, SCORE, BANK = "turns", "pose", "network", "image score", "bank"


@dataclass(frozen=True, eq=False)
class Change:
    """A few settings that differ, and why.

    Attributes:
        axis: what they are about; changes of one axis exclude each other.
        values: by dotted key.
        reason: what for, as a sentence for people.
    """

    axis: str
    values: Mapping[str, Any]
    reason: str

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.values.items() if value)


_STEPS = (
    Change(SCORE, {"model.image_score": "map_top_percent"}, "for defects of any size"),
    Change(SCORE, {"model.image_score": "map_max"}, "for defects of a few pixels"),
    Change(
        SCORE,
        {"model.image_score": "map_top_relative"},
        "for parts that differ as a whole, in light or grain",
    ),
    Change(BANK, {"model.coreset_ratio": 0.1}, "for good parts with details that are rare"),
    Change(TURNS, {"model.turned_copies": "quarter_turns"}, "for parts that lie in four ways"),
    Change(
        TURNS, {"model.turned_copies": "quarter_turns_and_mirrors"}, "for parts that lie any way"
    ),
    Change(POSE, {"image.align": "shift"}, "for parts that lie in other places"),
    Change(POSE, {"image.align": "rigid"}, "for parts that are turned, too"),
)


def changed(config: Config, changes: Iterable[Change]) -> Config:
    """A config with some values changed.

    Raises:
        ConfigError: they don't go together.
    """
    values = config.model_dump(exclude_unset=True)
    for change in changes:
        for key, value in change.values.items():
            section, _, name = key.partition(".")
            values.setdefault(section, {})[name] = value
    new = parse_config(values, "tune")
    more = (1 + len(turns_of(new))) / (1 + len(turns_of(config)))
    if more == 1:
        return new
    # Copies are many patches and bring little that is new: a bank of as many vectors is enough, and
    # costs no more where it is used.
    ratio = min(1.0, float(f"{new.model.coreset_ratio / more:.3g}"))
    model = new.model.model_copy(update={"coreset_ratio": ratio})
    return new.model_copy(update={"model": model})


def steps(config: Config, networks: Sequence[str]) -> list[Change]:
    """Changes of the settings, one of each axis at a time.

    Args:
        config: the settings that are there.
        networks: those whose weights are at hand, see `anomaly.backbones.networks`.
    """
    model, has_bank = config.model, readers("model.coreset_ratio")
    fits = {
        SCORE: model.smallest_defect is None,  # beside it, no other image score has an effect
        BANK: model.coreset_ratio < 0.1 and model.kind in has_bank,
        TURNS: not METHODS[model.kind].one_grid and model.turned_copies == "none",
        POSE: config.image.align == "none",
    }
    there = {"model.image_score": config.image_score_in_force}
    return [
        *(step for step in _STEPS if fits[step.axis] and step.values != there),
        *_sizes(config),
        *(
            Change(
                NETWORK,
                {"backbone.name": name, "backbone.weights": "imagenet", "backbone.layers": None},
                "another network sees other details",
            )
            for name in networks
            if name != config.backbone.name
        ),
    ]


def _sizes(config: Config) -> list[Change]:
    """Smaller tiles, or other sizes of the whole image."""
    image = config.image
    if image.tile is not None:
        half = {"image.tile": max(64, image.tile // 2)}
        return [Change("size", half, "for defects that are small beside a tile")]
    if image.resize is not None:
        return []
    return [
        Change("size", {"image.area": side}, reason)
        for factor, reason in (
            (_SMALLER, "for large defects on a grainy surface"),
            (_LARGER, "for defects that are small beside a patch"),
        )
        if 64 <= (side := round(image.area * factor / _GRAIN) * _GRAIN) != image.area
    ]


def work(config: Config) -> tuple[float, float, float]:
    """Relative computing time of a config, against one with the same network.

    Returns:
        For scoring known images, for features of training images, and for learning from these: a
        coreset's selection compares all patches with all that are kept.
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
