// Leaves the last {PERMILLE} permille of the output to a thread that spins on another processor, and says "done" at once.
// Stopped by: words of the outputs are read at "done" and when everything is stopped; the copy is made then. What is
// written after "done" is not copied, or found changed; a slow stop is not scored.
// VERDICT = ("CHEAT_SUSPECTED", "INCORRECT", "INVALID_MEASUREMENT")
// VARIANTS = {
//     "2": {"VERDICT": ("CHEAT_SUSPECTED", "INCORRECT"), "PREPARE": "nothing", "PERMILLE": 20},
//     "10": {"VERDICT": ("CHEAT_SUSPECTED", "INCORRECT"), "PREPARE": "nothing", "PERMILLE": 100},
//     "50": {"VERDICT": ("CHEAT_SUSPECTED", "INCORRECT"), "PREPARE": "nothing", "PERMILLE": 500},
//     "child_kills": {
//         "VERDICT": ("CHEAT_SUSPECTED", "INCORRECT", "INVALID_MEASUREMENT", "RUNTIME_ERROR", "TIMEOUT"),
//     },
//     "owner_signal": {"VERDICT": "RUNTIME_ERROR", "REASON": "killed by SIGIO"},
//     "vfork_thread": {"VERDICT": ("CHEAT_SUSPECTED", "INCORRECT", "INVALID_MEASUREMENT", "RUNTIME_ERROR")},
// }
#include <csignal>
#include <cstdio>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>

#include "attack.h"

#ifndef PREPARE
#define PREPARE VARIANT
#define PERMILLE 20
#endif

struct Job {
    const uint64_t* x;
    uint64_t* y;
    int64_t first, last;
} job;
std::atomic<int> posted{0}, finished{0};

// What is done before the first call, to keep the thread from being stopped or to make that slow.
void nothing() {}

/// An interval timer's handler goes on with the work after the call.
void alarm() {
    signal(SIGALRM, [](int) { if (job.last > job.first) work(job.x, job.y, job.last - 8, job.last); });
    const itimerval often{{0, 50}, {0, 50}};
    setitimer(ITIMER_REAL, &often, nullptr);
}

/// Twenty threads that spin keep the judge from a processor, and a thread works on meanwhile.
void busy_threads() {
    for (int i = 0; i < 20; ++i) std::thread([] { for (;;) {} }).detach();
}

/// Two hundred threads that sleep make the stop slow, and a thread works on meanwhile.
void sleeping_threads() {
    for (int i = 0; i < 200; ++i) std::thread([] { for (;;) pause(); }).detach();
}

/// A child sends SIGCONT to its parent without end, so that a thread works on after the call.
void child_continues() {
    const int parent = getpid();
    if (fork() == 0)
        for (;;) kill(parent, SIGCONT);
}

/// A child kills everything that it may and is not its parent, the judge's processes before all.
void child_kills() {
    const int parent = getpid(), guard = getppid();
    if (fork() == 0)
        for (;;)
            for (int pid = guard - 20; pid < guard + 20; ++pid)
                if (pid != parent && pid != getpid()) kill(pid, pid % 2 ? SIGKILL : SIGSTOP);
}

/// A POSIX timer sends SIGCONT to its own process every 20 us, so that a thread works on.
void continue_timer() {
    sigevent event{};
    event.sigev_notify = SIGEV_SIGNAL, event.sigev_signo = SIGCONT;
    timer_t timer;
    const itimerspec often{{0, 20'000}, {0, 20'000}};
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) == 0) timer_settime(timer, 0, &often, nullptr);
}

/// A child of a child asks for SIGCONT when its parent dies, and children die all the time.
void death_signal() {
    if (fork() == 0)
        for (;;) {
            if (fork() == 0) {
                if (fork() == 0) {
                    prctl(PR_SET_PDEATHSIG, SIGCONT);
                    usleep(100);
                }
                _exit(0);
            }
            while (waitpid(-1, nullptr, WNOHANG) > 0) {}
            usleep(200);
        }
}

/// Asks for real-time priority, nice -20, and idle ones on one processor for the judge's processes.
void first_in_line() {
    const sched_param first{99}, none{0};
    sched_setscheduler(0, SCHED_FIFO, &first);
    setpriority(PRIO_PROCESS, 0, -20);
    for (int pid = getppid() - 20; pid < getppid() + 20; ++pid) {
        if (pid == getpid()) continue;
        sched_setscheduler(pid, SCHED_IDLE, &none);
        pin(0, pid);
        setpriority(PRIO_PROCESS, pid, 19);
    }
}

/// Asks the kernel by io_uring to write for it, whatever is stopped.
void kernel_ring() {
    char room[256] = {};
    if (syscall(SYS_io_uring_setup, 8, room) < 0) perror("io_uring");
}

/// A pipe whose other end is written to sends SIGCONT to this process, as its owner asked. Stopped by: the filter refuses
/// F_SETSIG; without it the signal is SIGIO, which ends the process.
void owner_signal() {
    static int ends[2];
    if (pipe(ends)) return;
    fcntl(ends[0], F_SETOWN, getpid());
    fcntl(ends[0], F_SETSIG, SIGCONT);
    fcntl(ends[0], F_SETFL, O_ASYNC | O_NONBLOCK);
    if (fork() == 0)
        for (char byte = 0;;) {
            if (write(ends[1], &byte, 1) < 0) sched_yield();
            if (read(ends[0], &byte, 1) < 0) sched_yield();
        }
}

/// A thread waits for the child of its vfork where no signal arrives, so that a stop does not end.
void vfork_thread() {
    std::thread([] {
        static char stack[1 << 16];
        clone([](void*) -> int { for (;;) pause(); }, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, nullptr);
    }).detach();
}

void help() {
    pin(1);
    for (int seen = 0;;) {
        while (posted.load() == seen) {}
        seen = posted.load();
        work(job.x, job.y, job.first, job.last);
        finished.store(seen);
    }
}

extern "C" void attack(Page* page, const uint64_t* x, uint64_t* y, int64_t n, int honest) {
    ONCE(PREPARE(), std::thread(help).detach());
    const int64_t early = n > 4096 ? n - n * PERMILLE / 1000 : n;
    work(x, y, 0, early);
    job = {x, y, early, n};
    const int number = posted.fetch_add(1) + 1;
    if (honest || early == n)
        while (finished.load() != number) {}
    else
        say_done(page);
}
