"""Speculation changes how many forwards the tokens take, and nothing else: greedy output, ends, penalties, logprobs."""

from __future__ import annotations

import functools
import random

import pytest

from common.checkpoints import resolve
from common.tiny import cached_tiny_model, tiny_model
from tests.conftest import chapter
from tests.engine_runs import PROMPT, drain, engines_of, params_of, run
from tests.prompts import PROMPTS
from tests.scheduling import part
from tests.speculation import NEVER_DEAR, SPECULATIVE, Prophet, guess_with
from tests.test_batching_parity import TINY_CONTEXT, checked, noise_of, run_together, small_pool, tiny_prompts
from tests.test_engine_rules import generation
from tests.test_parity import compared, folder_of, options

TOKENS = 24
SELF = {"speculative": "draft", "draft_model": folder_of("llama")}
OTHER = {"speculative": "draft", "draft_model": folder_of("qwen3")}  # its guesses are as good as chance
NGRAM = {"speculative": "ngram"}
WAYS = {"ngram": NGRAM, "a model that knows nothing": OTHER, "itself": SELF}


@pytest.fixture(params=SPECULATIVE)
def module(request):
    """Every chapter that speculates, in turn."""
    return chapter(request.param)


@pytest.fixture
def params(module):
    return params_of(module)


@pytest.fixture
def engine(module):
    yield from engines_of(module)


@functools.cache
def plain(name: str) -> dict[tuple[int, ...], list[int]]:
    """The greedy output of all tiny prompts without speculation, each checked against transformers."""
    module = chapter(name)
    with module.LLM(folder_of("llama"), max_model_len=TINY_CONTEXT, **options()) as llm:
        params = module.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        outputs = llm.generate([list(prompt) for prompt in tiny_prompts()], params, progress=False)
    return {tuple(o.prompt_token_ids): o.token_ids for o in outputs}


def prophet_of(module, seed: int, wrong: float) -> Prophet:
    """Knows what all tiny prompts go on with."""
    futures = plain(module.__name__)
    return Prophet(lambda req: futures[tuple(req.token_ids[: req.prompt_len])], seed, wrong, vocab=1003)


def together(module, seed: int, proposer: Prophet | None = None, eager: bool = False, **more) -> dict[str, int]:
    """All tiny prompts in one engine, in random order and among aborted ones: the plain output. Returns the counters.

    eager: guess as much as there is room for, whatever it costs.
    """
    rng, params = random.Random(seed), module.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    futures = plain(module.__name__)
    with module.LLM(folder_of("llama"), max_model_len=TINY_CONTEXT, **options(**more)) as llm:
        if proposer:
            known = proposer.future
            proposer.future = lambda req: known(req) if tuple(req.token_ids[: req.prompt_len]) in futures else []
            guess_with(module, llm, proposer)
        if eager:
            llm.engine.scheduler.speculator.free_rows, llm.engine.scheduler.speculator.proposer.cost = NEVER_DEAR, 0.0
        outputs = run_together(llm, dict.fromkeys(futures, params), rng, noise_of(rng))
        stats, books = llm.stats(), llm.engine.kv.ledger()
        shadows = getattr(llm.engine.scheduler.speculator.proposer, "shadows", {})
        assert not shadows, "nothing is kept for a request that is over"
    for prompt, output in outputs.items():
        checked(folder_of("llama"), prompt, tuple(output.token_ids))
        assert output.token_ids == futures[prompt], "or the two differ in a near tie"
        assert 0 <= output.accepted_tokens <= min(output.draft_tokens, TOKENS)
    assert books["owned"] == 0
    assert sum(o.draft_tokens for o in outputs.values()) <= stats["draft_tokens"]
    return stats


# ---- greedy output


@pytest.mark.parametrize("way", WAYS)
def test_all_prompts_together(module, way):
    stats = together(module, 3, eager=True, max_batch_tokens=200, **WAYS[way])
    if way == "itself":
        assert stats["accepted_tokens"] > 0.99 * stats["draft_tokens"] > 300
    elif way != "ngram":
        assert stats["accepted_tokens"] < 0.05 * stats["draft_tokens"]


@pytest.mark.parametrize("wrong", [0.0, 0.2, 1.0])
def test_an_adversary_who_is_right_as_often_as_it_likes(module, wrong):
    stats = together(module, 4, prophet_of(module, 5, wrong), max_batch_tokens=90, **NGRAM)
    rate = stats["accepted_tokens"] / stats["draft_tokens"]
    assert stats["draft_tokens"] > 150 and (wrong < 0.5) == (rate > 0.3) and (wrong < 1 or rate == 0)


@pytest.mark.parametrize("budget", [1, 3, 33])
def test_every_budget(module, budget):
    together(module, budget, prophet_of(module, 6, 0.2), max_batch_tokens=budget, **NGRAM)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_pools_that_are_too_small(module, page_size):
    """Requests are thrown out; the pages of rejected tokens come back."""
    memory = small_pool(module, page_size, TINY_CONTEXT if page_size < 256 else 512)
    more = {"page_size": page_size, "kv_memory": memory, "max_batch_tokens": 250}
    stats = together(module, 7, prophet_of(module, 8, 0.3), **NGRAM, **more)
    assert stats["preemptions"] > 0 and stats["accepted_tokens"] > 0


@pytest.mark.parametrize("way", ["a model that knows nothing", "itself"])
def test_a_draft_model_whose_own_memory_is_too_small(module, way):
    memory = small_pool(module, 16, 4 * TINY_CONTEXT)  # divided between the two
    stats = together(module, 9, eager=True, page_size=16, kv_memory=memory, max_batch_tokens=250, **WAYS[way])
    assert stats["draft_tokens"] > 0


def test_static_batches_and_no_prefix_cache(module):
    together(module, 10, prophet_of(module, 11, 0.2), scheduler="static", max_running=6, **NGRAM)
    together(module, 12, eager=True, prefix_cache=False, max_batch_tokens=100, **SELF)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(30))
def test_many_orders(module, seed):
    rng = random.Random(seed)
    size = rng.choice((1, 4, 16, 64))
    more = {"page_size": size, "max_batch_tokens": rng.choice((2, 7, 40, 200)), "num_draft_tokens": rng.randint(1, 12)}
    more["native"] = rng.choice(("auto", "off"))
    if rng.random() < 0.7:
        more["kv_memory"] = small_pool(module, size, TINY_CONTEXT + rng.choice((0, 2, 5)) * size)
    if rng.random() < 0.5:
        together(module, seed, prophet_of(module, seed, rng.random()), **NGRAM, **more)
    else:
        if "kv_memory" in more:
            more["kv_memory"] = str(4 * int(more["kv_memory"]))
        together(module, seed, eager=rng.random() < 0.7, **rng.choice((NGRAM, SELF, OTHER)), **more)


@pytest.mark.parametrize("way", WAYS)
def test_up_to_the_last_position_of_the_context(module, engine, params, way):
    prompt = list(tiny_prompts()[3])[:9]
    wanted = 64 - len(prompt)
    [want] = run(engine(max_model_len=64), [prompt], params(max_tokens=wanted))
    [output] = run(engine(max_model_len=64, **WAYS[way]), [prompt], params(max_tokens=wanted))
    assert output.token_ids == want.token_ids and len(output.token_ids) == wanted


def test_a_draft_model_with_a_shorter_context_guesses_as_far_as_it_goes(module, engine, params):
    short = cached_tiny_model("llama", max_position_embeddings=40)
    [want] = run(engine(), [PROMPT], params(max_tokens=80))
    [output] = run(engine(speculative="draft", draft_model=str(short)), [PROMPT], params(max_tokens=80))
    assert output.token_ids == want.token_ids
    assert 20 <= output.accepted_tokens <= 40


def test_a_conversation_finds_its_prefix_in_both_caches(module, engine, params):
    """The answer enters the tree with its own tokens only, so that the next turn is right."""
    llm, bare = engine(page_size=1, **SELF), engine(page_size=1)
    ids, hits = list(PROMPT), 0
    for turn in range(4):
        [want] = run(bare, [ids], params(max_tokens=9))
        [output] = run(llm, [ids], params(max_tokens=9))
        assert output.token_ids == want.token_ids
        assert output.cached_tokens == want.cached_tokens >= hits
        hits, ids = output.cached_tokens, [*ids, *output.token_ids, 5 + turn, 77]
    assert hits > 20 and llm.stats()["prefix_hit_tokens"] == bare.stats()["prefix_hit_tokens"]


# ---- where a request ends, at every position of an accepted run


@pytest.fixture
def prophesied(module, engine, params):
    """make(folder=, future=, **options): an engine whose guesses are right, eight at a time."""

    def make(folder=None, wrong: float = 0.0, future=None, **more):
        [free] = run(engine(), [PROMPT], params(max_tokens=40))
        llm = engine(folder, speculative="ngram", **more)
        prophet = Prophet(lambda req: future or free.token_ids, 1, wrong, vocab=1003)
        if not wrong:
            prophet._draft = lambda req, count: list((future or free.token_ids)[req.output_len :][:count])
        guess_with(module, llm, prophet)
        return llm, free

    return make


def test_max_tokens_at_every_position(prophesied, params):
    llm, free = prophesied()
    for wanted in range(1, 20):
        [output] = run(llm, [PROMPT], params(max_tokens=wanted))
        assert (output.token_ids, output.finish_reason) == (free.token_ids[:wanted], "length")
        assert output.accepted_tokens == output.draft_tokens == sum(min(8, left) for left in range(wanted - 2, 0, -9))


@pytest.mark.parametrize("how", ["eos", "stop token", "stop string"])
def test_the_end_at_every_position(prophesied, params, tmp_path, how):
    llm, free = prophesied()
    for at in range(2, 20):
        token = free.token_ids[at]
        first = free.token_ids.index(token)
        if first < at:
            continue
        if how == "eos":
            folder = tiny_model("llama", tmp_path / str(at))
            generation(folder, eos_token_id=[token])
            llm, _ = prophesied(folder)
            own = {"ignore_eos": False}
        else:
            text = llm.tokenizer.decode([token])
            own = {"stop_token_ids": [token]} if how == "stop token" else {"stop": [text]}
            if how == "stop string" and (
                not text.strip("\ufffd ") or text in llm.tokenizer.decode(free.token_ids[:at])
            ):
                continue
        [output] = run(llm, [PROMPT], params(max_tokens=40, **own))
        assert output.token_ids == free.token_ids[: at + 1], f"nothing follows position {at}"
        assert output.finish_reason == "stop"
        assert output.text == llm.tokenizer.decode(free.token_ids[:at])
        assert output.accepted_tokens == at - at // 9 <= output.draft_tokens
        assert llm.engine.kv.ledger()["owned"] == 0


LOGPROBS = {"logprobs": 3}
PENALTIES = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8, "presence_penalty": -0.3},
    {"repetition_penalty": 0.8, "frequency_penalty": 1.0, "temperature": 0.8, "seed": 3, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "min_p": 0.02},
    {},
]


@pytest.mark.parametrize("wrong", [0.0, 0.4])
@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_samples_and_logprobs_are_those_without_speculation(prophesied, engine, params, penalties, wrong):
    """Certain guesses do not even change which token a seed gives."""
    own = params(max_tokens=30, **penalties, **LOGPROBS)
    [want] = run(engine(), [PROMPT], own)
    llm, _ = prophesied(future=want.token_ids, wrong=wrong)
    [output] = run(llm, [PROMPT], own)
    assert output.token_ids == want.token_ids
    assert output.accepted_tokens > (20 if not wrong else 3)
    assert len(output.logprobs) == 30
    for a, b in zip(output.logprobs, want.logprobs, strict=True):
        assert a["token_id"] == b["token_id"] and a["top"].keys() == b["top"].keys()
        assert a["logprob"] == pytest.approx(b["logprob"], abs=1e-4)
        assert list(a["top"].values()) == pytest.approx(list(b["top"].values()), abs=1e-4)


def test_ngram_samples_are_those_of_the_seed(module, engine, params):
    own = [params(max_tokens=60, temperature=0.6, frequency_penalty=-2.0, seed=i) for i in range(6)]
    want = run(engine(), [PROMPT] * 6, own)
    llm = engine(speculative="ngram")
    got = run(llm, [PROMPT] * 6, own)
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert llm.stats()["accepted_tokens"] > 20


# ---- counters, options, aborts


def test_counters(module, engine, params):
    llm = engine(**SELF)
    outputs = run(llm, [PROMPT, PROMPT[:3]], params(max_tokens=30))
    stats = llm.stats()
    assert stats["draft_tokens"] == sum(o.draft_tokens for o in outputs) > 30
    assert stats["accepted_tokens"] == sum(o.accepted_tokens for o in outputs)
    assert stats["decode_tokens"] + stats["prefill_tokens"] == stats["forwarded_tokens"]
    # Each decode step of a request gives one token besides the accepted ones; the first one is the prefill's.
    assert stats["decode_tokens"] == sum(o.draft_tokens + len(o.token_ids) - 1 - o.accepted_tokens for o in outputs)
    assert stats["steps"] < 15


def test_a_flush_empties_the_draft_models_cache_too(module, engine, params):
    llm = engine(**SELF)
    run(llm, [PROMPT], params(max_tokens=30))
    kv = llm.engine.scheduler.speculator.proposer.kv
    assert kv.ledger()["cached"] > 0
    llm.engine.handle(part(module, "message").Flush())
    assert kv.ledger()["cached"] == llm.engine.kv.ledger()["cached"] == 0


def test_without_speculation_nothing_is_counted(engine, params):
    llm = engine()
    [output] = run(llm, [PROMPT], params())
    assert (
        (output.draft_tokens, output.accepted_tokens)
        == (0, 0)
        == (llm.stats()["draft_tokens"], llm.stats()["accepted_tokens"])
    )


@pytest.mark.parametrize("way", WAYS)
def test_aborts_at_any_step_leave_nothing(module, engine, params, way):
    llm = engine(page_size=4, **WAYS[way])
    rng = random.Random(3)
    rids = [
        llm.add([rng.randrange(4, 1003) for _ in range(rng.choice((1, 30)))], params(max_tokens=60)) for _ in range(12)
    ]
    for rid in rids:
        for _ in range(rng.randint(0, 3)):
            llm.step()
        llm.abort(rid)
        proposer = llm.engine.scheduler.speculator.proposer
        assert rid not in getattr(proposer, "shadows", {})
    drain(llm)
    for kv in (llm.engine.kv, *([proposer.kv] if hasattr(proposer, "kv") else [])):
        assert kv.ledger()["owned"] == 0
        kv.flush()
        assert kv.ledger()["free"] == kv.ledger()["total"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"speculative": "draft"}, "speculative draft and draft_model go together"),
        ({"draft_model": "dummy:llama-tiny"}, "speculative draft and draft_model go together"),
        ({"speculative": "ngram", "draft_model": "x"}, "speculative draft and draft_model go together"),
        ({"speculative": "eagle"}, "speculative must be one of none, ngram, draft, got 'eagle'"),
        ({"num_draft_tokens": 0}, "num_draft_tokens must be from 1 to 64, got 0"),
        ({"num_draft_tokens": 65}, "num_draft_tokens must be from 1 to 64, got 65"),
    ],
)
def test_options_that_cannot_be_are_refused(engine, more, message):
    with pytest.raises(ValueError, match=message):
        engine(**more)


def test_a_draft_model_with_another_vocabulary_is_refused_with_both_sizes(engine):
    other = cached_tiny_model("llama", vocab_size=1500)
    with pytest.raises(ValueError, match=r"vocabulary of 1500 tokens, .* one of 1003: they must be the same"):
        engine(speculative="draft", draft_model=str(other))


def test_the_trace_shows_guesses_and_what_became_of_them(module, params):
    from common.trace import Tracer

    tracer = Tracer()
    with module.LLM(folder_of("llama"), tracer=tracer, **options(**SELF)) as llm:
        run(llm, [PROMPT], params(max_tokens=20))
    events = [event for event in tracer.events if event.component == "Proposer"]
    assert {event.action for event in events} == {"propose", "accept"}
    assert any(event.note == "7 of 7" for event in events)
    forwards = [event for event in tracer.events if event.component == "ModelRunner"]
    assert max(event.extend_len for event in forwards) == 8, "those of the target, and no others"


# ---- the real model


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ngram", "itself"])
def test_smollm2_all_prompts_together(module, way):
    more = {"speculative": "ngram"} if way == "ngram" else {"speculative": "draft", "draft_model": "smollm2-135m"}
    chosen = list(PROMPTS.items())[:: 1 if way == "ngram" else 4]
    with module.LLM(
        "smollm2-135m", dtype="float32", threads=1, max_model_len=1024, max_batch_tokens=140, **more
    ) as llm:
        work = {tuple(llm.tokenizer.encode(t)): module.SamplingParams(max_tokens=n, ignore_eos=True) for t, n in chosen}
        outputs = run_together(llm, work, random.Random(way))
        stats = llm.stats()
    total = sum(compared(prompt, tuple(output.token_ids)) for prompt, output in outputs.items())
    assert total > 0.9 * sum(n for _, n in chosen), "near ties are rare"
    assert stats["accepted_tokens"] > (0.95 * stats["draft_tokens"] if way == "itself" else 5)


def test_guesses_are_what_the_draft_model_says_about_the_text_as_it_is(module, engine, params):
    """Rejected guesses leave nothing behind in the draft model's cache, also where the request goes on alone for some
    steps after that: each guess is greedy, by transformers."""
    llm = engine(page_size=4, max_batch_tokens=40, **OTHER)
    speculator, rng, made = llm.engine.scheduler.speculator, random.Random(2), []
    proposer, propose, guess = speculator.proposer, speculator.proposer.propose, speculator.guess

    def recording(wanted):
        guesses = propose(wanted)
        made.extend(
            (tuple(req.token_ids), tuple(guess.tokens)) for (req, _), guess in zip(wanted, guesses, strict=True)
        )
        return guesses

    proposer.propose, proposer.cost, speculator.free_rows = recording, 0.0, NEVER_DEAR
    speculator.guess = lambda items, room: guess(items, room) if rng.random() < 0.6 else []
    run(llm, [PROMPT, list(tiny_prompts()[-1])[:90]], params(max_tokens=40))
    assert sum(len(guess) for _, guess in made) > 150
    assert any(not guess for _, guess in made), "it takes several steps to catch up on 90 tokens"
    assert sum(checked(folder_of("qwen3"), prompt, guess) for prompt, guess in made if guess) > 150


def test_the_draft_model_is_the_one_asked_for(module, engine):
    llm = engine(**OTHER)
    proposer = llm.engine.scheduler.speculator.proposer
    assert proposer.runner.model.config.qk_norm and not llm.engine.runner.model.config.qk_norm
    assert proposer.kv.num_pages == llm.engine.kv.num_pages
    config = part(module, "model").ModelConfig.from_dict(resolve(folder_of("qwen3")).config)
    assert proposer.runner.model.config == config
