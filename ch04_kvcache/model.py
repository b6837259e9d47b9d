"""One decoder, driven by the config: Llama, Mistral, Qwen2 and Qwen3 differ in a few flags only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .core import Context
from .layers import GateUpLinear, LMHead, Norm, QKVLinear, RowLinear, TokenEmbedding
from .ops import Ops

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
SCALINGS = {  # kind of rope scaling -> the numbers it needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # of transformers' config classes; llama: all heads


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model, from its config.json."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    tied: bool  # the head is the embedding matrix
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool  # Qwen3: RMSNorm over each query and key head
    rope_theta: float
    rope_scaling: dict[str, Any] | None

    @staticmethod
    def from_dict(config: dict[str, Any]) -> ModelConfig:
        """Raises ValueError for what this decoder does not compute."""
        kind = config.get("model_type")
        if kind not in ("llama", "mistral", "qwen2", "qwen3"):
            raise ValueError(f"model_type {kind!r} is not supported: llama, mistral, qwen2 and qwen3 are")
        if config.get("quantization_config"):
            raise ValueError("quantized checkpoints are not supported: use one in float32, float16 or bfloat16")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported: only silu is")
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if original := config.get("original_max_position_embeddings"):
            rope = {**rope, "original_max_position_embeddings": original}  # it wins, as in transformers
        rope_kind = rope.get("rope_type") or rope.get("type") or "default"
        if rope_kind not in SCALINGS:
            raise ValueError(f"rope scaling {rope_kind!r} is not supported: {', '.join(SCALINGS)} are")
        missing = [key for key in SIZES if not config.get(key)]
        missing += [key for key in SCALINGS[rope_kind] if key not in rope]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads", DEFAULT_KV_HEADS.get(kind)) or heads
        head_dim = config.get("head_dim", 128 if kind == "qwen3" else None) or config["hidden_size"] // heads
        if heads % kv_heads or head_dim % 2:
            raise ValueError(f"{heads} heads do not divide among {kv_heads} KV heads, or head_dim {head_dim} is odd")
        bias = kind in ("llama", "qwen3") and bool(config.get("attention_bias", False))
        return ModelConfig(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=config["vocab_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or kind == "qwen2",
            out_bias=bias,
            mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
            rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
            rope_scaling=None if rope_kind == "default" else {**rope, "rope_type": rope_kind},
        )


def attention_window(config: dict[str, Any]) -> int | None:
    """Tokens that the narrowest layer of the model sees, from its config.json; None: every layer sees all.

    Within that many tokens full attention is exact. Mistral has a window unless its config says null; Qwen only with
    use_sliding_window, and then in the layers from max_window_layers on.
    """
    kind, window = config.get("model_type"), config.get("sliding_window", 4096)
    if kind == "mistral":
        return window
    if kind not in ("qwen2", "qwen3") or not config.get("use_sliding_window"):
        return None
    full = min(config.get("max_window_layers", 28), config["num_hidden_layers"])
    kinds = config.get("layer_types") or ["sliding_attention"] * (config["num_hidden_layers"] - full)
    return window if "sliding_attention" in kinds else None


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """Angle per position, float32[head_dim / 2]; llama3 scaling stretches the long waves (Llama 3.1 model card)."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    freq = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling["rope_type"] == "linear":
        return freq / scaling["factor"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    waves = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)  # turns within the original context
    keep = ((waves - low) / (high - low)).clamp(0, 1)  # 1: short waves stay, 0: long waves are stretched by factor
    return freq * keep + freq / factor * (1 - keep)


def rope_tables(config: ModelConfig, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin[length, 1, head_dim] as ops.rotary wants them: the first half of sin is negative."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), rope_frequencies(config))
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return tables[0].to(like)[:, None], tables[1].to(like)[:, None]


class DecoderLayer:
    """Attention and feed-forward with their norms; ``index`` names its keys and values."""

    def __init__(self, config: ModelConfig, index: int, ops: Ops, like: torch.Tensor) -> None:
        c = config
        self.index, self.ops, self.eps = index, ops, c.norm_eps
        self.input_norm, self.post_norm = Norm(c.hidden, like), Norm(c.hidden, like)
        self.qkv = QKVLinear(c.hidden, c.heads, c.kv_heads, c.head_dim, c.qkv_bias, like)
        self.out = RowLinear(c.heads * c.head_dim, c.hidden, c.out_bias, like)
        self.gate_up = GateUpLinear(c.hidden, c.intermediate, c.mlp_bias, like)
        self.down = RowLinear(c.intermediate, c.hidden, c.mlp_bias, like)
        self.q_norm = Norm(c.head_dim, like) if c.qk_norm else None
        self.k_norm = Norm(c.head_dim, like) if c.qk_norm else None
        self.qk_weight: torch.Tensor | None = None  # [heads + kv_heads, head_dim], both norms in one operation

    def finish(self) -> None:
        for linear in (self.qkv, self.out, self.gate_up, self.down):
            linear.finish(self.ops)
        if self.q_norm and self.k_norm:
            q, k = self.q_norm.weight, self.k_norm.weight
            self.qk_weight = torch.cat([q.expand(self.qkv.heads, -1), k.expand(self.qkv.kv_heads, -1)])

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x[T, hidden] is what the last block added, residual[T, hidden] the sum before it (None at the first)."""
        x, residual = self.ops.rms_norm(x, self.input_norm.weight, self.eps, residual)
        x, residual = self.ops.rms_norm(self._attend(x, cos, sin, ctx), self.post_norm.weight, self.eps, residual)
        return self.down(self.ops.silu_and_mul(self.gate_up(x))), residual

    def _attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, ctx: Context) -> torch.Tensor:
        qk, v = self.qkv.split(self.qkv(x))
        if self.qk_weight is not None:
            qk, _ = self.ops.rms_norm(qk, self.qk_weight, self.eps)
        qk = self.ops.rotary(qk, cos, sin)
        q, k = qk[:, : self.qkv.heads], qk[:, self.qkv.heads :]
        return self.out(ctx.backend.attend(q, k, v, self.index, ctx.plan).flatten(1))


class Decoder:
    """Token ids to logits. Holds weights only: what a step shares comes in the Context."""

    def __init__(self, config: ModelConfig, max_len: int, ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.ops = config, ops
        like = torch.empty(0, device=device, dtype=dtype)
        self.embedding = TokenEmbedding(config.vocab, config.hidden, like)
        self.layers = [DecoderLayer(config, i, ops, like) for i in range(config.layers)]
        self.norm = Norm(config.hidden, like)
        self.head = LMHead(config.hidden, config.vocab, like)
        self.cos, self.sin = rope_tables(config, max_len, like)

    @property
    def kv_heads(self) -> int:
        return self.layers[0].qkv.kv_heads

    def targets(self) -> dict[str, list[Callable[[Any], None]]]:
        """Checkpoint tensor name -> the load functions that take it."""
        head = partial(self.head.load, "out", "weight")
        targets: dict[str, list[Callable[[Any], None]]] = {
            "model.embed_tokens.weight": [self.embedding.load, *[head] * self.config.tied],
            "model.norm.weight": [self.norm.load],
        }
        if not self.config.tied:
            targets["lm_head.weight"] = [head]
        for layer in self.layers:
            prefix = f"model.layers.{layer.index}."
            targets[prefix + "input_layernorm.weight"] = [layer.input_norm.load]
            targets[prefix + "post_attention_layernorm.weight"] = [layer.post_norm.load]
            linears = {
                "self_attn.q_proj": (layer.qkv, "q"), "self_attn.k_proj": (layer.qkv, "k"),
                "self_attn.v_proj": (layer.qkv, "v"), "self_attn.o_proj": (layer.out, "out"),
                "mlp.gate_proj": (layer.gate_up, "gate"), "mlp.up_proj": (layer.gate_up, "up"),
                "mlp.down_proj": (layer.down, "out"),
            }  # fmt: skip
            for name, (linear, part) in linears.items():
                for kind in ("weight", "bias") if linear.bias is not None else ("weight",):
                    targets[f"{prefix}{name}.{kind}"] = [partial(linear.load, part, kind)]
            if layer.q_norm and layer.k_norm:
                targets[prefix + "self_attn.q_norm.weight"] = [layer.q_norm.load]
                targets[prefix + "self_attn.k_norm.weight"] = [layer.k_norm.load]
        return targets

    def finish(self) -> None:
        """Make every layer ready after the last load()."""
        for layer in self.layers:
            layer.finish()
        self.head.finish(self.ops)

    def forward(self, ctx: Context) -> torch.Tensor:
        """Logits[R, vocab] of the tokens ctx.inp.logit_rows."""
        inp = ctx.inp
        x, residual = self.embedding(inp.ids), None
        cos, sin = self.cos[inp.positions], self.sin[inp.positions]
        for layer in self.layers:
            x, residual = layer.forward(x, residual, cos, sin, ctx)
        assert residual is not None
        x, _ = self.ops.rms_norm(x[inp.logit_rows], self.norm.weight, self.config.norm_eps, residual[inp.logit_rows])
        return self.head(x)
