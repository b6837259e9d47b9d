"""Tokenizers as models bring them, and texts and ids that make decoding hard.

Two tokenizers are byte-level: a token can end inside a character. Two have byte fallback, as Llama 2: a run of byte
tokens is decoded as a whole, and a wrong last byte breaks the characters before it.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from common.checkpoints import resolve
from common.tiny import write_tokenizer

BROKEN = "\ufffd"
BYTE_LEVEL = ("tiny", "smollm2")
FALLBACK = ("replace", "metaspace")
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
THOROUGH = settings(QUICK, max_examples=2000)
PIECES = [
    *"你好请解释什么是缓存，。？ 中国𠮷",
    *("KV Cache", " the", " a", "hello", "\n", "  ", "def f(x):", "42", "'s", ".", "!", "▁", "<s>", "<|im_end|>"),
    *("😀", "👩‍👩‍👧‍👦", "👍🏽", "🇨🇳", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "❤️", "e\u0301", "o\u0308\u0323", "क्षि", "한", "ﷺ", "\u200b", "\ufffd"),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)
chunk_sizes = st.lists(st.integers(1, 4), max_size=40)
_home = tempfile.TemporaryDirectory()


@functools.cache
def folder_of(kind: str) -> Path:
    """A folder with this tokenizer; all of them but smollm2 put a BOS in front of strings."""
    if kind == "smollm2":
        return resolve("smollm2-135m").folder
    folder = Path(_home.name) / kind
    folder.mkdir()
    if kind == "tiny":
        write_tokenizer(folder, add_bos=True)
    else:
        write_fallback_tokenizer(folder, kind)
    return folder


@functools.cache
def load(module: Any, kind: str) -> Any:
    """The tokenizer as this chapter's tokenizer.py opens it."""
    return module.Tokenizer(folder_of(kind))


def write_fallback_tokenizer(folder: Path, kind: str) -> None:
    """Pieces with ▁ for a space, byte tokens for what has no piece, <s> in front, a template that writes its own <s>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefhinost.,请解释什么是"]
    vocab = {name: at for at, name in enumerate(names)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("▁", "▁"), ("什", "么"), ("s", "t"), ("st", "o")]
    vocab |= {a + b: len(vocab) + at for at, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = {
        "replace": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
        "metaspace": [decoders.ByteFallback(), decoders.Metaspace()],
    }
    tokenizer.decoder = decoders.Sequence(steps[kind])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))


@functools.cache
def id_lists(tokenizer: Any, max_size: int = 16) -> st.SearchStrategy[list[int]]:
    """Ids as no text gives them: characters torn apart, special tokens anywhere, ids that the tokenizer lacks."""
    size = tokenizer._fast.get_vocab_size()
    raw = [i for i in range(min(size, 3000)) if BROKEN in tokenizer.decode([i])]
    special = [i for i in range(20) if tokenizer.decode([i]) == ""]
    torn = [i for text in ("中", "😀", "é") for i in tokenizer.encode(text, special_tokens=False)]
    some = st.sampled_from(raw) | st.sampled_from(torn) | st.sampled_from(special or [0])
    return st.lists(some | st.integers(0, size + 5), max_size=max_size)


def chunks(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """The ids in chunks of these sizes, the rest one by one."""
    at = 0
    for n in [*sizes, *[1] * len(ids)]:
        if at < len(ids):
            yield list(ids[at : at + n])
            at += n


def deltas(detokenizer: Any, ids: Sequence[int], sizes: Sequence[int] = ()) -> list[str]:
    """What push gives for each chunk, and flush at the end."""
    return [*(detokenizer.push(chunk) for chunk in chunks(ids, sizes)), detokenizer.flush()]


def assert_adds_up(out: list[str], full: str) -> None:
    """Every moment's text is a prefix of the full decode: nothing is taken back, no character is shown half."""
    so_far = ""
    for delta in out:
        so_far += delta
        assert full.startswith(so_far), f"{so_far!r} was handed out but the decode is {full!r}"
    assert so_far == full
