"""The boundary between the threads, piece by piece: mailboxes, streams of requests, states."""

from __future__ import annotations

import asyncio
import functools
import importlib
import threading
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving import FRONTS, tiny_folder


@pytest.fixture(scope="module", params=FRONTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def m(name: str) -> SimpleNamespace:
    """The chapter's names that these tests use, in one place."""
    parts = [importlib.import_module(f"{name}.{part}") for part in ("core", "message", "frontend", "tokenizer")]
    return SimpleNamespace(**{k: v for part in parts for k, v in vars(part).items() if not k.startswith("__")})


@functools.cache
def tokenizer(name: str) -> Any:
    return importlib.import_module(f"{name}.tokenizer").Tokenizer(tiny_folder())


def ids_of(m: SimpleNamespace, text: str) -> list[int]:
    return tokenizer(m.Frontend.__module__.split(".")[0]).encode(text, special_tokens=False)


def with_frontend(m: SimpleNamespace, body: Callable[[Any], Coroutine[Any, Any, None]], max_queue: int = 8) -> None:
    """Run a coroutine with a ready Frontend; whatever it leaves behind in the maps fails the test."""

    async def run() -> None:
        frontend = m.Frontend(m.Channel(), tokenizer(m.Frontend.__module__.split(".")[0]), max_queue)
        frontend.attach(asyncio.get_running_loop())
        await tell(frontend, m.Ready({"max_model_len": 64, "vocab_size": 1003}))
        assert (frontend.state, frontend.limits.max_model_len) == ("ready", 64)
        await body(frontend)

    asyncio.run(run())


async def tell(frontend: Any, *messages: Any) -> None:
    """Deliver messages as the engine's thread does, and let the loop take them."""
    await asyncio.to_thread(frontend.channel.from_engine.put, list(messages))
    await asyncio.sleep(0)


def submit(frontend: Any, ids: list[int], params: Any, max_tokens: int) -> Any:
    return frontend.submit(ids, params, max_tokens, asyncio.Event())


async def read(stream: Any) -> Any:
    """Wait as a reader does, and take what is there."""
    await stream.filled.wait()
    stream.filled.clear()
    return stream.take()


def consistent(frontend: Any) -> None:
    streams = frontend.streams
    assert frontend._waiting == sum(not stream.started for stream in streams.values())
    assert set(frontend._last_token) == {rid for rid, stream in streams.items() if stream.started}
    assert frontend.metrics.open._value.get() == len(streams)
    assert frontend.idle.is_set() == (not streams)
    assert all(rid == stream.rid for rid, stream in streams.items())


# ---- mailboxes ------------------------------------------------------------------------------------------------------


def test_a_mailbox_keeps_the_order_and_is_empty_afterwards(m: SimpleNamespace) -> None:
    box = m.Mailbox()
    assert box.take() == []
    box.put([1, 2])
    box.put([3])
    assert box.take() == [1, 2, 3]
    assert box.take() == []


def test_a_mailbox_waits_as_long_as_it_is_told(m: SimpleNamespace) -> None:
    box = m.Mailbox()
    start = time.monotonic()
    assert box.take(0.05) == []
    assert 0.04 < time.monotonic() - start < 2
    threading.Timer(0.05, box.put, [["late"]]).start()
    assert box.take(None) == ["late"], "without a limit until something comes"


def test_each_put_calls_once_in_the_putting_thread(m: SimpleNamespace) -> None:
    box, calls = m.Mailbox(), []
    box.on_put = lambda: calls.append((threading.get_ident(), box.take()))
    box.put([1, 2, 3])
    thread = threading.Thread(target=box.put, args=([4],))
    thread.start()
    thread.join()
    assert calls == [(threading.get_ident(), [1, 2, 3]), (thread.ident, [4])]


def test_nothing_is_lost_between_many_threads(m: SimpleNamespace) -> None:
    box, got = m.Mailbox(), []
    threads = [threading.Thread(target=lambda k=k: [box.put([(k, i)]) for i in range(500)]) for k in range(4)]
    for thread in threads:
        thread.start()
    while len(got) < 2000:
        new = box.take(5.0)
        assert new
        got += new
    for k in range(4):
        assert [i for owner, i in got if owner == k] == list(range(500))


# ---- one request ----------------------------------------------------------------------------------------------------


def test_a_request_lives_from_submit_to_its_finish(m: SimpleNamespace) -> None:
    async def body(frontend: Any) -> None:
        params = m.SamplingParams(max_tokens=3)
        stream = submit(frontend, [5, 6], params, 3)
        assert frontend.channel.to_engine.take() == [m.Submit(stream.rid, [5, 6], params, 3)]
        consistent(frontend)
        ids = ids_of(m, "the cat is")
        await tell(frontend, m.TokensOut(stream.rid, ids[:1]))
        first = await read(stream)
        consistent(frontend)
        counters = {"cached_tokens": 1}
        await tell(frontend, m.TokensOut(stream.rid, ids[1:], m.Finish("length"), counters=counters))
        last = await read(stream)
        assert first.text + last.text == "the cat is"
        assert (first.ids + last.ids, first.finish, last.finish) == (ids, None, m.Finish("length"))
        assert (stream.output_tokens, stream.count("cached_tokens")) == (len(ids), 1)
        consistent(frontend)
        assert frontend.streams == {}
        frontend.abort(stream)
        assert frontend.channel.to_engine.take() == [], "it is over: there is nothing to abort"

    with_frontend(m, body)


def test_what_came_before_its_reader_is_one_delta(m: SimpleNamespace) -> None:
    async def body(frontend: Any) -> None:
        ids = ids_of(m, "什么 😀")
        stream = submit(frontend, [5], m.SamplingParams(), 9)
        details = [{"token_id": t, "logprob": -1.0, "top": {}} for t in ids]
        outs = [m.TokensOut(stream.rid, [t], logprobs=[d]) for t, d in zip(ids, details, strict=True)]
        outs[-1].finish = m.Finish("length")
        await tell(frontend, *outs)
        delta = await read(stream)
        assert (delta.text, delta.ids, delta.logprobs, delta.finish) == ("什么 😀", ids, details, m.Finish("length"))

    with_frontend(m, body)


@pytest.mark.parametrize(
    ("reason", "cut", "want"), [("length", None, "the cat a"), ("stop", 4, "the "), ("stop", None, "the cat")]
)
def test_the_end_decides_which_text_counts(m: SimpleNamespace, reason: str, cut: int | None, want: str) -> None:
    """A stop string cuts the text at its place, a stop token is no text, and what was held back comes out otherwise."""

    async def body(frontend: Any) -> None:
        *ids, last = ids_of(m, "the cat a")
        stream = submit(frontend, [5], m.SamplingParams(stop=("cat a",) if cut else ()), 9)
        await tell(frontend, m.TokensOut(stream.rid, ids))
        text = (await read(stream)).text
        await tell(frontend, m.TokensOut(stream.rid, [last], m.Finish(reason, cut)))
        assert text + (await read(stream)).text == want

    with_frontend(m, body)


def test_an_aborted_request_is_forgotten_and_its_reader_told(m: SimpleNamespace) -> None:
    async def body(frontend: Any) -> None:
        stream = submit(frontend, [5], m.SamplingParams(), 9)
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        frontend.abort(stream)
        frontend.abort(stream)
        assert (await asyncio.wait_for(reader, 5)).finish.reason == "abort", "nobody waits for tokens that never come"
        assert [type(x) for x in frontend.channel.to_engine.take()] == [m.Submit, m.Abort]
        consistent(frontend)
        await tell(frontend, m.TokensOut(stream.rid, [5, 6]), m.TokensOut(stream.rid, [], m.Finish("abort")))
        assert not stream.filled.is_set(), "tokens that were on their way reach nobody"
        consistent(frontend)

    with_frontend(m, body)


def test_a_queue_has_room_for_so_many_without_a_token(m: SimpleNamespace) -> None:
    async def body(frontend: Any) -> None:
        streams = [submit(frontend, [5], m.SamplingParams(), 9) for _ in range(3)]
        assert not frontend.room(1)
        await tell(frontend, m.TokensOut(streams[0].rid, [5]))
        assert frontend.room(1)
        frontend.abort(streams[1])
        assert frontend.room(2)
        assert not frontend.room(3)
        for stream in streams:
            frontend.abort(stream)
        assert frontend.room(3)
        consistent(frontend)

    with_frontend(m, body, max_queue=3)


operations = st.lists(
    st.sampled_from(["submit", "token", "tokens", "finish", "abort", "late", "fail"]) | st.just("submit"), max_size=40
)


@pytest.mark.fault(23)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=operations, choice=st.randoms(use_true_random=False))
def test_whatever_happens_the_books_agree(m: SimpleNamespace, operations: list[str], choice: Any) -> None:
    async def body(frontend: Any) -> None:
        every: list[Any] = []
        for operation in operations:
            if operation == "submit":
                every.append(submit(frontend, [5], m.SamplingParams(), 9))
            elif operation == "fail":
                frontend.fail_all("it broke")
            elif every:
                stream = choice.choice(every)
                if operation == "abort":
                    frontend.abort(stream)
                finish = m.Finish("length") if operation == "finish" else None
                ids = [5, 6] if operation == "tokens" else [5]
                if operation == "late" or stream.rid in frontend.streams:
                    frontend._deliver(m.TokensOut(stream.rid, ids, finish))
            consistent(frontend)
        frontend.fail_all("the end")
        consistent(frontend)
        for stream in every:  # each reader sees exactly one end
            delta = await asyncio.wait_for(read(stream), 5)
            assert delta.finish
            assert not stream.filled.is_set()
        assert frontend.streams == {}

    with_frontend(m, body, max_queue=100)


# ---- states ---------------------------------------------------------------------------------------------------------


def test_a_dead_engine_ends_everything_with_its_words(m: SimpleNamespace, name: str) -> None:
    async def body(frontend: Any) -> None:
        streams = [submit(frontend, [5], m.SamplingParams(), 9) for _ in range(2)]
        await tell(frontend, m.Fatal("RuntimeError: boom"))
        for stream in streams:
            finish = (await asyncio.wait_for(read(stream), 5)).finish
            assert (finish.reason, "boom" in finish.error) == ("error", True)
        consistent(frontend)
        assert frontend.dead.is_set()
        config = importlib.import_module(f"{name}.config").ServerConfig()
        server = importlib.import_module(f"{name}.server").Server(frontend, config, "tiny", {})
        assert (await server.health()).status_code == 503
        assert b"dead" in (await server.health()).body

    with_frontend(m, body)


def test_a_server_that_drains_does_not_become_ready_again(m: SimpleNamespace) -> None:
    async def body(frontend: Any) -> None:
        frontend.state = "draining"
        await tell(frontend, m.Ready({"max_model_len": 64, "vocab_size": 1003}))
        assert frontend.state == "draining"

    with_frontend(m, body)


def test_an_engine_that_outlives_the_loop_talks_to_nobody(m: SimpleNamespace) -> None:
    channels = []

    async def body(frontend: Any) -> None:
        channels.append(frontend.channel)

    with_frontend(m, body)
    channels[0].from_engine.put([m.Fatal("too late")])


def test_tokens_that_one_step_gave_are_that_many_gaps(m: SimpleNamespace) -> None:
    """One for each token after the first, however many a step gives."""

    async def body(frontend: Any) -> None:
        stream = submit(frontend, [5, 6], m.SamplingParams(), 6)
        for ids in ([1], [2, 3, 4], [5]):
            await tell(frontend, m.TokensOut(stream.rid, ids))
        text = frontend.metrics.text().decode()
        assert "minisgl_inter_token_latency_seconds_count 4.0" in text
        assert "minisgl_time_to_first_token_seconds_count 1.0" in text

    with_frontend(m, body)


def test_counters_grow_by_what_the_engine_counted(m: SimpleNamespace) -> None:
    async def body(frontend: Any) -> None:
        zeros = dict.fromkeys(m.STATS, 0)
        await tell(frontend, m.Stats(zeros | {"steps": 5, "running": 2}))
        await tell(frontend, m.Stats(zeros | {"steps": 7, "running": 1}))
        text = frontend.metrics.text().decode()
        assert "minisgl_steps_total 7.0" in text
        assert "minisgl_running 1.0" in text
        assert all(f"minisgl_{key}" in text for key in m.STATS)

    with_frontend(m, body)
