"""The C++ operators of common/cpu compute what their torch definitions say, for every shape, and are built once, safely."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from common.cpu import definitions, fits_native_attention, native
from common.cpu.definitions import CpuOps
from common.cpu.probe import first_wrong
from tests.conftest import ROOT

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = [field.name for field in fields(CpuOps)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative to the largest element


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    if not any(map(shutil.which, ("g++", "c++"))):
        pytest.skip("no C++ compiler")
    found = native.native_ops()
    assert found is not None, "the operators do not build or compute wrong results here"
    return found


@pytest.fixture(scope="module")
def ops2(ops) -> CpuOps:
    """The operators on two threads, while the definitions stay on one."""

    def on_two_threads(function):
        def call(*arguments):
            with threads(2):
                return function(*arguments)

        return call

    return CpuOps(**{name: on_two_threads(getattr(ops, name)) for name in NAMES})


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty, also the operators', is full of NaN: what is not written is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def randn(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape and got.dtype == dtype
    if want.numel():
        error, size = (got.double() - want.double()).abs().max(), want.double().abs().max()
        assert error <= TOLERANCE[dtype] * size, f"error {error:.2e} where the largest element is {size:.2e}"


# ---- attention


def paged(requests, *, page, kv_heads, group, dim, dtype, seed=0):
    """Arguments of paged_attention for requests of (extend, length): pages in no order, NaN wherever nothing is stored,
    wild page numbers where the table is not used, queries as a view into a wider matrix."""
    rng = random.Random(seed)
    need = [-(-length // page) for _, length in requests]
    free = rng.sample(range(sum(need) + 3), sum(need) + 3)
    table = torch.full((len(requests), max(need, default=0) + rng.randint(0, 2)), 10**9, dtype=torch.int32)
    caches = [torch.full((len(free), page, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)]
    for b, (_, length) in enumerate(requests):
        pages = [free.pop() for _ in range(need[b])]
        table[b, : need[b]] = torch.tensor(pages, dtype=torch.int32)
        for which, cache in enumerate(caches):
            rows = torch.full((need[b] * page, kv_heads, dim), torch.nan, dtype=dtype)
            rows[:length] = randn(length, kv_heads, dim, dtype=dtype, seed=seed + 10 * b + which)
            cache[pages] = rows.view(need[b], page, kv_heads, dim)
    bounds = torch.tensor([0, *(extend for extend, _ in requests)]).cumsum(0).int()
    heads = kv_heads * group
    q = randn(int(bounds[-1]), heads + 2 * kv_heads, dim, dtype=dtype, seed=seed + 5)[:, :heads]
    lengths = torch.tensor([length for _, length in requests], dtype=torch.int32)
    return q, *caches, table, bounds, lengths, dim**-0.5


def exact(arguments) -> torch.Tensor:
    """The definition in float64."""
    q, k, v, *rest = arguments
    return definitions.paged_attention(q.double(), k.double(), v.double(), *rest)


def some_requests(rng: random.Random, page: int) -> list[tuple[int, int]]:
    requests = []
    for _ in range(rng.randint(1, 5)):
        length = rng.randint(1, min(3 * page + 1, rng.choice([20, 200, 700])))
        requests.append((rng.choice([1, 1, min(5, length), length, rng.randint(1, length)]), length))
    return requests


@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_random_batches(ops, dtype, dim):
    """Decode, extends and whole prompts in one call, over pages of 1 to 512."""
    for seed, page in enumerate([1, 3, 16, 64, 512] * 2):
        rng = random.Random(1000 * dim + seed)
        arguments = paged(
            some_requests(rng, page), page=page, kv_heads=rng.randint(1, 3), group=rng.randint(1, 8), dim=dim,
            dtype=dtype, seed=seed,
        )  # fmt: skip
        assert_close(ops.paged_attention(*arguments), exact(arguments), dtype)


@pytest.mark.parametrize("group", range(1, 9))
def test_attention_with_every_group_size(ops, group):
    for dtype in (torch.float32, torch.bfloat16):
        arguments = paged([(1, 130), (3, 67), (40, 90)], page=16, kv_heads=2, group=group, dim=64, dtype=dtype)
        assert_close(ops.paged_attention(*arguments), exact(arguments), dtype)


@pytest.mark.parametrize("page", [1, 16, 64])
def test_attention_at_every_length_up_to_three_pages_and_one(ops, page):
    for first in range(1, 3 * page + 2, 16):
        lengths = range(first, min(first + 16, 3 * page + 2))
        arguments = paged([(1, n) for n in lengths], page=page, kv_heads=1, group=3, dim=16, dtype=torch.float32)
        assert_close(ops.paged_attention(*arguments), exact(arguments), torch.float32)


@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(1, 71, 64), (4, 1, 256), (1, 1, 512), (7, 2, 112)])
def test_attention_of_unusual_shapes(ops, kv_heads, group, dim):
    for dtype in DTYPES:
        arguments = paged([(1, 40), (9, 33)], page=8, kv_heads=kv_heads, group=group, dim=dim, dtype=dtype)
        assert_close(ops.paged_attention(*arguments), exact(arguments), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_depends_neither_on_threads_nor_on_company(ops, dtype):
    """Bit for bit: work is divided differently, sums are not."""
    requests = [(1, 1500), (1, 3), (200, 900), (1, 64), (6, 777)]
    arguments = paged(requests, page=16, kv_heads=3, group=3, dim=64, dtype=dtype)
    q, k, v, table, bounds, lengths, scale = arguments
    together = ops.paged_attention(*arguments)
    for count in (1, 2, 3):
        with threads(count):
            assert torch.equal(ops.paged_attention(*arguments), together)
            for b, (extend, _) in enumerate(requests):
                rows = slice(bounds[b], bounds[b + 1])
                one = torch.tensor([0, extend], dtype=torch.int32)
                alone = ops.paged_attention(q[rows], k, v, table[b : b + 1], one, lengths[b : b + 1], scale)
                assert torch.equal(alone, together[rows])


def test_attention_with_scores_of_any_size(ops):
    """Large scores neither overflow nor vanish, whichever chunk holds them."""
    arguments = list(paged([(1, 300), (70, 200)], page=32, kv_heads=1, group=2, dim=32, dtype=torch.float32))
    for scale in (100.0, 1e-4, 0.0, -3.0):
        arguments[-1] = scale
        want = exact(arguments)
        theirs = (definitions.paged_attention(*arguments) - want).abs().max()  # a score of 1,000 is rounded by 1e-4
        assert (ops.paged_attention(*arguments) - want).abs().max() <= max(1e-5, 3 * theirs)


IN_NEW_THREADS = """
import threading, torch
from common.cpu import native_ops
torch.set_num_threads(1)

def attend(dim, heads, kv_heads, tokens):
    pages = -(-tokens // 16)
    k, v = torch.randn(2, pages, 16, kv_heads, dim)
    table = torch.arange(pages, dtype=torch.int32)[None]
    bounds, lengths = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    native_ops().paged_attention(torch.randn(tokens, heads, dim), k, v, table, bounds, lengths, 0.1)

kept = []
for i in range(60):
    for shape in ((64, 9, 3, 100), (128, 16, 8, 100), (256, 4, 2, 100)):
        thread = threading.Thread(target=attend, args=shape)
        thread.start()
        thread.join()
        kept.append(torch.empty(1000 + 16 * i))
print("alive")
"""


def test_attention_keeps_to_its_scratch_memory_wherever_it_lies(ops):
    """Each thread has its own, which malloc aligns to 16 bytes and the operator to 64: the allocator aborts the process
    if something was written behind the end."""
    done = subprocess.run([sys.executable, "-c", IN_NEW_THREADS], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-300:]


def test_attention_of_nothing(ops):
    """No request, and requests without rows next to others."""
    empty = paged([], page=16, kv_heads=2, group=2, dim=16, dtype=torch.float32)
    assert ops.paged_attention(*empty).shape == (0, 4, 16)
    some = paged([(0, 0), (2, 20), (0, 7), (1, 1)], page=16, kv_heads=2, group=2, dim=16, dtype=torch.float32)
    assert_close(ops.paged_attention(*some), exact(some), torch.float32)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("at", "wrong", "message"),
    [
        (0, lambda q: q.double(), "dtypes differ"),
        (0, lambda q: q.to("meta"), "must be on the CPU"),
        (0, lambda q: q[:, :3], "do not divide"),
        (0, lambda q: q[0], "want q"),
        (0, lambda q: q[..., :8], "got"),
        (0, lambda q: q.transpose(1, 2).contiguous().transpose(1, 2), "last dimension must be contiguous"),
        (1, lambda k: k.bfloat16(), "dtypes differ"),
        (2, lambda v: v[1:], "caches"),
        (3, lambda table: table.long(), "must be contiguous Int"),
        (3, lambda table: table[:1], "table"),
        (3, lambda table: table + 100, "the cache has"),
        (3, lambda table: table - 100, "the cache has"),
        (3, lambda table: table[:, :1].contiguous(), "room for 16"),
        (4, lambda bounds: bounds + 1, "from 0 to"),
        (4, lambda bounds: int32(0, 9, 5), "must not decrease"),
        (5, lambda lengths: lengths.clone().fill_(1), "length 1"),
        (5, lambda lengths: lengths[:1], "seq_lens"),
    ],
)
def test_attention_refuses_what_it_cannot_compute(ops, at, wrong, message):
    arguments = list(paged([(1, 40), (4, 40)], page=16, kv_heads=2, group=2, dim=16, dtype=torch.float32))
    arguments[at] = wrong(arguments[at])
    with pytest.raises(RuntimeError, match=f"paged_attention.*{message}"):
        ops.paged_attention(*arguments)


def test_head_sizes_that_attention_takes(ops):
    assert [n for n in (8, 16, 20, 64, 80, 512, 528) if fits_native_attention(n)] == [16, 64, 80, 512]
    for dim in (8, 24, 528):
        arguments = paged([(1, 4)], page=16, kv_heads=1, group=1, dim=dim, dtype=torch.float32)
        with pytest.raises(RuntimeError, match="multiple of 16"):
            ops.paged_attention(*arguments)


# ---- small operations: shapes with and without whole vectors of 16, rows enough for a second thread

ROWS = [0, 1, 3, 16, 65, 300]
SIZES = [1, 6, 16, 31, 96, 576]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(ops2, dtype):
    for rows in ROWS:
        for size in SIZES:
            x, weight = randn(rows, size, dtype=dtype, seed=1) * 3, randn(size, dtype=dtype, seed=2)
            want = definitions.rms_norm(x, weight, 1e-5)
            assert_close(ops2.rms_norm(x, weight, 1e-5), want, dtype)
            sums = [randn(rows, size, dtype=dtype, seed=3) for _ in range(2)]
            want = definitions.rms_norm(x, weight, 1e-5, sums[0])
            assert_close(ops2.rms_norm(x, weight, 1e-5, sums[1]), want, dtype)
            assert torch.equal(*sums)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads(ops2, dtype):
    """Each head with its own weight or all with one, as views into the matrix of all projections."""
    heads = randn(5, 9, 20, dtype=dtype)[:, 1:7]
    for weight in (randn(6, 20, dtype=dtype), randn(20, dtype=dtype)):
        assert_close(ops2.rms_norm(heads, weight, 1e-6), definitions.rms_norm(heads, weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary(ops2, dtype):
    for rows in ROWS:
        for dim in (2, 6, 64, 80, 128):
            x = randn(rows, 7, dim, dtype=dtype)[:, 2:5]
            cos, sin = randn(rows, 1, dim, dtype=dtype, seed=1), randn(rows, 1, dim, dtype=dtype, seed=2)
            assert_close(ops2.rotary(x, cos, sin), definitions.rotary(x, cos, sin), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv(ops2, dtype):
    for rows in ROWS:
        qkv = randn(rows, 10, 24, dtype=dtype)
        slots = torch.randperm(400, generator=torch.Generator().manual_seed(rows))[:rows]
        got = [torch.full((50, 8, 3, 24), torch.nan, dtype=dtype) for _ in range(2)]
        want = [cache.clone() for cache in got]
        ops2.store_kv(qkv[:, 4:7], qkv[:, 7:], *got, slots)
        definitions.store_kv(qkv[:, 4:7], qkv[:, 7:], *want, slots)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(ops2, dtype):
    for rows in ROWS:
        for size in SIZES:
            x = randn(rows, 2 * size + 4, dtype=dtype)[:, : 2 * size] * 8
            assert_close(ops2.silu_and_mul(x), definitions.silu_and_mul(x), dtype)
    extreme = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30, torch.nan, 1, 1, 1, 1, 1, 1]])
    want = definitions.silu_and_mul(extreme)
    assert torch.allclose(ops2.silu_and_mul(extreme), want, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_rows(ops2, dtype):
    """Few distinct values, so that almost every row has ties: the first maximum counts, as in torch."""
    for rows in (0, 1, 5, 70):
        for size in (1, 15, 16, 511, 513, 1000, 49152):
            x = (randn(rows, size + 1, seed=size)[:, 1:] * 2).round().to(dtype)
            assert torch.equal(ops2.argmax_rows(x), x.argmax(-1))


def test_argmax_rows_of_infinities_and_nan(ops2):
    for size in (5, 16, 700, 5000):
        for values in ([-torch.inf], [-torch.inf, torch.inf], [torch.nan, torch.inf], [-0.0, 0.0]):
            x = torch.full((1, size), -torch.inf)
            for at in (0, size // 2, size - 1):
                for value in values:
                    x[0, at] = value
                    assert torch.equal(ops2.argmax_rows(x), x.argmax(-1)), (size, at, value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: o.rms_norm(randn(2, 8), randn(9), 1e-5), "rms_norm: want"),
        (lambda o: o.rms_norm(randn(2, 8), randn(8, dtype=torch.bfloat16), 1e-5), "rms_norm: dtypes differ"),
        (lambda o: o.rms_norm(randn(2, 8), randn(8), 1e-5, randn(1, 8)), "rms_norm: residual"),
        (lambda o: o.rms_norm(randn(8, 2).T, randn(8), 1e-5), "rms_norm: the last dimension"),
        (lambda o: o.rms_norm(randn(2, 8).double(), randn(8).double(), 1e-5), "rms_norm: float32"),
        (lambda o: o.rms_norm(randn(2, 8).to("meta"), randn(8).to("meta"), 1e-5), "rms_norm: .*CPU"),
        (lambda o: o.rotary(randn(2, 3, 5), randn(2, 1, 5), randn(2, 1, 5)), "rotary: .*even"),
        (lambda o: o.rotary(randn(2, 3, 6), randn(1, 1, 6), randn(2, 1, 6)), "rotary: want contiguous cos"),
        (lambda o: o.store_kv(*[randn(2, 3, 4)] * 2, *[randn(2, 2, 3, 4)] * 2, torch.tensor([0, 4])), "slot 4 of"),
        (lambda o: o.store_kv(*[randn(2, 3, 4)] * 2, *[randn(2, 2, 3, 4)] * 2, torch.tensor([-1, 0])), "slot -1 of"),
        (lambda o: o.store_kv(*[randn(2, 3, 4)] * 2, *[randn(2, 2, 3, 4)] * 2, torch.tensor([0])), "2 tokens"),
        (lambda o: o.store_kv(*[randn(2, 3, 4)] * 2, *[randn(2, 2, 3, 4)] * 2, int32(0, 1)), "slots must be"),
        (lambda o: o.store_kv(randn(2, 3, 4), randn(2, 2, 4), *[randn(2, 2, 2, 4)] * 2, int32(0, 1).long()), "k is"),
        (lambda o: o.silu_and_mul(randn(2, 3)), "silu_and_mul: want"),
        (lambda o: o.argmax_rows(randn(3)), "argmax_rows: want"),
        (lambda o: o.argmax_rows(torch.zeros(2, 0)), "argmax_rows: want"),
    ],
)
def test_small_operations_refuse_what_they_cannot_compute(ops, call, message):
    with pytest.raises(RuntimeError, match=message):
        call(ops)


# ---- trust


@pytest.mark.parametrize("name", NAMES)
def test_the_probe_finds_each_operator_that_is_wrong(name):
    def slightly_wrong(*arguments):
        result = getattr(definitions, name)(*arguments)
        if result is None:
            arguments[2][0, 2] += 0.5
            return None
        result.flatten()[-1] += 1
        return result

    def raising(*arguments):
        raise RuntimeError("no such instruction")

    assert first_wrong(CpuOps()) is None
    for fault in (slightly_wrong, raising):
        assert first_wrong(replace(CpuOps(), **{name: fault})).startswith(f"{name} in")


def test_wrong_results_mean_plain_torch_and_one_line(ops, monkeypatch, capsys):
    monkeypatch.setattr(native, "first_wrong", lambda ops: "rotary in torch.float32")
    assert native.native_ops.__wrapped__() is None
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "plain torch instead" in err and "rotary" in err


# ---- building


def compiler_script(folder: Path, body: str) -> Path:
    """A command that stands for the compiler and writes down each call."""
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n{body}\n')
    script.chmod(0o755)
    return script


def calls(folder: Path) -> int:
    log = folder / "calls"
    return len(log.read_text().splitlines()) if log.exists() else 0


def start(cache: Path, **env: str) -> subprocess.Popen:
    """A process that prints whether it has the operators."""
    code = "from common.cpu import native_ops; print(native_ops() is not None)"
    env = {**os.environ, "MINISGL_CACHE": str(cache), "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def copying_compiler(folder: Path) -> Path:
    """Takes its time, and makes objects of nothing and of them the library that the tests already have."""
    built = native.library_folder() / native.LIBRARY
    return compiler_script(
        folder, f'for last; do :; done\nsleep 0.3\ncase "$*" in *-shared*) cp {built} "$last";; *) : > "$last";; esac'
    )


def test_two_processes_at_once_build_once_and_later_ones_not_at_all(ops, tmp_path):
    script = str(copying_compiler(tmp_path))
    both = [start(tmp_path / "cache", CXX=script) for _ in range(2)]
    for process in both:
        out, err = process.communicate()
        assert (process.returncode, out) == (0, "True\n"), err
    assert calls(tmp_path) == len(native.SOURCES) + 1
    [library] = (tmp_path / "cache" / "native").glob(f"*/{native.LIBRARY}")
    out, err = start(tmp_path / "cache", CXX="/nonexistent").communicate()
    assert (out, err) == ("True\n", "")
    library.write_bytes(library.read_bytes()[:1000])  # cut short: built again
    out, err = start(tmp_path / "cache", CXX=script).communicate()
    assert out == "True\n" and calls(tmp_path) == 2 * (len(native.SOURCES) + 1), err


def test_without_a_compiler_there_is_one_line_and_plain_torch(tmp_path):
    with_bad_name = start(tmp_path / "first", CXX="/nonexistent")  # a cache each: none waits for the other, and says so
    with_empty_path = start(tmp_path / "second", CXX="", PATH="")
    for process, expected in ((with_bad_name, "/nonexistent not found"), (with_empty_path, "install g++ or set CXX")):
        out, err = process.communicate()
        assert (process.returncode, out) == (0, "False\n")
        assert err.count("\n") == 1 and expected in err


def fallback(capsys) -> str:
    """native_ops() as in a fresh process: it gives nothing, and this line."""
    assert native.native_ops.__wrapped__() is None
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("compiling")]
    assert len(lines) == 1
    return lines[0]


def test_a_compiler_that_fails_is_asked_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler_script(tmp_path, 'echo "x.cpp:1: error: no header <omp.h>" >&2; exit 1')))
    assert "error: no header <omp.h>" in fallback(capsys)
    asked = calls(tmp_path)
    assert asked > 0
    assert "delete" in fallback(capsys) and calls(tmp_path) == asked
    compiler_script(tmp_path, 'echo "error: another compiler" >&2; exit 1')
    assert "another compiler" in fallback(capsys) and calls(tmp_path) > asked
    assert not list((tmp_path / "cache" / "native").glob("ops-*/*")), (
        "nothing half built is left where it would be used"
    )


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('echo "fatal error: Killed signal" >&2; exit 1', "Killed"),
        ('echo "error: write: No space left on device" >&2; exit 1', "No space left"),
        ("kill -INT $$", "compiler status -2"),
    ],
    ids=["memory", "disk", "Ctrl-C"],
)
def test_a_compiler_that_fails_for_a_reason_of_the_moment_is_asked_again(tmp_path, monkeypatch, capsys, script, said):
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler_script(tmp_path, script)))
    assert said in fallback(capsys)
    asked = calls(tmp_path)
    assert said in fallback(capsys) and calls(tmp_path) > asked


def test_the_doctor_tells_of_a_compiler_that_has_failed(tmp_path, monkeypatch, capsys):
    from common import doctor

    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler_script(tmp_path, 'echo "error: no header <omp.h>" >&2; exit 1')))
    assert "will be compiled once" in doctor.compiler().text
    fallback(capsys)
    found = doctor.compiler()
    assert found.state == doctor.WARN and "no header <omp.h> (delete " in found.text
    native.failure_file().write_text("cut off")
    assert "will be compiled once" in doctor.compiler().text


def test_a_cache_that_cannot_be_written_means_plain_torch(tmp_path, monkeypatch, capsys):
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    assert "set MINISGL_CACHE" in fallback(capsys)


def test_the_library_belongs_to_its_sources_flags_torch_and_processor(tmp_path, monkeypatch):
    folders = {native.library_folder()}
    for place, name, value in (
        (native.torch, "__version__", "2.99.0"),
        (native, "processor", lambda: "x86_64 avx9"),
        (native, "SOURCES", ("small_ops.cpp",)),
        (native, "FLAGS", ("-O0",)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            folders.add(native.library_folder())
    monkeypatch.setenv("MINISGL_CXXFLAGS", "-march=x86-64-v3")
    folders.add(native.library_folder())
    assert len(folders) == 6


@pytest.mark.full
@pytest.mark.parametrize("flags", ["-march=x86-64", "-march=x86-64-v3", "-mno-avx512bf16", "-O1"])
def test_other_instruction_sets_compute_the_same(ops, flags, tmp_path):
    """The whole file again, with the operators compiled for a lesser processor."""
    env = {**os.environ, "MINISGL_CACHE": str(tmp_path), "MINISGL_CXXFLAGS": flags}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "not process and not compiler", __file__]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
