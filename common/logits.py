"""How far an engine's logits are from transformers': the same tokens through both, compared row by row."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.harness import Worker
from common.workloads import get

if TYPE_CHECKING:
    import numpy as np

Sequences = list[tuple[list[int], int]]


def sequences(vocab_size: int, length_scale: float = 1.0) -> Sequences:
    """What is compared: (token ids, place of the first one that the engine generates). Prompts of three lengths."""
    drawn = get("offline", vocab_size, 3 / 64, seed=11, length_scale=length_scale).requests
    outputs = max(2, round(8 * length_scale))
    cut = [r.prompt_ids[:length] for r, length in zip(drawn, (5, 33, 96), strict=True)]
    tail = get("latency", vocab_size, seed=11).requests[0].prompt_ids[:outputs]
    return [([*ids, *tail], len(ids)) for ids in cut]


def write(engine: Any, wanted: Sequence[Sequence[Any]], file: str) -> int:
    """Save float32[rows, V], the engine's logits for the generated tokens of all sequences, as .npy; returns the rows."""
    import numpy
    import torch

    rows = torch.cat([engine.logits(list(ids), start) for ids, start in wanted])
    numpy.save(file, rows.numpy())
    return len(rows)


def read(worker: Worker, wanted: Sequences) -> np.ndarray:
    """The logits of the engine in that worker, float32[rows, V]."""
    import numpy

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "logits.npy"
        worker.ask({"cmd": "logits", "sequences": wanted, "file": str(file)})
        return numpy.load(file)


def error(found: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """{max: the largest difference of a logit, rms: root mean square of the differences over that of the reference}.

    Raises ValueError where the shapes differ.
    """
    if found.shape != reference.shape:
        raise ValueError(f"logits of shape {found.shape}, and transformers has {reference.shape}")
    off = (found - reference).astype("float64")
    scale = (reference.astype("float64") ** 2).mean() ** 0.5
    return {"max": float(abs(off).max()), "rms": float((off**2).mean() ** 0.5 / scale)}
