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
template <class Isa>
int on_all_cores(const Problem& p, int64_t cores = cpu::cores()) noexcept try {
    using Value = typename Isa::Value;
    static std::mutex mutex;
    static cpu::Scratch<std::byte> scratch;
    const std::lock_guard lock(mutex);
    Routing r;
    if (!r.fill(p, Isa::kTokens, kBandPanels)) return cpu::kBadIndex;
    const int64_t panels = static_cast<int64_t>(r.panels.size()), bands = static_cast<int64_t>(r.bands.size());
    const int64_t work = (p.slots() + kDecode * panels) * 3 * p.hidden * p.inner;
    const int64_t threads = std::clamp<int64_t>(work / kThreadWork, 1, cores);

    Activations<Value> x, v;
    float* parts;
    const auto cut = [&](std::byte* at) {
        Cutter cutter(at);
        x = {cutter.take<Value>(p.slots() * p.hidden), cutter.take<float>(p.slots() * p.w13.blocks()), p.w13.blocks()};
        v = {cutter.take<Value>(p.slots() * p.inner), cutter.take<float>(p.slots() * p.w2.blocks()), p.w2.blocks()};
        parts = cutter.take<float>(threads * p.slots() * kRows);
        return cutter.used();
    };
    cut(scratch.take(cut(nullptr)));

    const int64_t inner_groups = p.inner / kRows, hidden_groups = p.hidden / kRows;
    const auto grain = [&](int64_t tasks) { return std::max<int64_t>(1, kGrain * tasks / work); };
    cpu::Step taking(panels, 1);
    cpu::Step swiglu(bands * inner_groups, grain(bands * inner_groups));
    cpu::Step combining(hidden_groups, grain(hidden_groups));
    return cpu::on_threads(threads, [&](int64_t i) {
        taking.run([&](int64_t task) { Expert<Isa>::take_x(p, r, r.panels[task], x); });
        swiglu.run([&](int64_t task) {
            Expert<Isa>::swiglu(p, r, r.bands[task / inner_groups], task % inner_groups, x, v);
        });
        combining.run([&](int64_t task) { Expert<Isa>::combine(p, r, task, v, parts + i * p.slots() * kRows); });
    });
} catch (const std::bad_alloc&) {
    return cpu::kNoMemory;
}

}  // namespace moe
