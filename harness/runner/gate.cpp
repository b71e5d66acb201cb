// The judge's code for a CPU: its clock, and plain readers over all cores, for the roofline and for flushing the caches.
//
// The runner waits in judge_take_turns. The judge (harness/checker/checker.py) stops it, fills its memory, makes caches cold, and
// then measures, in judge_time, from "continue" to "done". Nothing that the runner writes here is believed: a word that
// says "done" too early only makes the judge copy outputs too early.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dirent.h>
#include <fstream>
#include <functional>
#include <linux/futex.h>
#include <map>
#include <pthread.h>
#include <sched.h>
#include <string>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <thread>
#include <unistd.h>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

extern "C" {
// Of the interpreter that loads this file.
void* PyObject_CallObject(void* callable, void* arguments);
void* PyTuple_GetItem(void* tuple, ssize_t index);
ssize_t PyTuple_Size(void* tuple);
void Py_IncRef(void* object);
void Py_DecRef(void* object);
}

namespace {

constexpr int RETURNED = 1024;   // tensors that a call may return where the judge hands out no outputs
constexpr double STOP_LIMIT_S = 10.0;  // for all that was told to stop; beside load each thread needs a turn for it
constexpr int SAID = 524288;     // bytes in which a runner says what its tensors are, where the judge hands out none
constexpr int WORDS = 64;        // of the outputs, looked at when a call says that it is done
constexpr uint32_t LEAVE = 1u << 31;  // with the number of the last call, in `go`: there is no next one
constexpr double SPIN_US = 20'000;  // that a runner spins before it sleeps
constexpr double EMPTY_US = 300;  // that the judge's empty call works: a judge that waits as long as for a kernel sleeps as deep
constexpr long LOOK_NS = 50'000'000;  // how often a wait sees whether the runner still lives
constexpr double SEEN_US = 1e9;   // more than any bound of what a runner may have run while it was stopped
constexpr long NAP_NS = 20'000;   // between looks at processes that stop: they need the processor that an urgent judge leaves

// One page that judge and runner share. Each word has a cache line.
struct Gate {
    alignas(64) std::atomic<uint32_t> ready;  // the runner: number of the call that it waits for
    alignas(64) std::atomic<uint32_t> go;     // the judge: number of the call that may be made
    alignas(64) std::atomic<uint32_t> done;   // the runner: number of the call that is over
    alignas(64) uint32_t which;               // the judge, before `go`: of the runner's calls
    alignas(64) uint32_t raised;              // the runner, before `done`: the call raised, and is its last
    alignas(64) uint64_t count;               // the runner, before `done`: where the tensors are that came back
    struct { uint64_t address, bytes; } returned[RETURNED];
    uint64_t said_bytes;                      // the same: what they are, as JSON
    char said[SAID];
};

double now_us() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

int futex_wait(std::atomic<uint32_t>* word, uint32_t seen, long ns) {
    const timespec limit{ns / 1'000'000'000, ns % 1'000'000'000};
    return syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// The runner `pid`, and all that it started, below its reaper.
struct Group {
    int reaper, pid;
};

// The numbers that are entries of a folder in /proc.
std::vector<int> numbers(const std::string& folder) {
    std::vector<int> found;
    if (DIR* listed = opendir(folder.c_str())) {
        while (const dirent* entry = readdir(listed))
            if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9') found.push_back(atoi(entry->d_name));
        closedir(listed);
    }
    return found;
}

std::string task_folder(int pid) { return "/proc/" + std::to_string(pid) + "/task"; }

// pids of everything below the reaper, which is the subreaper of all that a runner ever starts.
std::vector<int> descendants(int reaper) {
    std::vector<int> found, todo{reaper};
    while (!todo.empty()) {
        const int pid = todo.back();
        todo.pop_back();
        for (int thread : numbers(task_folder(pid))) {
            std::ifstream children(task_folder(pid) + "/" + std::to_string(thread) + "/children");
            for (int child; children >> child;) {
                found.push_back(child);
                todo.push_back(child);
            }
        }
    }
    return found;
}

// The letter of the state of a process or thread, by its folder in /proc; X: it is gone.
char state(const std::string& folder) {
    std::string text;
    std::ifstream file(folder + "/stat");
    const size_t end = std::getline(file, text, '\0') ? text.rfind(')') : std::string::npos;  // of the name, which is any
    return end + 2 < text.size() ? text[end + 2] : 'X';
}

// Whether no thread of a process can run: each is stopped or dead. One that waits in the kernel (D) is not: it reads and
// writes on for its process, and as it ends the kernel continues groups of processes that lose their parent by that.
bool still(int pid) {
    for (int thread : numbers(task_folder(pid)))
        if (!strchr("TtZXx", state(task_folder(pid) + "/" + std::to_string(thread)))) return false;
    return true;
}

// By pid the us that processes have run, with their threads that ended; NaN, equal to nothing: one can run now.
using Ran = std::map<int, double>;

Ran ran_by(const std::vector<int>& pids) {
    Ran ran;
    for (int pid : pids) {
        clockid_t clock;
        timespec t{};
        if (!clock_getcpuclockid(pid, &clock)) clock_gettime(clock, &t);
        ran[pid] = still(pid) ? t.tv_sec * 1e6 + t.tv_nsec / 1e3 : NAN;
    }
    return ran;
}

// Whether the runner's process is there, and no zombie.
bool lives(int pid) { return !strchr("ZXx", state("/proc/" + std::to_string(pid))); }

enum { WELL = 0, LATE = 1, GONE = 2, RUNS_ON = 3 };  // what became of a wait; RUNS_ON: done, and not to be stopped

std::string noted;          // what a runner had said of its tensors at "done"
std::map<int, Ran> rested;  // by reaper, what its processes had run when they were stopped last

// at_once: the runner's process, which has just said "done" and is alone in most runners, is stopped before /proc is read
// for others. told: when every process had been told. From then on none gets back to its own code: who runs is
// interrupted at once, and who waits for a processor finds the order when it gets one.
int stop(const Group& group, bool at_once, double* told) {
    const double deadline = now_us() + 1e6 * STOP_LIMIT_S;
    if (at_once) kill(group.pid, SIGSTOP);
    *told = now_us();
    // A stopped process stays stopped: the filter of system calls refuses SIGCONT, and what makes the kernel send it. The
    // stop is complete when two looks see every thread stopped, the same processes, and no run time in between: a thread
    // that is seen as stopped may still be on its way, and its run time is counted when it leaves the processor.
    for (Ran before;;) {
        const std::vector<int> found = descendants(group.reaper);
        for (int pid : found) {
            kill(pid, SIGSTOP);
            if (pid != group.pid && !before.count(pid)) *told = now_us();
        }
        const Ran now = ran_by(found);
        const bool over = now == before;
        if (over) rested[group.reaper] = now;
        if (over || now_us() > deadline) return !lives(group.pid) ? GONE : over ? WELL : LATE;
        before = now;
        const timespec nap{0, NAP_NS};
        nanosleep(&nap, nullptr);
    }
}

// The us that processes of a stopped runner ran since, which is stopped again. One that is new or can be seen to run
// counts SEEN_US more: the machine cannot explain it. 0 too where the runner is gone, which its next request tells.
double ran_on(const Group& group) {
    const Ran before = rested[group.reaper], now = ran_by(descendants(group.reaper));
    double told, us = 0;
    if (now == before || stop(group, false, &told) == GONE) return 0;
    for (const auto& [pid, ran] : now) {
        const bool seen = std::isnan(ran) || !before.count(pid);
        us += seen ? SEEN_US : rested[group.reaper][pid] - before.at(pid);
    }
    return us;
}

// stopped: all processes of the runner. Its own comes last, so that the others wait for it and not it for them.
void resume(const Group& group, const std::vector<int>& stopped) {
    for (int pid : stopped)
        if (pid != group.pid) kill(pid, SIGCONT);
    kill(group.pid, SIGCONT);
}

int wait_for(std::atomic<uint32_t>* word, uint32_t number, int pid, double limit_s) {
    const double deadline = now_us() + 1e6 * limit_s;
    for (uint32_t seen; (seen = word->load()) != number;) {
        const double left_ns = (deadline - now_us()) * 1e3;
        if (left_ns <= 0) return LATE;
        const long ns = left_ns < LOOK_NS ? long(left_ns) + 1 : LOOK_NS;
        if (futex_wait(word, seen, ns) && errno == ETIMEDOUT && !lives(pid)) return GONE;
    }
    return WELL;
}

// Nanoseconds that the threads of a process waited for a processor while they could have run.
uint64_t run_delay(int pid) {
    uint64_t sum = 0, ran, waited;
    for (int thread : numbers(task_folder(pid))) {
        std::ifstream file(task_folder(pid) + "/" + std::to_string(thread) + "/schedstat");
        if (file >> ran >> waited) sum += waited;
    }
    return sum;
}

// Tasks of the machine that want a processor now, the caller left out.
int others() {
    double load;
    int running;
    std::ifstream file("/proc/loadavg");
    return file >> load >> load >> load >> running && running > 1 ? running - 1 : 0;
}

// Woken at once, also beside load. Without the right to it nothing changes.
void urgent(bool on) {
    prctl(PR_SET_TIMERSLACK, on ? 1 : 0);  // naps as short as they are meant; 0: the default again
    const sched_param first{1}, plain{0};
    sched_setscheduler(0, on ? SCHED_FIFO : SCHED_OTHER, on ? &first : &plain);
}

// Words of the outputs at random places, or all of them where there are few; the last of a region may be a shorter one.
// `remote`: the regions are the runner's own memory.
struct Look {
    iovec places[WORDS];
    int count = 0;
    bool remote = false;

    // Every output gets as many words as any other, however small it is beside them, so that none is left for later.
    void choose(const iovec* regions, int n, bool in_runner) {
        remote = in_runner;
        uint64_t random[WORDS + 1];
        std::vector<iovec> filled;
        for (int i = 0; i < n; ++i)
            if (regions[i].iov_len) filled.push_back(regions[i]);
        if (filled.empty() || getrandom(random, sizeof random, 0) != sizeof random) return;
        const uint64_t kinds = filled.size(), first = random[WORDS] % kinds;  // there may be more outputs than words
        for (; count < WORDS; ++count) {
            const iovec& region = filled[(first + count) % kinds];
            const uint64_t words = (region.iov_len + 7) / 8;
            const uint64_t at = words <= WORDS / kinds ? count / kinds % words : random[count] % words;
            const uint64_t left = region.iov_len - 8 * at;
            places[count] = {(char*)region.iov_base + 8 * at, left < 8 ? left : 8};
        }
    }
    // false: the runner's memory cannot be read.
    bool take(int pid, uint64_t* into) {
        iovec here[WORDS];
        ssize_t bytes = 0;
        for (int i = 0; i < count; ++i) {
            into[i] = 0;
            here[i] = {&into[i], places[i].iov_len};
            bytes += places[i].iov_len;
            if (!remote) memcpy(&into[i], (const void*)places[i].iov_base, places[i].iov_len);
        }
        return !remote || process_vm_readv(pid, here, count, places, count, 0) == bytes;
    }
};

// ---------------------------------------------------------------- readers

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

std::atomic<uint64_t> sink;  // keeps what is read from being left out

// XOR of `lines` lines, in `chunks` pieces that `threads` threads take in turn.
std::function<void(int)> reader(const void* data, size_t lines, size_t ahead, int threads, size_t chunks) {
    const size_t step = (lines + chunks - 1) / chunks;
    return [=](int index) {
        if (index >= threads) return;
        uint64_t mine = 0;
        for (size_t chunk = index; chunk < chunks; chunk += threads) {
            const size_t first = chunk * step, last = first + step < lines ? first + step : lines;
            if (first < last) mine ^= read_lines((const char*)data + 64 * first, last - first, ahead);
        }
        sink ^= mine;
    };
}

constexpr size_t EVICT_TURNS = 64;  // interleaved pieces of each processor's share

}  // namespace

extern "C" {

int judge_gate_bytes() { return sizeof(Gate); }

// The runner: make call `number` and those after it, each when the judge says go, until it says leave. Of `calls`, a
// tuple of argument tuples for `kernel`, the judge names one each time; one without arguments is the judge's empty call,
// which works for EMPTY_US right here, so that the rest of its reading is what continuing and waking cost. -> what the
// last call returned, NULL where it raised. To be called with the interpreter's lock held.
//
// Between two calls nothing else runs here, so that a submission finds no moment off the clock. It spins: the judge stops
// it soon, and a thread that sleeps comes to its call later than one of a submission's own that watches the page.
void* judge_take_turns(void* page, uint32_t number, void* kernel, void* calls) {
    Gate* gate = (Gate*)page;
    gate->ready.store(number);
    futex_wake(&gate->ready);
    for (void* result = nullptr;; ++number) {
        const double patience = now_us() + SPIN_US;
        for (uint32_t seen; (seen = gate->go.load()) != number;) {
            if (result && seen == ((number - 1) | LEAVE)) return result;
            if (now_us() > patience) futex_wait(&gate->go, seen, 1'000'000'000);
        }
        if (result) Py_DecRef(result);
        void* arguments = PyTuple_GetItem(calls, gate->which);
        if (arguments && PyTuple_Size(arguments) == 0) {
            for (const double end = now_us() + EMPTY_US; now_us() < end;) {}
            Py_IncRef(result = arguments);
        } else {
            result = arguments ? PyObject_CallObject(kernel, arguments) : nullptr;
        }
        gate->raised = !result;
        gate->done.store(number);
        futex_wake(&gate->done);
        if (!result) return nullptr;
    }
}

// Which of its calls a runner made last.
int judge_which(void* page) { return ((const Gate*)page)->which; }

// The judge: call `number` of a runner was its last. It is stopped, and leaves when it is let go.
void judge_leave(void* page, uint32_t number) {
    Gate* gate = (Gate*)page;
    gate->go.store(number | LEAVE);
    futex_wake(&gate->go);
}

// The runner, within its call: where the tensors are that it returns, and what they are (`bytes` of JSON).
void judge_note_returned(void* page, const uint64_t* address_and_bytes, int count, const char* said, uint64_t bytes) {
    Gate* gate = (Gate*)page;
    gate->count = count < RETURNED ? count : RETURNED;
    memcpy(gate->returned, address_and_bytes, 16 * gate->count);
    gate->said_bytes = bytes < SAID ? bytes : SAID;
    memcpy(gate->said, said, gate->said_bytes);
}

// The judge: what a runner had noted when the call was done that was timed last.
const char* judge_noted() { return noted.c_str(); }

// Each of these: 0, or 1: not within the limit, or 2: the runner's process is gone.
int judge_stop(int reaper, int pid) {
    double told;
    return stop({reaper, pid}, false, &told);
}
int judge_await_ready(void* page, uint32_t number, int pid, double limit_s) {
    return wait_for(&((Gate*)page)->ready, number, pid, limit_s);
}

void judge_resume(int reaper, int pid) { resume({reaper, pid}, descendants(reaper)); }
double judge_ran_on(int reaper, int pid) { return ran_on({reaper, pid}); }

struct Reading {  // as in gate.py, which says what each is
    double call_us, stop_us, delay_us, ran_us;
    int32_t others, changed, raised;
};

// Time call `number` of a stopped runner, the one of its calls that `which` says. outputs: `count` regions that the call
// writes, of this process's memory. Where their addresses are 0, they are in the runner, which notes where: what it has
// noted at "done" is put in their place, cut to their sizes here; `found` gets the sizes that it noted.
int judge_time(void* page, uint32_t number, uint32_t which, int reaper, int pid, double limit_s, iovec* outputs, int count,
               uint64_t* found, Reading* reading) {
    Gate* gate = (Gate*)page;
    const Group group{reaper, pid};
    const bool remote = count && !outputs[0].iov_base;
    Look look;
    if (!remote) look.choose(outputs, count, false);
    reading->ran_us = ran_on(group);
    const std::vector<int> stopped_ones = descendants(reaper);
    const uint64_t waited = run_delay(pid);
    reading->others = others();
    gate->count = gate->said_bytes = gate->raised = 0;
    gate->which = which;
    urgent(true);
    gate->go.store(number);
    futex_wake(&gate->go);
    const double start = now_us();
    resume(group, stopped_ones);
    const int came = wait_for(&gate->done, number, pid, limit_s);
    const double end = now_us();
    reading->raised = gate->raised != 0;
    if (remote) {
        const int written = int(gate->count < RETURNED ? gate->count : RETURNED);
        for (int i = 0; i < count; ++i) {
            found[i] = i < written ? gate->returned[i].bytes : 0;
            outputs[i].iov_base = (void*)(i < written ? gate->returned[i].address : 0);
            if (outputs[i].iov_len > found[i]) outputs[i].iov_len = found[i];
        }
        look.choose(outputs, count, true);
    }
    uint64_t first[WORDS] = {}, last[WORDS] = {};
    const bool seen = look.take(pid, first);
    const uint64_t said = gate->said_bytes;
    noted.assign(gate->said, said < SAID ? said : SAID);
    double told = end;
    const int stopped = stop(group, came == WELL, &told);
    urgent(false);
    reading->others = std::min(reading->others, others());  // not the judge's own, which look up now and then
    reading->changed = seen && look.take(pid, last) ? 0 : -1;
    if (reading->changed == 0)
        for (int i = 0; i < look.count; ++i) reading->changed += first[i] != last[i];
    reading->call_us = end - start;
    reading->stop_us = told - end;
    const uint64_t after = run_delay(pid);
    reading->delay_us = after > waited ? double(after - waited) / 1e3 : 0.0;  // a thread that ended takes its count along
    if (came != WELL) return came;
    return stopped == LATE ? RUNS_ON : stopped;
}

// Copy `bytes` at `address` of a stopped runner's memory. -> 0, or an errno.
int judge_peek(int pid, uint64_t address, uint64_t bytes, void* into) {
    uint64_t got = 0;
    while (got < bytes) {
        iovec here{(char*)into + got, size_t(bytes - got)}, there{(void*)(address + got), size_t(bytes - got)};
        const ssize_t part = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (part <= 0) return part < 0 ? errno : EFAULT;
        got += part;
    }
    return 0;
}

// ---------------------------------------------------------------- readers

int judge_configs() { return sizeof(CONFIGS) / sizeof(CONFIGS[0]); }

// Read `bytes` from `data` (64-byte aligned; a tail under 64 bytes is left) with configuration `index`.
int judge_read(const void* data, size_t bytes, int index) {
    if (index < 0 || index >= judge_configs()) return 1;
    const Config c = CONFIGS[index];
    const int threads = c.threads ? c.threads : pool().size();
    pool().run(reader(data, bytes / 64, c.ahead, threads, size_t(threads) * c.turns));
    return 0;
}

// Read `bytes` of `data` from every processor, each a different share, which evicts what their caches held.
int judge_evict(const void* data, size_t bytes) {
    pool().run_everywhere(reader(data, bytes / 64, 0, pool().size(), size_t(pool().size()) * EVICT_TURNS));
    return 0;
}

// Drop the lines of `data` from every cache. -> 0, or 1: the processor has no instruction for it.
int judge_forget(const void* data, size_t bytes) {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    const bool quick = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 23));
    const char *line = (const char*)((uintptr_t)data & ~uintptr_t(63)), *end = (const char*)data + bytes;
    __builtin_ia32_mfence();
    for (; line < end; line += 64)
        if (quick) asm volatile("clflushopt %0" : "+m"(*(volatile char*)line));
        else asm volatile("clflush %0" : "+m"(*(volatile char*)line));
    __builtin_ia32_mfence();
    return 0;
#else
    return 1;
#endif
}

}  // extern "C"
