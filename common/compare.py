"""All chapters side by side: `python -m common.compare`, or two of them on one prompt: `… ch04 ch08 --prompt TEXT`.

Each engine runs every workload in a fresh process, in an order that a drift of the machine hits all alike. Every run is
kept at once in FILE.partial: the same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import httpx

from common import api, cli
from common.checkpoints import resolve
from common.compare_plan import Entry, chapters, entries, plain_name, sessions, variant, warmup, workloads
from common.harness import ROOT, commit_record, save_result
from common.host import native_bfloat16
from common.workloads import BUILDERS

PEERS = ("hf", "vllm", "openvino")
OUT = Path("compare_out")


def _flags() -> cli.Parser:
    parser = cli.parser(
        "common.compare", "The same workloads through all chapters and peers, or one prompt through two."
    )
    add = parser.add_argument
    add("chapter", nargs="*", help="chapters: 4, ch04 or the folder's name (default: all that have a model)")
    add("--chapters", nargs="+", default=[], metavar="CHAPTER", help="the same as a flag")
    add("--prompt", help="run this prompt through exactly two chapters and show tokens, counters and trace")
    add("--max-tokens", type=int, default=8, metavar="N", help="output tokens with --prompt (default: 8)")
    add(
        "--workload", action="append", default=[], choices=list(BUILDERS), help="what is run, repeatable (default: all)"
    )
    add("--variant", action="append", default=[], metavar="CHAPTER:KEY=VALUE,…", help="one more row with these options")
    add("--http", action="store_true", help="one more row per chapter that serves: the workloads over HTTP")
    peers = parser.add_argument_group("peers")
    add = peers.add_argument
    add("--peer", action="append", default=[], choices=PEERS, help="an engine in process, repeatable")
    add(
        "--peer-python",
        action="append",
        default=[],
        metavar="FILE",
        help="interpreter of a peer other than hf, in order",
    )
    add("--peer-url", action="append", default=[], metavar="URL", help="an OpenAI-compatible server, repeatable")
    add("--peer-name", action="append", default=[], metavar="NAME", help="what to call it, in order")
    add("--peer-command", action="append", default=[], metavar="LINE", help="starts that server for its runs, in order")
    how = parser.add_argument_group("how")
    add = how.add_argument
    add("--quick", action="store_true", help="one round of short workloads, under two minutes")
    add("--rounds", type=int, metavar="N", help="runs of each engine on each workload (default: 3; 1 with --quick)")
    add("--scale", type=float, default=1.0, metavar="X", help="factor on the number of requests (default: 1)")
    add("--length-scale", type=float, default=1.0, metavar="X", help="factor on all lengths (default: 1)")
    add("--model", default="smollm2-135m", help="local folder, Hub id or preset")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of all engines")
    add("--threads", type=int, default=2, help="compute threads of all engines (default: 2)")
    add("--no-logits", action="store_true", help="do not compare logits with transformers'")
    add("--restart", action="store_true", help="forget what an interrupted run has measured")
    add("--json", metavar="FILE", help=f"the result (default: {OUT / 'compare.json'}, quick.json with --quick)")
    add("--figures", metavar="FOLDER", default=str(OUT), help=f"where the figure goes (default: {OUT})")
    return parser


def main() -> int:
    """Exit status 0, 1 if an engine failed, 2 for a request that makes no sense."""
    args = _flags().parse_args()
    args.chapters = [*args.chapter, *args.chapters]
    if args.prompt is not None:
        return _on_one_prompt(args)
    if args.rounds is not None and args.rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {args.rounds}")
    if args.threads < 1:
        raise ValueError(f"threads must be at least 1, not {args.threads}")
    return _compare(args)


def _on_one_prompt(args: argparse.Namespace) -> int:
    from common.compare_prompt import show

    found, notes = chapters(ROOT, args.chapters)
    if len(args.chapters) != 2 or len(found) != 2:
        raise ValueError(" ".join(["--prompt takes two different chapters that have a model, like ch04 ch08", *notes]))
    if args.max_tokens < 1:
        raise ValueError(f"max-tokens must be at least 1, not {args.max_tokens}")
    options = {"model": args.model, "dtype": args.dtype, "threads": args.threads}
    show([chapter.name for chapter in found], args.prompt, args.max_tokens, options)
    return 0


def _compare(args: argparse.Namespace) -> int:
    from common import compare_report, logits
    from common.compare_measure import Settings, measure
    from common.compare_state import State, fingerprint

    checkpoint = resolve(args.model)
    dtype = ("bfloat16" if native_bfloat16() else "float32") if args.dtype == "auto" else args.dtype
    lengths = args.length_scale * (0.3 if args.quick else 1.0)
    settings = Settings(args.model, dtype, args.threads, warmup(checkpoint.vocab_size, lengths))
    if not args.no_logits:
        settings.sequences = logits.sequences(checkpoint.vocab_size, args.length_scale * (0.5 if args.quick else 1.0))
    rows, notes = _rows(args, settings, checkpoint.folder)
    works = workloads(
        args.workload,
        args.model,
        checkpoint.vocab_size,
        quick=args.quick,
        scale=args.scale,
        length_scale=args.length_scale,
    )
    rounds = args.rounds or (1 if args.quick else 3)
    for note in notes:
        print(note, file=sys.stderr)
    path = Path(args.json or OUT / ("quick.json" if args.quick else "compare.json"))
    commit = commit_record()
    plan = fingerprint(rows, works, rounds, args.quick, commit["hash"] if commit else None)
    state = State.open(path.with_name(path.name + ".partial"), plan, args.restart)
    try:
        measure(state, sessions(rows, works, rounds, args.quick), settings, checkpoint.config)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {len(state.runs)} runs are kept, the same command goes on from there", file=sys.stderr)
        raise
    data = compare_report.result(state, rows, works, checkpoint.config, notes)
    # The command is recorded: of a peer's command only the program, and none of the paths.
    for line in args.peer_command:
        sys.argv = [a.replace(line, Path(_program(line)).name) if line and a.endswith(line) else a for a in sys.argv]
    save_result(path, data, threads=args.threads)
    print(f"result: {path}")
    if args.figures:
        floor = next(iter(data["workloads"].values()))["floors"]["tpot_s"]  # the same for all: weights over bandwidth
        target = Path(args.figures) / ("quick.png" if args.quick else "compare.png")
        compare_report.figure(target, data["summary"], rows, state.logits, floor)
        print(f"figure: {target}")
    if not state.failed:
        state.drop()
    return 1 if state.failed else 0


def _program(command: str) -> str:
    """The program of a command line; none of an empty one."""
    return next(iter(shlex.split(command)), "")


def _rows(args: argparse.Namespace, settings: Any, folder: Path) -> tuple[list[Entry], list[str]]:
    """All engines of the comparison, and a line for each chapter left out. Raises ValueError and ChapterError."""
    from common.compare_measure import peer

    options = {"model": args.model, "dtype": settings.dtype, "threads": args.threads}
    found, notes = chapters(ROOT, args.chapters)
    rows = entries(found, options, args.http)
    rows += [variant(text, found, options) for text in args.variant]
    for program in [*args.peer_python, *filter(None, map(_program, args.peer_command))]:
        if not shutil.which(program):
            raise ValueError(f"no program {program}")
    pythons = iter(args.peer_python)
    rows += [peer(name, settings, folder, "" if name == "hf" else next(pythons, "")) for name in args.peer]
    if left := list(pythons):
        raise ValueError(f"--peer-python {left[0]} belongs to no --peer")
    urls = args.peer_url
    if len(args.peer_name) > len(urls) or len(args.peer_command) > len(urls):
        raise ValueError("--peer-name and --peer-command belong to a --peer-url each")
    for i, url in enumerate(urls):
        if not api.is_loopback(api.base_url(url)):
            raise ValueError(f"--peer-url {url}: only servers on this machine are compared")
        name = plain_name(args.peer_name[i] if i < len(args.peer_name) else f"peer{i + 1}")
        command = tuple(shlex.split(args.peer_command[i])) if i < len(args.peer_command) else ()
        if not command:  # better to find out now than after half an hour of measuring
            with httpx.Client(timeout=10.0, trust_env=False) as client:
                api.first_model(client, api.base_url(url))
        rows.append(Entry(f"{name}-http", name, "url", note="over HTTP", url=api.base_url(url), command=command))
    names = [row.name for row in rows]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two rows are called {min(twice)}")
    if not rows:
        raise ValueError("there is no chapter to compare")
    return rows, notes


if __name__ == "__main__":
    cli.run_main(main)
