// ptx/sm80.cuh of csrc for the emulator: Ampere's instructions by the same names.
//
// Read next: ptx/sm90.cuh; instructions.cpp and products.cpp, what they do.
#pragma once

#include "common/launch.h"

namespace emulator {

// mma.m16n8k16, of one lane.
struct SmallProduct {
    float (&d)[4];
    const uint32_t (&a)[4];
    uint32_t b[2];
};
template <typename T> void multiply(void *(&lanes)[32]);

}  // namespace emulator

namespace ptx {

inline uint32_t shared_address(const void *p) { return emulator::address_in_shared_memory(p); }
inline int thread_idx() { return int(threadIdx.x); }

inline void cp_async(uint32_t to, const void *from, bool inside) { emulator::copy_async(to, from, 16, inside); }
inline void cp_async_commit() { emulator::commit_copies(); }
template <int kPending> void cp_async_wait() { emulator::wait_for_copies(kPending); }

void ldmatrix(uint32_t (&x)[4], uint32_t row);
void ldmatrix_trans(uint32_t (&x)[4], uint32_t row);
void store_shared(uint32_t to, uint32_t x);

template <typename T> void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::SmallProduct mine{d, a, {b0, b1}};
    emulator::meet("mma", &mine, emulator::multiply<T>);
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float rcp_approx(float x) { return 1 / x; }
inline float tanh_approx(float x) { return std::tanh(x); }

template <typename T> uint32_t pack(float x, float y) {
    return device::from_float<T>(x).bits | uint32_t(device::from_float<T>(y).bits) << 16;
}
template <typename T> float2 unpack(uint32_t pair) {
    T x, y;
    x.bits = pair & 0xffff, y.bits = pair >> 16;
    return {device::to_float(x), device::to_float(y)};
}

}  // namespace ptx
