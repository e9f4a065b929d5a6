"""Patch embeddings to measure with: real ones from a file, or generated ones of like structure."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PATCHES_AN_IMAGE = 1024


def embeddings(file: Path | None, count: int, dim: int = 1536) -> Tensor:
    """The first `count` rows of a .npy of (N, D) float32, or as many generated ones."""
    if file is None:
        return generated(count, dim)
    rows = np.load(file, mmap_mode="r")
    if len(rows) < count:
        raise SystemExit(f"{file} holds {len(rows)} embeddings; {count} are needed")
    return torch.from_numpy(np.array(rows[:count]))


def whole_images(file: Path, count: int) -> Tensor:
    """`count` rows of a .npy of (N, D) float32: whole images, evenly spread over the file."""
    rows = np.load(file, mmap_mode="r")
    images, wanted = len(rows) // PATCHES_AN_IMAGE, count // PATCHES_AN_IMAGE
    if images < wanted:
        raise SystemExit(f"{file} holds {images} images' embeddings; {wanted} are needed")
    grouped = rows[: images * PATCHES_AN_IMAGE].reshape(images, PATCHES_AN_IMAGE, -1)
    chosen = [(2 * i + 1) * images // (2 * wanted) for i in range(wanted)]
    return torch.from_numpy(grouped[chosen].reshape(wanted * PATCHES_AN_IMAGE, -1))


def generated(count: int, dim: int, seed: int = 0) -> Tensor:
    """Clusters with a falling spectrum, neighbours alike: most variance in some 50 dimensions."""
    g = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, dim + 1, dtype=torch.float32).pow(-0.75)
    axes = torch.linalg.qr(torch.randn(dim, dim, generator=g)).Q
    centres = 6 * torch.randn(200, dim, generator=g) * spectrum
    blocks = []
    for start in range(0, count, 16384):
        n = min(16384, count - start)
        which = torch.randint(len(centres), (n,), generator=g)
        spread = 0.5 + 2 * torch.rand(n, 1, generator=g)
        noise = torch.randn(n, dim, generator=g) * spectrum
        blocks.append((centres[which] + spread * noise) @ axes.T)
    return torch.cat(blocks)


def of_few_dimensions(count: int, dim: int, true: int, seed: int = 0) -> Tensor:
    """Normal numbers (count, dim) that lie in a subspace of `true` dimensions."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, true, generator=g) @ torch.randn(true, dim, generator=g)


def machine() -> str:
    """What the figures depend on, in a line."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return (
        f"{_processor()} ({_instructions()}), {torch.get_num_threads()} threads, "
        f"{device}, torch {torch.__version__}, load {load:.1f} at the start"
    )


def _processor() -> str:
    """The processor's model where the system says it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def _instructions() -> str:
    """Those that torch computes with, and whether bfloat16 and sums of 8-bit products are there."""
    read = getattr(torch.cpu, "get_capabilities", None)  # newer than the oldest torch we take
    if read is None:
        return torch.backends.cpu.get_cpu_capability()
    there = [name for name, is_there in read().items() if is_there is True]
    further = [
        sign if any(mark in name for name in there) else f"no {sign}"
        for mark, sign in (("bf16", "bf16"), ("vnni", "VNNI"))
    ]
    return ", ".join([torch.backends.cpu.get_cpu_capability(), *further])
