// Counters in GPU memory that are 0, for kernels that leave them 0.
#pragma once

#include <cstdint>

// `count` counters on the current device, or nullptr if too few are left. They belong for ever to the stream or, while
// it is captured, to that graph: work that may run at the same time has different ones.
int *zeroed_counters(int64_t count, void *stream);
