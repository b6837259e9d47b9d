"""The loop that steps the engine in its thread: what it takes, what it tells, and how it ends."""

from __future__ import annotations

import gc
import importlib
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.puppet import Puppet, Script
from tests.serving import (
    FRONTS,
)


@pytest.fixture(scope="module", params=FRONTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def m(name: str) -> SimpleNamespace:
    """The chapter's names that these tests use, in one place."""
    parts = [importlib.import_module(f"{name}.{part}") for part in ("core", "message", "frontend", "tokenizer")]
    return SimpleNamespace(**{k: v for part in parts for k, v in vars(part).items() if not k.startswith("__")})


def engine_thread(m: SimpleNamespace, puppet: Puppet, channel: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        with mock.patch.object(importlib.import_module(m.Frontend.__module__), "Engine", puppet):
            results.append(m.run_engine(SimpleNamespace(), channel))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def collect(channel: Any, until: Callable[[list[Any]], bool]) -> list[Any]:
    got: list[Any] = []
    while not until(got):
        new = channel.get_many(5.0)
        assert new, f"only {got}"
        got += new
    return got


def test_the_loop_answers_rests_and_stops(m: SimpleNamespace, name: str) -> None:
    puppet, channel = Puppet(name, lambda s: Script([5, 6, 7]), 0.0), m.Channel()
    thread, results = engine_thread(m, puppet, channel)
    for rid in (0, 1):
        channel.put(m.Submit(rid, [5], m.SamplingParams(), 3))
    ended = collect(channel, lambda got: sum(isinstance(x, m.TokensOut) and x.finish is not None for x in got) == 2)
    assert isinstance(ended[0], m.Ready)
    assert [x.ids for x in ended if isinstance(x, m.TokensOut) and x.rid == 1] == [[5], [6], [7]]
    time.sleep(0.05)
    assert channel.get_many()[-1:] == [m.Stats(puppet.stats())] or ended[-1] == m.Stats(puppet.stats())
    with mock.patch.object(puppet, "step", side_effect=AssertionError("no work, no step")):
        time.sleep(0.05)
        assert thread.is_alive()
        channel.put(m.Stop())
        thread.join(5)
    assert (thread.is_alive(), results, gc.get_freeze_count()) == (False, [None], 0)


def test_stop_ends_the_loop_though_there_is_work(m: SimpleNamespace, name: str) -> None:
    puppet, channel = Puppet(name, lambda s: Script([]), 0.001), m.Channel()
    thread, results = engine_thread(m, puppet, channel)
    channel.put(m.Submit(0, [5], m.SamplingParams(), 3))
    channel.put(m.Stop())
    thread.join(5)
    assert (thread.is_alive(), results) == (False, [None])


@pytest.mark.parametrize(("error", "noisy"), [(RuntimeError("boom"), True), (ValueError("bad model"), False)])
def test_what_goes_wrong_is_told_before_the_loop_ends(
    m: SimpleNamespace, name: str, error: Exception, noisy: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A ValueError is the user's, and the command says it in one line; all else is ours and keeps its traceback."""
    puppet, channel = Puppet(name, lambda s: Script([5])), m.Channel()
    puppet.broken = error
    thread, results = engine_thread(m, puppet, channel)
    thread.join(5)
    assert results == [error]
    assert channel.get_many() == [m.Fatal(f"{type(error).__name__}: {error}")]
    assert ("Traceback" in capfd.readouterr().err) == noisy
    assert gc.get_freeze_count() == 0
