// Questions about the current GPU. The answers are remembered. All throw std::runtime_error where there is no GPU.
#pragma once

#include <cstddef>
#include <cstdint>

int compute_capability();    // 90 for Hopper; or of the code that this build holds for the GPU, if that is older
bool has_fast_fp64();        // at least half as fast as fp32, as on H100 and H200
int num_sms();               // multiprocessors
size_t max_shared_memory();  // bytes that a block may have
int max_cluster();           // most blocks of a cluster, at most 8, that have room beside one another; from Hopper on
void allow_shared_memory(const void *kernel, int bytes);  // bytes that a block may have
bool can_launch_early();     // see launch.h: Hopper or newer, with a driver of CUDA 12.3, whose graphs know of it
