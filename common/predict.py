"""Counters behind the "predict before you run" boxes of the chapters' READMEs: `python -m common.predict [ch06 …]`.

No clock is in them, so they are the same on every machine; `--json docs/results/predict.json` stores those of all
chapters for the READMEs, and tests/test_predict.py asserts that the stored ones are those of the code.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from common import cli
from common.chapter_tree import find, load_all
from common.commands import PROMPT

ROOT = Path(__file__).resolve().parent.parent
TINY = {"model": "dummy:llama-tiny", "dtype": "float32", "threads": 1}
OFFLINE_PAGES, SLOT = 8, 2048  # memory of eight slots, in slots and in tokens of one


# ---- a scheduler without a model ------------------------------------------------------------------------------------


@dataclass
class DryRun:
    """A chapter's Scheduler and KVCache, step by step; the model says token 1 to everything."""

    chapter: str
    max_running: int = 64
    budget: int = 96  # tokens of one step
    pages: int = 64
    page_size: int = SLOT
    static: bool = False
    speculator: Any = None
    steps: int = 0
    forwarded: int = 0  # tokens computed, over all steps
    most_running: int = 0
    first_step: dict[int, int] = field(default_factory=dict)  # rid -> the step that gave its first token

    def __post_init__(self) -> None:
        import torch

        self.core, kvcache, scheduler = (
            importlib.import_module(f"{self.chapter}.{name}") for name in ("core", "kvcache", "scheduler")
        )
        kv = kvcache.KVCache(1, self.pages, self.page_size, 1, 1, torch.empty(0))
        more = {"speculator": self.speculator} if self.speculator else {}
        self.scheduler = scheduler.Scheduler(kv, [], self.max_running, self.budget, static=self.static, **more)

    def add(self, rid: int, prompt: Sequence[int], max_tokens: int) -> None:
        params = self.core.SamplingParams(ignore_eos=True)
        self.scheduler.add(self.core.Req(rid, list(prompt), len(prompt), params, max_tokens))

    def step(self) -> bool:
        """One step; False if there was nothing to do."""
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        self.steps += 1
        self.forwarded += batch.tokens
        self.most_running = max(self.most_running, len(self.scheduler.running))
        tokens = [_verified(item) if item.samples else [] for item in batch.items]
        for item, new in zip(batch.items, tokens, strict=True):
            if new:
                self.first_step.setdefault(item.req.rid, self.steps)
        self.scheduler.process(batch, tokens, [[] for _ in tokens])
        return True

    def run(self) -> DryRun:
        while self.step():
            pass
        return self


def _verified(item: Any) -> list[int]:
    """Token 1, and one more for each guess of it before the first other one."""
    draft = getattr(item, "draft", [])
    return [1] * (1 + next((at for at, guess in enumerate(draft) if guess != 1), len(draft)))


def run_together(dry: DryRun, requests: Sequence[tuple[Sequence[int], int]]) -> DryRun:
    """All requests, (prompt, output tokens) each, there from the beginning."""
    for rid, (prompt, max_tokens) in enumerate(requests):
        dry.add(rid, prompt, max_tokens)
    return dry.run()


# ---- the chapters ---------------------------------------------------------------------------------------------------


def _answer(chapter: str, prompts: Sequence[Any], params: dict[str, Any], **options: Any) -> tuple[list[Any], Any]:
    """Outputs of one generate() in a fresh engine, and its counters."""
    module: ModuleType = importlib.import_module(chapter)
    with module.LLM(**options) as llm:
        outputs = llm.generate(list(prompts), module.SamplingParams(**params), progress=False)
        return outputs, llm.stats()


def request_flow(chapter: str) -> dict[str, Any]:
    """How the work grows with the output, and what the scripted model makes of the beginning of its own answer."""
    found: dict[str, Any] = {}
    for count in (8, 16):
        _, stats = _answer(chapter, [PROMPT], {"max_tokens": count, "ignore_eos": True})
        found[f"forwarded_tokens_{count}"] = stats["forwarded_tokens"]
    (whole, rest), _ = _answer(chapter, ["Hello", "Every request takes this path:"], {})
    return found | {"answer": whole.text.strip(), "continued": rest.text.strip()}


def generation(chapter: str) -> dict[str, Any]:
    """The same prompt twice at temperature 1 without a seed, and the same call again in a fresh engine."""
    params = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    runs = [[out.token_ids for out in _answer(chapter, ["Hi", "Hi"], params, **TINY)[0]] for _ in range(2)]
    return {
        "tokens": len(runs[0][0]),
        "differ_within_a_run": sum(a != b for a, b in zip(*runs[0], strict=True)),
        "differ_between_runs": sum(
            a != b for one, two in zip(*runs, strict=True) for a, b in zip(one, two, strict=True)
        ),
    }


def kvcache(chapter: str) -> dict[str, Any]:
    """What the cache saves of a request for one token, and of one for two."""
    found = {}
    for name in ("ch03_generation", chapter):
        for count in (1, 2):
            _, stats = _answer(name, [range(20, 36)], {"max_tokens": count, "ignore_eos": True}, **TINY)
            found[f"{name[:4]}_{count}"] = stats["forwarded_tokens"]
    return found


def serving(chapter: str) -> dict[str, Any]:
    """Four choices of one prompt over HTTP: the tokens that the client is billed, and those that were computed."""
    import httpx

    from common.service import Server

    with Server(chapter, *(f"--{name}={value}" for name, value in TINY.items())) as server:
        body = {"prompt": [1, 2, 3, 4, 5, 6, 7, 8], "n": 4, "max_tokens": 1, "temperature": 0}
        usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False).json()["usage"]
        lines = httpx.get(f"{server.url}/metrics", timeout=60, trust_env=False).text.splitlines()
    computed = next(line.split()[1] for line in lines if line.startswith("minisgl_prefill_tokens_total "))
    return {"prompt_tokens": usage["prompt_tokens"], "prefill_tokens": int(float(computed))}


def batching(chapter: str) -> dict[str, Any]:
    """A prompt of 2,000 tokens that joins sixteen decoding requests."""
    dry = DryRun(chapter)
    for rid in range(16):
        dry.add(rid, [rid], 200)
    dry.step()
    dry.add(16, [0] * 2000, 1)
    dry.run()
    return {"budget": dry.budget, "decoding": 16, "steps_to_first_token": dry.first_step[16] - 1}


def paged(chapter: str) -> dict[str, Any]:
    """Two requests in six pages and in plenty; and how many requests of `offline` run at once where all would fit."""
    from common.workloads import get

    two = [([1] * 8, 12), ([2] * 8, 10)]
    scarce = run_together(DryRun(chapter, pages=6, page_size=4), two)
    plenty = run_together(DryRun(chapter, pages=64, page_size=4), two)
    requests = get("offline").requests
    pool = OFFLINE_PAGES * SLOT
    many = run_together(
        DryRun(chapter, pages=pool // 16, page_size=16), [(r.prompt_ids, r.max_tokens) for r in requests]
    )
    return {
        "six_pages": scarce.forwarded,
        "plenty": plenty.forwarded,
        "steps_six_pages": scarce.steps,
        "steps_plenty": plenty.steps,
        "pool": pool,
        "offline_tokens": sum(len(r.prompt_ids) + r.max_tokens for r in requests),
        "offline_at_once": many.most_running,
        "offline_preemptions": many.scheduler.preemptions,
    }


def radix(chapter: str) -> dict[str, Any]:
    """What the second of two equal prompts finds, by its length; and of one that differs in its first token."""

    def second(first: Sequence[int], again: Sequence[int]) -> int:
        dry = DryRun(chapter, page_size=16)
        for rid, prompt in enumerate((first, again)):
            dry.add(rid, prompt, 8)
            dry.run()
        return dry.scheduler.hit_tokens

    found = {f"hit_{n}": second([7] * n, [7] * n) for n in (16, 17, 32, 33)}
    return found | {"hit_512": second([7] * 513, [7] * 513), "hit_512_first": second([7] * 513, [8] + [7] * 512)}


def tensor_parallel(chapter: str) -> dict[str, Any]:
    """Bytes that a rank brings into all-reduces, by the number of ranks."""
    found: dict[str, Any] = {}
    for tp in (1, 2, 4):
        _, stats = _answer(chapter, [range(20, 36)], {"max_tokens": 8, "ignore_eos": True}, **TINY, tp=tp)
        found |= {f"bytes_tp{tp}": stats["allreduce_bytes"], "forwarded_tokens": stats["forwarded_tokens"]}
    return found


@dataclass
class _Guesser:
    """Guesses the same token always."""

    module: ModuleType
    token: int
    cost: float = 0.0

    def propose(self, wanted: Sequence[tuple[Any, int]]) -> list[Any]:
        return [self.module.Guess([self.token] * count) for _, count in wanted]

    def release(self, req: Any) -> None: ...

    def flush(self) -> None: ...


def speculative(chapter: str) -> dict[str, Any]:
    """Steps and tokens without guesses, with right ones and with wrong ones; and guesses beside 63 other requests."""
    module = importlib.import_module(f"{chapter}.speculative")

    def run(guess: int | None, count: int = 1) -> DryRun:
        guesser = None if guess is None else _Guesser(module, guess)
        speculator = guesser and module.Speculator(guesser, 4, module.FREE_ROWS["cpu"])
        requests = [([7 + rid] * 8, 16) for rid in range(count)]
        return run_together(DryRun(chapter, budget=2048, page_size=16, pages=512, speculator=speculator), requests)

    found: dict[str, Any] = {}
    for name, guess in (("without", None), ("right", 1), ("wrong", 2)):
        dry = run(guess)
        found |= {f"steps_{name}": dry.steps, f"tokens_{name}": dry.forwarded}
    return found | {f"guesses_{count}": run(1, count).scheduler.draft_tokens for count in (1, 64)}


PREDICTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "ch02": request_flow,
    "ch03": generation,
    "ch04": kvcache,
    "ch05": serving,
    "ch06": batching,
    "ch07": paged,
    "ch08": radix,
    "ch09": tensor_parallel,
    "ch10": speculative,
}


def predictions(name: str) -> dict[str, Any]:
    """The counters of one chapter, ch06 or by another of its names; they depend on nothing but the code."""
    chapter = find(load_all(ROOT), name).name
    if chapter[:4] not in PREDICTIONS:
        raise ValueError(f"no predictions for {chapter}: there are {', '.join(PREDICTIONS)}")
    return PREDICTIONS[chapter[:4]](chapter)


def main() -> int:
    parser = cli.parser("common.predict", "The counters behind the boxes of the chapters' READMEs.")
    parser.add_argument("chapter", nargs="*", help=f"which chapters: {', '.join(PREDICTIONS)} (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write those of all chapters")
    args = parser.parse_args()
    if args.chapter and args.json:
        raise ValueError("--json writes those of all chapters: leave the names out")
    found: dict[str, Any] = {}
    for name in args.chapter or PREDICTIONS:
        found[name] = predictions(name)
        print(name, *(f"  {key} = {value}" for key, value in found[name].items()), sep="\n")
    if args.json:
        command = f"python -m common.predict --json {args.json}"
        Path(args.json).write_text(
            json.dumps({"command": command, **found}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    cli.run_main(main)
