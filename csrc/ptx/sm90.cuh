// Hopper's instructions, with their sections of the PTX ISA. wgmma and setmaxnreg need sm_90a.
#pragma once

#include <cuda.h>  // CUtensorMap

#include "ptx/sm80.cuh"

namespace ptx {

// "mbarrier". A phase ends when `count` threads have arrived and all announced bytes are copied. Phases are told apart
// by parity. A new barrier is in phase 0: waiting for parity 1 returns at once.
using Barrier = uint64_t;

__device__ inline void mbarrier_init(Barrier &barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count) : "memory");
}
__device__ inline void mbarrier_arrive(Barrier &barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
__device__ inline void mbarrier_arrive_expect_tx(Barrier &barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}
__device__ inline void mbarrier_wait(Barrier &barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(&barrier)), "r"(parity) : "memory");
}

// "fence.mbarrier_init": TMA of this block and its cluster sees what mbarrier_init did.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// "membar / fence: fence.proxy.async": TMA and wgmma see what this thread wrote to shared memory.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// "barrier" of whole warps. Not .aligned: compute-sanitizer takes one that is inlined at two places for two.
__device__ inline void barrier_sync(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// "elect.sync": true in one lane, and the compiler knows it.
__device__ inline bool elect_one() {
    uint32_t is_elected;
    asm volatile("{\n.reg .pred elected;\nelect.sync _|elected, -1;\nselp.u32 %0, 1, 0, elected;\n}"
                 : "=r"(is_elected));
    return is_elected;
}

// "prefetch.tensormap".
__device__ inline void prefetch(const CUtensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// "cp.async.bulk.tensor": copies the box at these coordinates, innermost first, with 0 outside. `barrier` counts all.
__device__ inline void tma_load(void *to, const CUtensorMap &map, Barrier &barrier, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];"
        ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// The way back leaves out what lies outside. wait_group.read waits until this thread's copies have read their source.
__device__ inline void tma_store(const void *from, const CUtensorMap &map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
__device__ inline void tma_store_wait_read() {
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

// "stmatrix": the reverse of ldmatrix.
__device__ inline void stmatrix(const uint32_t (&x)[4], uint32_t row) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3]) : "memory");
}

__device__ inline void stmatrix_trans(const uint32_t (&x)[4], uint32_t row) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// "setmaxnreg": the registers of a thread of this warpgroup from here on.
template <int kRegisters> __device__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// "wgmma". wgmma.fence comes before a product whose registers were written since the last one. commit_group makes a
// group of the products since the last group. wait_group waits for all but the newest kPending groups. Naming their
// registers, `fragments`, keeps the compiler from using them earlier.
__device__ inline void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void warpgroup_commit_batch() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kTiles> __device__ void warpgroup_fence_operand(float (&x)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; i++) asm volatile("" : "+f"(x[i / 4][i % 4])::"memory");
}
template <int kTiles> __device__ void warpgroup_fence_operand(uint32_t (&x)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; i++) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}
template <int kPending, typename... Fragments> __device__ void warpgroup_wait(Fragments &...fragments) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
    (warpgroup_fence_operand(fragments), ...);
}

// "Matrix Descriptor" of 16-bit elements, in panels whose rows have kRowBytes, 128 or 64, swizzled as by TMA. The next
// panel lies `panel_bytes` further, needed only for sums along rows. A part n bytes further has descriptor + n / 16.
template <int kRowBytes> __device__ uint64_t make_smem_desc(const void *p, int panel_bytes = 0) {
    constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
    return kSwizzle << 62 | uint64_t(8 * kRowBytes / 16) << 32 | uint64_t(panel_bytes / 16) << 16 |
           (shared_address(p) & 0x3ffff) / 16;
}

// Operands of wgmma: 8 registers for 16 columns.
#define MINIMAL_ATTN_D(i)                                                                                          \
    "+f"(d[2 * i][0]), "+f"(d[2 * i][1]), "+f"(d[2 * i][2]), "+f"(d[2 * i][3]), "+f"(d[2 * i + 1][0]),             \
        "+f"(d[2 * i + 1][1]), "+f"(d[2 * i + 1][2]), "+f"(d[2 * i + 1][3])
#define MINIMAL_ATTN_D_48 MINIMAL_ATTN_D(0), MINIMAL_ATTN_D(1), MINIMAL_ATTN_D(2)
#define MINIMAL_ATTN_D_64 MINIMAL_ATTN_D_48, MINIMAL_ATTN_D(3)
#define MINIMAL_ATTN_D_80 MINIMAL_ATTN_D_64, MINIMAL_ATTN_D(4)
#define MINIMAL_ATTN_D_96 MINIMAL_ATTN_D_80, MINIMAL_ATTN_D(5)
#define MINIMAL_ATTN_D_128 MINIMAL_ATTN_D_96, MINIMAL_ATTN_D(6), MINIMAL_ATTN_D(7)
#define MINIMAL_ATTN_D_192 \
    MINIMAL_ATTN_D_128, MINIMAL_ATTN_D(8), MINIMAL_ATTN_D(9), MINIMAL_ATTN_D(10), MINIMAL_ATTN_D(11)
#define MINIMAL_ATTN_D_256 \
    MINIMAL_ATTN_D_192, MINIMAL_ATTN_D(12), MINIMAL_ATTN_D(13), MINIMAL_ATTN_D(14), MINIMAL_ATTN_D(15)
#define MINIMAL_ATTN_REGS_48 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define MINIMAL_ATTN_REGS_64 MINIMAL_ATTN_REGS_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MINIMAL_ATTN_REGS_80 MINIMAL_ATTN_REGS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MINIMAL_ATTN_REGS_96 MINIMAL_ATTN_REGS_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MINIMAL_ATTN_REGS_128 \
    MINIMAL_ATTN_REGS_96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MINIMAL_ATTN_REGS_192 \
    MINIMAL_ATTN_REGS_128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MINIMAL_ATTN_REGS_256 \
    MINIMAL_ATTN_REGS_192 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110" \
    ", %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// The shapes m64nNk16 in use, with the numbers of five more operands.
#define MINIMAL_ATTN_SHAPES(SHAPE)      \
    SHAPE(48, 24, 25, 26, 27, 28) \
    SHAPE(64, 32, 33, 34, 35, 36) \
    SHAPE(80, 40, 41, 42, 43, 44) \
    SHAPE(96, 48, 49, 50, 51, 52) \
    SHAPE(128, 64, 65, 66, 67, 68) \
    SHAPE(192, 96, 97, 98, 99, 100) \
    SHAPE(256, 128, 129, 130, 131, 132)

#define MINIMAL_ATTN_IS_SHAPE(N, ...) || kTiles == N / 8
template <int kTiles> constexpr bool is_wgmma_shape = false MINIMAL_ATTN_SHAPES(MINIMAL_ATTN_IS_SHAPE);
#undef MINIMAL_ATTN_IS_SHAPE

#define MINIMAL_ATTN_SHAPE(N, X0, X1, X2, X3, X4)                                                                    \
    if constexpr (kTiles == N / 8) {                                                                                 \
        if constexpr (std::is_same_v<T, __half>) MINIMAL_ATTN_WGMMA(N, X0, X1, X2, X3, X4, "f16");                   \
        else MINIMAL_ATTN_WGMMA(N, X0, X1, X2, X3, X4, "bf16");                                                      \
    }

// "wgmma.mma_async", d [64, 8·kTiles] of fp32 (+)= A B with A [64, 16] and B [16, 8·kTiles] of type T. A warp holds 16
// rows of d, and of an A in registers, as in m16n8k16 of ptx/sm80.cuh. In shared memory the dimension of the sum is
// contiguous, or the other one of A if kTransposeA, and of B if kTransposeB.
template <typename T, int kTransposeA, int kTransposeB, int kTiles>
__device__ void wgmma_from_shared(float (&d)[kTiles][4], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(is_wgmma_shape<kTiles>);
#define MINIMAL_ATTN_WGMMA(N, X0, X1, X2, X3, X4, T)                                                                 \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #X2 ", 0;\n"                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." T "." T " {" MINIMAL_ATTN_REGS_##N "}, "          \
                 "%" #X0 ", %" #X1 ", accumulate, 1, 1, %" #X3 ", %" #X4 ";\n}"                                      \
                 : MINIMAL_ATTN_D_##N                                                                                \
                 : "l"(a), "l"(b), "r"(int(accumulate)), "n"(kTransposeA), "n"(kTransposeB))
    MINIMAL_ATTN_SHAPES(MINIMAL_ATTN_SHAPE)
#undef MINIMAL_ATTN_WGMMA
}
template <typename T, int kTiles>
__device__ void wgmma(float (&d)[kTiles][4], uint64_t a, uint64_t b, bool accumulate) {
    wgmma_from_shared<T, 0, 0>(d, a, b, accumulate);
}
template <typename T, int kTiles>
__device__ void wgmma_ab(float (&d)[kTiles][4], uint64_t a, uint64_t b, bool accumulate) {
    wgmma_from_shared<T, 0, 1>(d, a, b, accumulate);
}
template <typename T, int kTiles>
__device__ void wgmma_atbt(float (&d)[kTiles][4], uint64_t a, uint64_t b, bool accumulate) {
    wgmma_from_shared<T, 1, 0>(d, a, b, accumulate);
}

// A in registers; B as in wgmma_ab.
template <typename T, int kTiles>
__device__ void wgmma(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b) {
    static_assert(is_wgmma_shape<kTiles>);
#define MINIMAL_ATTN_WGMMA(N, X0, X1, X2, X3, X4, T)                                                                 \
    asm volatile("{\n.reg .pred accumulate;\nsetp.eq.b32 accumulate, 0, 0;\n"                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." T "." T " {" MINIMAL_ATTN_REGS_##N "}, "          \
                 "{%" #X0 ", %" #X1 ", %" #X2 ", %" #X3 "}, %" #X4 ", accumulate, 1, 1, 1;\n}"                       \
                 : MINIMAL_ATTN_D_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
    MINIMAL_ATTN_SHAPES(MINIMAL_ATTN_SHAPE)
#undef MINIMAL_ATTN_WGMMA
}

}  // namespace ptx
