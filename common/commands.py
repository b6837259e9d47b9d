"""The commands that are the same in every chapter, apart from the engine that they run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import cli, prefix_tree
from common.trace import COMPONENTS, Tracer, report

PROMPT = "请解释什么是 KV Cache？"  # the book's standard example


def generate(package: str, llm_class: Any, params_class: Any, config_class: type) -> int:
    """Answer prompts: text or JSON on stdout, everything else on stderr. Exit status 2 if a prompt was refused."""
    parser = cli.parser(f"{package}.generate", "Generate text with this engine.")
    parser.add_argument("--prompt", action="append", required=True, help="the prompt; repeat for several")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object per request")
    cli.add_config_flags(parser, config_class)
    cli.add_sampling_flags(parser)
    args = parser.parse_args()
    params = params_class(**cli.sampling_kwargs(args))
    with llm_class(**cli.config_kwargs(config_class, args)) as llm:
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": p}]) if args.chat else p for p in args.prompt]
        outputs = llm.generate(prompts, params, progress=sys.stderr.isatty())
    for output in outputs:
        if args.json:
            print(json.dumps(output.to_dict(), ensure_ascii=False))
        elif not output.error:
            print(output.text)
            print(*_logprobs(llm.tokenizer, output), sep="", end="", file=sys.stderr)
        print(_summary(output), file=sys.stderr)
    return 2 if any(output.error for output in outputs) else 0


def _logprobs(tokenizer: Any, output: Any) -> Iterator[str]:
    """For each token of the output that has them: its log-probability, then those of the likeliest tokens there."""
    for detail in output.logprobs or ():
        likeliest = (f"{tokenizer.piece(i)!r} {p:.3f}" for i, p in detail["top"].items())
        token = repr(tokenizer.piece(detail["token_id"]))
        yield f"{token:>16} {detail['logprob']:8.3f}   {'  '.join(likeliest)}\n"


def _summary(output: Any) -> str:
    if output.error:
        return f"error: {output.error}"
    t = output.timings
    return (
        f"[{len(output.prompt_token_ids)} prompt + {len(output.token_ids)} output tokens, {output.finish_reason}; "
        f"first token {1e3 * t['ttft_s']:.1f} ms, then {1e3 * t['tpot_s']:.2f} ms per token]"
    )


def trace(
    package: str,
    llm_class: Any,
    params_class: Any,
    config_class: type,
    over_http: Callable[[dict[str, Any], Tracer, str, int], None] | None = None,
) -> int:
    """Follow one request from entry to response: a table, a Chrome trace and a sequence diagram.

    over_http(options, tracer, prompt, max_tokens), where there is a server, sends the request through it for --http.
    """
    parser = cli.parser(f"{package}.trace", "Trace the life of one request.")
    parser.add_argument("--prompt", default=PROMPT, help="the prompt to follow")
    parser.add_argument("--max-tokens", type=int, default=8, help="output tokens")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="send it N times, one after the other")
    parser.add_argument("--out", type=Path, default=Path("trace_out"), help="folder for trace.json and sequence.png")
    parser.add_argument("--json", action="store_true", help="print the events as JSON")
    if over_http:
        parser.add_argument("--http", action="store_true", help="send the request through the server")
    cli.add_config_flags(parser, config_class)
    args = parser.parse_args()
    params = params_class(max_tokens=args.max_tokens, ignore_eos=True)
    tracer = Tracer()
    options = cli.config_kwargs(config_class, args)
    trees = []
    http = over_http is not None and args.http
    if args.repeat < 1 or (args.repeat > 1 and http):
        raise ValueError(f"--repeat must be at least 1, and 1 with --http, not {args.repeat}")
    if over_http and http:
        over_http(options, tracer, args.prompt, args.max_tokens)
    else:
        with llm_class(tracer=tracer, **options) as llm:
            trees.append(("before", prefix_tree.snapshot(llm)))
            outputs = [llm.generate([args.prompt], params, progress=False)[0] for _ in range(args.repeat)]
            trees.append(("after", prefix_tree.snapshot(llm)))
        if outputs[0].error:
            raise ValueError(outputs[0].error)
    report(tracer.events, COMPONENTS, out_dir=args.out, title=f"{package}: {args.prompt}", as_json=args.json)
    for moment, tree in trees:
        if tree and not args.json:
            print(f"\nprefix tree {moment}:", *prefix_tree.lines(tree), sep="\n")
    return 0
