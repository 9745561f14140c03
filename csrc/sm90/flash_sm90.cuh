// FlashAttention forward on Hopper's tensor cores, fp16 and bf16 with fp32 sums: H100, H200 (sm_90a).
//
// For kBlockM query rows a block of threads walks along K and V from the last keys that they see to the first, kBlockN
// at a time (Dao, FlashAttention-2, 2023, Algorithm 1). One warpgroup, the producer, asks TMA for K and V. The others,
// the consumers, multiply 64 rows each (Shah et al., FlashAttention-3, 2024, section 3):
//
//   tensor cores   O += P(j+1) V(j+1)  ·················  S(j-1) = Q K(j-1)ᵀ, then O += P(j) V(j)  ·········
//   other units    S(j) → P(j) by softmax │ wait, rescale O │                 wait for S(j-1) │ S(j-1) → P(j-1)
//
// P goes from the accumulators of one product straight into the A operand of the next. While wgmma reads A from
// registers, other warps issue only every fourth cycle (counters on an H200, see the journal): instruction issue bounds
// the kernel. So the softmax mostly does without a maximum, see plain_scores.cuh.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "sm90/plain_scores.cuh"
#include "sm90/producer.cuh"

namespace sm90 {

using namespace device;

// A consumer warpgroup: 64 rows of out and lse of each tile.
template <typename T, typename Shape> struct Consumer : Shape::template ScorePolicy<T> {
    using WorkItem = Shape::WorkItem;
    using Base = Shape::template ScorePolicy<T>;
    using Base::kHeadDim, Base::kBlockN, Base::kStages, Base::kNTiles, Base::kDTiles;
    using Base::p, Base::shared, Base::consumer, Base::warp_idx, Base::lane_idx, Base::q_item, Base::kv_item;
    using Base::softmax, Base::acc_s, Base::acc_o, Base::P, Base::q_index;

    __device__ void run() {
        for (;; q_item++) {
            shared.q.consumer_wait(q_item, consumer);
            const WorkItem &work = shared.work(q_item);
            if (!work.tile.is_valid) return;
            this->begin_tile(work);
            for (auto &x : acc_o[0]) x[0] = x[1] = x[2] = x[3] = 0.f;
            attend(work);
            store(work);
            shared.q.consumer_release(q_item, consumer, lane_idx);
        }
    }

    // Adds P V of all blocks to acc_o: run by run, if hidden blocks lie between.
    __device__ void attend(const WorkItem &work) {
        const int row0 = work.tile.block * Shape::kBlockM + 64 * consumer, n_block_min = work.n_block_min;
        const BlockRange blocks = work.blocks[consumer];
        const uint32_t num_full =
            warp_uniform(this->has_full_blocks() ? max(0, blocks.full_end - blocks.full_begin) : 0);

        int n_block = work.first_block();
        skip_blocks(work, n_block, max(blocks.end, n_block_min));  // 64 rows without keys have no blocks
        if (!__any_sync(~0u, this->sees(blocks))) return;  // shows the compiler that a warp agrees
        const int warp_row = row0 + 16 * warp_idx, row = warp_row + lane_idx / 4;
        do {
            auto walk = this->begin_walk(work, blocks, num_full, n_block);
            this->prefetch(work, walk.n_block, row);
            shared.k.consumer_wait(kv_item);
            warpgroup_arrive();
            multiply_abt<T>(acc_s[0], shared.sQ[q_index()], shared.sK[kv_item % kStages]);
            warpgroup_wait<0>(acc_s[0]);
            for (;; walk.next(), kv_item++) {
                // Found in every iteration, or Q's descriptors fill the uniform registers.
                const uint32_t block = warp_uniform(kv_item), q_idx = warp_uniform(q_index());
                const bool is_full = walk.is_full();
                const ScoreOrigin at{walk.n_block, warp_row, row, walk.n_block * kBlockN + lane_idx % 4 * 2};
                float alpha[2];
                const bool has_grown = this->exponentiate(work, blocks, at, is_full, alpha);
                shared.k.consumer_release(kv_item, lane_idx);

                warpgroup_wait<0>(acc_o[0], P);  // P V of the block before
                if (!walk.is_first()) shared.v.consumer_release(kv_item - 1, lane_idx);
#pragma unroll
                for (int i = 0; i < 2 * kNTiles; i++)
                    P[i / 4][i % 4] = pack<T>(acc_s[0][i / 2][i % 2 * 2], acc_s[0][i / 2][i % 2 * 2 + 1]);
                if (has_grown) softmax.rescale(acc_o, alpha);

                shared.v.consumer_wait(kv_item);
                if (!is_full) clear_v(work, walk.n_block);
                if (walk.is_last()) break;
                this->prefetch(work, walk.block_after(), row);
                shared.k.consumer_wait(kv_item + 1);
                warpgroup_arrive();
                multiply_abt<T>(acc_s[0], shared.sQ[q_idx], shared.sK[(block + 1) % kStages]);
                multiply_ab<T>(acc_o[0], P, shared.sV[block % kStages]);
                warpgroup_wait<1>(acc_s[0]);  // each product is a group; P V, the newest, goes on
            }
            warpgroup_arrive();
            multiply_ab<T>(acc_o[0], P, shared.sV[warp_uniform(kv_item) % kStages]);
            warpgroup_wait<0>(acc_o[0], P);
            shared.v.consumer_release(kv_item++, lane_idx);
            n_block = walk.block_after_last();
            skip_blocks(work, n_block, n_block_min);
        } while (Base::kHasGaps && __any_sync(~0u, this->sees(blocks)));
    }

    // For blocks from n_block down to `end`, which only other consumers need. n_block becomes the one after them.
    __device__ void skip_blocks(const WorkItem &work, int &n_block, int end) {
        for (; this->skips(n_block, end); kv_item++) {
            shared.k.consumer_wait(kv_item);
            const int next = this->block_after(n_block);
            __syncwarp();
            shared.k.consumer_release(kv_item, lane_idx);
            this->skip_block();
            shared.v.consumer_wait(kv_item);
            clear_v(work, n_block);
            __syncwarp();
            shared.v.consumer_release(kv_item, lane_idx);
            n_block = next;
        }
    }

    // By all consumers together, also those that skip the block: it is full for none.
    __device__ void clear_v(const WorkItem &work, int n_block) {
        const int key0 = n_block * kBlockN, begin = work.first_key - key0;
        const int end = work.seq.keys_follow(p) ? work.seq.seqlen_k - key0 : kBlockN;
        clear_unseen<128 * Shape::kConsumers, kBlockN>(threadIdx.x - 128, kAllConsumers, begin, end,
                                                       shared.sV[kv_item % kStages]);
    }

    // out goes through Q's buffer, once all four warps have read Q.
    __device__ void store(const WorkItem &work) {
        const Tile &tile = work.tile;
        const Sequence &seq = work.seq;
        const int row0 = tile.block * Shape::kBlockM + 64 * consumer + 16 * warp_idx;
        const int lane_idx = thread_idx() % 32;
        float *gLse = p.lse ? static_cast<float *>(p.lse) + lse_index(p, seq.q_begin, tile.b, tile.h) : nullptr;
        this->end_tile(work, row0 + lane_idx / 4);
        softmax.finalize(acc_o, gLse, seq, row0 + lane_idx / 4, sink_of<float>(p, tile.h), this->out_scale());
        auto &sO = reinterpret_cast<SmemTile<64, Shape::kHeadDimV> &>(shared.sQ[q_index()]);
        barrier_sync(kOneConsumer + consumer, 128);
#pragma unroll
        for (int d = 0; d < kDTiles; d += 2) {
            uint32_t x[4];
            for (int j = 0; j < 4; j++)
                x[j] = pack<T>(acc_o[0][d + j / 2][j % 2 * 2], acc_o[0][d + j / 2][j % 2 * 2 + 1]);
            stmatrix(x, sO.address(16 * warp_idx + lane_idx % 16, 8 * d + lane_idx / 16 * 8));
        }
        // TMA would write 16 rows, also those of the next sample.
        if (__any_sync(~0u, row0 + 16 > seq.padded_q && seq.rows_follow(p))) {
            __syncwarp();  // unobserved by the emulator: its stmatrix waits for all lanes
            store_some_rows(sO, 16 * warp_idx, rows_of<uint16_t>(p.o, tile.b, tile.h, seq.q_begin + row0),
                            p.o.row_stride, seq.padded_q - row0, p.head_dim_v);
            fence_proxy_async();  // unobserved by the emulator: what stmatrix wrote comes before what TMA will write
            __syncwarp();  // sO has been read
            return;
        }
        fence_proxy_async();
        __syncwarp();
        if (lane_idx > 0) return;
        store_rows(sO, 16 * warp_idx, p.o_tma, seq.q_begin + row0, tile.h, tile.b);
        tma_store_wait_read();
    }
};

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kNThreads, Shape::kBlocksPerSm)
    flash_fwd(const __grid_constant__ Params<Shape> p) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    __trap();
#else
    if constexpr (Shape::kCached) let_next_kernel_begin();  // it waits, or needs nothing of this one
    auto &shared = shared_memory<typename Shape::SharedMemory>();
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();
    const uint32_t warpgroup_idx = warp_uniform(threadIdx.x / 128);
    if (warpgroup_idx == 0) {
        warpgroup_reg_dealloc<Shape::kProducerRegisters>();
        produce<Shape>(p, shared);
        if constexpr (Shape::kCached)  // as launch_early() asks of each kernel
            if (p.phase == Phase::kPrefillRest && blockIdx.x == 0)
                wait_for_previous_kernel();  // unobserved by the emulator: no case has a next kernel
    } else {
        warpgroup_reg_alloc<Shape::kConsumerRegisters>();
        Consumer<T, Shape>{{p, shared, int(warpgroup_idx) - 1}}.run();
    }
#endif
}

template <typename Shape> void launch_fwd(typename Shape::Input p) {
    using SharedMemory = Shape::SharedMemory;
    static_assert(sizeof(SharedMemory) + 1024 <= (228 << 10) / Shape::kBlocksPerSm);
    constexpr int kHeadDim = Shape::kHeadDim, kHeadDimV = Shape::kHeadDimV;
    const int64_t num_tiles = RowTiles<Shape::kBlockM, Shape::kCached>::count(p);
    int sms = num_sms() * Shape::kBlocksPerSm;
    Phase phase = Phase::kAlone;
    if constexpr (Shape::kCached) sms = p.num_sms, phase = p.phase;
    const int64_t blocks = std::min<int64_t>(num_tiles, sms);
    if (num_tiles == 0) return;
    if (num_tiles + sms > INT32_MAX)
        throw std::runtime_error("minimal_attn: batch_size · nheads · seqlen_q is too large: q has over 2^31 tiles");
    // If all tiles begin at once, they need neither the counter nor its order of heads (Scheduler).
    if (num_tiles == blocks && phase == Phase::kAlone) p.tile_counter = nullptr;
    if (Shape::kCached && p.tile_counter && phase != Phase::kPrefillRest)  // which goes on counting
        check_cuda(cudaMemsetAsync(p.tile_counter, 0, sizeof(int), static_cast<cudaStream_t>(p.stream)));
    Params<Shape> params{p, {p, num_tiles}};
    params.q_tma = make_tma_tensor<kHeadDim>("q", p.q, p.batch_size, p.nheads, p.seqlen_q, p.head_dim, 64);
    params.k_tma = Shape::KeyBlocks::template make_tensor<kHeadDim>("k", p.k, p, p.head_dim);
    params.v_tma = Shape::KeyBlocks::template make_tensor<kHeadDimV>("v", p.v, p, p.head_dim_v);
    const int warp_rows = 16;
    params.o_tma =
        make_tma_tensor<kHeadDimV>("out", p.o, p.batch_size, p.nheads, p.seqlen_q, p.head_dim_v, warp_rows);
    const auto kernel = p.dtype == DType::kFloat16 ? flash_fwd<__half, Shape> : flash_fwd<__nv_bfloat16, Shape>;
    const auto launch_tiles = phase == Phase::kPrefillRest ? launch_early<Params<Shape>> : launch<Params<Shape>>;
    launch_tiles(kernel, blocks, Shape::kNThreads, sizeof(SharedMemory), p.stream, params);
}

void flash_forward_mods(const AttnParams &p);        // sm90/mods/: changed scores
void flash_forward_dropout(const AttnParams &p);     // sm90/mods/: dropout alone
void flash_forward_max_logits(const AttnParams &p);  // sm90/mods/: max_logits, attention_chunk, or both alone
void flash_forward_masked(const AttnParams &p);      // sm90/mods/: a block mask alone

// run<Shape>() for a head_dim; TMA pads with zeros. Three consumers hide one another's softmax better than two and load
// K and V less often, if a thread's S, P and O fit its 160 registers.
template <typename Kind, typename Shape128 = Shape<128, 3, 64, 4, 6, Kind>, typename Run>
auto with_shape(int head_dim, Run run) {
    // kHeadDim, kConsumers, kBlockN, kStages, kQBuffers
    if (head_dim <= 64)  // the most keys that fit; four consumers spill
        return run.template operator()<Shape<64, 3, 128, 4, 6, Kind>>();
    if (head_dim <= 96)  // 128 keys spill; 80 have 0.95 of the speed, two consumers 0.86
        return run.template operator()<Shape<96, 3, 96, 4, 6, Kind>>();
    if (head_dim <= 128)  // four stages hide the latency of memory; see also flash_forward()
        return run.template operator()<Shape128>();
    if (head_dim <= 192)  // O does not leave registers for three consumers
        return run.template operator()<Shape<192, 2, 80, 2, 4, Kind>>();
    return run.template operator()<Shape<256, 2, 64, 2, 3, Kind>>();  // no memory for a fourth Q
}

}  // namespace sm90
