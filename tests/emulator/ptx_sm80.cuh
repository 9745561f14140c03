// ptx_sm80.cuh of csrc for the emulator: what of it kernels for Hopper use.
//
// Read next: ptx_sm90.cuh; instructions.cpp and wgmma.cpp, what they do.
#pragma once

#include "launch.h"

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

uint32_t shared_address(const void *p);
void ldmatrix(uint32_t (&x)[4], uint32_t row);

template <typename T> void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::SmallProduct mine{d, a, {b0, b1}};
    emulator::meet("mma", &mine, emulator::multiply<T>);
}

inline float exp2_approx(float x) { return std::exp2(x); }

template <typename T> uint32_t pack(float x, float y) {
    return device::from_float<T>(x).bits | uint32_t(device::from_float<T>(y).bits) << 16;
}

}  // namespace ptx
