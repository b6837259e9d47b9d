"""The comparison measures every engine alike, keeps what it has, goes on after an interruption, and adds up rightly."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from common import compare, compare_prompt, compare_report
from common.chapter_tree import ChapterError
from common.compare_measure import Settings, http_totals, measure
from common.compare_plan import Entry, chapters, entries, sessions, variant, warmup, workloads
from common.compare_state import State, fingerprint
from common.engines import ChapterEngine
from common.load_result import LoadRequest, LoadResult
from common.trace import Event
from common.worker import drive
from common.workloads import Request, Workload, get

TOML = 'parent = ""\ntitle = "t"\ntitle_zh = "t"\nmechanism = "m"\n'
CONFIG = """
from dataclasses import dataclass, field
@dataclass
class EngineConfig:
    speculative: str = field(default="none", metadata={"choices": ("none", "ngram")})
"""
FAKE = """
import os, time
from dataclasses import dataclass
@dataclass
class SamplingParams:
    max_tokens: int
    ignore_eos: bool = False
@dataclass
class Output:
    prompt_token_ids: list
    token_ids: list
    token_times: list
    finish_reason: str = "length"
    cached_tokens: int = 0
class LLM:
    def __init__(self, model="m", dtype="", threads=1, speculative="none"):
        self.open, self.tokens, self.prompts = [], 0, 0
        with open(os.environ["OPENED"], "a") as file:
            file.write(__name__ + "\\n")
        if __name__ == os.environ.get("BROKEN"):
            raise RuntimeError("this one is broken")
    def add(self, prompt, params):
        self.open.append((Output(prompt, [], []), params.max_tokens, time.perf_counter()))
        self.prompts += len(prompt)
        return len(self.open)
    def has_work(self):
        return bool(self.open)
    def step(self):
        for output, _, added in self.open:
            output.token_ids.append(1)
            output.token_times.append(time.perf_counter() - added)
            self.tokens += 1
        done = [e for e in self.open if len(e[0].token_ids) == e[1]]
        self.open = [e for e in self.open if e not in done]
        return [e[0] for e in done]
    def stats(self):
        return {"forwarded_tokens": self.tokens + self.prompts, "prefix_hit_tokens": self.prompts // 2,
                "draft_tokens": 8, "accepted_tokens": 4, "kv_used": 0}
    def close(self):
        pass
"""


def make(root: Path, name: str, *files: str, toml: str = TOML, source: str = FAKE) -> None:
    (root / name).mkdir()
    (root / name / "__init__.py").write_text(source)
    (root / name / "chapter.toml").write_text(toml)
    for file in files:
        (root / name / file).write_text(CONFIG if file == "config.py" else "")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ch92 has no model, ch93 no cache, ch94 is whole, ch95 speculates and serves."""
    make(tmp_path, "ch92_a")
    make(tmp_path, "ch93_b", "model.py")
    make(tmp_path, "ch94_c", "model.py", "kvcache.py")
    make(tmp_path, "ch95_d", "model.py", "kvcache.py", "serve.py", "config.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OPENED", str(tmp_path / "opened"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    return tmp_path


def opened(tree: Path) -> list[str]:
    file = tree / "opened"
    return file.read_text().split() if file.exists() else []


def test_a_chapter_takes_part_as_soon_as_its_folder_exists(tree):
    found, notes = chapters(tree)
    assert [c.name for c in found] == ["ch93_b", "ch94_c", "ch95_d"]
    assert notes == ["ch92_a is left out: it has no model, so there is nothing to measure"]
    rows = entries(found, {"threads": 1}, http=True)
    assert [row.name for row in rows] == ["ch93", "ch94", "ch95", "ch95-ngram", "ch95-http"]
    assert rows[0].only == ("latency",) and "whole history" in rows[0].note
    assert rows[3].options == {"threads": 1, "speculative": "ngram"} and rows[3].only == ("edit",)
    assert rows[4].kind == "server" and not rows[4].takes(get("multi_turn"))
    assert [c.name for c in chapters(tree, ["94"])[0]] == ["ch94_c"]
    with pytest.raises(ChapterError, match="unknown chapter 'ch96'"):
        chapters(tree, ["ch96"])


def test_a_folder_that_is_not_finished_is_left_out_with_a_line(tree):
    make(tree, "ch96_e", "model.py", toml="not toml")
    found, notes = chapters(tree)
    assert [c.name for c in found][-1] == "ch95_d" and notes[0].startswith("ch96_e is left out: ch96_e/chapter.toml")


def test_a_variant_is_a_chapter_with_options(tree):
    found, _ = chapters(tree)
    row = variant("ch95:speculative=ngram,num-draft-tokens=4,prefix_cache=false", found, {"threads": 1})
    assert row.name == "ch95-ngram-num-draft-tokens=4-prefix_cache=false"
    wanted = {"threads": 1, "speculative": "ngram", "num_draft_tokens": 4, "prefix_cache": False}
    assert row.options == wanted
    for bad in ("ch95", "ch95:", "ch95:tp"):
        with pytest.raises(ValueError, match="a variant is"):
            variant(bad, found, {})


def test_the_order_goes_forth_and_back_and_every_process_runs_one_workload():
    rows = [Entry("a", "a", only=("latency",)), Entry("b", "b"), Entry("c", "c")]
    works = [get("latency"), get("offline")]
    plan = sessions(rows, works, 3, together=False)
    order = [(s.workloads[0].name[:3], s.entry.name, s.round) for s in plan]
    assert "".join(name for w, name, _ in order if w == "lat") == "abc" + "cba" + "abc"
    assert "".join(name for w, name, _ in order if w == "off") == "bc" + "cb" + "bc"
    assert all(len(s.workloads) == 1 for s in plan)
    quick = sessions(rows, works, 1, together=True)
    assert [(s.entry.name, [w.name for w in s.workloads]) for s in quick] == [
        ("a", ["latency"]), ("b", ["latency", "offline"]), ("c", ["latency", "offline"]),
    ]  # fmt: skip


def test_the_warm_up_shares_no_prefix_with_a_workload():
    first = {r.prompt_ids[:4] for r in warmup(49152).requests}
    for name in ("latency", "offline", "shared_prefix", "online"):
        assert not first & {r.prompt_ids[:4] for r in get(name).requests}


def state_of(tmp_path: Path, rows: list[Entry], works: list[Workload], rounds: int) -> State:
    return State.open(tmp_path / "x.partial", fingerprint(rows, works, rounds, False, "c"))


def test_an_interrupted_comparison_goes_on_where_it_was(tree, tmp_path):
    rows = [Entry(name[:4], name) for name in ("ch93_b", "ch94_c", "ch95_d")]
    works = [Workload("w", (Request((1, 2), 3),), "")]
    plan, settings = (
        sessions(rows, works, 2, False),
        Settings("m", "float32", 1, Workload("u", (Request((9,), 1),), "")),
    )
    state = state_of(tmp_path, rows, works, 2)
    state.machine = {"bandwidth_gb_s": 1.0}
    measure(state, plan[:2], settings, {})  # the process ends here
    again = state_of(tmp_path, rows, works, 2)
    assert sorted(again.runs) == ["w/ch93/0", "w/ch94/0"]
    measure(again, plan, settings, {})
    assert opened(tree) == ["ch93_b", "ch94_c", "ch95_d", "ch95_d", "ch94_c", "ch93_b"]
    assert sorted(again.series("w", "ch94")) == [0, 1] and again.runs["w/ch94/0"] == state.runs["w/ch94/0"]
    with pytest.raises(ValueError, match="another rounds, workloads; --restart"):
        state_of(tmp_path, rows, [Workload("w", (Request((1, 2), 4),), "")], 3)
    (tmp_path / "x.partial").write_text("{")
    with pytest.raises(ValueError, match="cannot be read; --restart"):
        state_of(tmp_path, rows, works, 2)
    assert not State.open(tmp_path / "x.partial", {}, restart=True).runs


def test_an_engine_that_fails_does_not_take_the_others_with_it(tree, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BROKEN", "ch94_c")
    rows = [Entry(name[:4], name) for name in ("ch94_c", "ch95_d")]
    works = [Workload("w", (Request((1, 2), 3),), "")]
    state = state_of(tmp_path, rows, works, 2)
    state.machine = {"bandwidth_gb_s": 1.0}
    measure(state, sessions(rows, works, 2, False), Settings("m", "float32", 1, works[0]), {})
    assert "this one is broken" in state.failed["ch94"] and sorted(state.runs) == ["w/ch95/0", "w/ch95/1"]
    assert opened(tree).count("ch94_c") == 1


def run(total: float, tpot: float | None, **counters: int) -> dict:
    return {
        "output_tok_s": 100 / total, "total_s": total, "ttft_s": 0.5, "tpot_s": tpot, "itl_p99_s": None,
        "prompt_tokens": 50, "peak_rss_bytes": 2**30, "kv_utilisation": None, "counters": counters,
    }  # fmt: skip


def test_medians_shares_and_ratios_are_taken_as_said():
    rows = [Entry("ch94", "ch94_c"), Entry("ch95", "ch95_d"), Entry("hf", "hf")]
    work = Workload("w", (Request((1,), 2),), "")
    state = State(Path("x"), {"rounds": 3})
    for i, (a, b) in enumerate([(2.0, 1.0), (4.0, 1.0), (2.0, 1.0)]):
        state.runs[state.key("w", "hf", i)] = run(a, 0.2)
        state.runs[state.key("w", "ch95", i)] = run(b, 0.1, prefix_hit_tokens=10, draft_tokens=8, accepted_tokens=6)
    found = compare_report.summary(state, rows, [work])
    assert "ch94" not in found["w"]
    ours = found["w"]["ch95"]
    assert ours["hit_rate"]["median"] == 0.2 and ours["acceptance"]["median"] == 0.75
    assert "itl_p99_s" not in ours and "hit_rate" not in found["w"]["hf"]
    assert found["w"]["hf"]["total_s"] == {"median": 2.0, "min": 2.0, "max": 4.0, "iqr": 1.0, "n": 3}
    kept = compare_report.ratios(state, rows, [work])["w"]
    assert list(kept) == ["ch95_vs_hf"]  # nothing is known of ch94
    assert kept["ch95_vs_hf"]["total_s"]["median"] == 0.5 and kept["ch95_vs_hf"]["total_s"]["min"] == 0.25
    assert kept["ch95_vs_hf"]["tpot_s"]["median"] == 0.5


def test_a_server_is_set_against_our_server_and_our_server_against_the_engine():
    rows = [
        Entry("ch95", "ch95_d"), Entry("ch95-http", "ch95_d", "server"), Entry("ch95-ngram", "ch95_d"),
        Entry("vllm-http", "vllm", "url"), Entry("vllm", "vllm"),
    ]  # fmt: skip
    of = {row.name: [found.name for found in compare_report.references(rows, row)] for row in rows}
    assert of == {
        "ch95": [], "ch95-http": ["ch95"], "ch95-ngram": ["ch95"], "vllm-http": ["ch95", "ch95-http"], "vllm": ["ch95"]
    }  # fmt: skip


def test_a_load_run_with_holes_is_no_measurement():
    good = LoadRequest(0, 4, 0.0, 0.0, 200, None, 0.1, 0.02, 0.2, [0.02] * 3, 4, 5, 4, 1, "length", "abcd")
    totals = http_totals(LoadResult("w", "HTTP", 0.2, [good]), "x")
    assert totals["ttft_s"] == 0.1 and totals["output_tok_s"] == 20 and totals["itl_p99_s"] == 0.02
    assert totals["counters"] == {"prefix_hit_tokens": 1}
    for bad in ({"error": "HTTP 500"}, {"completion_tokens": 3}):
        broken = LoadRequest(**{**{k: getattr(good, k) for k in good.__dataclass_fields__}, **bad})
        with pytest.raises(RuntimeError, match="x: a run with holes"):
            http_totals(LoadResult("w", "HTTP", 0.2, [broken]), "x")


def test_the_command_writes_one_result_and_one_figure(tree, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    (tmp_path / "secret").mkdir()
    program = tmp_path / "secret" / "server"
    program.symlink_to("/bin/false")
    peer = ["--peer-url", "http://127.0.0.1:9", "--peer-name", "gone", "--peer-command", f"{program} {program}"]
    base = ["--model", "dummy:llama-tiny", "--threads", "1", "--length-scale", "0.05", "--no-logits"]
    peer += [f"--peer-command={program} {program}", "--peer-url=http://127.0.0.1:10"]
    flags = [*base, "--workload", "latency", "--workload", "offline", "--scale", "0.05", "--rounds", "2", *peer]
    monkeypatch.setattr(sys, "argv", ["compare", *flags, "--json", str(out / "c.json"), "--figures", str(out)])
    monkeypatch.setattr("common.compare_measure.measure_bandwidth", lambda threads: 50e9)
    monkeypatch.setattr("common.compare_measure.measure_gemm", lambda dtype, threads: 500e9)
    assert compare.main() == 1  # the peers are not there
    data = json.loads((out / "c.json").read_text())
    assert set(data["summary"]["latency"]) == {"ch93", "ch94", "ch95"} and set(data["summary"]["offline"]) == {
        "ch94",
        "ch95",
    }
    assert len(data["runs"]) == 10 and data["runs"][0]["counters"]["forwarded_tokens"] > 0
    assert data["workloads"]["latency"]["floors"]["tpot_s"] > 0 and "gone-http" in data["failed"]
    assert data["tables"]["overview"]["rows"][0][0] == "ch93" and data["tables"]["latency"]["rows"][-1][0] == "floor"
    assert [row[0] for row in data["tables"]["overview"]["rows"]] == ["ch93", "ch94", "ch95"]  # of the others nothing
    assert "logit error (rms)" not in data["tables"]["overview"]["columns"]
    assert "--peer-command server" in data["command"] and "--peer-command=server" in data["command"]
    assert "secret" not in (out / "c.json").read_text() and (out / "compare.png").stat().st_size > 1000
    assert (out / "c.json.partial").exists()  # the peer may come back
    assert "figure:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "x", "ch94"], "--prompt takes two different chapters"),
        (["--prompt", "x", "ch92", "ch94"], "ch92_a is left out: it has no model"),
        (["--prompt", "x", "--max-tokens", "0", "ch94", "ch95"], "max-tokens must be at least 1"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--peer", "vllm"], "--peer vllm needs --peer-python"),
        (["--peer-python", "python3"], "belongs to no --peer"),
        (["--peer", "vllm", "--peer-python", "/no/such/python"], "no program /no/such/python"),
        (["--peer-name", "x"], "belong to a --peer-url each"),
        (["--peer-url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--peer-url", "http://10.0.0.1:8000"], "only servers on this machine"),
        (["--peer-url", "http://127.0.0.1:9", "--peer-command", ""], "no server answers at http://127.0.0.1:9"),
        (["--variant", "ch95"], "a variant is"),
        (["ch99"], "unknown chapter 'ch99'"),
    ],
)
def test_what_makes_no_sense_is_one_line(tree, monkeypatch, flags, message):
    monkeypatch.setattr(sys, "argv", ["compare", "--model", "dummy:llama-tiny", *flags])
    with pytest.raises(ValueError, match=message):
        compare.main()


def test_workloads_without_a_chat_template_lose_the_texts_unless_asked_for(tmp_path):
    names = [w.name for w in workloads([], "dummy:llama-tiny", 512, quick=True)]
    assert names[:3] == ["latency", "offline", "shared_prefix"]
    assert workloads(["offline"], "dummy:llama-tiny", 512, quick=True)[0].size == 8


def event(step: int, component: str, action: str) -> Event:
    return Event(0.0, step, component, action, 0)


def test_equal_hops_stand_on_one_line():
    left = [event(1, "Scheduler", "schedule"), event(1, "Sampler", "sample"), event(2, "Scheduler", "schedule")]
    right = [event(1, "PrefixCache", "match"), *left[:2], event(1, "KVCache", "evict"), left[2]]
    pairs = [(bool(a), bool(b)) for a, b in compare_prompt.align(left, right)]
    assert pairs == [(False, True), (True, True), (True, True), (False, True), (True, True)]


def test_two_real_chapters_on_one_prompt(monkeypatch, capsys):
    flags = ["03", "04", "--prompt", "a b", "--max-tokens", "3", "--dtype", "float32", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["compare", "--model", "dummy:llama-tiny", *flags])
    assert compare.main() == 0
    out = capsys.readouterr().out
    assert "≠" not in out and out.count(" = ") >= 3
    assert "forwarded_tokens" in out and "KVCache allocate" in out


@pytest.mark.parametrize(
    ("name", "low", "high"), [("ch03_generation", None, None), ("ch04_kvcache", 0.0, 0.2), ("ch08_radix", 0.6, 1.0)]
)
def test_kv_utilisation_is_the_filled_share_of_what_running_requests_hold(name, low, high):
    """A slot of the full length holds mostly nothing; the last page of a request is half empty on average."""
    engine = ChapterEngine(name, {"model": "dummy:llama-tiny", "dtype": "float32", "threads": 1, "max_model_len": 512})
    found = drive(engine, get("latency", 512, length_scale=0.3), peaks=True).kv_utilisation
    engine.close()
    assert found is None if low is None else low < found <= high
