"""What all tests share: which chapters exist, and one thread for compute, so that tests do not fight over cores."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
CHAPTERS = sorted(p.parent.name for p in ROOT.glob("ch[0-9][0-9]_*/chapter.toml"))
ENGINES = [name for name in CHAPTERS if name > "ch03"]  # chapters with a real model
BATCHING = [name for name in CHAPTERS if name > "ch06"]  # chapters that run several requests in one step
SHARING = [name for name in CHAPTERS if name > "ch08"]  # chapters in which requests share the pages of equal prefixes
SERVERS = [name for name in CHAPTERS if (ROOT / name / "serve.py").exists()]


ONLY = "MINISGL_TEST_CHAPTER"  # the chapter that a run is about: always among the parameters


def briefly(names: list[str], *kept: str) -> list[Any]:
    """Parameters: these chapters always, the others with --full only."""
    return [name if name in with_only([*kept]) else pytest.param(name, marks=pytest.mark.full) for name in names]


def with_only(names: list[str]) -> list[str]:
    """These chapters and the one that the run is about."""
    only = os.environ.get(ONLY)
    return [*names, only] if only and only not in names else names


def chapter(name: str) -> ModuleType:
    return importlib.import_module(name)


def pytest_configure() -> None:
    """A shell starts what it puts into the background with Ctrl-C ignored; tests of Ctrl-C need Python's own handler."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked full, with large counts")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        skip = pytest.mark.skip(reason="large counts: make test-full")
        for item in items:
            if "full" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=CHAPTERS)
def any_chapter(request: pytest.FixtureRequest) -> ModuleType:
    """Every chapter in turn."""
    return chapter(request.param)


@pytest.fixture(params=ENGINES)
def engine_chapter(request: pytest.FixtureRequest) -> ModuleType:
    """Every chapter that has a real model, in turn."""
    return chapter(request.param)


# A server of one request at a time, one of batches in this process, and one of processes.
@pytest.fixture(scope="session", params=briefly(SERVERS, SERVERS[0], SHARING[0], SERVERS[-1]))
def served(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server of the tiny model, in a process of its own, for every chapter that has one."""
    from tests.serving import running

    yield from running(request.param)


@pytest.fixture(params=BATCHING)
def batching_chapter(request: pytest.FixtureRequest) -> ModuleType:
    """Every chapter that runs several requests in one step, in turn."""
    return chapter(request.param)


@pytest.fixture(params=SHARING)
def sharing_chapter(request: pytest.FixtureRequest) -> ModuleType:
    """Every chapter in which requests share the pages of equal prefixes, in turn."""
    return chapter(request.param)
