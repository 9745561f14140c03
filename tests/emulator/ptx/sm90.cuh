// ptx/sm90.cuh of csrc for the emulator: Hopper's instructions by the same names, as the PTX ISA describes them and not
// as a kernel uses them. What the ISA leaves undefined is an error, or makes NaN.
//
// Read next: instructions.cpp and products.cpp, what they do.
#pragma once

#include <optional>

#include "cuda.h"
#include "common/launch.h"
#include "ptx/sm80.cuh"

namespace emulator {

// wgmma.mma_async. A is `a`, a descriptor, or in registers. The descriptors are of A or Aᵀ, and of B or Bᵀ, in each case
// of the one whose columns are contiguous.
struct Product {
    float (*d)[4];
    int tiles;
    uint64_t a, b;
    const uint32_t *a_registers;
    bool is_half, accumulate, is_a_transposed, is_b_transposed;
    std::optional<size_t> a_hash = {};  // of all of A, as the first warp has read it from shared memory
};
void issue(Product product);

struct Registers {
    const void *begin, *end;
};
void wait_group(int pending, const Registers *named, int count);

void set_registers(const char *what, int per_thread);

}  // namespace emulator

namespace ptx {

using Barrier = uint64_t;

void mbarrier_init(Barrier &barrier, int count);
void mbarrier_arrive(Barrier &barrier);
void mbarrier_arrive_expect_tx(Barrier &barrier, int bytes);
void mbarrier_wait(Barrier &barrier, uint32_t parity);
void fence_mbarrier_init();
void fence_proxy_async();

inline void barrier_sync(int id, int threads) { emulator::sync("barrier.sync", id, threads); }

// The last lane, so that no kernel takes it for the first one.
inline bool elect_one() {
    bool is_elected;
    emulator::meet("elect.sync", &is_elected, [](void *(&lanes)[32]) {
        for (void *lane : lanes) *static_cast<bool *>(lane) = lane == lanes[31];
    });
    return is_elected;
}

inline void prefetch(const CUtensorMap &) {}
void tma_load(void *to, const CUtensorMap &map, Barrier &barrier, int c0, int c1, int c2, int c3);
void tma_store(const void *from, const CUtensorMap &map, int c0, int c1, int c2, int c3);
void tma_store_wait_read();

void stmatrix(const uint32_t (&x)[4], uint32_t row);
void stmatrix_trans(const uint32_t (&x)[4], uint32_t row);
template <typename X, int kTiles> void warpgroup_fence_operand(X (&)[kTiles][4]) {}

template <int kRegisters> void warpgroup_reg_alloc() { emulator::set_registers("setmaxnreg.inc", kRegisters); }
template <int kRegisters> void warpgroup_reg_dealloc() { emulator::set_registers("setmaxnreg.dec", kRegisters); }

void warpgroup_arrive();
void warpgroup_commit_batch();
template <int kPending, typename... Fragments> void warpgroup_wait(Fragments &...fragments) {
    const emulator::Registers named[] = {{&fragments, &fragments + 1}..., {}};
    emulator::wait_group(kPending, named, sizeof...(fragments));
}

template <typename T, int kTiles> void wgmma(float (&d)[kTiles][4], uint64_t a, uint64_t b, bool accumulate) {
    emulator::issue({d, kTiles, a, b, nullptr, std::is_same_v<T, __half>, accumulate, false, true});
}
template <typename T, int kTiles> void wgmma_ab(float (&d)[kTiles][4], uint64_t a, uint64_t b, bool accumulate) {
    emulator::issue({d, kTiles, a, b, nullptr, std::is_same_v<T, __half>, accumulate, false, false});
}
template <typename T, int kTiles> void wgmma_atbt(float (&d)[kTiles][4], uint64_t a, uint64_t b, bool accumulate) {
    emulator::issue({d, kTiles, a, b, nullptr, std::is_same_v<T, __half>, accumulate, true, true});
}
template <typename T, int kTiles> void wgmma(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b) {
    emulator::issue({d, kTiles, 0, b, a, std::is_same_v<T, __half>, true, false, false});
}

#include "make_smem_desc.cuh"  // that function of csrc's ptx/sm90.cuh, which has no asm, as it is there

}  // namespace ptx
