"""A file that is the same in several chapters is tested once."""

from __future__ import annotations

import hashlib

from tests.conftest import CHAPTERS, ROOT


def copies(file: str) -> list[str]:
    """The chapters with their own content of this file; of equal copies the last one."""
    found = [name for name in CHAPTERS if (ROOT / name / file).exists()]
    return list({hashlib.sha256((ROOT / name / file).read_bytes()).digest(): name for name in found}.values())
