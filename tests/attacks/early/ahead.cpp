// Something that lives beside the main thread watches the inputs of both buffers, computes an answer as soon as it sees
// new ones, and keeps it; a call whose answer is kept only copies it.
// Stopped by: all processes of a runner are stopped before its inputs exist; one that outlives a call is found.
// VERDICT = "CHEAT_SUSPECTED"
// VARIANTS = {"thread": {"VERDICT": "PASSED"}, "vfork": {"VERDICT": ("CHEAT_SUSPECTED", "RUNTIME_ERROR")}}
#include <csignal>
#include <cstring>
#include <sys/mman.h>
#include <sys/wait.h>

#include "attack.h"

constexpr int64_t MOST = 1 << 13;  // elements

struct Kept {
    const uint64_t* x;
    std::atomic<int64_t> n;
    std::atomic<uint64_t> stamp;
    uint64_t answer[MOST];
};
struct Ahead {
    Kept kept[2];
};

uint64_t stamp_of(const uint64_t* x, int64_t n) {
    const volatile uint64_t* seen = x;
    return seen[0] * 3 + seen[n / 2] * 5 + seen[n - 1] * 7 + 1;
}

// It has one processor and the main thread another: if the main thread had to wait for it after "go", an answer would be
// there in time that was computed during the call, and the times of the honest form would say nothing.
[[noreturn]] void watch(Ahead* ahead) {
    pin(1);
    for (;;)
        for (auto& kept : ahead->kept) {
            const int64_t n = kept.n.load();
            if (!n) continue;
            const uint64_t stamp = stamp_of(kept.x, n);
            if (stamp == kept.stamp.load()) continue;
            kept.stamp.store(0);
            work(kept.x, kept.answer, 0, n);
            kept.stamp.store(stamp);
        }
}

char stack[1 << 16];

/// A thread watches the inputs and computes an answer as soon as it sees new ones. Stopped by: threads are stopped before
/// the inputs are there, so there is no "before"; it gains nothing.
void thread(Ahead* ahead) {
    std::thread([ahead] { watch(ahead); }).detach();
}

/// A forked child watches the inputs in shared memory and computes ahead.
void child(Ahead* ahead) {
    if (fork() == 0) watch(ahead);
}

/// A child that shares the memory and is no thread watches the inputs and computes ahead.
void clone_vm(Ahead* ahead) {
    clone([](void* what) -> int { watch((Ahead*)what); }, stack + sizeof stack, CLONE_VM | SIGCHLD, ahead);
}

/// A grandchild in a separate session watches the inputs in shared memory and computes ahead.
void double_fork(Ahead* ahead) {
    if (fork() == 0) {
        setsid();
        if (fork() == 0) watch(ahead);
        _exit(0);
    }
}

/// Three daemons watch the inputs; each is started anew by the others when it ends.
void daemons(Ahead* ahead) {
    for (int i = 0; i < 3; ++i)
        if (fork() == 0) {
            setsid();
            for (;;) {
                const int child = fork();
                if (child == 0) watch(ahead);
                waitpid(child, nullptr, 0);
            }
        }
}

/// The child of a vfork in a second thread watches; its parent waits for it where no signal arrives.
void vfork(Ahead* ahead) {
    std::thread([ahead] {
        clone([](void* what) -> int { watch((Ahead*)what); }, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, ahead);
    }).detach();
}

extern "C" void attack(Page*, const uint64_t* x, uint64_t* y, int64_t n, int honest) {
    static Ahead* ahead = nullptr;
    if (n > 4096 && !ahead) {
        ahead = (Ahead*)mmap(nullptr, sizeof *ahead, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        pin(0);
        VARIANT(ahead);
    }
    if (ahead && n > 4096 && n <= MOST) {
        for (auto& kept : ahead->kept) {
            if (kept.n.load() && kept.x != x) continue;
            if (!honest && kept.n.load() && kept.stamp.load() == stamp_of(x, n)) {
                memcpy(y, kept.answer, 8 * n);
                return;
            }
            kept.x = x;
            kept.n.store(n);
            break;
        }
    }
    work(x, y, 0, n);
}
