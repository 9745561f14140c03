// The folder sm90/ has the forward pass on Hopper. What only changed scores need is in sm90/mods/, and the backward
// pass is in sm90/bwd/. Order in sm90/: pipeline.cuh, tiles.cuh, key_blocks.cuh, producer.cuh, flash_sm90.cu. Beside
// it: flash_dmma.cu.
//
// How the warps of a Hopper block hand over what lies in shared memory: rings of buffers between a producer and its
// consumers, and named barriers among consumers.
#pragma once

#include "ptx/sm90.cuh"

namespace sm90 {

using namespace ptx;

// A ring of kStages buffers, each with two barriers. Item i of the stream lies in buffer i % kStages until item
// i + kStages takes its place:
//
//   producer ── TMA ──▶ full[stage] ──▶ consumers ── wgmma ──▶ empty[stage] ──▶ producer
template <int kStages> struct Ring {
    static_assert(!(kStages & kStages - 1), "items are counted modulo 2^32");
    Barrier full[kStages], empty[kStages];

    __device__ Barrier &full_barrier(uint32_t i) { return full[i % kStages]; }

    // By one thread, before fence_mbarrier_init(). A buffer is empty again once consumer_warps warps have released it.
    // It is full once `producers` threads have arrived.
    __device__ void init(int consumer_warps, int producers = 1) {
        for (int s = 0; s < kStages; s++) mbarrier_init(full[s], producers), mbarrier_init(empty[s], consumer_warps);
    }
    // Wait until item i has a buffer.
    __device__ void producer_acquire(uint32_t i) { mbarrier_wait(empty[i % kStages], i / kStages % 2 ^ 1); }
    // Wait until item i is there.
    __device__ void consumer_wait(uint32_t i) { mbarrier_wait(full[i % kStages], i / kStages % 2); }
    // This warp has read item i. The caller has synchronized its lanes after their last read.
    __device__ void consumer_release(uint32_t i, int lane_idx) {
        if (lane_idx == 0) mbarrier_arrive(empty[i % kStages]);
    }
    // The same to the other block of a cluster, whose rank is given.
    __device__ void consumer_release(uint32_t i, int lane_idx, int rank) {
        if (lane_idx == 0) mbarrier_arrive(empty[i % kStages], rank);
    }
    // To both blocks, where the producers of both wait for the warps of both.
    __device__ void consumer_release_to_both(uint32_t i, int lane_idx) {
        if (lane_idx < 2) mbarrier_arrive(empty[i % kStages], lane_idx);
    }
};

// Barriers by number; 0 is that of __syncthreads().
enum NamedBarrier : int {
    kAllConsumers = 1,
    kOneConsumer = 2,  // and those after it, one for each consumer warpgroup
    kStepsDone = 5,    // of all consumers, and of a warp of the producer: see flash_bwd_wide_sm90.cu
};

// Returns x, which is the same in all lanes. The shuffle shows that to the compiler, which then keeps what it computes
// from x in uniform registers, where wgmma takes its descriptors from.
__device__ inline uint32_t warp_uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

// The same for an x below kEnd, by one vote for each bit. The results of votes are in uniform registers at once.
template <int kEnd> __device__ uint32_t vote(uint32_t x) {
    uint32_t y = 0;
#pragma unroll
    for (int bit = 1; bit < kEnd; bit *= 2) y |= __any_sync(~0u, x & bit) ? bit : 0;
    return y;
}

}  // namespace sm90
