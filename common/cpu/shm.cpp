// Sums and gathers between the processes of one machine, through memory that they share.
//
// The memory begins with one flag per rank, each on a cache line of its own, followed by two slots per rank. A collective
// goes through turns 1, 2, 3, … A rank writes its part of turn t into its slot t % 2, raises its flag to t, waits until all
// flags have reached t, and reads the slots. Two slots are enough: who writes turn t has seen all flags at t - 1, so
// everyone has finished reading turn t - 2.
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kSlot = 256 * 1024;  // bytes; a slot stays in the second-level cache
constexpr int kBlock = 512;            // elements summed at a time in float32

struct alignas(64) Flag {
    std::atomic<uint64_t> turn;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock would belong to one process");

struct Memory {
    char* base;
    int rank, size;

    Flag& flag(int r) const { return reinterpret_cast<Flag*>(base)[r]; }
    char* slot(int r, uint64_t turn) const { return base + size * sizeof(Flag) + (2 * r + turn % 2) * kSlot; }
};

int64_t now_ms() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Publishes this rank's part of a turn and waits for the others' parts; false after patience_ms.
bool meet(const Memory& m, uint64_t turn, const char* data, int64_t bytes, int64_t patience_ms) {
    std::memcpy(m.slot(m.rank, turn), data, bytes);
    m.flag(m.rank).turn.store(turn, std::memory_order_release);
    int64_t deadline = 0;
    for (int r = 0; r < m.size; ++r) {
        for (int64_t tries = 1; m.flag(r).turn.load(std::memory_order_acquire) < turn; ++tries) {
            if (tries < 4096) {
                pause();
                continue;
            }
            sched_yield();  // with fewer cores than ranks, the one waited for may need this one
            if (tries % 256 == 0) {
                deadline = deadline ? deadline : now_ms() + patience_ms;
                if (now_ms() > deadline) return false;
            }
        }
    }
    return true;
}

float widen(float x) { return x; }
float widen(uint16_t x) {  // bfloat16
    uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
void narrow(float x, float* y) { *y = x; }
void narrow(float x, uint16_t* y) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *y = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// x = sum over the ranks, in the order of the ranks: every rank computes the same bits.
template <class T>
void sum(const Memory& m, uint64_t turn, T* x, int64_t count) {
    float total[kBlock];
    for (int64_t i = 0; i < count; i += kBlock) {
        int64_t n = std::min<int64_t>(kBlock, count - i);
        for (int r = 0; r < m.size; ++r) {
            const T* part = reinterpret_cast<const T*>(m.slot(r, turn)) + i;
            if (r == 0) {
                for (int64_t j = 0; j < n; ++j) total[j] = widen(part[j]);
            } else {
                for (int64_t j = 0; j < n; ++j) total[j] += widen(part[j]);
            }
        }
        for (int64_t j = 0; j < n; ++j) narrow(total[j], x + i + j);
    }
}

template <class T>
int64_t all_reduce(const Memory& m, uint64_t turn, T* x, int64_t count, int64_t done, int64_t patience_ms) {
    constexpr int64_t step = kSlot / sizeof(T);
    for (; done < count; done += step) {
        int64_t n = std::min(step, count - done);
        const char* mine = reinterpret_cast<const char*>(x + done);
        if (!meet(m, turn + done / step, mine, n * sizeof(T), patience_ms)) return done;
        sum(m, turn + done / step, x + done, n);
    }
    return count;
}

}  // namespace

extern "C" {

int64_t minisgl_shm_slot() { return kSlot; }

// Bytes of memory for a number of ranks, zeros at first.
int64_t minisgl_shm_bytes(int size) { return size * (sizeof(Flag) + 2 * kSlot); }

// Sums x[count] (dtype 0: float32, 1: bfloat16) in place. `turn` is that of its first slot. Returns how many elements are
// complete; fewer than count after patience_ms without a rank: call again with that as `done`.
int64_t minisgl_shm_all_reduce(char* base, int rank, int size, uint64_t turn, void* x, int64_t count, int dtype,
                               int64_t done, int64_t patience_ms) {
    Memory m{base, rank, size};
    if (dtype == 0) return all_reduce(m, turn, static_cast<float*>(x), count, done, patience_ms);
    return all_reduce(m, turn, static_cast<uint16_t*>(x), count, done, patience_ms);
}

// Brings x[bytes] of every rank to out[size][bytes] of rank 0; the others may pass no out. Returns as all_reduce does.
int64_t minisgl_shm_gather(char* base, int rank, int size, uint64_t turn, const char* x, char* out, int64_t bytes,
                           int64_t done, int64_t patience_ms) {
    Memory m{base, rank, size};
    for (; done < bytes; done += kSlot) {
        int64_t n = std::min(kSlot, bytes - done);
        if (!meet(m, turn + done / kSlot, x + done, n, patience_ms)) return done;
        for (int r = 0; out && r < size; ++r) std::memcpy(out + r * bytes + done, m.slot(r, turn + done / kSlot), n);
    }
    return bytes;
}
}
