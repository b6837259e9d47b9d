"""Every option of the engine, once: command-line flags and LLM keywords are derived from these fields."""

from __future__ import annotations

from dataclasses import dataclass

from common.cli import option


@dataclass(kw_only=True)
class EngineConfig:
    """Raises ValueError for a value that no machine could serve."""

    model: str = option("smollm2-135m", "local folder, Hub id, preset (smollm2-135m) or dummy:NAME")
    dtype: str = option(
        "auto",
        "auto: bfloat16 where the processor has it, else float32, on a GPU float16",
        ("auto", "float32", "bfloat16", "float16"),
    )
    device: str = option("auto", "where the model runs", ("auto", "cpu", "cuda"))
    threads: int = option(0, "compute threads on a CPU; 0: one per core")
    seed: int = option(0, "seed of the requests that bring none")
    max_model_len: int = option(0, "tokens of prompt + output; 0: what the model allows, at most 2048")
    native: str = option("auto", "packed and compiled CPU operators", ("auto", "off"))
    debug_invariants: bool = option(False, "check the engine's books after every step")

    def __post_init__(self) -> None:
        for f in self.__dataclass_fields__.values():
            value, choices = getattr(self, f.name), f.metadata["choices"]
            if choices and value not in choices:
                raise ValueError(f"{f.name} must be one of {', '.join(choices)}, got {value!r}")
            if type(f.default) in (bool, int) and type(value) is not type(f.default):
                raise ValueError(f"{f.name} must be of type {type(f.default).__name__}, got {value!r}")
        if not 0 <= self.threads <= 1024:
            raise ValueError(f"threads must be from 0 to 1024, got {self.threads}")
        if self.max_model_len < 0 or self.max_model_len == 1:
            raise ValueError(f"max_model_len must be 0 or at least 2, got {self.max_model_len}")
