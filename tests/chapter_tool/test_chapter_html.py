"""The pages for a browser: whole, escaped, without a broken link, and with every line that changed."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from common.chapter_align import edited, pairs
from common.chapter_diff import lesson
from common.chapter_html import anchor, write_pages
from common.chapter_tree import load_all
from tests.chapter_tool.conftest import Tree
from tests.conftest import ROOT

VOID = {"meta", "link", "br", "col"}
OPTIONAL = {"th", "tr", "thead", "tbody"}  # may be left open
NASTY = "x = a < b > c & d, \"<script>alert(1)</script>\", '&lt;'\n"


@dataclass
class Page(HTMLParser):
    """What the tests want to know of a page; text of code cells by section, side (the cell's place in its row) and number."""

    text: str
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    tags: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    code: dict[tuple[str, str, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.section, self.number, self.look = "", "", ""
        self.feed(self.text)
        self.close()
        assert not [tag for tag in self.open if tag not in OPTIONAL], "a tag is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        if "id" in values:
            assert values["id"] not in self.ids, "an id twice"
            self.ids.add(values["id"])
        if tag == "section":
            self.section = values["id"]
        self.links += [values[key] for key in ("href", "src") if key in values]
        if tag == "td":
            self.look = values.get("class", "")
            if self.look == "no":
                self.number = ""
            elif self.look.startswith("code"):
                side = "old" if "del" in self.look else "new" if "ins" in self.look else "same"
                self.key = (self.section, side, int(self.number))
                self.code[self.key] = ""
            elif self.look == "note":
                self.notes.append("")

    def handle_endtag(self, tag: str) -> None:
        while self.open[-1] != tag:
            assert self.open.pop() in OPTIONAL, f"</{tag}> closes another tag"
        self.open.pop()
        if tag == "td":
            self.look = ""

    def handle_data(self, data: str) -> None:
        if self.look == "no":
            self.number += data
        elif self.look.startswith("code"):
            self.code[self.key] += data
        elif self.look == "note":
            self.notes[-1] += data


def pages_of(folder: Path) -> dict[str, Page]:
    return {path.name: Page(path.read_text(encoding="utf-8")) for path in folder.glob("*.html")}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """Those of this repository."""
    folder = tmp_path_factory.mktemp("html")
    written = write_pages(ROOT, load_all(ROOT), folder)
    assert {path.name for path in folder.iterdir()} == {path.name for path in written} | {"chapters.css"}
    return pages_of(folder)


def test_every_link_leads_to_a_page_and_a_place_that_exist(pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        assert page.links
        for link in page.links:
            target, _, place = link.partition("#")
            if link == "chapters.css":
                continue
            assert (target or name) in pages, f"{name}: {link}"
            assert not place or place in pages[target or name].ids, f"{name}: {link}"


def test_nothing_comes_from_elsewhere(pages: dict[str, Page]) -> None:
    for page in pages.values():
        assert not page.tags & {"script", "img", "iframe", "object", "embed", "base"}
        assert not [link for link in page.links if ":" in link]
    style = (ROOT / "common" / "data" / "chapters.css").read_text(encoding="utf-8")
    assert "url(" not in style and "@import" not in style
    assert "prefers-color-scheme: dark" in style


def test_every_changed_line_of_every_chapter_is_there(pages: dict[str, Page]) -> None:
    chapters = load_all(ROOT)
    for chapter in chapters:
        page, sections = pages[f"{chapter.name}.html"], []
        for change in lesson(chapters, chapter):
            section = anchor(change.path)
            sections.append(section)
            matcher = difflib.SequenceMatcher(None, change.before, change.after, autojunk=False)
            for tag, a, b, c, d in matcher.get_opcodes():
                for side, lines, span in (("old", change.before, (a, b)), ("new", change.after, (c, d))):
                    for i in range(*span) if tag != "equal" else ():
                        assert page.code[section, side, i + 1] == lines[i].rstrip("\n")
        assert sections and set(sections) <= page.ids


def test_the_index_has_every_chapter_and_the_lineage_of_every_file(pages: dict[str, Page]) -> None:
    index = pages["index.html"]
    chapters = load_all(ROOT)
    for chapter in chapters:
        assert f"{chapter.name}.html" in index.links and chapter.title_zh in index.text
        for change in lesson(chapters, chapter):
            assert change.free or f"{chapter.name}.html#{anchor(change.path)}" in index.links


def test_code_is_escaped(tree: Tree, tmp_path: Path) -> None:
    tree.append("ch04_cache/scheduler.py", NASTY)
    tree.write(
        "ch04_cache/kvcache.py", '"""A < B & "C"."""\n' + NASTY + "def f() -> None:\n" + '    """<b>bold</b>."""\n'
    )
    write_pages(tree.root, load_all(tree.root), tmp_path)
    page = pages_of(tmp_path)["ch04_cache.html"]
    assert "<script>alert" not in page.text and page.text.count("&lt;script&gt;alert") == 2
    assert NASTY.rstrip("\n") in [page.code[key] for key in page.code if key[:2] == ("scheduler.py", "new")]
    assert any("<b>bold</b>." in note for note in page.notes)


def test_the_notes_name_what_a_chapter_adds_and_changes(tree: Tree) -> None:
    status, out, _ = tree.tool("html", "--out", str(tree.root / "pages"))
    assert status == 0 and "wrote 4 pages" in out
    page = pages_of(tree.root / "pages")["ch04_cache.html"]
    notes = " ".join(page.notes)
    assert "Cache class added" in notes and "Slots." in notes and "finish function changed" in notes
    assert ("scheduler.py", "same", 16) in page.code, "the line of the definition"
    assert "unchanged lines" in page.text


def test_a_folder_that_cannot_be_written_is_one_line(tree: Tree) -> None:
    tree.write("file", "x")
    status, _, err = tree.tool("html", "--out", str(tree.root / "file" / "pages"))
    assert status == 2 and "cannot write" in err and err.count("\n") == 1


def test_lines_that_were_edited_stand_next_to_each_other() -> None:
    before = ["a\n", "one = first(x)\n", "two = second(x)\n", "z\n"]
    after = ["a\n", "entirely other\n", "two = second(x, y)\n", "z\n"]
    found = [(pair.old, pair.new, pair.changed) for pair in pairs(before, after)]
    assert found == [(1, 1, False), (2, None, True), (None, 2, True), (3, 3, True), (4, 4, False)]


def test_pairs_have_every_line_once() -> None:
    before, after = [f"value_{i % 7} = {i}\n" for i in range(40)], [f"value_{i % 5} = {i * 2}\n" for i in range(33)]
    found = list(pairs(before, after))
    assert [pair.old for pair in found if pair.old] == list(range(1, 41))
    assert [pair.new for pair in found if pair.new] == list(range(1, 34))


def test_only_the_words_that_changed_are_marked() -> None:
    old, new = edited("self.max_running = 1", "self.max_running = limit")
    assert (old, new) == ([(19, 20)], [(19, 24)])
