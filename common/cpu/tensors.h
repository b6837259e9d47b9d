// What every operator checks about its tensors before it touches memory.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <initializer_list>

namespace minisgl {

inline void check_tensors(const char* op, std::initializer_list<const at::Tensor*> tensors) {
    for (const at::Tensor* t : tensors) {
        TORCH_CHECK(t->device().is_cpu(), op, ": tensors must be on the CPU, not on ", t->device());
        TORCH_CHECK(t->scalar_type() == tensors.begin()[0]->scalar_type(), op, ": dtypes differ: ",
                    tensors.begin()[0]->scalar_type(), " and ", t->scalar_type());
        TORCH_CHECK(t->numel() == 0 || t->stride(-1) == 1, op, ": the last dimension must be contiguous");
    }
}

inline void check_integers(const char* op, const char* name, const at::Tensor& t, at::ScalarType type) {
    TORCH_CHECK(t.device().is_cpu() && t.scalar_type() == type && t.is_contiguous(), op, ": ", name,
                " must be contiguous ", type, " on the CPU, not ", t.scalar_type(), " on ", t.device());
}

// f(T()) for the storage type.
template <class F>
void dispatch(const char* op, at::ScalarType type, F f) {
    switch (type) {
        case at::kFloat: return f(float());
        case at::kBFloat16: return f(c10::BFloat16());
        case at::kHalf: return f(c10::Half());
        default: TORCH_CHECK(false, op, ": float32, bfloat16 or float16, not ", type);
    }
}

// f(i) for all i, on several threads if the work (elements per i) is worth it.
template <class F>
void for_each(int64_t count, int64_t elements, F f) {
    constexpr int64_t kWorth = 65536;  // elements per thread: tens of microseconds
    int64_t grain = std::max<int64_t>(1, kWorth / std::max<int64_t>(1, elements));
    at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) f(i);
    });
}

}  // namespace minisgl
