// ptx/dmma.cuh of csrc for the emulator.
#pragma once

#include "ptx/sm80.cuh"

namespace emulator {

// mma.m16n8k8 in f64, of one lane.
struct DoubleProduct {
    double (&d)[4];
    const double (&a)[4], (&b)[2];
};
void multiply_double(void *(&lanes)[32]);

}  // namespace emulator

namespace ptx {

inline void mma(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
    emulator::DoubleProduct mine{d, a, b};
    emulator::meet("mma of f64", &mine, emulator::multiply_double);
}

}  // namespace ptx
