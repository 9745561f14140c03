// Instructions on global memory that the forward passes do without, with their sections of the PTX ISA: copies with a
// policy or of 4 bytes, and what blocks of threads tell one another by.
#pragma once

#include "ptx/sm80.cuh"

namespace ptx {

// "createpolicy": data that is read once leaves L2 first. Made at every call: no register holds it across a loop.
__device__ inline uint64_t evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ inline void cp_async(uint32_t to, const void *from, bool inside, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(inside ? 16 : 0), "l"(policy) : "memory");
}

// cp.async of 4 bytes, through L1.
__device__ inline void cp_async_4(void *to, const void *from, bool inside) {
    const int bytes = inside ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}

// "atom", .acq_rel: returns the old value, and shows what those who added, and who met them at a barrier, wrote before.
__device__ inline int atomic_add_acq_rel(int *to, int x) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(x) : "memory");
    return before;
}

// "red": adds four floats, at once from sm_90 on.
__device__ inline void red_add(float *to, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3]) : "memory");
#else
    for (int e = 0; e < 4; e++)
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + e), "f"(x[e]) : "memory");
#endif
}

// "st": stores four floats.
__device__ inline void store(float *to, const float (&x)[4]) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}

// "nanosleep": 0 to 400 nanoseconds.
__device__ inline void sleep_briefly() { asm volatile("nanosleep.u32 200;"); }

// "ld" and "st", .acquire and .release: one block tells another that it has written.
__device__ inline int load_acquire(const int *from) {
    int x;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ inline void store_release(int *to, int x) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

}  // namespace ptx
