// What the drivers share: numbers of 16 bits, and memory of the GPU, or of the CPU by g++ and in the emulator. Include
// it after the kernels, or their headers, and `using namespace device` or `host`.
#pragma once

#include <cstdlib>
#include <cstring>

#ifdef __CUDACC__
template <typename T> T encode(float x) { return T(x); }
template <typename T> double decode(T x) { return float(x); }
void *allocate(size_t bytes) { void *p; return check_cuda(cudaMalloc(&p, bytes)), p; }
void release(void *p) { cudaFree(p); }
void copy(void *to, const void *from, size_t bytes) { check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault)); }
#else
template <typename T> T encode(float x) { return from_float<T>(x); }
template <typename T> double decode(T x) { return to_float(x); }
void *allocate(size_t bytes) { return std::malloc(bytes); }
void release(void *p) { std::free(p); }
void copy(void *to, const void *from, size_t bytes) { if (bytes) std::memcpy(to, from, bytes); }
#endif
