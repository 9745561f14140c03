// ptx/memory.cuh of csrc for the emulator.
#pragma once

#include <algorithm>
#include <utility>

#include "ptx/sm80.cuh"

namespace ptx {

inline uint64_t evict_first() { return 0; }
inline void cp_async(uint32_t to, const void *from, bool inside, uint64_t) { cp_async(to, from, inside); }
inline void cp_async_4(void *to, const void *from, bool inside) {
    emulator::copy_async(shared_address(to), from, 4, inside);
}
inline int atomic_add_acq_rel(int *to, int x) { return std::exchange(*to, *to + x); }
void sleep_briefly();
int load_acquire(const int *from);
void store_release(int *to, int x);
inline void store(float *to, const float (&x)[4]) { std::copy_n(x, 4, to); }
void red_add(float *to, const float (&x)[4]);

}  // namespace ptx
