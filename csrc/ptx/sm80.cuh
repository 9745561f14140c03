// The folder ptx/ wraps the instructions that CUDA C++ has no name for. No other file contains asm. Order in ptx/:
// sm80.cuh, sm90.cuh. Beside them: memory.cuh and cluster.cuh, between blocks of threads; dmma.cuh.
//
// Instructions of Ampere and newer GPUs, each with the title of its section in the PTX ISA.
//
// Fragments of an m16n8k16 product ("Matrix Fragments for mma.m16n8k16 with floating point type"): lane 4·r + c of a
// warp, r < 8 and c < 4, holds
//   A [16, 16]  a[0] row r, columns 2c and 2c + 1; a[1] row r + 8; a[2], a[3] columns + 8
//   B [16, 8]   b0 column r, rows 2c and 2c + 1; b1 rows + 8
//   D [16, 8]   d[0], d[1] row r, columns 2c and 2c + 1; d[2], d[3] row r + 8
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace ptx {

__device__ inline uint32_t shared_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

// "cp.async": 16 bytes from global to shared memory, past L1, or zeros if not `inside`.
__device__ inline void cp_async(uint32_t to, const void *from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

// "%tid", read at every call, so that no register holds it across a loop.
__device__ inline uint32_t thread_idx() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// "cp.async.commit_group".
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// "cp.async.wait_group": waits for all groups but the newest kPending.
template <int kPending> __device__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// "ldmatrix": four 8×8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void ldmatrix(uint32_t (&x)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}

__device__ inline void ldmatrix_trans(uint32_t (&x)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}

__device__ inline void store_shared(uint32_t to, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

// "mma": d += A B in fp32, A and B of type T.
template <typename T> __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, __half>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// "ex2": 2^x to 22 bits.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// "lg2": within 2^-22, absolute for x in 0.5..2, else relative.
__device__ inline float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// "rcp": 1 / x to 23 bits.
__device__ inline float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// "tanh": within 2^-11, as FlashAttention-3 has it for a softcap.
__device__ inline float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Neighbouring columns of a fragment, x in the low half.
template <typename T> __device__ uint32_t pack(float x, float y) {
    std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162> pair;
    if constexpr (std::is_same_v<T, __half>) pair = __floats2half2_rn(x, y);
    else pair = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t &>(pair);
}
template <typename T> __device__ float2 unpack(uint32_t pair) {
    if constexpr (std::is_same_v<T, __half>) return __half22float2(reinterpret_cast<const __half2 &>(pair));
    else return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

}  // namespace ptx
