"""Generated parts of the documents are what the committed results say; a wrong block is named with its place.

Figures are made of data and nothing else.
"""

import json
from pathlib import Path

import pytest

from common import plots, report

RESULT = {
    "ratio": 0.4147,
    "modes": {"static batches": {"tok_s": 3.5}},
    "runs": [{"name": "a|b"}, {"name": "c"}],
    "tables": {
        "speed": {"columns": ["chapter", "ms"], "columns_zh": ["章节", "毫秒"], "rows": [["ch03", "40"], ["a|b", 8]]}
    },
}
TABLE = "| chapter | ms |\n| --- | ---: |\n| ch03 | 40 |\n| a\\|b | 8 |"
README = "Before.\n<!-- begin:table:ch04:speed -->\nold\n<!-- end:table:ch04:speed -->\nAfter {}.\n"
INLINE = "<!-- begin:value:ch04:ratio:.2f -->{}<!-- end -->"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "ch04.json").write_text(json.dumps(RESULT))
    return tmp_path


def put(tree: Path, text: str, name: str = "README.md") -> Path:
    path = tree / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode())
    return path


def test_write_fills_tables_and_values_and_leaves_the_rest_alone(tree, capsys):
    path = put(tree, README.format(INLINE.format("9")))
    assert report.main(["--write"], tree) == 0
    want = f"Before.\n<!-- begin:table:ch04:speed -->\n{TABLE}\n<!-- end:table:ch04:speed -->\n"
    assert path.read_text() == want + f"After {INLINE.format('0.41')}.\n"
    assert capsys.readouterr().out.splitlines() == [
        "README.md:2: table:ch04:speed written",
        "README.md:5: value:ch04:ratio:.2f written",
    ]


def test_a_key_with_spaces_is_written_with_underscores(tree):
    path = put(tree, "It gives <!-- begin:value:ch04:modes.static_batches.tok_s:.1f -->?<!-- end -->.\n")
    assert report.main(["--write"], tree) == 0
    assert "tok_s:.1f -->3.5<!-- end -->" in path.read_text()


@pytest.mark.fault(30)
def test_check_names_the_stale_blocks_changes_nothing_and_passes_after_write(tree, capsys):
    path = put(tree, README.format("x"), "ch04_kvcache/README.md")
    before = path.read_bytes()
    assert report.main(["--check"], tree) == 1
    assert "ch04_kvcache/README.md:2: table:ch04:speed is stale" in capsys.readouterr().out
    assert path.read_bytes() == before
    assert report.main(["--write"], tree) == 0
    assert report.main(["--check"], tree) == 0
    (tree / "docs" / "results" / "ch04.json").write_text(json.dumps(RESULT).replace('"40"', '"41"'))
    assert report.main(["--check"], tree) == 1


def test_a_chinese_document_gets_the_chinese_columns_and_the_common_rows(tree):
    path = put(tree, README.format("。"), "docs/notes.zh.md")
    report.main(["--write"], tree)
    assert "| 章节 | 毫秒 |\n| --- | ---: |\n| ch03 | 40 |" in path.read_text()


def test_line_ends_of_a_document_are_kept_outside_its_blocks(tree):
    path = put(tree, "a\r\n" + INLINE.format("") + "\r\nb")
    report.main(["--write"], tree)
    assert path.read_bytes() == ("a\r\n" + INLINE.format("0.41") + "\r\nb").encode()


def test_marks_that_are_only_shown_are_no_blocks(tree):
    shown = "```\n<!-- begin:NAME -->\n```\nand `<!-- begin:NAME -->` too\n"
    path = put(tree, shown)
    assert report.main(["--check"], tree) == 0
    assert path.read_text() == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n<!-- begin:tabel:x:y -->\n<!-- end -->", "README.md:2: unknown block 'tabel:x:y'"),
        ("<!-- begin:table:ch05:speed -->\n<!-- end -->", "README.md:1: there is no docs/results/ch05.json"),
        ("<!-- begin:table:ch04:size -->\n<!-- end -->", "README.md:1: docs/results/ch04.json has no 'tables.size'"),
        ("<!-- begin:table:ch04 -->\n<!-- end -->", "table takes 2 parts after its name, not 1"),
        ("<!-- begin:value:ch04:runs.2.name:s -->x<!-- end -->", "has no 'runs.2.name'"),
        ("<!-- begin:value:ch04:runs:.1f -->x<!-- end -->", "'runs' of docs/results/ch04.json is no single value"),
        ("<!-- begin:value:ch04:runs.1.name:.1f -->x<!-- end -->", "README.md:1: 'runs.1.name' of docs/results/ch04"),
        ("<!-- begin:value:ch04:ratio:.1f -->\n<!-- end -->", "begin and end of a value stand in one line"),
        ("a\n<!-- begin:lineage -->\n", "README.md:2: block 'lineage' has no end"),
        ("a\n<!-- end:lineage -->\n", "README.md:2: the end of a block that did not begin: lineage"),
        ("<!-- begin:lineage -->\n<!-- end:sizes -->\n", "README.md:2: the end of a block that did not begin: sizes"),
        ("<!-- begin:lineage -->\n<!-- begin:sizes -->\n", "README.md:2: a block begins inside the block 'lineage'"),
        ("<!-- begin:lineage -->\n<!-- end -->", "README.md:1: python -m common.chapters lineage --markdown failed: "),
    ],
)
def test_a_block_that_cannot_be_made_is_named_with_file_and_line(tree, capsys, text, message):
    path = put(tree, text)
    for mode in ("--check", "--write"):
        assert report.main([mode], tree) == 2
        assert message in capsys.readouterr().err
    assert path.read_text() == text


def test_the_chapter_tool_is_asked_for_lineage_and_sizes(tree):
    (tree / "common").mkdir()
    tool = 'import sys\nassert sys.argv[2:] == ["--markdown"]\nprint(f"| {sys.argv[1]} |\\n| --- |")\n'
    (tree / "common" / "chapters.py").write_text(tool)
    path = put(tree, "<!-- begin:lineage -->\n<!-- end -->\n<!-- begin:sizes -->\n<!-- end -->\n")
    assert report.main(["--write"], tree) == 0
    assert path.read_text() == (
        "<!-- begin:lineage -->\n| lineage |\n| --- |\n<!-- end -->\n"
        "<!-- begin:sizes -->\n| list |\n| --- |\n<!-- end -->\n"
    )


def test_write_or_check_must_be_said(tree):
    with pytest.raises(SystemExit) as failure:
        report.main([], tree)
    assert failure.value.code == 2


def test_equal_data_gives_equal_figures(tmp_path):
    series = {"ch03_generation": [(64, 0.04), (128, 0.08)], "ch04_kvcache": [(64, 0.01), (128, 0.011)]}
    for name in ("a.png", "b.png"):
        plots.tpot_vs_context(series, 0.005, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    plots.bar_figure({"ch04": (2.0, 1.0, 3.0), "hf": 1.0}, tmp_path / "c.png", title="t", xlabel="s", floor=0.5)
    panels = [plots.Panel("small", series), plots.Panel("large", {"ch03_generation": [(64, 9.0)]}, 1.0)]
    plots.small_multiples(panels, tmp_path / "d.png", xlabel="x", ylabel="y", logx=True)
    with pytest.raises(ValueError, match="two to four"):
        plots.small_multiples(panels[:1], tmp_path / "e.png", xlabel="x", ylabel="y")
    with pytest.raises(ValueError, match="without points"):
        plots.line_figure({"a": []}, tmp_path / "e.png", title="t", xlabel="x", ylabel="y")
    assert not (tmp_path / "e.png").exists()
