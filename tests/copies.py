"""A file that is the same in several chapters is tested once."""

from __future__ import annotations

import hashlib

from tests.conftest import CHAPTERS, ROOT, with_only


def copies(file: str) -> list[str]:
    """The chapters with their own content of this file; of equal copies the last one. A run about one chapter has it too."""
    found = [name for name in CHAPTERS if (ROOT / name / file).exists()]
    return with_only([*{hashlib.sha256((ROOT / name / file).read_bytes()).digest(): name for name in found}.values()])
