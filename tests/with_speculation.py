"""A pytest plugin: the suites of the plain engine with guesses by $MINISGL_TEST_SPECULATIVE, in the chapters that speculate.
`MINISGL_TEST_SPECULATIVE=ngram pytest -p tests.with_speculation tests/test_batching_parity.py -k ch10`

"draft" has the model guess for itself. Every guess is verified that there is room for, whatever it costs.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

WANTED = "MINISGL_TEST_SPECULATIVE"


def pytest_configure(config: pytest.Config) -> None:
    from tests import serving
    from tests.speculation import SPECULATIVE

    way = os.environ[WANTED]
    for name in SPECULATIVE:
        _switch_on(importlib.import_module(f"{name}.config").EngineConfig, way)
        importlib.import_module(f"{name}.speculative").Speculator.worth = lambda *_: 0.0
    flags = serving.tiny_flags
    serving.tiny_flags = lambda *args, **more: [*flags(*args, **more), "--speculative", "ngram"]


def _switch_on(config_class: Any, way: str) -> None:
    check = config_class.__post_init__

    def post_init(self: Any) -> None:
        check(self)
        if self.speculative == "none":
            self.speculative, self.draft_model = way, self.model if way == "draft" else ""

    config_class.__post_init__ = post_init
