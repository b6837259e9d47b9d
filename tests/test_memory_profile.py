"""How much memory keys and values get where the user names no number: what the largest step leaves free."""

from __future__ import annotations

import importlib

import pytest
import torch

from common.tiny import cached_tiny_model
from tests.conftest import CHAPTERS

PAGED = [name for name in CHAPTERS if name >= "ch07"]


@pytest.fixture(params=PAGED)
def llm(request: pytest.FixtureRequest):
    module = importlib.import_module(request.param)
    options = {"dtype": "float32", "threads": 1, "max_running": 6, "max_batch_tokens": 50, "page_size": 4}
    with module.LLM(str(cached_tiny_model("qwen3")), **options) as llm:
        yield llm


def test_the_profile_runs_the_largest_step_over_a_cache_of_its_own(llm, monkeypatch):
    engine = llm.engine
    model, seen = engine.runner.model, []
    forward = type(model).forward

    def counting(self, ctx):
        logits = forward(self, ctx)
        seen.append((len(ctx.inp.ids), logits.shape, ctx.backend.kv))
        return logits

    drawn, sample = [], type(engine.sampler).sample

    def drawing(self, logits, rows):
        drawn.append((logits.shape, rows[0].params.temperature, rows[0].params.top_p))
        return sample(self, logits, rows)

    monkeypatch.setattr(type(model), "forward", counting)
    monkeypatch.setattr(type(engine.sampler), "sample", drawing)
    before = engine.kv.ledger()
    engine._run_widest_step(model)
    [(tokens, shape, cache)] = seen
    assert tokens == 48, "6 requests of 8 tokens: as near to 50 as equal parts come"
    assert shape == (6, engine.limits.vocab_size), "as many rows of logits as there can be"
    assert cache is not engine.kv and engine.kv.ledger() == before
    assert engine.stats()["forwarded_tokens"] == 0
    assert drawn == [(shape, 1.0, 0.9)], "the memory that draws take is part of the step"


@pytest.mark.parametrize("named", [True, False])
def test_a_gpu_is_profiled_unless_the_memory_is_named(llm, monkeypatch, named):
    """The CUDA calls are stood in for; everything else is the engine's own."""
    engine, order = llm.engine, []
    monkeypatch.setattr(type(engine), "_run_widest_step", lambda self, model: order.append("step"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: order.append("ask") or (1_000_000, 9_000_000))
    monkeypatch.setattr(type(engine), "_new_cache", lambda self, model, pages: pages)
    monkeypatch.setattr(engine, "device", torch.device("cuda"))
    monkeypatch.setattr(engine.config, "kv_memory_bytes", 64 * 1024 if named else None)
    build = getattr(engine, "_build_cache", None) or (lambda model: engine._build_caches([model])[0])
    pages = build(engine.runner.model)
    config = engine.model_config
    page_bytes = 4 * 2 * config.layers * config.kv_heads * config.head_dim * 4
    if named:
        assert order == [] and pages == 64 * 1024 // page_bytes
    else:
        assert order == ["step", "ask"] and pages == 900_000 // page_bytes
