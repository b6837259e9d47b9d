"""Packed linears: right for every shape, in the memory of one copy, and left alone where they do not work."""

from __future__ import annotations

import gc
import importlib
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from common import cpu
from common.cpu import linear as module
from common.tiny import cached_tiny_model
from tests.engine_runs import alone
from tests.oracle import assert_greedy

DTYPES = [dtype for dtype in module.TOLERANCE if cpu.packed_linear_works(dtype)]
CPU = torch.device("cpu")
SHAPES = [  # rows, out, inner
    (1, 1, 1), (1, 16, 16), (1, 33, 17), (2, 7, 3), (3, 64, 1), (5, 1, 64), (7, 96, 64), (17, 1003, 64), (31, 97, 193),
    (64, 48, 576), (129, 65, 33), (256, 128, 96),
]  # fmt: skip


def randn(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_right(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    want = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == x.dtype and got.shape == want.shape
    assert (got.double() - want).norm() <= module.TOLERANCE[x.dtype] * want.norm()


@pytest.fixture(params=["compiled", "onednn"])
def way(request, monkeypatch):
    """Packed linears in both ways that there are."""
    if request.param == "onednn":
        if not torch.backends.mkldnn.is_available():
            pytest.skip("no oneDNN in this torch")
        monkeypatch.setattr(module, "panel_of", lambda dtype: None)
    elif module.panel_of(request.node.callspec.params.get("dtype", torch.float32)) is None:
        pytest.skip("no compiled operator for this processor and dtype")


def test_packing_works_for_float32_here():
    """The reference machines are x86 with oneDNN; where that is missing the tests below have nothing to test."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("no oneDNN in this torch")
    assert torch.float32 in DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_for_odd_shapes(shape, with_bias, dtype, way):
    rows, out, inner = shape
    x, weight = randn(rows, inner, dtype=dtype), randn(out, inner, dtype=dtype, seed=1)
    bias = randn(out, dtype=dtype, seed=2) if with_bias else None
    assert_right(cpu.PackedLinear(weight, bias)(x), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_linear_serves_all_numbers_of_rows(dtype, way):
    weight = randn(40, 24, dtype=dtype)
    packed = cpu.PackedLinear(weight)
    for rows in (1, 9, 1, 200, 2, 33, 1):
        x = randn(rows, 24, dtype=dtype, seed=rows)
        assert_right(packed(x), x, weight, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows_no_result(dtype, way):
    """A step may want no logits at all, when every request in it is in the middle of its prompt."""
    got = cpu.PackedLinear(randn(12, 8, dtype=dtype))(randn(0, 8, dtype=dtype))
    assert got.shape == (0, 12) and got.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_and_weights_that_are_not_contiguous(dtype, way):
    weight, wide = randn(24, 40, dtype=dtype), randn(9, 96, dtype=dtype, seed=1)
    inputs = {
        "columns of a wider matrix": wide[:, 8:32],
        "every second column": wide[:, :48:2],
        "transposed": randn(24, 9, dtype=dtype, seed=2).T,
        "every second row": randn(18, 24, dtype=dtype, seed=3)[::2],
        "one row repeated": randn(1, 24, dtype=dtype, seed=4).expand(5, 24),
    }
    packed = cpu.PackedLinear(weight.T)  # a weight [40, 24] in another order
    for what, x in inputs.items():
        kept = x.clone()
        assert_right(packed(x), x, weight.T, None)
        assert torch.equal(x, kept), what


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype, way):
    """To rounding: another number of rows may sum in another order, a wrong row would be off by far more."""
    weight, x = randn(64, 48, dtype=dtype), randn(50, 48, dtype=dtype, seed=1)
    packed = cpu.PackedLinear(weight)
    whole = packed(x).double()
    for row in (0, 17, 49):
        alone = packed(x[row : row + 1]).double()[0]
        assert (alone - whole[row]).norm() <= module.TOLERANCE[dtype] * whole[row].norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_of_tile_and_any_number_of_threads(dtype, way):
    """Rows are computed in tiles of up to 12 or 6, and at most 192 rows share a pass over the weights."""
    weight, bias = randn(70, 48, dtype=dtype), randn(70, dtype=dtype, seed=1)
    packed, threads = cpu.PackedLinear(weight, bias), torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            for rows in (*range(1, 27), 191, 192, 193, 205, 385):
                x = randn(rows, 48, dtype=dtype, seed=rows)
                assert_right(packed(x), x, weight, bias)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", [*SHAPES, (13, 70, 48), (25, 70, 48), (385, 40, 24)], ids=str)
def test_float32_weights_that_bfloat16_holds_are_kept_as_such_and_give_the_same_bits(shape):
    panel = module.panel_of(torch.float32)
    if panel is None:
        pytest.skip("no compiled operator for this processor")
    rows, out, inner = shape
    x, weight, bias = randn(rows, inner), randn(out, inner, seed=1).bfloat16().float(), randn(out, seed=2)
    assert module.narrowed(weight).dtype is torch.bfloat16
    wide = module.panel_linear(weight, bias, *panel)
    assert torch.equal(cpu.PackedLinear(weight, bias)(x), wide(x))


def test_weights_that_bfloat16_does_not_hold_are_left_alone():
    exact = randn(9000, 3).bfloat16().float()
    for row, value in ((0, 1 + 2**-9), (8999, 1e-45), (5000, torch.nan), (4096, 3.4e38)):
        weight = exact.clone()
        weight[row, 1] = value
        assert module.narrowed(weight) is weight
    assert torch.equal(module.narrowed(exact).float(), exact)
    for dtype in (torch.bfloat16, torch.float16):
        weight = exact.to(dtype)
        assert module.narrowed(weight) is weight


def test_what_is_not_a_number_stays_one(way):
    weight = randn(40, 8)
    weight[3, 2], weight[39, 0] = torch.nan, torch.inf
    got = cpu.PackedLinear(weight)(torch.ones(2, 8))
    assert got[:, 3].isnan().all() and got[:, 39].isinf().all()
    assert got[:, [i for i in range(40) if i not in (3, 39)]].isfinite().all()


def test_the_compiled_operator_checks_what_it_is_given():
    if module.panel_of(torch.float32) is None:
        pytest.skip("no compiled operator for this processor")
    linear, (columns, _) = torch.ops.minisgl_cpu.linear, module.panel_of(torch.float32)
    packed = torch.zeros(2, 8, columns, 1)
    for complaint, arguments in {
        "dtypes differ": (torch.zeros(1, 8, dtype=torch.bfloat16), packed, None, columns + 1),
        "no packed weights": (torch.zeros(1, 8).double(), packed.double(), None, columns + 1),
        "packed weights are": (torch.zeros(1, 8), torch.zeros(2, 8, columns + 1, 1), None, columns + 1),
        "want x": (torch.zeros(1, 9), packed, None, columns + 1),
        "do not make": (torch.zeros(1, 8), packed, None, columns),
        "the bias": (torch.zeros(1, 8), packed, torch.zeros(columns + 1), columns + 1),
    }.items():
        with pytest.raises(RuntimeError, match=complaint):
            linear(*arguments)
    with pytest.raises(RuntimeError, match="do not make"):
        linear(torch.zeros(1, 8), packed, None, 2 * columns + 1)
    assert linear(torch.zeros(1, 8), packed, None, 2 * columns).shape == (1, 2 * columns)


@pytest.mark.parametrize("shape", [(3, 5), (0, 7), (600, 1024), (3, 2**20)], ids=str)
def test_lazy_zeros_are_zeros_that_can_be_written(shape):
    zeros = module.lazy_zeros(shape, torch.bfloat16)
    assert zeros.shape == shape and zeros.dtype == torch.bfloat16 and not zeros.any()
    zeros += 1
    assert (zeros == 1).all() and not module.lazy_zeros(shape, torch.bfloat16).any()


def resident() -> int:
    """Bytes of memory that this process has."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc here")
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_lazy_zeros_take_no_memory_before_they_are_written():
    before = resident()
    zeros = module.lazy_zeros((2**30,), torch.uint8)
    assert resident() - before < 2**26
    zeros[: 2**27] = 1
    assert resident() - before >= 2**27


def test_a_token_in_each_layer_of_a_kv_cache_takes_little_memory():
    """With huge pages its step would wait for 2 MiB per layer to be cleared."""
    layers, token = 64, 384
    zeros = module.lazy_zeros((layers, 2**23), torch.uint8)
    before = resident()
    zeros[:, :token] = 1
    assert resident() - before < layers * 2**17


def test_the_result_is_fresh_memory(way):
    packed, x = cpu.PackedLinear(randn(8, 8)), randn(3, 8)
    first = packed(x)
    kept = first.clone()
    packed(randn(3, 8, seed=5))
    first.add_(1)
    assert torch.equal(packed(x), kept)


def test_torch_linear_is_the_definition():
    x, weight, bias = randn(3, 5), randn(4, 5, seed=1), randn(4, seed=2)
    assert torch.equal(cpu.torch_linear(weight, bias)(x), torch.nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(cpu.torch_linear(weight)(x), x @ weight.T)


# ---- memory: one copy of the weight


def test_packing_lets_go_of_the_weight(way):
    weight = randn(64, 64)
    gone = weakref.ref(weight)
    packed = cpu.PackedLinear(weight)
    del weight
    gc.collect()
    assert gone() is None
    assert packed(randn(1, 64)).shape == (1, 64)


@pytest.mark.parametrize("native", [True, False])
def test_a_finished_layer_holds_one_copy(engine_chapter, native):
    layers = importlib.import_module(f"{engine_chapter.__name__}.layers")
    ops = importlib.import_module(f"{engine_chapter.__name__}.ops")
    layer = layers.RowLinear(64, 32, bias=False, like=torch.empty(0), **alone(engine_chapter))
    weight = randn(32, 64)
    layer.load("out", "weight", weight)
    filled = weakref.ref(layer.weight)
    layer.finish(ops.choose(CPU, torch.float32, native))
    gc.collect()
    assert layer.weight is None
    assert (filled() is None) is (native and torch.float32 in DTYPES), "an unpacked layer computes with this copy"
    x = randn(2, 64, seed=1)
    assert_right(layer(x), x, weight, None)


# ---- where packing does not work


@pytest.fixture
def fresh_probe():
    """The probe's answer is cached for the life of the process."""
    module.packed_linear_works.cache_clear()
    yield
    module.packed_linear_works.cache_clear()


class Broken:
    """A packed linear that computes something else."""

    def __init__(self, weight, bias=None):
        self.shape = len(weight)

    def __call__(self, x):
        return torch.zeros(len(x), self.shape, dtype=x.dtype)


class Missing:
    """Operators that this build of torch does not have."""

    def __init__(self, weight, bias=None):
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")


class Refusing(Broken):
    """Operators that refuse to run on this processor."""

    def __call__(self, x):
        raise RuntimeError("could not create a primitive descriptor")


class NotANumber(Broken):
    """NaN compares with nothing."""

    def __call__(self, x):
        return super().__call__(x) * torch.nan


@pytest.mark.parametrize("stand_in", [Broken, Missing, Refusing, NotANumber])
def test_the_probe_notices_what_does_not_work(stand_in, fresh_probe, monkeypatch):
    monkeypatch.setattr(module, "PackedLinear", stand_in)
    assert cpu.packed_linear_works(torch.float32) is False


def test_the_probe_refuses_other_dtypes(fresh_probe):
    for dtype in (torch.float64, torch.int8, torch.complex64):
        assert cpu.packed_linear_works(dtype) is False


def test_without_onednn_and_without_a_compiler_nothing_is_packed(fresh_probe, monkeypatch):
    monkeypatch.setattr(module, "panel_of", lambda dtype: None)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert cpu.packed_linear_works(torch.float32) is False


def test_an_engine_falls_back_to_plain_torch(engine_chapter, monkeypatch):
    """The probe says no: no layer is packed, and the output is right all the same."""
    made = []
    monkeypatch.setattr(cpu, "packed_linear_works", lambda dtype: False)
    monkeypatch.setattr(cpu, "PackedLinear", lambda *args: made.append(args))
    folder = cached_tiny_model("qwen2")
    with engine_chapter.LLM(str(folder), dtype="float32", threads=1) as llm:
        params = engine_chapter.SamplingParams(max_tokens=6, ignore_eos=True)
        [output] = llm.generate([[5, 6, 7]], params, progress=False)
    assert not made
    assert assert_greedy(folder, [5, 6, 7], output.token_ids) > 0


@pytest.mark.parametrize("native, packs", [("auto", True), ("off", False)])
def test_native_decides_whether_an_engine_packs(engine_chapter, monkeypatch, native, packs):
    if torch.float32 not in DTYPES:
        pytest.skip("nothing to pack with")
    made = []

    def counting(weight, bias=None):
        made.append(weight.shape)
        return cpu.torch_linear(weight, bias)

    monkeypatch.setattr(cpu, "PackedLinear", counting)
    with engine_chapter.LLM(str(cached_tiny_model("llama")), dtype="float32", threads=1, native=native):
        pass
    assert len(made) == (3 * 4 + 1 if packs else 0), "four linears a layer, and the head"


def test_native_bf16_is_what_the_processor_says(monkeypatch):
    for found, onednn, native in (
        ({}, True, False),
        ({"avx512_bf16": True}, True, True),
        ({"amx_bf16": True}, True, True),
        ({"avx512_f": True, "amx_tile": True, "bf16": False}, True, False),
        ({"bf16": True}, True, True),  # Arm's
        ({"bf16": True}, False, False),  # a Mac: torch has nothing that would use it
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda onednn=onednn: onednn)
        cpu.has_native_bf16.cache_clear()
        assert cpu.has_native_bf16() is native, found
    monkeypatch.undo()
    cpu.has_native_bf16.cache_clear()
