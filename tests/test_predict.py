"""The counters in the READMEs' boxes are those of the code, and what the texts around them say of them is true."""

import json
import re
from typing import Any

import pytest

from common import predict
from tests.conftest import CHAPTERS

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
    assert STORED["ch09"]["bytes_tp1"] == 0 < STORED["ch09"]["bytes_tp2"] == STORED["ch09"]["bytes_tp4"]
    ten = STORED["ch10"]
    assert ten["tokens_right"] == ten["tokens_without"] < ten["tokens_wrong"]
    assert ten["steps_wrong"] == ten["steps_without"] > ten["steps_right"] and ten["guesses_64"] == 0


def test_an_unknown_chapter_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="choose from"):
        predict.predictions("ch99")


# ---- the boxes and exercises themselves

HEADINGS = {
    "README.md": ("\n## Predict before you run\n", "\n## Measurement\n", "\n## Exercises\n"),
    "README.zh.md": ("\n## 先猜，再运行\n", "\n## 度量\n", "\n## 练习\n"),
}


def sections(chapter: str, file: str) -> tuple[str, str]:
    """The text of the boxes and that of the exercises."""
    predict_, measure, exercises = HEADINGS[file]
    text = (predict.ROOT / chapter / file).read_text(encoding="utf-8")
    return text[text.index(predict_) : text.index(measure)], text[text.index(exercises) :]


def commands(text: str) -> list[str]:
    """Lines between ```bash fences, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [line.split("  #")[0].rstrip() for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_chapter_has_two_boxes_and_three_exercises_in_both_languages(chapter: str) -> None:
    for file in HEADINGS:
        boxes, exercises = sections(chapter, file)
        for text, count in ((boxes, 2), (exercises, 3)):
            assert text.count("<details>") == text.count("</details>") == text.count("```bash") == count
    english, chinese = (commands("".join(sections(chapter, file))) for file in HEADINGS)
    assert english == chinese


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_tests_that_an_exercise_names_exist(chapter: str) -> None:
    for file in HEADINGS:
        _, text = sections(chapter, file)
        called = set(re.findall(r"tests/\w+\.py", text))
        assert called
        source = "".join((predict.ROOT / path).read_text(encoding="utf-8") for path in called)
        for name in re.findall(r"`(test_\w+)`", text):
            assert f"def {name}(" in source, f"{name} is in none of {sorted(called)}"
