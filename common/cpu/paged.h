// What attention.cpp and attend.h share: the problem, its parts, and partial results.
#pragma once

#include <algorithm>

#include "vec.h"

namespace minisgl {

constexpr int kChunk = 64;  // positions whose scores exist at one time
constexpr int kChunkVecs = kChunk / kLanes;
constexpr int64_t kMaxDim = 512;
constexpr float kLowest = -1e30f;  // below any score, but finite: the difference of two is 0, not NaN

struct Problem {
    int64_t heads, kv_heads, group, dim;
    int64_t page, pages, width;                              // tokens of a page, pages, pages per row of the table
    int64_t q_token, q_head;                                 // strides in elements
    int64_t k_page, k_slot, k_head, v_page, v_slot, v_head;  // strides in bytes
    const int32_t* table;
    float scale;  // of the scores as powers of two
};

struct Item {  // a block of query rows: tokens of one request, and the heads of one or more KV heads
    int64_t request, token, tokens, kv_begin, kv_heads;
    int64_t length;          // positions that the last token sees
    int64_t segment, units;  // positions of a unit, number of units
    int64_t partial;         // offset of the units' partial results, -1 if one thread computes them all
};

struct Chunk {  // positions [begin, begin + size) of item number `item` and where they lie: offsets in bytes
    int64_t item, begin, size;
    int64_t k_row[kChunk], v_row[kChunk];  // behind the last position the last one again: safe to read, never used
};

// Results before normalisation, one per query row: the highest score, the sum of weights relative to it, and the weighted
// sum of values.
struct Partial {
    float *sum, *top, *total;

    static int64_t floats(int64_t rows, int64_t dim) { return rows * (dim + 2); }
    Partial(float* memory, int64_t rows, int64_t dim) : sum(memory), top(sum + rows * dim), total(top + rows) {}
    void clear(int64_t rows, int64_t dim) {
        std::fill(sum, sum + rows * dim, 0.0f);
        std::fill(top, top + rows, kLowest);
        std::fill(total, total + rows, 0.0f);
    }
    void add(const Partial& other, int64_t rows, int64_t dim) {
        for (int64_t r = 0; r < rows; ++r) {
            float top_now = std::max(top[r], other.top[r]);
            float mine = exp2(splat(top[r] - top_now))[0], theirs = exp2(splat(other.top[r] - top_now))[0];
            top[r] = top_now;
            total[r] = total[r] * mine + other.total[r] * theirs;
            for (int64_t d = r * dim; d < (r + 1) * dim; d += kLanes)
                store(sum + d, load(sum + d) * mine + load(other.sum + d) * theirs);
        }
    }
};

}  // namespace minisgl
