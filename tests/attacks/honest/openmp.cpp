// OpenMP. Its pool stays between calls, which is no offence.
// VERDICT = "PASSED"
// FLAGS = ("-fopenmp",)
// VARIANTS = {
//     "static": {"CLAUSES": "schedule(static)", "ABOUT": "OpenMP with a static schedule."},
//     "dynamic": {"CLAUSES": "schedule(dynamic)", "ABOUT": "OpenMP with a dynamic schedule, in blocks of 64 elements."},
//     "pinned": {"CLAUSES": "proc_bind(spread) schedule(static)", "ABOUT": "OpenMP, each thread bound to a processor."},
// }
#include <omp.h>

#include "rounds.h"

#define PRAGMA(text) _Pragma(#text)
#define FOR(clauses) PRAGMA(omp parallel for clauses)

extern "C" int rounds(const uint64_t* x, uint64_t* y, int64_t n) {
    FOR(CLAUSES)
    for (int64_t i = 0; i < n; i += 64) work(x, y, i, i + 64 < n ? i + 64 : n);
    return 0;
}
