"""What crosses the boundary between interface and engine: plain data that survives any transport."""

from __future__ import annotations

import copy
import importlib
import json
import math
from typing import Any

import pytest

from tests.copies import copies


@pytest.fixture(params=copies("message.py"))
def message(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(f"{request.param}.message")


def every_message(message: Any) -> list[Any]:
    params = message.SamplingParams(
        max_tokens=5, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=-0.5, stop=("停", "\n😀"), stop_token_ids=(1, 2), seed=-3, ignore_eos=True, logprobs=2,
    )  # fmt: skip
    logprobs = [
        {"token_id": 4, "logprob": -0.25, "top": {4: -0.25, 17: -1.5}},
        {"token_id": 5, "logprob": 0.0, "top": {}},
    ]
    counters = {"cached_tokens": 2, "scheduled_at": 12.5}
    later = {"Ready": [{"max_model_len": 8}], "Stats": [{"steps": 3}], "Stop": []}  # of the chapters that have a server
    return [
        *(message.KINDS[kind](*args) for kind, args in later.items() if kind in message.KINDS),
        message.Submit(3, [1, 2], params, 5),
        message.Submit(4, [1], message.SamplingParams(), 1),
        message.Abort(3),
        message.Flush(),
        message.TokensOut(3, [4, 5]),
        message.TokensOut(3, [4, 5], logprobs=logprobs),
        message.TokensOut(3, [], message.Finish("error", error='a "bad" 请求\n\ud800'), counters=counters),
        message.TokensOut(3, [4], message.Finish("stop", cut=0)),
        message.Fatal("显存不足"),
    ]


def test_every_message_survives_json_unchanged(message: Any) -> None:
    seen = set()
    for m in every_message(message):
        data = json.loads(json.dumps(m.to_dict()))
        before = copy.deepcopy(data)
        back = message.Message.from_dict(data)
        assert back == m
        assert type(back) is type(m)
        assert data == before, "from_dict leaves its argument alone"
        seen.add(type(m).__name__)
    assert seen >= {"Submit", "Abort", "Flush", "TokensOut", "Fatal"}
    assert seen == set(message.KINDS), "a message without an example in this test"


def test_a_message_that_nobody_knows_is_a_key_error(message: Any) -> None:
    with pytest.raises(KeyError):
        message.Message.from_dict({"kind": "Explode"})


def test_params_in_a_message_are_checked_again(message: Any) -> None:
    data = message.Submit(1, [1], message.SamplingParams(), 1).to_dict()
    data["params"]["temperature"] = math.nan
    with pytest.raises(ValueError, match="temperature"):
        message.Message.from_dict(data)


def test_a_message_is_a_snapshot(message: Any) -> None:
    m = message.TokensOut(1, [1, 2])
    data = m.to_dict()
    data["ids"].append(3)
    assert m.ids == [1, 2]


def test_the_token_that_ended_a_request_gives_no_text(message: Any) -> None:
    """An EOS or stop token may be an ordinary word of the vocabulary; a stop string is cut by characters instead."""
    ids = [4, 5]
    assert message.TokensOut(1, ids).text_ids == [4, 5]
    assert message.TokensOut(1, ids, message.Finish("length")).text_ids == [4, 5]
    assert message.TokensOut(1, ids, message.Finish("abort")).text_ids == [4, 5]
    assert message.TokensOut(1, ids, message.Finish("stop", cut=0)).text_ids == [4, 5]
    assert message.TokensOut(1, ids, message.Finish("stop")).text_ids == [4]
    assert ids == [4, 5]
