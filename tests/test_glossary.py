"""What the texts name exists: objects of the READMEs and of the glossary, and each word of the book with its counterparts."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from common.chapter_source import parse, places
from tests.conftest import CHAPTERS, ROOT

OBJECTS = {"README.md": "## Objects and interfaces", "README.zh.md": "## 对象与接口"}
WORDS = """
SamplingParams, Req, Batch, Context, Scheduler, Engine, Model Runner, Sampler, Tokenizer, Detokenizer, Server,
WAITING, PREFILL, DECODE, FINISHED, ABORTED, cached_len, extend_len, control path, data path, interface layer,
orchestration layer, execution layer, state & memory layer, forward, autoregressive generation, prefill, decode, KV cache,
streaming, continuous batching, paged KV cache, page table, radix tree, RadixAttention, prefix caching, hit rate, TTFT, TPOT,
end-to-end latency, throughput, memory utilisation, tensor parallelism, rank, speculative decoding, acceptance rate
"""
ALONE = {"speculative decoding", "acceptance rate", "memory utilisation"}  # the official source has no such part


@dataclass(frozen=True)
class Row:
    """One word of the glossary; `here` and `official` are cells."""

    words: tuple[str, ...]
    first: str
    here: str
    official: str


def glossary() -> list[Row]:
    rows = []
    for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 6 and cells[0] not in ("中文", "---"):
            chinese, english, meaning, first, here, official = cells
            assert re.search("[一-鿿]", chinese) or chinese == english, line
            assert " · " in meaning and re.match(r"ch\d\d", first), line
            rows.append(Row(tuple(word.strip() for word in english.split(",")), first, here, official))
    return rows


@cache
def names_of(file: Path) -> dict[str, int]:
    tree = parse(file.read_text(encoding="utf-8"))
    assert tree is not None, file
    return places(tree)


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def resolve(name: str, owner: str, files: list[Path]) -> str:
    """path:line of a name; a short one may be a member of `owner`, the class named before it."""
    for file in files:
        for full in (name, f"{owner}.{name}"):
            if full in names_of(file):
                return f"{file.relative_to(ROOT)}:{names_of(file)[full]}"
    raise AssertionError(f"{name} is not in {', '.join(str(file.relative_to(ROOT)) for file in files)}")


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


# ---- the READMEs


@pytest.mark.parametrize("document", OBJECTS)
@pytest.mark.parametrize("name", CHAPTERS)
def test_every_object_of_a_readme_has_a_place(name: str, document: str) -> None:
    text = (ROOT / name / document).read_text(encoding="utf-8")
    section = text.split(OBJECTS[document])[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    assert rows
    for objects, file, *_ in rows:
        files = [ROOT / name / path for path in codes(file)] or modules(name)
        owner = ""
        for item in codes(objects):
            assert resolve(item, owner, files)
            owner = item.split(".")[0] if "." in item or item[0].isupper() else owner


# ---- the glossary


def folder_of(row: Row) -> str:
    """The chapter's folder; where a word begins early but its object comes later, the chapter after it in brackets."""
    [*_, last] = re.findall(r"ch\d\d", row.first)
    return next(name for name in CHAPTERS if name.startswith(last))


@pytest.mark.parametrize("row", glossary(), ids=lambda row: row.words[0])
def test_every_object_of_the_glossary_has_a_place(row: Row) -> None:
    items = codes(row.here)
    files = [item for item in items if item.endswith(".py")]
    assert items, "a word has an object"
    later = [name for name in CHAPTERS if name >= folder_of(row)]
    paths = [path for file in files if (path := found(file, later))]
    assert len(paths) == len(files), files
    for item in items:
        if (
            not item.endswith(".py")
            and item not in ("list[int]", "kv_used", "kv_total")
            and not item.endswith("_tokens")
        ):
            resolve(item, "", paths if paths and " from " not in row.here else [p for n in later for p in modules(n)])


def found(file: str, chapters: list[str]) -> Path | None:
    """A file of the repository, or of the first of these chapters that has it."""
    return next((p for p in (ROOT / file, *(ROOT / name / file for name in chapters)) if p.is_file()), None)


def test_every_word_of_the_book_has_an_object_here_and_an_official_file() -> None:
    known = {word: row for row in glossary() for word in row.words}
    table = tomllib.loads((ROOT / "docs" / "official.toml").read_text(encoding="utf-8"))["files"]
    official = {file.strip() for files in table.values() for file in files.split(",")}
    for word in (word.strip() for word in WORDS.split(",")):
        assert word in known, word
        files = codes(known[word].official)
        assert files or word in ALONE, f"{word} has no official file"
    for row in known.values():
        for file in codes(row.official):
            assert file in official or (file.endswith("/") and any(f.startswith(file) for f in official)), file


def test_every_module_has_its_official_files() -> None:
    table = tomllib.loads((ROOT / "docs" / "official.toml").read_text(encoding="utf-8"))["files"]
    for name in CHAPTERS:
        for path in modules(name):
            assert path.name in table, f"docs/official.toml lacks {path.name}"
