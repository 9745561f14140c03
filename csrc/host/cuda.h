// The folder host/ compiles the kernels of simt/ for the CPU, where debuggers and sanitizers see every access. Order in
// host/: cuda.h, flash_host.cpp, flash_bwd_host.cpp, append_host.cpp.
//
// Just enough of CUDA to compile flash.cu and flash_bwd.cu with a C++20 compiler and run them on the CPU, so that a
// debugger, AddressSanitizer and ThreadSanitizer work on the kernels themselves and the library works where there is no
// GPU.
//
// The threads of a block are fibers of one thread of the CPU. A fiber runs until it waits at a barrier, and then the
// next one goes on. ThreadSanitizer knows of fibers and barriers, so a barrier left out is a data race that it reports.
// Blocks run one after another. Shared memory is NaN at the start of each, so that a value read before it is written
// shows. As in CUDA, every thread of a block must reach every barrier; unlike in CUDA, none may return early.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define TSAN(...) __VA_ARGS__
#else
#define TSAN(...)
#endif

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

struct HostIndex { unsigned x; };
inline thread_local HostIndex threadIdx, blockIdx;

// An asynchronous copy happens when it is waited for: a wait left out shows.
struct HostCopy {
    void *to;
    const void *from;
    size_t bytes;
};

// A thread of a block.
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    std::vector<HostCopy> copies;
    TSAN(void *tsan;)
};

// How many fibers have arrived at a barrier, and how often all have. A fiber that leaves it late must not learn what
// others did before they arrived again. So ThreadSanitizer knows two phases by two addresses.
struct Barrier {
    unsigned arrived = 0, phase = 0;
    char of_phase[2];
};

// The threads of a block and its shared memory. ThreadSanitizer sees nothing of how fibers wait, but is told.
struct HostBlock {
    HostBlock(unsigned threads, size_t shared_bytes)
        : threads(threads), shared((shared_bytes + sizeof(Line) - 1) / sizeof(Line)) {}
    void make_shared_nan() { std::memset(static_cast<void *>(shared.data()), 0xff, shared.size() * sizeof(Line)); }

    // Returns when all threads have done `task`.
    void run(const std::function<void()> &task);
    TSAN([[gnu::no_sanitize_thread]]) void arrive_and_wait(Barrier &barrier, unsigned count) {
        const unsigned phase = barrier.phase;
        TSAN(__tsan_release(&barrier.of_phase[phase % 2]);)
        if (++barrier.arrived == count) barrier.arrived = 0, barrier.phase++;
        while (barrier.phase == phase) switch_to((threadIdx.x + 1) % threads);
        TSAN(__tsan_acquire(&barrier.of_phase[phase % 2]);)
    }
    TSAN([[gnu::no_sanitize_thread]]) void switch_to(unsigned next, [[maybe_unused]] bool is_last = false) {
        Fiber &from = fibers[threadIdx.x], &to = fibers[next];
        threadIdx.x = next;
        TSAN(__tsan_switch_to_fiber(to.tsan, is_last ? 0 : 1);)  // 1: `to` does not know what `from` has done
        swapcontext(&from.context, &to.context);
    }

    struct alignas(128) Line { unsigned char bytes[128]; };
    const unsigned threads;
    std::vector<Line> shared;
    std::vector<Fiber> fibers{threads + 1};  // the last one is the caller of run()
    Barrier all;
    std::vector<Barrier> warps{(threads + 31) / 32};
    unsigned num_done = 0;
    const std::function<void()> *work;
};

inline thread_local HostBlock *host_block;

TSAN([[gnu::no_sanitize_thread]]) inline void run_fiber() noexcept {
    HostBlock &block = *host_block;
    TSAN(__tsan_acquire(&block);)
    (*block.work)();
    // All have passed the same last barrier and end in turn, so the next one is done only if all are.
    block.switch_to(++block.num_done == block.threads ? block.threads : (threadIdx.x + 1) % block.threads, true);
    std::abort();  // nobody goes on with a fiber that is done
}

inline void HostBlock::run(const std::function<void()> &task) {
    constexpr size_t kStackBytes = 256 << 10;
    work = &task, host_block = this, threadIdx.x = threads;
    TSAN(fibers[threads].tsan = __tsan_get_current_fiber();)
    for (unsigned t = 0; t < threads; t++) {
        Fiber &fiber = fibers[t];
        fiber.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = kStackBytes;
        makecontext(&fiber.context, run_fiber, 0);
        fiber.context.uc_stack = {};  // at each switch, AddressSanitizer would forget what it knows of the stack
        TSAN(fiber.tsan = __tsan_create_fiber(0);)
    }
    TSAN(__tsan_release(this);)
    switch_to(0);
    TSAN(for (unsigned t = 0; t < threads; t++) __tsan_destroy_fiber(fibers[t].tsan);)
}

inline void __syncthreads() { host_block->arrive_and_wait(host_block->all, host_block->threads); }
inline void __syncwarp() {
    const unsigned warp = threadIdx.x / 32;
    host_block->arrive_and_wait(host_block->warps[warp], std::min(32u, host_block->threads - 32 * warp));
}

inline void __pipeline_memcpy_async(void *to, const void *from, size_t bytes) {
    host_block->fibers[threadIdx.x].copies.push_back({to, from, bytes});
}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(int) {  // for all that is pending: the kernel asks for no less
    auto &copies = host_block->fibers[threadIdx.x].copies;
    for (const HostCopy &copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
    copies.clear();
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
    HostBlock(threads, shared_bytes).run([&] {
        for (unsigned x = 0; x < blocks; x++) {
            if (threadIdx.x == 0) blockIdx.x = x, host_block->make_shared_nan();
            __syncthreads();
            kernel(args...);
            __syncthreads();  // shared memory now belongs to the next block
        }
    });
}

#undef TSAN

}  // namespace host
