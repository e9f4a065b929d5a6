"""The commands by what people do with them, each with its line of help and two examples."""

from __future__ import annotations

# By group and command: its line of the help text, and two command lines that run as they are but
# for the places in them.
GROUPS: dict[str, dict[str, tuple[str, str, str]]] = {
    "start": {
        "start": (
            "from a folder of images to a trained model and a page, in one go",
            "start photographs",
            "start photographs --output runs/part --set image.area=512",
        ),
        "demo": ("try all of it on a generated product", "demo", "demo --output runs/tried"),
        "check": (
            "look at a data set before training: counts, sizes, faults",
            "check --config part.yaml",
            "check --config part.yaml --region photographs/001.png",
        ),
    },
    "train and judge": {
        "train": (
            "learn what good looks like from a folder of good images",
            "train --config part.yaml",
            "train --config folder.yaml --set data.root=photographs/good --output runs/part",
        ),
        "evaluate": (
            "measure trained models on their test splits",
            "evaluate --model runs/part --output figures/part",
            "evaluate --model runs/part --defects defects --output figures/defects",
        ),
        "calibrate": (
            "choose a trained model's thresholds, without training it again",
            "calibrate --model runs/part --false-reject-rate 0.005",
            "calibrate --model runs/part --production monday --at-most-defective 5%",
        ),
        "tune": (
            "try settings and keep those that catch more of the known defects",
            "tune --config part.yaml --output part_tuned.yaml",
            "tune --config part.yaml --defects defects --budget 30m --output part_tuned.yaml",
        ),
        "update": (
            "let a model learn good parts that people have confirmed",
            "update --model runs/part --good confirmed --output runs/part_2",
            "update --model runs/part --feedback line.sqlite --output runs/part_2",
        ),
    },
    "run": {
        "infer": (
            "score images: verdicts in results.csv, heatmaps beside them",
            "infer --model runs/part --input monday --output results/monday",
            "infer --model runs/part --input camera --output results/camera --watch",
        ),
        "explain": (
            "show why an image was flagged, or what would have caught a missed defect",
            "explain --model runs/part complaint.png --keep",
            "explain --backbone resnet50 part.png --output maps",
        ),
        "export": (
            "write a trained model for ONNX Runtime or OpenVINO",
            "export --model runs/part --to onnx --output runs/part_onnx",
            "export --model runs/part --to openvino --output runs/part_openvino",
        ),
    },
    "the line": {
        "serve": (
            "answer over HTTP, record every answer, and show a page to the line",
            "serve --models line --record line.sqlite",
            "serve --models line --host 0.0.0.0 --token-file token --webhook http://plc.example",
        ),
        "selfcheck": (
            "score known parts before a shift and name scores that have changed",
            "selfcheck --model line/part --golden golden --record",
            "selfcheck --model line/part --golden golden",
        ),
        "deploy": (
            "replace a model on the line by a new version, or bring the old version back",
            "deploy --model runs/part_2 --to line/part",
            "deploy --back --to line/part",
        ),
        "report": (
            "write up a shift, a day or a month of a line: yield, judgements, drift, cost",
            "report --record line.sqlite --from '2026-11-27 06:00' --output shift",
            "report --record results/monday --model runs/part --from 2026-11-02 --output drift",
        ),
    },
    "inside a network": {
        "layers": (
            "list a network's layers: shapes, strides, parameters, compute",
            "layers --backbone resnet50",
            "layers --model runs/part",
        ),
        "features": (
            "save a network's features of images, for classifiers of your own",
            "features --backbone resnet50 --layers layer3 --input monday --output features.npz",
            "features --model runs/part --input photographs --output maps.npz --pool none",
        ),
    },
}

COMMANDS = {name: texts for group in GROUPS.values() for name, texts in group.items()}

_WIDTH = max(map(len, COMMANDS))


def overview() -> str:
    """All commands by group, a line each."""
    blocks = [
        "\n".join([f"{title}:", *(f"  {name:{_WIDTH}}  {c[0]}" for name, c in commands.items())])
        for title, commands in GROUPS.items()
    ]
    return "\n\n".join([*blocks, "anomaly COMMAND --help shows its options, and examples."])


def examples(command: str) -> str:
    """Two command lines, for the end of a command's help."""
    _, *lines = COMMANDS[command]
    return "\n".join(["examples:", *(f"  anomaly {line}" for line in lines)])
