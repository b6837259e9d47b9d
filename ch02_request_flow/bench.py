"""Experiment: what the path itself costs per token, before any model computes anything."""

from __future__ import annotations

import time

from common import cli
from common.checkpoints import resolve
from common.experiments import milliseconds, start, table
from common.harness import Worker, interleave, summarise
from common.workloads import get

from .core import SamplingParams
from .tokenizer import Detokenizer, Tokenizer

TEXT = "A request enters as text, becomes token ids, waits, runs step by step, and leaves as text again. 请求从入口走到响应。"


def main() -> int:
    bench = start(f"{__package__}.bench", "Cost of the request path without a model.")
    rounds = 3 if bench.quick else 15
    with Worker(__package__, **bench.options) as worker:
        runs = interleave({"path": worker}, get("latency"), rounds)["path"]
    step = summarise(run.metric("tpot_s") for run in runs)
    tokenizer = Tokenizer(resolve(bench.args.model).folder)
    encode, detokenize, ids = _text_costs(tokenizer, rounds)
    counters = runs[0].counters
    bench.data |= {
        "step_s": step,
        "encode_s_per_token": encode,
        "detokenize_s_per_token": detokenize,
        "counters": counters,
    }
    rows = [
        [
            "one engine step, no model",
            milliseconds(step["median"]),
            f"{milliseconds(step['min'])}–{milliseconds(step['max'])}",
        ],
        [
            "encode, per token",
            milliseconds(encode["median"]),
            f"{milliseconds(encode['min'])}–{milliseconds(encode['max'])}",
        ],
        [
            "detokenize, per token",
            milliseconds(detokenize["median"]),
            f"{milliseconds(detokenize['min'])}–{milliseconds(detokenize['max'])}",
        ],
    ]
    rows_zh = [
        [name, *row[1:]] for name, row in zip(("一个引擎步（无模型）", "编码，每 token", "解码为文本，每 token"), rows)
    ]
    bench.data["tables"] = {
        "path": table(["part", "median ms", "range ms"], ["环节", "中位数 ms", "范围 ms"], rows, rows_zh=rows_zh)
    }
    print(
        f"{counters['steps']} steps forwarded {counters['forwarded_tokens']} tokens for {runs[0].output_tokens} new ones"
    )
    print(f"text sample: {len(ids)} tokens")
    return bench.finish()


def _text_costs(tokenizer: Tokenizer, rounds: int) -> tuple[dict[str, float], dict[str, float], list[int]]:
    """Seconds per token to encode and to detokenize one token at a time."""
    text = TEXT * 20
    ids = tokenizer.encode(text)
    encode, decode = [], []
    for _ in range(rounds):
        begun = time.perf_counter()
        tokenizer.encode(text)
        encode.append((time.perf_counter() - begun) / len(ids))
        detokenizer = Detokenizer(tokenizer, stop=SamplingParams(stop=("never in the text",)).stop)
        begun = time.perf_counter()
        for token in ids:
            detokenizer.push([token])
        decode.append((time.perf_counter() - begun) / len(ids))
    return summarise(encode), summarise(decode), ids


if __name__ == "__main__":
    cli.run_main(main)
