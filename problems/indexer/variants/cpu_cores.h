// The work of a call among all cores: first every tile of every sequence is scored, then every row is searched.
//
// Threads are started in the call and joined before it returns: nothing parks, spins or works outside a call. A tile is
// decoded once for up to kShare queries of its sequence. Every score is computed in one way, however tasks are shared
// out, so results do not depend on the number of threads.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "cpu_score.h"
#include "cpu_select.h"
#include "cpu_threads.h"

namespace indexer {

constexpr int64_t kShare = 64;
constexpr int64_t kThreadFlops = 12 << 20;  // 0.1 ms of one core: seven times what starting and joining a thread takes

// Some queries of a sequence and a tile of its entries.
struct Task {
    int64_t sequence, query, first;
};

// The most entries that queries [query, query + kShare) of sequence b need scored.
inline int64_t most(const Problem& p, int64_t b, int64_t query) {
    int64_t found = 0;
    for (int64_t s = query; s < std::min(query + kShare, p.queries); s++)
        found = std::max(found, p.scored(b * p.queries + s));
    return found;
}

// Compute all rows. Calls of several threads follow each other: they share the memory that is kept.
static int on_all_cores(const Problem& p, int64_t cores = cpu::cores()) noexcept try {
    static std::mutex mutex;
    static std::vector<std::unique_ptr<Scorer>> scorers;
    static Scratch<float> kept;
    const std::lock_guard lock(mutex);
    std::vector<Task> tasks;
    int64_t width = 0, flops = 0;
    for (int64_t b = 0; b < p.batch; b++)
        for (int64_t query = 0; query < p.queries; query += kShare) {
            const int64_t n = most(p, b, query);
            for (int64_t first = 0; first < n; first += kTile) tasks.push_back({b, query, first});
            width = std::max(width, (n + kTile - 1) / kTile * kTile);
            flops += n * std::min(kShare, p.queries - query) * p.heads * kDim * 2;
        }
    float* scores = kept.take(p.rows() * width);
    const int64_t threads = std::clamp<int64_t>(flops / kThreadFlops, 1, cores);
    while (static_cast<int64_t>(scorers.size()) < threads) scorers.push_back(std::make_unique<Scorer>());
    std::atomic<int64_t> next{0}, row{0};
    std::atomic<bool> good{true};
    int status = on_threads(threads, [&](int64_t thread) {
        Scorer& scorer = *scorers[thread];
        scorer.forget_query();
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < static_cast<int64_t>(tasks.size());) {
            const Task& task = tasks[i];
            const int64_t n = most(p, task.sequence, task.query), count = std::min(kTile, n - task.first);
            if (!scorer.take(p, task.sequence, task.first, count)) good = false;
            for (int64_t s = task.query; s < std::min(task.query + kShare, p.queries); s++) {
                const int64_t to = task.sequence * p.queries + s;
                if (p.scored(to) > task.first) scorer.score(p, to, scores + to * width + task.first);
            }
        }
    });
    const int also = on_threads(std::min(threads, p.rows()), [&](int64_t) {
        for (int64_t i; (i = row.fetch_add(1, std::memory_order_relaxed)) < p.rows();) {
            if (p.scored(i)) select(p, i, scores + i * width);
            else if (!take_all(p, i)) good = false;
        }
    });
    return !good ? kBadIndex : status ? status : also;
} catch (const std::bad_alloc&) {
    return kNoMemory;
}

}  // namespace indexer

extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    return indexer::on_all_cores(indexer::Problem(tensors, sizes));
}
