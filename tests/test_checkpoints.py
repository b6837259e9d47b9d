"""What --model accepts, what comes out of it, and what is said when it is refused."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.checkpoints import CheckpointError, resolve
from common.tiny import tiny_config, write_tokenizer

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(4, 3),
    "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
}
RESOLVE = """
import sys
from common.checkpoints import CheckpointError, resolve
try:
    print(resolve(sys.argv[1]).folder)
except CheckpointError as error:
    print("CheckpointError:", error)
"""


@pytest.fixture
def folder(tmp_path):
    """A complete checkpoint of two tensors in one file."""
    path = tmp_path / "my-model"
    write_checkpoint(path)
    return path


def write_checkpoint(path: Path) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(tiny_config("llama")))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    write_tokenizer(path)
    save_file(WEIGHTS, path / "model.safetensors")


def refusal(model) -> str:
    """The message with which a model is refused: always one line."""
    with pytest.raises(CheckpointError) as caught:
        resolve(str(model))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def python(code: str, *args: str, **env: str) -> "subprocess.Popen[str]":
    full = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *args], env=full, cwd="/", **pipes)


def output(code: str, *args: str, **env: str) -> str:
    process = python(code, *args, **env)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


# A local folder


def test_folder_gives_its_facts(folder):
    checkpoint = resolve(str(folder))
    assert (checkpoint.name, checkpoint.folder) == ("my-model", folder)
    assert (checkpoint.vocab_size, checkpoint.max_len) == (1003, 512)
    assert checkpoint.config["model_type"] == "llama"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([5, 2], 2, (5, 2)), (7, [8, 7, 9], (7, 8, 9)), (None, 2, (2,)), (None, None, ()), (0, None, (0,))],
)
def test_eos_ids_are_those_of_both_files_generation_first(folder, generation, config, expected):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (folder / "config.json").write_text(json.dumps(tiny_config("llama", eos_token_id=config)))
    assert resolve(str(folder)).eos_ids == expected


def test_a_folder_without_generation_config_is_fine(folder):
    (folder / "generation_config.json").unlink()
    checkpoint = resolve(str(folder))
    assert (checkpoint.generation, checkpoint.eos_ids) == ({}, (2,))


def test_tensors_are_read_whole_and_in_part(folder):
    with resolve(str(folder)).open() as source:
        assert source.names() == ["a", "b"]
        part = source.slice("a")
        assert part.shape == (4, 3)
        assert torch.equal(part[...], WEIGHTS["a"]) and torch.equal(part[1:3, 2:], WEIGHTS["a"][1:3, 2:])
        kept = source.slice("b")[1]
        with pytest.raises(CheckpointError, match="no tensor c"):
            source.slice("c")
    assert torch.equal(kept, WEIGHTS["b"][1]), "a tensor outlives the files it came from"


def test_sharded_folder_reads_every_tensor_from_its_file(folder):
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{name}.safetensors" for name in WEIGHTS}
    for name, file in weight_map.items():
        save_file({name: WEIGHTS[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with resolve(str(folder)).open() as source:
        assert source.names() == ["a", "b"]
        assert all(torch.equal(source.slice(name)[...], WEIGHTS[name]) for name in WEIGHTS)
    (folder / "model-b.safetensors").unlink()
    assert "model-b.safetensors is missing (1 of 2 files)" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    assert "weight_map" in refusal(folder)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "safetensors only" in refusal(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{broken", "config.json"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", '{"model_type": "other"}', "has no vocab_size"),
        ("config.json", None, "no config.json"),
        ("generation_config.json", "{broken", "generation_config.json"),
        ("generation_config.json", '{"eos_token_id": "end"}', "eos_token_id is 'end'"),
        ("tokenizer.json", None, "no tokenizer"),
        ("model.safetensors", None, "no weights"),
    ],
)
def test_damaged_folder_is_refused_with_the_reason(folder, file, content, message):
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    assert message in refusal(folder)


def test_truncated_weights_are_reported_by_file(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"), resolve(str(folder)).open() as source:
        source.slice("a")


def test_what_is_no_model_at_all_is_refused(folder):
    for model in ("", "smollm3", "/no/such/folder", "a/b/c", "-x/y", "\0"):
        assert "a Hub id ORG/NAME" in refusal(model)
    assert "is a file" in refusal(folder / "model.safetensors")


# Hubs


@pytest.fixture
def hub(folder):
    """A Hub on this machine: org/model is complete, org/gated is gated, everything else is unknown."""
    (folder / "model.bin").write_bytes(b"never asked for")
    names = [path.name for path in folder.iterdir()]
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            parts = self.path.split("?")[0].strip("/").split("/")
            asked.append(parts[-1])
            if "gated" in parts:
                self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
            elif parts[:4] == ["api", "models", "org", "model"] and parts[4] == "tree":
                sizes = [
                    {"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": "0" * 40} for n in names
                ]
                self.answer(200, json.dumps(sizes).encode())
            elif parts[:4] == ["api", "models", "org", "model"]:
                info = {"id": "org/model", "sha": "0" * 40, "siblings": [{"rfilename": name} for name in names]}
                self.answer(200, json.dumps(info).encode())
            elif parts[:3] == ["org", "model", "resolve"]:
                data = (folder / parts[-1]).read_bytes()
                self.answer(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": "0" * 40})
            else:
                self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def answer(self, status, data, headers=None):
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield types.SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", asked=asked)
    server.shutdown()
    thread.join()
    server.server_close()


def test_hub_id_is_downloaded_from_hf_endpoint_and_then_works_offline(hub, tmp_path, folder):
    env = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": ""}
    found = Path(output(RESOLVE, "org/model", **env))
    assert (found / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert "config.json" in hub.asked and "model.bin" not in hub.asked, "only what is used is downloaded"
    assert output(RESOLVE, "org/model", **env | {"HF_HUB_OFFLINE": "1"}) == str(found)


@pytest.mark.parametrize(
    ("model", "env", "message"),
    [
        ("org/unknown", {}, "neither a local folder nor a model on the Hub"),
        ("org/gated", {}, "is gated: accept its terms"),
        (
            "org/model",
            {"HF_HUB_OFFLINE": "1"},
            "not in the Hub cache and HF_HUB_OFFLINE is set: unset it, or pass a local",
        ),
        ("org/model", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached: set HF_ENDPOINT to a mirror"),
    ],
)
def test_hub_failures_say_what_to_do(hub, tmp_path, model, env, message):
    base = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": ""}
    said = output(RESOLVE, model, **base | env)
    assert said.startswith("CheckpointError: ") and message in said and "\n" not in said


def test_modelscope_needs_its_package_and_then_uses_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    assert "pip install modelscope" in refusal("modelscope:org/name")
    fake = types.ModuleType("modelscope")
    fake.__spec__ = types.SimpleNamespace(name="modelscope")
    fake.snapshot_download = lambda model, allow_file_pattern: str(folder)
    monkeypatch.setitem(sys.modules, "modelscope", fake)
    assert (resolve("modelscope:org/name").name, resolve("modelscope:org/name").folder) == ("org/name", folder)
    fake.snapshot_download = lambda model, allow_file_pattern: 1 / 0
    assert "cannot download org/name from ModelScope: division by zero" in refusal("modelscope:org/name")
    assert "ORG/NAME" in refusal("modelscope:name")
