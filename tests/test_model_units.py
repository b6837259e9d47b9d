"""The decoder's parts against literal numbers and plain loops, and what loading a checkpoint refuses."""

from __future__ import annotations

import importlib
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from common import cpu
from common.checkpoints import resolve
from common.tiny import tiny_config, tiny_model
from tests.engine_runs import alone

F32 = torch.empty(0)  # `like` for float32 layers on the CPU


@pytest.fixture
def part(engine_chapter):
    """part("ops"): that module of the chapter."""
    return lambda name: importlib.import_module(f"{engine_chapter.__name__}.{name}")


@pytest.fixture
def group(engine_chapter):
    return alone(engine_chapter)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- operators


def test_rms_norm_by_hand(part):
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [-1.0, 1.0]])
    out, total = part("ops").rms_norm(x.clone(), torch.tensor([1.0, 10.0]), eps=0.5)
    # mean squares 12.5, 0, 1, each + 0.5
    want = [[3 / 13**0.5, 40 / 13**0.5], [0, 0], [-1 / 1.5**0.5, 10 / 1.5**0.5]]
    torch.testing.assert_close(out, torch.tensor(want))
    assert torch.equal(total, x), "without a residual the sum is the input"


def test_rms_norm_adds_the_residual_first_and_returns_the_sum(part):
    x, residual, weight = randn(5, 8), randn(5, 8, seed=1), randn(8, seed=2)
    want_sum = x + residual
    want, _ = part("ops").rms_norm(want_sum.clone(), weight, 1e-5)
    out, total = part("ops").rms_norm(x, weight, 1e-5, residual)
    torch.testing.assert_close(total, want_sum)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_counts_in_float32(part, dtype):
    """The sum of 4096 squares of 16 is 2**20, beyond float16, and would stop growing early in bfloat16."""
    out, total = part("ops").rms_norm(torch.full((1, 4096), 16.0, dtype=dtype), torch.ones(4096, dtype=dtype), 1e-6)
    assert out.dtype == total.dtype == dtype
    assert torch.equal(out, torch.ones_like(out))


def test_rms_norm_takes_a_weight_per_head(part):
    """Qwen3 normalises queries and keys in one call: x[T, heads, D], weight[heads, D]."""
    x, weight = randn(3, 4, 6), randn(4, 6, seed=1)
    out, _ = part("ops").rms_norm(x.clone(), weight, 1e-6)
    for head in range(4):
        want, _ = part("ops").rms_norm(x[:, head].clone(), weight[head], 1e-6)
        torch.testing.assert_close(out[:, head], want)


def test_silu_and_mul_by_hand(part):
    x = torch.tensor([[0.0, 1.0, -2.0, 5.0, 6.0, 7.0]])  # gate 0 1 -2, up 5 6 7
    want = [[0.0, 6 / (1 + math.exp(-1)), -2 * 7 / (1 + math.exp(2))]]
    torch.testing.assert_close(part("ops").silu_and_mul(x), torch.tensor(want))


def model_config(part, **changes):
    return part("model").ModelConfig.from_dict(tiny_config("llama", **changes))


def test_rotary_turns_the_pair_i_and_i_plus_half(part):
    """Complex multiplication of x[i] + j x[i + D/2] by exp(j * position * theta ** (-2 i / D))."""
    config = model_config(part, head_dim=8, rope_theta=100.0)
    positions = [0, 1, 5, 31]
    cos, sin = part("model").rope_tables(config, 32, F32)
    x = randn(len(positions), 3, 8)
    got = part("ops").rotary(x, cos[positions], sin[positions])
    for row, position in enumerate(positions):
        for head in range(3):
            for i in range(4):
                angle = position * 100.0 ** (-2 * i / 8)
                turned = complex(x[row, head, i], x[row, head, i + 4]) * complex(math.cos(angle), math.sin(angle))
                assert got[row, head, i].item() == pytest.approx(turned.real, abs=1e-5)
                assert got[row, head, i + 4].item() == pytest.approx(turned.imag, abs=1e-5)


def test_rope_frequencies_plain_and_linear(part):
    plain = part("model").rope_frequencies(model_config(part, head_dim=8, rope_theta=10_000.0))
    torch.testing.assert_close(plain, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    linear = {"rope_type": "linear", "factor": 4.0}
    scaled = part("model").rope_frequencies(model_config(part, head_dim=8, rope_theta=10_000.0, rope_scaling=linear))
    torch.testing.assert_close(scaled, plain / 4)


def test_rope_frequencies_llama3(part):
    """Waves that turn more than 4 times in the original 64 positions stay, fewer than once are stretched by 8."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    # 16 dimensions and theta 256: frequencies 1, 1/2, 1/4, ... 1/128, turns 64 f / (2 pi) = 10.2, 5.1, 2.5, 1.3, 0.6, ...
    config = model_config(part, head_dim=16, rope_theta=256.0, rope_scaling=scaling)
    want = [1.0, 0.5]
    for freq in (0.25, 0.125):
        keep = (64 * freq / (2 * math.pi) - 1.0) / (4.0 - 1.0)
        want.append(freq * keep + freq / 8 * (1 - keep))
    want += [1 / 16 / 8, 1 / 32 / 8, 1 / 64 / 8, 1 / 128 / 8]
    torch.testing.assert_close(part("model").rope_frequencies(config), torch.tensor(want))


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_causal_attention_by_loops(part, heads, kv_heads, tokens):
    """Query i of head h sees keys 0..i of KV head h // (heads / kv_heads)."""
    q, k, v = randn(tokens, heads, 5), randn(tokens, kv_heads, 5, seed=1), randn(tokens, kv_heads, 5, seed=2)
    got = part("attention").causal(q, k, v)
    for i in range(tokens):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            weights = torch.tensor([float(q[i, h] @ k[j, kv]) / 5**0.5 for j in range(i + 1)]).softmax(0)
            want = sum(weights[j] * v[j, kv] for j in range(i + 1))
            torch.testing.assert_close(got[i, h], want, atol=1e-5, rtol=1e-4)


# ---- layers


def test_stacked_linear_keeps_each_part_in_its_place(part, group):
    layers, ops = part("layers"), part("ops")
    linear = layers.QKVLinear(hidden=6, heads=4, kv_heads=2, head_dim=3, bias=True, like=F32, **group)
    sizes = {"q": 12, "k": 6, "v": 6}
    weights = {name: randn(size, 6, seed=i) for i, (name, size) in enumerate(sizes.items())}
    biases = {name: randn(size, seed=10 + i) for i, (name, size) in enumerate(sizes.items())}
    for name in ("v", "q", "k"):  # in any order
        linear.load(name, "bias", biases[name])
        linear.load(name, "weight", weights[name])
    linear.finish(ops.choose(torch.device("cpu"), torch.float32, native=False))
    x = randn(5, 6, seed=20)
    qk, v = linear.split(linear(x))
    want = {name: (x @ weights[name].T + biases[name]).view(5, -1, 3) for name in sizes}
    assert qk.shape == (5, 6, 3) and v.shape == (5, 2, 3)
    torch.testing.assert_close(qk[:, :4], want["q"])
    torch.testing.assert_close(qk[:, 4:], want["k"])
    torch.testing.assert_close(v, want["v"])


def test_gate_comes_before_up(part, group):
    layers, ops = part("layers"), part("ops")
    linear = layers.GateUpLinear(hidden=4, intermediate=3, bias=False, like=F32, **group)
    gate, up = randn(3, 4), randn(3, 4, seed=1)
    linear.load("up", "weight", up)
    linear.load("gate", "weight", gate)
    linear.finish(ops.choose(torch.device("cpu"), torch.float32, native=False))
    x = randn(2, 4, seed=2)
    got = ops.silu_and_mul(linear(x))
    torch.testing.assert_close(got, torch.nn.functional.silu(x @ gate.T) * (x @ up.T))


def test_native_off_keeps_to_plain_torch(part):
    ops = part("ops")
    assert ops.choose(torch.device("cpu"), torch.float32, native=False).linear is cpu.torch_linear


# ---- loading


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of our own to spoil."""
    return tiny_model("qwen2", tmp_path / "model", num_hidden_layers=2)


def spoil(folder, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def load(part, folder, group):
    checkpoint = resolve(str(folder))
    ops = part("ops").choose(torch.device("cpu"), torch.float32, native=False)
    config = part("model").ModelConfig.from_dict(checkpoint.config)
    model = part("model").Decoder(config, 32, ops, torch.device("cpu"), torch.float32, **group)
    part("weights").load(model, checkpoint)
    return model


def test_every_tensor_of_the_checkpoint_arrives(part, group, folder):
    tensors = load_file(folder / "model.safetensors")
    model = load(part, folder, group)
    assert set(model.targets()) - set(tensors) == set()
    assert torch.equal(model.embedding.weight, tensors["model.embed_tokens.weight"])
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"])
    assert torch.equal(model.layers[1].post_norm.weight, tensors["model.layers.1.post_attention_layernorm.weight"])


def test_a_missing_tensor_is_named(part, group, folder):
    spoil(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"1 tensors are missing, the first is model\.layers\.1\.mlp\.up_proj\.weight"):
        load(part, folder, group)


def test_an_unknown_tensor_is_named(part, group, folder):
    spoil(folder, lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}))
    with pytest.raises(ValueError, match=r"no place for 1 tensors, e\.g\. model\.layers\.0\.self_attn\.o_proj\.bias"):
        load(part, folder, group)


def test_an_old_rope_table_in_the_file_is_ignored(part, group, folder):
    spoil(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(part, folder, group)


WRONG = {
    "model.layers.0.self_attn.k_proj.weight": (33, 64),
    "model.layers.0.self_attn.q_proj.weight": (128, 63),
    "model.layers.0.self_attn.v_proj.weight": (1, 64),  # would broadcast
    "model.layers.0.self_attn.v_proj.bias": (1,),
    "model.layers.1.input_layernorm.weight": (1,),
    "model.embed_tokens.weight": (64,),
    "model.norm.weight": (65,),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_tensor_of_the_wrong_shape_is_named(part, group, folder, name):
    spoil(folder, lambda t: t.update({name: torch.ones(WRONG[name])}))
    with pytest.raises(ValueError, match=name.replace(".", r"\.")) as error:
        load(part, folder, group)
    assert str(WRONG[name]) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_a_config_without_a_size_is_refused(part, key):
    config = tiny_config("llama")
    del config[key]
    with pytest.raises(ValueError, match=key):
        part("model").ModelConfig.from_dict(config)


def test_scaling_without_its_numbers_is_refused(part):
    for scaling, key in (({"type": "linear"}, "factor"), ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor")):
        with pytest.raises(ValueError, match=key):
            part("model").ModelConfig.from_dict(tiny_config("llama", rope_scaling=scaling))


def test_older_configs_leave_the_defaults_out(part):
    """num_key_value_heads and head_dim came later than Llama; rms_norm_eps and rope_theta have defaults."""
    config = tiny_config("llama")
    for key in ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling"):
        del config[key]
    made = part("model").ModelConfig.from_dict(json.loads(json.dumps(config)))
    assert (made.kv_heads, made.head_dim, made.norm_eps, made.rope_theta) == (8, 8, 1e-6, 10_000.0)
