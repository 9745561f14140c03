// ptx/memory.cuh of csrc for the emulator.
#pragma once

#include <utility>

namespace ptx {

inline int atomic_add_acq_rel(int *to, int x) { return std::exchange(*to, *to + x); }
void sleep_briefly();
int load_acquire(const int *from);
void store_release(int *to, int x);
void red_add(float *to, const float (&x)[4]);

}  // namespace ptx
