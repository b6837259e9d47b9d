"""Models that this decoder would compute wrongly are refused, or limited to where it is right."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.tiny import cached_tiny_model, tiny_config, tiny_model
from tests.oracle import assert_greedy, hf_model

OPTIONS = {"dtype": "float32", "threads": 1, "debug_invariants": True}


def prompt_of(length: int) -> list[int]:
    return torch.randint(4, 1003, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def with_config(tmp_path, arch: str = "llama", **changes) -> str:
    """A tiny model whose config.json says something else than its weights."""
    folder = tmp_path / "model"
    shutil.copytree(cached_tiny_model(arch), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


REFUSED = {
    "another architecture": ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
    "no architecture": ({"model_type": None}, "model_type None is not supported"),
    "a mixture of experts": ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not supported"),
    "quantized": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized checkpoints are not"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
    "longrope": ({"rope_parameters": None, "rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
    "half a llama3 rope": ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor"),
    "frequencies the wrong way round": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        "low_freq_factor is above high_freq_factor",
    ),
    "rope that is no object": ({"rope_scaling": "linear"}, "rope_scaling is 'linear', not an object"),
    "a rope factor that is no number": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2', not a"),
    "heads that KV heads do not divide": ({"num_key_value_heads": 3}, "8 heads do not divide among 3 KV heads"),
    "an odd head size": ({"head_dim": 7}, "head_dim 7 is odd"),
    "a negative size": ({"intermediate_size": -1}, "intermediate_size is -1, not an integer from 1 to"),
    "a huge size": ({"head_dim": 2**70}, "head_dim is 1180591620717411303424, not an integer from 1 to"),
    "another shape": ({"hidden_size": 32}, "does not fit"),
    "more layers than weights": ({"num_hidden_layers": 4}, "9 tensors are missing"),
    "fewer layers than weights": ({"num_hidden_layers": 2}, "no place for 9 tensors"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_would_be_computed_wrongly_is_refused(engine_chapter, what, tmp_path):
    changes, message = REFUSED[what]
    with pytest.raises(ValueError) as error:
        engine_chapter.LLM(with_config(tmp_path, **changes), **OPTIONS)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_head_of_its_own_in_a_model_that_is_called_tied_is_refused(engine_chapter, tmp_path):
    """transformers does not tie them then: to drop the head without a word would give other tokens."""
    with pytest.raises(ValueError, match=r"ties the head to the embedding, but lm_head\.weight is not equal to it"):
        engine_chapter.LLM(with_config(tmp_path, tie_word_embeddings=True), **OPTIONS)


def test_a_tied_model_may_repeat_its_embedding_as_head(engine_chapter, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(cached_tiny_model("llama", tie_word_embeddings=True), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    prompt = prompt_of(14)
    with engine_chapter.LLM(str(folder), **OPTIONS) as llm:
        [output] = llm.generate([prompt], engine_chapter.SamplingParams(max_tokens=5), progress=False)
    assert_greedy(str(folder), prompt, output.token_ids)


def test_an_index_that_is_left_over_beside_a_single_file_counts_for_nothing(engine_chapter, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(cached_tiny_model("llama"), folder)
    other = load_file(cached_tiny_model("llama", vocab_size=1003, rope_theta=500_000.0) / "model.safetensors")
    save_file({name: tensor * 0.5 for name, tensor in other.items()}, folder / "old.safetensors")
    index = {"weight_map": dict.fromkeys(other, "old.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    prompt = prompt_of(14)
    with engine_chapter.LLM(str(folder), **OPTIONS) as llm:
        [output] = llm.generate([prompt], engine_chapter.SamplingParams(max_tokens=5), progress=False)
    assert_greedy(str(folder), prompt, output.token_ids)


AS_TRANSFORMERS_READS_IT = {
    "llama3 rope, context at the top": ("llama3rope", {"original_max_position_embeddings": 32}),
    "qwen2, a key that means nothing there": ("qwen2", {"attention_bias": True, "mlp_bias": True}),
    "mistral, a key that means nothing there": ("mistral", {"attention_bias": True}),
}


@pytest.mark.parametrize("what", AS_TRANSFORMERS_READS_IT)
def test_what_a_key_means_is_what_transformers_takes_it_for(engine_chapter, what, tmp_path):
    arch, changes = AS_TRANSFORMERS_READS_IT[what]
    folder = with_config(tmp_path, arch, **changes)
    prompt = prompt_of(100)
    with engine_chapter.LLM(folder, **OPTIONS) as llm:
        [output] = llm.generate([prompt], engine_chapter.SamplingParams(max_tokens=10), progress=False)
    assert_greedy(folder, prompt, output.token_ids)


WINDOWS = {
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}),
    "qwen2 by layer": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}


@pytest.mark.parametrize("what", WINDOWS)
def test_a_sliding_window_limits_the_context(engine_chapter, what, capfd):
    """Inside the window full attention is exact; beyond it the output would be wrong without anybody noticing."""
    arch, changes = WINDOWS[what]
    folder = str(cached_tiny_model(arch, **changes))
    prompt = prompt_of(14)
    with engine_chapter.LLM(folder, **OPTIONS) as llm:
        assert "max_model_len is 24" in capfd.readouterr().err
        outputs = llm.generate([prompt, prompt_of(24)], engine_chapter.SamplingParams(max_tokens=10), progress=False)
    assert_greedy(folder, prompt, outputs[0].token_ids)
    assert outputs[1].finish_reason == "error" and "max_model_len is 24" in outputs[1].error
    with pytest.raises(ValueError, match=r"max_model_len 25 exceeds .* sliding window of 24 tokens"):
        engine_chapter.LLM(folder, max_model_len=25, **OPTIONS)
    engine_chapter.LLM(folder, max_model_len=24, **OPTIONS).close()
    assert capfd.readouterr().err == ""


def test_transformers_differs_beyond_the_window():
    """The reason for the limit: with the window 24 the last of 40 tokens sees less, with 40 it sees all."""
    logits = [
        hf_model(cached_tiny_model("mistral", sliding_window=window))(torch.tensor([prompt_of(40)])).logits[0]
        for window in (24, 40, None)
    ]
    torch.testing.assert_close(logits[1], logits[2], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(logits[0][:24], logits[2][:24], atol=1e-4, rtol=1e-5)
    assert not torch.allclose(logits[0][24:], logits[2][24:], atol=1e-2)


NO_WINDOW = {
    "mistral, null": ("mistral", {"sliding_window": None}),
    "mistral, as long as the context": ("mistral", {"sliding_window": 512}),
    "qwen2, switched off": ("qwen2", {"use_sliding_window": False, "sliding_window": 24, "max_window_layers": 0}),
    "qwen2, no layer has it": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 3}),
    "llama has none": ("llama", {"sliding_window": 24}),
}


@pytest.mark.parametrize("what", NO_WINDOW)
def test_an_inactive_window_limits_nothing(engine_chapter, what, capfd):
    arch, changes = NO_WINDOW[what]
    folder = str(cached_tiny_model(arch, **changes))
    prompt = prompt_of(40)
    with engine_chapter.LLM(folder, **OPTIONS) as llm:
        [output] = llm.generate([prompt], engine_chapter.SamplingParams(max_tokens=10), progress=False)
    assert capfd.readouterr().err == ""
    assert_greedy(folder, prompt, output.token_ids)


def test_mistral_has_a_window_where_its_config_says_nothing(engine_chapter):
    """transformers' default is 4096, and so a model that allows 32768 is limited."""
    config = tiny_config("mistral", max_position_embeddings=32_768)
    del config["sliding_window"]
    model = __import__(f"{engine_chapter.__name__}.model", fromlist=["attention_window"])
    assert model.attention_window(config) == 4096


def test_rope_scaling_wins_over_rope_parameters_as_in_transformers(engine_chapter, tmp_path):
    """Files saved by transformers 5 have rope_parameters; a user who adds rope_scaling by hand means it."""
    folder = tmp_path / "model"
    tiny_model("llama", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    (folder / "config.json").write_text(json.dumps(config))
    prompt = prompt_of(60)
    with engine_chapter.LLM(str(folder), **OPTIONS) as llm:
        params = engine_chapter.SamplingParams(max_tokens=10, ignore_eos=True)
        [output] = llm.generate([prompt], params, progress=False)
    assert assert_greedy(folder, prompt, output.token_ids) > 0


BROKEN_TOKENIZERS = {
    "not JSON": b"{",
    "not a tokenizer": b'{"version": "1.0"}',
    "not UTF-8": b"\xff\xfe",
    "nothing": b"",
}


@pytest.mark.parametrize("what", BROKEN_TOKENIZERS)
def test_a_broken_tokenizer_is_one_clear_error(engine_chapter, what, tmp_path):
    folder = with_config(tmp_path)
    (tmp_path / "model" / "tokenizer.json").write_bytes(BROKEN_TOKENIZERS[what])
    with pytest.raises(ValueError) as error:
        engine_chapter.LLM(folder, **OPTIONS)
    assert "tokenizer" in str(error.value) and "\n" not in str(error.value).strip()
