"""Words that a copy would make lie: code is read in every chapter that copies it, so it may not say where it stands.

Three places, three degrees of strictness. A chapter's number is wrong anywhere; phrases such as "no longer" are wrong
in any text; plain "new", "now" and "later" are wrong in prose (comments and docstrings) only, since a string for the
user may need them. Identifiers such as `new_ids`, calls such as `datetime.now()` and backquoted code are not prose.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

# `_` separates words here: run_ch06_test names a chapter, while batch10 and epoch3 do not.
CHAPTER = r"(?<![a-z0-9])ch_?\d{1,2}(?![a-z0-9])|(?<![a-z])chapters?[\s_-]*\d+|第\s*[0-9一二三四五六七八九十]+\s*章"
NEIGHBOUR = r"(?<![a-z])(?:this|previous|earlier|later|next)[\s_]chapters?"
PHRASE = r"\b(?:newly|previously|so\s+far|no\s+longer)\b"
PLAIN = r"(?<![\w.])(?:new|now|later)(?![\w(])"

IDENTIFIER_WORDS = re.compile(f"{CHAPTER}|{NEIGHBOUR}", re.IGNORECASE)
STRING_WORDS = re.compile(f"{CHAPTER}|{NEIGHBOUR}|{PHRASE}", re.IGNORECASE)
PROSE_WORDS = re.compile(f"{CHAPTER}|{NEIGHBOUR}|{PHRASE}|{PLAIN}", re.IGNORECASE)
QUOTED_CODE = re.compile(r"`[^`\n]+`")


def find_words(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, words) for every chapter-relative word in a Python source that parses as `tree`."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _in_prose(token.string, token.start[0])
        elif token.type == tokenize.NAME:
            yield from _search(IDENTIFIER_WORDS, token.string, token.start[0])
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                yield from _in_prose(node.value, node.lineno)
            else:
                yield from _search(STRING_WORDS, node.value, node.lineno)


def _in_prose(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Prose outside backquotes; inside them only chapters' names count."""
    for quoted in QUOTED_CODE.finditer(text):
        yield from _search(IDENTIFIER_WORDS, quoted[0], line + text.count("\n", 0, quoted.start()))
    yield from _search(PROSE_WORDS, QUOTED_CODE.sub(lambda quoted: "`" * len(quoted[0]), text), line)


def _search(pattern: re.Pattern[str], text: str, line: int) -> Iterator[tuple[int, str]]:
    for match in pattern.finditer(text):
        yield line + text.count("\n", 0, match.start()), " ".join(match[0].split())
