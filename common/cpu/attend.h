// Attention of one block of query rows over one chunk of positions: what attention.cpp's threads do, in registers.
#pragma once

#include <cmath>
#include <vector>

#include "paged.h"

namespace minisgl {

// ---- Storage types: how keys, values and weights become words

template <class T>
struct Packed {  // one float per word, also for types that the processor does not multiply itself
    using Word = FloatWord;
    static MINISGL_INLINE VecU words(const T* p, int64_t) { return (VecU)load(p); }
    static MINISGL_INLINE void store_weights(uint32_t* words, int v, VecF p) { store((float*)words + v * kLanes, p); }
    template <int vecs>
    static MINISGL_INLINE void interleave(VecU (&to)[vecs], const T* row, const T*) {
        each<vecs>(MINISGL_EACH(i) { to[i] = (VecU)load(row + i * kLanes); });
    }
};

#if defined(__AVX512BF16__)
template <>
struct Packed<c10::BFloat16> {
    using T = c10::BFloat16;
    using Word = PairWord;
    static MINISGL_INLINE VecU words(const T* p, int64_t elements) {
        if (elements >= 2 * kLanes) return load_as<VecU>(p);
        VecU half{};
        std::memcpy(&half, p, sizeof(half) / 2);
        return half;
    }
    static MINISGL_INLINE void store_weights(uint32_t* words, int v, VecF p) { store((T*)words + v * kLanes, p); }
    // Word d of the result holds dimension d of two positions.
    template <int vecs>
    static MINISGL_INLINE void interleave(VecU (&to)[vecs], const T* first, const T* second) {
        each<vecs / 2>(MINISGL_EACH(i) {
            VecW a = load_as<VecW>(first + i * 2 * kLanes), b = load_as<VecW>(second + i * 2 * kLanes);
            to[2 * i] = (VecU)zip<0>(a, b);
            to[2 * i + 1] = (VecU)zip<kLanes>(a, b);
        });
        if constexpr (vecs % 2 == 1) {
            constexpr int at = (vecs - 1) * kLanes;
            to[vecs - 1] = widen(load_as<VecS>(first + at)) | widen(load_as<VecS>(second + at)) << 16;
        }
    }
};
#endif

// ---- sum[rows][width] = sum * scale[row] + a[rows][depth] x b[depth][width]

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 6, kTileVecs = 4;  // 24 of 32 registers hold sums
#else
constexpr int kTileRows = 6, kTileVecs = 2;  // 12 of 16
#endif

template <class Word, int rows, int vecs>
void tile(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t depth, float* sum, int64_t sum_row,
          const float* scale) {
    VecF s[rows][vecs];
    each<rows>(MINISGL_EACH(r) {
        each<vecs>(MINISGL_EACH(v) {
            s[r][v] = scale ? load(sum + r * sum_row + v * kLanes) * scale[r] : VecF{};
        });
    });
    for (int64_t k = 0; k < depth; ++k) {
        VecU x[vecs];
        each<vecs>(MINISGL_EACH(v) { x[v] = load_as<VecU>(b + k * b_row + v * kLanes); });
        each<rows>(MINISGL_EACH(r) {
            VecU y = splat(a[r * a_row + k]);
            each<vecs>(MINISGL_EACH(v) { s[r][v] = Word::multiply_add(y, x[v], s[r][v]); });
        });
    }
    each<rows>(MINISGL_EACH(r) {
        each<vecs>(MINISGL_EACH(v) { store(sum + r * sum_row + v * kLanes, s[r][v]); });
    });
}

template <class Word, int rows = kTileRows, int vecs = kTileVecs, class... Args>
MINISGL_INLINE void tile_of(int want_rows, int want_vecs, Args... args) {
    if constexpr (rows > 1) {
        if (want_rows < rows) return tile_of<Word, rows - 1, vecs>(want_rows, want_vecs, args...);
    }
    if constexpr (vecs > 1) {
        if (want_vecs < vecs) return tile_of<Word, rows, vecs - 1>(want_rows, want_vecs, args...);
    }
    tile<Word, rows, vecs>(args...);
}

template <class Word>
void multiply(int64_t rows, int64_t vecs, const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row,
              int64_t depth, float* sum, int64_t sum_row, const float* scale) {
    for (int64_t v = 0; v < vecs; v += kTileVecs)
        for (int64_t r = 0; r < rows; r += kTileRows)
            tile_of<Word>(std::min<int64_t>(rows - r, kTileRows), std::min<int64_t>(vecs - v, kTileVecs),
                          a + r * a_row, a_row, b + v * kLanes, b_row, depth, sum + r * sum_row + v * kLanes, sum_row,
                          scale ? scale + r : nullptr);
}

// ---- One thread's work

template <class T>
struct Worker {
    using Pack = Packed<T>;
    using Word = typename Pack::Word;
    static constexpr int64_t kPer = Word::kElements;
    static constexpr bool kDirect = !std::is_same_v<T, c10::Half>;  // half is rare: less code to compile

    const Problem& p;
    const T *q, *k, *v;
    const int64_t words;  // of one head
    uint32_t *queries, *keys, *values, *weights;
    float *scores, *scale;

    Worker(const Problem& p, const T* q, const T* k, const T* v, int64_t most_rows)
        : p(p), q(q), k(k), v(v), words(p.dim / kPer) {
        struct Place {
            void* pointer;
            int64_t size;
        } places[] = {{&queries, most_rows * words},    {&keys, (words + kLanes) * kChunk},
                      {&values, kChunk / kPer * p.dim}, {&weights, most_rows * kChunk},
                      {&scores, most_rows * kChunk},    {&scale, most_rows}};
        int64_t total = 64 / sizeof(float);  // room for the alignment, whatever the vectors of this machine
        for (Place& place : places) total += place.size = (place.size + kLanes - 1) / kLanes * kLanes;
        static thread_local std::vector<float> memory;  // kept: zeroing it in every call would cost as much as a chunk
        if ((int64_t)memory.size() < total) memory.resize(total);
        uintptr_t at = ((uintptr_t)memory.data() + 63) & ~(uintptr_t)63;
        for (Place& place : places) {
            std::memcpy(place.pointer, &at, sizeof(at));
            at += place.size * sizeof(float);
        }
    }

    void load_queries(const Item& item) {
        uint32_t* to = queries;
        for (int64_t h = item.kv_begin; h < item.kv_begin + item.kv_heads; ++h)
            for (int64_t t = item.token; t < item.token + item.tokens; ++t)
                for (int64_t g = 0; g < p.group; ++g, to += words) {
                    const T* from = q + t * p.q_token + (h * p.group + g) * p.q_head;
                    if constexpr (kPer == 2) {
                        std::memcpy(to, from, p.dim * sizeof(T));
                    } else {
                        for (int64_t d = 0; d < p.dim; d += kLanes) store((float*)to + d, load(from + d));
                    }
                }
    }

    // What comes after the present chunk of the present head: its lines are prefetched one by one as the present ones are
    // read. A burst of more lines than the processor can have in flight would stall it.
    struct Ahead {
        const char *k, *v;
        const Chunk* chunk;
    };

    // A square of words and positions, transposed: x[w] holds word `word + w` of all positions.
    MINISGL_INLINE void read_keys(VecU (&x)[kLanes], const char* base, const Chunk& chunk, const Ahead& ahead, int64_t i,
                                  int64_t word) {
        int64_t at = word * kPer * sizeof(T), rest = (words - word) * kPer;
        each<kLanes>(MINISGL_EACH(j) {
            x[j] = Pack::words((const T*)(base + chunk.k_row[i + j] + at), rest);
            __builtin_prefetch(ahead.k + ahead.chunk->k_row[i + j] + at);
        });
        transpose(x);
    }

    void pack_keys(const char* base, const Chunk& chunk, const Ahead& ahead) {
        const int64_t all = words;
        for (int64_t i = 0; i < chunk.size; i += kLanes)
            for (int64_t w = 0; w < all; w += kLanes) {
                VecU x[kLanes];
                read_keys(x, base, chunk, ahead, i, w);
                uint32_t* to = keys + w * kChunk + i;
                each<kLanes>(MINISGL_EACH(j) { std::memcpy(to + j * kChunk, &x[j], sizeof(VecU)); });
            }
    }

    // The scores of few rows, without a copy of the keys in between.
    template <int rows>
    void score(const uint32_t* query, const char* base, const Chunk& chunk, const Ahead& ahead) {
        const int64_t all = words;
        for (int64_t i = 0; i < chunk.size; i += kLanes) {
            VecF even[rows] = {}, odd[rows] = {};  // two sums per row: a chain of additions half as long
            for (int64_t w = 0; w < all; w += kLanes) {
                VecU x[kLanes];
                read_keys(x, base, chunk, ahead, i, w);
                auto add = MINISGL_EACH(j) {
                    each<rows>(MINISGL_EACH(r) {
                        VecF& sum = j % 2 ? odd[r] : even[r];
                        sum = Word::multiply_add(splat(query[r * all + w + j]), x[j], sum);
                    });
                };
                if (all - w >= kLanes) {
                    each<kLanes>(add);
                } else {
                    each<kLanes / 2>(add);
                }
            }
            each<rows>(MINISGL_EACH(r) { store(scores + r * kChunk + i, even[r] + odd[r]); });
        }
    }

    // Scores to weights of one row; the first `visible` positions count.
    void soften(int64_t row, int64_t vecs, int64_t visible, float* top, float* total) {
        const VecI lane = numbered(Lanes());
        VecF s[kChunkVecs];
        VecF highest = splat(*top);
        for (int64_t i = 0; i < vecs; ++i) {
            s[i] = load(scores + row * kChunk + i * kLanes) * p.scale;
            s[i] = lane + int32_t(i * kLanes) < int32_t(visible) ? s[i] : splat(-INFINITY);
            highest = max(s[i], highest);
        }
        float top_now = max_of(highest);
        VecF sum{};
        for (int64_t i = 0; i < vecs; ++i) {
            VecF weight = exp2(s[i] - top_now);
            sum += weight;
            Pack::store_weights(weights + row * kChunk, i, weight);
        }
        scale[row] = exp2(splat(*top - top_now))[0];
        *total = *total * scale[row] + sum_of(sum);
        *top = top_now;
    }

    // Values of the positions that word i of the weights is about; those behind the end are zeros, so that weight 0 makes 0.
    MINISGL_INLINE void value_rows(const char* base, const Chunk& chunk, int64_t i, const T*& first, const T*& second) {
        alignas(64) static const T zeros[kMaxDim] = {};
        first = (const T*)(base + chunk.v_row[i * kPer]);
        int64_t other = i * kPer + kPer - 1;
        second = other < chunk.size ? (const T*)(base + chunk.v_row[other]) : zeros;
    }
    MINISGL_INLINE void prefetch_values(const Ahead& ahead, int64_t i, int64_t d, int64_t dims) {
        for (int64_t j = i * kPer; j < (i + 1) * kPer; ++j)
            for (int64_t at = d * sizeof(T); at < (d + dims) * (int64_t)sizeof(T); at += 64)
                __builtin_prefetch(ahead.v + ahead.chunk->v_row[j] + at);
    }

    void pack_values(const char* base, const Chunk& chunk, const Ahead& ahead, int64_t depth) {
        const int64_t dim = p.dim;
        for (int64_t i = 0; i < depth; ++i) {
            const T *x, *y;
            value_rows(base, chunk, i, x, y);
            uint32_t* to = values + i * dim;
            for (int64_t d = 0; d < dim; d += kLanes) {
                VecU both[1];
                Pack::interleave(both, x + d, y + d);
                std::memcpy(to + d, both, sizeof(both));
            }
            prefetch_values(ahead, i, 0, dim);
        }
    }

    // sum[row][dim] = sum * scale[row] + weights x values, for few rows, without a copy of the values in between.
    template <int rows, int vecs>
    void weigh(const char* base, const Chunk& chunk, const Ahead& ahead, int64_t depth, int64_t d, float* sum) {
        const int64_t dim = p.dim;
        VecF s[rows][vecs];
        each<rows>(MINISGL_EACH(r) {
            each<vecs>(MINISGL_EACH(u) { s[r][u] = load(sum + r * dim + d + u * kLanes) * scale[r]; });
        });
        for (int64_t i = 0; i < depth; ++i) {
            const T *x, *y;
            value_rows(base, chunk, i, x, y);
            VecU both[vecs];
            Pack::interleave(both, x + d, y + d);
            prefetch_values(ahead, i, d, vecs * kLanes);
            each<rows>(MINISGL_EACH(r) {
                VecU weight = splat(weights[r * kChunk + i]);
                each<vecs>(MINISGL_EACH(u) { s[r][u] = Word::multiply_add(weight, both[u], s[r][u]); });
            });
        }
        each<rows>(MINISGL_EACH(r) {
            each<vecs>(MINISGL_EACH(u) { store(sum + r * dim + d + u * kLanes, s[r][u]); });
        });
    }

    template <int rows>
    void weigh_all(const char* base, const Chunk& chunk, const Ahead& ahead, int64_t depth, float* sum) {
        int64_t d = 0;
        for (; d + kTileVecs * kLanes <= p.dim; d += kTileVecs * kLanes)
            weigh<rows, kTileVecs>(base, chunk, ahead, depth, d, sum);
        for (; d < p.dim; d += kLanes) weigh<rows, 1>(base, chunk, ahead, depth, d, sum);
    }

    // One chunk for all rows of an item. Up to four rows go through registers only; for more it pays to lay keys and values
    // out for the multiplication first.
    void attend(const Item& item, const Chunk& chunk, const Chunk& next, Partial result) {
        const int64_t rows = item.tokens * p.group;
        const int64_t vecs = (chunk.size + kLanes - 1) / kLanes, depth = (chunk.size + kPer - 1) / kPer;
        const int64_t first = item.length - item.tokens;  // position of the item's first token
        for (int64_t h = 0; h < item.kv_heads; ++h) {
            const char* keys_at = (const char*)k + (item.kv_begin + h) * p.k_head;
            const char* values_at = (const char*)v + (item.kv_begin + h) * p.v_head;
            const bool last = h + 1 == item.kv_heads;
            const int64_t skip = last ? -h : 1;
            Ahead ahead{keys_at + skip * p.k_head, values_at + skip * p.v_head, last ? &next : &chunk};
            const uint32_t* query = queries + h * rows * words;
            float* sum = result.sum + h * rows * p.dim;
            auto soften_all = [&] {
                for (int64_t r = 0; r < rows; ++r) {
                    int64_t visible = std::min(first + r / p.group + 1 - chunk.begin, chunk.size);
                    soften(r, vecs, visible, result.top + h * rows + r, result.total + h * rows + r);
                }
            };
            auto few = [&](auto count) {
                score<count>(query, keys_at, chunk, ahead);
                soften_all();
                weigh_all<count>(values_at, chunk, ahead, depth, sum);
            };
            switch (kDirect ? rows : 0) {
                case 1: few(std::integral_constant<int, 1>()); continue;
                case 2: few(std::integral_constant<int, 2>()); continue;
                case 3: few(std::integral_constant<int, 3>()); continue;
                case 4: few(std::integral_constant<int, 4>()); continue;
            }
            pack_keys(keys_at, chunk, ahead);
            multiply<Word>(rows, vecs, query, words, keys, kChunk, words, scores, kChunk, nullptr);
            soften_all();
            pack_values(values_at, chunk, ahead, depth);
            multiply<Word>(rows, p.dim / kLanes, weights, kChunk, values, p.dim, depth, sum, p.dim, scale);
        }
    }
};

}  // namespace minisgl
