"""Run tests as two older x86 processors compute them: `make test-portable`, or

    python tests/portable.py tests -k "not browser"

Each library that picks instructions by the processor is told to leave the newer ones alone.
`test_portable.py` checks, in each of these runs, that all of them obeyed.
"""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]

# oneDNN: convolutions. MKL: torch's matrix products and factorisations. ATen: everything else of
# torch. OpenBLAS: numpy's, scipy's and faiss's products. oneDNN knows no SSE4.2, but SSE4.1.
LEVELS = {
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "OPENBLAS_CORETYPE": "Haswell",
        "FAISS_SIMD_LEVEL": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
        "OPENCV_CPU_DISABLE": "AVX512-SKX",
    },
    "sse4.2": {
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ATEN_CPU_CAPABILITY": "default",
        "OPENBLAS_CORETYPE": "Nehalem",
        "FAISS_SIMD_LEVEL": "NONE",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
        "OPENCV_CPU_DISABLE": "AVX512-SKX,AVX2,FP16,AVX",
    },
}
RUNS = [("avx2", 4), ("sse4.2", 1)]

# What rounding could turn: selections, distances, maps and verdicts.
NUMERICAL = [
    "tests/test_portable.py",
    "tests/methods/test_padim.py",
    "tests/methods/patchcore",
    "tests/maps/test_anomaly_map.py",
    "tests/backbones/test_extractor.py",
]


def environment(level: str, threads: int) -> dict[str, str]:
    """The environment of this process, with instructions and number of threads held down."""
    # MKL takes no more threads than there are cores unless it is told so by its own variables.
    own = {"MKL_NUM_THREADS": str(threads), "MKL_DYNAMIC": "FALSE"}
    return {**os.environ, **LEVELS[level], "OMP_NUM_THREADS": str(threads), **own}


def main() -> int:
    command, codes = [sys.executable, "-m", "pytest", *(sys.argv[1:] or NUMERICAL)], []
    for run in RUNS:
        print("as {} with {} threads".format(*run), flush=True)
        codes.append(subprocess.run(command, env=environment(*run), cwd=REPOSITORY).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
