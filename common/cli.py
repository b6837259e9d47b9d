"""Command lines derived from dataclasses: a field of a config class is a flag, and a keyword of ``LLM``.

A wrong flag or value is one line on stderr and exit status 2; a fault in the program still shows its traceback.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, field, fields
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SAMPLING = {
    "max_tokens": (int, "output tokens at most (default: 128, or what the command says)"),
    "temperature": (float, "0 is greedy (default: 0)"),
    "top_k": (int, "sample from the k most likely tokens; 0 or -1 is off (default: 0)"),
    "top_p": (float, "sample from the smallest set with this probability (default: 1)"),
    "min_p": (float, "drop tokens below this fraction of the likeliest one (default: 0)"),
    "repetition_penalty": (float, "divide the scores of tokens seen in prompt or output (default: 1)"),
    "presence_penalty": (float, "subtract this from tokens seen in the output (default: 0)"),
    "frequency_penalty": (float, "subtract this per occurrence in the output (default: 0)"),
    "logprobs": (int, "report this many likeliest tokens per position (default: off)"),
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line and which tells what the user set from what was left out.

    Flags are declared with ``default=argparse.SUPPRESS``; after parsing, ``given`` in the namespace is the set of names
    that the command line set, and ``late_defaults`` fill the rest.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.late_defaults: dict[str, Any] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        plain = {a.dest for a in self._actions if a.default is not argparse.SUPPRESS}
        found.given = set(vars(found)) - plain
        for name, value in self.late_defaults.items():
            if name not in found.given:
                setattr(found, name, value)
        return found, rest

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {one_line(message)} ({self.prog} --help lists all flags)\n")


def parser(prog_module: str, description: str) -> Parser:
    """A parser for ``python -m prog_module``; flags are not abbreviated, so that a typo is never another flag."""
    return Parser(prog=f"python -m {prog_module}", description=description, allow_abbrev=False)


def one_line(message: object) -> str:
    """The message with every run of white space as one space."""
    return " ".join(str(message).split())


# ---- flags of a config class ----------------------------------------------------------------------------------------


def option(default: Any, help: str, choices: tuple[str, ...] | None = None, metavar: str | None = None) -> Any:
    """A dataclass field that carries what its flag needs to know. Of a bool that is True, ``help`` says what --no-… does."""
    return field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})


def _value_type(name: str, hint: Any) -> type:
    """int, float, str or bool for an annotation that is one of them or Optional of one; TypeError for others."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = [a for a in get_args(hint) if a is not type(None)]
        hint = inner[0] if len(inner) == 1 else hint
    if hint not in (int, float, str, bool):
        raise TypeError(f"field {name}: no flag for the type {hint}; give metadata['parse']")
    return hint


def _explained(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse`` whose ValueError message reaches the user (argparse prints only the function's name otherwise)."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e) or f"invalid value: {text!r}") from None

    return convert


def _default(f: Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def _add_field(group: Any, f: Field[Any], hint: Any) -> None:
    """One flag for one field, described by its metadata."""
    flag, meta, default = f.name.replace("_", "-"), f.metadata, _default(f)
    about = (meta.get("help") or "").replace("%", "%%")
    if meta.get("parse") is None and _value_type(f.name, hint) is bool:
        switch = {"action": "store_false" if default else "store_true", "dest": f.name, "default": argparse.SUPPRESS}
        note = f"(default: {flag} on)" if default else "(default: off)"
        group.add_argument(f"--no-{flag}" if default else f"--{flag}", help=f"{about} {note}".strip(), **switch)
        return
    if default is not MISSING and default is not None:
        about = f"{about} (default: {str(default).replace('%', '%%')})".strip()
    choices = meta.get("choices")
    group.add_argument(
        f"--{flag}",
        dest=f.name,
        default=argparse.SUPPRESS,
        required=default is MISSING,
        type=_explained(meta["parse"]) if meta.get("parse") else _value_type(f.name, hint),
        choices=choices,
        metavar=meta.get("metavar") or (None if choices else "X" if meta.get("parse") else _metavar(f.name, hint)),
        help=about,
    )


def _metavar(name: str, hint: Any) -> str:
    return {int: "N", float: "X", str: name.rsplit("_", 1)[-1].upper()}[_value_type(name, hint)]


def add_config_flags(parser: Parser, cls: type) -> None:
    """One flag per field of the dataclass ``cls``: ``max_model_len: int`` is ``--max-model-len N``.

    A bool that defaults to False is ``--name``, one that defaults to True is ``--no-name``. Field metadata, all
    optional: ``help`` (what the flag does), ``choices``, ``metavar``, ``parse`` (str -> value, replaces the type; its
    ValueError is what the user reads). A field without default is required. TypeError: a field of another type.
    """
    group = parser.add_argument_group(cls.__name__.removesuffix("Config").lower())
    hints = get_type_hints(cls)
    for f in fields(cls):
        if not f.init:
            continue
        _add_field(group, f, hints[f.name])
        if (default := _default(f)) is not MISSING:
            parser.late_defaults[f.name] = default


def config_kwargs(cls: type, args: argparse.Namespace) -> dict[str, Any]:
    """Every field of ``cls`` with its parsed or default value: ``LLM(**config_kwargs(EngineConfig, args))``."""
    return {f.name: getattr(args, f.name) for f in fields(cls) if f.init}


# ---- flags of a request ---------------------------------------------------------------------------------------------


def _token_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids separated by commas, got {text!r}") from None


def add_sampling_flags(parser: Parser) -> None:
    """Flags for SamplingParams; call it after ``add_config_flags``.

    ``--seed`` is one flag: where the config has it, it seeds the engine, and ``sampling_kwargs`` hands the same value
    to the request; without a config it is added here.
    """
    group = parser.add_argument_group("sampling")
    for name, (kind, about) in SAMPLING.items():
        metavar = "N" if kind is int else "X"
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=about)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS, help="stop before this text (repeatable)"
    )
    group.add_argument(
        "--stop-token-ids", type=_token_ids, metavar="ID,ID", default=argparse.SUPPRESS, help="stop at these token ids"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="go on after the end token (default: off)"
    )
    with suppress(argparse.ArgumentError):  # the config has the flag already
        group.add_argument("--seed", type=int, metavar="N", default=argparse.SUPPRESS, help="seed of the samples")


def sampling_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for SamplingParams: only what the command line set, so that the class keeps its own defaults."""
    names = [*SAMPLING, "stop", "stop_token_ids", "ignore_eos", "seed"]
    out = {name: getattr(args, name) for name in names if name in args.given}
    if "stop" in out:
        out["stop"] = tuple(out["stop"])
    return out


# ---- values and exits -----------------------------------------------------------------------------------------------


def parse_bytes(text: str) -> int | None:
    """A size in bytes: ``512M``, ``2G``, ``1.5GiB``, ``1048576``; None for ``auto``.

    K, M, G and T are powers of 1024, with or without ``B`` or ``iB``, in either case. ValueError for anything else and
    for less than one byte.
    """
    if text.strip().lower() == "auto":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([KMGT])(?:i?B)?|B)?", text.strip(), re.IGNORECASE | re.ASCII)
    size = float(match[1]) * UNITS[(match[2] or "").upper()] if match else math.nan
    if not 1 <= size < math.inf:  # false for NaN as well
        raise ValueError(f"expected a size like 512M, 2G, 1.5GiB or auto, got {text!r}")
    return int(size)


def _say(message: str) -> None:
    with suppress(OSError):  # stderr may be closed too
        print(f"error: {message}", file=sys.stderr)


def _explain(e: Exception) -> str:
    if isinstance(e, OSError) and e.strerror and e.filename is not None:
        return f"{e.filename}: {e.strerror}"
    return one_line(e)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C take effect after the block, not in the middle of it."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[Any] = []
    signal.signal(signal.SIGINT, lambda *args: noted.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if noted:
            before(*noted[0])


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and exit with what it returns (None is 0).

    ValueError and OSError (bad input, a missing checkpoint or file) become one line ``error: …`` and status 2, or 1 for a
    ConnectionError (somebody who is needed has gone); Ctrl-C is 130; a reader that closed our pipe is 141 without a word,
    as for any Unix tool. Everything else, and an error without a message, is a fault of the program and keeps its traceback.
    """
    if sys.stdout is None:  # closed by who started us: what is printed goes nowhere
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        status = main() or 0
        sys.stdout.flush()
    except BrokenPipeError:
        # the interpreter flushes stdout once more at exit, and would complain there
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as e:
        if not str(e):
            raise
        _say(_explain(e))
        sys.exit(1 if isinstance(e, ConnectionError) else 2)
    sys.exit(status)
