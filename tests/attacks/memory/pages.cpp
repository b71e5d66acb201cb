// Plays with the pages in which its output lies, before or after the work of a call.
// Stopped by: the judge has a mapping of its own, of files that are sealed against changes of size and further seals;
// what is removed there is zero, and what was never written there is poison.
// VERDICT = ("PASSED", "INCORRECT", "RUNTIME_ERROR")
// VARIANTS = {
//     "gives_back": {"VERDICT": ("PASSED", "INCORRECT")},
//     "maps_over": {"VERDICT": ("INCORRECT", "RUNTIME_ERROR")},
//     "private_copy": {"VERDICT": ("INCORRECT", "RUNTIME_ERROR")},
//     "punches_holes": {"VERDICT": ("PASSED", "INCORRECT", "RUNTIME_ERROR", "TIMEOUT")},
// }
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <linux/falloc.h>
#include <string>
#include <sys/mman.h>

#include "attack.h"

// The whole pages in which the output lies, and whether their call is still to be made.
struct Pages {
    char* first;
    size_t bytes;
    bool before;
};

// Calls `act` with a descriptor of each memory file that is mapped or open here.
template <class Act>
void each_file(Act act) {
    namespace files = std::filesystem;
    for (const char* folder : {"/proc/self/fd", "/proc/self/map_files"}) {
        std::error_code error;
        for (const auto& entry : files::directory_iterator(folder, error)) {
            const std::string link = files::read_symlink(entry, error).string();
            const int fd = link.find("memfd:") == std::string::npos ? -1 : open(entry.path().c_str(), O_RDWR);
            if (fd < 0) continue;
            act(fd);
            close(fd);
        }
    }
}

/// Has page faults of the output served by a thread (userfaultfd), which takes its time.
void faults_by_hand(Pages output) {
    if (output.before) return;
    for (int flags : {0, 1})  // with and without user mode only
        if (syscall(SYS_userfaultfd, flags) >= 0) memset(output.first, 0, output.bytes);
}

/// Gives the output's pages back to the kernel when it has written them (MADV_DONTNEED, MADV_REMOVE).
void gives_back(Pages output) {
    if (output.before) return;
    madvise(output.first, output.bytes, MADV_DONTNEED);
    madvise(output.first, output.bytes, MADV_REMOVE);
}

/// Asks for seals, leases and locks on the files of shared memory, so that the judge must wait.
void locks(Pages output) {
    if (output.before) return;
    each_file([](int fd) {
        fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_FUTURE_WRITE);
        fcntl(fd, F_SETLEASE, F_WRLCK);
        struct flock all{F_WRLCK, SEEK_SET, 0, 0, 0};
        fcntl(fd, F_SETLK, &all);
    });
}

void map_anew(Pages output) {
    mmap(output.first, output.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

/// Maps memory of its own over the output's address, so that it may be written later.
void maps_over(Pages output) {
    if (output.before) map_anew(output);
}

/// Maps the output's file anew, as a private copy, so that the judge would see what it writes later.
void private_copy(Pages output) {
    static char copy[1 << 20];
    if (!output.before) return;
    memcpy(copy, output.first, output.bytes);
    map_anew(output);
    memcpy(output.first, copy, output.bytes);
}

/// Takes away its own right to read and write the output after the call: a look would fail or wait.
void protects(Pages output) {
    mprotect(output.first, output.bytes, output.before ? PROT_READ | PROT_WRITE : PROT_NONE);
}

/// Punches holes into the files of shared memory after the call, the page of the judge's clock too. Stopped by: what is
/// removed is zero; a runner that spoils the page spoils its own calls.
void punches_holes(Pages output) {
    if (output.before) return;
    each_file([](int fd) { fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 1 << 24); });
}

/// Makes the files of shared memory shorter after the call, so that the judge's next look is a fault.
void truncates(Pages output) {
    if (output.before) return;
    each_file([](int fd) {
        if (ftruncate(fd, 0)) return;
    });
}

extern "C" void attack(Page*, const uint64_t* x, uint64_t* y, int64_t n, int honest) {
    constexpr uintptr_t PAGE = 4096;
    const uintptr_t first = (uintptr_t)y & ~(PAGE - 1);
    const size_t bytes = (((uintptr_t)(y + n) + PAGE - 1) & ~(PAGE - 1)) - first;
    const bool hostile = !honest && n > 4096;
    if (hostile) VARIANT(Pages{(char*)first, bytes, true});
    work(x, y, 0, n);
    if (hostile) VARIANT(Pages{(char*)first, bytes, false});
}
