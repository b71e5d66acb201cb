// What the judge itself runs on a CPU: plain readers over all cores, for the roof and for flushing the caches.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <pthread.h>
#include <sched.h>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

// The processors that this process may use.
std::vector<int> processors() {
    cpu_set_t allowed;
    std::vector<int> found;
    if (!sched_getaffinity(0, sizeof allowed, &allowed))
        for (int i = 0; i < CPU_SETSIZE; ++i)
            if (CPU_ISSET(i, &allowed)) found.push_back(i);
    if (found.empty()) found.push_back(0);
    return found;
}

// The calling thread to these processors alone.
void pin(const std::vector<int>& to) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i : to) CPU_SET(i, &set);
    sched_setaffinity(0, sizeof set, &set);
}

// Parked workers, one on each processor but the first: a reader is not to pay for starting threads, and none spins
// between calls. They end with the process.
class Pool {
  public:
    Pool() : processors_(processors()) {
        pthread_barrier_init(&barrier_, nullptr, processors_.size());
        for (int i = 1; i < size(); ++i) {
            std::thread([this, i] {
                pin({processors_[i]});
                for (;;) take_part(i);
            }).detach();
        }
    }
    int size() const { return int(processors_.size()); }
    void run(const std::function<void(int)>& job) {
        job_ = &job;
        take_part(0);
    }
    // The caller takes part on the first processor, so that every one does.
    void run_everywhere(const std::function<void(int)>& job) {
        pin({processors_[0]});
        run(job);
        pin(processors_);
    }

  private:
    void take_part(int index) {
        pthread_barrier_wait(&barrier_);  // until there is a job
        (*job_)(index);
        pthread_barrier_wait(&barrier_);
    }
    const std::vector<int> processors_;
    pthread_barrier_t barrier_;
    const std::function<void(int)>* job_ = nullptr;
};

typedef uint64_t vec __attribute__((vector_size(64), aligned(64)));

// XOR of 64-byte lines; `ahead` lines are prefetched (0: hardware alone). Cloned for wider vectors where there are any.
__attribute__((target_clones("avx512f", "avx2", "default")))
uint64_t read_lines(const char* data, size_t lines, size_t ahead) {
    vec sum[4] = {};
    const vec* p = (const vec*)data;
    size_t i = 0;
    for (; i + 4 <= lines; i += 4) {
        if (ahead)
            for (int u = 0; u < 4; ++u) __builtin_prefetch((const char*)(p + i + ahead + u), 0, 0);
        for (int u = 0; u < 4; ++u) sum[u] ^= p[i + u];
    }
    for (; i < lines; ++i) sum[0] ^= p[i];
    vec s = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
    uint64_t out = 0;
    for (int u = 0; u < 8; ++u) out ^= s[u];
    return out;
}

struct Config {
    int threads;   // 0: all cores
    int ahead;     // lines prefetched
    int turns;     // pieces a thread reads in turn: 1 is one contiguous half (of two), more are interleaved chunks
};
constexpr Config CONFIGS[] = {
    {0, 0, 1}, {0, 8, 1}, {0, 16, 1}, {0, 32, 1}, {0, 0, 64}, {0, 16, 64}, {0, 32, 64}, {0, 16, 512}, {1, 16, 1},
};

Pool& pool() {
    static Pool& all = *new Pool;  // never destroyed: its threads wait in it
    return all;
}

// XOR of `lines` lines, in `chunks` pieces that `threads` threads take in turn.
std::function<void(int)> reader(const void* data, size_t lines, size_t ahead, int threads, size_t chunks,
                                std::atomic<uint64_t>* sum) {
    const size_t step = (lines + chunks - 1) / chunks;
    return [=](int index) {
        if (index >= threads) return;
        uint64_t mine = 0;
        for (size_t chunk = index; chunk < chunks; chunk += threads) {
            const size_t first = chunk * step, last = first + step < lines ? first + step : lines;
            if (first < last) mine ^= read_lines((const char*)data + 64 * first, last - first, ahead);
        }
        *sum ^= mine;
    };
}

volatile uint64_t sink;  // keeps what is read from being left out
constexpr size_t EVICT_TURNS = 64;  // interleaved pieces of each processor's share

}  // namespace

extern "C" {

int judge_configs() { return sizeof(CONFIGS) / sizeof(CONFIGS[0]); }

// Read `bytes` from `data` (64-byte aligned; a tail under 64 bytes is left) with configuration `index`.
int judge_read(const void* data, size_t bytes, int index) {
    if (index < 0 || index >= judge_configs()) return 1;
    const Config c = CONFIGS[index];
    const int threads = c.threads ? c.threads : pool().size();
    std::atomic<uint64_t> sum{0};
    pool().run(reader(data, bytes / 64, c.ahead, threads, size_t(threads) * c.turns, &sum));
    sink = sum;
    return 0;
}

// Read `bytes` of `data` from every processor, each a share of its own: what any of their caches held is gone.
int judge_evict(const void* data, size_t bytes) {
    std::atomic<uint64_t> sum{0};
    pool().run_everywhere(reader(data, bytes / 64, 0, pool().size(), size_t(pool().size()) * EVICT_TURNS, &sum));
    sink = sum;
    return 0;
}

// Drop the lines of `data` from every cache. -> 0, or 1: the processor has no instruction for it.
int judge_forget(const void* data, size_t bytes) {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    const bool quick = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 23));
    const char *line = (const char*)((uintptr_t)data & ~uintptr_t(63)), *end = (const char*)data + bytes;
    __builtin_ia32_mfence();
    if (quick)
        for (; line < end; line += 64) asm volatile("clflushopt %0" : "+m"(*(volatile char*)line));
    else
        for (; line < end; line += 64) asm volatile("clflush %0" : "+m"(*(volatile char*)line));
    __builtin_ia32_mfence();
    return 0;
#else
    return 1;
#endif
}

}  // extern "C"
