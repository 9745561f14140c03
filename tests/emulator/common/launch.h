// launch.h of csrc for the emulator: the CUDA C++ that a kernel speaks, and a launch that runs its blocks on the CPU. A
// kernel runs as it is written; what it may do that no GPU allows is an error.
//
// Read next: ptx/sm80.cuh and ptx/sm90.cuh, the instructions; then what is behind them, scheduler.h, block.h,
// instructions.cpp and products.cpp.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "common/device.h"
#include "cuda_runtime.h"
#include "host/bits.h"

#define __global__
#define __host__
#define __device__
#define __launch_bounds__(...)
#define __grid_constant__
#define __noinline__

namespace emulator {

// When copies and products happen: at once, as late as can be, or at any time.
enum class Mode { kEarly, kLate, kRandom };
struct Schedule {
    Mode mode;
    unsigned seed;
};
inline Schedule schedule{Mode::kEarly, 0};

// What device.h answers. As many blocks run at a time as there are multiprocessors.
struct Gpu {
    int capability = 90, num_sms = 1;
    size_t max_shared_memory = 227 << 10;
};
inline Gpu gpu;

// A fault: the statement of a kernel that is left out, by its number. faults.py writes the questions into the kernels.
inline int left_out = -1;
inline bool is_left_out(int statement) { return statement == left_out; }

[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char *format, ...);

// The 32 lanes of a warp meet, each with something of its own; the last one does act(what they have brought) for all.
void meet(const char *what, void *mine, void (*act)(void *(&lanes)[32]));
void sync(const char *what, int id, int threads);  // at a barrier, by its number

// cp.async, and its groups.
void copy_async(uint32_t to, const void *from, uint32_t bytes, bool is_inside);
void commit_copies();
void wait_for_copies(uint32_t pending);

void *shared_memory();
uint32_t address_in_shared_memory(const void *p);
void stored_16_bytes(const void *to);

// Kernels in the order of a stream. The host waits for all of them.
void enqueue(int64_t blocks, int threads, int cluster, size_t shared_bytes, bool may_begin_early,
             std::function<void()> kernel);
void wait_for_kernels();

struct Index { unsigned x; };

}  // namespace emulator

inline emulator::Index threadIdx, blockIdx, blockDim, gridDim;

using std::exp2, std::fabs, std::fma, std::fmax, std::fmin, std::log, std::max, std::min;

struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };

struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
    uint4 &operator=(const uint4 &other) {
        if (uintptr_t(this) % 16) emulator::fail("16 bytes are stored at no multiple of 16");
        std::memcpy(static_cast<void *>(this), &other, 16);
        emulator::stored_16_bytes(this);
        return *this;
    }
};

// __shfl_sync of a whole warp: mask must be all ones.
template <typename T> T __shfl_sync(unsigned mask, T x, int lane) {
    struct Trade { T x, result; int from; };
    if (mask != ~0u || lane < 0 || lane >= 32) emulator::fail("__shfl_sync with mask %#x from lane %d", mask, lane);
    Trade mine{x, x, lane};
    emulator::meet("a shuffle", &mine, [](void *(&lanes)[32]) {
        auto trade = [&](int i) { return static_cast<Trade *>(lanes[i]); };
        for (int i = 0; i < 32; i++) trade(i)->result = trade(trade(i)->from)->x;
    });
    return mine.result;
}
template <typename T> T __shfl_xor_sync(unsigned mask, T x, int lanes) {
    return __shfl_sync(mask, x, int(threadIdx.x % 32) ^ lanes);
}
template <typename T> T __shfl_up_sync(unsigned mask, T x, int lanes) {
    const int lane_idx = threadIdx.x % 32;
    return __shfl_sync(mask, x, lane_idx < lanes ? lane_idx : lane_idx - lanes);
}
inline int __reduce_add_sync(unsigned mask, int x) {
    for (int lanes = 1; lanes < 32; lanes *= 2) x += __shfl_xor_sync(mask, x, lanes);
    return x;
}
inline int __reduce_max_sync(unsigned mask, int x) {
    for (int lanes = 1; lanes < 32; lanes *= 2) x = max(x, __shfl_xor_sync(mask, x, lanes));
    return x;
}
inline int __any_sync(unsigned mask, int x) {
    if (mask != ~0u) emulator::fail("__any_sync with mask %#x", mask);
    emulator::meet("__any_sync", &x, [](void *(&lanes)[32]) {
        int any = 0;
        for (void *x : lanes) any |= *static_cast<int *>(x) != 0;
        for (void *x : lanes) *static_cast<int *>(x) = any;
    });
    return x;
}
inline unsigned __ballot_sync(unsigned mask, bool x) {
    struct Vote { bool x; unsigned all = 0; } mine{x};
    if (mask != ~0u) emulator::fail("__ballot_sync with mask %#x", mask);
    emulator::meet("__ballot_sync", &mine, [](void *(&lanes)[32]) {
        unsigned all = 0;
        for (int i = 0; i < 32; i++) all |= unsigned(static_cast<Vote *>(lanes[i])->x) << i;
        for (void *lane : lanes) static_cast<Vote *>(lane)->all = all;
    });
    return mine.all;
}
template <typename T> T atomicAdd(T *to, T x) { return std::exchange(*to, *to + x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned(uint64_t(x) * y >> 32); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline void __trap() { emulator::fail("__trap"); }
inline void __syncwarp() {
    emulator::meet("__syncwarp", nullptr, [](void *(&)[32]) {});
}
inline void __syncthreads() { emulator::sync("__syncthreads", 0, blockDim.x); }

inline void __pipeline_memcpy_async(void *to, const void *from, size_t bytes) {
    emulator::copy_async(emulator::address_in_shared_memory(to), from, uint32_t(bytes), true);
}
inline void __pipeline_commit() { emulator::commit_copies(); }
inline void __pipeline_wait_prior(int pending) { emulator::wait_for_copies(pending); }

namespace device {
inline void make_context() {}

float to_float(__half x);
float to_float(__nv_bfloat16 x);
inline float to_float(float x) { return x; }
template <typename T> T from_float(float x);  // rounds to nearest even

template <typename Tiles> Tiles &shared_memory() { return *static_cast<Tiles *>(emulator::shared_memory()); }

// There is one stream.
template <typename... Args>
void launch(void (*kernel)(Args...), int64_t blocks, int threads, size_t shared_bytes, void *,
            std::type_identity_t<Args>... args) {
    emulator::enqueue(blocks, threads, 1, shared_bytes, false, [=] { kernel(args...); });
}
template <typename... Args>
void launch_clusters(int cluster, void (*kernel)(Args...), int64_t blocks, int threads, size_t shared_bytes, void *,
                     std::type_identity_t<Args>... args) {
    emulator::enqueue(blocks, threads, cluster, shared_bytes, true, [=] { kernel(args...); });
}
template <typename... Args>
void launch_early(void (*kernel)(Args...), int64_t blocks, int threads, size_t shared_bytes, void *stream,
                  std::type_identity_t<Args>... args) {
    launch_clusters<Args...>(1, kernel, blocks, threads, shared_bytes, stream, args...);
}
void wait_for_previous_kernel();
void let_next_kernel_begin();
template <typename... Params> void prefetch_parameters(const Params &...) {}

}  // namespace device
