"""Command lines: flags derived from a config class, flags of a request, sizes, and how a command ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import pytest

from common import cli


def _even(text: str) -> int:
    if int(text) % 2:
        raise ValueError(f"must be even, got {text}")
    return int(text)


@dataclass(kw_only=True)
class Config:
    model: str = field(default="tiny", metadata={"help": "folder or preset"})
    dtype: str = field(default="auto", metadata={"help": "weights", "choices": ("auto", "float32")})
    threads: int | None = field(default=None, metadata={"help": "CPU threads", "metavar": "CORES"})
    old_style: Optional[float] = None  # noqa: UP045
    seed: int = field(default=0, metadata={"help": "seed of the engine"})
    share: float = field(default=0.9, metadata={"help": "90% of the memory"})
    cuda_graph: bool = field(default=True, metadata={"help": "decode without CUDA graphs"})
    debug_invariants: bool = field(default=False, metadata={"help": "check after every step"})
    kv_memory: int | str | None = field(default=None, metadata={"help": "cache size", "parse": cli.parse_bytes})
    page: int = field(default=16, metadata={"help": "page size", "parse": _even})
    hidden: int = field(default=1, init=False)


DEFAULTS = {
    "model": "tiny", "dtype": "auto", "threads": None, "old_style": None, "seed": 0, "share": 0.9, "cuda_graph": True,
    "debug_invariants": False, "kv_memory": None, "page": 16,
}  # fmt: skip


def make(cls: type = Config, sampling: bool = True) -> cli.Parser:
    parser = cli.parser("chapter.generate", "Generate text.")
    cli.add_config_flags(parser, cls)
    if sampling:
        cli.add_sampling_flags(parser)
    parser.add_argument("--prompt", default="hello")
    return parser


def parsed(*words: str) -> dict[str, Any]:
    return cli.config_kwargs(Config, make().parse_args(words))


def requested(*words: str) -> dict[str, Any]:
    return cli.sampling_kwargs(make().parse_args(words))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a bad command line gives."""
    with pytest.raises(SystemExit) as e:
        make().parse_args(words)
    out, err = capsys.readouterr()
    assert e.value.code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert "python -m chapter.generate --help" in err
    return err


# ---- flags of a config class ----------------------------------------------------------------------------------------


def test_without_flags_every_field_has_the_default_of_the_class() -> None:
    assert parsed() == DEFAULTS
    assert Config(**parsed()) == Config()


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--model", "a/b"], "model", "a/b"),
        (["--dtype", "float32"], "dtype", "float32"),
        (["--threads", "3"], "threads", 3),
        (["--old-style", "0.5"], "old_style", 0.5),
        (["--seed", "-4"], "seed", -4),
        (["--share=0.25"], "share", 0.25),
        (["--no-cuda-graph"], "cuda_graph", False),
        (["--debug-invariants"], "debug_invariants", True),
        (["--kv-memory", "2K"], "kv_memory", 2048),
        (["--page", "8"], "page", 8),
    ],
)
def test_a_flag_sets_its_field_and_no_other(words: list[str], name: str, value: object) -> None:
    got = parsed(*words)
    assert got == DEFAULTS | {name: value}
    assert type(got[name]) is type(value)


def test_a_field_that_the_constructor_does_not_take_is_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unrecognized arguments: --hidden" in refused(capsys, "--hidden", "2")


def test_defaults_are_attributes_of_the_namespace_too() -> None:
    args = make().parse_args([])
    assert (args.model, args.prompt, args.given) == ("tiny", "hello", set())


def test_given_tells_what_was_set_from_what_was_left_out_even_where_equal() -> None:
    assert make().parse_args(["--seed", "0", "--top-k", "0"]).given == {"seed", "top_k"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtype", "x"], "argument --dtype: invalid choice: 'x' (choose from"),
        (["--threads", "many"], "argument --threads: invalid int value: 'many'"),
        (["--page", "7"], "argument --page: must be even, got 7"),
        (["--kv-memory", "lots"], "argument --kv-memory: expected a size like 512M"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--cuda-graph"], "unrecognized arguments: --cuda-graph"),
        (["--thread", "3"], "unrecognized arguments: --thread 3"),  # no abbreviations
        (["--model"], "argument --model: expected one argument"),
        (["--stop-token-ids", "1,b"], "argument --stop-token-ids: expected token ids separated by commas, got '1,b'"),
        (["--bad\nflag"], "unrecognized arguments: --bad flag"),
    ],
)
def test_a_wrong_flag_or_value_is_one_line_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *words)


def test_a_required_field_is_a_required_flag(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass
    class Needs:
        port: int

    parser = make(Needs, sampling=False)
    assert cli.config_kwargs(Needs, parser.parse_args(["--port", "1"])) == {"port": 1}
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert "error: the following arguments are required: --port" in capsys.readouterr().err


def test_a_field_of_another_type_needs_a_parse_function() -> None:
    @dataclass
    class Odd:
        sizes: list[int] = field(default_factory=list)

    with pytest.raises(TypeError, match=r"sizes.*metadata\['parse'\]"):
        make(Odd)


def test_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as e:
        make().parse_args(["--help"])
    assert e.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: python -m chapter.generate")
    for line in (
        "--model MODEL folder or preset (default: tiny)",
        "--dtype {auto,float32} weights (default: auto)",
        "--threads CORES CPU threads --",
        "--share X 90% of the memory (default: 0.9)",
        "--no-cuda-graph decode without CUDA graphs (default: cuda-graph on)",
        "--debug-invariants check after every step (default: off)",
        "--page X page size (default: 16)",
        "this probability (default: 1)",
    ):
        assert line in text


# ---- flags of a request ---------------------------------------------------------------------------------------------


def test_what_the_user_did_not_set_is_left_to_sampling_params() -> None:
    assert requested() == {}
    assert requested("--model", "m", "--prompt", "p") == {}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-tokens", "5"], {"max_tokens": 5}),
        (["--temperature", "0"], {"temperature": 0.0}),
        (["--top-k", "-1"], {"top_k": -1}),
        (["--top-p", "0.9", "--min-p", "0.1"], {"top_p": 0.9, "min_p": 0.1}),
        (["--repetition-penalty", "1.2"], {"repetition_penalty": 1.2}),
        (["--presence-penalty", "-1"], {"presence_penalty": -1.0}),
        (["--frequency-penalty", "0.5"], {"frequency_penalty": 0.5}),
        (["--stop", "a b", "--stop", "\n"], {"stop": ("a b", "\n")}),
        (["--stop-token-ids", "1,2, 3"], {"stop_token_ids": (1, 2, 3)}),
        (["--ignore-eos"], {"ignore_eos": True}),
        (["--logprobs", "3"], {"logprobs": 3}),
        (["--seed", "0"], {"seed": 0}),
    ],
)
def test_what_the_user_set_is_passed_on(words: list[str], expected: dict[str, Any]) -> None:
    assert requested(*words) == expected


def test_one_seed_flag_sets_the_engine_and_the_request() -> None:
    args = make().parse_args(["--seed", "7"])
    assert cli.config_kwargs(Config, args)["seed"] == 7
    assert cli.sampling_kwargs(args) == {"seed": 7}


def test_without_a_config_the_seed_is_a_sampling_flag() -> None:
    parser = cli.parser("chapter.chat", "Chat.")
    cli.add_sampling_flags(parser)
    assert cli.sampling_kwargs(parser.parse_args(["--seed", "7"])) == {"seed": 7}


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("512M", 512 * 2**20),
        ("2G", 2 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("1tb", 2**40),
        (" 10 kib ", 10240),
        (".5K", 512),
        ("1048576", 2**20),
        ("7B", 7),
        ("auto", None),
        ("AUTO", None),
    ],
)
def test_sizes(text: str, value: int | None) -> None:
    assert cli.parse_bytes(text) == value


@pytest.mark.parametrize(
    "text", ["", "G", "-1G", "0", "0.0001K", "1.2.3M", "1X", "inf", "nan", "1e3", "1GG", "9" * 400]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size like 512M, 2G"):
        cli.parse_bytes(text)


# ---- how a command ends ---------------------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


def ended(main: Callable[[], int | None]) -> object:
    with pytest.raises(SystemExit) as e:
        cli.run_main(main)
    return e.value.code


@pytest.mark.parametrize(("result", "status"), [(None, 0), (0, 0), (3, 3)])
def test_the_result_is_the_exit_status(result: int | None, status: int) -> None:
    assert ended(lambda: result) == status


class CheckpointError(ValueError):
    """Stands for the errors that the checkpoint code raises."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("top_p must be in (0, 1],\n  got 2"), "error: top_p must be in (0, 1], got 2\n"),
        (CheckpointError("no model 'x'"), "error: no model 'x'\n"),
        (FileNotFoundError(2, "No such file or directory", "a.json"), "error: a.json: No such file or directory\n"),
        (OSError("address already in use"), "error: address already in use\n"),
    ],
)
def test_bad_input_is_one_line_and_status_2(error: Exception, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(raising(error)) == 2
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize("error", [AssertionError("a"), TypeError("t"), KeyError("k"), RuntimeError("r"), ValueError()])
def test_a_fault_of_the_program_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)) as e:
        cli.run_main(raising(error))
    assert e.value is error


def test_a_partner_that_has_gone_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(raising(ConnectionError("rank 1 has gone"))) == 1
    assert capsys.readouterr() == ("", "error: rank 1 has gone\n")


def test_a_closed_stdout_is_no_traceback() -> None:
    command = [sys.executable, "-m", "ch03_generation.generate", "--model", "dummy:llama-tiny", "--prompt", "a"]
    code = "import os, sys; os.close(1); os.execv(sys.executable, sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--max-tokens", "2"],
        cwd=Path(__file__).parent.parent,
        stderr=subprocess.PIPE,
    )
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drain_timeout": 1e11}, "drain_timeout must be from 0 to 1e9"),
        ({"request_timeout": -1.0}, "request_timeout must be from 0 to 1e9"),
        ({"served_model_name": "a\udcff"}, "served_model_name must be printable"),
    ],
)
def test_what_no_server_could_run_with_is_refused(options: dict[str, Any], said: str) -> None:
    from ch10_speculative.config import ServerConfig

    with pytest.raises(ValueError, match=said):
        ServerConfig(**options)


def test_ctrl_c_is_130_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


def test_an_exit_status_that_main_chose_is_kept() -> None:
    assert ended(raising(SystemExit(5))) == 5


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_went_away_ends_the_command_quietly(lines: int) -> None:
    code = f"""
import sys
from common.cli import run_main
sys.stdin.read()  # until the reader has closed its end
run_main(lambda: [print("x") for _ in range({lines})] and None)
"""
    root = Path(cli.__file__).parents[1]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-c", code], cwd=root, **pipes)
    assert child.stdout and child.stderr and child.stdin
    child.stdout.close()
    child.stdin.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=60) == 141
    child.stderr.close()
