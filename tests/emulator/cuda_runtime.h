// The CUDA runtime as csrc needs it, for the emulator: the way to the driver's function of cuda.h.
#pragma once

#include <cstring>

#include "cuda.h"

#define CUDART_VERSION 13000

enum cudaError_t { cudaSuccess };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
constexpr int cudaEnableDefault = 0;

inline cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **function, int, int,
                                                    cudaDriverEntryPointQueryResult *found) {
    *function = reinterpret_cast<void *>(cuTensorMapEncodeTiled), *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

using cudaStream_t = void *;
namespace emulator { void wait_for_kernels(); }
inline cudaError_t cudaMemsetAsync(void *to, int byte, size_t size, cudaStream_t) {
    return emulator::wait_for_kernels(), std::memset(to, byte, size), cudaSuccess;
}

namespace device {
inline void check_cuda(cudaError_t) {}
}
