"""The terms of docs/reproducibility.md: what batches, threads, processors and precisions move."""

import csv
import os
import platform
import subprocess
import sys
from pathlib import Path

import faiss
import pytest
import torch
from conftest import REPOSITORY, Command, train_arguments
from portable import LEVELS, environment
from threadpoolctl import threadpool_info

from anomaly.runtime.devices import has_bf16

X86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 settings")
# Relative; a tenth of the noise that thresholds leave room for.
SCORES = 1e-5

HELD = next((k for k, v in LEVELS.items() if all(os.environ.get(n) == x for n, x in v.items())), "")


@X86
@pytest.mark.skipif(not HELD, reason="not run by tests/portable.py")
def test_every_library_obeys() -> None:
    """A run that computes with newer instructions after all would show nothing."""
    assert torch.backends.cpu.get_cpu_capability().lower() == os.environ["ATEN_CPU_CAPABILITY"]
    assert not has_bf16(torch.device("cpu"))
    wanted = os.environ["OPENBLAS_CORETYPE"]
    blas = {i["architecture"] for i in threadpool_info() if i["internal_api"] == "openblas"}
    assert blas == {wanted}
    assert faiss.SIMDConfig.get_level_name() == os.environ["FAISS_SIMD_LEVEL"]
    code = """if True:
        import torch
        maps = torch.rand(1, 64, 32, 32)
        torch.nn.Conv2d(64, 64, 3)(maps)
        maps[0, 0] @ maps[0, 1]
        print("threads", torch.get_num_threads())
    """
    verbose = {**os.environ, "MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"}
    said = subprocess.run(
        [sys.executable, "-c", code], env=verbose, capture_output=True, text=True, check=True
    ).stdout
    mkl, onednn = {"avx2": ("(Intel(R) AVX2)", "AVX2"), "sse4.2": ("(Intel(R) SSE4.2)", "SSE4.1")}[
        HELD
    ]
    assert f"threads {os.environ['OMP_NUM_THREADS']}\n" in said
    assert f"isa:Intel {onednn}\n" in said
    # A torch without MKL says nothing. On other makers' processors MKL takes a path of its own,
    # which it doesn't name and lets nobody choose.
    intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    named = f"{mkl} enabled" if intel else "Intel(R) Architecture processors"
    assert "MKL_VERBOSE" not in said or named in said


@X86
def test_bf16_needs_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has it, held down to AVX2 by ONEDNN_MAX_CPU_ISA, computes in fp32."""
    code = (
        "import torch; from anomaly.runtime.devices import has_bf16; "
        "print(has_bf16(torch.device('cpu')))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment("avx2", 1), capture_output=True, text=True
    )
    assert found.stdout == "False\n"


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as stream:
        return sorted(csv.DictReader(stream), key=lambda row: row["path"])


def _arguments(run: Path, product: Path, output: Path) -> list[str]:
    inputs = [str(product / part) for part in ("train/good", "test")]
    options = ["--device", "cpu", "--precision", "fp32", "--output", str(output)]
    return ["--model", str(run), "--input", *inputs, *options]


@pytest.fixture(scope="module")
def here(run_folder: Path, product: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of this process."""
    from anomaly.cli import main

    output = tmp_path_factory.mktemp("here") / "out"
    assert main(["infer", *_arguments(run_folder, product, output)]) == 0
    return output


def _assert_equal_on_terms(here: Path, there: Path) -> None:
    rows, others = _rows(here), _rows(there)
    assert [row["path"] for row in rows] == [row["path"] for row in others]
    assert [row["verdict"] for row in rows] == [row["verdict"] for row in others]
    scores, moved = ([float(row["image_score"]) for row in r] for r in (rows, others))
    assert moved == pytest.approx(scores, rel=SCORES)
    assert len(scores) == 18


@pytest.mark.slow
@X86
@pytest.mark.skipif(bool(HELD), reason="compares with the whole of this processor")
@pytest.mark.parametrize(
    ("level", "threads"), [("avx2", 4), pytest.param("sse4.2", 1, marks=pytest.mark.slow)]
)
def test_another_processor_gives_the_same_verdicts(
    here: Path, run_folder: Path, product: Path, tmp_path: Path, level: str, threads: int
) -> None:
    code = "import sys; from anomaly.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["infer", *_arguments(run_folder, product, tmp_path / "out")]
    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(level, threads),
        check=True,
        capture_output=True,
        timeout=300,
    )
    _assert_equal_on_terms(here, tmp_path / "out")


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_give_the_same_verdicts(
    here: Path, run_folder: Path, product: Path, tmp_path: Path, command: Command, threads: int
) -> None:
    arguments = _arguments(run_folder, product, tmp_path / "out")
    assert command("infer", [*arguments, "--threads", threads])[0] == 0
    _assert_equal_on_terms(here, tmp_path / "out")


def test_threads_and_batches_make_the_same_model(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    arguments = train_arguments(product, tmp_path / "run", "batch_size=3")
    assert command("train", [*arguments, "--threads", 3])[0] == 0
    for name in ("scorer.safetensors", "calibration.json", "thresholds.json"):
        one, other = ((run / "model" / name).read_bytes() for run in (run_folder, tmp_path / "run"))
        assert one == other, name


def test_an_image_alone_has_the_verdict_that_it_has_in_a_batch(
    here: Path, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    rows = _rows(here)
    for i, row in enumerate(rows[::6]):
        output = tmp_path / str(i)
        options = ["--device", "cpu", "--precision", "fp32", "--output", output]
        command("infer", ["--model", run_folder, "--input", row["path"], *options])
        (alone,) = _rows(output)
        assert alone["verdict"] == row["verdict"]
        assert float(alone["image_score"]) == pytest.approx(float(row["image_score"]), rel=SCORES)


def test_what_is_listed_is_there() -> None:
    from portable import NUMERICAL

    for listed in NUMERICAL:
        assert (REPOSITORY / listed.partition("::")[0]).exists(), listed
