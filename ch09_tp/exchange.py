"""One call from its first token to its last: its choices are read as they come, named, timed and cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from .frontend import Delta, Frontend, Stream
from .protocol import Answer, ApiError, chat_logprobs, completion_logprobs, usage
from .tokenizer import Detokenizer

OVERTIME = "the request took longer than --request-timeout allows"


@dataclass(slots=True)
class Choice:
    """One answer of a call: a stream, and what has been read from it."""

    index: int
    stream: Stream
    spelled: Detokenizer | None = None  # the text of the tokens whose logprobs were told
    chars: int = 0  # of that text
    begun: bool = False


class Exchange:
    """Reads all choices of one call to their ends, within the time limit; cancel() from anywhere ends it early."""

    def __init__(
        self, frontend: Frontend, choices: list[Choice], answer: Answer, logprobs: bool, timeout_s: float
    ) -> None:
        """timeout_s: 0 for no limit."""
        self.frontend, self.choices, self.answer, self.logprobs = frontend, choices, answer, logprobs
        self.filled = choices[0].stream.filled  # of all of them
        loop = asyncio.get_running_loop()
        self.timer = loop.call_later(timeout_s, self.cancel, "timeout") if timeout_s else None

    def cancel(self, reason: str = "abort") -> None:
        """Abort what is still open; readers see it end. Idempotent."""
        if self.timer:
            self.timer.cancel()
        for choice in self.choices:
            self.frontend.abort(choice.stream, reason)

    async def collect(self) -> dict[str, Any]:
        """The whole answer."""
        texts = ["" for _ in self.choices]
        entries: list[list[dict[str, Any]]] = [[] for _ in self.choices]
        reasons = ["" for _ in self.choices]
        async for choice, delta in self._deltas():
            texts[choice.index] += delta.text
            entries[choice.index] += delta.logprobs
            if delta.finish:
                reasons[choice.index] = delta.finish.reason
        made = [
            self.answer.choice(c.index, texts[c.index], self._logprobs(entries[c.index], c), reasons[c.index])
            for c in self.choices
        ]
        return self.answer.whole(made, self._usage())

    async def events(self, watcher: asyncio.Task[None]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, ending with [DONE], or with an error and no [DONE]."""
        begun = False
        try:
            async for choice, delta in self._deltas():
                begun = True
                if delta.text or delta.finish or delta.logprobs or not choice.begun:
                    yield _event(self._chunk(choice, delta))
            if self.answer.include_usage:
                yield _event(self.answer.last_chunk(self._usage()))
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            if not begun:
                raise
            yield _event(error.body())
        finally:
            watcher.cancel()
            self.cancel()

    async def _deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """What arrives, choice by choice, until all have finished. Raises ApiError for an end that is no answer."""
        waiting = list(self.choices)
        try:
            while waiting:
                await self.filled.wait()
                self.filled.clear()
                for choice in [c for c in waiting if c.stream.pending]:
                    delta = choice.stream.take()
                    if delta.finish:
                        waiting.remove(choice)
                        if delta.finish.reason == "timeout":
                            raise ApiError(504, OVERTIME)
                        if delta.finish.reason in ("error", "abort"):
                            raise ApiError(503, delta.finish.error or "the request was aborted")
                    yield choice, delta
        finally:
            if self.frontend.tracer:
                self.frontend.tracer.emit("Server", "response", self.choices[0].stream.rid)

    def _chunk(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs(delta.logprobs, choice)
        reason = delta.finish.reason if delta.finish else None
        chunk = self.answer.chunk(choice.index, delta.text, logprobs, reason, first=not choice.begun)
        choice.begun = True
        return chunk

    def _logprobs(self, entries: list[dict[str, Any]], choice: Choice) -> Any:
        if not self.logprobs:
            return None
        name = self.frontend.tokenizer.piece
        if self.answer.chat:
            return chat_logprobs(entries, name)
        choice.spelled = choice.spelled or Detokenizer(self.frontend.tokenizer, choice.stream.prompt_ids)
        offsets = []
        for entry in entries:
            offsets.append(choice.chars)
            choice.chars += len(choice.spelled.push([entry["token_id"]]))
        return completion_logprobs(entries, name, offsets)

    def _usage(self) -> dict[str, Any]:
        streams = [c.stream for c in self.choices]
        # A prompt counts once, whatever the number of its choices, with what the first of them did not have to compute.
        prompts = {id(s.prompt_ids): s for s in reversed(streams)}.values()
        cached = sum(s.count("cached_tokens") for s in prompts)
        drafts = [sum(s.count(name) for s in streams) for name in ("draft_tokens", "accepted_tokens")]
        return usage(sum(len(s.prompt_ids) for s in prompts), sum(s.output_tokens for s in streams), cached, *drafts)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
