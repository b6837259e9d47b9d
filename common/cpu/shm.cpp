// Sums, gathers and broadcasts between the processes of one machine, through memory that they share.
//
// The memory begins with one flag per rank, each on a cache line of its own, followed by two slots per rank. A collective
// goes through turns 1, 2, 3, … A rank writes its part of turn t into its slot t % 2, raises its flag to t, waits until all
// flags have reached t, and reads the slots. Two slots are enough: who writes turn t has seen all flags at t - 1, so
// everyone has finished reading turn t - 2.
#include <sched.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kSlot = 256 * 1024;  // bytes; a slot stays in the second-level cache
constexpr int kBlock = 512;            // elements summed at a time in float32
constexpr int64_t kSpin = 2000000;     // ns; who gives its core away sooner gets it back late, if others want it too
constexpr int kPauses = 256;           // between two looks at the clock

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

int64_t now() {  // ns
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * int64_t(1000000000) + t.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Sleeps until the flag is raised beyond `seen`, at most so many ns, perhaps less.
void sleep(Flag& flag, uint64_t seen, int64_t ns) {
#if defined(__linux__)
    timespec t{ns / 1000000000, ns % 1000000000};
    syscall(SYS_futex, &flag.turn, FUTEX_WAIT, uint32_t(seen), &t, nullptr, 0);  // of little endian the low half
#else
    usleep(std::min<int64_t>(ns / 1000, 200));
#endif
}

void wake(Flag& flag) {
#if defined(__linux__)
    syscall(SYS_futex, &flag.turn, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

// Publishes this rank's part of a turn, which may be nothing, and waits for the others' parts; false after patience_ms.
// `idle`: it may take long, so sleep after a while. All ranks say the same, for only then are sleepers woken.
bool meet(const Memory& m, uint64_t turn, const char* data, int64_t bytes, bool idle, int64_t patience_ms) {
    if (data) std::memcpy(m.slot(m.rank, turn), data, bytes);
    if (m.flag(m.rank).turn.exchange(turn, std::memory_order_acq_rel) < turn && idle) wake(m.flag(m.rank));
    int64_t started = 0;
    for (int r = 0; r < m.size; ++r) {
        uint64_t seen;
        for (int tries = 0; (seen = m.flag(r).turn.load(std::memory_order_acquire)) < turn;) {
            pause();
            if (++tries % kPauses) continue;
            int64_t t = now();
            if (!started) started = t;
            int64_t left = started + patience_ms * 1000000 - t;
            if (left < 0) return false;
            if (t < started + kSpin) continue;
            if (idle) {
                sleep(m.flag(r), seen, left);
            } else {
                sched_yield();  // with fewer cores than ranks, the one waited for may need this one
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
        if (!meet(m, turn + done / step, mine, n * sizeof(T), false, patience_ms)) return done;
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

// Brings x[rows][width] of every rank, in bytes, to out[rows][size][width] of rank 0; the others may pass no out. Returns
// as all_reduce does, in bytes.
int64_t minisgl_shm_gather(char* base, int rank, int size, uint64_t turn, const char* x, char* out, int64_t rows,
                           int64_t width, int64_t done, int64_t patience_ms) {
    Memory m{base, rank, size};
    for (; done < rows * width; done += kSlot) {
        int64_t n = std::min(kSlot, rows * width - done);
        if (!meet(m, turn + done / kSlot, out ? nullptr : x + done, n, false, patience_ms)) return done;
        for (int r = 0; out && r < size; ++r) {
            const char* part = r == rank ? x + done : m.slot(r, turn + done / kSlot);
            for (int64_t i = 0, piece; i < n; i += piece) {
                int64_t row = (done + i) / width, column = (done + i) % width;
                piece = std::min(n - i, width - column);
                std::memcpy(out + (row * size + r) * width + column, part + i, piece);
            }
        }
    }
    return rows * width;
}

// Brings x[bytes] of rank 0 to the others. Returns as all_reduce does, in bytes.
int64_t minisgl_shm_broadcast(char* base, int rank, int size, uint64_t turn, char* x, int64_t bytes, int64_t done,
                              int64_t patience_ms) {
    Memory m{base, rank, size};
    for (; done < bytes; done += kSlot) {
        int64_t n = std::min(kSlot, bytes - done);
        if (!meet(m, turn + done / kSlot, rank ? nullptr : x + done, n, true, patience_ms)) return done;
        if (rank) std::memcpy(x + done, m.slot(0, turn + done / kSlot), n);
    }
    return bytes;
}
}
