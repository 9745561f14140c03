// Instructions between the blocks of threads of a cluster on Hopper, with their sections of the PTX ISA.
#pragma once

#include "ptx/sm90.cuh"

namespace ptx {

// "mapa": the address of an object of this block in the block `rank` of the cluster.
__device__ inline uint32_t address_in_block(const void *p, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
    return address;
}
// Without .release.cluster, a fence of the whole GPU: it can tell the other block of this one's reads, not its writes.
__device__ inline void mbarrier_arrive(Barrier &barrier, int rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(&barrier, rank)) : "memory");
}
// "cp.async.bulk": copies bytes of shared memory to `to` in the other block, whose barrier counts them.
__device__ inline void copy_to_block(void *to, const void *from, int bytes, Barrier &barrier, int rank) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address_in_block(to, rank)), "r"(shared_address(from)), "r"(bytes),
                 "r"(address_in_block(&barrier, rank)) : "memory");
}
// tma_load() to the same place in both blocks of a cluster of two, each of which counts the bytes.
__device__ inline void tma_load_both(void *to, const CUtensorMap &map, Barrier &barrier, int c0, int c1, int c2,
                                     int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
        ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
        "h"(uint16_t(3))
        : "memory");
}
// "ld" from the shared memory of a block of the cluster.
__device__ inline int load_from_block(const int &from, int rank) {
    int x;
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(x) : "r"(address_in_block(&from, rank)) : "memory");
    return x;
}
// "st.async" to the shared memory of a block of the cluster, whose barrier counts the bytes.
__device__ inline void store_to_block(float4 &to, const float4 &x, Barrier &barrier, int rank) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(address_in_block(&to, rank)), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w),
                 "r"(address_in_block(&barrier, rank)) : "memory");
}
__device__ inline void store_to_block(float2 &to, const float2 &x, Barrier &barrier, int rank) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 ::"r"(address_in_block(&to, rank)), "f"(x.x), "f"(x.y), "r"(address_in_block(&barrier, rank))
                 : "memory");
}
// "barrier.cluster": all threads of the cluster wait for one another. Without .relaxed each block sees what the others
// wrote, which takes a fence of the whole GPU.
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
__device__ inline void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
__device__ inline void cluster_sync_relaxed() { cluster_arrive_relaxed(), cluster_wait(); }

}  // namespace ptx
