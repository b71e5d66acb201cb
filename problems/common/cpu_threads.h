// What the launchers of CPU variants share: their statuses, threads that end with the call, tasks that they share, and
// memory that is kept.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <vector>

namespace cpu {

// Status of a launcher, which problems/common/cpu.py turns into an error.
enum Status : int { kOk = 0, kNoThreads = 1, kNoMemory = 2, kBadIndex = 3 };

inline int64_t cores() { return std::max<int64_t>(1, std::thread::hardware_concurrency()); }

// Run work(i) in `threads` threads, i from 0 on, this one among them. Those that are refused leave their work to the
// others.
template <class Work>
int on_threads(int64_t threads, const Work& work) {
    std::vector<std::thread> others;
    others.reserve(threads);
    int status = kOk;
    try {
        for (int64_t i = 1; i < threads; i++) others.emplace_back(std::cref(work), i);
    } catch (const std::exception&) {
        status = kNoThreads;
    }
    work(0);
    for (auto& other : others) other.join();
    return status;
}

// `count` elements of T, 64-byte aligned, in memory that only grows. What it holds is of no use to a later call. Fresh
// pages from the system cost 0.1 ms a MB, as long as a small call.
template <class T>
class Scratch {
  public:
    T* take(size_t count) {
        if (count > size_) {
            data_.reset();
            data_.reset(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))));
            size_ = count;
        }
        return data_.get();
    }

  private:
    struct Delete {
        void operator()(T* p) const { ::operator delete(p, std::align_val_t(64)); }
    };
    std::unique_ptr<T, Delete> data_;
    size_t size_ = 0;
};

// Tasks [0, count), handed out `grain` at a time.
class Step {
  public:
    Step(int64_t count, int64_t grain) : count_(count), grain_(grain) {}

    // Returns when all tasks are done, by whichever thread.
    template <class Work>
    void run(const Work& work) {
        for (int64_t first; (first = next_.fetch_add(grain_, std::memory_order_relaxed)) < count_;) {
            const int64_t last = std::min(first + grain_, count_);
            for (int64_t task = first; task < last; task++) work(task);
            done_.fetch_add(last - first, std::memory_order_release);
        }
        while (done_.load(std::memory_order_acquire) < count_) std::this_thread::yield();
    }

  private:
    const int64_t count_, grain_;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace cpu
