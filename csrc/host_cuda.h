// Just enough of CUDA to compile flash.cu and flash_bwd.cu with a C++20 compiler and run them on the CPU, so that a
// debugger, AddressSanitizer and ThreadSanitizer work on the kernels themselves and the library works where there is no
// GPU.
//
// Every thread of a block is a real thread and __syncthreads() a real barrier, as is __syncwarp() for 32 of them: a
// barrier left out is a data race that ThreadSanitizer reports. Blocks run one after another. Shared memory is NaN at
// the start of each, so that a value read before it is written shows. As in CUDA, every thread of a block must reach
// every barrier; unlike in CUDA, none may return early.
//
// Read next: flash_host.cpp, which includes the forward kernel.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#define __global__
#define __host__
#define __device__
#define __launch_bounds__(...)

using std::exp2, std::fabs, std::fma, std::fmax, std::fmin, std::log, std::max, std::min;

namespace host {

struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };

inline float to_float(float x) { return x; }
inline double to_float(double x) { return x; }  // fp64 stays what it is
inline float to_float(__nv_bfloat16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
inline float to_float(__half x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
    if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | magnitude << 13);  // inf, NaN
    const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;  // moves the exponent's bias from 15 to 127
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
}

// Both round to nearest even, as the GPU does.
template <typename T> requires(!std::is_floating_point_v<T>) T from_float(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        if (std::isnan(x)) return {0x7fff};
        return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
    } else {
        const uint16_t sign = bits >> 16 & 0x8000;
        const float magnitude = std::fabs(x);
        if (std::isnan(x)) return {0x7fff};
        if (magnitude >= 65520.f) return {uint16_t(sign | 0x7c00)};
        if (magnitude < 0x1p-14f)  // subnormal: a float addition rounds to the multiples of 2^-24 left in the mantissa
            return {uint16_t(sign | (std::bit_cast<uint32_t>(magnitude + 0.5f) - std::bit_cast<uint32_t>(0.5f)))};
        const uint32_t rebias = (bits & 0x7fffffff) - (112u << 23);
        return {uint16_t(sign | ((rebias + 0xfff + (rebias >> 13 & 1)) >> 13))};
    }
}

template <typename T> requires std::is_floating_point_v<T> T from_float(T x) { return x; }

struct HostBlock {
    HostBlock(int threads, size_t shared_bytes)
        : barrier(threads), shared((shared_bytes + sizeof(Line) - 1) / sizeof(Line)) {
        for (int t = 0; t < threads; t += 32) warps.emplace_back(std::min(32, threads - t));
    }
    void make_shared_nan() { std::memset(static_cast<void *>(shared.data()), 0xff, shared.size() * sizeof(Line)); }
    struct alignas(128) Line { unsigned char bytes[128]; };
    std::barrier<> barrier;
    std::deque<std::barrier<>> warps;  // a barrier cannot be moved
    std::vector<Line> shared;
};

struct HostIndex { unsigned x; };
inline thread_local HostIndex threadIdx, blockIdx;
inline thread_local HostBlock *host_block;

inline void __syncwarp() { host_block->warps[threadIdx.x / 32].arrive_and_wait(); }
inline void __syncthreads() { host_block->barrier.arrive_and_wait(); }

// An asynchronous copy happens when it is waited for: a wait left out shows.
struct HostCopy {
    void *to;
    const void *from;
    size_t bytes;
};
inline thread_local std::vector<HostCopy> host_copies;
inline void __pipeline_memcpy_async(void *to, const void *from, size_t bytes) {
    host_copies.push_back({to, from, bytes});
}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(int) {  // for all that is pending: the kernel asks for no less
    for (const HostCopy &copy : host_copies) std::memcpy(copy.to, copy.from, copy.bytes);
    host_copies.clear();
}

template <typename Tiles> Tiles &shared_memory() { return *reinterpret_cast<Tiles *>(host_block->shared.data()); }

inline size_t max_shared_memory() { return std::numeric_limits<size_t>::max(); }  // that of device.h is of a GPU

inline void let_next_kernel_begin() {}

// Run kernel(args...) for every block of the grid and return when all are done. There are no streams.
template <typename... Args>
void launch(void (*kernel)(Args...), int64_t blocks, int threads, size_t shared_bytes, void *,
            std::type_identity_t<Args>... args) {
    if (blocks == 0) return;
    if (blocks > INT32_MAX) throw std::runtime_error("minimal_attn: the grid has more than 2^31 - 1 blocks");
    HostBlock block(threads, shared_bytes);
    std::atomic<int> start = 0;  // 1: run. -1: return, since barriers would wait for a missing thread for ever
    std::vector<std::jthread> pool;
    auto run = [&](int t) {
        start.wait(0);
        if (start < 0) return;
        host_block = &block;
        threadIdx.x = t;
        for (unsigned x = 0; x < blocks; x++) {
            blockIdx.x = x;
            if (t == 0) block.make_shared_nan();
            __syncthreads();
            kernel(args...);
            __syncthreads();  // shared memory now belongs to the next block
        }
    };
    try {
        for (int t = 0; t < threads; t++) pool.emplace_back(run, t);
        start = 1;
    } catch (...) {  // no more threads to be had
        start = -1;
    }
    start.notify_all();
    if (start < 0) throw std::runtime_error("minimal_attn: could not start " + std::to_string(threads) + " threads");
}

}  // namespace host
