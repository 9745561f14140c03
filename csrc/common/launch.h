// The folder common/ has what all kernels share. Order in common/: launch.h, device.h, sequence.cuh, mask.cuh,
// scores.cuh, scheduler.cuh, softmax.cuh. Beside it: device.cu; counters.h, counters.cu and cache_sequence.cuh for
// caches; key_tiles.cuh and bwd_workspace.cuh for backward passes; block_mask.cuh.
//
// The CUDA runtime as kernels need it: element types, shared memory, launches. host/cuda.h has them for the CPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/device.h"

namespace device {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T> __device__ T from_float(float x) {  // rounds to nearest even
    if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
    else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
    else return x;
}

// The block's dynamic shared memory as the kernel's struct, aligned for the widest swizzle of TMA.
template <typename Tiles> __device__ Tiles &shared_memory() {
    extern __shared__ __align__(1024) unsigned char memory[];
    return *reinterpret_cast<Tiles *>(memory);
}

#define MINIMAL_ATTN_STRING_(...) #__VA_ARGS__
#define MINIMAL_ATTN_STRING(...) MINIMAL_ATTN_STRING_(__VA_ARGS__)

inline void check_cuda(cudaError_t error) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // leaves no error behind for the caller's next call
    std::string message = std::string("minimal_attn: ") + cudaGetErrorString(error);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
        int device = 0;
        cudaDeviceProp gpu{};
        cudaGetDevice(&device);
        cudaGetDeviceProperties(&gpu, device);
        message += std::string("; the GPU is ") + gpu.name + " (compute capability " + std::to_string(gpu.major) + "." +
                   std::to_string(gpu.minor) + "), this build holds kernels for " +
                   MINIMAL_ATTN_STRING(__CUDA_ARCH_LIST__) + "; rebuild with TORCH_CUDA_ARCH_LIST=" +
                   std::to_string(gpu.major) + "." + std::to_string(gpu.minor) + " (7.5 and newer are supported)";
    }
    throw std::runtime_error(message);
}

// Functions of the driver need a context, which a thread may not have yet. Since CUDA 12, cudaSetDevice makes one.
inline void make_context() {
    int device;
    check_cuda(cudaGetDevice(&device)), check_cuda(cudaSetDevice(device));
}

template <typename... Args>
void enqueue(bool may_begin_early, int cluster, void (*kernel)(Args...), int64_t blocks, int threads,
             size_t shared_bytes, void *stream, Args... args) {
    if (blocks == 0) return;
    if (blocks > INT32_MAX) throw std::runtime_error("minimal_attn: the grid has more than 2^31 - 1 blocks");
    allow_shared_memory(reinterpret_cast<const void *>(kernel), int(shared_bytes));
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {unsigned(cluster), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(blocks)), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream), config.attrs = attributes + (cluster == 1);
    config.numAttrs = (cluster > 1) + may_begin_early;
    check_cuda(cudaLaunchKernelEx(&config, kernel, args...));
}

// Enqueues kernel<<<blocks, threads, shared_bytes, stream>>>(args...) on the current device; nothing for no blocks.
template <typename... Args>
void launch(void (*kernel)(Args...), int64_t blocks, int threads, size_t shared_bytes, void *stream,
            std::type_identity_t<Args>... args) {
    enqueue<Args...>(false, 1, kernel, blocks, threads, shared_bytes, stream, args...);
}
// Like launch(), but the kernel may begin once all blocks of the previous one in the stream have called
// let_next_kernel_begin() ("CUDA C++ Programming Guide: Programmatic Dependent Launch"). A thread calls
// wait_for_previous_kernel(), or waits for a counter or for a thread that did, before it touches what that one reads or
// writes. Every such kernel has a thread that waits, at its end if not before: so when it ends, all kernels before it
// have ended.
template <typename... Args>
void launch_early(void (*kernel)(Args...), int64_t blocks, int threads, size_t shared_bytes, void *stream,
                  std::type_identity_t<Args>... args) {
    enqueue<Args...>(can_launch_early(), 1, kernel, blocks, threads, shared_bytes, stream, args...);
}
// Like launch_early(), in clusters of so many blocks.
template <typename... Args>
void launch_clusters(int cluster, void (*kernel)(Args...), int64_t blocks, int threads, size_t shared_bytes,
                     void *stream, std::type_identity_t<Args>... args) {
    enqueue<Args...>(can_launch_early(), cluster, kernel, blocks, threads, shared_bytes, stream, args...);
}
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}
__device__ inline void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Kernel parameters lie in constant memory, cold at each launch: code that reads them one after another waits for each
// line of 64 bytes. This asks for all lines at once. Parameters are __grid_constant__.
template <typename... Params> __device__ void prefetch_parameters(const Params &...params) {
    unsigned block_idx;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block_idx));
    const int zero = block_idx >> 31;  // to the compiler, it is unknown: then loads do not wait for one another
    int sum = 0;
    auto read = [&](const auto &x) {
        const int *words = reinterpret_cast<const int *>(&x) + zero;
#pragma unroll
        for (unsigned i = 0; i < sizeof(x) / sizeof(int); i += 16) sum ^= words[i];
    };
    (read(params), ...);
    if (sum == 0x5bd1e995 && zero) __trap();  // never: uses the sum
}

}  // namespace device
