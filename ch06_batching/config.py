"""Every option of the engine and of the server, once: flags and LLM keywords are derived from these fields."""

from __future__ import annotations

from dataclasses import dataclass

from common.cli import option, parse_bytes


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
    kv_memory: str = option("auto", "memory for keys and values, e.g. 512M; auto: what is needed, if it is there")
    max_running: int = option(64, "requests in one step at most; lowered where kv_memory holds fewer")
    max_batch_tokens: int = option(0, "tokens in one step at most; 0: 96 on a CPU, 2048 on a GPU")
    scheduler: str = option(
        "continuous", "static: a batch runs to its end before the next begins", ("continuous", "static")
    )
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
        if self.max_running < 1:
            raise ValueError(f"max_running must be at least 1, got {self.max_running}")
        if self.max_batch_tokens < 0:
            raise ValueError(f"max_batch_tokens must be 0 or more, got {self.max_batch_tokens}")
        self.kv_memory_bytes = parse_bytes(str(self.kv_memory))  # None: auto


@dataclass(kw_only=True)
class ServerConfig:
    """Raises ValueError for a value that no server could run with."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 opens the server to the network")
    port: int = option(8000, "port to listen on; 0: a free one, printed")
    served_model_name: str = option("", "model name that clients see", metavar="NAME")
    api_key: str = option("", "key that clients must send as a bearer token", metavar="KEY")
    max_queue: int = option(256, "requests that may wait for their first token; more are answered 429")
    max_body_bytes: int = option(4 * 2**20, "largest request body; larger ones are answered 413")
    request_timeout: float = option(600.0, "seconds a request may take before it is answered 504; 0: no limit")
    drain_timeout: float = option(30.0, "seconds that open requests may still take after SIGTERM")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")
        for name, low in (("max_queue", 1), ("max_body_bytes", 1), ("request_timeout", 0), ("drain_timeout", 0)):
            if not low <= getattr(self, name) <= 1e9:
                raise ValueError(f"{name} must be from {low} to 1e9, got {getattr(self, name)}")
        if not self.served_model_name.isprintable():
            raise ValueError(f"served_model_name must be printable text, got {self.served_model_name!r}")
