"""A pytest plugin: the suites of the single engine over several ranks, in the chapters that have ranks.

`MINISGL_TEST_TP=2 pytest -p tests.with_tp -k ch09 tests/test_engine_rules.py`

Every engine, and every server of the tiny model, gets as many ranks as $MINISGL_TEST_TP says. A model that cannot be
shared by so many gets three (SmolLM2), or, if three do not divide it either, one. Select the chapters with -k: the
servers of the others do not know the flag.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import pytest

from common.checkpoints import resolve

WANTED = "MINISGL_TEST_TP"


def pytest_configure(config: pytest.Config) -> None:
    from tests import serving
    from tests.ranks import TP_CHAPTERS

    wanted = int(os.environ[WANTED])
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
        except ValueError:  # it cannot be shared so, or it is none of our models, which the test is about
            continue
    return 1
