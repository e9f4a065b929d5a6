"""The terms of docs/reproducibility.md: what batches, threads, processors and precisions move."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import faiss
import pytest
import torch
from conftest import Command, train_arguments
from kit import table
from portable import LEVELS, environment
from threadpoolctl import threadpool_info

import anomaly
from anomaly.runtime import has_bf16

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
def test_bf16_needs_leave() -> None:
    """A processor that has it, held down to AVX2 by ONEDNN_MAX_CPU_ISA, computes in fp32."""
    code = (
        "import torch; from anomaly.runtime import has_bf16; print(has_bf16(torch.device('cpu')))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment("avx2", 1), capture_output=True, text=True
    )
    assert found.stdout == "False\n"


def scored(folder: Path) -> list[tuple[str, str, float]]:
    rows = table(folder)
    assert len(rows) == 6
    return [(row["path"], row["verdict"], float(row["image_score"])) for row in rows]


def assert_equal_on_terms(
    one: Sequence[tuple[str, str, float]], other: Sequence[tuple[str, str, float]]
) -> None:
    for (path, verdict, score), (other_path, other_verdict, moved) in zip(one, other, strict=True):
        assert (path, verdict) == (other_path, other_verdict)
        assert moved == pytest.approx(score, rel=SCORES)


@pytest.mark.slow
@X86
@pytest.mark.skipif(bool(HELD), reason="compares with the whole of this processor")
@pytest.mark.parametrize(("level", "threads"), [("avx2", 4), ("sse4.2", 1)])
def test_another_processor_gives_the_same_verdicts(
    inferred: Path, run_folder: Path, product: Path, tmp_path: Path, level: str, threads: int
) -> None:
    where = ["--model", run_folder, "--input", product / "test", "--output", tmp_path / "out"]
    subprocess.run(
        [sys.executable, "-m", "anomaly", "infer", *map(str, where), "--device", "cpu"],
        env=environment(level, threads), check=True, capture_output=True,
    )  # fmt: skip
    assert_equal_on_terms(scored(inferred), scored(tmp_path / "out"))


def test_threads_and_batches_move_last_digits_only(
    inferred: Path,
    run_folder: Path,
    product: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = ["--model", run_folder, "--input", product / "test", "--output", tmp_path / "out"]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert command("infer", [*where, "--device", "cpu"])[0] == 0
    assert_equal_on_terms(scored(inferred), scored(tmp_path / "out"))
    detector = anomaly.load(run_folder, "cpu")
    alone = [detector.predict(path) for path, _, _ in scored(inferred)]
    found = [(str(one.path), one.verdict, one.score) for one in alone]
    assert_equal_on_terms(scored(inferred), found)


def test_threads_and_batches_make_the_same_model(
    product: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to as many threads as batches: with more, several share a batch."""
    runs = []
    for threads, batch in ((2, 8), (3, 3)):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        runs.append(tmp_path / str(threads))
        arguments = train_arguments(product, runs[-1], f"batch_size={batch}")
        assert command("train", arguments)[0] == 0
    for name in ("scorer.safetensors", "calibration.json", "thresholds.json"):
        one, other = ((run / "model" / name).read_bytes() for run in runs)
        assert one == other, name
