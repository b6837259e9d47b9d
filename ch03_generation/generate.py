"""Command: answer one or more prompts. Text or JSON goes to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys

from common import cli

from .config import EngineConfig
from .core import RequestOutput, SamplingParams
from .llm import LLM


def main() -> int:
    parser = cli.parser(f"{__package__}.generate", "Generate text with this engine.")
    parser.add_argument("--prompt", action="append", required=True, help="the prompt; repeat for several")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object per request")
    cli.add_config_flags(parser, EngineConfig)
    cli.add_sampling_flags(parser)
    args = parser.parse_args()
    params = SamplingParams(**cli.sampling_kwargs(args))
    with LLM(**cli.config_kwargs(EngineConfig, args)) as llm:
        prompts = [llm.tokenizer.encode_chat(_user(p)) if args.chat else p for p in args.prompt]
        outputs = llm.generate(prompts, params, progress=sys.stderr.isatty())
    for output in outputs:
        print(json.dumps(output.to_dict(), ensure_ascii=False) if args.json else output.text)
        print(_summary(output), file=sys.stderr)
    return 2 if any(output.error for output in outputs) else 0


def _user(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _summary(output: RequestOutput) -> str:
    if output.error:
        return f"error: {output.error}"
    t = output.timings
    return (
        f"[{len(output.prompt_token_ids)} prompt + {len(output.token_ids)} output tokens, {output.finish_reason}; "
        f"first token {1e3 * t['ttft_s']:.1f} ms, then {1e3 * t['tpot_s']:.2f} ms per token]"
    )


if __name__ == "__main__":
    cli.run_main(main)
