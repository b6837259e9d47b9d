"""The commands as a reader types them: answers on stdout, everything else on stderr, a mistake is one line and status 2.

Most runs stay in this process, as `python -m` would run them; a few are processes, to see that nothing else differs.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ch02_request_flow.scripted import ANSWER
from tests.conftest import CHAPTERS, ROOT, briefly
from tests.copies import copies
from tests.serving import FRONTS

TINY = ("--model", "dummy:llama-tiny", "--dtype", "float32", "--threads", "1", "--device", "cpu", "--debug-invariants")
OUTPUT_KEYS = [
    *("prompt_token_ids", "token_ids", "text", "finish_reason", "cached_tokens", "draft_tokens", "accepted_tokens"),
    *("logprobs", "timings", "error"),
]
TIMINGS = {"queue_s", "ttft_s", "tpot_s", "e2e_s"}
BOOK_PROMPT = "请解释什么是 KV Cache？"


@dataclass
class Done:
    status: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """command(module, *arguments) runs a module as __main__ and returns its status and what it wrote."""

    def run(module: str, *arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        monkeypatch.delitem(sys.modules, module, raising=False)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
        return Done(ended.value.code, *capfd.readouterr())

    return run


@pytest.fixture(params=CHAPTERS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def process(module: str, *arguments: str | bytes, **options: Any) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT, capture_output=True, encoding="utf-8", timeout=120, check=False, **options,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


def assert_refused(done: Done, said: str, out: str = "") -> None:
    assert done.status == 2
    assert done.out == out
    assert done.err.startswith("error: "), done.err
    assert done.err.count("\n") == 1, "one line"
    assert done.err.endswith("\n")
    assert said in done.err


# ---- generate -------------------------------------------------------------------------------------------------------


def test_json_is_one_object_per_request_and_line(command: Any, name: str) -> None:
    prompts = ["hello", "请解释\n😀"]
    flags = ("--max-tokens", "3", "--ignore-eos", "--json", *TINY)
    done = command(f"{name}.generate", *(x for p in prompts for x in ("--prompt", p)), *flags)
    assert done.status == 0
    assert done.out.endswith("}\n")
    outputs = [json.loads(line) for line in done.out.splitlines()]
    assert len(outputs) == 2
    for output in outputs:
        assert list(output) == OUTPUT_KEYS
        assert set(output["timings"]) == TIMINGS
        assert len(output["token_ids"]) == 3
        assert (output["finish_reason"], output["error"], output["logprobs"]) == ("length", None, None)
    assert "Traceback" not in done.err
    assert "error" not in done.err
    assert len(done.err.splitlines()) == 2, "one summary for each request"


def test_text_is_the_answer_and_nothing_else(command: Any) -> None:
    done = command("ch02_request_flow.generate", "--prompt", "hello", *TINY)
    assert (done.status, done.out) == (0, ANSWER + "\n")
    done = command("ch02_request_flow.generate", "--prompt", "hello", "--stop", "takes", "--stop", "path", *TINY)
    assert (done.status, done.out) == (0, "Every request \n")


def test_logprobs_are_shown_beside_the_text(command: Any) -> None:
    flags = ("--prompt", "hello", "--max-tokens", "3", "--ignore-eos", "--logprobs", "2", *TINY)
    done = command("ch03_generation.generate", *flags)
    detail = json.loads(command("ch03_generation.generate", *flags, "--json").out)["logprobs"][0]
    *lines, summary = done.err.splitlines()
    assert len(lines) == 3 and "3 output tokens" in summary
    assert f"{detail['logprob']:.3f}" in lines[0]
    assert all(f" {p:.3f}" in lines[0] for p in detail["top"].values()) and len(detail["top"]) == 2


def test_chat_puts_the_prompt_into_the_template(command: Any, name: str) -> None:
    done = command(f"{name}.generate", "--chat", "--prompt", "hello", "--max-tokens", "1", "--json", *TINY)
    plain = command(f"{name}.generate", "--prompt", "hello", "--max-tokens", "1", "--json", *TINY)
    chat_ids, ids = (json.loads(d.out)["prompt_token_ids"] for d in (done, plain))
    assert len(chat_ids) > len(ids)
    assert 1 in chat_ids, "the template's <|im_start|> is one token"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt"], "--prompt"),
        ([], "--prompt"),
        (["--prompt", "x", "--max-token", "3"], "--max-token"),
        (["--prompt", "x", "--no-such-flag"], "--no-such-flag"),
        (["--prompt", "x", "stray"], "stray"),
        (["--prompt", "x", "--max-tokens", "three"], "three"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens must be"),
        (["--prompt", "x", "--max-tokens", "-1"], "max_tokens must be"),
        (["--prompt", "x", "--temperature", "nan"], "temperature must be"),
        (["--prompt", "x", "--top-p", "0"], "top_p must be"),
        (["--prompt", "x", "--stop", ""], "stop must be"),
        (["--prompt", "x", "--logprobs", "21"], "logprobs must be"),
        (["--prompt", "x", "--dtype", "int4"], "int4"),
        (["--prompt", "x", "--threads", "-1"], "threads must be"),
        (["--prompt", "x", "--max-model-len", "1"], "max_model_len must be"),
        (["--prompt", "x", "--max-model-len", "100000"], "max_model_len 100000 exceeds"),
        (["--prompt", "x", "--model", "dummy:none"], "dummy:none"),
        (["--prompt", "x", "--model", "/no/such/folder"], "/no/such/folder"),
        (["--prompt", ""], "empty"),
        (["--prompt", "a " * 600], "max_model_len is 512"),
        (["--prompt", "hello", "--max-tokens", "510"], "max_tokens (510) = 513 exceeds max_model_len 512"),
        (["--prompt", "a\udcff"], "not valid Unicode"),
        (["--prompt", "a\udcff", "--chat"], "not valid Unicode"),
    ],
    ids=lambda value: " ".join(value)[:40].encode("ascii", "replace").decode() if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_status_2(command: Any, arguments: list[str], said: str) -> None:
    assert_refused(command(f"{CHAPTERS[-1]}.generate", *TINY, *arguments), said)


def test_every_chapter_refuses_alike(command: Any, name: str) -> None:
    for arguments, said in (
        (["--prompt", "x", "--top-k", "-2"], "top_k must be"),
        (["--prompt", ""], "the prompt is empty"),
    ):
        assert_refused(command(f"{name}.generate", *TINY, *arguments), said)


def test_the_skeleton_refuses_sampling_by_name(command: Any) -> None:
    done = command("ch02_request_flow.generate", "--prompt", "x", "--temperature", "0.5", *TINY)
    assert_refused(done, "temperature is not supported")


def test_a_refused_prompt_does_not_take_the_others_with_it(command: Any) -> None:
    arguments = ("--prompt", "hello", "--prompt", "", *TINY)
    done = command("ch02_request_flow.generate", *arguments)
    assert (done.status, done.out) == (2, ANSWER + "\n")
    assert [line.startswith("error: ") for line in done.err.splitlines()] == [False, True]
    done = command("ch02_request_flow.generate", *arguments, "--json")
    good, bad = map(json.loads, done.out.splitlines())
    assert done.status == 2
    assert list(good) == list(bad) == OUTPUT_KEYS
    assert (bad["finish_reason"], bad["token_ids"], bad["text"]) == ("error", [], "")
    assert "empty" in bad["error"]
    assert set(bad["timings"]) == TIMINGS


# ---- trace ----------------------------------------------------------------------------------------------------------


def test_trace_json_is_one_object_and_the_pictures_are_files(command: Any, name: str, tmp_path: Path) -> None:
    done = command(f"{name}.trace", "--json", "--out", str(tmp_path / "deep" / "out"), *TINY)
    assert done.status == 0, done.err
    assert done.out.count("\n") == 1
    found = json.loads(done.out)
    assert BOOK_PROMPT in found["title"], "the standard prompt"
    assert found["summary"]["tokens"] == 8
    components = [hop["name"] for hop in found["path"]]
    assert components[:3] == ["LLM", "Tokenizer", "Scheduler"]
    assert components[-1] == "Detokenizer"
    for hop in found["path"]:
        assert (ROOT / name / hop["file"]).is_file(), "each hop names the file of this chapter"
    assert sum(event["action"] == "process" for event in found["events"]) == 8
    assert sorted(p.name for p in (tmp_path / "deep" / "out").iterdir()) == ["sequence.png", "trace.json"]
    assert json.loads((tmp_path / "deep" / "out" / "trace.json").read_text("utf-8"))["traceEvents"]
    assert (tmp_path / "deep" / "out" / "sequence.png").read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in done.err


@pytest.mark.parametrize("name", briefly(FRONTS, *copies("trace.py", "serve.py", "server.py")))
def test_trace_over_http_shows_both_sides_in_the_order_of_time(name: str, tmp_path: Path) -> None:
    """From ch09 on the events cross from one process to another."""
    done = process(f"{name}.trace", "--http", "--json", "--out", str(tmp_path), "--max-tokens", "4", *TINY)
    assert done.status == 0, done.err
    found = json.loads(done.out)
    events = found["events"]
    assert [e["t"] for e in events] == sorted(e["t"] for e in events)
    seen = [f"{e['component']}.{e['action']}" for e in events]
    order = ["Tokenizer.encode", "Frontend.submit", "Scheduler.add", "Scheduler.schedule", "ModelRunner.forward"]
    order += ["Sampler.sample", "Scheduler.process", "Detokenizer.push", "Server.response"]
    assert [seen.index(what) for what in order] == sorted(seen.index(what) for what in order), seen
    assert seen.count("Sampler.sample") == found["summary"]["tokens"] == 4
    assert seen[-1] == "Server.response"


def test_trace_prints_the_life_of_the_request_as_a_table(command: Any, tmp_path: Path) -> None:
    done = command("ch02_request_flow.trace", "--prompt", "hello", "--max-tokens", "2", "--out", str(tmp_path), *TINY)
    assert done.status == 0
    for word in ("WAITING", "PREFILL", "DECODE", "FINISHED", "scheduler.py", "detokenize.py", "0/3", "0/4", "Every"):
        assert word in done.out
    assert "2 steps · 2 tokens · 7 forwarded tokens" in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", ""], "empty"),
        (["--prompt", "a " * 600], "max_model_len is 512"),
        (["--max-tokens", "0"], "max_tokens must be"),
        (["--max-tokens", "600"], "exceeds max_model_len 512"),
        (["--temperature", "1"], "--temperature"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_a_mistake_in_trace_is_one_line_and_status_2(
    command: Any, arguments: list[str], said: str, tmp_path: Path
) -> None:
    assert_refused(command(f"{CHAPTERS[-1]}.trace", "--out", str(tmp_path / "out"), *TINY, *arguments), said)
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_one_line_too(command: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command("ch02_request_flow.trace", "--max-tokens", "1", "--out", str(tmp_path / "file"), *TINY)
    assert_refused(done, str(tmp_path / "file"))


# ---- as processes ---------------------------------------------------------------------------------------------------


def test_a_process_writes_nothing_but_the_answer_to_stdout() -> None:
    done = process("ch02_request_flow.generate", "--prompt", "hello", *TINY)
    assert (done.status, done.out) == (0, ANSWER + "\n")
    assert len(done.err.splitlines()) == 1, "a summary, no progress bar where nobody looks, no warnings"


def test_a_process_with_a_mistake_ends_with_one_line(tmp_path: Path) -> None:
    bad = os.fsencode("a") + b"\xff"
    assert_refused(process(f"{CHAPTERS[-1]}.generate", "--prompt", bad, *TINY), "not valid Unicode")


def test_a_process_needs_no_utf8_locale() -> None:
    """json with Chinese text on a terminal that can only ASCII."""
    env = os.environ | {"LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": ""}
    done = process(f"{CHAPTERS[-1]}.generate", "--prompt", "请解释", "--max-tokens", "2", "--json", *TINY, env=env)
    assert done.status == 0, done.err
    assert list(json.loads(done.out)) == OUTPUT_KEYS
