"""What the documents tell a reader to type exists: modules, flags, tests; and both languages tell the same."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

DOCUMENTS = sorted(p for p in (*ROOT.glob("*.md"), *ROOT.glob("ch*/*.md"), *ROOT.glob("docs/*.md")))
PAIRS = [p for p in DOCUMENTS if p.with_suffix(".zh.md") in DOCUMENTS]
BLOCK = re.compile(r"^```(?:bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:python -m|make|curl|git|MINISGL_\w+=\S+ python -m) [^`]+)`")
PLACEHOLDERS = ("chNN_x", "COMMAND", "命令", "…", "/path/to")  # of a command's form, not of a command
NAMED_TEST = re.compile(r"`(?:tests/)?(?:(test_\w+)\.py::)?(test_\w+)`")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(path: Path) -> list[str]:
    """All shell commands of a document, those of blocks first: continued lines joined, comments cut off."""
    text = path.read_text(encoding="utf-8")
    lines = "\n".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    found = [" ".join(line.partition("  # ")[0].split()) for line in lines if line.strip()]
    found += [" ".join(command.split()) for command in INLINE.findall(BLOCK.sub("", text))]
    return [command for command in found if not any(word in command for word in PLACEHOLDERS)]


def python_calls(path: Path) -> list[tuple[str, list[str]]]:
    """(module, arguments) of each ``python -m``."""
    calls = []
    for command in commands(path):
        for part in re.split(r" \| | && | & | > ", command):
            words = shlex.split(part.rstrip("&"))
            at = words.index("-m") if "-m" in words else len(words)
            if words[at + 1 :] and Path(words[at - 1]).name in ("python", "python3"):
                calls.append((words[at + 1], words[at + 2 :]))
    return calls


@cache
def flags(module: str) -> str:
    """What the module's --help says."""
    from contextlib import redirect_stdout
    from io import StringIO

    out, before = StringIO(), sys.argv
    sys.argv = [module, "--help"]
    try:
        with redirect_stdout(out), pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
    finally:
        sys.argv = before
    assert not ended.value.code, module
    return out.getvalue()


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """The ids of all tests."""
    line = [sys.executable, "-m", "pytest", "--collect-only", "-o", "addopts=", "-q", "tests"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_the_documents_hold_commands() -> None:
    """The patterns above find what they are for."""
    assert len(PAIRS) >= 11
    assert sum(len(python_calls(path)) for path in DOCUMENTS) > 150
    assert ("ch08_radix.trace", ["--repeat", "2", "--page-size", "4"]) in python_calls(ROOT / "ch08_radix/README.md")


@pytest.mark.parametrize("path", PAIRS, ids=name_of)
def test_both_languages_have_the_same_commands(path: Path) -> None:
    """Prompts and what stands for a value may be translated; modules, flags, tests and values may not."""

    def typed(document: Path) -> list[tuple[str, list[str]]]:
        return sorted(
            (module, ["*" if free(word) else word for word in words]) for module, words in python_calls(document)
        )

    def free(word: str) -> bool:
        return not word.isascii() or word.isupper() or " " in word

    assert typed(path) == typed(path.with_suffix(".zh.md"))


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_module_and_flag_exists(path: Path) -> None:
    for module, arguments in python_calls(path):
        if module in ("venv", "pytest", "pip"):
            continue
        assert importlib.util.find_spec(module), module
        known = flags(module) if any(word.startswith("--") for word in arguments) else ""
        for word in arguments:
            if word.startswith("--"):
                assert re.search(rf"{re.escape(word.partition('=')[0])}\b", known), f"{module} has no {word}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_test_exists(path: Path, collected: list[str]) -> None:
    """Tests that are named in text, and what each pytest command selects."""
    for module, name in NAMED_TEST.findall(path.read_text(encoding="utf-8")):
        is_file = (ROOT / "tests" / f"{name}.py").is_file()
        assert is_file or any(re.search(rf"{module}\.py::{name}\b", test) for test in collected), f"{module} {name}"
    for module, arguments in python_calls(path):
        if module == "pytest" and arguments and arguments[0].startswith("tests/test_"):
            file = arguments[0]
            assert (ROOT / file).is_file(), file
            wanted = arguments[arguments.index("-k") + 1] if "-k" in arguments else ""
            assert any(test.startswith(file) and selects(wanted, test) for test in collected), f"{file} -k {wanted!r}"


def selects(expression: str, test: str) -> bool:
    """Whether ``-k`` takes this test: words are substrings of the id, joined by and, or, not and parentheses.

    A chapter takes any: a file that is the same in several chapters is tested once (tests.copies), until the reader of
    an exercise changes it.
    """
    if not expression:
        return True

    def holds(match: re.Match[str]) -> str:
        word = match[0]
        if word in ("and", "or", "not"):
            return word
        return str(bool(re.fullmatch(r"ch\d\d", word)) or word.lower() in test.lower())

    return bool(eval(re.sub(r"[\w.\-\[\]:]+", holds, expression)))


def test_the_pictures_of_one_request_show_the_same_tokens() -> None:
    """From ch03 to ch08 the texts follow one answer from picture to picture."""
    shown = {}
    for chapter in ("ch03", "ch04", "ch05", "ch06", "ch07", "ch08"):
        file = ROOT / "docs" / "figures" / f"{chapter}_trace" / "trace.json"
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        shown[chapter] = [event["args"]["token"] for event in events if event["name"] == "sample"]
    assert shown["ch03"] and all(tokens == shown["ch03"] for tokens in shown.values()), shown
