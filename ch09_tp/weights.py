"""Fills a model from a checkpoint, one tensor at a time: the file is mapped, never read as a whole."""

from __future__ import annotations

import torch

from common.checkpoints import Checkpoint, TensorSlice

from .model import Decoder

IGNORED = ("rotary_emb.inv_freq",)  # computed from the config
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load(model: Decoder, checkpoint: Checkpoint) -> None:
    """Raises ValueError if the checkpoint lacks a tensor, has one of another shape, or has one the model cannot use."""
    targets = model.targets()
    with checkpoint.open() as source:
        names = set(source.names())
        missing = sorted(targets.keys() - names)
        if missing:
            raise ValueError(f"{checkpoint.name}: {len(missing)} tensors are missing, the first is {missing[0]}")
        known = {*targets, HEAD}
        unknown = sorted(name for name in names - known if not name.endswith(IGNORED))
        if unknown:
            raise ValueError(
                f"{checkpoint.name}: this decoder has no place for {len(unknown)} tensors, e.g. {unknown[0]}"
            )
        surplus = HEAD in names and HEAD not in targets
        if surplus and not _equal(source.slice(HEAD), source.slice(EMBEDDING)):
            raise ValueError(
                f"{checkpoint.name}: config.json ties the head to the embedding, but {HEAD} is not equal to it"
            )
        for name, loads in targets.items():
            piece = source.slice(name)
            for take in loads:
                try:
                    take(piece)
                except ValueError as error:
                    raise ValueError(f"{checkpoint.name}: {name} {tuple(piece.shape)} does not fit: {error}") from None
    model.finish()


def _equal(a: TensorSlice, b: TensorSlice, rows: int = 4096) -> bool:
    """Read in parts: a vocabulary times the hidden size can be a gigabyte."""
    parts = [slice(at, at + rows) for at in range(0, a.shape[0], rows)]
    return a.shape == b.shape and all(torch.equal(a[part], b[part]) for part in parts)
