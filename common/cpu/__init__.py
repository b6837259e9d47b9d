"""What makes every chapter fast on a CPU alike, behind plain interfaces: no chapter teaches it."""

from common.cpu.definitions import CpuOps
from common.cpu.linear import PackedLinear, has_native_bf16, lazy_zeros, packed_linear_works, torch_linear
from common.cpu.native import fits_native_attention, native_ops

__all__ = [
    "CpuOps",
    "PackedLinear",
    "fits_native_attention",
    "has_native_bf16",
    "lazy_zeros",
    "native_ops",
    "packed_linear_works",
    "torch_linear",
]
