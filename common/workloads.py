"""Benchmark workloads as data: the same requests for every chapter and every peer, derived from a name and a seed.

Ids are drawn with `random.Random(str)`, whose `random()` is specified to be stable across Python versions and does not
depend on PYTHONHASHSEED; `randrange` carries no such promise and is not used. Growing `scale` appends requests and
never changes the ones before them, so a quick run measures a prefix of the full one.
"""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

SHARED_PREFIX, SYSTEM_PROMPT = 512, 128


@dataclass(frozen=True)
class Request:
    """One request: exactly `max_tokens` tokens are wanted, whatever the model says (greedy, EOS ignored).

    `arrival_s` is in seconds after the start of the workload. `text`, a user's chat message, stands in for `prompt_ids`
    where content matters; `encode_texts` turns it into ids.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    arrival_s: float = 0.0
    text: str | None = None

    def __post_init__(self) -> None:
        if bool(self.prompt_ids) == (self.text is not None):
            raise ValueError("a workload request has either prompt_ids or text")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")


@dataclass(frozen=True)
class Turn:
    """What the user adds in one turn, and how many tokens the answer has."""

    user_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Conversation:
    """Turns of one user; turn k, with `prompt(k, answers)`, is sent when the answer of turn k-1 is complete."""

    system_ids: tuple[int, ...]
    turns: tuple[Turn, ...]

    def prompt(self, k: int, answers: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Ids of turn k (from 0): the whole history, with the answers the engine really gave to the k turns before."""
        ids = list(self.system_ids)
        for turn, answer in zip(self.turns[:k], answers[:k], strict=True):
            ids += [*turn.user_ids, *answer]
        return (*ids, *self.turns[k].user_ids)

    def prompt_lengths(self) -> list[int]:
        """Lengths of the prompts in tokens; answers have exact lengths, so they are known beforehand."""
        lengths, history = [], len(self.system_ids)
        for turn in self.turns:
            lengths.append(history + len(turn.user_ids))
            history = lengths[-1] + turn.max_tokens
        return lengths


@dataclass(frozen=True)
class Workload:
    """Independent requests, conversations, or both."""

    name: str
    requests: tuple[Request, ...]
    description: str
    conversations: tuple[Conversation, ...] = field(default=())

    @property
    def size(self) -> int:
        """Requests in all, each turn of a conversation being one."""
        return len(self.requests) + sum(len(c.turns) for c in self.conversations)

    @property
    def output_tokens(self) -> int:
        """Tokens that a correct run generates."""
        turns = sum(turn.max_tokens for c in self.conversations for turn in c.turns)
        return turns + sum(r.max_tokens for r in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests, the history of each turn included. Texts must have been encoded."""
        return sum(self.prompt_lengths())

    def prompt_lengths(self) -> list[int]:
        """Prompt length of each request in tokens. Raises ValueError while a request is still text."""
        if any(r.text is not None for r in self.requests):
            raise ValueError(f"workload {self.name!r} holds text: encode_texts() first")
        own = [len(r.prompt_ids) for r in self.requests]
        return own + [length for c in self.conversations for length in c.prompt_lengths()]

    @property
    def distinct_prompt_tokens(self) -> int:
        """Prompt tokens left to compute if every prefix is computed once: the nodes of a trie over all prompts.

        Answers are not counted: they are computed while they are generated.
        """
        self.prompt_lengths()
        streams = [r.prompt_ids for r in self.requests]
        streams += [c.system_ids + tuple(i for t in c.turns for i in t.user_ids) for c in self.conversations]
        streams.sort()
        shared = sum(_common_prefix(a, b) for a, b in pairwise(streams))
        return sum(map(len, streams)) - shared

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` is its inverse."""
        talks = [
            {"system_ids": list(c.system_ids), "turns": [[list(t.user_ids), t.max_tokens] for t in c.turns]}
            for c in self.conversations
        ]
        requests = [[list(r.prompt_ids), r.max_tokens, r.arrival_s, r.text] for r in self.requests]
        return {"name": self.name, "description": self.description, "requests": requests, "conversations": talks}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Workload":
        """Inverse of `to_dict`; raises KeyError, TypeError or ValueError on data of another form."""
        requests = tuple(Request(tuple(ids), *rest) for ids, *rest in data["requests"])
        talks = tuple(
            Conversation(tuple(c["system_ids"]), tuple(Turn(tuple(ids), n) for ids, n in c["turns"]))
            for c in data["conversations"]
        )
        return cls(data["name"], requests, data["description"], talks)


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def id_range(vocab_size: int) -> tuple[int, int]:
    """Half-open range of ids that are ordinary tokens: 1000 to 40000 of 49152, in proportion for smaller vocabularies.

    Special tokens sit at either end of a vocabulary, so both ends are left out. Raises ValueError below 16 ids.
    """
    if vocab_size < 16:
        raise ValueError(f"a vocabulary of {vocab_size} ids is too small for a workload")
    lo = min(1000, vocab_size * 1000 // 49152)
    return max(lo, min(8, vocab_size // 4)), min(40000, vocab_size * 40000 // 49152)


@dataclass(frozen=True)
class _Draw:
    """Random numbers of one workload."""

    rng: random.Random
    lo: int
    hi: int
    length_scale: float

    def uniform(self, lo: int, hi: int) -> int:
        """Uniform in [lo, hi], both included."""
        return lo + int(self.rng.random() * (hi - lo + 1))

    def length(self, lo: int, hi: int | None = None) -> int:
        """A length in tokens, uniform in [lo, hi] times the length scale, at least 1."""
        wanted = lo if hi is None else self.uniform(lo, hi)
        return max(1, round(wanted * self.length_scale))

    def ids(self, count: int) -> tuple[int, ...]:
        """`count` ordinary token ids."""
        return tuple(self.uniform(self.lo, self.hi - 1) for _ in range(count))


def _latency(draw: _Draw, scale: float) -> Workload:
    requests = tuple(Request(draw.ids(draw.length(128)), draw.length(128)) for _ in range(_count(1, scale)))
    return Workload("latency", requests, f"{_requests(len(requests))}, 128 tokens in, 128 out")


def _offline(draw: _Draw, scale: float) -> Workload:
    requests = tuple(Request(draw.ids(draw.length(16, 256)), draw.length(16, 128)) for _ in range(_count(64, scale)))
    return Workload("offline", requests, f"{_requests(len(requests))} at once, 16-256 tokens in, 16-128 out")


def _shared_prefix(draw: _Draw, scale: float) -> Workload:
    prefix = draw.ids(draw.length(SHARED_PREFIX))
    requests = tuple(Request(prefix + draw.ids(draw.length(32)), draw.length(16)) for _ in range(_count(32, scale)))
    text = f"{_requests(len(requests))} at once, 512 shared and 32 own tokens in, 16 out"
    return Workload("shared_prefix", requests, text)


def _online(draw: _Draw, scale: float, rate: float = 2.0) -> Workload:
    requests, clock = [], 0.0
    for _ in range(_count(40, scale)):
        requests.append(Request(draw.ids(draw.length(64, 192)), draw.length(32, 64), clock))
        clock += -math.log(1.0 - draw.rng.random()) / rate
    text = f"{_requests(len(requests))}{arrivals(rate)}, 64-192 tokens in, 32-64 out"
    return Workload("online", tuple(requests), text)


def _multi_turn(draw: _Draw, scale: float) -> Workload:
    system = draw.ids(draw.length(SYSTEM_PROMPT))
    talks = []
    for _ in range(_count(8, scale)):
        turns = tuple(Turn(draw.ids(draw.length(32, 96)), draw.length(32, 64)) for _ in range(5))
        talks.append(Conversation(system, turns))
    text = f"{len(talks)} conversations at once, 5 turns each, 128 shared system tokens, 32-96 tokens in and 32-64 out per turn"
    return Workload("multi_turn", (), text, tuple(talks))


def _edit(draw: _Draw, scale: float) -> Workload:
    requests = []
    for i in range(_count(8, scale)):
        code, old, fresh = SNIPPETS[i % len(SNIPPETS)]
        name = fresh[i // len(SNIPPETS) % len(fresh)]
        text = (
            f"Rewrite this function, changing only the name `{old}` to `{name}` and keeping every other line as it is. "
            f"Answer with the code only.\n\n```python\n{code}```"
        )
        # About as many tokens as the code has, so that little is generated beyond the copy.
        requests.append(Request((), draw.length(max(16, len(code) // 32 * 8)), text=text))
    text = f"{_requests(len(requests))} at once, each asks for a function back with one name changed"
    return Workload("edit", tuple(requests), text)


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count != 1)}"


def arrivals(rate: float) -> str:
    """The part of a description that says when requests come."""
    return f", Poisson arrivals at {rate:g}/s"


def without_arrivals(description: str) -> str:
    """The description for a load that sends the requests when it likes."""
    return re.sub(r", Poisson arrivals at [^,;]+", "", description)


def _count(base: int, scale: float) -> int:
    return max(1, round(base * scale))


BUILDERS: dict[str, Callable[[_Draw, float], Workload]] = {
    "latency": _latency,
    "offline": _offline,
    "shared_prefix": _shared_prefix,
    "online": _online,
    "multi_turn": _multi_turn,
    "edit": _edit,
}


def get(
    name: str, vocab_size: int = 49152, scale: float = 1.0, seed: int = 0, *, length_scale: float = 1.0
) -> Workload:
    """The workload `name` (a key of `BUILDERS`), equal in every process that asks with equal arguments.

    `scale` multiplies the number of requests (at least 1 stays) and leaves each of them as it is; `length_scale`
    multiplies all lengths in tokens, for models with a short context. ValueError on an unknown name or a bad scale.
    """
    if name not in BUILDERS:
        raise ValueError(f"unknown workload {name!r}, choose from {', '.join(BUILDERS)}")
    if not (0 < scale < math.inf and 0 < length_scale < math.inf):
        raise ValueError(f"scale and length_scale must be positive, not {scale} and {length_scale}")
    lo, hi = id_range(vocab_size)
    return BUILDERS[name](_Draw(random.Random(f"{name}:{seed}"), lo, hi, length_scale), scale)


def encode_texts(workload: Workload, model: str) -> Workload:
    """The workload with its texts encoded by the model's chat template, one user message each, ready to be answered.

    The tokenizer is transformers' own for every engine, so that all engines get the same ids. Returns the workload
    itself if it holds no text. Raises ValueError where the model has no chat template.
    """
    if all(r.text is None for r in workload.requests):
        return workload
    from transformers import AutoTokenizer

    from common.checkpoints import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve(model).folder)
    if not tokenizer.chat_template:
        raise ValueError(f"workload {workload.name!r} needs a chat model, and {model!r} has no chat template")
    requests = []
    for request in workload.requests:
        if request.text is not None:
            message = [{"role": "user", "content": request.text}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            ids = tokenizer.encode(text, add_special_tokens=False)
            request = replace(request, prompt_ids=tuple(ids), text=None)
        requests.append(request)
    return replace(workload, requests=tuple(requests))


# (code, name to change, names to change it to)
SNIPPETS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "def water_bill(litres, price_per_litre, fee):\n"
        "    amount = litres * price_per_litre\n"
        "    if litres > 5000:\n"
        "        amount = amount * 0.9\n"
        "    amount = amount + fee\n"
        "    return round(amount, 2)\n",
        "amount",
        ("cost", "bill", "price"),
    ),
    (
        "def longest_word(line):\n"
        "    best = ''\n"
        "    for word in line.split():\n"
        "        if len(word) > len(best):\n"
        "            best = word\n"
        "    return best\n",
        "best",
        ("longest", "result", "winner"),
    ),
    (
        "def moving_average(samples, width):\n"
        "    averages = []\n"
        "    for start in range(len(samples) - width + 1):\n"
        "        window = samples[start:start + width]\n"
        "        averages.append(sum(window) / width)\n"
        "    return averages\n",
        "window",
        ("part", "chunk", "block"),
    ),
    (
        "def merge_orders(first, second):\n"
        "    merged = dict(first)\n"
        "    for item, count in second.items():\n"
        "        if item in merged:\n"
        "            merged[item] = merged[item] + count\n"
        "        else:\n"
        "            merged[item] = count\n"
        "    return merged\n",
        "merged",
        ("orders", "total", "basket"),
    ),
    (
        "def seat_name(index, seats_per_row):\n"
        "    row = index // seats_per_row\n"
        "    seat = index % seats_per_row\n"
        "    letter = chr(ord('A') + row)\n"
        "    return letter + str(seat + 1)\n",
        "letter",
        ("mark", "initial", "sign"),
    ),
    (
        "def day_of_year(month, day):\n"
        "    days = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]\n"
        "    passed = 0\n"
        "    for index in range(month - 1):\n"
        "        passed = passed + days[index]\n"
        "    return passed + day\n",
        "passed",
        ("elapsed", "before", "count"),
    ),
)
