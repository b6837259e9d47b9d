"""Presets `dummy:NAME`: an architecture with seeded random weights that are made when they are read, never stored."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.cache import CheckpointError, build_once, cache_dir
from common.tiny import ARCHITECTURES, EOS_IDS, seeded, tiny_config, write_tokenizer

if TYPE_CHECKING:
    import torch

MARKER = "dummy.json"
VERSION = 1  # of the folder's files
POOL = 4_194_301  # a prime: no row of a large matrix starts where an earlier one did


def _sizes(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
}
_LLAMA31 = _LLAMA | {"rope_theta": 500_000.0, "max_position_embeddings": 131072}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "use_sliding_window": False,
}
_SMOLLM2 = _LLAMA | {"rope_theta": 100_000.0, "max_position_embeddings": 8192, "rope_scaling": None}
# The sizes that the models' own config.json give, in the spelling that most published files still use
# (rope_theta and rope_scaling at the top level); models saved by transformers 5 have rope_parameters instead.
SIZES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _SMOLLM2 | _sizes(576, 30, 9, 3, 1536, 49152, tied=True),
    "llama-3.1-8b": _LLAMA31
    | {"rope_scaling": _LLAMA3 | {"factor": 8.0}}
    | _sizes(4096, 32, 32, 8, 14336, 128256, tied=False),
    "llama-3.2-1b": _LLAMA31
    | {"rope_scaling": _LLAMA3 | {"factor": 32.0}, "head_dim": 64}
    | _sizes(2048, 16, 32, 8, 8192, 128256, tied=True),
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 28, 16, 8, 3072, 151936, tied=True),
    "qwen3-14b": _QWEN3 | _sizes(5120, 40, 40, 8, 17408, 151936, tied=False),
}
TINY = {f"{arch}-tiny": arch for arch in ARCHITECTURES}
NAMES = (*TINY, *SIZES)


def dummy_config(name: str) -> dict[str, Any]:
    """config.json of a dummy preset. Raises CheckpointError for an unknown name."""
    if name not in NAMES:
        raise CheckpointError(f"no preset dummy:{name}; there are {', '.join('dummy:' + known for known in NAMES)}")
    config = tiny_config(TINY[name]) if name in TINY else SIZES[name]
    shared = {"hidden_act": "silu", "bos_token_id": None, "eos_token_id": EOS_IDS[0], "torch_dtype": "bfloat16"}
    return {**config, **shared}


def dummy_folder(name: str) -> Path:
    """Folder of a dummy preset in the cache: config, tiny tokenizer and a marker in place of weights."""
    config = dummy_config(name)

    def build(target: Path) -> None:
        write_tokenizer(target)
        files = {"config.json": config, "generation_config.json": {"eos_token_id": list(EOS_IDS)}}
        for file, data in {**files, MARKER: {"seed": 0, "std": 1.0}}.items():
            (target / file).write_text(json.dumps(data, indent=2))

    return build_once(cache_dir() / "dummy" / name, build, VERSION)


def is_dummy(folder: Path) -> bool:
    """Whether the weights of the folder are made, not read."""
    return (folder / MARKER).is_file()


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a checkpoint of this config, as transformers writes it.

    Llama, Qwen2, Qwen3 and Mistral; a linear's weight is [out, in]. With tied embeddings there is no lm_head.weight.
    """
    kind, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, kv_heads * head_dim
    qkv_bias = kind == "qwen2" or bool(config.get("attention_bias"))
    norms = ("input_layernorm", "post_attention_layernorm")
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
    for proj, size in (("q", q), ("k", kv), ("v", kv)):
        layer[f"self_attn.{proj}_proj.weight"] = (size, hidden)
        if qkv_bias:
            layer[f"self_attn.{proj}_proj.bias"] = (size,)
        if kind == "qwen3" and proj != "v":
            layer[f"self_attn.{proj}_norm.weight"] = (head_dim,)
    layer["self_attn.o_proj.weight"] = (hidden, q)
    if qkv_bias and kind != "qwen2":
        layer["self_attn.o_proj.bias"] = (hidden,)
    for proj, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        layer[f"mlp.{proj}_proj.weight"] = shape
        if config.get("mlp_bias"):
            layer[f"mlp.{proj}_proj.bias"] = shape[:1]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_tensor(name: str, shape: tuple[int, ...], seed: int, std: float) -> "torch.Tensor":
    """bfloat16 values that depend on (name, shape, seed, std) only: norms are ones, biases std 0.1 × std, weights
    std / sqrt(fan_in), so that activations keep their size through the layers.

    Beyond POOL values the sequence repeats: billions of fresh normal values would take minutes, and no two rows are
    equal.
    """
    import torch

    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    count = math.prod(shape)
    scale = 0.1 * std if name.endswith(".bias") else std / shape[-1] ** 0.5
    pool = (torch.randn(min(count, POOL), generator=seeded(seed, name)) * scale).to(torch.bfloat16)
    return pool.repeat(-(-count // POOL))[:count].view(shape)


class DummySource:
    """Random tensors of a dummy folder; each is made when it is read and not kept."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        marker = json.loads((folder / MARKER).read_text())
        self.seed, self.std = int(marker["seed"]), float(marker["std"])
        self.folder = folder
        self.shapes = tensor_shapes(config)

    def names(self) -> list[str]:
        return sorted(self.shapes)

    def slice(self, name: str) -> "DummySlice":
        if name not in self.shapes:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        return DummySlice(name, self.shapes[name], self.seed, self.std)


class DummySlice:
    """One random tensor; a part of it equals the same part of the whole, which is made and dropped each time."""

    def __init__(self, name: str, shape: tuple[int, ...], seed: int, std: float) -> None:
        self.name, self.shape, self.seed, self.std = name, shape, seed, std

    def __getitem__(self, index: Any) -> "torch.Tensor":
        whole = random_tensor(self.name, self.shape, self.seed, self.std)
        part = whole[index]
        return part if part.numel() == whole.numel() else part.clone()  # a view would keep the whole alive
