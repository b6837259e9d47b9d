// Linear layers over weights that were reordered once. The outputs are cut into panels of two vectors; a panel's weights lie
// in the order in which they are used, so that one row as well as hundreds read them in one straight stream. Within a
// panel a tile of rows is computed at once: each weight that was loaded serves all rows of the tile from a register.
// Weights for float32 may be kept as bfloat16 where that loses nothing: half the bytes to read, the same products.
#include "tensors.h"
#include "vec.h"

#include <algorithm>
#include <optional>
#include <vector>

namespace minisgl {
namespace {

constexpr int kVectors = 2;
constexpr int kColumns = kVectors * kLanes;  // outputs of one panel
constexpr int64_t kBlock = 192;              // rows that share one pass over the weights: so many stay in the L2 cache
constexpr int kAhead = 2048;                 // bytes of a panel that are fetched ahead; it may point beyond the end

// Rows of a tile: two sums each, which with what is loaded fill the registers. Tried on x86 only; elsewhere oneDNN computes.
#if defined(__AVX512F__)
constexpr int kTile = 12;  // of 32 registers
constexpr bool kFloat = true;
#else
constexpr int kTile = 6;  // of 16
#if defined(__AVX2__) && defined(__FMA__)
constexpr bool kFloat = true;
#else
constexpr bool kFloat = false;
#endif
#endif
template <class T>
struct Word {
    using type = FloatWord;
};
#if defined(__AVX512BF16__)
constexpr bool kBFloat16 = true;
template <>
struct Word<c10::BFloat16> {
    using type = PairWord;
};
#else
constexpr bool kBFloat16 = false;
#endif

// One linear layer: y[row] = x[row] · weight + bias. Its weights are [panels][words][kColumns] words of Word::kElements.
template <class T>
struct Layer {
    const T* x;
    const float* bias;  // [panels * kColumns], or null
    T* y;
    int64_t x_stride, words, outputs;
};

// A vector of words; a bfloat16 that stands for a float becomes one.
template <class T, class S>
MINISGL_INLINE VecU words_at(const S* p) {
    if constexpr (std::is_same_v<T, S>) return load_as<VecU>(p);
    else return (VecU)load(p);
}

// `rows` rows from `row` on, one panel with these weights.
template <int rows, class T, class S>
void tile(const Layer<T>& layer, const S* weights, int64_t row, int64_t panel) {
    using W = typename Word<T>::type;
    constexpr int phases = rows == 1 ? 4 : rows <= 3 ? 2 : 1;  // sums side by side: one alone would wait for itself
    const T* x = layer.x + row * layer.x_stride;
    VecF sum[phases][rows][kVectors] = {};
    auto add = [&](int64_t k, auto phase) __attribute__((always_inline)) {
        const S* w = weights + k * kColumns * W::kElements;
        VecU w0 = words_at<T>(w), w1 = words_at<T>(w + kLanes * W::kElements);
        if constexpr (rows <= 4) __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead);
        each<rows>(MINISGL_EACH(r) {
            VecU a = splat(load_as<uint32_t>(x + r * layer.x_stride + k * W::kElements));
            sum[phase][r][0] = W::multiply_add(a, w0, sum[phase][r][0]);
            sum[phase][r][1] = W::multiply_add(a, w1, sum[phase][r][1]);
        });
    };
    int64_t k = 0;
    for (; k + phases <= layer.words; k += phases)
        each<phases>([&](auto phase) __attribute__((always_inline)) { add(k + phase, phase); });
    for (; k < layer.words; ++k) add(k, 0);
    const int64_t first = panel * kColumns, count = std::min<int64_t>(kColumns, layer.outputs - first);
    each<rows>(MINISGL_EACH(r) {
        T* y = layer.y + (row + r) * layer.outputs + first;
        for (int v = 0; v < kVectors; ++v) {
            VecF total = layer.bias ? load(layer.bias + first + v * kLanes) : VecF{};
            for (int p = 0; p < phases; ++p) total += sum[p][r][v];
            const int64_t left = count - v * kLanes;
            if (left >= kLanes) store(y + v * kLanes, total);
            else if (left > 0) store_some(y + v * kLanes, total, left);
        }
    });
}

template <class T, class S, size_t... i>
void any_tile(const Layer<T>& layer, const S* weights, int64_t row, int64_t rows, int64_t panel, std::index_sequence<i...>) {
    using Tile = void (*)(const Layer<T>&, const S*, int64_t, int64_t);
    static constexpr Tile tiles[] = {tile<int(i) + 1, T, S>...};
    tiles[rows - 1](layer, weights, row, panel);
}

// `size` rows from `row` on, one panel: tiles of equal sizes, for a small last one would be slow.
template <class T, class S>
void rows_of(const Layer<T>& layer, const S* weights, int64_t row, int64_t size, int64_t panel) {
    const int64_t tiles = (size + kTile - 1) / kTile;
    if constexpr (!std::is_same_v<T, S>)
        if (tiles > 2) {  // widened once for all of them
            static thread_local std::vector<T> wide;
            wide.resize(layer.words * kColumns);
            for (int64_t i = 0; i < layer.words * kColumns; i += kLanes) store(wide.data() + i, load(weights + i));
            return rows_of<T, T>(layer, wide.data(), row, size, panel);
        }
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t from = size * t / tiles, to = size * (t + 1) / tiles;
        any_tile(layer, weights, row + from, to - from, panel, std::make_index_sequence<kTile>());
    }
}

template <class T, class S>
void compute(const Layer<T>& layer, const S* packed, int64_t rows, int64_t panels) {
    at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
        for (int64_t block = 0; block < rows; block += kBlock)
            for (int64_t panel = begin; panel < end; ++panel) {
                const S* weights = packed + panel * layer.words * kColumns * Word<T>::type::kElements;
                rows_of(layer, weights, block, std::min(kBlock, rows - block), panel);
            }
    });
}

// Columns of a panel and elements of a word for weights of this type; nothing where this operator should not be used.
std::vector<int64_t> panel_of(at::ScalarType type) {
    if (type == at::kFloat && kFloat) return {kColumns, 1};
    if (type == at::kBFloat16 && kBFloat16) return {kColumns, 2};
    return {};
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t outputs) {
    const at::Tensor x = input.dim() == 2 && input.stride(1) != 1 ? input.contiguous() : input;
    const bool narrow = x.scalar_type() == at::kFloat && packed.scalar_type() == at::kBFloat16;
    check_tensors("linear", {&x, narrow ? &x : &packed});
    check_tensors("linear", {&packed});
    const std::vector<int64_t> panel = panel_of(x.scalar_type());
    TORCH_CHECK(!panel.empty(), "linear: no packed weights of ", x.scalar_type(), " on this processor");
    TORCH_CHECK(packed.dim() == 4 && packed.is_contiguous() && packed.size(2) == panel[0] && packed.size(3) == panel[1],
                "linear: packed weights are [panels, words, ", panel[0], ", ", panel[1], "], not ", packed.sizes());
    TORCH_CHECK(x.dim() == 2 && x.size(1) == packed.size(1) * packed.size(3), "linear: want x[T, ",
                packed.size(1) * packed.size(3), "], got ", x.sizes());
    TORCH_CHECK(outputs > (packed.size(0) - 1) * kColumns && outputs <= packed.size(0) * kColumns, "linear: ", packed.size(0),
                " panels do not make ", outputs, " outputs");
    TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->numel() == packed.size(0) * kColumns),
                "linear: the bias is float32, one per column of all panels");
    at::Tensor y = at::empty({x.size(0), outputs}, x.options());
    auto run = [&](auto element, auto stored) {
        using T = decltype(element);
        using S = decltype(stored);
        compute<T, S>({x.const_data_ptr<T>(), bias ? bias->const_data_ptr<float>() : nullptr, y.mutable_data_ptr<T>(),
                       x.stride(0), packed.size(1), outputs},
                      packed.const_data_ptr<S>(), x.size(0), packed.size(0));
    };
    if (narrow) run(float(), c10::BFloat16());
    else if (x.scalar_type() == at::kFloat) run(float(), float());
    else run(c10::BFloat16(), c10::BFloat16());
    return y;
}

}  // namespace
}  // namespace minisgl

TORCH_LIBRARY_FRAGMENT(minisgl_cpu, m) {
    using namespace minisgl;
    m.def("panel_of(ScalarType type) -> int[]", &panel_of);
    m.def("linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor", &linear);
}
