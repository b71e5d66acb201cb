#include "cpu_cores.h"  // of all CPU variants, compiled for this one's CPU_FLAGS
