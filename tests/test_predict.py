"""The counters in the READMEs' boxes are those of the code, and what the texts around them say of them is true."""

import json
from typing import Any

import pytest

from common import predict

STORED: dict[str, Any] = json.loads((predict.ROOT / "docs/results/predict.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", predict.PREDICTIONS)
def test_the_stored_counters_are_those_of_the_code(name: str) -> None:
    assert STORED[name] == predict.predictions(name)


def test_every_chapter_is_stored_and_nothing_else() -> None:
    assert set(STORED) - {"command"} == set(predict.PREDICTIONS)


def test_what_the_boxes_say() -> None:
    """The arithmetic that the folded answers do with these numbers."""
    assert STORED["ch02"]["forwarded_tokens_16"] == sum(range(16, 32)) == 376
    assert STORED["ch02"]["answer"].endswith(STORED["ch02"]["continued"])
    assert STORED["ch03"]["differ_between_runs"] == 0 < STORED["ch03"]["differ_within_a_run"]
    assert STORED["ch04"]["ch03_1"] == STORED["ch04"]["ch04_1"] == 16
    assert STORED["ch05"]["prefill_tokens"] == 4 * STORED["ch05"]["prompt_tokens"]
    assert STORED["ch06"]["steps_to_first_token"] == 2000 / (96 - 16)
    assert STORED["ch07"]["six_pages"] - STORED["ch07"]["plenty"] == 12
    assert STORED["ch07"]["offline_tokens"] < STORED["ch07"]["pool"] and not STORED["ch07"]["offline_preemptions"]
    assert STORED["ch08"]["hit_16"] == STORED["ch08"]["hit_512_first"] == 0


def test_an_unknown_chapter_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="choose from"):
        predict.predictions("ch99")
