"""Requests that share steps get what each would get alone: transformers' greedy tokens, and the samples of their seed.

All prompts of the parity suite go in together, in random order, at random steps, cut by random budgets, among others that
are aborted; where memory is in pages, also in pools so small that requests are thrown out and computed again.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import pytest
import torch

from tests.conftest import BATCHING, briefly, chapter
from tests.oracle import assert_greedy
from tests.prompts import PROMPTS
from tests.scheduling import has_option, part
from tests.test_parity import LENGTHS, MODELS, TOKENS, compared, folder_of, options, prompt_of

PAGED = [name for name in BATCHING if name > "ch07"]
PAGE_SIZES = (1, 16, 64, 256)
BUDGETS = (1, 2, 3, 7, 32, 128, 500)
# Near the ends of pages, so that a few output tokens need another one; two share 150 tokens with the one of 200.
MORE_LENGTHS = (60, 62, 125, 190, 250, 252)
TINY_CONTEXT = 300

Prompt = tuple[int, ...]


@pytest.fixture(params=PAGED)
def paged_chapter(request):
    """Every chapter whose KV memory is in pages, in turn."""
    return chapter(request.param)


@functools.cache
def tiny_prompts(vocab: int = 1003) -> tuple[Prompt, ...]:
    """The texts as the tiny tokenizer cuts them, and random ids; all different."""
    from common.tiny import cached_tiny_model

    tokenizer = part(chapter(BATCHING[0]), "tokenizer").Tokenizer(cached_tiny_model("llama"))
    texts = [tuple(tokenizer.encode(text)) for text in PROMPTS]
    ids = [tuple(prompt_of(n, vocab)) for n in (*LENGTHS, *MORE_LENGTHS)]
    shared = [tuple(prompt_of(200, vocab)[:150] + prompt_of(n, vocab)) for n in (5, 40)]
    found = [p for p in (*texts, *ids, *shared) if len(p) + TOKENS <= TINY_CONTEXT]
    assert len(set(found)) == len(found) > 30
    return tuple(found)


@functools.cache
def checked(folder: str, prompt: Prompt, output: Prompt) -> int:
    """assert_greedy, once for all that give the same output."""
    return assert_greedy(folder, prompt, output)


def run_together(
    llm, work: dict[Prompt, object], rng: random.Random, noise: Sequence[Prompt] = ()
) -> dict[Prompt, object]:
    """{prompt: its output} of requests {prompt: its params} that arrive in random order, some of them in later steps.

    Each prompt of ``noise`` arrives in between and is aborted some steps later, or before it has run.
    """
    params = next(iter(work.values()))
    spread = rng.choice((0, 10, 40))
    arrivals = [(rng.randint(0, spread), prompt, own) for prompt, own in work.items()]
    arrivals += [(rng.randint(0, spread), prompt, params) for prompt in noise]
    rng.shuffle(arrivals)
    arrivals.sort(key=lambda arrival: arrival[0])
    aborts: list[tuple[int, int]] = []
    outputs: dict[Prompt, object] = {}
    step = 0
    while arrivals or llm.has_work():
        while arrivals and arrivals[0][0] <= step:
            _, prompt, own = arrivals.pop(0)
            rid = llm.add(list(prompt), own)
            if prompt in noise:
                aborts.append((step + rng.choice((0, 1, 5, 12)), rid))
        for at, rid in aborts:
            if at <= step:
                llm.abort(rid)
        for output in llm.step():
            prompt = tuple(output.prompt_token_ids)
            assert prompt not in outputs, "an output comes once"
            outputs[prompt] = output
        step += 1
    assert outputs.keys() == {*work, *noise}
    return {prompt: outputs[prompt] for prompt in work}


def noise_of(rng: random.Random, count: int = 6) -> list[Prompt]:
    return [tuple(rng.randrange(4, 1003) for _ in range(rng.choice((1, 9, 80)))) for _ in range(count)]


def assert_greedy_together(module, model: str, seed: int, tokens: int = TOKENS, **more) -> dict[str, int]:
    """Run all tiny prompts together and compare each with transformers; returns the engine's counters."""
    folder, rng = folder_of(model), random.Random(seed)
    params = module.SamplingParams(max_tokens=tokens, ignore_eos=True)
    vocab = MODELS[model][1].get("vocab_size", 1003)
    with module.LLM(folder, max_model_len=TINY_CONTEXT, **options(**more)) as llm:
        outputs = run_together(llm, dict.fromkeys(tiny_prompts(min(vocab, 1003)), params), rng, noise_of(rng))
        stats, books = llm.stats(), llm.engine.kv.ledger()
    total = 0
    for prompt, output in outputs.items():
        assert output.finish_reason == "length" and len(output.token_ids) == tokens
        total += checked(folder, prompt, tuple(output.token_ids))
    assert total > 0.95 * tokens * len(outputs), "near ties are rare"
    assert books["owned"] == stats["running"] == stats["waiting"] == 0
    assert books["free"] + books["cached"] == books["total"]
    return stats


# ---- greedy


@pytest.mark.parametrize("budget", (1, 3, 32, 500))
def test_all_prompts_together_at_every_budget(batching_chapter, budget):
    assert_greedy_together(batching_chapter, "llama", budget, max_batch_tokens=budget)


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("model", ["llama3rope", "qwen2", "qwen3", "mistral"])
def test_all_prompts_together_on_every_architecture(batching_chapter, model, native):
    rng = random.Random(f"{model} {native}")
    more = {"max_batch_tokens": rng.choice(BUDGETS[2:]), "max_running": rng.choice((2, 5, 64)), "native": native}
    assert_greedy_together(batching_chapter, model, rng.randrange(1000), **more)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", MODELS)
def test_all_prompts_together_on_every_model_in_many_orders(batching_chapter, model, seed):
    rng = random.Random(f"{model} {seed}")
    more = {"max_batch_tokens": rng.choice(BUDGETS), "max_running": rng.choice((1, 2, 5, 16, 64))}
    more["scheduler"] = rng.choice(("continuous", "continuous", "static"))
    if has_option(batching_chapter, "page_size"):
        more["page_size"] = rng.choice((1, 2, 4, 8, 16, 32, 64, 128, 256))
    assert_greedy_together(batching_chapter, model, seed, **more)


def test_static_batches_give_the_same_tokens(batching_chapter):
    assert_greedy_together(batching_chapter, "llama", 1, scheduler="static", max_running=6, max_batch_tokens=100)


# ---- pages


def small_pool(module, page_size: int, tokens: int) -> str:
    """kv_memory in which so many tokens of the tiny model fit, in whole pages."""
    token = part(module, "kvcache").token_bytes(3, 2, 16, torch.float32)
    return str(-(-tokens // page_size) * page_size * token)


@pytest.mark.fault(3)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_of_every_size_and_a_pool_that_is_too_small(paged_chapter, page_size):
    """The longest request fits just so; whenever others run beside it somebody has to go."""
    stats = []
    for seed, budget in enumerate((500, 40)):
        memory = small_pool(paged_chapter, page_size, TINY_CONTEXT if page_size < 256 else 512)
        more = {"page_size": page_size, "kv_memory": memory, "max_batch_tokens": budget}
        stats.append(assert_greedy_together(paged_chapter, "llama", seed, **more))
    assert sum(s["preemptions"] for s in stats) > 0
    if has_option(paged_chapter, "prefix_cache") and page_size < 256:
        assert sum(s["prefix_hit_tokens"] for s in stats) > 0


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_small_pools_in_many_orders(paged_chapter, page_size, seed):
    rng = random.Random(f"{page_size} {seed}")
    tokens = max(TINY_CONTEXT, 2 * page_size) + rng.choice((0, 1, 2, 4)) * page_size
    more = {"page_size": page_size, "kv_memory": small_pool(paged_chapter, page_size, tokens)}
    if has_option(paged_chapter, "prefix_cache"):
        more["prefix_cache"] = rng.random() < 0.8
    assert_greedy_together(paged_chapter, "llama", seed, tokens=20, max_batch_tokens=rng.choice(BUDGETS[2:]), **more)


@pytest.mark.parametrize("page_size", [3, 512, 0, -16])
def test_other_page_sizes_are_refused(paged_chapter, page_size):
    with pytest.raises(ValueError, match=f"page_size must be a power of two from 1 to 256, got {page_size}"):
        paged_chapter.LLM(folder_of("llama"), **options(page_size=page_size))


# ---- samples


def sampled(module, seed: int, **more) -> tuple[dict[Prompt, tuple[int, ...]], dict[str, int]]:
    """Output of each prompt with a seed of its own, and the counters; ``seed`` is that of the company."""
    rng = random.Random(seed)
    work = {
        prompt: module.SamplingParams(max_tokens=16, temperature=1.0, seed=i, ignore_eos=True, top_p=(1.0, 0.9)[i % 2])
        for i, prompt in enumerate(tiny_prompts())
    }
    with module.LLM(folder_of("llama"), max_model_len=TINY_CONTEXT, **options(**more)) as llm:
        outputs = run_together(llm, work, rng, noise_of(rng) if seed else ())
        stats = llm.stats()
    return {prompt: tuple(output.token_ids) for prompt, output in outputs.items()}, stats


@functools.cache
def sampled_alone(name: str) -> dict[Prompt, tuple[int, ...]]:
    return sampled(chapter(name), 0, max_running=1, max_batch_tokens=1024)[0]


@pytest.mark.parametrize("seed", [1, 2])
def test_samples_depend_on_the_seed_and_not_on_the_company(batching_chapter, seed):
    alone = sampled_alone(batching_chapter.__name__)
    together, _ = sampled(batching_chapter, seed, max_batch_tokens=(9, 70)[seed - 1])
    assert together == alone
    assert len(set(alone.values())) == len(alone)


@pytest.mark.fault(14)
def test_samples_do_not_depend_on_preemption(paged_chapter):
    more = {"page_size": 1, "kv_memory": small_pool(paged_chapter, 1, TINY_CONTEXT), "max_batch_tokens": 250}
    preemptions = 0
    for seed in (5, 6):
        together, stats = sampled(paged_chapter, seed, **more)
        assert together == sampled_alone(paged_chapter.__name__)
        preemptions += stats["preemptions"]
    assert preemptions > 0


# ---- the real model


@pytest.mark.slow
@pytest.mark.parametrize("batching_chapter", briefly(BATCHING, BATCHING[0], BATCHING[-1]), indirect=True)
def test_smollm2_all_prompts_together(batching_chapter):
    rng = random.Random(batching_chapter.__name__)
    with batching_chapter.LLM(
        "smollm2-135m", dtype="float32", threads=1, max_model_len=1024, max_batch_tokens=rng.randint(50, 150)
    ) as llm:
        work = {
            tuple(llm.tokenizer.encode(text)): batching_chapter.SamplingParams(max_tokens=count, ignore_eos=True)
            for text, count in PROMPTS.items()
        }
        outputs = run_together(llm, work, rng)
        steps, alone = llm.stats()["steps"], sum(PROMPTS.values())
    total = sum(compared(prompt, tuple(output.token_ids)) for prompt, output in outputs.items())
    assert total > 0.9 * alone, "near ties are rare"
    assert steps < alone / 4, "they really shared their steps"
