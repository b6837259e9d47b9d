"""Text to token ids and back. The engine sees ids only; text exists on the interface side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .core import Req

BROKEN = "\ufffd"  # what a decoder writes for bytes that form no character
OPEN_TOKENS = 3  # of a character that the prompt leaves open: a character has at most four bytes


class Tokenizer:
    """The model's own tokenizer.

    Strings are encoded with special tokens (a BOS where the model has one); chat-template text without, because the
    template writes its own.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, PreTrainedConfig

        try:
            # What names the tokenizer's class. The model's own config class takes a second to import and names no other.
            config, _ = PreTrainedConfig.get_config_dict(folder)
            named = PreTrainedConfig.from_dict({key: config.get(key) for key in ("model_type", "tokenizer_class")})
            self._hf = AutoTokenizer.from_pretrained(folder, config=named, trust_remote_code=False)
            self._fast = self._hf.backend_tokenizer
        except Exception as error:  # of a broken file transformers and tokenizers raise what they stumble over
            raise ValueError(f"cannot read the tokenizer in {folder}: {type(error).__name__}: {error}") from None
        self._fast.no_padding()
        self._fast.no_truncation()
        self._special = {i for i, token in self._fast.get_added_tokens_decoder().items() if token.special}
        fallback = "ByteFallback" in str(self._fast.decoder)
        self._bytes = {self._fast.token_to_id(f"<0x{byte:02X}>") for byte in range(256)} if fallback else set()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    @cached_property
    def longest_token(self) -> int:
        """Characters of text that one token can stand for at most, if the text is not normalized before."""
        return max(map(len, self._fast.get_vocab()))

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Raises ValueError for text that is not Unicode (lone surrogates)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error.reason} at position {error.start}") from None
        # A batch of one: encode() would hold the interpreter lock for the whole text, encode_batch() lets go of it.
        return self._fast.encode_batch([text], add_special_tokens=special_tokens)[0].ids

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """Messages [{role, content}] as the text the model was trained on, ending where the answer begins."""
        if not self.has_chat_template:
            raise ValueError("this model has no chat template: send a plain prompt instead")
        try:
            return str(self._hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates raise whatever they like, jinja2 errors included
            raise ValueError(f"the chat template refused the messages: {error}") from None

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return self.encode(self.render_chat(messages), special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def _before(self) -> list[int]:
        return self.encode("a", special_tokens=False)[-1:]

    def piece(self, token: int) -> str:
        """Text of one token, special ones too, as it stands inside a text: alone some decoders drop its first space."""
        return self.decode([*self._before, token], skip_special_tokens=False)[len(self.decode(self._before)) :]

    def has_text(self, token: int) -> bool:
        """False for special tokens and for ids that only pad the model's vocabulary."""
        return token not in self._special and self._fast.id_to_token(token) is not None

    def is_byte(self, token: int) -> bool:
        """True for a byte token of a tokenizer that decodes a run of them as one, to broken characters if any is broken."""
        return token in self._bytes


class Detokenizer:
    """Incremental text of one request: for any cut of the ids the deltas add up to the decode of them all.

    A character whose bytes are still arriving is held back, and so are a run of byte tokens and a tail that could become
    a stop string; flush() gives what is held at the end. A character that only the output completes is the output's.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # Only a window of ids is decoded again: the run of ids that gave the last text (_context of them; some decoders
        # treat the first token of a text differently) and those whose text may still change. _seen: characters taken.
        self._window: list[int] = []
        self._context = 0
        self._seen = 0
        self.uncertain = ""  # text of the window that further ids may change
        self._held = ""  # decoded, but a prefix of a stop string
        self._sent = 0  # characters handed out
        tails = [list(prompt_ids[-n:]) for n in range(1, OPEN_TOKENS + 1)]
        self._open = tails if tokenizer.decode(tails[-1]).endswith(BROKEN) else []  # where an open character may begin

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids."""
        if not ids:
            return ""
        self._held += self._decode(ids)
        keep = _open_stop(self._held, self._stop)
        return self._hand_out(len(self._held) - keep)

    def flush(self, cut: int | None = None) -> str:
        """The rest of the text; ``cut`` (characters) ends it where a stop string began."""
        self._held += self._decode((), final=True)
        end = len(self._held) if cut is None else max(0, min(len(self._held), cut - self._sent))
        text = self._hand_out(end)
        self._held = ""
        return text

    def _decode(self, ids: Sequence[int], final: bool = False) -> str:
        self._window += filter(self._tokenizer.has_text, ids)
        run = bool(self._window) and self._tokenizer.is_byte(self._window[-1]) and not final
        whole = self._completed_prompt()
        if whole and not run:
            self._window, self._seen, self._open = *whole, []
        text = self._tokenizer.decode(self._window)
        certain = text if final else "" if run else text.rstrip(BROKEN)
        delta = certain[self._seen :]
        if certain:
            self._open = []
        self._seen = max(self._seen, len(certain))
        self.uncertain = self._tokenizer.decode(whole[0])[whole[1] :] if whole and run else text[self._seen :]
        if delta and certain == text:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._seen = len(self._tokenizer.decode(self._window))
        return delta

    def _completed_prompt(self) -> tuple[list[int], int] | None:
        """The window with the prompt's last ids before it, if the output turns them into a character, and where that is."""
        for tail in self._open:
            text = self._tokenizer.decode(tail)
            at = len(text.rstrip(BROKEN))
            if at < len(text) and self._tokenizer.decode(tail + self._window)[at : at + 1] not in ("", BROKEN):
                return tail + self._window, at
        return None

    def _hand_out(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._sent += len(text)
        return text


class StopMatcher:
    """Finds stop strings in the output of one request, across token boundaries; runs where finishing is decided."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stop = tuple(stop)
        self._tail = ""  # the last characters, enough to complete the longest stop string
        self._base = 0  # characters before _tail

    def feed(self, ids: Sequence[int]) -> int | None:
        """The number of characters before the first stop string that these ids complete, or None."""
        self._tail += self._detokenizer.push(ids)
        text = self._tail + self._detokenizer.uncertain.rstrip(BROKEN)  # certain if the request ends here
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if found:
            return self._base + min(found)
        drop = max(0, len(self._tail) - max(map(len, self._stop)) + 1)
        self._tail, self._base = self._tail[drop:], self._base + drop
        return None


def _open_stop(text: str, stop: Sequence[str]) -> int:
    """Length of the longest suffix of text that begins some stop string (or of text from where one is complete)."""
    complete = [text.find(s) for s in stop if s in text]
    if complete:
        return len(text) - min(complete)
    longest = max((min(len(s) - 1, len(text)) for s in stop), default=0)
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)


def stop_matcher(tokenizer: Tokenizer, req: Req) -> StopMatcher | None:
    """The matcher a request needs, if it has stop strings."""
    return StopMatcher(tokenizer, req.token_ids[: req.prompt_len], req.params.stop) if req.params.stop else None
