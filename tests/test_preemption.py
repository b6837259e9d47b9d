"""Memory in pages: who is thrown out when the pool is empty, and how; who waits; what equal prefixes share. No model."""

from __future__ import annotations

import pytest

from tests.conftest import BATCHING, chapter
from tests.scheduling import Job, Rig, own_prompt

PAGED = [name for name in BATCHING if name > "ch07"]


@pytest.fixture(params=PAGED)
def paged_chapter(request):
    """Every chapter whose KV memory is in pages, in turn."""
    return chapter(request.param)


# ---- a pool that is too small


def test_the_youngest_is_preempted_and_goes_on_where_it_was(paged_chapter):
    """Four pages of 4; two requests of 7 + 5 tokens have two each, and at 9 tokens each wants a third."""
    rig = Rig(paged_chapter, capacity=16, page_size=4, prefix_cache=False)
    rig.submit(0, 7, 5)
    young = rig.submit(1, 7, 5)
    assert [rig.step() for _ in range(2)] == [{0: 7, 1: 7}, {0: 1, 1: 1}]
    assert rig.step() == {0: 1}, "no page for the ninth token of the older one: the younger gives up its two"
    assert rig.scheduler.preemptions == 1 and young.state.name == "WAITING"
    assert young.length == 9 and len(rig.output[1]) == 2, "its tokens stay, and are not sent again"
    assert rig.run() == [{0: 1}, {0: 1}, {1: 9}, {1: 1}, {1: 1}]
    rig.check_idle()
    assert rig.scheduler.preemptions == 1


def test_a_preempted_request_comes_back_before_those_behind_it(paged_chapter):
    rig = Rig(paged_chapter, capacity=16, page_size=4, prefix_cache=False)
    for rid in range(3):
        rig.submit(rid, 7, 5)
    steps = rig.run()
    assert rig.scheduler.preemptions >= 1
    starts = list(dict.fromkeys(rid for step in steps for rid in step))
    assert starts == [0, 1, 2]
    again = next(i for i, step in enumerate(steps) if i > 2 and 1 in step)
    assert all(2 not in step for step in steps[:again])
    rig.check_idle()


def test_nobody_overtakes_a_prompt_that_does_not_fit_yet(paged_chapter):
    rig = Rig(paged_chapter, capacity=16, page_size=4)
    rig.submit(0, 8, 3)
    rig.submit(1, 13, 1)
    rig.submit(2, 1, 1)
    steps = rig.run()
    assert steps[:3] == [{0: 8}, {0: 1}, {0: 1}]
    assert list(steps[3]) in ([1], [1, 2]) and rig.scheduler.preemptions == 0


def test_a_prompt_is_let_in_only_where_all_of_it_fits_now(paged_chapter):
    """A chunk alone would fit, and the request would be thrown out again in the middle of its prompt."""
    rig = Rig(paged_chapter, capacity=32, page_size=4, budget=8)
    rig.submit(0, 12, 4)
    rig.submit(1, 21, 1)
    steps = rig.run()
    assert steps == [{0: 8}, {0: 4}, *[{0: 1}] * 3, {1: 8}, {1: 8}, {1: 5}] and rig.scheduler.preemptions == 0
    rig.check_idle()


@pytest.mark.fault(21)
def test_the_only_request_may_fill_the_pool_to_its_last_token(paged_chapter):
    """The last token is never computed: 9 + 8 - 1 tokens in 16 places."""
    rig = Rig(paged_chapter, capacity=16, page_size=4)
    rig.submit(0, 9, 8)
    rig.run()
    assert rig.scheduler.preemptions == 0
    rig.check_idle()


def test_a_pool_that_holds_everything_preempts_nobody(paged_chapter):
    rig = Rig(paged_chapter, capacity=8 * 40, page_size=4, max_running=8, budget=16)
    for rid in range(8):
        rig.submit(rid, 20, 20)
    rig.run()
    assert rig.scheduler.preemptions == 0


# ---- shared prefixes


@pytest.mark.fault(16)
def test_equal_prompts_that_come_together_are_computed_once(sharing_chapter):
    """The second waits a step for the pages that the first is computing, and never finds all of its prompt there."""
    rig = Rig(sharing_chapter, page_size=4)
    for rid in range(3):
        rig.add(Job(rid, own_prompt(9, 20), max_tokens=2, salt=rid))
    assert rig.run() == [{0: 20}, {0: 1, 1: 4, 2: 4}, {1: 1, 2: 1}]
    assert rig.cached == {0: 0, 1: 16, 2: 16} and rig.scheduler.hit_tokens == 32
    rig.check_idle()


@pytest.mark.fault(14)
def test_what_a_preempted_request_finds_again_is_no_hit_of_its_prompt(sharing_chapter):
    rig = Rig(sharing_chapter, capacity=16, page_size=4)
    rig.submit(0, 7, 5)
    rig.submit(1, 7, 5)
    steps = rig.run()
    assert rig.scheduler.preemptions == 1 and steps[5] == {1: 5}, "one page of its tokens outlived the preemption"
    assert rig.cached == {0: 0, 1: 0} and rig.scheduler.hit_tokens == 0
    rig.check_idle()
