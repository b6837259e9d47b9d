"""CUDA graphs of decode steps, without a GPU: capture is replaced by one that runs the step and replays by running it again.

What is left is what can be wrong on any machine: buffers, padding, sizes, and which batches have a graph at all.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common.gpu_check import compare_graphs
from tests.conftest import CHAPTERS, ROOT, chapter

GRAPHS = sorted(
    {(ROOT / n / "graph.py").read_text(): n for n in CHAPTERS[::-1] if (ROOT / n / "graph.py").exists()}.values()
)
CPU = torch.device("cpu")


class Captures:
    """Stands for capture(): one run at capture, another at each replay."""

    def __init__(self) -> None:
        self.count = 0
        self.replays = 0

    def __call__(self, step, pool):
        self.count += 1
        step()

        def replay() -> None:
            self.replays += 1
            step()

        return replay


@pytest.fixture(params=GRAPHS)
def name(request):
    return request.param


@pytest.fixture
def graph(name):
    return importlib.import_module(f"{name}.graph")


@pytest.fixture
def captures(graph, monkeypatch):
    fake = Captures()
    monkeypatch.setattr(graph, "capture", fake)
    return fake


@pytest.fixture
def decode(name):
    """decode(n): the input of a decode step of n requests, every number in it another one."""
    core = importlib.import_module(f"{name}.core")

    def build(count: int, width: int = 2):
        rows = torch.arange(count)
        return core.ForwardInput(
            ids=rows + 100, positions=rows + 200, cu_extend=torch.arange(count + 1, dtype=torch.int32),
            seq_lens=(rows + 201).int(), logit_rows=rows,
            table=(rows[:, None] * 10 + torch.arange(width) + 1000).int(), slots=rows + 300,
        )  # fmt: skip

    return build


class Recorder:
    """A forward that returns its inputs as logits[R, 5] and keeps a copy of the last one."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, inp):
        self.calls.append(
            replace(inp, **{key: getattr(inp, key).clone() for key in ("seq_lens", "slots", "table", "ids")})
        )
        columns = inp.ids, inp.positions, inp.seq_lens, inp.slots, inp.table[:, 0]
        return torch.stack([c[inp.logit_rows].float() for c in columns], 1)


def test_sizes(graph):
    assert graph.graph_sizes(1) == [1]
    assert graph.graph_sizes(5) == [1, 2, 4, 5]
    assert graph.graph_sizes(8) == [1, 2, 4, 8]
    assert graph.graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph.graph_sizes(64) == [1, 2, 4, *range(8, 65, 8)]


def test_a_batch_runs_in_the_next_larger_graph(graph, captures, decode):
    forward = Recorder()
    graphs = graph.DecodeGraphs(forward, 20, 4, CPU)
    for count, size in ((3, 4), (1, 1), (4, 4), (9, 16), (17, 20), (2, 2), (9, 16)):
        inp = decode(count)
        assert torch.equal(graphs.run(inp), Recorder()(inp)), "the rows of the batch, in its order"
        assert len(forward.calls[-1].ids) == size
    assert captures.count == 5, "each size is captured once"
    assert captures.replays == 7
    assert "[1, 2, 4, 16, 20]" in graphs.summary()


def test_padding_rows_have_no_length_and_no_slot(graph, captures, decode):
    """Also where the rows held another batch before."""
    forward = Recorder()
    graphs = graph.DecodeGraphs(forward, 8, 4, CPU)
    graphs.run(decode(8))
    graphs.run(decode(5))
    seen = forward.calls[-1]
    assert seen.seq_lens.tolist() == [201, 202, 203, 204, 205, 0, 0, 0]
    assert seen.slots.tolist() == [300, 301, 302, 303, 304, -1, -1, -1]


def test_a_table_may_be_narrower_than_the_last_one(graph, captures, decode):
    forward = Recorder()
    graphs = graph.DecodeGraphs(forward, 2, 4, CPU)
    graphs.run(decode(2, width=4))
    graphs.run(decode(2, width=1))
    assert forward.calls[-1].table[:, 0].tolist() == [1000, 1010]
    assert forward.calls[-1].table.shape == (2, 4)


def test_graphs_see_the_buffers_and_never_the_input(graph, captures, decode):
    """A graph knows addresses: they must be the same at capture and at every replay, for all sizes."""
    places = []

    def forward(inp):
        places.append([getattr(inp, key).data_ptr() for key in ("ids", "positions", "cu_extend", "table", "slots")])
        return inp.ids[:, None].float()

    graphs = graph.DecodeGraphs(forward, 8, 4, CPU)
    for count in (3, 3, 7, 1):
        graphs.run(decode(count))
    assert all(place == places[0] for place in places)


def test_what_has_no_graph(graph, captures, decode):
    graphs = graph.DecodeGraphs(Recorder(), 4, 4, CPU)
    two = decode(2)
    prefill = replace(
        two, ids=torch.arange(5), positions=torch.arange(5), slots=torch.arange(5), cu_extend=torch.tensor([0, 4, 5])
    )
    assert graphs.run(prefill) is None, "a request with several tokens"
    assert graphs.run(replace(two, logit_rows=torch.tensor([1]))) is None, "a chunk of one token that samples nothing"
    drafts = replace(decode(4), cu_extend=torch.tensor([0, 2, 4]), seq_lens=torch.tensor([5, 9]), table=two.table)
    assert graphs.run(drafts) is None, "guesses to verify: two requests with two rows each, all of them wanted"
    assert graphs.run(decode(5)) is None, "more requests than any graph has"
    assert captures.count == 0


def test_capture_warms_up_first_and_uses_the_pool(graph, monkeypatch):
    """The calls to torch.cuda, in order, with all of it replaced."""
    log = []

    @contextlib.contextmanager
    def scope(what):
        log.append(f"enter {what}")
        yield
        log.append(f"leave {what}")

    stream = SimpleNamespace(wait_stream=lambda other: log.append("wait"))
    fake = SimpleNamespace(
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda s: scope("stream"),
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: log.append("replay")),
        graph=lambda g, pool, capture_error_mode: scope(f"graph {pool} {capture_error_mode}"),
    )
    monkeypatch.setattr(graph.torch, "cuda", fake)
    graph.capture(lambda: log.append("step"), "pool")()
    warm_up = ["wait", "enter stream", "step", "leave stream", "wait"]
    assert log == [*warm_up, "enter graph pool thread_local", "step", "leave graph pool thread_local", "replay"]


class SparePage:
    """The torch backend over padding rows: they become requests of one token in a page that no one else has."""

    def __init__(self, backend, page: int, size: int) -> None:
        self.backend, self.page, self.size = backend, page, size

    def plan(self, inp):
        padding = inp.seq_lens == 0
        if not padding.any():
            return self.backend.plan(inp)
        assert torch.equal(padding, inp.slots < 0)
        return self.backend.plan(
            replace(
                inp,
                seq_lens=inp.seq_lens + padding,
                slots=torch.where(padding, self.page * self.size, inp.slots),
                table=torch.where(padding[:, None], self.page, inp.table),
            )
        )

    def attend(self, *args):
        return self.backend.attend(*args)


def attach(llm, name: str, graph, max_running: int):
    """Let the decode steps of an engine on a CPU run through graphs."""
    core, runner = importlib.import_module(f"{name}.core"), llm.engine.runner
    size = runner.kv.page_size
    nobody = core.Req(-1, [0], 1, chapter(name).SamplingParams(), 1)
    runner.kv.allocate(nobody, 1)
    runner.backend = SparePage(runner.backend, nobody.pages[0], size)
    width = -(-llm.engine.limits.max_model_len // size)
    runner.graphs = graph.DecodeGraphs(runner.forward_eager, max_running, width, CPU)


OPTIONS = {"dtype": "float32", "native": "off", "attention_backend": "torch", "page_size": 4, "max_running": 6}


def test_the_engine_answers_the_same_through_graphs(name, graph, captures):
    """Requests of different lengths come and go, so that batches of 1 to 6 decode in graphs of 1, 2, 4 and 6."""
    module = chapter(name)
    prompts = [[(7 * i + j) % 900 + 4 for j in range(3 + 5 * i)] for i in range(6)]
    params = [module.SamplingParams(max_tokens=4 + 3 * i, ignore_eos=True) for i in range(6)]
    with module.LLM("dummy:llama-tiny", **OPTIONS) as llm:
        want = [out.token_ids for out in llm.generate(prompts, params, progress=False)]
    with module.LLM("dummy:llama-tiny", **OPTIONS) as llm:
        attach(llm, name, graph, 6)
        got = [out.token_ids for out in llm.generate(prompts, params, progress=False)]
    assert got == want
    assert captures.count == 4
    assert captures.replays >= 15, "most steps are decode steps"


def test_the_gpu_check_compares_each_step_with_an_eager_one(name, graph, captures):
    module = chapter(name)
    with module.LLM("dummy:llama-tiny", **OPTIONS) as llm:
        attach(llm, name, graph, 6)
        steps = compare_graphs(llm, module.SamplingParams, (1, 3))
        assert {step["rows"] for step in steps} == {1, 3}
        assert all(step["ok"] and step["error"] < 1e-5 and step["same_argmax"] == 1 for step in steps)
        graphs, run = llm.engine.runner.graphs, llm.engine.runner.graphs.run
        graphs.run = lambda inp: None if (logits := run(inp)) is None else logits + 1
        assert not any(step["ok"] for step in compare_graphs(llm, module.SamplingParams, (2,)))
