// Questions about the current GPU, whose answers are remembered, and counters on it that are 0. All throw
// std::runtime_error where there is no GPU.
#pragma once

#include <cstddef>
#include <cstdint>

int compute_capability();    // 90 for Hopper; that of the code which this build holds for the GPU, if that is older
bool has_fast_fp64();        // fp64 is half as fast as fp32, as on H100 and H200, and not a small fraction
int num_sms();               // multiprocessors
size_t max_shared_memory();  // bytes that one block may have
bool can_launch_early();     // see launch.h: Hopper and newer, and a driver of CUDA 12.3, whose graphs know of it

// `count` numbers on the current device that are 0, for a kernel that leaves them 0; nullptr if too few are left. Work
// that may run at the same time gets different ones: they belong to the stream, or to the graph that captures it.
int *zeroed_counters(int64_t count, void *stream);
