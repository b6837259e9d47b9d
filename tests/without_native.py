"""A pytest plugin: any suite with plain torch in the place of the compiled CPU operators, in every chapter.

`pytest -p tests.without_native tests/test_server_api.py`

Engines that ask for the operators get none, and so do the servers of the tiny model.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    from tests import serving
    from tests.conftest import ENGINES

    for name in ENGINES:
        _switch_off(importlib.import_module(f"{name}.config").EngineConfig)
    flags = serving.tiny_flags
    serving.tiny_flags = lambda *args, **more: [*flags(*args, **more), "--native", "off"]


def _switch_off(config_class: Any) -> None:
    check = config_class.__post_init__

    def post_init(self: Any) -> None:
        check(self)
        self.native = "off"

    config_class.__post_init__ = post_init
