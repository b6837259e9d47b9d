"""A file that is the same in several chapters is tested once."""

from __future__ import annotations

import hashlib

from tests.conftest import CHAPTERS, ROOT, with_only


def copies(*files: str) -> list[str]:
    """The chapters that have these files; of those with equal copies the last one. A run about one chapter has it too."""
    found = {}
    for name in CHAPTERS:
        paths = [ROOT / name / file for file in files]
        if all(path.exists() for path in paths):
            found[hashlib.sha256(b"".join(path.read_bytes() for path in paths)).digest()] = name
    return with_only([*found.values()])
