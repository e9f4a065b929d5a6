"""The methods that a config can name as `model.kind`: a line for each. Imports no torch.

A method's module has two functions, whose types stand in `anomaly.scorers.base`:

    fitter(settings, *, seed, memory_limit) -> Fitter
    scorer(tensors, settings, *, device, cache) -> Scorer

and where its models can be exported, a module that imports no torch has one more:

    scorer(tensors, settings) -> ArrayScorer

`settings` are the values of the config's section `model`, by key.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """What has to be known of a method before torch is imported.

    Attributes:
        title: its name in the literature.
        module: where its functions are.
        arrays: where that of exported models is; empty where there is none.
        stages: how many stages of a network it reads by default, of those at strides 4, 8 and 16;
            the coarsest first.
        one_grid: whether it learns each place of the image by itself, so that all images need one
            aspect and none can be cut into tiles.
        embedded_by: keys of a config, dotted, that decide what patch embeddings are, besides those
            of the backbone and of images.
        settings: keys of the section `model` that it alone reads.
        image_scores: names of `model.image_score` that it alone has, see `Scorer.image_scores`.
    """

    title: str
    module: str
    arrays: str = ""
    stages: int = 2
    one_grid: bool = False
    embedded_by: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    image_scores: tuple[str, ...] = ()


METHODS = {
    "patchcore": Method(
        "PatchCore",
        "anomaly.scorers.patchcore.fitter",
        "anomaly.scorers.patchcore.bank",
        embedded_by=("model.embedding",),
        settings=("coreset_ratio", "coreset_size", "embedding", "neighbours", "search"),
        image_scores=("reweighted",),
    ),
    "padim": Method(
        "PaDiM",
        "anomaly.scorers.padim.fitter",
        "anomaly.scorers.padim.array_gaussian",
        stages=3,
        one_grid=True,
        embedded_by=("model.dimensions", "model.projection", "seed"),
        settings=("dimensions", "projection", "regularisation"),
    ),
    "subspace": Method(
        "Subspace",
        "anomaly.scorers.subspace.fitter",
        "anomaly.scorers.subspace.residual",
        settings=("variance", "components"),
    ),
}


def readers(key: str) -> list[str]:
    """The methods that alone read a config's dotted key; empty where it is there for all."""
    section, _, name = key.rpartition(".")
    return [kind for kind, one in METHODS.items() if section == "model" and name in one.settings]
