#include "cpu_site.h"  // of all CPU variants, compiled for this one's CPU_FLAGS
