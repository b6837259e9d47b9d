"""The contiguous KV cache: what it saves, whose memory it is, where keys and values go."""

from __future__ import annotations

import importlib
import types

import pytest
import torch

from ch04_kvcache import LLM, SamplingParams
from ch04_kvcache.attention import TorchBackend, causal
from ch04_kvcache.core import Batch, ForwardInput, Req, ScheduledReq
from ch04_kvcache.kvcache import KVCache, pages_for, token_bytes
from common.tiny import cached_tiny_model
from tests.conftest import BATCHING, ENGINES
from tests.oracle import assert_greedy

F32 = torch.empty(0)


def request(rid: int, length: int = 3, cached_len: int = 0) -> Req:
    req = Req(rid, list(range(10, 10 + length)), length, SamplingParams(), 8)
    req.cached_len = cached_len
    return req


def cache(pages: int = 3, page_size: int = 8) -> KVCache:
    return KVCache(layers=2, pages=pages, page_size=page_size, kv_heads=2, head_dim=4, like=F32)


def tiny(**options) -> LLM:
    return LLM(str(cached_tiny_model("llama")), dtype="float32", threads=1, debug_invariants=True, **options)


# ---- the gain, in tokens


@pytest.mark.parametrize("name", ENGINES)
def test_forwarded_tokens_of_128_in_128_out(name):
    """Without a cache every step computes the whole history: 128 + 129 + ... + 255. With it each token once."""
    module = importlib.import_module(name)
    whole = {"max_batch_tokens": 128} if name in BATCHING else {}  # a prompt that takes one step
    with module.LLM("dummy:llama-tiny", dtype="float32", threads=1, **whole) as llm:
        params = module.SamplingParams(max_tokens=128, ignore_eos=True)
        [output] = llm.generate([list(range(100, 228))], params, progress=False)
        stats = llm.stats()
    assert len(output.token_ids) == 128
    assert stats["prefill_tokens"] == 128
    assert stats["forwarded_tokens"] == (24_512 if name.startswith("ch03") else 255)
    assert stats["steps"] == 128


def test_kv_used_grows_by_what_a_step_computes():
    with tiny(max_model_len=64) as llm:
        assert llm.stats()["kv_total"] == 64 and llm.stats()["kv_used"] == 0
        llm.add([5, 6, 7, 8, 9], SamplingParams(max_tokens=4, ignore_eos=True))
        used = []
        while llm.has_work():
            llm.step()
            used.append(llm.stats()["kv_used"])
    # The last token that a request gains is never computed; the last step gives everything back.
    assert used == [5, 6, 7, 0]


def test_one_page_serves_one_request_after_another():
    """Keys and values of earlier, longer requests are still in the page; nobody reads them."""
    prompts = [[7] * 50, [400, 3], [9, 8, 7] * 9, [400, 3]]
    with tiny(max_model_len=64) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True), progress=False)
        assert llm.engine.kv.ledger() == {"free": 1, "cached": 0, "owned": 0, "total": 1}
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(cached_tiny_model("llama"), prompt, output.token_ids)
    assert outputs[1].token_ids == outputs[3].token_ids


# ---- whose memory it is


def test_a_request_gets_one_page_and_gives_it_back():
    kv = cache(pages=2)
    a, b, c = request(0), request(1), request(2)
    kv.allocate(a, 3)
    kv.allocate(b, 3)
    assert kv.ledger() == {"free": 0, "cached": 0, "owned": 2, "total": 2}
    assert sorted(a.pages + b.pages) == [0, 1]
    assert not kv.can_allocate(c, 1)
    a.cached_len = 3
    mine = list(a.pages)
    kv.free(a)
    assert (a.pages, a.cached_len) == ([], 0)
    assert kv.ledger() == {"free": 1, "cached": 0, "owned": 1, "total": 2}
    kv.allocate(c, 3)
    assert c.pages == mine


def test_allocating_again_keeps_the_page():
    kv = cache()
    req = request(0)
    kv.allocate(req, 3)
    mine = list(req.pages)
    for req.cached_len in range(3, 8):
        kv.allocate(req, 1)
    assert req.pages == mine and kv.ledger()["owned"] == 1


@pytest.mark.parametrize(
    "cached_len, n, fits", [(0, 8, True), (0, 9, False), (7, 1, True), (7, 2, False), (8, 1, False)]
)
def test_a_page_ends(cached_len, n, fits):
    kv = cache()
    req = request(0, length=9, cached_len=cached_len)
    assert kv.can_allocate(req, n) is fits
    if not fits:
        with pytest.raises(AssertionError, match="no place"):
            kv.allocate(req, n)


def test_free_and_finish_are_idempotent():
    kv = cache()
    req = request(0)
    kv.allocate(req, 3)
    for give_back in (kv.finish, kv.finish, kv.free):
        give_back(req)
        assert kv.ledger() == {"free": 3, "cached": 0, "owned": 0, "total": 3}


def test_truncate_forgets_the_tail_and_never_adds():
    kv = cache()
    req = request(0)
    kv.allocate(req, 3)
    req.cached_len = 6
    for length, want in ((9, 6), (6, 6), (4, 4), (5, 4), (0, 0)):
        kv.truncate(req, length)
        assert req.cached_len == want
    assert len(req.pages) == 1, "the page stays"


def test_no_page_is_lost_or_owned_twice_in_any_order():
    kv = cache(pages=5)
    live: list[Req] = []
    generator = torch.Generator().manual_seed(0)
    for rid in range(400):
        dice = int(torch.randint(3, (1,), generator=generator))
        fresh = request(rid)
        if dice and kv.can_allocate(fresh, 3):
            kv.allocate(fresh, 3)
            live.append(fresh)
        elif live:
            kv.finish(live.pop(int(torch.randint(len(live), (1,), generator=generator))))
        owned = [page for req in live for page in req.pages]
        assert len(set(owned)) == len(owned) == kv.ledger()["owned"]
        assert kv.ledger()["free"] + kv.ledger()["owned"] == kv.ledger()["total"] == 5


def test_nothing_is_cached_before_a_request_ran():
    assert cache().match(request(0)) == 0


# ---- how much memory


def test_bytes_of_a_token():
    """Keys and values, every layer, every KV head."""
    assert token_bytes(layers=30, kv_heads=3, head_dim=64, dtype=torch.bfloat16) == 2 * 30 * 3 * 64 * 2
    assert token_bytes(layers=1, kv_heads=1, head_dim=1, dtype=torch.float32) == 8


def test_as_many_pages_as_wanted_and_as_fit():
    assert pages_for(4, None, 1000) == 4
    assert pages_for(4, 10_000, 1000) == 4
    assert pages_for(4, 3999, 1000) == 3
    assert pages_for(4, 1000, 1000) == 1
    with pytest.raises(ValueError, match=r"999.*1000"):
        pages_for(4, 999, 1000)


# 3 layers, 2 KV heads of 16, float32: 768 bytes a token, 49,152 for 64 tokens
@pytest.mark.parametrize("size", ["48K", "48k", "48KiB", "0.046875M", "49152", 49152, "1G", "auto", "2.5MB"])
def test_kv_memory_takes_sizes(size):
    with tiny(max_model_len=64, kv_memory=size) as llm:
        assert llm.stats()["kv_total"] == 64
        [output] = llm.generate([[5] * 60], SamplingParams(max_tokens=4), progress=False)
        assert len(output.token_ids) == 4


@pytest.mark.parametrize("size", ["49151", "47K", "1", "0.00004G"])
def test_too_little_kv_memory_is_refused_with_both_numbers(size):
    with pytest.raises(ValueError, match=r"kv_memory.*\b49152\b") as error:
        tiny(max_model_len=64, kv_memory=size)
    if size.isdigit():
        assert size in str(error.value)


@pytest.mark.parametrize("size", ["", "x", "-1M", "0", "12Q", "nan", "1e3", None])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(ValueError, match=r"512M, 2G"):
        tiny(kv_memory=size)


# ---- where keys and values go


def test_table_and_slots_as_literal_arrays():
    kv = cache(pages=3, page_size=8)
    a, b, c = request(0, 5), request(1, 3, cached_len=2), request(2, 7, cached_len=4)
    for req, page in ((a, 2), (b, 0), (c, 1)):
        req.pages = [page]
    batch = Batch([ScheduledReq(a, 5), ScheduledReq(b, 1), ScheduledReq(c, 2)])
    assert kv.table([a, b, c]) == [[2], [0], [1]]
    assert kv.slots(batch) == [16, 17, 18, 19, 20, 2, 12, 13]


def test_store_writes_these_slots_of_this_layer_and_no_others():
    kv = cache(pages=2, page_size=4)
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    kv.store(1, k, v, torch.tensor([5, 0, 7]))
    for token, (page, offset) in enumerate([(1, 1), (0, 0), (1, 3)]):
        assert torch.equal(kv.k[1, page, offset], k[token])
        assert torch.equal(kv.v[1, page, offset], v[token])
        kv.k[1, page, offset] = kv.v[1, page, offset] = 0
    assert not kv.k.any() and not kv.v.any()


@pytest.mark.parametrize("extend", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (4, 1)])
def test_the_last_queries_of_a_sequence_see_what_precedes_them(extend, heads, kv_heads):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(7, heads, 8, generator=generator)
    k, v = (torch.randn(7, kv_heads, 8, generator=generator) for _ in range(2))
    whole = causal(q, k, v)
    torch.testing.assert_close(causal(q[-extend:], k, v), whole[-extend:], atol=1e-5, rtol=1e-5)


def forward_input(kv: KVCache, batch: Batch) -> ForwardInput:
    """What attention needs of a step; ids and positions are none of its business."""
    bounds, lens = [0], []
    for item in batch.items:
        bounds.append(bounds[-1] + item.extend_len)
        lens.append(item.req.cached_len + item.extend_len)
    none = torch.empty(0, dtype=torch.int64)
    return ForwardInput(
        ids=none,
        positions=none,
        cu_extend=torch.tensor(bounds, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        logit_rows=none,
        table=torch.tensor(kv.table([item.req for item in batch.items]), dtype=torch.int32),
        slots=torch.tensor(kv.slots(batch)),
    )


@pytest.mark.fault(17)
@pytest.mark.parametrize(
    "steps", [[(6, 5)], [(1, 5)] + [(1, 0)] * 5, [(4, 1), (1, 3), (1, 1)], [(2, 2), (3, 1), (1, 2)]]
)
def test_any_cut_into_steps_gives_the_attention_of_one_step(steps):
    """Two requests side by side, 6 and 5 tokens; a step takes some tokens of each. The cache begins full of NaN."""
    generator = torch.Generator().manual_seed(1)
    kv = cache(pages=3)
    kv.k.fill_(torch.nan)
    kv.v.fill_(torch.nan)
    backend = TorchBackend(kv)
    reqs = [request(0, 6), request(1, 5)]
    data = [[torch.randn(len(r.token_ids), n, 4, generator=generator) for n in (6, 2, 2)] for r in reqs]
    got: list[list[torch.Tensor]] = [[], []]
    for step in steps:
        items = [ScheduledReq(req, n) for req, n in zip(reqs, step, strict=True) if n]
        for item in items:
            kv.allocate(item.req, item.extend_len)
        parts = [[x[i.req.cached_len :][: i.extend_len] for x in data[i.req.rid]] for i in items]
        q, k, v = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        out = backend.attend(q, k, v, 1, backend.plan(forward_input(kv, Batch(items))))
        for item, rows in zip(items, out.split([i.extend_len for i in items]), strict=True):
            got[item.req.rid].append(rows)
            item.req.cached_len += item.extend_len
    for rows, (q, k, v) in zip(got, data, strict=True):
        torch.testing.assert_close(torch.cat(rows), causal(q, k, v), atol=1e-5, rtol=1e-5)


@pytest.mark.fault(15, 17)
def test_prepare_flattens_a_step_into_literal_tensors():
    from ch04_kvcache.model_runner import ModelRunner

    kv = cache(pages=2, page_size=8)
    a, b, c = request(0, 4), request(1, 6, cached_len=5), request(2, 5, cached_len=1)
    a.pages, b.pages, c.pages = [1], [0], [0]
    runner = ModelRunner(types.SimpleNamespace(), kv, None, torch.device("cpu"))
    inp = runner.prepare(Batch([ScheduledReq(a, 4), ScheduledReq(b, 1), ScheduledReq(c, 2)]))
    assert inp.ids.tolist() == [10, 11, 12, 13, 15, 11, 12]
    assert inp.positions.tolist() == [0, 1, 2, 3, 5, 1, 2]
    assert inp.cu_extend.tolist() == [0, 4, 5, 7]
    assert inp.seq_lens.tolist() == [4, 6, 3]
    assert inp.logit_rows.tolist() == [3, 4], "the third part ends before its request does: no logits"
    assert inp.table.tolist() == [[1], [0], [0]]
    assert inp.slots.tolist() == [8, 9, 10, 11, 5, 1, 2]
    none = runner.prepare(Batch([ScheduledReq(a, 2)]))
    assert none.logit_rows.tolist() == [] and none.logit_rows.dtype == torch.int64
