"""A small tree of three sound chapters, and the words in which the tests of the chapter tool speak about it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.chapter_check import HEADINGS, check
from common.chapters import main

CORE = '''"""Objects."""

LIMIT = 8
_private = 1


class Req:
    """One request."""

    def length(self) -> int:
        """Tokens in all."""
        return LIMIT

    def _own(self) -> int:
        return 0
'''
SCHEDULER = '''"""Who runs next."""

from .core import Req


def schedule(queue: list[Req]) -> Req | None:
    """The oldest request."""
    return queue[0] if queue else None


def process(req: Req) -> None:
    """Take the result."""
    req.length()


def finish(req: Req) -> None:
    """The end."""
'''
MODEL = '"""Layers."""\n\n\ndef forward(ids: list[int]) -> list[int]:\n    return ids\n' + "\n# weights\n" * 20
CACHE = '"""Keys and values."""\n\n\nclass Cache:\n    """Slots."""\n' + "\n# slots\n" * 20


@dataclass
class Tree:
    """Chapters under `root`: ch02_flow, ch03_model adds a model, ch04_cache a cache; both change the scheduler."""

    root: Path
    capsys: pytest.CaptureFixture[str]
    CORE = CORE
    SCHEDULER = SCHEDULER
    CACHE = CACHE

    def read(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text, encoding="utf-8")

    def append(self, path: str, text: str) -> None:
        self.write(path, self.read(path) + text)

    def edit(self, path: str, old: str, new: str) -> None:
        assert self.read(path).count(old) == 1
        self.write(path, self.read(path).replace(old, new))

    def copy(self, parent: str, child: str, added: str) -> None:
        """A child that adds one file and may differ in the scheduler."""
        shutil.copytree(self.root / parent, self.root / child)
        self.write(f"{child}/chapter.toml", toml(parent) + f"added = ['{added}']\nmodified = ['scheduler.py']\n")

    def declare(self, key: str, *files: str) -> None:
        """Put files in front of one of the lists in ch04's chapter.toml."""
        self.edit("ch04_cache/chapter.toml", f"{key} = [", f"{key} = [{str(list(files))[1:-1]}, ")

    def refuses(self, path: str, what: str, todo: str) -> None:
        """check finds exactly one violation, at `path`, and says on one line what is wrong and what to do."""
        problems = check(self.root)
        assert [problem.path for problem in problems] == [path], "\n".join(map(str, problems))
        assert what in problems[0].what and todo in problems[0].todo, str(problems[0])
        assert "\n" not in str(problems[0])

    def tool(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of a command line."""
        try:
            status = main(arguments, self.root)
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *self.capsys.readouterr()

    def git(self, *arguments: str) -> None:
        options = ("user.name=t", "user.email=t@example.org", "core.hooksPath=/dev/null", "commit.gpgsign=false")
        flags = [flag for option in options for flag in ("-c", option)]
        subprocess.run(["git", "-C", str(self.root), *flags, *arguments], check=True, capture_output=True)


def toml(parent: str) -> str:
    return f'parent = "{parent}"\ntitle = "T"\ntitle_zh = "题"\nmechanism = "one thing"\n'


@pytest.fixture
def tree(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tree:
    # A git hook that runs the tests points GIT_DIR at the repository; these trees must not touch it.
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    tree = Tree(tmp_path / "repo", capsys)
    tree.write("common/tool.py", 'def load() -> None:\n    importlib.import_module("ch02_flow")\n')
    tree.write("ch02_flow/__init__.py", '"""An engine."""\n\nfrom .core import Req\n')
    tree.write("ch02_flow/core.py", CORE)
    tree.write("ch02_flow/scheduler.py", SCHEDULER)
    tree.write("ch02_flow/bench.py", '"""Compares ch02 with nothing."""\n')
    tree.write("ch02_flow/chapter.toml", toml(""))
    for file, headings in HEADINGS.items():
        tree.write(f"ch02_flow/{file}", "".join(f"## {heading}\n\nText.\n\n" for heading in headings))
    tree.copy("ch02_flow", "ch03_model", added="model.py")
    tree.write("ch03_model/model.py", MODEL)
    tree.edit("ch03_model/scheduler.py", '"""Who runs next."""', '"""Who runs next, by age."""')
    tree.copy("ch03_model", "ch04_cache", added="kvcache.py")
    tree.write("ch04_cache/kvcache.py", CACHE)
    tree.edit("ch04_cache/scheduler.py", '    """The end."""\n', '    """The end."""\n    req.length()\n')
    tree.append("ch04_cache/bench.py", "# measures ch03_model too\n")
    return tree


@pytest.fixture
def committed(tree: Tree) -> Tree:
    """The tree in a git repository, everything committed."""
    tree.git("init", "-q")
    tree.git("add", "-A")
    tree.git("commit", "-qm", "chapters")
    return tree
