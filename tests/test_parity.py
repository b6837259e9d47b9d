"""Greedy output in float32 is, token for token, that of transformers; logits agree; what would not agree is refused.

Tiny random models of every architecture, then the real SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import copy
import functools
import shutil

import pytest
import torch

from common.checkpoints import resolve
from common.cpu import has_native_bf16
from common.tiny import cached_tiny_model
from tests.conftest import ENGINES, briefly, chapter
from tests.oracle import assert_greedy, hf_generate, hf_logits, hf_model
from tests.prompts import CHATS, LONG, PROMPTS

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": ("llama", {}),
    "llama3rope": ("llama3rope", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "llama, one layer": ("llama", {"num_hidden_layers": 1}),
    "llama, every head its own KV head": ("llama", {"num_key_value_heads": 8, "head_dim": None}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1, "hidden_size": 96, "num_attention_heads": 6}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, odd sizes": ("llama", {"intermediate_size": 97, "head_dim": 6, "vocab_size": 1009}),
    "llama, linear rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama, tied, larger theta": ("llama", {"tie_word_embeddings": True, "rope_theta": 500_000.0}),
    "qwen2, untied": ("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "qwen3, biases": ("qwen3", {"attention_bias": True, "num_key_value_heads": 1, "head_dim": 8}),
    "qwen3, llama3 rope": ("qwen3", {"rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "mistral, head_dim apart": ("mistral", {"head_dim": 20, "num_key_value_heads": 4}),
}
LENGTHS = (1, 2, 17, 200)
TOKENS = 12


def folder_of(model: str) -> str:
    arch, changes = MODELS[model]
    return str(cached_tiny_model(arch, **changes))


def prompt_of(length: int, vocab: int = 1003) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(4, vocab, (length,), generator=generator).tolist()


def options(**more):
    return {"dtype": "float32", "threads": 1, "debug_invariants": True, **more}


def recorded_logits(llm) -> list[torch.Tensor]:
    """From here on a list of the logits [R, V] of each step."""
    record: list[torch.Tensor] = []
    forward = llm.engine.runner.forward

    def recording(inp):
        logits = forward(inp)
        record.append(logits.float().clone())
        return logits

    llm.engine.runner.forward = recording
    return record


@functools.cache
def exact_model(folder: str) -> torch.nn.Module:
    """transformers in float64, whose rounding is out of sight."""
    return copy.deepcopy(hf_model(folder)).double()


@torch.inference_mode()
def assert_float32_logits(folder: str, ids: list[int], rows: torch.Tensor) -> None:
    """rows[R, V] are the logits of the last R ids, to 1e-4 or to what transformers' own float32 rounds."""
    exact = exact_model(folder)(torch.tensor([ids])).logits[0, -len(rows) :]
    ours = (rows - exact).abs().max().item()
    theirs = (hf_logits(folder, ids)[-len(rows) :] - exact).abs().max().item()
    assert ours < max(1e-4, 3 * theirs), f"largest error {ours:.1e}, transformers {theirs:.1e}"


# ---- tiny models


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_and_logits_of_every_architecture(engine_chapter, model, native):
    folder = folder_of(model)
    params = engine_chapter.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    with engine_chapter.LLM(folder, native=native, **options()) as llm:
        record = recorded_logits(llm)
        for length in LENGTHS:
            prompt = prompt_of(length)
            [output] = llm.generate([prompt], params, progress=False)
            assert output.finish_reason == "length" and len(output.token_ids) == TOKENS
            assert assert_greedy(folder, prompt, output.token_ids) > 0
            rows = torch.cat(record)
            record.clear()
            assert_float32_logits(folder, [*prompt, *output.token_ids[:-1]], rows)


@pytest.mark.parametrize("model", ["llama", "llama3rope", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("engine_chapter", briefly(ENGINES, ENGINES[0], ENGINES[3], ENGINES[-1]), indirect=True)
def test_the_whole_generation_loop_of_transformers_agrees(engine_chapter, model):
    """Not token by token: two loops run on their own and end with the same list, EOS honoured and ignored."""
    folder = folder_of(model)
    for ignore_eos in (True, False):
        params = engine_chapter.SamplingParams(max_tokens=40, ignore_eos=ignore_eos)
        with engine_chapter.LLM(folder, **options()) as llm:
            outputs = llm.generate([prompt_of(n) for n in LENGTHS], params, progress=False)
        for length, output in zip(LENGTHS, outputs, strict=True):
            want = hf_generate(folder, prompt_of(length), 40, ignore_eos=ignore_eos)
            compared = assert_greedy(folder, prompt_of(length), output.token_ids)
            assert output.token_ids[:compared] == want[:compared]
            assert compared < len(output.token_ids) or output.token_ids == want


def test_many_requests_together_give_what_each_gives_alone(engine_chapter):
    folder = folder_of("llama")
    prompts = [prompt_of(n) for n in (3, 40, 1, 90, 7, 7, 64)]
    params = [engine_chapter.SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 9, 1, 14, 2, 20, 11)]
    with engine_chapter.LLM(folder, **options()) as llm:
        together = llm.generate(prompts, params, progress=False)
        alone = [llm.generate([prompt], one, progress=False)[0] for prompt, one in zip(prompts, params, strict=True)]
    for prompt, one, other in zip(prompts, together, alone, strict=True):
        assert_greedy(folder, prompt, one.token_ids)
        assert one.token_ids == other.token_ids


@pytest.mark.fault(17)
def test_positions_up_to_the_last_of_the_context(engine_chapter):
    """The context of 64 is filled to its last position; rotary tables end there."""
    folder = folder_of("llama3rope")
    prompt = prompt_of(50)
    with engine_chapter.LLM(folder, max_model_len=64, **options()) as llm:
        params = engine_chapter.SamplingParams(max_tokens=14, ignore_eos=True)
        [output] = llm.generate([prompt], params, progress=False)
    assert len(output.token_ids) == 14
    assert_greedy(folder, prompt, output.token_ids)


def test_a_vocabulary_larger_than_the_tokenizer(engine_chapter):
    """Models pad the vocabulary; a token without text is a token all the same."""
    folder = str(cached_tiny_model("llama", vocab_size=1500))
    prompt = prompt_of(9, vocab=1500)
    with engine_chapter.LLM(folder, **options()) as llm:
        params = engine_chapter.SamplingParams(max_tokens=40, ignore_eos=True)
        [output] = llm.generate([prompt], params, progress=False)
    assert len(output.token_ids) == 40 and max(output.token_ids) >= 1003
    assert_greedy(folder, prompt, output.token_ids)


# ---- bfloat16: logits with a margin, never tokens


@functools.cache
def rounded_models(folder: str):
    """transformers in bfloat16, and in float32 with the same rounded weights: the exact answer."""
    import transformers

    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, folder)
    half = load(dtype=torch.bfloat16).eval()
    return half, load(dtype=torch.bfloat16).float().eval()


@functools.cache
@torch.inference_mode()
def exact_and_error(folder: str, prompt: tuple[int, ...]) -> tuple[torch.Tensor, float]:
    """The exact logits after the prompt, and how far off, relatively, transformers in bfloat16 is."""
    half, exact = rounded_models(folder)
    ids = torch.tensor([prompt])
    want = exact(ids).logits[0, -1]
    return want, float((half(ids).logits[0, -1].float() - want).norm() / want.norm())


def assert_bfloat16_logits(engine_chapter, folder: str, prompts: list[tuple[int, ...]], native: str) -> None:
    """As near to the exact logits as transformers in bfloat16 is, over all prompts: single ones differ by chance."""
    ours, theirs = [], []
    with engine_chapter.LLM(folder, native=native, **options(dtype="bfloat16", max_model_len=256)) as llm:
        record = recorded_logits(llm)
        for prompt in prompts:
            want, error = exact_and_error(folder, prompt)
            llm.generate([prompt], engine_chapter.SamplingParams(max_tokens=1), progress=False)
            ours.append(float((torch.cat(record)[0] - want).norm() / want.norm()))
            theirs.append(error)
            record.clear()
    mine, other = (sum(e * e for e in errors) ** 0.5 / len(errors) ** 0.5 for errors in (ours, theirs))
    assert 1e-5 < mine < 1.5 * other, f"root mean square error {mine:.4f}, transformers {other:.4f}"


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("model", ["dummy:llama-tiny", "dummy:llama3rope-tiny", "dummy:qwen2-tiny", "dummy:qwen3-tiny"])
def test_bfloat16_logits_are_as_good_as_those_of_transformers(engine_chapter, model, native, tmp_path):
    folder = str(stored(model, tmp_path))
    assert_bfloat16_logits(engine_chapter, folder, [tuple(prompt_of(n)) for n in (1, 2, 17, 60, 200)], native)


def stored(model: str, tmp_path):
    """A dummy preset with its weights in a file, where transformers finds them."""
    from safetensors.torch import save_file

    checkpoint = resolve(model)
    folder = tmp_path / "model"
    shutil.copytree(checkpoint.folder, folder, ignore=shutil.ignore_patterns("dummy.json"))
    with checkpoint.open() as source:
        tensors = {name: source.slice(name)[...].contiguous() for name in source.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_float16_runs_too(engine_chapter, tmp_path):
    folder = str(stored("dummy:llama-tiny", tmp_path))
    prompt = prompt_of(17)
    with engine_chapter.LLM(folder, **options(dtype="float16")) as llm:
        record = recorded_logits(llm)
        llm.generate([prompt], engine_chapter.SamplingParams(max_tokens=3, ignore_eos=True), progress=False)
    want = hf_logits(folder, prompt)[-1]
    assert (torch.cat(record)[0] - want).norm() < 5e-3 * want.norm()


# ---- the real model


# ch05 runs ch04's engine; batches and ranks have the prompts in tests of their own.
@pytest.fixture(scope="module", params=briefly(ENGINES, *ENGINES[:2], *ENGINES[4:6], ENGINES[-1]))
def smollm2(request):
    """(chapter, its engine on SmolLM2 in float32), one engine for all tests of a chapter."""
    module = chapter(request.param)
    with module.LLM("smollm2-135m", dtype="float32", threads=1, max_model_len=1024) as llm:
        yield module, llm


@functools.cache
def compared(prompt: tuple[int, ...], output: tuple[int, ...]) -> int:
    """assert_greedy, once for all chapters that give the same output."""
    return assert_greedy(resolve("smollm2-135m").folder, prompt, output)


@pytest.mark.slow
def test_smollm2_is_token_for_token_that_of_transformers(smollm2):
    """English, Chinese, code, one token, 580 tokens: all requests at once, each compared."""
    module, llm = smollm2
    params = [module.SamplingParams(max_tokens=n, ignore_eos=True) for n in PROMPTS.values()]
    outputs = llm.generate(list(PROMPTS), params, progress=False)
    lengths = [len(output.prompt_token_ids) for output in outputs]
    assert len(outputs) >= 20 and min(lengths) == 1 and 400 < max(lengths) < 700
    total = 0
    for output, wanted in zip(outputs, PROMPTS.values(), strict=True):
        assert len(output.token_ids) == wanted and output.finish_reason == "length"
        total += compared(tuple(output.prompt_token_ids), tuple(output.token_ids))
    assert total > 0.9 * sum(PROMPTS.values()), "near ties are rare"


@pytest.mark.slow
@pytest.mark.parametrize("question", CHATS)
def test_smollm2_ends_a_chat_where_transformers_ends_it(smollm2, question):
    module, llm = smollm2
    ids = llm.tokenizer.encode_chat([{"role": "user", "content": question}])
    [output] = llm.generate([ids], module.SamplingParams(max_tokens=16), progress=False)
    assert output.finish_reason == "stop" and output.token_ids[-1] in resolve("smollm2-135m").eos_ids
    assert output.token_ids == ended_chat(tuple(ids))
    assert "<|im_end|>" not in output.text and output.text


@functools.cache
def ended_chat(ids: tuple[int, ...]) -> list[int]:
    return hf_generate(resolve("smollm2-135m").folder, ids, 16, ignore_eos=False)


@pytest.mark.slow
def test_smollm2_prompts_get_the_ids_that_transformers_gives_them(smollm2):
    from transformers import AutoTokenizer

    _, llm = smollm2
    theirs = AutoTokenizer.from_pretrained(resolve("smollm2-135m").folder)
    for text in PROMPTS:
        assert llm.tokenizer.encode(text) == theirs(text).input_ids
    chat = [{"role": "user", "content": CHATS[0]}]
    want = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert llm.tokenizer.encode_chat(chat) == want


@pytest.mark.slow
def test_smollm2_in_bfloat16_is_as_good_as_transformers(engine_chapter, request):
    if not has_native_bf16() and not request.config.getoption("--full"):
        pytest.skip("bfloat16 is emulated on this processor, slowly: make test-full")
    folder = str(resolve("smollm2-135m").folder)
    assert_bfloat16_logits(engine_chapter, folder, [ids_of(text) for text in PROMPTS if text != LONG], "auto")


@functools.cache
def ids_of(text: str) -> tuple[int, ...]:
    from transformers import AutoTokenizer

    return tuple(AutoTokenizer.from_pretrained(resolve("smollm2-135m").folder)(text).input_ids)
