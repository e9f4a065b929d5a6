"""PatchCore as a config names it, see `anomaly.config.methods`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anomaly.scorers.patchcore.bank_pair import is_pair
from anomaly.scorers.patchcore.fitter import MemoryBankFitter
from anomaly.scorers.patchcore.memory_bank import MemoryBank
from anomaly.scorers.patchcore.memory_bank_pair import BankPairFitter, MemoryBankPair


def fitter(
    settings: Mapping[str, Any], *, seed: int, memory_limit: int
) -> MemoryBankFitter | BankPairFitter:
    """What a config's section `model` learns with.

    Args:
        settings: its values by key.
        seed: of the projection and the first pick.
        memory_limit: bytes of projected patches held at once.
    """
    size, embedding = settings["coreset_size"], settings["embedding"]
    levels = embedding == "levels"
    banks = MemoryBankFitter(
        None if size is not None else settings["coreset_ratio"],
        size,
        seed=seed,
        memory_limit=memory_limit,
        embedding="sharp" if levels else embedding,
        reweighting=settings["neighbours"],
    )
    return BankPairFitter(banks) if levels else banks  # which may be one bank, see `prepared`


def scorer(
    tensors: dict[str, Tensor], settings: Mapping[str, Any], *, device: torch.device, cache: Path
) -> MemoryBank | MemoryBankPair:
    """The memory bank, or the two of them, that was saved.

    Args:
        tensors: as `MemoryBank.tensors` or `MemoryBankPair.tensors` gave them.
        settings: the config's section `model`, by key.
        device: where the bank goes.
        cache: folder for what an approximate search has to train first.

    Raises:
        ModelError: they aren't those of a memory bank.
    """
    # A GPU multiplies faster than faiss looks for neighbours on the CPU.
    search = settings["search"] if device.type == "cpu" else "exact"
    levels = settings["embedding"] == "levels"

    def ready(bank: MemoryBank) -> MemoryBank:
        return replace(
            bank,
            search="auto" if search == "exact" else search,
            cache=cache if search == "ivf" else None,
            embedding="sharp" if levels else settings["embedding"],
            reweighting=settings["neighbours"],
        ).to(device)

    if is_pair(tensors):
        pair = MemoryBankPair.from_tensors(tensors)
        return MemoryBankPair(ready(pair.fine), ready(pair.coarse))
    return ready(MemoryBank.from_tensors(tensors))
