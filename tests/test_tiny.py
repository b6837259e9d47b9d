"""The tiny tokenizer and the tiny models are small, but hard enough to catch errors."""

import json

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import tiny
from common.checkpoints import CheckpointError, resolve


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINISGL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# Tokenizer


def test_vocabulary_is_1003_and_holds_every_byte(tokenizer):
    assert tokenizer.get_vocab_size() == 1003
    vocabulary = tokenizer.get_vocab()
    assert all(byte in vocabulary for byte in pre_tokenizers.ByteLevel.alphabet())
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
    assert [tokenizer.token_to_id(token) for token in special] == [0, 1, 2, 3]


TEXTS = ["请解释什么是 KV Cache？", "🎉👍🏽🇨🇳 fin", "龘 é\x00\t  x\n", "def f(x):\n    return 12345"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokens_end_in_the_middle_of_rare_characters_and_emoji(tokenizer):
    for character in ("🎉", "🙂", "龘", "齉"):
        ids = tokenizer.encode(character).ids
        assert len(ids) >= 2 and "\ufffd" in tokenizer.decode(ids[:1])
    assert len(tokenizer.encode("我").ids) == 1, "common characters are one token"
    words = "The scheduler decides which requests run in this step."
    assert len(tokenizer.encode(words).ids) < len(words) / 3


@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
def test_transformers_tokenizes_alike_for_every_architecture(arch, tokenizer, tmp_path):
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.tiny_config(arch)))
    text = "Hello,  world 123! 你好 🎉 <|im_end|>"
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer.encode(text).ids


def test_chat_template_is_chatml(tmp_path):
    tiny.write_tokenizer(tmp_path)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    parts = "<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>assistant\n"
    assert text == "".join(parts)


def test_bos_is_added_only_on_request(tokenizer, tmp_path):
    tiny.write_tokenizer(tmp_path, add_bos=True)
    with_bos = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain = tokenizer.encode("Hi").ids
    assert with_bos.encode("Hi").ids == [tiny.BOS_ID, *plain] == AutoTokenizer.from_pretrained(tmp_path)("Hi").input_ids
    assert with_bos.encode("Hi", add_special_tokens=False).ids == plain


# Models


@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
def test_greedy_output_is_diverse_and_decided(arch):
    """A constant output would hide errors, and near ties would let correct engines differ."""
    model = load(tiny.cached_tiny_model(arch))
    prompts = torch.randint(4, 1003, (4, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        tokens = model.generate(prompts, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
        top = model(tokens).logits[:, 39:-1].topk(2).values
    assert all(len(set(row[40:].tolist())) > 30 for row in tokens)
    assert (top[..., 0] - top[..., 1]).median() > 0.1


@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
def test_a_tiny_model_resolves_and_its_shapes_catch_errors(arch):
    checkpoint = resolve(str(tiny.cached_tiny_model(arch)))
    config = checkpoint.config
    assert (checkpoint.vocab_size, checkpoint.max_len, checkpoint.eos_ids) == (1003, 512, (2, 0))
    assert config["num_attention_heads"] * config["head_dim"] != config["hidden_size"]
    with checkpoint.open() as source:
        tensors = {name: source.slice(name)[...] for name in source.names()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert all(tensor.std() > 0.05 for tensor in tensors.values()), "no norm weight and no bias is constant"
    assert ("model.layers.0.self_attn.k_proj.bias" in tensors) == (arch == "qwen2")
    assert ("model.layers.0.self_attn.k_norm.weight" in tensors) == (arch == "qwen3")
    assert ("lm_head.weight" in tensors) == (arch not in ("llama3rope", "qwen2"))


def test_llama3_rope_scaling_changes_the_output():
    model = load(tiny.cached_tiny_model("llama3rope"))
    plain = load(tiny.cached_tiny_model("llama3rope", rope_scaling=None))
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, plain.model.layers[0].mlp.up_proj.weight)
    tokens = torch.randint(4, 1003, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        same = model(tokens).logits.argmax(-1) == plain(tokens).logits.argmax(-1)
    assert same[0, 150:].float().mean() < 0.5


def test_overrides_seed_and_determinism(tmp_path):
    shape = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 1}
    files = [
        tiny.tiny_model("llama", tmp_path / str(number), seed=seed, **shape) / "model.safetensors"
        for number, seed in enumerate((0, 0, 1))
    ]
    first, again, other = (file.read_bytes() for file in files)
    assert first == again != other
    with resolve(str(tmp_path / "0")).open() as source:
        assert source.slice("model.layers.0.self_attn.k_proj.weight").shape == (3 * 16, 96)
        assert "model.layers.1.input_layernorm.weight" not in source.names()


def test_cached_model_is_built_once_for_equal_arguments():
    folder = tiny.cached_tiny_model("mistral", num_hidden_layers=1)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny.cached_tiny_model("mistral", num_hidden_layers=1) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert tiny.cached_tiny_model("mistral", num_hidden_layers=1, seed=1) != folder


def test_unknown_architecture_lists_the_known_ones(tmp_path):
    with pytest.raises(CheckpointError, match="llama, llama3rope, qwen2, qwen3, mistral"):
        tiny.tiny_model("gpt2", tmp_path)
