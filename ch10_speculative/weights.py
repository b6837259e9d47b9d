"""Fills a model from a checkpoint, one tensor at a time: the file is mapped, never read as a whole."""

from __future__ import annotations

from common.checkpoints import Checkpoint

from .model import Decoder

IGNORED = ("rotary_emb.inv_freq",)  # computed from the config


def load(model: Decoder, checkpoint: Checkpoint) -> None:
    """Raises ValueError if the checkpoint lacks a tensor, has one of another shape, or has one the model cannot use."""
    targets = model.targets()
    with checkpoint.open() as source:
        names = set(source.names())
        missing = sorted(targets.keys() - names)
        if missing:
            raise ValueError(f"{checkpoint.name}: {len(missing)} tensors are missing, the first is {missing[0]}")
        known = {*targets, "lm_head.weight"}
        unknown = sorted(name for name in names - known if not name.endswith(IGNORED))
        if unknown:
            raise ValueError(
                f"{checkpoint.name}: this decoder has no place for {len(unknown)} tensors, e.g. {unknown[0]}"
            )
        for name, loads in targets.items():
            piece = source.slice(name)
            for take in loads:
                try:
                    take(piece)
                except ValueError as error:
                    raise ValueError(f"{checkpoint.name}: {name} {tuple(piece.shape)} does not fit: {error}") from None
    model.finish()
