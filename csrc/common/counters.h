// Counters in GPU memory that are 0, for kernels that leave them 0.
#pragma once

#include <cstdint>

// `count` counters on the current device, or nullptr if too few are left. Work that may run at the same time gets
// different ones: they belong to the stream, or to the graph that captures it, for ever.
int *zeroed_counters(int64_t count, void *stream);
