"""Peers run behind the same loop as the chapters: stand-ins for their packages show what the adapters do with them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
import pytest
import torch

from common import logits, peers
from common.checkpoints import resolve
from common.compare_measure import Settings, peer
from common.engines import ChapterEngine, open_hf
from common.gguf_export import export, exported
from common.harness import Worker, WorkerError
from common.workloads import Request, Workload

WORK = Workload("w", tuple(Request(tuple(range(10, 10 + n)), n) for n in (3, 1, 5)), "")
VLLM = """
import os
from types import SimpleNamespace as S
__version__ = "9"
print("a banner that must not reach the answers")
SamplingParams = lambda **k: S(**k)
class Engine:
    def __init__(self): self.open = []
    def add_request(self, key, prompt, params):
        assert params.temperature == 0 and params.ignore_eos and params.output_kind == "delta"
        self.open.append([key, prompt["prompt_token_ids"], params.max_tokens, 0])
    def step(self):
        outputs = []
        for entry in self.open:
            key, prompt, wanted, made = entry
            fresh = [len(prompt)] * min(2, wanted - made)
            entry[3] += len(fresh)
            outputs.append(S(request_id=key, outputs=[S(token_ids=fresh)], finished=entry[3] == wanted, num_cached_tokens=1))
        self.open = [e for e in self.open if e[3] < e[2]]
        return outputs
class LLM:
    def __init__(self, model, dtype, **options):
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1" and options["max_num_seqs"] == 64
        if dtype == "float16": raise ValueError("no float16 here")
        self.llm_engine = Engine()
"""
OPENVINO = """
from types import SimpleNamespace as S
class Tensor:
    def __init__(self, array): self.ids = array[0].tolist()
"""
GENAI = """
from types import SimpleNamespace as S
SchedulerConfig = GenerationConfig = S
GenerationStatus = S(RUNNING=0, FINISHED=1)
class Handle:
    def __init__(self, ids, config): self.ids, self.left, self.ready = ids, config.max_new_tokens, []
    def can_read(self): return bool(self.ready)
    def read(self): return {0: S(generated_ids=[self.ready.pop(0)])}
    def get_status(self): return 0 if self.left else 1
class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device, options):
        assert options["INFERENCE_NUM_THREADS"] == 2 and scheduler.max_num_seqs == 64
        self.hint, self.open = options.get("INFERENCE_PRECISION_HINT"), []
    def add_request(self, rid, tensor, config):
        assert config.ignore_eos and not config.do_sample
        self.open.append(Handle(tensor.ids, config))
        return self.open[-1]
    def step(self):
        for handle in self.open:
            if handle.left:
                handle.left -= 1
                handle.ready.append(len(handle.ids) + (1000 if self.hint == "f32" else 0))
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(VLLM)
    kinds = "class RequestOutputKind:\n    DELTA = 'delta'\n"
    (tmp_path / "vllm" / "sampling_params.py").write_text(kinds)
    (tmp_path / "openvino.py").write_text(OPENVINO)
    (tmp_path / "openvino_genai.py").write_text(GENAI)
    for name in ("openvino", "openvino-genai", "vllm-cpu"):
        info = tmp_path / f"{name.replace('-', '_')}-9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.parametrize("name", ["vllm", "openvino"])
def test_a_peer_gets_the_same_requests_and_its_tokens_their_times(stand_ins, name):
    with Worker(name, python=sys.executable, timeout_s=60, model="m") as worker:
        result = worker.run(WORK)
        versions = worker.ask({"cmd": "versions"})["versions"]
    assert [r.token_ids for r in result.requests] == [[3] * 3, [1], [5] * 5]
    assert all(len(r.itl_s) == len(r.token_ids) - 1 and r.ttft_s > 0 for r in result.requests)
    assert (result.engine, result.prompt_tokens, result.output_tokens) == (name, 9, 9)
    assert "9" in versions.values()


def test_float32_is_asked_for(stand_ins):
    with Worker("openvino", python=sys.executable, timeout_s=60, model="m", dtype="float32") as worker:
        assert worker.run(WORK).requests[1].token_ids == [1001]
    with pytest.raises(WorkerError, match="no float16 here"), Worker("vllm", timeout_s=60, model="m", dtype="float16"):
        pass


def test_a_row_for_a_peer_tells_nothing_of_this_machine(tmp_path):
    settings = Settings("smollm2-135m", "bfloat16", 2, WORK)
    row = peer("vllm", settings, tmp_path, "/some/where/python")
    assert row.python == "/some/where/python" and row.options["model"] == str(tmp_path)
    assert str(tmp_path) not in str(row.record()) and "/some/where" not in str(row.record())
    assert peer("hf", settings, tmp_path).options == {
        "model": "smollm2-135m", "batch": 16, "dtype": "bfloat16", "threads": 2
    }  # fmt: skip
    with pytest.raises(ValueError, match="needs --peer-python"):
        peer("openvino", settings, tmp_path)


def test_nothing_of_a_peer_is_imported_before_it_is_opened():
    assert set(peers.OPENERS) == {"vllm", "openvino"}
    assert not {"vllm", "openvino", "openvino_genai"} & sys.modules.keys()


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
def test_the_gguf_file_holds_the_checkpoint(tmp_path, kind):
    """Read back by transformers' own GGUF loader, which undoes the order of the rotary rows: the same logits."""
    from transformers import AutoModelForCausalLM

    from common.tiny import tiny_model

    folder = tiny_model("llama", tmp_path / "tiny")
    export(str(folder), tmp_path / "m.gguf", kind)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    state, other = ours.state_dict(), theirs.state_dict()
    assert state.keys() == other.keys()
    limit = {"f32": 0.0, "bf16": 2**-8, "f16": 2**-11}[kind]
    for name, weight in state.items():
        torch.testing.assert_close(other[name], weight, rtol=limit, atol=1e-6 if limit else 0.0)


def test_the_gguf_file_is_written_once(tmp_path, monkeypatch):
    from common.tiny import tiny_model

    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    folder = tiny_model("llama", tmp_path / "tiny")
    first = exported(folder)
    stamp = first.stat().st_mtime_ns
    assert exported(folder).stat().st_mtime_ns == stamp
    assert peers.model_for("openvino", folder) == str(first) and peers.model_for("vllm", folder) == str(folder)


# ---- logits


def test_logits_of_a_chapter_are_those_of_transformers(tmp_path):
    name = "dummy:llama-tiny"
    wanted = logits.sequences(resolve(name).vocab_size, 0.5)
    chapter = ChapterEngine("ch08_radix", {"model": name, "dtype": "float32", "threads": 1})
    oracle = open_hf(name, dtype="float32", threads=1)
    for engine, file in ((chapter, "a.npy"), (oracle, "b.npy")):
        rows = logits.write(engine, wanted, str(tmp_path / file))
        assert rows == sum(len(ids) - start for ids, start in wanted)
    a, b = numpy.load(tmp_path / "a.npy"), numpy.load(tmp_path / "b.npy")
    assert logits.error(a, b)["rms"] < 1e-5
    wrong = [([*ids[:start], *[(i + 1) % 500 for i in ids[start:]]], start) for ids, start in wanted]
    logits.write(chapter, wrong, str(tmp_path / "c.npy"))
    assert logits.error(numpy.load(tmp_path / "c.npy"), b)["rms"] > 1e-2
    chapter.close()


def test_the_error_is_relative_to_the_reference():
    reference = numpy.full((2, 2), 2.0, dtype="float32")
    found = reference + numpy.array([[0.2, 0], [0, 0]], dtype="float32")
    assert logits.error(found, reference) == pytest.approx({"max": 0.2, "rms": 0.05})
    with pytest.raises(ValueError, match="of shape"):
        logits.error(found[:1], reference)
