"""The picture of a prefix tree: what its text says, and that the figure is a function of the tree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.prefix_tree import Edge, figure, lines, snapshot
from common.tiny import cached_tiny_model
from tests.scheduling import part

TREE = Edge(
    "",
    0,
    0,
    (
        Edge("You are a teacher.", 3, 2, (Edge(" Explain paging.\n", 2, 1, ()), Edge(" Hello", 1, 0, ()))),
        Edge("x" * 200, 4, 0, ()),
    ),
)


def test_a_tree_is_a_line_for_each_edge() -> None:
    assert lines(TREE) == [
        "10 pages, 5 of them locked",
        "├── 3 pages · 2 locks · You are a teacher.",
        "│   ├── 2 pages · 1 lock ·  Explain paging.\\n",
        "│   └── 1 page ·  Hello",
        f"└── 4 pages · {'x' * 59}…",
    ]


def test_an_empty_tree_says_so() -> None:
    assert lines(Edge("", 0, 0, ())) == ["(empty)"]


def test_paths_and_lengths_of_the_picture() -> None:
    assert TREE.rows == 3
    assert TREE.reach == pytest.approx(0.7 + 3 + 0.7 + 2)


def test_equal_trees_give_equal_pictures(tmp_path: Path) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b" / "b.png"]
    for path in paths:
        figure([("first", TREE), ("then", Edge("", 0, 0, ()))], path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="needs a tree"):
        figure([], paths[0])


def test_a_snapshot_does_not_change_with_the_tree(sharing_chapter: Any) -> None:
    folder = str(cached_tiny_model("llama"))
    with sharing_chapter.LLM(folder, dtype="float32", threads=1, page_size=4) as llm:
        before = snapshot(llm)
        params = sharing_chapter.SamplingParams(max_tokens=4, ignore_eos=True)
        llm.add([10, 11, 12, 13, 14], params)
        llm.step()
        during = snapshot(llm)
        llm.generate([[10, 11, 12, 13, 20, 21, 22, 23]], params, progress=False)
        after = snapshot(llm)
    assert [(tree.total, tree.locked, tree.rows) for tree in (before, during, after)] == [
        (0, 0, 1), (1, 1, 1), (3, 0, 2),
    ]  # fmt: skip
    with sharing_chapter.LLM(folder, dtype="float32", threads=1, prefix_cache=False) as llm:
        assert snapshot(llm) is None


def test_the_trace_shows_the_tree_before_and_after_and_the_hit_rate(
    sharing_chapter: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from common import commands

    def trace(*flags: str) -> str:
        arguments = ["trace", "--model", str(cached_tiny_model("llama")), "--dtype", "float32", "--threads", "1"]
        monkeypatch.setattr("sys.argv", [*arguments, "--page-size", "4", "--out", str(tmp_path), *flags])
        config = part(sharing_chapter, "config").EngineConfig
        llm, params = sharing_chapter.LLM, sharing_chapter.SamplingParams
        assert commands.trace(sharing_chapter.__name__, llm, params, config, lambda *_: None) == 0
        return capsys.readouterr().out

    once, twice = trace("--prompt", "hello hello hello"), trace("--prompt", "hello hello hello", "--repeat", "2")
    count = json.loads(trace("--prompt", "hello hello hello", "--json"))["summary"]["prompt_tokens"]
    hit = (count - 1) // 4 * 4
    assert f"hit rate 0.0% (0 of {count} tokens)" in once
    assert f"({hit} of {2 * count} tokens)" in " ".join(twice.split())
    assert "prefix tree before:\n(empty)\n" in once and "prefix tree after:\n" in once
    assert "pages, 0 of them locked\n└── " in once
    with pytest.raises(ValueError, match="--repeat must be at least 1"):
        trace("--repeat", "0")
    with pytest.raises(ValueError, match="1 with --http, not 2"):
        trace("--repeat", "2", "--http")
