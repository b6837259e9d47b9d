"""One model over several ranks computes what one rank computes, and no rank decides alone or outlives the others."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from common.cpu import shm
from common.tiny import cached_tiny_model
from tests.conftest import ROOT
from tests.oracle import assert_greedy, hf_logits
from tests.ranks import (
    PROCESS_CHAPTERS,
    QUICK_TP,
    Meeting,
    ThreadGroup,
    alive,
    children,
    gone,
    logits,
    modules,
)

IDS = [17, 230, 9, 511, 64, 700, 33, 5, 81, 640, 1002, 1, 0, 77]
PROMPTS = [IDS[:7], [5, 81, 640], [1002] * 40, IDS * 3]
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
BIASED = {"attention_bias": True, "mlp_bias": True}
ODD_VOCABULARY = {"vocab_size": 1003}
TINY_POOL = {"kv_memory": "60K", "page_size": 4, "max_model_len": 64, "max_batch_tokens": 16}


@pytest.fixture(params=QUICK_TP)
def chapter(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


@pytest.fixture
def open_llm(chapter: ModuleType) -> Iterator[Callable[..., Any]]:
    """open_llm(folder=, **options): an exact LLM whose books are checked after every step; closed at the end, and no
    process of it is left."""
    opened: list[Any] = []
    before = set(children())

    def make(folder: Path | None = None, **options: Any) -> Any:
        options = {"dtype": "float32", "threads": 1, "debug_invariants": True, **options}
        opened.append(chapter.LLM(str(folder or cached_tiny_model("llama")), **options))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()
    assert set(children()) <= before


def greedy(chapter: ModuleType, llm: Any, max_tokens: int = 12) -> list[list[int]]:
    params = chapter.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [out.token_ids for out in llm.generate(PROMPTS, params, progress=False)]


# ---- the same numbers -----------------------------------------------------------------------------------------------

MODELS = [
    pytest.param("llama", {}, (1, 2, 4, 8), id="llama-8-heads-2-kv"),
    pytest.param("llama3rope", SIX_HEADS, (1, 3, 6), id="llama3rope-6-heads-3-kv"),
    pytest.param("qwen2", {}, (2, 4), id="qwen2"),
    pytest.param("qwen3", SIX_HEADS, (3,), id="qwen3-6-heads-3-kv"),
    pytest.param("mistral", {}, (2,), id="mistral"),
    pytest.param("llama", BIASED, (2, 4), id="llama-with-every-bias"),
    pytest.param("llama", {"num_key_value_heads": 1}, (2, 8), id="one-kv-head-for-all"),
    pytest.param("llama", {"vocab_size": 1005, "tie_word_embeddings": True}, (2, 4), id="odd-tied-vocabulary"),
]


@pytest.mark.fault(8)
@pytest.mark.parametrize(("arch", "overrides", "sizes"), MODELS)
def test_the_logits_of_any_number_of_ranks_are_those_of_transformers(
    chapter: ModuleType, arch: str, overrides: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    folder = cached_tiny_model(arch, **overrides)
    want = hf_logits(folder, IDS)
    for size in sizes:
        got = logits(chapter, folder, IDS, size)
        assert got.shape == want.shape, "padding of the vocabulary reaches nobody"
        # With its random biases one model's activations, and so its rounding, are larger.
        assert (got - want).abs().max() < (4e-4 if overrides == BIASED else 1e-4), f"tp {size}"


@pytest.mark.parametrize("shared", [True, False], ids=["shared-memory", "gloo"])
def test_two_processes_generate_what_one_does(
    chapter: ModuleType, open_llm: Callable[..., Any], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = shared and shm.works(2)
    if not shared:
        monkeypatch.setattr(shm, "works", lambda ranks: False)
    folder = cached_tiny_model("llama")
    llm = open_llm(folder, tp=2)
    assert len(children()) >= 1
    assert (llm.engine.group._shared is not None) == shared
    outputs = greedy(chapter, llm)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert assert_greedy(folder, prompt, output) > 8
    assert outputs == greedy(chapter, open_llm(folder))


def test_four_ranks_share_two_kv_heads_and_three_share_three(chapter: ModuleType, open_llm: Callable[..., Any]) -> None:
    for folder, tp in ((cached_tiny_model("llama"), 4), (cached_tiny_model("qwen3", **SIX_HEADS), 3)):
        llm = open_llm(folder, tp=tp)
        for prompt, output in zip(PROMPTS, greedy(chapter, llm), strict=True):
            assert assert_greedy(folder, prompt, output) > 8
        llm.close()


@pytest.mark.fault(7)
def test_samples_and_logprobs_do_not_depend_on_the_number_of_ranks(
    chapter: ModuleType, open_llm: Callable[..., Any]
) -> None:
    params = chapter.SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=5, logprobs=3, ignore_eos=True)
    one, two = (open_llm(tp=tp).generate(PROMPTS, params, progress=False) for tp in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert a.token_ids == b.token_ids
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert abs(x["logprob"] - y["logprob"]) < 1e-4
            assert x["top"].keys() == y["top"].keys()


@pytest.mark.fault(5, 14)
def test_paging_prefixes_chunks_preemption_and_aborts_work_as_on_one_rank(
    chapter: ModuleType, open_llm: Callable[..., Any]
) -> None:
    """A pool that is too small, so that requests are preempted; equal prefixes; aborts in the middle."""

    def run(tp: int) -> tuple[list[list[int]], dict[str, int]]:
        llm = open_llm(tp=tp, **TINY_POOL)
        rids = [llm.add(IDS[: 8 + i % 5], chapter.SamplingParams(max_tokens=20, ignore_eos=True)) for i in range(8)]
        outputs = []
        for step in range(400):
            if step == 4:
                llm.abort(rids[2])
            if step == 9:
                llm.abort(rids[7])
                llm.add([7] * 30, chapter.SamplingParams(max_tokens=34, ignore_eos=True))  # up to the last position
            outputs += [(len(out.prompt_token_ids), out.token_ids) for out in llm.step()]
            if not llm.has_work():
                return outputs, llm.stats()
        raise AssertionError("it never ends")

    (one, stats_one), (two, stats_two) = run(1), run(2)
    assert two == one
    assert (30, 34) in [(prompt, len(tokens)) for prompt, tokens in two], "up to the last position"
    assert stats_two["preemptions"] > 0 and stats_two["prefix_hit_tokens"] > 0
    assert {**stats_two, "allreduce_bytes": 0} == stats_one


# ---- shares of the weights ------------------------------------------------------------------------------------------


class Recorded:
    """A checkpoint slice that notes which elements were read."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.shape = whole, tuple(whole.shape)
        self.read = torch.zeros(self.shape, dtype=torch.int64)

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.read[index] += 1
        return self.whole[index]


def test_each_rank_reads_its_share_and_nothing_else(chapter: ModuleType) -> None:
    part = modules(chapter)
    like, size = torch.empty(0), 4
    layers = {
        "gate_up": (lambda g: part("layers").GateUpLinear(8, 12, False, like, g), "up", (12, 8)),
        "row": (lambda g: part("layers").RowLinear(12, 8, False, like, g), "out", (8, 12)),
        "head": (lambda g: part("layers").LMHead(8, 10, like, g), "out", (10, 8)),
        "q": (lambda g: part("layers").QKVLinear(8, 4, 2, 3, False, like, g), "q", (12, 8)),
    }
    for name, (make, piece, shape) in layers.items():
        sources = [Recorded(torch.randn(shape)) for _ in range(size)]
        for rank, source in enumerate(sources):
            make(ThreadGroup(rank, size, Meeting(size))).load(piece, "weight", source)
        assert torch.equal(sum(s.read for s in sources), torch.ones(shape, dtype=torch.int64)), name
        assert max(int(s.read.sum()) for s in sources) <= -(-shape[0] * shape[1] // size) + 8, name
    # Two KV heads on four ranks: each is read twice.
    sources = [Recorded(torch.randn(6, 8)) for _ in range(size)]
    for rank, source in enumerate(sources):
        part("layers").QKVLinear(8, 4, 2, 3, False, like, ThreadGroup(rank, size, Meeting(size))).load(
            "k", "weight", source
        )
    assert all(int(s.read.sum()) == 3 * 8 for s in sources)
    assert torch.equal(sum(s.read for s in sources), torch.full((6, 8), 2))


@pytest.mark.fault(8)
def test_the_bias_of_a_sum_is_added_once(chapter: ModuleType) -> None:
    part = modules(chapter)
    ops = part("ops").choose(torch.device("cpu"), torch.float32, native=False)
    weight, bias, x = torch.randn(5, 12), torch.randn(5), torch.randn(3, 12)

    def rank(group: ThreadGroup) -> torch.Tensor:
        layer = part("layers").RowLinear(12, 5, True, torch.empty(0), group)
        layer.load("out", "weight", weight)
        layer.load("out", "bias", bias)
        layer.finish(ops)
        return layer(x[:, group.rank * 4 : group.rank * 4 + 4].contiguous())

    for out in Meeting(3).run(rank):
        torch.testing.assert_close(out, x @ weight.T + bias)


def test_a_tensor_of_another_shape_is_refused_by_every_rank(chapter: ModuleType) -> None:
    layer = modules(chapter)("layers").RowLinear(12, 5, False, torch.empty(0), ThreadGroup(1, 3, Meeting(3)))
    for shape in ((5, 4), (12, 5), (5, 13), (5,)):
        with pytest.raises(ValueError, match=r"expected \(5, 12\)"):
            layer.load("out", "weight", torch.zeros(shape))


@pytest.mark.fault(8)
@pytest.mark.parametrize(
    ("overrides", "tp", "works"),
    [
        ({}, 3, "1, 2, 4, 8"),
        ({}, 16, "1, 2, 4, 8"),
        (SIX_HEADS, 4, "1, 3, 6"),
        ({"intermediate_size": 97}, 2, "1"),  # padding would be as right, and one rank idler than the other
        ({"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 94}, 4, "1, 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_work(
    open_llm: Callable[..., Any], overrides: dict[str, Any], tp: int, works: str
) -> None:
    with pytest.raises(ValueError, match=rf"tp {tp} .* can be {works}$"):
        open_llm(cached_tiny_model("llama", **overrides), tp=tp)


@pytest.mark.parametrize(
    "options", [{"tp": 0}, {"tp": -1}, {"tp": 3, "nnodes": 2}, {"tp": 2, "nnodes": 2, "node_rank": 2}]
)
def test_options_that_contradict_each_other_are_refused(chapter: ModuleType, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"tp|node_rank"):
        modules(chapter)("config").EngineConfig(**options)


# ---- collectives ----------------------------------------------------------------------------------------------------


def test_bytes_are_two_all_reduces_per_layer_and_one_for_the_embedding(
    chapter: ModuleType, open_llm: Callable[..., Any]
) -> None:
    one, two = open_llm(), open_llm(tp=2)
    for llm in (one, two):
        greedy(chapter, llm)
    layers, hidden, size = 3, 64, 4
    stats = two.stats()
    assert stats["allreduce_bytes"] == stats["forwarded_tokens"] * (2 * layers + 1) * hidden * size
    assert one.stats()["allreduce_bytes"] == 0
    assert two.engine.model_config.layers == layers


@pytest.mark.fault(27)
@pytest.mark.skipif(not shm.works(), reason="no compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shared_memory_adds_in_the_order_of_the_ranks_and_carries_rows(size: int, dtype: torch.dtype) -> None:
    """Sizes around those of a slot, many times over, so that slots are used again while others may still read them."""
    descriptor = shm.create(size)
    slot = 256 * 1024 // dtype.itemsize
    counts = [1, 7, 1000, slot - 1, slot, slot + 1, 3 * slot + 5] * 3
    parts = [[torch.randn(n, generator=torch.Generator().manual_seed(100 * r + i)).to(dtype) for i, n in enumerate(counts)]
             for r in range(size)]  # fmt: skip

    def rows(x: torch.Tensor, i: int) -> torch.Tensor:
        """One row, or several that do not end where a slot ends."""
        return x.view(-1, 5 if i % 2 and len(x) % 5 == 0 else len(x))

    def rank(group: ThreadGroup) -> tuple[list[torch.Tensor], list[Any], list[torch.Tensor]]:
        memory = shm.SharedMemory(descriptor, group.rank, size, lambda: None)
        sums, gathered, told = [], [], []
        for i, x in enumerate(parts[group.rank]):
            y, z = x.clone(), x.clone()
            memory.broadcast(z)
            memory.all_reduce(y)
            sums.append(y)
            told.append(z)
            gathered.append(memory.gather(rows(x, i)))
        return sums, gathered, told

    results = Meeting(size).run(rank)
    os.close(descriptor)
    for i in range(len(counts)):
        total = parts[0][i].float()
        for r in range(1, size):
            total = total + parts[r][i].float()
        for sums, _, told in results:
            assert torch.equal(sums[i], total.to(dtype))
            assert torch.equal(told[i], parts[0][i])
        assert torch.equal(results[0][1][i], torch.cat([rows(parts[r][i], i) for r in range(size)], -1))
        assert all(torch.equal(results[r][1][i], rows(parts[r][i], i)) for r in range(1, size))


@pytest.mark.skipif(not shm.works(), reason="no compiler")
def test_waiting_for_a_rank_that_never_comes_can_be_given_up() -> None:
    descriptor = shm.create(2)
    calls: list[float] = []

    def check() -> None:
        calls.append(time.monotonic())
        if len(calls) == 3:
            raise RuntimeError("rank 1 has ended")

    memory = shm.SharedMemory(descriptor, 0, 2, check)
    os.close(descriptor)
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        memory.all_reduce(torch.ones(3))
    assert len(calls) == 3


# ---- processes ------------------------------------------------------------------------------------------------------


one_of_equals = pytest.mark.parametrize("chapter", PROCESS_CHAPTERS, indirect=True)


def ranks(llm: Any) -> list[int]:
    return [process.pid for process in llm.engine.group.ranks.processes.values()]


@one_of_equals
@pytest.mark.parametrize("shared", [True, False], ids=["shared-memory", "gloo"])
def test_a_dead_rank_is_named_by_the_next_step(
    chapter: ModuleType, open_llm: Callable[..., Any], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        monkeypatch.setattr(shm, "works", lambda ranks: False)
    llm = open_llm(tp=2)
    llm.add(IDS, chapter.SamplingParams(max_tokens=400, ignore_eos=True))
    llm.step()
    threading.Timer(0.2, os.kill, (ranks(llm)[0], signal.SIGKILL)).start()  # in the middle of steps
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 ended with signal SIGKILL"):
        while True:
            llm.step()
    assert time.monotonic() - started < 10
    with pytest.raises(RuntimeError, match="rank 1"):
        llm.step()
    pids = ranks(llm)
    llm.close()
    gone(pids)


@one_of_equals
@pytest.mark.parametrize("shared", [True, False], ids=["shared-memory", "gloo"])
def test_a_forward_that_fails_on_one_rank_alone_does_not_hold_up_the_end(
    open_llm: Callable[..., Any], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it in an all-reduce, where no word to stop reaches them."""
    if not shared:
        monkeypatch.setattr(shm, "works", lambda ranks: False)
    llm = open_llm(tp=2)
    pids = ranks(llm)

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(llm.engine.group, "all_reduce", broken)
    llm.add(IDS)
    with pytest.raises(RuntimeError, match="no memory left"):
        llm.step()
    started = time.monotonic()
    llm.close()
    assert time.monotonic() - started < 20
    gone(pids)


def test_the_smallest_value_of_all_ranks_is_everybodys(chapter: ModuleType) -> None:
    """Two ranks in threads, over a store and gloo as between hosts."""
    module = importlib.import_module(f"{chapter.__name__}.distributed")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(number: int) -> int:
        place = module.Place(number, 2, number, 2, 1, "127.0.0.1", store.port)
        return module.Group(place, torch.device("cpu")).smallest((5, 3)[number])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [3, 3]


def test_ranks_that_do_not_meet_say_so_in_our_words(chapter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens where rank 0 should be: torch's own error is not what a user sees."""
    module = importlib.import_module(f"{chapter.__name__}.distributed")
    monkeypatch.setattr(module, "MEET_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(module.RankError, match=r"rank 0 did not come to 127.0.0.1:\d+ within 1 s"):
        module.Group(module.Place(1, 2, 1, 2, 1, "127.0.0.1", port), torch.device("cpu"))


def test_each_rank_process_needs_one_gpu(chapter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exactly as many GPUs as ranks every rank finds its own."""
    module = importlib.import_module(f"{chapter.__name__}.distributed")
    places: list[Any] = []
    monkeypatch.setattr(
        module.child, "start", lambda name, orders, keep: places.append(module.Place(**orders["place"]))
    )
    monkeypatch.setattr(module.child, "end", lambda process: None)
    monkeypatch.setattr(module.Ranks, "wait", lambda self, timeout_s: True)
    config = importlib.import_module(f"{chapter.__name__}.config").EngineConfig(model="dummy:llama-tiny", tp=3)
    ranks = module.Ranks(config, module.Place.of(config), first=0)
    ranks.processes.clear()
    ranks.close()
    assert [(place.rank, place.local_rank) for place in places] == [(0, 0), (1, 1), (2, 2)]
    monkeypatch.setattr(module, "Group", lambda place, device, ranks=None: place)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for place in places:
        config.place = place
        assert module.join(config, place, torch.device("cuda")) == place
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for place in places:  # rank 0 above all: the server's one line and exit status are its own
        config.place = place
        with pytest.raises(ValueError, match="tp needs 3 GPUs on this host, it has 2"):
            module.join(config, place, torch.device("cuda"))


def test_memory_that_is_too_little_for_all_ranks_is_refused(chapter: ModuleType, open_llm: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="kv_memory 0 bytes is less than one page"):
        open_llm(tp=2, kv_memory="1")


@one_of_equals
def test_a_rank_that_dies_while_loading_is_named_and_nothing_is_left(
    open_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nonexistent")
    before = set(children())

    def kill_the_first() -> None:
        deadline = time.monotonic() + 60
        while not (fresh := set(children()) - before) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(fresh.pop(), signal.SIGKILL)

    threading.Thread(target=kill_the_first, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 ended with signal SIGKILL"):
        open_llm(tp=2)
    assert time.monotonic() - started < 10
    assert set(children()) <= before


@one_of_equals
def test_ctrl_c_takes_effect_between_steps_and_the_ranks_stay_together(
    chapter: ModuleType, open_llm: Callable[..., Any]
) -> None:
    llm = open_llm(tp=2)
    want = greedy(chapter, llm)
    for delay in (0.02, 0.05, 0.11):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                greedy(chapter, llm)
        timer.join()
        assert greedy(chapter, llm) == want


@one_of_equals
@pytest.mark.fault(27)
def test_two_groups_on_one_machine_do_not_meet(chapter: ModuleType, open_llm: Callable[..., Any]) -> None:
    first, second = open_llm(tp=2), open_llm(cached_tiny_model("qwen3"), tp=2)
    a, b = greedy(chapter, first, 4), greedy(chapter, second, 4)
    assert a != b
    first.close()
    assert greedy(chapter, second, 4) == b


@one_of_equals
def test_ranks_end_with_a_parent_that_is_killed(chapter: ModuleType, tmp_path: Path) -> None:
    code = (
        f"import sys, time; from {chapter.__name__} import LLM\n"
        f"llm = LLM({str(cached_tiny_model('llama'))!r}, dtype='float32', threads=1, tp=2)\n"
        "print(*[p.pid for p in llm.engine.group.ranks.processes.values()], flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 1 and alive(pids[0])
    finally:
        parent.kill()
        parent.wait()
    gone(pids)


@one_of_equals
def test_an_llm_that_nobody_closes_ends_quietly(chapter: ModuleType) -> None:
    code = (
        f"from {chapter.__name__} import LLM, SamplingParams\n"
        f"llm = LLM({str(cached_tiny_model('llama'))!r}, dtype='float32', threads=1, tp=2)\n"
        "print(llm.generate([[5]], SamplingParams(max_tokens=2, ignore_eos=True), progress=False)[0].finish_reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "length\n"), done.stderr
    assert "terminate" not in done.stderr and "Traceback" not in done.stderr
