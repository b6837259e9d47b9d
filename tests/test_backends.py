"""What ``--native`` and ``--attention-backend`` mean: which attention and which operations an engine takes."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch

from common import cpu
from common.tiny import cached_tiny_model
from tests.conftest import ENGINES, chapter
from tests.scheduling import has_option, part

CACHING = [name for name in ENGINES if name >= "ch04"]
COMPILED = cpu.native_ops() is not None


@pytest.fixture(params=CACHING)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return chapter(request.param)


def backend_of(module: ModuleType, **options: object) -> str:
    with module.LLM(str(cached_tiny_model("llama")), dtype="float32", threads=1, **options) as llm:
        return type(llm.engine.runner.backend).__name__


def test_attention_is_compiled_unless_that_is_switched_off(module: ModuleType) -> None:
    """Else every comparison of the two would compare torch with itself."""
    assert backend_of(module) == ("NativeBackend" if COMPILED else "TorchBackend")
    assert backend_of(module, native="off") == "TorchBackend"


def test_so_are_the_small_operations(module: ModuleType) -> None:
    ops, device = part(module, "ops"), torch.device("cpu")
    plain, fast = (ops.choose(device, torch.float32, native=native) for native in (False, True))
    assert plain == ops.Ops(cpu.torch_linear)
    names = ("rms_norm", "rotary", "silu_and_mul", "argmax")
    assert {getattr(fast, name) is getattr(plain, name) for name in names} == {not COMPILED}


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_a_gpu_without_bfloat16_gets_float16_and_plain_torch(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    """The card is stood in for."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda = torch.device("cuda")
    assert part(module, "engine")._dtype("auto", cuda) == dtype
    assert part(module, "engine")._dtype("float32", cuda) == torch.float32
    if has_option(module, "attention_backend"):
        attention = part(module, "attention")
        kv = SimpleNamespace(k=SimpleNamespace(device=cuda, shape=(1, 2, 16, 1, 64)))
        assert attention.runs_triton(cuda) == (dtype == torch.bfloat16)
        if dtype == torch.float16:
            assert type(attention.choose_backend(kv, native=True)).__name__ == "TorchBackend"
            with pytest.raises(ValueError, match=r"compute capability 8\.0"):
                attention.choose_backend(kv, native=True, wanted="triton")


@pytest.mark.parametrize("name", [name for name in CACHING if has_option(chapter(name), "attention_backend")])
def test_a_backend_that_is_named_is_taken_or_refused(name: str) -> None:
    module = chapter(name)
    assert backend_of(module, attention_backend="torch") == "TorchBackend"
    if COMPILED:  # whoever asks for it by name gets it
        assert backend_of(module, native="off", attention_backend="native") == "NativeBackend"
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="triton needs a CUDA device"):
            backend_of(module, attention_backend="triton")
    like = torch.empty(0, dtype=torch.float32)
    odd = part(module, "kvcache").KVCache(1, 2, 16, 1, 24, like)
    choose = part(module, "attention").choose_backend
    assert type(choose(odd, native=True)).__name__ == "TorchBackend"
    with pytest.raises(ValueError, match="native is not to be had here"):
        choose(odd, native=True, wanted="native")
