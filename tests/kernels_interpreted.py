"""The Triton kernels against plain torch, in Triton's interpreter: no GPU, NumPy does the arithmetic.

The interpreter is chosen when Triton is imported, so these tests need a process of their own: test_kernels.py starts it,
and `TRITON_INTERPRET=1 pytest tests/kernels_interpreted.py` runs them alone.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.gpu_check import check_kernels
from common.kernel_cases import BOUNDS, Cases, Heads, paged_attention
from tests.copies import copies

assert os.environ.get("TRITON_INTERPRET") == "1", "run these tests with TRITON_INTERPRET=1"

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAGES = (1, 2, 16, 64, 256)
KERNELS = copies("kernels.py")
BACKENDS = copies("kernels.py", "attention.py", "graph.py")


@pytest.fixture(scope="module", autouse=True)
def bfloat16_as_on_a_gpu() -> None:
    """The interpreter multiplies the bit patterns of bfloat16 in dot and cuts float32 off instead of rounding it."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def rounded_cast(builder, source, target):
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, source, target)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        return TensorHandle(np.where(np.isnan(source.data), 0x7FC0, nearest).astype(np.uint16), tl.bfloat16)

    def wide_dot(builder, a, b, *rest):
        a, b = (cast(builder, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(builder, a, b, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "cast_impl", rounded_cast)
        patch.setattr(InterpreterBuilder, "create_dot", wide_dot)
        yield


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Every new tensor is full of NaN until something is written to it."""
    torch.use_deterministic_algorithms(True)
    assert torch.zeros(1).new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=KERNELS)
def chapter(request):
    return request.param


@pytest.fixture
def cases(chapter):
    """cases(seed) draws for the kernels of a chapter."""
    kernels, ops = (importlib.import_module(f"{chapter}.{name}") for name in ("kernels", "ops"))
    return lambda seed: Cases(kernels, ops, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page", "tokens", "padding"), [(1, 5, 0), (16, 21, 4), (256, 3, 3), (16, 0, 0)])
def test_store_writes_its_slots_and_nothing_else(cases, dtype, page, tokens, padding):
    for heads in (Heads(3, 1, 80), Heads(1, 1, 64)):
        assert cases(0).store_kv(heads, dtype, page, tokens, padding) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", PAGES)
def test_decode(cases, dtype, page):
    """Lengths from one token to three pages and one, whole pages among them, and a padding row in the middle."""
    case = cases(page)
    group, dim = case.rng.randint(1, 8), case.rng.choice([64, 80, 128])
    lengths = [1, page, 0, min(3 * page + 1, 300), *case.lengths(1, page, 100)]
    assert case.attention(Heads(2, group, dim), dtype, page, lengths, [1] * 5) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [2, 8])
def test_decode_in_parts(cases, dtype, splits):
    """Some requests are too short to give every part a token."""
    lengths = [1, 0, 65, 150 * splits // 2]
    assert cases(splits).attention(Heads(1, 3, 64), dtype, 16, lengths, [1] * 4, splits) <= BOUNDS[dtype]


@pytest.mark.parametrize("group", range(1, 9))
def test_every_group_size(cases, group):
    """Decode, draft verification and prefill with 1 to 8 query heads for a key and value head."""
    heads = Heads(2, group, 64)
    assert cases(group).attention(heads, torch.float16, 16, [33, 5], [1, 1]) <= BOUNDS[torch.float16]
    assert cases(group).attention(heads, torch.float16, 16, [33, 20], [5, 20]) <= BOUNDS[torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", PAGES)
def test_prefill_of_a_mixed_batch(cases, dtype, page):
    """A whole prompt, a chunk after a cached prefix, a draft of 2 to 9 rows, a single token, each with its own length."""
    case = cases(100 + page)
    group, dim = case.rng.choice([1, 3, 4, 5]), case.rng.choice([64, 80, 128])
    draft = case.rng.randint(2, 9)
    lengths, extends = [min(page + 1, 40), 90, 70 + draft, 17], [min(page + 1, 40), 21, draft, 1]
    assert case.attention(Heads(1, group, dim), dtype, page, lengths, extends) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_in_parts(cases, dtype):
    """Rows that see nothing of a later part, and a part that no row of the request reaches."""
    assert cases(1).attention(Heads(2, 2, 64), dtype, 16, [130, 9, 66], [5, 9, 2], splits=4) <= BOUNDS[dtype]


def test_a_prompt_longer_than_a_tile(cases):
    """Several tiles of rows, the last one not full, over several blocks of tokens."""
    assert cases(2).attention(Heads(1, 3, 64), torch.float16, 16, [111], [95]) <= BOUNDS[torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_operations(cases, dtype):
    case = cases(3)
    for size in (64, 576, 1000):
        assert case.add_rms_norm(dtype, 3, size) <= BOUNDS[dtype]
        assert case.add_rms_norm(dtype, 3, size, residual=True) <= BOUNDS[dtype]
    assert case.add_rms_norm(dtype, 4, 80, heads=3) <= BOUNDS[dtype]
    assert case.add_rms_norm(dtype, 0, 64) == case.rotary(dtype, 0, 3, 64) == case.silu_and_mul(dtype, 0, 64) == 0
    for heads, dim in ((1, 64), (9, 80), (40, 128)):
        assert case.rotary(dtype, 3, heads, dim) <= BOUNDS[dtype]
    for size in (64, 1536, 1100):
        assert case.silu_and_mul(dtype, 3, size) <= BOUNDS[dtype]


def test_cache_of_more_than_two_billion_numbers(chapter):
    """Offsets do not fit into 32 bits. The memory is only touched where the test writes."""
    kernels = importlib.import_module(f"{chapter}.kernels")
    pages, page, kv_heads, dim = 2**31 // (256 * 8 * 128) + 2, 256, 8, 128
    torch.use_deterministic_algorithms(False)  # filling it would touch all of it
    cache = torch.empty(pages, page, kv_heads, dim, dtype=torch.float16)
    k = torch.randn(3, kv_heads, dim).half()
    slots = [pages * page - 1, (pages - 1) * page, (pages - 1) * page + 1]
    kernels.store_kv(k, k, cache, cache, torch.tensor(slots))
    assert torch.equal(cache.flatten(0, 1)[slots], k)
    inputs = torch.tensor([[pages - 1]], dtype=torch.int32), torch.tensor([0, 1]), torch.tensor([2], dtype=torch.int32)
    q = torch.randn(1, 8, dim).half()
    got = kernels.paged_decode(q, cache, cache, inputs[0], inputs[2], 0.1)
    assert torch.allclose(got.double(), paged_attention(q, cache, cache, *inputs, 0.1), atol=2e-3)


def test_a_wrong_kernel_is_found(cases, chapter, monkeypatch):
    """The checks can fail: a mask that sees one token too many, a slot too far, a part left out of the sum."""
    kernels = importlib.import_module(f"{chapter}.kernels")
    store, prefill, decode = kernels.store_kv, kernels.paged_prefill, kernels.paged_decode
    monkeypatch.setattr(kernels, "store_kv", lambda k, v, kc, vc, slots: store(k, v, kc, vc, slots + 1))
    with pytest.raises(AssertionError, match="slot"):
        cases(0).store_kv(Heads(1, 1, 64), torch.float16, 16, 4)
    monkeypatch.setattr(
        kernels, "paged_prefill", lambda q, k, v, t, cu, lens, *rest: prefill(q, k, v, t, cu, lens - 1, *rest)
    )
    assert cases(0).attention(Heads(1, 2, 64), torch.float16, 16, [20], [3]) > BOUNDS[torch.float16]
    monkeypatch.setattr(
        kernels,
        "paged_decode",
        lambda q, k, v, t, lens, *rest: decode(q[:1], k, v, t, lens[:1], *rest[:2], rest[2][:1]),
    )
    with pytest.raises(AssertionError, match="not written"):
        cases(0).attention(Heads(1, 2, 64), torch.float16, 16, [20, 20], [1, 1])


@pytest.mark.parametrize("name", BACKENDS)
def test_the_backend_agrees_with_the_definition(name):
    """Mixed batches over the two backends' own caches: decodes first, decodes after a prefill, decodes only."""
    attention, core, kvcache = (importlib.import_module(f"{name}.{part}") for part in ("attention", "core", "kvcache"))
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    for lengths, extends in (([9, 33, 20], [1, 1, 20]), ([5, 40, 7], [5, 1, 3]), ([33, 1], [1, 1])):
        caches = [kvcache.KVCache(2, 12, 16, 2, 64, torch.empty(0)) for _ in range(2)]
        caches[0].k.copy_(torch.randn_like(caches[0].k)), caches[0].v.copy_(torch.randn_like(caches[0].v))
        caches[1].k.copy_(caches[0].k), caches[1].v.copy_(caches[0].v)
        table = torch.randperm(12)[: 3 * len(lengths)].view(-1, 3)
        slots = [
            int(table[b, at // 16]) * 16 + at % 16
            for b, (n, extend) in enumerate(zip(lengths, extends))
            for at in range(n - extend, n)
        ]
        bounds = [sum(extends[:i]) for i in range(len(extends) + 1)]
        rows = torch.arange(bounds[-1])
        inp = core.ForwardInput(
            ids=rows, positions=rows, cu_extend=torch.tensor(bounds, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32), logit_rows=rows[:1], table=table.int(),
            slots=torch.tensor(slots),
        )  # fmt: skip
        q, k, v = (torch.randn(bounds[-1], heads, 64) for heads in (6, 2, 2))
        backends = [make(kv) for make, kv in zip((attention.TorchBackend, attention.TritonBackend), caches)]
        want, got = (b.attend(q, k, v, 1, b.plan(inp)) for b in backends)
        assert torch.allclose(got, want, atol=1e-5)
        assert torch.equal(caches[0].k, caches[1].k) and torch.equal(caches[0].v, caches[1].v)


@pytest.mark.parametrize("model", ["dummy:llama-tiny", "dummy:qwen3-tiny"])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_engine_answers_the_same_on_kernels_and_graphs(name, model, monkeypatch):
    """All kernels in a model, decode steps in padded graphs (whose replay runs the step again), tokens as from torch."""
    module = importlib.import_module(name)
    attention, graph, kernels = (
        importlib.import_module(f"{name}.{part}") for part in ("attention", "graph", "kernels")
    )
    torch.use_deterministic_algorithms(False)
    options = {
        "dtype": "float32",
        "native": "off",
        "attention_backend": "torch",
        "page_size": 4,
        "max_batch_tokens": 16,
    }
    prompts = [[(7 * i + j) % 900 + 4 for j in range(n)] for i, n in enumerate((3, 11, 21))]
    params = [module.SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 3, 4)]
    with module.LLM(model, **options) as llm:
        want = [out.token_ids for out in llm.generate(prompts, params, progress=False)]

    def capture(step, pool):
        step()
        return step

    monkeypatch.setattr(graph, "capture", capture)
    small = {"rms_norm": kernels.add_rms_norm, "rotary": kernels.rotary, "silu_and_mul": kernels.silu_and_mul}
    with module.LLM(model, **options) as llm:
        runner = llm.engine.runner
        runner.backend = attention.TritonBackend(runner.kv)
        for part in (runner.model, *runner.model.layers):
            part.ops = replace(part.ops, **small)
        width = -(-llm.engine.limits.max_model_len // 4)
        runner.graphs = graph.DecodeGraphs(runner.forward_eager, 4, width, torch.device("cpu"))
        got = [out.token_ids for out in llm.generate(prompts, params, progress=False)]
        assert got == want
        assert len(runner.graphs._graphs) > 1, "decode steps went through graphs"


@pytest.mark.full
@pytest.mark.parametrize("name", KERNELS)
def test_the_gpu_check_passes_in_the_interpreter(name):
    torch.use_deterministic_algorithms(False)
    checks = check_kernels(name, "cpu", cases=2, longest=60)
    assert len(checks) == 7 * len(DTYPES)
    assert all(check["ok"] for check in checks), [check for check in checks if not check["ok"]]


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(30))
def test_random_batches(cases, dtype, seed):
    """Random everything: heads, groups, page sizes, lengths, extends, parts, padding rows."""
    case = cases(1000 + seed)
    rng = case.rng
    heads = Heads(rng.randint(1, 3), rng.randint(1, 8), rng.choice([64, 80, 128]))
    page, splits = rng.choice([2**i for i in range(9)]), rng.choice([1, 1, 2, 4, 16])
    lengths = case.lengths(rng.randint(1, 5), page, 3 * page + 1)
    for _ in range(rng.randint(0, 2)):
        lengths.insert(rng.randint(0, len(lengths)), 0)
    assert case.attention(heads, dtype, page, lengths, [1] * len(lengths), splits) <= BOUNDS[dtype]
    lengths = case.lengths(rng.randint(1, 4), page, 3 * page + 1)
    extends = [rng.choice([1, min(n, 120), rng.randint(1, min(n, 120)), min(n, rng.randint(2, 9))]) for n in lengths]
    extends[0] = min(lengths[0], max(extends[0], 2))
    assert case.attention(heads, dtype, page, lengths, extends, splits) <= BOUNDS[dtype]
    assert case.store_kv(heads, dtype, page, rng.randint(1, 60), 1) == 0
    assert (
        case.add_rms_norm(dtype, rng.randint(1, 9), rng.randint(1, 3000), residual=rng.random() < 0.5) <= BOUNDS[dtype]
    )
    assert case.rotary(dtype, rng.randint(1, 9), rng.randint(1, 48), heads.dim) <= BOUNDS[dtype]
    assert case.silu_and_mul(dtype, rng.randint(1, 9), rng.randint(1, 5000)) <= BOUNDS[dtype]
