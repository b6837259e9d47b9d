// The small operations around the linears. In plain torch each is several passes with an allocation and a dispatch each;
// at a few rows it is these that cost, not the arithmetic. Roundings are those of the torch definitions.
#include "tensors.h"
#include "vec.h"

#include <cmath>
#include <limits>

namespace minisgl {
namespace {

constexpr float kLog2e = 1.4426950408889634f;

// f(index, count) for runs of elements that fill a vector, and for what is left.
template <class F>
MINISGL_INLINE void vectors(int64_t n, F f) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) f(i, std::integral_constant<int, kLanes>());
    if (i < n) f(i, n - i);
}
template <class T, class N>
MINISGL_INLINE VecF read(const T* p, N n) {
    if constexpr (std::is_same_v<N, int64_t>) return load_some(p, n);
    else return load(p);
}
template <class T, class N>
MINISGL_INLINE void write(T* p, VecF v, N n) {
    if constexpr (std::is_same_v<N, int64_t>) store_some(p, v, n);
    else store(p, v);
}

// Rows of the last dimension of x[T, N] or x[T, heads, N].
struct Rows {
    int64_t count, inner, size, outer_stride, inner_stride;
    explicit Rows(const at::Tensor& x)
        : count(x.dim() == 2 ? x.size(0) : x.size(0) * x.size(1)),
          inner(x.dim() == 2 ? 1 : x.size(1)),
          size(x.size(-1)),
          outer_stride(x.stride(0)),
          inner_stride(x.dim() == 2 ? 0 : x.stride(1)) {}
    int64_t at(int64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

// ---- RMSNorm, with the residual addition before it

template <class T>
void normalise(const T* x, T* residual, const T* weight, T* out, int64_t n, float eps) {
    VecF squares{};
    vectors(n, [&](int64_t i, auto count) {
        VecF v = read(x + i, count);
        if (residual) {
            v = rounded<T>(read(residual + i, count) + v);
            write(residual + i, v, count);
        }
        squares = v * v + squares;
    });
    if (residual) x = residual;
    const float factor = 1.0f / std::sqrt(sum_of(squares) / n + eps);
    vectors(n, [&](int64_t i, auto count) {
        write(out + i, rounded<T>(read(x + i, count) * factor) * read(weight + i, count), count);
    });
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                    const std::optional<at::Tensor>& residual) {
    check_tensors("rms_norm", {&x, &weight});
    TORCH_CHECK((x.dim() == 2 || x.dim() == 3) && weight.is_contiguous() && weight.size(-1) == x.size(-1) &&
                    (weight.dim() == 1 || (weight.dim() == 2 && x.dim() == 3 && weight.size(0) == x.size(1))),
                "rms_norm: want x[T, N] or x[T, heads, N] and weight[N] or weight[heads, N], got ", x.sizes(), " and ",
                weight.sizes());
    if (residual) {
        check_tensors("rms_norm", {&x, &*residual});
        TORCH_CHECK(x.dim() == 2 && residual->sizes() == x.sizes(), "rms_norm: residual must have the shape of x[T, N], ",
                    x.sizes(), ", not ", residual->sizes());
    }
    at::Tensor out = at::empty(x.sizes(), x.options());
    const Rows rows(x);
    const int64_t weight_stride = weight.dim() == 2 ? rows.size : 0;
    dispatch("rms_norm", x.scalar_type(), [&](auto element) {
        using T = decltype(element);
        const T *from = x.data_ptr<T>(), *w = weight.data_ptr<T>();
        T *to = out.data_ptr<T>(), *sum = residual ? residual->data_ptr<T>() : nullptr;
        const int64_t sum_stride = residual ? residual->stride(0) : 0;
        for_each(rows.count, rows.size, [&](int64_t r) {
            normalise(from + rows.at(r), sum ? sum + r * sum_stride : nullptr, w + r % rows.inner * weight_stride,
                      to + r * rows.size, rows.size, float(eps));
        });
    });
    return out;
}

// ---- Rotary embedding, and storing keys and values

template <class T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t n) {
    const int64_t half = n / 2;
    vectors(half, [&](int64_t i, auto count) {
        VecF low = read(x + i, count), high = read(x + half + i, count);
        VecF low_cos = rounded<T>(low * read(cos + i, count));
        VecF high_cos = rounded<T>(high * read(cos + half + i, count));
        write(out + i, high * read(sin + i, count) + low_cos, count);
        write(out + half + i, low * read(sin + half + i, count) + high_cos, count);
    });
}

void check_rotary(const char* op, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    check_tensors(op, {&x, &cos, &sin});
    TORCH_CHECK(x.dim() == 3 && x.size(2) % 2 == 0, op, ": want x[T, heads, D] with even D, got ", x.sizes());
    for (const at::Tensor* t : {&cos, &sin})
        TORCH_CHECK(t->is_contiguous() && t->numel() == x.size(0) * x.size(2) && t->size(-1) == x.size(2), op,
                    ": want contiguous cos and sin[T, 1, D] for x ", x.sizes(), ", got ", t->sizes());
}

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    check_rotary("rotary", x, cos, sin);
    at::Tensor out = at::empty(x.sizes(), x.options());
    const Rows rows(x);
    dispatch("rotary", x.scalar_type(), [&](auto element) {
        using T = decltype(element);
        const T *from = x.data_ptr<T>(), *c = cos.data_ptr<T>(), *s = sin.data_ptr<T>();
        T* to = out.data_ptr<T>();
        for_each(rows.count, rows.size, [&](int64_t r) {
            const int64_t token = r / rows.inner * rows.size;
            rotate(from + rows.at(r), c + token, s + token, to + r * rows.size, rows.size);
        });
    });
    return out;
}

// The caches are flat lists of slots.
void check_store(const char* op, const at::Tensor& v, const at::Tensor& k_cache, const at::Tensor& v_cache,
                 const at::Tensor& slots) {
    check_tensors(op, {&v, &k_cache, &v_cache});
    check_integers(op, "slots", slots, at::kLong);
    TORCH_CHECK(v.dim() == 3 && k_cache.dim() == 4 && k_cache.is_contiguous() && v_cache.is_contiguous() &&
                    k_cache.sizes() == v_cache.sizes() && k_cache.size(2) == v.size(1) && k_cache.size(3) == v.size(2),
                op, ": want [T, KV, D] and contiguous caches [P, page, KV, D], got ", v.sizes(), ", ", k_cache.sizes(),
                " and ", v_cache.sizes());
    TORCH_CHECK(slots.dim() == 1 && slots.numel() == v.size(0), op, ": ", v.size(0), " tokens but slots ", slots.sizes());
    const int64_t count = k_cache.size(0) * k_cache.size(1);
    const int64_t* slot = slots.data_ptr<int64_t>();
    for (int64_t t = 0; t < v.size(0); ++t)
        TORCH_CHECK(slot[t] >= 0 && slot[t] < count, op, ": slot ", slot[t], " of a cache of ", count);
}

template <class T>
void copy_heads(const T* from, int64_t stride, T* to, int64_t heads, int64_t dim) {
    for (int64_t h = 0; h < heads; ++h) std::memcpy((void*)(to + h * dim), from + h * stride, dim * sizeof(T));
}

void store_kv(const at::Tensor& k, const at::Tensor& v, const at::Tensor& k_cache, const at::Tensor& v_cache,
              const at::Tensor& slots) {
    check_tensors("store_kv", {&k, &v});
    TORCH_CHECK(k.sizes() == v.sizes(), "store_kv: k is ", k.sizes(), " but v ", v.sizes());
    check_store("store_kv", v, k_cache, v_cache, slots);
    const int64_t heads = v.size(1), dim = v.size(2), row = heads * dim;
    dispatch("store_kv", v.scalar_type(), [&](auto element) {
        using T = decltype(element);
        const T *keys = k.data_ptr<T>(), *values = v.data_ptr<T>();
        T *to_k = k_cache.data_ptr<T>(), *to_v = v_cache.data_ptr<T>();
        const int64_t* slot = slots.data_ptr<int64_t>();
        for_each(v.size(0), 2 * row, [&](int64_t t) {
            copy_heads(keys + t * k.stride(0), k.stride(1), to_k + slot[t] * row, heads, dim);
            copy_heads(values + t * v.stride(0), v.stride(1), to_v + slot[t] * row, heads, dim);
        });
    });
}

// ---- SwiGLU

at::Tensor silu_and_mul(const at::Tensor& x) {
    check_tensors("silu_and_mul", {&x});
    TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, "silu_and_mul: want x[T, 2 I], got ", x.sizes());
    const int64_t n = x.size(1) / 2;
    at::Tensor out = at::empty({x.size(0), n}, x.options());
    dispatch("silu_and_mul", x.scalar_type(), [&](auto element) {
        using T = decltype(element);
        const T* from = x.data_ptr<T>();
        T* to = out.data_ptr<T>();
        for_each(x.size(0), 2 * n, [&](int64_t r) {
            const T *gate = from + r * x.stride(0), *up = gate + n;
            vectors(n, [&](int64_t i, auto count) {
                VecF g = read(gate + i, count);
                VecF e = exp2(-max(g * kLog2e, splat(-127.0f)));
                write(to + r * n + i, rounded<T>(g / (e + 1.0f)) * read(up + i, count), count);
            });
        });
    });
    return out;
}

// ---- Greedy pick

template <class T>
int64_t first_maximum(const T* x, int64_t n) {
    constexpr int64_t kBlock = 512;
    constexpr int kChains = 4;  // maxima side by side: one alone would wait for its own result
    float best = -std::numeric_limits<float>::infinity();
    int64_t best_block = 0;
    VecU magnitude[kChains] = {};  // the largest without sign; above infinity are the NaN
    for (int64_t block = 0; block < n; block += kBlock) {
        VecF most[kChains];
        for (VecF& m : most) m = splat(best);
        const int64_t size = std::min(kBlock, n - block), whole = size - size % (kChains * kLanes);
        auto look = [&](VecF v, size_t chain) {
            most[chain] = max(v, most[chain]);
            VecU bits = (VecU)v << 1;
            magnitude[chain] = bits > magnitude[chain] ? bits : magnitude[chain];
        };
        for (int64_t i = 0; i < whole; i += kChains * kLanes)
            each<kChains>(MINISGL_EACH(c) { look(load(x + block + i + c * kLanes), c); });
        for (int64_t i = whole; i < size; ++i) look(splat(static_cast<float>(x[block + i])), 0);
        float top = max_of(max(max(most[0], most[1]), max(most[2], most[3])));
        if (top > best) best = top, best_block = block;
    }
    bool has_nan = false;
    for (VecU m : magnitude)
        for (int i = 0; i < kLanes; ++i) has_nan |= m[i] > 0xff000000u;
    for (int64_t i = has_nan ? 0 : best_block; i < n; ++i) {
        float v = static_cast<float>(x[i]);
        if (has_nan ? v != v : v == best) return i;  // as torch has it, a NaN is the maximum
    }
    return 0;
}

at::Tensor argmax_rows(const at::Tensor& logits) {
    check_tensors("argmax_rows", {&logits});
    TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "argmax_rows: want logits[R, V], got ", logits.sizes());
    at::Tensor out = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
    dispatch("argmax_rows", logits.scalar_type(), [&](auto element) {
        using T = decltype(element);
        const T* x = logits.data_ptr<T>();
        int64_t* to = out.data_ptr<int64_t>();
        for_each(logits.size(0), logits.size(1), [&](int64_t r) {
            to[r] = first_maximum(x + r * logits.stride(0), logits.size(1));
        });
    });
    return out;
}

}  // namespace
}  // namespace minisgl

TORCH_LIBRARY_FRAGMENT(minisgl_cpu, m) {
    using namespace minisgl;
    m.def("rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!)? residual=None) -> Tensor", &rms_norm);
    m.def("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor", &rotary);
    m.def("store_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()", &store_kv);
    m.def("silu_and_mul(Tensor x) -> Tensor", &silu_and_mul);
    m.def("argmax_rows(Tensor logits) -> Tensor", &argmax_rows);
}
