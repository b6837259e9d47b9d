"""The checkpoint of a Llama model as a GGUF file of 16 or 32 bits, for peers that read nothing else:

python -m common.gguf_export smollm2-135m model.gguf --type bf16
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import cli
from common.cache import build_once, cache_dir
from common.checkpoints import CheckpointError, TensorSource, resolve

TYPES = ("f16", "bf16", "f32")
VERSION = 1
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def exported(folder: Path, kind: str = "f16") -> Path:
    """The GGUF file of a checkpoint folder, written into the cache the first time. Raises CheckpointError."""
    target = cache_dir() / "gguf" / f"{folder.name}-{kind}"
    build_once(target, lambda into: export(str(folder), into / "model.gguf", kind), VERSION)
    return target / "model.gguf"


def export(model: str, path: Path, kind: str = "f16") -> None:
    """Write the file. Raises CheckpointError for a model that is no plain Llama with a byte-level BPE tokenizer."""
    import gguf

    checkpoint = resolve(model)
    config = checkpoint.config
    vocabulary = json.loads((checkpoint.folder / "tokenizer.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "llama" or vocabulary["model"]["type"] != "BPE" or config.get("attention_bias"):
        raise CheckpointError(
            f"{checkpoint.name}: only a plain Llama model with a BPE tokenizer can be written as GGUF"
        )
    writer = gguf.GGUFWriter(str(path), "llama")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    writer.add_name(checkpoint.name)
    writer.add_context_length(checkpoint.max_len)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(config.get("head_dim") or hidden // heads)
    writer.add_vocab_size(checkpoint.vocab_size)
    writer.add_file_type({"f32": 0, "f16": 1, "bf16": 32}[kind])
    _add_vocabulary(writer, vocabulary, checkpoint)
    with checkpoint.open() as source:
        _add_tensors(writer, source, config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, data: dict[str, Any], checkpoint: Any) -> None:
    import gguf

    tokens = dict(data["model"]["vocab"])
    special = {token["content"]: token["id"] for token in data.get("added_tokens", ()) if token["special"]}
    by_id = {place: token for token, place in (tokens | special).items()}
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    ids = range(checkpoint.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([by_id.get(i, f"[PAD{i}]") for i in ids])
    writer.add_token_types([kinds[by_id.get(i) in special] if i in by_id else gguf.TokenType.UNUSED for i in ids])
    pairs = data["model"]["merges"]
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in pairs])
    for name, add in (("bos", writer.add_bos_token_id), ("pad", writer.add_pad_token_id)):
        if isinstance(found := checkpoint.config.get(f"{name}_token_id"), int):
            add(found)
    if checkpoint.eos_ids:
        writer.add_eos_token_id(checkpoint.eos_ids[0])
    settings = checkpoint.folder / "tokenizer_config.json"
    template = json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if settings.is_file() else None
    separate = checkpoint.folder / "chat_template.jinja"
    if template or separate.is_file():
        writer.add_chat_template(template or separate.read_text(encoding="utf-8"))


def _add_tensors(writer: Any, source: TensorSource, config: dict[str, Any], kind: str) -> None:
    """Matrices in `kind`, norms in float32, as readers of the format expect."""
    import gguf
    import torch

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config.get("num_key_value_heads")}
    for name in source.names():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        tensor, target = source.slice(name)[...].float(), _target(name)
        if count := heads.get(target.split(".")[-2]):
            tensor = _interleaved(tensor, count)
        if tensor.ndim == 1 or kind == "f32":
            writer.add_tensor(target, tensor.numpy())
        elif kind == "f16":
            writer.add_tensor(target, tensor.half().numpy())
        else:
            raw = tensor.to(torch.bfloat16).view(torch.uint8).numpy()
            writer.add_tensor(target, raw, raw_shape=raw.shape, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _target(name: str) -> str:
    base = name.removesuffix(".weight")
    if base in OUTER:
        return f"{OUTER[base]}.weight"
    parts = base.split(".", 3)  # model.layers.N.what
    if parts[:2] != ["model", "layers"] or parts[3] not in NAMES:
        raise CheckpointError(f"no place for the tensor {name} in a GGUF file")
    return f"blk.{parts[2]}.{NAMES[parts[3]]}.weight"


def _interleaved(weight: Any, heads: int) -> Any:
    """Rows of each head from [first half, second half], what rotary embedding pairs here, to pairs side by side."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def main() -> int:
    parser = cli.parser("common.gguf_export", "Write a Llama model as a GGUF file, for peers.")
    parser.add_argument("model", help="local folder, Hub id or preset")
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--type", default="bf16", choices=TYPES, help="of the matrices (default: bf16)")
    args = parser.parse_args()
    export(args.model, args.path, args.type)
    print(f"wrote {args.path}")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
