// The folder sm90/ has the forward pass on Hopper; sm90/mods/ has it with dropout, changed scores, block masks, chunks
// or max_logits, sm90/bwd/ the backward pass. Order: pipeline.cuh, tiles.cuh, producer.cuh, plain_scores.cuh,
// flash_sm90.cuh, flash_sm90.cu. Beside it: flash_dmma.cu.
//
// How warps hand over buffers in shared memory: rings between a producer and its consumers, and named barriers.
#pragma once

#include "ptx/sm90.cuh"

namespace sm90 {

using namespace ptx;

// A ring of kStages buffers, each with two barriers. Item i lies in buffer i % kStages until item i + kStages does:
//
//   producer ── TMA ──▶ full[stage] ──▶ consumers ── wgmma ──▶ empty[stage] ──▶ producer
template <int kStages> struct Ring {
    static_assert(!(kStages & kStages - 1), "items are counted modulo 2^32");
    Barrier full[kStages], empty[kStages];

    __device__ Barrier &full_barrier(uint32_t i) { return full[i % kStages]; }

    // By one thread, before fence_mbarrier_init(). `producers` threads fill a buffer, consumer_warps warps release it.
    __device__ void init(int consumer_warps, int producers = 1) {
        for (int s = 0; s < kStages; s++) mbarrier_init(full[s], producers), mbarrier_init(empty[s], consumer_warps);
    }
    __device__ void producer_acquire(uint32_t i) { mbarrier_wait(empty[i % kStages], i / kStages % 2 ^ 1); }
    __device__ void consumer_wait(uint32_t i) { mbarrier_wait(full[i % kStages], i / kStages % 2); }
    // By a warp whose lanes have been synchronized after their last read.
    __device__ void consumer_release(uint32_t i, int lane_idx) {
        if (lane_idx == 0) mbarrier_arrive(empty[i % kStages]);
    }
};

// Barriers by number; 0 is __syncthreads().
enum NamedBarrier : int {
    kAllConsumers = 1,
    kOneConsumer = 2,  // and the next ones, one for each consumer warpgroup
    kRowBlocksDone = 5,  // see flash_bwd_wide_sm90.cu
};

// Returns x, the same in all lanes. So the compiler uses uniform registers, where wgmma takes its descriptors from.
__device__ inline uint32_t warp_uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

}  // namespace sm90
