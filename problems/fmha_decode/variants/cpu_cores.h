// The work of a call among all cores.
//
// Threads are started in the call and joined before it returns: nothing parks, spins or works outside a call. Entries
// go in tiles, cut only by their number; a tile is decoded once for a group of heads, and its part of the result is
// merged into what came before. Every head sees the same operations in the same order however heads and tiles are
// shared out, so results do not depend on the number of threads.
#pragma once

#include <atomic>
#include <mutex>
#include <new>
#include <vector>

#include "cpu_threads.h"
#include "cpu_tile.h"

namespace fmha {

// How a problem is shared out. Heads come in panels, which are divided into groups; a task is a group of one row, or
// one panel and tile of it where rows and panels are too few for the threads.
struct Plan {
    int64_t threads, groups;
    bool by_tiles;
};

// 0.1 ms of one core: seven times what starting and joining a thread takes.
constexpr int64_t kThreadFlops = 12 << 20;
// A group's queries and results, 4 KiB a head, are to stay in the second-level cache beside a tile.
constexpr int64_t kGroupHeads = 128;
// Of results of single tiles, kept until all tiles of a row are there.
constexpr int64_t kTileBytes = 256 << 20;

// The fewest groups that keep nine in ten threads at work, since each decodes its entries anew. `tile_bytes`: of the
// results of a panel's every tile.
inline Plan plan(const Problem& p, int64_t panels, int64_t panel_heads, int64_t tile_bytes, int64_t cores) {
    const int64_t useful = p.rows() * p.heads * p.most_entries() * kDim * 4 / kThreadFlops;
    const int64_t threads = std::max<int64_t>(1, std::min(useful, cores)), jobs = p.rows() * panels;
    for (int64_t groups = (panels * panel_heads + kGroupHeads - 1) / kGroupHeads; groups <= panels; groups++) {
        const int64_t turns = (p.rows() * groups + threads - 1) / threads, largest = (panels + groups - 1) / groups;
        if (10 * jobs >= 9 * turns * largest * threads) return {threads, groups, false};
    }
    return {threads, panels, jobs < threads && jobs * tile_bytes <= kTileBytes};
}

// What the threads of a call keep for the next one: only memory.
struct State {
    Scratch<float> worker;
    List list;
};

// Compute all rows. Calls of several threads follow each other: they share the memory that is kept.
static int on_all_cores(const Problem& p, int64_t cores = cpu::cores()) noexcept try {
    static std::mutex mutex;
    static std::vector<State> states;
    static Scratch<float> shared;
    const std::lock_guard lock(mutex);
    const int64_t rows = p.rows(), panels = (p.heads + Worker::kPanel - 1) / Worker::kPanel, part = Worker::kPart;
    const int64_t tiles = (p.most_entries() + Worker::kMost - 1) / Worker::kMost;  // of a row at most
    const Plan plan = fmha::plan(p, panels, Worker::kPanel, tiles * part * sizeof(float), cores);
    const int64_t groups = plan.groups;
    if (static_cast<int64_t>(states.size()) < plan.threads) states.resize(plan.threads);
    std::vector<Worker> workers;
    for (int64_t i = 0; i < plan.threads; i++) {
        workers.emplace_back(p, states[i].worker.take(Worker::floats((panels + groups - 1) / groups)));
        states[i].list.entries.resize(p.most_entries());
    }
    std::atomic<int64_t> next{0};
    std::atomic<bool> good{true};
    int status;
    if (!plan.by_tiles) {
        status = on_threads(plan.threads, [&](int64_t i) {
            for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < rows * groups;) {
                const int64_t row = task / groups, group = task % groups;
                if (!states[i].list.fill(p, row)) good = false;
                workers[i].group(row, group * panels / groups, (group + 1) * panels / groups, states[i].list);
            }
        });
    } else {
        std::vector<List> lists(rows);
        for (int64_t row = 0; row < rows; row++) {
            lists[row].entries.resize(p.most_entries());
            if (!lists[row].fill(p, row)) good = false;
        }
        float* parts = shared.take(rows * panels * tiles * part);
        std::vector<std::atomic<int64_t>> left(rows * panels);  // tiles
        for (auto& n : left) n = tiles;
        status = on_threads(plan.threads, [&](int64_t i) {
            for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < rows * panels * tiles;) {
                const int64_t job = task / tiles, k = task % tiles, row = job / panels, panel = job % panels;
                const int64_t count = Worker::tiles(lists[row]).count;
                float* own = parts + job * tiles * part;
                if (k < count) workers[i].one_tile(row, panel, k, lists[row], Worker::Part(own + k * part));
                if (left[job].fetch_sub(1, std::memory_order_acq_rel) == 1) workers[i].merge(row, panel, own, count);
            }
        });
    }
    return good ? status : kBadIndex;
} catch (const std::bad_alloc&) {
    return kNoMemory;
}

}  // namespace fmha

extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    return fmha::on_all_cores(fmha::Problem(tensors, sizes));
}
