"""From what a user writes after --model to a folder in Hugging Face format, and from there to tensors on disk.

`resolve` accepts a local folder, the preset `smollm2-135m`, `dummy:NAME`, `modelscope:ID` or a Hub id. Weights are
safetensors only and code that comes with a model never runs. Which architectures run is not decided here.
"""

import importlib.util
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from common import dummy, smollm2
from common.cache import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "CheckpointError", "TensorSlice", "TensorSource", "resolve"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "original_max_position_embeddings",
)  # fmt: skip
MOST = 10**7
ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_theta")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# One level of files only: some repositories repeat their weights in other formats in subfolders.
HUB_FILES = ["*.json", "*.jinja", "model*.safetensors", "tokenizer.model", "merges.txt"]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
KINDS = f"a local folder, {smollm2.PRESET}, dummy:NAME, modelscope:ID or a Hub id ORG/NAME"


class TensorSlice(Protocol):
    """One tensor of a checkpoint, not read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: Any) -> "torch.Tensor":
        """Read that part only: an int, a slice of step 1, `...` or a tuple of these; CPU tensor in the stored dtype."""


class TensorSource(Protocol):
    """The tensors of an open checkpoint, by their name in the files."""

    def names(self) -> list[str]: ...

    def slice(self, name: str) -> TensorSlice:
        """Raises CheckpointError when there is no such tensor or its file is damaged."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on disk, before any weight is read."""

    name: str  # what clients call the model
    folder: Path
    config: dict[str, Any]  # config.json
    generation: dict[str, Any]  # generation_config.json, {} where there is none
    eos_ids: tuple[int, ...]  # of generation_config.json, then of config.json, each once; () where neither has any
    vocab_size: int
    max_len: int  # positions that the model was made for

    @contextmanager
    def open(self) -> Iterator[TensorSource]:
        """Source of the weights, valid inside the with block; tensors read from it stay valid after it."""
        if dummy.is_dummy(self.folder):
            yield dummy.DummySource(self.folder, self.config)
            return
        with ExitStack() as stack:
            yield _FileSource(self.folder, stack)


def resolve(model: str) -> Checkpoint:
    """Find, and where necessary download or convert, the model. Raises CheckpointError."""
    model = str(model)
    if model == smollm2.PRESET:
        return _load(smollm2.preset_folder(), model)
    prefix, _, rest = model.partition(":")
    if prefix == "dummy":
        return _load(dummy.dummy_folder(rest), model)
    if prefix == "modelscope":
        return _load(_from_modelscope(rest), rest)
    path = Path(os.path.expanduser(model) if model else "/nonexistent")  # pathlib's raises for an unknown user
    if path.is_dir():
        return _load(path, path.resolve().name)
    if path.is_file():
        raise CheckpointError(f"{model} is a file: --model takes the folder that holds config.json and the weights")
    if HUB_ID.fullmatch(model):
        return _load(_from_hub(model), model)
    raise CheckpointError(f"no model {model!r}: --model takes {KINDS}")


def _load(folder: Path, name: str) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: --model takes {KINDS}")
    config = _read_json(folder / "config.json")
    _check_config(folder, config)
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise CheckpointError(f"{folder} has no tokenizer: one of {', '.join(TOKENIZER_FILES)} is needed")
    if not dummy.is_dummy(folder):
        _check_weights(folder)
    return Checkpoint(
        name=name,
        folder=folder,
        config=config,
        generation=generation,
        eos_ids=_eos_ids(folder, generation, config),
        vocab_size=_size(folder, config, "vocab_size"),
        max_len=_size(folder, config, "max_position_embeddings"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {_line(error)}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"cannot read {path}: not a JSON object")
    return data


def _check_config(folder: Path, config: dict[str, Any]) -> None:
    """Raise CheckpointError for numbers that no model can have; which of them a model needs is its own affair."""
    where = f"{folder}/config.json"
    for key in SIZES:
        value = config.get(key)
        if value is not None and not (type(value) is int and 1 <= value <= MOST):
            raise CheckpointError(f"{where}: {key} is {value!r}, not an integer from 1 to {MOST}")
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope is not None and not isinstance(rope, dict):
            raise CheckpointError(f"{where}: {key} is {rope!r}, not an object")
        numbers = {name: (rope or {})[name] for name in ROPE_NUMBERS if name in (rope or {})}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise CheckpointError(f"{where}: {name} is {value!r}, not a positive number")
        if numbers.get("low_freq_factor", 0) > numbers.get("high_freq_factor", math.inf):
            raise CheckpointError(f"{where}: low_freq_factor is above high_freq_factor")


def _eos_ids(folder: Path, *sources: dict[str, Any]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise CheckpointError(f"{folder}: eos_token_id is {value!r}, not an id or a list of ids")
        found.update(dict.fromkeys(ids))
    return tuple(found)


def _size(folder: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if value is None:
        raise CheckpointError(f"{folder}/config.json has no {key}; its model_type is {config.get('model_type')!r}")
    return value


def _check_weights(folder: Path) -> None:
    sharded = _is_sharded(folder)
    files = set(_weight_map(folder).values()) if sharded else {SINGLE}
    missing = sorted(file for file in files if not (folder / file).is_file())
    if missing and sharded:
        raise CheckpointError(f"{folder} is incomplete: {missing[0]} is missing ({len(missing)} of {len(files)} files)")
    if missing and any(folder.glob("*.bin")):
        raise CheckpointError(f"{folder} has its weights as .bin: safetensors only, convert it or take another copy")
    if missing:
        raise CheckpointError(f"{folder} has no weights: {SINGLE}, or {INDEX} and its files, is needed")


def _is_sharded(folder: Path) -> bool:
    """Where there are both, the single file counts, as in transformers: the index may be left over."""
    return (folder / INDEX).is_file() and not (folder / SINGLE).is_file()


def _weight_map(folder: Path) -> dict[str, str]:
    def usable(file: object) -> bool:  # a name with a folder in it would leave the checkpoint
        return isinstance(file, str) and file.endswith(".safetensors") and Path(file).name == file

    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(usable, weight_map.values())):
        raise CheckpointError(f"{folder / INDEX} has no usable weight_map")
    return weight_map


def _from_hub(model: str) -> Path:
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        return Path(hub.snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]))
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{model} is gated: accept its terms on its page, then set HF_TOKEN or log in with `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        message = f"{model} is neither a local folder nor a model on the Hub (a private one needs HF_TOKEN)"
        raise CheckpointError(message) from error
    except errors.LocalEntryNotFoundError as error:
        if hub.constants.HF_HUB_OFFLINE:
            raise CheckpointError(
                f"{model} is not in the Hub cache and HF_HUB_OFFLINE is set: unset it, or pass a local folder"
            ) from error
        raise CheckpointError(
            f"{model} is neither a local folder nor in the Hub cache, and {hub.constants.ENDPOINT} cannot be reached: "
            f"set HF_ENDPOINT to a mirror, or use --model {smollm2.PRESET}"
        ) from error
    except Exception as error:  # the network stack below has many exception types; whatever it is, one line says it
        raise CheckpointError(f"cannot download {model} from {hub.constants.ENDPOINT}: {_line(error)}") from error


def _from_modelscope(model: str) -> Path:
    if not HUB_ID.fullmatch(model):
        raise CheckpointError(f"modelscope:{model}: an id has the form modelscope:ORG/NAME")
    if importlib.util.find_spec("modelscope") is None:
        raise CheckpointError(f"modelscope:{model} needs the modelscope package: `pip install modelscope`")
    from modelscope import snapshot_download

    try:
        return Path(snapshot_download(model, allow_file_pattern=HUB_FILES))
    except Exception as error:  # as above
        raise CheckpointError(f"cannot download {model} from ModelScope: {_line(error)}") from error


def _line(error: Exception) -> str:
    """The message of an exception, or its type, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


class _FileSource:
    """Tensors of safetensors files; a file is opened when a tensor of it is asked for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.handles: dict[str, Any] = {}
        if _is_sharded(folder):
            self.files = _weight_map(folder)
        else:
            self.files = dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)

    def names(self) -> list[str]:
        return sorted(self.files)

    def slice(self, name: str) -> "_FileSlice":
        if name not in self.files:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        file = self.files[name]
        try:
            return _FileSlice(self._handle(file).get_slice(name))
        except CheckpointError:
            raise
        except Exception as error:  # the index names a tensor that the file lacks
            raise CheckpointError(f"{self.folder / file}: {_line(error)}") from error

    def _handle(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self.handles:
            path = self.folder / file
            try:
                self.handles[file] = self.stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except Exception as error:  # truncated or not safetensors at all
                raise CheckpointError(f"{path} is damaged: {_line(error)}") from error
        return self.handles[file]


class _FileSlice:
    """A safetensors slice with the shape as a tuple."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.shape = tuple(raw.get_shape())

    def __getitem__(self, index: Any) -> "torch.Tensor":
        return self.raw[index]
