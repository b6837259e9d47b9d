// Vectors of one register. They are the compiler's own vector types, so that one source serves AVX-512, AVX2 and what has
// 16-byte registers; intrinsics stand only where the types cannot say it (products of bfloat16, half precision).
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define MINISGL_INLINE inline __attribute__((always_inline))

namespace minisgl {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// f(0), f(1), … f(count - 1), written out: only with constant indices do arrays of vectors live in registers.
template <class F, size_t... i>
MINISGL_INLINE void each(std::index_sequence<i...>, F f) {
    (f(i), ...);
}
template <int count, class F>
MINISGL_INLINE void each(F f) {
    each(std::make_index_sequence<count>(), f);
}
#define MINISGL_EACH(i) [&](size_t i) __attribute__((always_inline))

typedef float VecF __attribute__((vector_size(4 * kLanes)));
typedef int32_t VecI __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecU __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VecS __attribute__((vector_size(2 * kLanes)));  // as many elements
typedef uint16_t VecW __attribute__((vector_size(4 * kLanes)));  // twice as many

VecI lanes_of(VecF);
VecI lanes_of(VecU);
VecW lanes_of(VecW);

// Lanes of two vectors picked by constants: those of a are counted first, those of b from there on.
#if defined(__clang__)
#define MINISGL_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MINISGL_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype(lanes_of(a)){__VA_ARGS__})
#endif

MINISGL_INLINE VecF splat(float x) { return VecF{} + x; }
MINISGL_INLINE VecU splat(uint32_t x) { return VecU{} + x; }
MINISGL_INLINE VecF max(VecF a, VecF b) { return a > b ? a : b; }

template <class V, class T>
MINISGL_INLINE V load_as(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

MINISGL_INLINE VecU widen(VecS v) {  // as unsigned numbers
#if defined(__AVX512F__)
    return (VecU)_mm512_cvtepu16_epi32((__m256i)v);
#else
    return __builtin_convertvector(v, VecU);
#endif
}

// ---- Elements of a storage type as floats, and back with rounding to the nearest, ties to even.

MINISGL_INLINE VecF load(const float* p) { return load_as<VecF>(p); }
MINISGL_INLINE VecF load(const c10::BFloat16* p) {
    return (VecF)(widen(load_as<VecS>(p)) << 16);
}
MINISGL_INLINE VecF load(const c10::Half* p) {
#if defined(__AVX512F__)
    return (VecF)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return (VecF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    VecF v;
    for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(p[i]);
    return v;
#endif
}

MINISGL_INLINE VecS bf16_bits(VecF v) {
#if defined(__AVX512BF16__)
    return (VecS)_mm512_cvtneps_pbh((__m512)v);
#else
    VecU u = (VecU)v;
    VecU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return __builtin_convertvector(v == v ? rounded : (u >> 16) | 0x40u, VecS);  // a NaN stays one
#endif
}

MINISGL_INLINE void store(float* p, VecF v) { std::memcpy(p, &v, sizeof(v)); }
MINISGL_INLINE void store(c10::BFloat16* p, VecF v) {
    VecS bits = bf16_bits(v);
    std::memcpy((void*)p, &bits, sizeof(bits));
}
MINISGL_INLINE void store(c10::Half* p, VecF v) {
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<c10::Half>(v[i]);
}

template <class T>
MINISGL_INLINE VecF load_some(const T* p, int64_t n) {  // the first n, zeros behind them
    T buffer[kLanes] = {};
    std::memcpy((void*)buffer, p, n * sizeof(T));
    return load(buffer);
}
template <class T>
MINISGL_INLINE void store_some(T* p, VecF v, int64_t n) {
    T buffer[kLanes];
    store(buffer, v);
    std::memcpy((void*)p, buffer, n * sizeof(T));
}

// The value that is left after storing as T: torch rounds between the operations of a definition.
template <class T>
MINISGL_INLINE VecF rounded(VecF v) {
    if constexpr (std::is_same_v<T, float>) {
        return v;
    } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
        return (VecF)(widen(bf16_bits(v)) << 16);
    } else {
        T buffer[kLanes];
        store(buffer, v);
        return load(buffer);
    }
}

// ---- Across lanes

using Lanes = std::make_index_sequence<kLanes>;

template <size_t... lane>
MINISGL_INLINE VecI numbered(std::index_sequence<lane...>) {
    return VecI{int32_t(lane)...};
}
template <int distance, size_t... lane>
MINISGL_INLINE VecF moved(VecF v, std::index_sequence<lane...>) {
    return MINISGL_SHUFFLE(v, v, int(lane ^ distance)...);
}
template <int distance = kLanes / 2, class Op>
MINISGL_INLINE float fold(VecF v, Op op) {
    v = op(v, moved<distance>(v, Lanes()));
    if constexpr (distance == 1) {
        return v[0];
    } else {
        return fold<distance / 2>(v, op);
    }
}
MINISGL_INLINE float sum_of(VecF v) {
    return fold(v, [](VecF a, VecF b) { return a + b; });
}
MINISGL_INLINE float max_of(VecF v) {
    return fold(v, [](VecF a, VecF b) { return max(a, b); });
}

// Elements first, first + 1, … of a and b in turn.
template <int first, size_t... i>
MINISGL_INLINE VecW zip(VecW a, VecW b, std::index_sequence<i...>) {
    return MINISGL_SHUFFLE(a, b, short(first + i / 2 + i % 2 * 2 * kLanes)...);
}
template <int first>
MINISGL_INLINE VecW zip(VecW a, VecW b) {
    return zip<first>(a, b, std::make_index_sequence<2 * kLanes>());
}

// a, b = the even parts of both, the odd parts of both; a part is what one machine instruction can pick.
template <class Pick, size_t... lane>
MINISGL_INLINE void regroup(VecU& a, VecU& b, Pick pick, std::index_sequence<lane...>) {
    VecU even = MINISGL_SHUFFLE(a, b, pick(int(lane), 0)...);
    VecU odd = MINISGL_SHUFFLE(a, b, pick(int(lane), 1)...);
    a = even, b = odd;
}
// Rows become columns. Words and pairs of words change place within blocks of four words, then the blocks themselves.
MINISGL_INLINE void transpose(VecU (&x)[kLanes]) {
    auto words = [](int lane, int odd) { return lane % 2 * kLanes + lane / 4 * 4 + lane % 4 / 2 + odd * 2; };
    auto pairs = [](int lane, int odd) { return lane % 4 / 2 * kLanes + lane / 4 * 4 + lane % 2 + odd * 2; };
    each<kLanes / 2>(MINISGL_EACH(i) { regroup(x[2 * i], x[2 * i + 1], words, Lanes()); });
    each<kLanes / 4>(MINISGL_EACH(i) {
        regroup(x[4 * i], x[4 * i + 2], pairs, Lanes());
        regroup(x[4 * i + 1], x[4 * i + 3], pairs, Lanes());
        std::swap(x[4 * i + 1], x[4 * i + 2]);
    });
    if constexpr (kLanes > 4) {
        auto blocks = [](int lane, int odd) {
            return lane / (kLanes / 2) * kLanes + lane / 4 % (kLanes / 8) * 8 + lane % 4 + odd * 4;
        };
        each<kLanes / 2>(MINISGL_EACH(i) { regroup(x[i + i / 4 * 4], x[i + i / 4 * 4 + 4], blocks, Lanes()); });
        if constexpr (kLanes > 8) each<8>(MINISGL_EACH(i) { regroup(x[i], x[i + 8], blocks, Lanes()); });
    }
}

// 2^x for x <= 127 with a relative error of 1e-7; 0 below -126, NaN for NaN.
MINISGL_INLINE VecF exp2(VecF x) {
    const VecF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, kept in the low bits
    VecF shifted = x + magic;
    VecF r = x - (shifted - magic);  // in [-0.5, 0.5], where the polynomial is the best of its degree
    VecF p = splat(1.5345812e-4f);
    p = p * r + 1.3399931e-3f;
    p = p * r + 9.618489e-3f;
    p = p * r + 5.5503286e-2f;
    p = p * r + 2.4022646e-1f;
    p = p * r + 6.931472e-1f;
    p = p * r + 1.0f;
    p = (VecF)((VecU)p + ((VecU)shifted << 23));
    return x < -126.0f ? VecF{} : p;
}

// ---- Products on words of 32 bits: one float, or two neighbouring bfloat16 of which both products are added.

struct FloatWord {
    static constexpr int kElements = 1;
    static MINISGL_INLINE VecF multiply_add(VecU a, VecU b, VecF sum) { return (VecF)a * (VecF)b + sum; }
};

#if defined(__AVX512BF16__)
struct PairWord {
    static constexpr int kElements = 2;
    static MINISGL_INLINE VecF multiply_add(VecU a, VecU b, VecF sum) {
        return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)a);
    }
};
#endif

}  // namespace minisgl
