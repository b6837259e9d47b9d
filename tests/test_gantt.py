"""The picture of a run: its cells are those of the trace, and they add up to steps × places."""

from __future__ import annotations

import pytest

from common.gantt import draw, run_of
from common.trace import Event


def events(*steps: str) -> list[Event]:
    """One string per step, one letter per request: p(refill), d(ecode), or nothing."""
    names = {"p": "PREFILL", "d": "DECODE"}
    found = [Event(0.0, 1, "Engine", "other", 0)]
    for step, letters in enumerate(steps, 1):
        for rid, letter in enumerate(letters):
            if letter in names:
                found.append(Event(0.0, step, "Scheduler", "schedule", rid, state=names[letter]))
    return found


def test_who_computes_who_waits_and_which_places_are_empty():
    run = run_of("two places", events("pp ", "dd ", "d p", "d d"), 2)
    first, second, third = run.lives
    assert first.computed == {1: "PREFILL", 2: "DECODE", 3: "DECODE", 4: "DECODE"}
    assert (second.end, second.empty, second.waits) == (2, [], []), "its place is taken in the next step"
    assert (third.start, third.end, third.waits, third.empty) == (3, 4, [1, 2], [])
    assert (run.steps, run.places, run.occupancy) == (4, 2, 1.0)


def test_a_place_is_empty_until_it_is_taken_or_the_run_ends():
    run = run_of("static", events("pp  ", "d   ", "d   ", "  pp", "   d"), 2)
    assert [life.empty for life in run.lives] == [[], [2, 3], [5], []]
    cells = sum(len(life.computed) + len(life.empty) for life in run.lives)
    assert cells == run.steps * run.places == 10
    assert run.occupancy == 7 / 10


def test_a_preempted_request_waits_in_between():
    run = run_of("preempted", events("pp", "d ", "dp"), 2)
    assert run.lives[1].waits == [2] and run.lives[1].start == 1


def test_events_without_a_step_are_refused():
    with pytest.raises(ValueError, match="the events hold no step"):
        run_of("nothing", [Event(0.0, 0, "LLM", "submit", 0)], 1)


def test_equal_runs_give_equal_files(tmp_path):
    runs = [run_of("a", events("pp", "dd"), 2), run_of("b", events("p ", "d ", " p"), 1)]
    for name in ("one.png", "two.png"):
        draw(runs, tmp_path / name)
    content = (tmp_path / "one.png").read_bytes()
    assert content == (tmp_path / "two.png").read_bytes() and content.startswith(b"\x89PNG")
