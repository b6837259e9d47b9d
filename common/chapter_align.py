"""Two versions of a file side by side: which lines stand next to each other, and how each is coloured."""

from __future__ import annotations

import difflib
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

SIMILAR = 0.5  # two lines are the same one, edited, if at least so much of them agrees
LARGEST = 4000  # pairs of lines compared with each other; a larger block was written anew
FSTRING = {getattr(tokenize, name, -1) for name in ("FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END")}  # Python 3.12
WORD = re.compile(r"\w+|\W")
Span = tuple[int, int]


@dataclass(frozen=True)
class Pair:
    """Line numbers from 1 on both sides, None where a side has nothing; equal lines are not changed."""

    old: int | None
    new: int | None
    changed: bool


def pairs(before: list[str], after: list[str]) -> Iterator[Pair]:
    """Every line of both versions once, in order."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            yield from (Pair(i + 1, c + i - a + 1, False) for i in range(a, b))
            continue
        at, to = a, c
        for i, j in [*similar(before[a:b], after[c:d]), (b - a, d - c)]:
            yield from (Pair(i + 1, None, True) for i in range(at, a + i))
            yield from (Pair(None, j + 1, True) for j in range(to, c + j))
            if a + i < b and c + j < d:
                yield Pair(a + i + 1, c + j + 1, True)
            at, to = a + i + 1, c + j + 1


def similar(before: list[str], after: list[str]) -> list[tuple[int, int]]:
    """Places (i, j), rising on both sides, of the lines that are most alike in all."""
    n, m = len(before), len(after)
    if not n or not m or n * m > LARGEST:
        return []
    # best[i][j]: likeness of the best pairs of before[i:] and after[j:]
    best = [[0.0] * (m + 1) for _ in range(n + 1)]
    alike = [[likeness(old, new) for new in after] for old in before]
    for i in range(n - 1, -1, -1):
        for j in range(m - 1, -1, -1):
            best[i][j] = max(best[i + 1][j], best[i][j + 1], best[i + 1][j + 1] + alike[i][j])
    found, i, j = [], 0, 0
    while i < n and j < m:
        if alike[i][j] and best[i][j] == best[i + 1][j + 1] + alike[i][j]:
            found.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return found


def likeness(old: str, new: str) -> float:
    """0 for lines that have too little in common to be read as one that was edited."""
    matcher = difflib.SequenceMatcher(None, old.strip(), new.strip(), autojunk=False)
    if not old.strip() or not new.strip() or matcher.real_quick_ratio() < SIMILAR or matcher.quick_ratio() < SIMILAR:
        return 0.0
    ratio = matcher.ratio()
    return ratio if ratio >= SIMILAR else 0.0


def edited(old: str, new: str) -> tuple[list[Span], list[Span]]:
    """Parts of two similar lines, as [start, end) in characters, that the other one lacks."""
    (old_words, old_at), (new_words, new_at) = words(old), words(new)
    matcher = difflib.SequenceMatcher(None, old_words, new_words, autojunk=False)
    changes = [opcode for opcode in matcher.get_opcodes() if opcode[0] != "equal"]
    return (
        [(old_at[a], old_at[b]) for _, a, b, _, _ in changes if a < b],
        [(new_at[c], new_at[d]) for _, _, _, c, d in changes if c < d],
    )


def words(text: str) -> tuple[list[str], list[int]]:
    """Words, and all between them character by character; where each begins, and the end of the text."""
    found = list(WORD.finditer(text))
    return [match[0] for match in found], [*(match.start() for match in found), len(text)]


def colours(source: str) -> dict[int, list[tuple[int, int, str]]]:
    """Line number -> parts (start, end, class) in characters: keywords, names defined, strings, numbers, comments.

    A source that is not Python has as many as were found before the error.
    """
    found: dict[int, list[tuple[int, int, str]]] = {}
    before = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            kind = ""
            if token.type == tokenize.NAME:
                kind = "k" if keyword.iskeyword(token.string) else "d" if before in ("def", "class") else ""
            elif token.type in (tokenize.STRING, tokenize.NUMBER, tokenize.COMMENT):
                kind = {tokenize.STRING: "s", tokenize.NUMBER: "n", tokenize.COMMENT: "c"}[token.type]
            elif token.type in FSTRING:
                kind = "s"
            (first, start), (last, end) = token.start, token.end
            for line in range(first, last + 1) if kind else ():
                part = (start if line == first else 0, end if line == last else 10**6, kind)
                found.setdefault(line, []).append(part)
            before = token.string
    except (tokenize.TokenError, SyntaxError):
        pass
    return found
