"""The options of every command of the core. Imports little, so that help and refusals are quick."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from anomaly.files.outputs import GOLDEN


def add_config(parser: argparse.ArgumentParser) -> None:
    """The options that name a config and change its values."""
    parser.add_argument(
        "--config", required=True, help="a YAML file, or a bare name looked up in configs/"
    )
    add_settings(parser, "override a setting, e.g. --set model.kind=padim; may be repeated")


def add_settings(parser: argparse.ArgumentParser, text: str) -> None:
    """The option that changes a config's values."""
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=text
    )


def add_output(
    parser: argparse.ArgumentParser, text: str, replaces: str = "an earlier run"
) -> None:
    """The options on the folder to write into, and on what is there already."""
    parser.add_argument("--output", type=Path, required=True, help=text)
    parser.add_argument("--overwrite", action="store_true", help=f"replace {replaces} there")


def add_paths(
    parser: argparse._ActionsContainer,
    option: str,
    text: str,
    metavar: str = "PATH",
) -> None:
    """An option that takes paths and may be repeated; empty by default."""
    parser.add_argument(
        option, type=Path, action="extend", nargs="+", default=[], metavar=metavar, help=text
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option that every command with a network takes."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to compute; auto takes the GPU where there is one",
    )


def add_cluster(parser: argparse._ActionsContainer, text: str) -> None:
    """The option of commands that a Ray cluster can share; `text` says what it does."""
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help=f"{text} (auto, HOST:PORT, ray://…), or of one that is started here (local)",
    )


def number(text: str) -> float:
    """A number of an option, for `argparse`; the error says how to write one with `,` or `%`."""
    with suppress(ValueError):
        return float(text)
    remedy = ""
    with suppress(ValueError):
        plain = float(text.replace(",", ".").rstrip("% "))
        remedy = f"; write {plain / (100 if text.rstrip().endswith('%') else 1):g}"
    raise argparse.ArgumentTypeError(f"{text!r} is no number{remedy}")


_SECONDS = {"s": 1, "m": 60, "h": 3600}


def duration(text: str) -> float:
    """Seconds of an option such as `10m`, for `argparse`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip())
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} isn't a time; write it like 90s, 10m or 1h")
    return float(found[1]) * _SECONDS[found[2]]


def _check(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--all", action="store_true", help="name every file, not the first few")
    parser.add_argument(
        "--region",
        type=Path,
        metavar="IMAGE",
        help="instead, draw in this image where the model is to look",
    )


def _start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="your images, or a CSV list of them")
    parser.add_argument(
        "--format", help="layout of the folder, if it isn't recognised: mvtec, folder, …"
    )
    parser.add_argument("--name", help="name of the product (default: the folder's name)")
    parser.add_argument("--output", type=Path, help="output folder (default: runs/<name>)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier start there")
    parser.add_argument("--no-open", action="store_true", help="don't open the page in a browser")
    add_settings(parser, "a setting of your own, e.g. --set image.area=512; may be repeated")
    add_device(parser)


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="for the models and their results"
    )


def _train(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(reported=())  # why images can't be used, as `start` has printed it already
    add_config(parser)
    parser.add_argument("--output", type=Path, help="the run's folder (default: runs/<name>)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run there")
    parser.add_argument(
        "--no-calibrate", action="store_true", help="skip thresholds; results will have no verdicts"
    )
    add_cluster(
        parser, "compute features and scores on the workers of this Ray cluster (docs/scale.md)"
    )
    add_device(parser)


def _evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        action="extend",
        nargs="+",
        required=True,
        help="runs, their model/ folders, or folders of runs",
    )
    add_output(parser, "where the reports go", "earlier reports")
    good = "test with the good images in these folders, not with the data set's"
    add_paths(parser, "--good", good, "FOLDER")
    defects = "test with the defects in these folders; subfolders name their types"
    add_paths(parser, "--defects", defects, "FOLDER")
    parser.add_argument(
        "--masks",
        type=Path,
        metavar="FOLDER",
        help="with --defects: folder of masks, named like the images (scratch/1.png for "
        "scratch/1.jpg); with several folders of defects, one subfolder of masks for each",
    )
    add_device(parser)


def _calibrate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the run's folder, or its model/ folder")
    good = (
        "good images that the model hasn't learned from (default: the scores stored in the model)"
    )
    add_paths(parser, "--good", good)
    add_paths(parser, "--production", "production images that nobody has sorted")
    add(
        "--at-most-defective",
        type=share_of,
        metavar="SHARE",
        help="with --production: the largest share of these images that may be defective, e.g. 5%%",
    )
    defects = "images of defects: shows how many are caught"
    add_paths(parser, "--defects", defects)
    add(
        "--without",
        action="extend",
        nargs="+",
        metavar="IMAGE",
        help="good images to leave out, by the names that train prints; --undo counts them again",
    )
    rates = parser.add_argument_group("by rates (default: the model's rates)")
    add = rates.add_argument
    add("--false-reject-rate", type=number, metavar="R", help="good parts that may be rejected")
    add("--review-rate", type=number, metavar="R", help="good parts that may not be called good")
    hand = parser.add_argument_group("by hand")
    add = hand.add_argument
    add("--threshold", type=number, metavar="X", help="reject above this image score")
    add("--review-threshold", type=number, metavar="Y", help="review above this (default: X)")
    parser.add_argument(
        "--undo",
        action="store_const",
        const=True,
        help="bring the previous thresholds back; given again, those before them",
    )
    parser.add_argument(
        "--yes",
        action="store_true",
        help="save even if known defects that are caught now would pass, or the reject threshold "
        "rises by more than chance explains",
    )


def share_of(text: str) -> float:
    """A share of an option, as a number or in percent."""
    plain = text.strip()
    return number(plain[:-1]) / 100 if plain.endswith("%") else number(plain)


def _tune(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_paths(
        parser,
        "--defects",
        "folders of known defects (default: those of the data set's test split)",
        "FOLDER",
    )
    add_paths(
        parser,
        "--good",
        "folders of good images for testing, not training (default: the test split's)",
        "FOLDER",
    )
    parser.add_argument(
        "--budget",
        type=duration,
        default="10m",
        metavar="TIME",
        help="time limit: 90s, 10m, 1h (default: 10m); settings that would take longer are skipped",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the config to write (default: <config>_tuned.yaml beside the config); all figures "
        "go into a .json file beside it",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier file there")
    add_device(parser)


def _update(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the run, or its model/ folder; it isn't changed")
    add_paths(parser, "--good", "images that a person has confirmed as good")
    add(
        "--feedback",
        type=Path,
        metavar="FILE",
        help="the record of serve; parts that people have judged are learned, and kept in judged/ "
        "of the new run",
    )
    add_paths(
        parser,
        "--defects",
        "images of defects; the update is refused if one that is caught now would be called good",
    )
    add_output(parser, "the new run's folder")
    add(
        "--include-suspects",
        action="store_true",
        help="also learn images that look unlike all others; check first that they are good",
    )
    add(
        "--yes",
        action="store_true",
        help="write the model even if a known defect that is caught now would be called good",
    )


def _infer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        help="the run's folder, or its model/ folder",
    )
    add_paths(parser, "--input", "image files and folders of them")
    parser.add_argument(
        "--list",
        metavar="FILE",
        help="a text file that names an image on each line, or a CSV file with the columns path "
        "and group (the part that it shows), or a results.csv; - reads it from standard input",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="follow the folders given with --input and score what arrives, until Ctrl-C",
    )
    parser.add_argument("--output", type=Path, required=True, help="where results go")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--overwrite", action="store_true", help="replace earlier results there")
    start.add_argument("--resume", action="store_true", help="continue an interrupted run there")
    add_cluster(parser, "compute scores on the workers of this Ray cluster (docs/scale.md)")
    _add_outputs(parser)
    add_device(parser)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--heatmap",
        dest="heatmaps",
        choices=("none", "reject", "all"),
        default="all",
        help="which images get one: none, those not called good (reject and review), or all "
        "(default)",
    )
    parser.add_argument(
        "--no-page",
        dest="page",
        action="store_false",
        help="leave out results.html, the page over all images",
    )
    more = parser.add_argument_group("more to write")
    more.add_argument("--masks", action="store_true", help="masks/: what is marked, as PNG")
    more.add_argument(
        "--regions",
        action="store_true",
        help="regions.csv: bounding box, area and peak score of each marked region",
    )
    more.add_argument(
        "--maps",
        choices=("float32", "uint16"),
        help="maps/: anomaly maps, as float TIFF or as 16-bit PNG with a scale",
    )


def _explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, help="a run, or its model/ folder: explains its anomaly score"
    )
    parser.add_argument(
        "--backbone", metavar="NAME", help="a torchvision classifier: explains the class it sees"
    )
    parser.add_argument("image", type=Path, metavar="IMAGE", help="one image file")
    parser.add_argument(
        "--output",
        type=Path,
        help="where the page and the pictures go (default: explained/NAME_OF_THE_IMAGE)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace earlier ones there")
    good = (
        "with --model: further folders with its training images (if they have moved, or were "
        "learned by update)"
    )
    add_paths(parser, "--good", good, "FOLDER")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="with --model: a defect that was called good becomes a golden part of the run: "
        "selfcheck names it until it is caught; from then on calibrate, update and deploy refuse "
        "to lose it",
    )
    parser.add_argument(
        "--weights",
        default="imagenet",
        help="with --backbone: imagenet (default), random, or a .safetensors or .pth file",
    )
    parser.add_argument(
        "--class",
        dest="classes",
        type=int,
        action="extend",
        nargs="+",
        metavar="INDEX",
        help="with --backbone: the classes to explain (default: the likeliest, at most three)",
    )


def _selfcheck(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="the run, or its model/ folder")
    parser.add_argument(
        "--golden", type=Path, required=True, help="a folder of known parts' images, some defective"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help=f"save today's scores in the folder's {GOLDEN}, for later checks",
    )
    parser.add_argument(
        "--tolerance",
        type=number,
        default=0.01,
        metavar="SHARE",
        help="largest change of a score (default 0.01, which is 1 %%); give more for new "
        "photographs of the parts",
    )


def _layers(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--backbone", metavar="NAME", help="any torchvision classification network")
    which.add_argument("--model", type=Path, help="a run, or its model/ folder")
    parser.add_argument(
        "--input-size", type=int, default=224, metavar="N", help="side of the image (default: 224)"
    )


# By command.
OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "check": _check,
    "start": _start,
    "demo": _demo,
    "train": _train,
    "evaluate": _evaluate,
    "calibrate": _calibrate,
    "tune": _tune,
    "update": _update,
    "infer": _infer,
    "explain": _explain,
    "selfcheck": _selfcheck,
    "layers": _layers,
}
