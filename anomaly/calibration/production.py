"""Production images beside what thresholds promise of good parts like the training images."""

from __future__ import annotations

from typing import Literal

from anomaly.calibration.rates import Rate, binomial, percent

LEAST_IMAGES = 20  # fewer say nothing of a rate
DEFECT_SHARE = 0.01  # of the parts on a line, where nobody says otherwise
# Of a comparison that finds a difference where there is none. Made anew with each of 2,000 parts,
# some 3 % of lines meet one: bounds of the promise are seldom so far off.
_CHANCE = 0.01

Comparison = Literal["as promised", "more", "fewer"]


def compare_flagged(flagged: int, images: int, promised: Rate) -> Comparison:
    """Whether more, or fewer, images are flagged than chance explains where parts are as promised.

    A binomial test against the bounds of the promise. It may be asked again as images come.

    Args:
        flagged: images above a threshold.
        images: all of them, but for those that are for review whatever their score.
        promised: what the threshold does to good parts.
    """
    if images < LEAST_IMAGES:
        return "as promised"
    most = promised.at_most + DEFECT_SHARE * (1 - promised.at_most)
    if most < 1 and binomial(images, most)[flagged:].sum() < _CHANCE:
        return "more"
    if promised.low > 0 and binomial(images, promised.low)[: flagged + 1].sum() < _CHANCE:
        return "fewer"
    return "as promised"


def flagged_line(flagged: int, images: int, promised: Rate, model: str = "RUN") -> str:
    """What `compare_flagged` finds, for people, and what to do; empty where all is as promised.

    Args:
        flagged: as there.
        images: as there.
        promised: as there.
        model: the model's folder, for the command.
    """
    comparison = compare_flagged(flagged, images, promised)
    if comparison == "as promised":
        return ""
    shares = f"{flagged} of {images} images flagged ({percent(flagged / images)}); "
    shares += f"{percent(promised.expected)} expected"
    why = (
        f", at most {percent(promised.at_most)} of good parts. Either many parts are defective, or "
        "these images differ from the training images"
        if comparison == "more"
        else f", at least {percent(promised.low)}. The thresholds are too high for these images, "
        "and defects pass that could be caught"
    )
    command = f"anomaly calibrate --model {model} --production FOLDER --at-most-defective 5%"
    return f"{shares}{why}. See: {command}"
