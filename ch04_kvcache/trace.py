"""Command: follow one request from entry to response, as a table, a Chrome trace and a sequence diagram."""

from __future__ import annotations

from pathlib import Path

from common import cli
from common.trace import Component, Tracer, report

from .config import EngineConfig
from .core import SamplingParams
from .llm import LLM

PROMPT = "请解释什么是 KV Cache？"
COMPONENTS = [  # in the order of the path; the second file is the counterpart in the official source
    Component("LLM", "llm.py", "llm/llm.py"),
    Component("Tokenizer", "tokenizer.py", "tokenizer/tokenize.py"),
    Component("Scheduler", "scheduler.py", "scheduler/scheduler.py"),
    Component("KVCache", "kvcache.py", "kvcache/mha_pool.py"),
    Component("ModelRunner", "model_runner.py", "engine/engine.py"),
    Component("Sampler", "sampler.py", "engine/sample.py"),
    Component("Detokenizer", "tokenizer.py", "tokenizer/detokenize.py"),
]


def main() -> int:
    parser = cli.parser(f"{__package__}.trace", "Trace the life of one request.")
    parser.add_argument("--prompt", default=PROMPT, help="the prompt to follow")
    parser.add_argument("--max-tokens", type=int, default=8, help="output tokens")
    parser.add_argument("--out", type=Path, default=Path("trace_out"), help="folder for trace.json and sequence.png")
    parser.add_argument("--json", action="store_true", help="print the events as JSON")
    cli.add_config_flags(parser, EngineConfig)
    args = parser.parse_args()
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    tracer = Tracer()
    with LLM(tracer=tracer, **cli.config_kwargs(EngineConfig, args)) as llm:
        output = llm.generate([args.prompt], params, progress=False)[0]
    if output.error:
        raise ValueError(output.error)
    report(tracer.events, COMPONENTS, out_dir=args.out, title=f"{__package__}: {args.prompt}", as_json=args.json)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
