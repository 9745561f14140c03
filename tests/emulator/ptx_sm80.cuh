// ptx_sm80.cuh of csrc for the emulator: what of it kernels for Hopper use.
//
// Read next: ptx_sm90.cuh.
#pragma once

#include "launch.h"

namespace ptx {

uint32_t shared_address(const void *p);

inline float exp2_approx(float x) { return std::exp2(x); }

template <typename T> uint32_t pack(float x, float y) {
    return device::from_float<T>(x).bits | uint32_t(device::from_float<T>(y).bits) << 16;
}

}  // namespace ptx
