// The work of a call among all cores.
//
// Threads are started in the call and joined before it returns: nothing parks, spins or works outside a call. There are
// three steps, each of tasks that need all of the step before; a thread that starts late finds fewer left, or none.
// How tokens and rows are cut does not depend on the threads, so results do not either.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "cpu_experts.h"
#include "cpu_threads.h"

namespace moe {

// Cuts memory into arrays; without memory it says how much they take.
class Cutter {
  public:
    explicit Cutter(std::byte* at = nullptr) : at_(at) {}

    template <class T>
    T* take(int64_t count) {
        std::byte* const found = at_ ? at_ + used_ : nullptr;
        used_ += (count * sizeof(T) + 63) / 64 * 64;
        return reinterpret_cast<T*>(found);
    }
    size_t used() const { return used_; }

  private:
    std::byte* at_;
    size_t used_ = 0;
};

constexpr int64_t kBandPanels = 8;        // many slots a read of weights; tasks for many cores where one expert has all
constexpr int64_t kDecode = 3;            // what decoding a weight costs, in products with it
constexpr int64_t kThreadWork = 2 << 20;  // products, 20 to 40 us: more than starting and joining a thread takes
constexpr int64_t kGrain = 1 << 14;       // products of tasks that are taken together, less than a microsecond

// Compute all tokens. Calls of several threads follow each other: they share the memory that is kept.
static int on_all_cores(const Problem& p, int64_t cores = cpu::cores()) noexcept try {
    static std::mutex mutex;
    static Scratch<std::byte> scratch;
    const std::lock_guard lock(mutex);
    Routing r;
    if (!r.fill(p, kTokens, kBandPanels)) return kBadIndex;
    const int64_t panels = static_cast<int64_t>(r.panels.size()), bands = static_cast<int64_t>(r.bands.size());
    const int64_t work = (p.slots() + kDecode * panels) * 3 * p.hidden * p.inner;
    const int64_t threads = std::clamp<int64_t>(work / kThreadWork, 1, cores);

    Activations x, v;
    float* parts;
    const auto cut = [&](std::byte* at) {
        Cutter cutter(at);
        for (const auto& [to, w] : {std::pair(&x, &p.w13), std::pair(&v, &p.w2)})
            *to = {cutter.take<int16_t>(p.slots() * w->width), cutter.take<float>(p.slots() * w->blocks()), w->blocks()};
        parts = cutter.take<float>(threads * p.slots() * kRows);
        return cutter.used();
    };
    cut(scratch.take(cut(nullptr)));

    const int64_t inner_groups = p.inner / kRows, hidden_groups = p.hidden / kRows;
    const auto grain = [&](int64_t tasks) { return std::max<int64_t>(1, kGrain * tasks / work); };
    Step taking(panels, 1);
    Step swiglu(bands * inner_groups, grain(bands * inner_groups));
    Step combining(hidden_groups, grain(hidden_groups));
    return on_threads(threads, [&](int64_t i) {
        taking.run([&](int64_t task) { Expert::take_x(p, r, r.panels[task], x); });
        swiglu.run([&](int64_t task) {
            Expert::swiglu(p, r, r.bands[task / inner_groups], task % inner_groups, x, v);
        });
        combining.run([&](int64_t task) { Expert::combine(p, r, task, v, parts + i * p.slots() * kRows); });
    });
} catch (const std::bad_alloc&) {
    return kNoMemory;
}

}  // namespace moe

extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    return moe::on_all_cores(moe::Problem(tensors, sizes));
}
