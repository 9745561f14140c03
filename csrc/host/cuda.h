// The folder host/ compiles the kernels of simt/ for the CPU, where debuggers and sanitizers see every access. Order in
// host/: fiber.h, cuda.h, flash_host.cpp, flash_bwd_host.cpp.
//
// Just enough of CUDA for a C++20 compiler. Blocks run one after another. Threads are fibers that run to the next
// barrier; none may return early. ThreadSanitizer reports a missing barrier, and early reads of shared memory get NaN.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "host/bits.h"
#include "host/fiber.h"

#define __global__
#define __host__
#define __device__
#define __launch_bounds__(...)

using std::exp2, std::fabs, std::fma, std::fmax, std::fmin, std::log, std::max, std::min;

namespace host {

struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };

inline float to_float(float x) { return x; }
inline double to_float(double x) { return x; }
inline float to_float(__nv_bfloat16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
inline float to_float(__half x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
    if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | magnitude << 13);  // inf, NaN
    const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;  // exponent bias 15 to 127
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
}

// Rounds to nearest even, as the GPU does.
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
        if (magnitude < 0x1p-14f)  // subnormal: the addition rounds to multiples of 2^-24
            return {uint16_t(sign | (std::bit_cast<uint32_t>(magnitude + 0.5f) - std::bit_cast<uint32_t>(0.5f)))};
        const uint32_t rebias = (bits & 0x7fffffff) - (112u << 23);
        return {uint16_t(sign | ((rebias + 0xfff + (rebias >> 13 & 1)) >> 13))};
    }
}

template <typename T> requires std::is_floating_point_v<T> T from_float(T x) { return x; }

struct HostIndex { unsigned x; };
inline thread_local HostIndex threadIdx, blockIdx, gridDim;

// A copy happens when it is waited for, so that a missing wait shows.
struct HostCopy { void *to; const void *from; size_t bytes; };
struct Thread : Fiber { std::vector<HostCopy> copies; };

// ThreadSanitizer gets two addresses in turn: who leaves late must not learn what others did before they came again.
struct Barrier {
    unsigned arrived = 0, phase = 0;  // phase: how often all have arrived
    char of_phase[2];
};

struct HostBlock {
    HostBlock(unsigned threads, size_t shared_bytes)
        : num_threads(threads), shared((shared_bytes + sizeof(Line) - 1) / sizeof(Line)) {}
    void make_shared_nan() { std::memset(static_cast<void *>(shared.data()), 0xff, shared.size() * sizeof(Line)); }

    void run(const std::function<void()> &task);
    [[gnu::no_sanitize_thread]] void arrive_and_wait(Barrier &barrier, unsigned count) {
        const unsigned phase = barrier.phase;
        TSAN(__tsan_release(&barrier.of_phase[phase % 2]);)
        if (++barrier.arrived == count) barrier.arrived = 0, barrier.phase++;
        while (barrier.phase == phase) switch_to((threadIdx.x + 1) % num_threads);
        TSAN(__tsan_acquire(&barrier.of_phase[phase % 2]);)
    }
    [[gnu::no_sanitize_thread]] void switch_to(unsigned next, bool synchronizes = false) {
        Fiber &from = threads[threadIdx.x];
        threadIdx.x = next;
        from.switch_to(threads[next], synchronizes);
    }

    struct alignas(128) Line { unsigned char bytes[128]; };
    const unsigned num_threads;
    std::vector<Line> shared;
    std::vector<Thread> threads{num_threads + 1};  // the last one is the caller of run()
    Barrier all;
    std::vector<Barrier> warps{(num_threads + 31) / 32};
    unsigned num_done = 0;
    const std::function<void()> *work;
};

inline thread_local HostBlock *host_block;

[[gnu::no_sanitize_thread]] inline void run_thread() noexcept {
    HostBlock &block = *host_block;
    (*block.work)();
    // After a last barrier threads end in turn, so the next one is done only if all are.
    const bool all_done = ++block.num_done == block.num_threads;
    block.switch_to(all_done ? block.num_threads : (threadIdx.x + 1) % block.num_threads, true);
    std::abort();  // no turn comes after it
}

inline void HostBlock::run(const std::function<void()> &task) {
    work = &task, host_block = this, threadIdx.x = num_threads;
    for (unsigned t = 0; t < num_threads; t++) threads[t].begin(run_thread);
    switch_to(0);
}

inline void __syncthreads() { host_block->arrive_and_wait(host_block->all, host_block->num_threads); }
inline void __syncwarp() {
    const unsigned warp = threadIdx.x / 32;
    host_block->arrive_and_wait(host_block->warps[warp], std::min(32u, host_block->num_threads - 32 * warp));
}

inline void __pipeline_memcpy_async(void *to, const void *from, size_t bytes) {
    host_block->threads[threadIdx.x].copies.push_back({to, from, bytes});
}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(int) {  // kernels wait for all copies
    auto &copies = host_block->threads[threadIdx.x].copies;
    for (const HostCopy &copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
    copies.clear();
}

template <typename Tiles> Tiles &shared_memory() { return *reinterpret_cast<Tiles *>(host_block->shared.data()); }

inline size_t max_shared_memory() { return SIZE_MAX; }

inline void let_next_kernel_begin() {}

template <typename... Args>
void launch(void (*kernel)(Args...), int64_t blocks, int threads, size_t shared_bytes, void *,
            std::type_identity_t<Args>... args) {
    if (blocks == 0) return;
    if (blocks > INT32_MAX) throw std::runtime_error("minimal_attn: the grid has more than 2^31 - 1 blocks");
    HostBlock(threads, shared_bytes).run([&] {
        for (unsigned x = 0; x < blocks; x++) {
            if (threadIdx.x == 0) blockIdx.x = x, gridDim.x = blocks, host_block->make_shared_nan();
            __syncthreads();
            kernel(args...);
            __syncthreads();  // shared memory now belongs to the next block
        }
    });
}

#undef TSAN

}  // namespace host
