"""The prefix cache over HTTP: what usage and /metrics say of it, and POST /flush_cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import SHARING, briefly
from tests.serving import Served, Server, running, tiny_flags

PROMPT = list(range(100, 140))  # 40 tokens: 2 whole pages of 16


@pytest.fixture(scope="module", params=briefly(SHARING, SHARING[0], SHARING[-1]))
def warm(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server for every chapter in which requests share pages."""
    yield from running(request.param)


@pytest.fixture
def sharing(warm: Served) -> Served:
    """The same, with nothing in its cache."""
    assert warm.http.post("/flush_cache").status_code == 200
    return warm


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask(server: Served, prompt: Any = PROMPT, **more: Any) -> dict[str, Any]:
    return server.good(prompt=prompt, max_tokens=4, temperature=0, ignore_eos=True, **more)


def test_the_second_request_finds_the_pages_of_the_first_and_a_flush_drops_them(sharing: Served) -> None:
    first, second = ask(sharing), ask(sharing)
    assert (cached(first), cached(second)) == (0, 32)
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    answer = sharing.http.post("/flush_cache")
    assert (answer.status_code, answer.json()["status"]) == (200, "flushed what no running request uses")
    assert cached(ask(sharing)) == 0


def test_streams_and_several_choices_report_it_too(sharing: Served) -> None:
    ask(sharing)
    *_, last = sharing.events(
        prompt=PROMPT, max_tokens=4, temperature=0, ignore_eos=True, stream_options={"include_usage": True}
    )
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert cached(ask(sharing, n=3)) >= 32


def test_metrics_count_hits_and_give_their_rate(sharing: Served) -> None:
    before = sharing.metrics()
    ask(sharing)
    ask(sharing)
    sharing.at_rest()
    after = sharing.metrics()
    hits, computed = (
        after[name] - before[name] for name in ("minisgl_prefix_hit_tokens_total", "minisgl_prefill_tokens_total")
    )
    assert (hits, computed) == (32, 40 + 8)
    total = after["minisgl_prefix_hit_tokens_total"]
    rate = total / (total + after["minisgl_prefill_tokens_total"])
    assert after["minisgl_prefix_hit_rate"] == pytest.approx(rate) and rate > 0
    assert after["minisgl_kv_cached"] >= 32


def test_with_an_api_key_only_its_owner_may_flush() -> None:
    with Server(SHARING[0], *tiny_flags(), "--api-key", "secret") as server:
        served = Served(SHARING[0], server.url)
        try:
            assert served.http.post("/flush_cache").status_code == 401
            headers = {"authorization": "Bearer secret"}
            assert served.http.post("/flush_cache", headers=headers).status_code == 200
        finally:
            served.close()
