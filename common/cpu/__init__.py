"""What makes every chapter fast on a CPU alike, behind plain interfaces: no chapter teaches it."""

from common.cpu.linear import PackedLinear, has_native_bf16, lazy_zeros, packed_linear_works, torch_linear

__all__ = ["PackedLinear", "has_native_bf16", "lazy_zeros", "packed_linear_works", "torch_linear"]
