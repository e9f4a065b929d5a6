"""A tiny product, and the commands run in-process on it."""

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import hypothesis
import numpy as np
import pytest
from kit import DecodingThread
from numpy.typing import NDArray

# A busy machine is no failure.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# Here, and in processes that tests start, `backbone.name` may be `tiny`.
TINY = str(Path(__file__).with_name("tiny"))
sys.path.insert(0, TINY)
PYTHONPATH = os.pathsep.join([TINY, str(Path(__file__).parents[1])])
os.environ["PYTHONPATH"] = PYTHONPATH

# A worker of pytest-xdist has a processor to itself; commands then start one decoding process.
if (worker := os.environ.get("PYTEST_XDIST_WORKER", "")) and hasattr(os, "sched_setaffinity"):
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[int(worker.removeprefix("gw")) % len(processors)]})

# Wide terminals and narrow ones must not change what argparse prints.
os.environ["COLUMNS"] = "100"

REPOSITORY = Path(__file__).parents[1]
_TIMES = ("time", "milliseconds")
# By method, the fixture of a trained run.
RUNS = {"patchcore": "run_folder", "padim": "padim_folder"}
SHARED = REPOSITORY.parent / "shared"
FAST = [
    "backbone.name=tiny",
    "backbone.weights=random",
    "precision=fp32",
    "image.area=64",
    "model.coreset_ratio=0.1",
]


def fast(*overrides: str) -> list[str]:
    """Quick settings of the method that overrides choose."""
    own = {"model.kind=padim": ["model.dimensions=20"], "model.kind=mean": []}
    return next(([*FAST[:-1], *own[kind]] for kind in own if kind in overrides), FAST)


def draw_part(seed: int, mark: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """A grey disc (96, 120, 3) BGR; `mark` is the corner of a 10×10 red square on it."""
    rng = np.random.default_rng(seed)
    picture = np.full((96, 120, 3), 40, dtype=np.uint8)
    cv2.circle(picture, (60, 48), 38, (150, 150, 150), -1)
    picture = np.clip(picture + rng.normal(0, 6, picture.shape), 0, 255).astype(np.uint8)
    if mark is not None:
        picture[mark[0] : mark[0] + 10, mark[1] : mark[1] + 10] = (30, 30, 220)
    return picture


def write_part(file: Path, seed: int, mark: tuple[int, int] | None = None) -> None:
    """The picture of `draw_part` as a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(file), draw_part(seed, mark))


def with_note(source: Path, copy: Path, number: int) -> None:
    """A copy of a PNG file that holds the same pixels and a note: other bytes."""
    note = b"tEXtn\0%d" % number
    chunk = struct.pack(">I", len(note) - 4) + note + struct.pack(">I", zlib.crc32(note))
    data = source.read_bytes()
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(data[:33] + chunk + data[33:])


def write_product(root: Path, n_train: int = 12) -> Path:
    """A whole category in MVTec AD layout."""
    for i in range(n_train):
        write_part(root / "train" / "good" / f"{i:03}.png", seed=i)
    for i in range(3):
        write_part(root / "test" / "good" / f"{i:03}.png", seed=100 + i)
        write_part(root / "test" / "spot" / f"{i:03}.png", seed=200 + i, mark=(30, 40 + 10 * i))
        mask = np.zeros((96, 120), dtype=np.uint8)
        mask[30:40, 40 + 10 * i : 50 + 10 * i] = 255
        (root / "ground_truth" / "spot").mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(root / "ground_truth" / "spot" / f"{i:03}_mask.png"), mask)
    return root


def result_files(folder: Path) -> dict[str, bytes]:
    """What `infer` has written, but for when it did so and how long that took."""
    from anomaly.files.tables import csv_rows, csv_text

    files = {
        f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()
    }
    files.pop("results.html", None)  # it says when and of what: tests/inference/test_infer.py
    if rows := csv_rows(files.get("results.csv", b"").decode()):
        kept = [i for i, name in enumerate(rows[0]) if name not in _TIMES]
        assert len(kept) == len(rows[0]) - len(_TIMES)
        files["results.csv"] = csv_text([row[i] for i in kept] for row in rows).encode()
    if "results.jsonl" in files:
        said = map(json.loads, files["results.jsonl"].decode().splitlines())
        kept_values = [{k: v for k, v in row.items() if k not in _TIMES} for row in said]
        files["results.jsonl"] = json.dumps(kept_values).encode()
    return files


Command = Callable[[str, Sequence[object]], tuple[int, str, str]]
Says = Callable[[int, str, Sequence[object]], str]
MadeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    """Output may hold file names that are no text, which pytest-xdist can't send on."""
    report = yield
    report.sections = [
        (title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections
    ]
    return report


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Fills a folder, read only from then on, in whichever worker of pytest-xdist asks first."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    shared.mkdir(exist_ok=True)

    def make(name: str, fill: Callable[[Path], object]) -> Path:
        folder, done = shared / name, shared / f"{name.replace('/', '-')}.done"
        with done.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                folder.parent.mkdir(exist_ok=True)
                fill(folder)
                done.touch()
        return folder

    return make


@pytest.fixture(scope="session", autouse=True)
def decoding_threads() -> Iterator[Callable[[], Any]]:
    """Images are decoded in threads: starting a process takes longer than most tests.

    What replaces a function replaces it there, too. Yields what starts processes otherwise.
    """
    from anomaly.imaging import pool

    start = pool.start
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pool, "start", DecodingThread)
        yield start


@pytest.fixture
def own_pool() -> Iterator[None]:
    """A pool that starts in the test and ends with it."""
    from anomaly.imaging import pool

    pool.close()
    yield
    pool.close()


@pytest.fixture
def decoding_processes(
    own_pool: None, decoding_threads: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images are decoded in processes, as without tests."""
    from anomaly.imaging import pool

    monkeypatch.setattr(pool, "start", decoding_threads)


def train(product: Path, setting: str, output: Path) -> None:
    """Train on the tiny product, with one setting besides the tests' usual ones."""
    run_command("train", train_arguments(product, output, setting))


def run_command(name: str, arguments: Sequence[object]) -> None:
    """Run a command that has to succeed, in this process."""
    from anomaly.cli import main

    assert main([name, *map(str, arguments)]) == 0


@pytest.fixture(autouse=True, scope="session")
def patience() -> Iterator[None]:
    """A busy machine takes longer to finish what is in hand; a command must not end the tests."""
    from anomaly.cli import terminal

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(terminal, "PATIENCE_SECONDS", 600.0)
        yield


@pytest.fixture(autouse=True)
def as_many_threads() -> Iterator[None]:
    """Leaves the number of threads as it was, whatever a command was told."""
    from anomaly.runtime import get_threads, imported_torch, set_threads

    before = get_threads() if imported_torch() else int(os.environ.get("OMP_NUM_THREADS", 0))
    yield
    if before and get_threads() != before:
        set_threads(before)


@pytest.fixture(scope="session")
def product(made_once: MadeOnce) -> Path:
    """The tiny product's folder; read only."""
    return made_once("data/disc", write_product)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process; returns (exit code, stdout, stderr)."""
    from anomaly.cli import main

    def run(name: str, arguments: Sequence[object]) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([name, *map(str, arguments)])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def says(command: Command) -> Says:
    """Runs a command that has to end with an exit code; all that it says."""

    def run(code: int, name: str, arguments: Sequence[object]) -> str:
        ended, out, err = command(name, arguments)
        assert ended == code, out + err
        return out + err

    return run


def train_arguments(product: Path, output: Path, *overrides: str) -> list[object]:
    """Arguments of `train` for the tiny product."""
    arguments: list[object] = ["--config", REPOSITORY / "configs" / "folder.yaml"]
    settings = [
        "data.format=mvtec",
        f"data.root={product.parent}",
        f"data.category={product.name}",
        "name=disc",
        *fast(*overrides),
        *overrides,
    ]
    for setting in settings:
        arguments += ["--set", setting]
    return [*arguments, "--output", output, "--device", "cpu"]


def _made_by(name: str, *arguments: object) -> Callable[[Path], None]:
    """Fills a folder by a command that has to succeed."""
    return lambda folder: run_command(name, [*arguments, "--output", folder])


@pytest.fixture(scope="session")
def run_folder(product: Path, made_once: MadeOnce) -> Path:
    """A trained PatchCore run; read only."""
    return made_once("runs/disc", partial(train, product, "model.kind=patchcore"))


@pytest.fixture(scope="session")
def padim_folder(product: Path, made_once: MadeOnce) -> Path:
    """A trained PaDiM run; read only."""
    return made_once("padim/disc", partial(train, product, "model.kind=padim"))


@pytest.fixture(scope="session")
def resnet_folder(product: Path, made_once: MadeOnce) -> Path:
    """A trained PatchCore run of a network that sees more than the tests' own; read only."""
    return made_once("resnet/disc", partial(train, product, "backbone.name=resnet18"))


@pytest.fixture(scope="session")
def bank_export(run_folder: Path, made_once: MadeOnce) -> Path:
    """The PatchCore run for ONNX Runtime; read only."""
    return made_once("exports/disc", _made_by("export", "--model", run_folder, "--to", "onnx"))


@pytest.fixture(scope="session")
def inferred(run_folder: Path, product: Path, made_once: MadeOnce) -> Path:
    """Results of the PatchCore run on the test images, with all that `infer` can write."""
    given = ["--model", run_folder, "--input", product / "test", "--write"]
    outputs = ["heatmaps", "page", "masks", "regions", "maps"]
    return made_once("results/disc", _made_by("infer", *given, *outputs))


@pytest.fixture(scope="session")
def evaluated(run_folder: Path, made_once: MadeOnce) -> Path:
    """The evaluation of the PatchCore run; read only."""
    return made_once("evaluation/disc", _made_by("evaluate", "--model", run_folder))


@pytest.fixture(scope="session")
def explained(run_folder: Path, product: Path, made_once: MadeOnce) -> Path:
    """The explanation of one defective image; read only."""
    image = product / "test" / "spot" / "000.png"
    return made_once("explained/disc", _made_by("explain", image, "--model", run_folder))


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH on which processes, and those they start, find none of what training needs."""
    absent = ("torch", "torchvision", "faiss", "onnx", "onnxscript")
    folder = tmp_path_factory.mktemp("path")
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {absent}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden)\n"
    )
    return os.pathsep.join([str(folder), str(REPOSITORY)])


@pytest.fixture(scope="session")
def served(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A service with the PatchCore run, in a thread: see tests/line/running.py."""
    from running import serving

    models = tmp_path_factory.mktemp("line") / "models"
    shutil.copytree(run_folder, models / "disc")
    with serving(models) as running:
        yield running


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless browser: see tests/browser.py."""
    from browser import running_browser

    with running_browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


@pytest.fixture
def browser(window: Any) -> Iterator[Any]:
    """The browser for pages from disk: they complain of nothing and ask for no further file."""
    window.events.clear()
    window.prefer()
    yield window
    assert window.complaints() == []
    assert all(url.startswith("file:") and url.endswith(".html") for url in window.requests())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of four megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4000k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk can't be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)
