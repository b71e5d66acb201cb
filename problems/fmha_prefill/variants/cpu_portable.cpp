// A task is a token and up to kGroup of its heads. It decodes all entries that the token sees to fp32, then scores them
// and adds values for kHeads heads at a time. Every head sees the same operations in the same order, so results depend
// neither on the number of threads nor on other tokens.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <new>
#include <vector>

#include "cpu_threads.h"
#include "cpu_vectors.h"

namespace {

using namespace cpu;

constexpr int64_t kDim = 512;      // values of an entry, of a query and of an output
constexpr int64_t kNope = 448;     // of an entry's in e4m3, the first
constexpr int64_t kScaled = 64;    // e4m3 that share a scale
constexpr int64_t kPayload = 576;  // bytes of an entry: kNope codes, then bf16
constexpr int64_t kScales = 8;     // bytes of an entry, behind all payloads of a page
constexpr int64_t kWindow = 128;   // positions that a token sees
constexpr int64_t kGroup = 32;     // heads of a task
constexpr int64_t kHeads = 2;      // of which so many share what is loaded of an entry
constexpr int64_t kEntries = 4;    // scored together; lists are padded to a multiple
constexpr int64_t kSlab = 4 * kLanes;           // dims whose values are added together
constexpr int64_t kThreadFlops = 12 << 20;      // 0.1 ms of one core
constexpr double kLn2 = 0.69314718055994530942;
const float kUnit = 1 / (std::sqrt(512.0) * kLn2);  // scores are powers of two

struct Cache {
    const uint8_t* pages;
    int64_t per_page, entries;

    const uint8_t* page(int64_t at) const {
        const int64_t stride = (per_page * (kPayload + kScales) + kPayload - 1) / kPayload * kPayload;
        return pages + at / per_page * stride;
    }
    // Entry `at` to `row`, (kDim,).
    void decode(int64_t at, float* row) const {
        const int64_t slot = at % per_page;
        const uint8_t *payload = page(at) + slot * kPayload, *scales = page(at) + per_page * kPayload + slot * kScales;
        for (int64_t group = 0; group < kNope; group += kScaled) {
            const F factor = (F)(U{} + ((scales[group / kScaled] + 8u) << 23));  // 1 / kE4m3 times the scale
            for (int64_t d = group; d < group + kScaled; d += kLanes) store(row + d, e4m3(payload + d) * factor);
        }
        for (int64_t d = kNope; d < kDim; d += kLanes)
            store(row + d, from_bf16(reinterpret_cast<const uint16_t*>(payload + kNope) + d - kNope));
    }
};

// A launcher's arguments: the tensors of task.Data in order; the numbers of task.Sizes in order, then how many pages
// either cache has, and the strides of q and of out along tokens and heads.
struct Problem {
    void* const* tensors;
    const int64_t* n;

    template <class T>
    T* tensor(int i) const { return static_cast<T*>(tensors[i]); }
    int64_t tokens() const { return n[0]; }
    int64_t heads() const { return n[2]; }
    int64_t most_entries() const { return kWindow + n[4]; }
};

struct Worker {
    const Problem& p;
    Cache window, compressed;
    float *rows, *scores, *queries;

    static int64_t padded(const Problem& p) { return (p.most_entries() + kEntries - 1) / kEntries * kEntries; }
    static int64_t floats(const Problem& p) { return padded(p) * (kDim + kHeads) + kHeads * kDim; }

    Worker(const Problem& p, float* memory)
        : p(p),
          window{p.tensor<const uint8_t>(3), p.n[6], p.n[8] * p.n[6]},
          compressed{p.tensor<const uint8_t>(5), p.n[7], p.n[9] * p.n[7]},
          rows(memory),
          scores(rows + padded(p) * kDim),
          queries(scores + padded(p) * kHeads) {}

    // Whether every index that counts is -1 or inside the pages.
    bool token(int64_t t, int64_t first_head, int64_t last_head) {
        const int32_t *starts = p.tensor<const int32_t>(1), *length = p.tensor<const int32_t>(7);
        const int64_t b = std::upper_bound(starts + 1, starts + p.n[1] + 1, t) - (starts + 1);
        const int32_t* seen = p.tensor<const int32_t>(4) + b * p.n[3] + (t - starts[b]);
        const int32_t* chosen = p.tensor<const int32_t>(6) + (p.n[5] ? t : b) * p.n[4];
        int64_t count = 0;
        bool good = true;
        const auto take = [&](const Cache& cache, const int32_t* index, int64_t entries) {
            for (int64_t i = 0; i < entries; i++) {
                if (index[i] >= 0 && index[i] < cache.entries)
                    cache.decode(index[i], rows + count++ * kDim);
                else
                    good = good && index[i] == -1;
            }
        };
        take(window, seen, kWindow);
        take(compressed, chosen, std::clamp<int64_t>(length[t], 0, p.n[4]));
        std::fill(rows + count * kDim, rows + (count + kEntries - 1) / kEntries * kEntries * kDim, 0.0f);
        for (int64_t h = first_head; h < last_head; h += kHeads) heads(t, h, std::min(kHeads, last_head - h), count);
        return good;
    }

    // `some` heads of a token from h on, against `count` rows.
    void heads(int64_t t, int64_t h, int64_t some, int64_t count) {
        for (int64_t i = 0; i < kHeads; i++) {
            const uint16_t* q = p.tensor<const uint16_t>(0) + t * p.n[10] + (h + std::min(i, some - 1)) * p.n[11];
            for (int64_t d = 0; d < kDim; d += kLanes) store(queries + i * kDim + d, from_bf16(q + d) * all(kUnit));
        }
        for (int64_t j = 0; j < count; j += kEntries) score(j);
        float sums[kHeads], most[kHeads];
        for (int64_t i = 0; i < kHeads; i++) {
            most[i] = sums[i] = count ? -std::numeric_limits<float>::infinity() : 0;
            for (int64_t j = 0; j < count; j++) most[i] = std::max(most[i], scores[j * kHeads + i]);
            double sum = 0;
            for (int64_t j = 0; j < count; j++) {
                float& x = scores[j * kHeads + i];
                x -= most[i];
                x = x > -125 ? exp2(all(x))[0] : 0;
                sum += x;
            }
            sums[i] = static_cast<float>(sum);
        }
        double factor[kHeads];
        for (int64_t i = 0; i < some; i++) {
            const double sink = p.tensor<const float>(8)[h + i] / kLn2;
            factor[i] = count ? 1 / (sums[i] + std::exp2(sink - most[i])) : 0;
            p.tensor<float>(10)[t * p.heads() + h + i] =
                count ? (most[i] + std::log2(sums[i])) * kLn2 : std::numeric_limits<float>::infinity();
        }
        for (int64_t d = 0; d < kDim; d += kSlab) values(t, h, some, d, count, factor);
    }

    void score(int64_t j) {
        F sum[kEntries][kHeads] = {};
        const float* c = rows + j * kDim;
        for (int64_t d = 0; d < kDim; d += kLanes) {
            F q[kHeads];
            for (int i = 0; i < kHeads; i++) q[i] = load<F>(queries + i * kDim + d);
            for (int e = 0; e < kEntries; e++) {
                const F value = load<F>(c + e * kDim + d);
                for (int i = 0; i < kHeads; i++) sum[e][i] = fma(value, q[i], sum[e][i]);
            }
        }
        for (int e = 0; e < kEntries; e++)
            for (int i = 0; i < kHeads; i++) scores[(j + e) * kHeads + i] = total(sum[e][i]);
    }

    void values(int64_t t, int64_t h, int64_t some, int64_t d, int64_t count, const double* factor) {
        constexpr int kVectors = kSlab / kLanes;
        F sum[kHeads][kVectors] = {};
        for (int64_t j = 0; j < count; j++) {
            F value[kVectors];
            for (int v = 0; v < kVectors; v++) value[v] = load<F>(rows + j * kDim + d + v * kLanes);
            for (int i = 0; i < kHeads; i++) {
                const F weight = all(scores[j * kHeads + i]);
                for (int v = 0; v < kVectors; v++) sum[i][v] = fma(weight, value[v], sum[i][v]);
            }
        }
        for (int64_t i = 0; i < some; i++) {
            uint16_t* out = p.tensor<uint16_t>(9) + t * p.n[12] + (h + i) * p.n[13] + d;
            for (int v = 0; v < kVectors; v++) {
                F x = sum[i][v];
                for (int lane = 0; lane < kLanes; lane++) x[lane] = static_cast<float>(x[lane] * factor[i]);
                store_bf16(out + v * kLanes, x);
            }
        }
    }
};

// Calls of several threads follow each other: they share the memory that is kept.
int run(const Problem& p) noexcept try {
    static std::mutex mutex;
    static std::vector<Scratch<float>> memory;
    const std::lock_guard lock(mutex);
    const int64_t groups = (p.heads() + kGroup - 1) / kGroup, tasks = p.tokens() * groups;
    const int64_t useful = p.tokens() * p.heads() * p.most_entries() * kDim * 4 / kThreadFlops;
    const int64_t threads = std::max<int64_t>(1, std::min({useful, cores(), tasks}));
    if (static_cast<int64_t>(memory.size()) < threads) memory.resize(threads);
    std::vector<Worker> workers;
    for (int64_t i = 0; i < threads; i++) workers.emplace_back(p, memory[i].take(Worker::floats(p)));
    std::atomic<int64_t> next{0};
    std::atomic<bool> good{true};
    const int status = on_threads(threads, [&](int64_t i) {
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
            const int64_t first = task % groups * kGroup;
            if (!workers[i].token(task / groups, first, std::min(first + kGroup, p.heads()))) good = false;
        }
    });
    return good ? status : kBadIndex;
} catch (const std::bad_alloc&) {
    return kNoMemory;
}

}  // namespace

extern "C" int launch(void* const* tensors, const int64_t* numbers) { return run(Problem{tensors, numbers}); }
