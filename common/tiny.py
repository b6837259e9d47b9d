"""Small random models and a small real tokenizer, for tests and for `dummy:*-tiny`.

The tokenizer is a byte-level BPE of exactly 1,003 entries, trained once on a page of English, Chinese and code and
committed: every byte is an entry, common Chinese characters are one token, and emoji and rare characters are several,
so that text arrives in the middle of characters.
"""

import json
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.cache import CheckpointError, build_once, cache_dir

if TYPE_CHECKING:
    import torch

DATA = Path(__file__).parent / "data"
EOS_IDS = (2, 0)  # <|im_end|>, <|endoftext|>
BOS_ID = 3  # <s>
VERSION = 1  # of the models that cached_tiny_model builds
STD = 0.35  # of the weights: greedy output wanders over the vocabulary and attention is far from uniform

_ROPE = {"rope_theta": 10_000.0, "rope_scaling": None}
# Trained for 64 positions and stretched by 8: some frequencies are kept, some blended and some divided.
_LLAMA3_ROPE = {
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
_BASE: dict[str, Any] = {
    "vocab_size": 1003,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,  # heads × head_dim differs from hidden_size
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "initializer_range": STD,
    "bos_token_id": None,
    "eos_token_id": EOS_IDS[0],
    "tie_word_embeddings": False,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | _ROPE,
    "llama3rope": _LLAMA | _LLAMA3_ROPE | {"tie_word_embeddings": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True} | _ROPE,
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "rms_norm_eps": 1e-6}
    | _ROPE,
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None} | _ROPE,
}


def tiny_config(arch: str, **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny model; overrides are its keys. Raises CheckpointError for an unknown architecture.

    transformers wants hidden_size to be a multiple of num_attention_heads: 6 heads go with hidden_size 96.
    """
    if arch not in ARCHITECTURES:
        raise CheckpointError(f"no tiny architecture {arch!r}; there are {', '.join(ARCHITECTURES)}")
    return {**_BASE, **ARCHITECTURES[arch], **overrides}


def write_tokenizer(folder: Path, *, add_bos: bool = False) -> None:
    """Write tokenizer.json and tokenizer_config.json (with a ChatML template) into a folder.

    With add_bos, encoding with special tokens puts <s> in front, as Llama's tokenizers do.
    """
    shutil.copyfile(DATA / "tokenizer_config.json", folder / "tokenizer_config.json")
    if not add_bos:
        shutil.copyfile(DATA / "tiny_tokenizer.json", folder / "tokenizer.json")
        return
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(DATA / "tiny_tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS_ID)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def seeded(*key: object) -> "torch.Generator":
    """CPU generator that depends on every part of the key; torch itself looks at 32 bits of a seed only."""
    import torch

    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def tiny_model(arch: str, folder: Path | str, *, seed: int = 0, **overrides: Any) -> Path:
    """Make a random model with transformers and save it into `folder`: float32 safetensors and the tiny tokenizer.

    Linears and embeddings are normal with the config's initializer_range, biases too, norm weights vary around 1, so
    that a forgotten bias or norm weight changes the output. Equal arguments give equal weights. Returns the folder.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(arch, **overrides)
    # Through a file, as a user's model comes: transformers reads the same config.json that the engine reads.
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A generator for each name: the values do not depend on the order in which transformers keeps them.
            values = torch.randn(parameter.shape, generator=seeded(seed, arch, name))
            is_norm = name.endswith("norm.weight")
            parameter.copy_(1 + 0.2 * values if is_norm else config["initializer_range"] * values)
    model.generation_config = GenerationConfig(eos_token_id=list(EOS_IDS), pad_token_id=EOS_IDS[1])
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def cached_tiny_model(arch: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Like tiny_model, in the cache folder and built once; for tests that only read it."""
    key = json.dumps([seed, tiny_config(arch, **overrides)], sort_keys=True)
    folder = cache_dir() / "tiny" / f"{arch}-{zlib.crc32(key.encode()):08x}"
    return build_once(folder, lambda target: tiny_model(arch, target, seed=seed, **overrides), VERSION)
