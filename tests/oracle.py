"""transformers as the independent oracle, and how its answers are compared."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

NEAR_TIE = 1e-4  # below this top-1/top-2 gap either token is right and the comparison ends there


@functools.lru_cache(maxsize=3)
def hf_model(folder: Path | str) -> torch.nn.Module:
    """The checkpoint in float32 as transformers runs it."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def hf_logits(folder: Path | str, ids: Sequence[int]) -> torch.Tensor:
    """float32[len(ids), V]: row i predicts token i + 1."""
    return hf_model(folder)(torch.tensor([list(ids)])).logits[0].float()


@torch.inference_mode()
def hf_generate(folder: Path | str, prompt: Sequence[int], max_tokens: int, ignore_eos: bool = True) -> list[int]:
    """Greedy output of transformers' own generation loop."""
    more = (
        {"eos_token_id": -1} if ignore_eos else {}
    )  # min_new_tokens would forbid the EOS token instead of ignoring it
    ids = torch.tensor([list(prompt)])
    model = hf_model(folder)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, **more
    )
    return out[0, len(prompt) :].tolist()


def assert_greedy(folder: Path | str, prompt: Sequence[int], output: Sequence[int]) -> int:
    """Every output token is the argmax of transformers' logits after the tokens before it, up to the first near tie.

    By induction this is equality with transformers' greedy generation. Returns how many tokens were compared.
    """
    logits = hf_logits(folder, [*prompt, *output[:-1]])[len(prompt) - 1 :]
    best = logits.topk(2).values
    for at, token in enumerate(output):
        if best[at, 0] - best[at, 1] < NEAR_TIE:
            return at
        want = int(logits[at].argmax())
        assert token == want, (
            f"output token {at} is {token}, transformers says {want} (gap {best[at, 0] - best[at, 1]:.2e})"
        )
    return len(output)
