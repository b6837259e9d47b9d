"""A pytest plugin: the suites of the single engine with as many ranks as $MINISGL_TEST_TP says, in the chapters that have
ranks. `MINISGL_TEST_TP=2 pytest -p tests.with_tp tests/test_parity.py -k ch09`

A model that cannot be shared by so many gets three ranks, or, if three do not divide it either, one.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import pytest

from common.checkpoints import resolve


def pytest_configure(config: pytest.Config) -> None:
    from tests import serving
    from tests.ranks import TP_CHAPTERS

    wanted = int(os.environ["MINISGL_TEST_TP"])
    for name in TP_CHAPTERS:
        _spread(importlib.import_module(f"{name}.config").EngineConfig, name, wanted)
    flags = serving.tiny_flags
    serving.tiny_flags = lambda *args, **more: [*flags(*args, **more), "--tp", str(wanted)]


def _spread(config_class: Any, chapter: str, wanted: int) -> None:
    check = config_class.__post_init__

    def post_init(self: Any) -> None:
        check(self)
        if self.tp == 1 and self.place is None:
            self.tp = _size(chapter, self.model, wanted)

    config_class.__post_init__ = post_init


@functools.cache
def _size(chapter: str, model: str, wanted: int) -> int:
    shape = importlib.import_module(f"{chapter}.model").ModelConfig
    for size in (wanted, 3):
        try:
            shape.from_dict(resolve(model).config).check_ranks(size)
            return size
        except ValueError:
            continue
    return 1
