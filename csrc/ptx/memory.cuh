// Instructions by which blocks of threads share global memory, with their sections of the PTX ISA.
#pragma once

namespace ptx {

// "atom", .acq_rel: returns the old value. A thread that reads a sum sees what the threads that added to it wrote
// before, and what threads wrote that met them at a barrier.
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
