// Attention over a paged KV cache for a ragged batch, decode and extend in one call.
//
// The work is cut into units of one segment of positions for one block of query rows. Where segments begin depends on the
// request alone, and their partial results are folded in order; so the result of a request is the same, bit for bit,
// on any number of threads and in any company, although threads get equal shares of the work.
#include "attend.h"
#include "tensors.h"

namespace minisgl {
namespace {

constexpr int kBlockRows = 48;  // query rows (tokens * group) that share one pass over keys and values
constexpr int64_t kSegments = 8, kMaxSegment = 512;
constexpr int64_t kMinCost = 300000;  // of a thread's share, about 3 microseconds: less is not worth waking another thread

struct Unit {
    int64_t item, index;
};

int64_t segment_of(int64_t length) {
    int64_t wanted = (length / kSegments + kChunk - 1) / kChunk * kChunk;
    return std::clamp<int64_t>(wanted, kChunk, kMaxSegment);
}

int64_t rows_of(const Problem& p, const Item& item) { return item.tokens * p.group * item.kv_heads; }

std::vector<Item> items_of(const Problem& p, const int32_t* bounds, const int32_t* lengths, int64_t requests,
                           int64_t tokens) {
    std::vector<Item> items;
    int64_t block = std::max<int64_t>(1, kBlockRows / p.group);
    TORCH_CHECK(bounds[0] == 0 && bounds[requests] == tokens, "paged_attention: cu_extend must run from 0 to ", tokens);
    for (int64_t b = 0; b < requests; ++b) {
        int64_t begin = bounds[b], end = bounds[b + 1], length = lengths[b];
        TORCH_CHECK(begin <= end && end <= tokens, "paged_attention: cu_extend must not decrease");
        TORCH_CHECK(length >= end - begin && length <= p.width * p.page, "paged_attention: request ", b, " has ",
                    end - begin, " rows, length ", length, " and room for ", p.width * p.page);
        // Few rows: one item streams all KV heads of a position together. Many: one KV head at a time stays in cache.
        bool together = (end - begin) * p.heads <= 2 * kBlockRows && end - begin <= block;
        for (int64_t h = 0; h < p.kv_heads && begin < end; h += together ? p.kv_heads : 1)
            for (int64_t t = begin; t < end; t += block) {
                int64_t stop = std::min(t + block, end), seen = length - (end - stop);
                int64_t segment = segment_of(seen);
                items.push_back({b, t, stop - t, h, together ? p.kv_heads : 1, seen, segment,
                                 (seen + segment - 1) / segment, -1});
            }
    }
    return items;
}

// Cuts the units into runs of equal cost: run i is [cuts[i], cuts[i + 1]). Returns the floats that partial results of
// items with units in more than one run need, and gives each such item its place.
int64_t share(const Problem& p, std::vector<Item>& items, int64_t threads, std::vector<Unit>& cuts) {
    auto cost = [&](const Item& item, int64_t positions) {
        return positions * item.kv_heads * p.dim * (item.tokens * p.group + 6);  // reading costs as 6 rows do
    };
    int64_t total = 0;
    for (const Item& item : items) total += cost(item, item.length);
    int64_t runs = std::clamp<int64_t>(total / kMinCost, 1, threads);
    int64_t before = 0, floats = 0;
    cuts.push_back({0, 0});
    for (int64_t i = 0; i < (int64_t)items.size(); ++i) {
        Item& item = items[i];
        for (int64_t u = 0; u < item.units; ++u) {
            int64_t mine = cost(item, std::min(item.segment, item.length - u * item.segment));
            while ((int64_t)cuts.size() < runs && before + mine / 2 >= total * (int64_t)cuts.size() / runs) {
                cuts.push_back({i, u});
                if (u > 0 && item.partial < 0) {
                    item.partial = floats;
                    floats += item.units * Partial::floats(rows_of(p, item), p.dim);
                }
            }
            before += mine;
        }
    }
    while ((int64_t)cuts.size() <= runs) cuts.push_back({(int64_t)items.size(), 0});
    return floats;
}

// The chunks of a run, one after another.
struct Walk {
    const Problem& p;
    const std::vector<Item>& items;
    Unit end;
    int64_t item, at;

    Walk(const Problem& p, const std::vector<Item>& items, Unit begin, Unit end)
        : p(p), items(items), end(end), item(begin.item), at(begin.index * items[begin.item].segment) {}

    void next(Chunk& chunk) {  // size 0 behind the last
        auto stop = [&] {
            const Item& x = items[item];
            return std::min((item < end.item ? x.units : end.index) * x.segment, x.length);
        };
        chunk.size = 0;
        while (item < (int64_t)items.size() && item <= end.item && at >= stop()) ++item, at = 0;
        if (item < (int64_t)items.size() && item <= end.item) {
            chunk.item = item;
            chunk.begin = at;
            chunk.size = std::min<int64_t>(kChunk, stop() - at);
            locate(chunk, p.table + items[item].request * p.width);
            at += chunk.size;
        }
        for (int64_t i = chunk.size; i < kChunk; ++i) {
            chunk.k_row[i] = i ? chunk.k_row[i - 1] : 0;
            chunk.v_row[i] = i ? chunk.v_row[i - 1] : 0;
        }
    }

    void locate(Chunk& chunk, const int32_t* pages) {
        int64_t offset = chunk.begin % p.page;
        for (int64_t i = 0, at = chunk.begin / p.page; i < chunk.size; ++at, offset = 0) {
            int64_t page = pages[at];
            TORCH_CHECK(page >= 0 && page < p.pages, "paged_attention: page ", page, " of a request, but the cache has ",
                        p.pages);
            for (; offset < p.page && i < chunk.size; ++offset, ++i) {
                chunk.k_row[i] = page * p.k_page + offset * p.k_slot;
                chunk.v_row[i] = page * p.v_page + offset * p.v_slot;
            }
        }
    }
};

template <class T>
void write(const Problem& p, const Item& item, const Partial& result, T* out) {
    int64_t row = 0;
    for (int64_t h = item.kv_begin; h < item.kv_begin + item.kv_heads; ++h)
        for (int64_t t = item.token; t < item.token + item.tokens; ++t)
            for (int64_t g = 0; g < p.group; ++g, ++row) {
                T* to = out + (t * p.heads + h * p.group + g) * p.dim;
                float factor = 1.0f / result.total[row];
                for (int64_t d = 0; d < p.dim; d += kLanes)
                    store(to + d, load(result.sum + row * p.dim + d) * factor);
            }
}

template <class T>
void run_units(const Problem& p, const std::vector<Item>& items, Unit begin, Unit end, const T* q, const T* k,
               const T* v, T* out, float* partials, int64_t most_rows) {
    if (begin.item == (int64_t)items.size()) return;
    Worker<T> worker(p, q, k, v, most_rows);
    const int64_t most = Partial::floats(most_rows, p.dim);
    std::vector<float> memory(2 * most);
    Walk walk(p, items, begin, end);
    Chunk chunks[2];
    walk.next(chunks[0]);
    int64_t loaded = -1;
    for (int now = 0; chunks[now].size > 0; now ^= 1) {
        const Chunk& chunk = chunks[now];
        walk.next(chunks[now ^ 1]);
        const Item& item = items[chunk.item];
        if (loaded != chunk.item) worker.load_queries(item);
        loaded = chunk.item;
        const int64_t rows = rows_of(p, item), unit = chunk.begin / item.segment, done = chunk.begin + chunk.size;
        Partial folded(memory.data(), rows, p.dim);
        Partial part(item.partial >= 0 ? partials + item.partial + unit * Partial::floats(rows, p.dim)
                                       : memory.data() + (unit > 0 ? most : 0),
                     rows, p.dim);
        if (chunk.begin % item.segment == 0) part.clear(rows, p.dim);
        worker.attend(item, chunk, chunks[now ^ 1], part);
        if (item.partial >= 0) continue;  // others have a part of this item: folded when all are through
        if (unit > 0 && (done % item.segment == 0 || done == item.length)) folded.add(part, rows, p.dim);
        if (done == item.length) write(p, item, folded, out);
    }
}

template <class T>
void attend_all(const Problem& p, std::vector<Item>& items, const T* q, const T* k, const T* v, T* out) {
    std::vector<Unit> cuts;
    std::vector<float> partials(share(p, items, at::get_num_threads(), cuts));
    int64_t most_rows = 0;
    for (const Item& item : items) most_rows = std::max(most_rows, rows_of(p, item));
    at::parallel_for(0, (int64_t)cuts.size() - 1, 1, [&](int64_t from, int64_t until) {
        for (int64_t i = from; i < until; ++i)
            run_units(p, items, cuts[i], cuts[i + 1], q, k, v, out, partials.data(), most_rows);
    });
    for (const Item& item : items) {
        if (item.partial < 0) continue;
        int64_t rows = rows_of(p, item);
        Partial folded(partials.data() + item.partial, rows, p.dim);
        for (int64_t u = 1; u < item.units; ++u)
            folded.add(Partial(partials.data() + item.partial + u * Partial::floats(rows, p.dim), rows, p.dim), rows,
                       p.dim);
        write(p, item, folded, out);
    }
}

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& table,
                           const at::Tensor& cu_extend, const at::Tensor& seq_lens, double scale) {
    check_tensors("paged_attention", {&q, &k, &v});
    check_integers("paged_attention", "table", table, at::kInt);
    check_integers("paged_attention", "cu_extend", cu_extend, at::kInt);
    check_integers("paged_attention", "seq_lens", seq_lens, at::kInt);
    TORCH_CHECK(q.dim() == 3 && k.dim() == 4 && v.sizes() == k.sizes() && q.size(2) == k.size(3),
                "paged_attention: want q[T, H, D] and caches [P, page, KV, D], got ", q.sizes(), ", ", k.sizes(), ", ",
                v.sizes());
    int64_t requests = seq_lens.numel(), heads = q.size(1), kv_heads = k.size(2), dim = q.size(2);
    TORCH_CHECK(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "paged_attention: ", heads,
                " query heads do not divide among ", kv_heads, " KV heads");
    TORCH_CHECK(dim > 0 && dim % 16 == 0 && dim <= kMaxDim, "paged_attention: head dim ", dim,
                " is not a multiple of 16 up to ", kMaxDim);
    TORCH_CHECK(table.dim() == 2 && table.size(0) == requests && cu_extend.numel() == requests + 1,
                "paged_attention: want table[B, W], cu_extend[B + 1] and seq_lens[B], got ", table.sizes(), ", ",
                cu_extend.sizes(), ", ", seq_lens.sizes());
    at::Tensor out = at::empty(q.sizes(), q.options());
    const int64_t bytes = q.element_size();
    Problem p{heads, kv_heads, heads / kv_heads, dim, k.size(1), k.size(0), table.size(1), q.stride(0), q.stride(1),
              k.stride(0) * bytes, k.stride(1) * bytes, k.stride(2) * bytes,
              v.stride(0) * bytes, v.stride(1) * bytes, v.stride(2) * bytes,
              table.data_ptr<int32_t>(), float(scale * 1.4426950408889634)};
    std::vector<Item> items =
        items_of(p, cu_extend.data_ptr<int32_t>(), seq_lens.data_ptr<int32_t>(), requests, q.size(0));
    dispatch("paged_attention", q.scalar_type(), [&](auto element) {
        using T = decltype(element);
        attend_all(p, items, q.data_ptr<T>(), k.data_ptr<T>(), v.data_ptr<T>(), out.data_ptr<T>());
    });
    return out;
}

}  // namespace
}  // namespace minisgl

TORCH_LIBRARY_FRAGMENT(minisgl_cpu, m) {
    m.def(
        "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor table, Tensor cu_extend, Tensor seq_lens, "
        "float scale) -> Tensor",
        &minisgl::paged_attention);
}
