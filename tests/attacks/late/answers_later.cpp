// A thread does the work; the call ends when the last LATE elements are still to come. Threads that sleep make the stop
// slow, and the thread that works is the last to be told.
#include "attack.h"

constexpr int SLEEPERS = 100;
constexpr int64_t LATE = 128, BLOCK = 8;  // elements

struct Job {
    Page* page;
    const uint64_t* x;
    uint64_t* y;
    int64_t n;
    bool honest;
};

// What it does after the last element.
void switches(const Job& job) { job.page->returned[0].address.store((uint64_t)job.y); }
void looks_nowhere(const Job&) {}

Job job;
std::atomic<uint32_t> posted{0}, enough{0};

void say_enough(uint32_t number) {
    enough.store(number);
    wake(&enough);
}

void serve() {
    for (uint32_t seen = 0;;) {
        wait_while(&posted, seen);
        seen = posted.load();
        const int64_t early = job.honest ? job.n : job.n - LATE;
        for (int64_t i = 0; i < job.n; i += BLOCK) {
            if (i == early) say_enough(seen);
            work(job.x, job.y, i, i + BLOCK < job.n ? i + BLOCK : job.n);
        }
        if (!job.honest) VARIANT(job);
        say_enough(seen);
    }
}

void start() {
    for (int i = 0; i < SLEEPERS; ++i) std::thread([] { for (;;) pause(); }).detach();
    std::thread(serve).detach();
}

extern "C" void attack(Page* page, const uint64_t* x, uint64_t* y, int64_t n, int honest) {
    ONCE(start());
    job = {page, x, y, n, honest || n <= 4096};
    const uint32_t before = posted.fetch_add(1);
    wake(&posted);
    while (enough.load() != before + 1) wait_while(&enough, before);
}
