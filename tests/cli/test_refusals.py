"""What is wrong with a command line is told before torch is imported, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

from conftest import PYTHONPATH, write_part
from kit import contents

from anomaly.storage.folder import EXPORT, MANIFEST

# Runs commands one after the other; of each, its exit code, what it said, and what is imported.
_RUN = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from anomaly.cli import main
told = []
slow = {"torch", "cv2", "numpy"}
for line in json.loads(sys.argv[1]):
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            code = main(line.split())
        except SystemExit as stop:
            code = stop.code or 0
    told.append([code, said.getvalue(), sorted(slow & set(sys.modules))])
print(json.dumps(told))
"""

REFUSALS = """
trian -> there is no command 'trian'; did you mean 'train'
infer --model model --input good --ouput x -> no option --ouput; did you mean '--output'
infer --model nowhere --input . --output o -> no model at nowhere
evaluate --model nowhere --output o -> no model at nowhere
evaluate --model modle --output o -> did you mean 'model'
layers --model nowhere -> no model at nowhere
serve --models nowhere -> no model at nowhere
infer --model runs --input good --output o -> runs is a folder of runs (e, link, run, two); give
evaluate --model runs --good good --output o -> runs is a folder of runs
infer --model halves --input good --output o -> half holds parts of a model, but no manifest.json
serve --models halves -> half holds parts of a model, but no manifest.json
train --config folder --set mode.kind=padim -> unknown key 'mode'
train --config nowhere.yaml -> no config nowhere.yaml
check --config good -> `anomaly start` writes one
check --config folder -q -v -> not allowed with
start good --set name=.. -> name is '..': must be a name
start good --output runs -> holds the runs e, link, run
features --backbone resnet18 --input nowhere --output o.npz -> nowhere doesn't exist
features --backbone resnet18 --weights n.pth --input . --output o.npz -> n.pth
features --model model --input nowhere --output o.npz -> nowhere doesn't exist
features --model export --input good --output o.npz -> and no layers
features --model model --input good --output features -> must end in .npz
features --model model --input good --output o.npz --layers l -> --layers needs --backbone; a model
explain --model export good/part.png --output o -> and no layers
train --config folder --set data.root=good --set backbone.weights=n.pth -> n.pth doesn't exist
evaluate --model model --good nowhere --output o -> nowhere doesn't exist
evaluate --model model --defects nowhere --output o -> nowhere doesn't exist
evaluate --model model --defects godo --output o -> did you mean 'good'
evaluate --model model --good empty --output o -> no images in
evaluate --model model --good NG --output o -> NG would be taken as good
evaluate --model model -> give --output, a folder for the reports, or --golden, known parts
evaluate --model model --golden nowhere -> --golden nowhere doesn't exist
evaluate --model model --golden good -> record first what the model says of these parts
evaluate --model model --golden good --tolerance -1 -> --tolerance is -1.0; it must be 0 or more
update --model model --output o -> --good, --feedback, or both
update --model model --good nowhere --output o -> --good nowhere doesn't exist
update --model model --good good --defects nowhere --output o -> --defects nowhere doesn't exist
infer --model model/manifest.json --input good --output o -> is a file; give the
infer --model model --input good --output o --ray local --watch -> can't be given with --watch
infer --model model --input none --output o -> none doesn't exist (looked in /
infer --model model --input good/x.png --output o -> good did you mean 'part.png'
infer --model model --input empty --output o -> no images in
infer --model model --output o -> required: --input
infer --model model --input good --output o --write mask -> invalid choice: 'mask'
infer --model model --input none.txt --output o -> none.txt can't be read
calibrate --model model --good nowhere -> --good nowhere doesn't exist
calibrate --model model --threshold 3,6 -> '3,6' is no number; write it like 0.02 or 2%
calibrate --model model --threshold high -> 'high' is no number
calibrate --model model --undo --threshold 1 -> leave other options out
calibrate --model model --false-reject-rate 1.5 -> between 0 and 1
calibrate --model model --false-reject-rate 0 -> between 0 and 1
calibrate --model model --threshold -1 -> 0 or more
calibrate --model model --threshold inf -> 0 or more
calibrate --model model --false-reject-rate 0.3 --review-rate 0.1 -> is above the review rate
calibrate --model model --threshold 1 --review-threshold 2 -> lies above
calibrate --model model --review-threshold 4 -> give both
calibrate --model model --threshold 3 --review-rate 0.1 -> set by hand or found by rates
calibrate --model model --production good -> give the largest share of them that may be defective
calibrate --model model --at-most-defective 5% -> need each other
calibrate --model model --production good --at-most-defective 5 -> it must be from 0 % to 20 %
calibrate --model model --production good --at-most-defective 5% --good good -> give one of these
calibrate --model model --production good --at-most-defective 5% --threshold 9 -> known to be
export --to onnx --model runs/run --output runs/e -> e/model exists already
export --to onnx --model runs/run --output o --pixels 120 -> isn't width x height
export --to onnx --model runs/e --output o -> e/model is an exported model
export --to onnx --model runs/run --output o --golden nowhere -> --golden nowhere doesn't exist
export --to onnx --model runs/run --output runs/run --overwrite -> holds the source model
export --to onnx --model runs/run --output runs/link --overwrite -> holds the source model
export --to onnx --model runs/run --output runs -> holds the runs e, link, run, two, which a model
export --to onnx --model runs/run --output runs/two --overwrite -> two/model holds a trained model
export --to onnx --model runs/run --output runs/run/model -> holds the source model
export --to onnx --model runs/run --output runs/run/model/scores -> holds the source model
"""


def _places(root: Path) -> None:
    """Images, and what are models, runs and exports at first sight."""
    write_part(root / "good" / "part.png", seed=0)
    write_part(root / "NG" / "part 2.png", seed=1)
    (root / "empty").mkdir()
    models = ["model", "export", "runs/run/model", "runs/two/model", "runs/e/model"]
    for name in models:
        (root / name).mkdir(parents=True)
        (root / name / MANIFEST).write_text("{}")
    for name in ("export", "runs/e/model"):
        (root / name / EXPORT).write_text("{}")
    (root / "runs" / "link").symlink_to(root / "runs" / "run")
    (root / "halves" / "half" / "model").mkdir(parents=True)
    (root / "halves" / "half" / "model" / "scorer.safetensors").write_bytes(b"half of it")


def test_refusals_come_without_torch_and_change_nothing(tmp_path: Path) -> None:
    _places(tmp_path)
    before = contents(tmp_path)
    refusals = [line.split(" -> ") for line in REFUSALS.strip().splitlines()]
    for start in ("infer --input . --output o --model ", "check --config folder --set data.root="):
        refusals += [[start + 300 * "x", "File name too long"]]
    commands = ["--help", "train --help"] + [command for command, _ in refusals]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(commands)],
        cwd=tmp_path,
        env={"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    overview, helped, *told = json.loads(done.stdout)
    wrong = [
        (command, says, code, said, imported)
        for (command, says), (code, said, imported) in zip(refusals, told, strict=True)
        if code != 2 or says not in said or "torch" in imported or "Traceback" in said
    ]
    assert wrong == []
    for code, said, imported in (overview, helped):
        assert (code, "usage:" in said, imported) == (0, True, [])
    assert contents(tmp_path) == before
    assert not (tmp_path / "o").exists()
