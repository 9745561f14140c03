// FlashAttention backward on Hopper's tensor cores for head_dims above 128 that flash_bwd_sm90.cu does not serve. Two
// consumers' registers hold dK and dV of 64 keys, but adding dQ for every 64 keys would take too much of L2's time. So a
// pair, a cluster of two blocks, owns 128 keys, 64 each, and walks along the rows that see them, 64 at a time:
//   consumer 0   S = K Qᵀ                P = exp(scale · S - lse)     dV += P dO
//   consumer 1   dP = V dOᵀ              dS = P ∘ (dP - delta)        dK += dS Q
//   both         dQ += dS(before)ᵀ K     over both blocks' keys, 64 columns each
// Each block forms half of dQ's columns and sends dS to the other: 8 KB, where dQ would be 32 KB. dQ is one row block
// late: dS travels during the next products. One block loads Q for both, the other dO. P goes through sdS to consumer
// 1, negative where it is dropped.
#include "mods/dropout_transposed.cuh"
#include "ptx/cluster.cuh"
#include "sm90/bwd/consumer.cuh"
#include "sm90/bwd/launch.cuh"

namespace sm90 {

// warp_uniform() for x < kEnd, by a vote for each bit, whose result is in a uniform register at once.
template <int kEnd> __device__ uint32_t vote(uint32_t x) {
    uint32_t y = 0;
#pragma unroll
    for (int bit = 1; bit < kEnd; bit *= 2) y |= __any_sync(~0u, x & bit) ? bit : 0;
    return y;
}

template <int kHeadDim_, bool kMasked_> struct WideShape {
    using Input = AttnBackwardParams;
    static constexpr bool kMasked = kMasked_;  // by a block mask
    using Mask = MaskOf<true>;
    static constexpr int kHeadDim = kHeadDim_, kDTiles = kHeadDim / 8, kBlockM = 64, kNTiles = kBlockM / 8;
    static constexpr int kConsumers = 2, kStages = 2, kNThreads = 128 * (kConsumers + 1), kNWarps = 4 * kConsumers;
    static constexpr int kTileBlocks = 2, kSemaphores = kTileBlocks, kBlockN = 64 * kTileBlocks, kMaxSplits = 1;
    static constexpr bool kIsPersistent = false, kFillsGpu = true, kCountsArrivals = true, kOneTile = false;
    static constexpr DqPart kDqPart = DqPart::kColumns;
    static constexpr int kDqParts = kHeadDim / 64, kDqWarps = 4 * kDqParts;
    static constexpr int kDqTiles = kBlockM * kHeadDim / (512 * kDqParts);
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    // Parts of 64 columns of dQ. A consumer may have none.
    __device__ static int parts_of(int rank) { return min(kConsumers, kDqParts - kConsumers * rank); }
};

template <typename Shape> struct WideShared {
    static constexpr int kBlockM = Shape::kBlockM, kHeadDim = Shape::kHeadDim, kStages = Shape::kStages;
    SmemTile<64, kHeadDim> sK, sV;  // then dV and dK
    SmemTile<64, 128> sOtherK;      // the other's keys, columns of this dQ
    SmemTile<kBlockM, kHeadDim> sQ[kStages], sdO[kStages];
    SmemTile<kBlockM, 64> sdS, sOtherdS;  // [rows, keys]; sdS has P first
    alignas(16) float lse_log2[kStages][kBlockM], delta[kStages][kBlockM];  // by slot_of_row()
    RowBlock row_blocks[2 * kStages];  // dQ is late
    Ring<1> keys;        // sK, sV, sOtherK
    Ring<kStages> rows;  // sQ, sdO, lse_log2, delta, row_blocks; both blocks release them
    Ring<1> ds;          // full: sdS and sOtherdS have dS; empty: sdS may take P
    Barrier has_P;
    Barrier may_send;    // the other block's sOtherdS may take dS
    Ring<2> dq_turns;    // if deterministic
    Barrier dq_added[2];
    BwdWorkItem<Shape> work;
    int ticket;

    __device__ RowBlock &row_block(uint32_t i) { return row_blocks[i % (2 * kStages)]; }
    __device__ void init_barriers() {
        keys.init(Shape::kNWarps), rows.init(2 * Shape::kNWarps, 2), ds.init(Shape::kNWarps + 1);
        mbarrier_init(has_P, 4), mbarrier_init(may_send, Shape::kNWarps), dq_turns.init(1);
        for (Barrier &added : dq_added) mbarrier_init(added, Shape::kNWarps);
        fence_mbarrier_init();
    }
};

template <typename Shape>
__device__ void load_wide_tiles(const BwdParams<Shape> &p, WideShared<Shape> &shared, int rank) {
    const BwdWorkItem<Shape> &work = shared.work;
    const Tile &tile = work.tile;
    const int key0 = work.seq.k_begin + tile.block * Shape::kBlockN;
    if (work.count() == 0) return;
    Barrier &has_keys = shared.keys.full_barrier(0);
    const int parts = Shape::parts_of(rank);
    mbarrier_arrive_expect_tx(has_keys, 2 * sizeof(shared.sK) + parts * sizeof(shared.sOtherK.panel[0]));
    load_bytes(shared.sK, p.k_tma, has_keys, key0 + 64 * rank, tile.h_k, tile.b);
    load_bytes(shared.sV, p.v_tma, has_keys, key0 + 64 * rank, tile.h_k, tile.b);
    for (int i = 0; i < parts; i++)
        tma_load(shared.sOtherK.panel[i], p.k_tma.map, has_keys, (2 * rank + i) * 64, key0 + 64 * (1 - rank),
                 tile.h_k * p.k_tma.head_step, tile.b * p.k_tma.batch_step);
    const TmaTensor &x = rank == 0 ? p.q_tma : p.dout_tma;
    auto *to = rank == 0 ? shared.sQ : shared.sdO;
    work.for_each(p, [&](uint32_t i, int h, int m_block) {
        shared.rows.producer_acquire(i);
        Barrier &full = shared.rows.full_barrier(i);
        mbarrier_arrive_expect_tx(full, 2 * sizeof(shared.sQ[0]));
        for (int j = 0; j < to->kPanels; j++)
            tma_load_both(to[i % Shape::kStages].panel[j], x.map, full, j * to->kCols,
                          work.seq.q_begin + m_block * Shape::kBlockM, h * x.head_step, tile.b * x.batch_step);
    });
}

template <typename T, typename Shape, bool kDropout> struct WideConsumer {
    static constexpr int kHeadDim = Shape::kHeadDim, kNTiles = Shape::kNTiles, kDTiles = Shape::kDTiles;
    const BwdParams<Shape> &p;
    WideShared<Shape> &shared;
    const BwdWorkItem<Shape> &work;
    const int consumer, rank;
    const int lane_idx = thread_idx() % 32, idx = thread_idx() % 128;
    const uint32_t ds_address = shared.sdS.address(
        lane_idx / 16 * 8 + lane_idx % 8, idx / 32 * 16 + lane_idx / 8 % 2 * 8);
    // Consumer 0: acc is S, then P, acc_sum is dV. Consumer 1: dP and dK.
    float acc[1][kNTiles][4], acc_dq[8][4], acc_sum[kDTiles][4];
    uint32_t operand[kNTiles / 2][4];

    __device__ int key0() const { return work.tile.block * Shape::kBlockN + 64 * rank; }
    __device__ int key() const { return key0() + idx / 32 * 16 + lane_idx / 4; }  // this lane's first
    __device__ int row(const RowBlock &block) const { return block.m_block * 64 + lane_idx % 4 * 2; }

    __device__ void run() {
        for (auto &x : acc_sum) x[0] = x[1] = x[2] = x[3] = 0.f;
        const int count = work.count();
        if (count > 0) {
            shared.keys.consumer_wait(0);
            clear_tiles<64>(seen_keys<64>(p, work, key0()), shared.sK, shared.sV);
            clear_tiles<64>(seen_keys<64>(p, work, key0() + 64 * (1 - 2 * rank)), shared.sOtherK);
            add_row_block<true>(0);
            // Products under way when the loop begins would make ptxas serialize all.
            warpgroup_wait<0>(acc_sum, operand);  // unobserved by the emulator: ptxas alone needs it
#pragma unroll 1
            for (int i = 1; i < count; i++) add_row_block<false>(i);
            form_dq(count - 1);
            warpgroup_wait<0>(acc_sum, operand, acc_dq);
            shared.ds.consumer_release(count - 1, lane_idx);
            add_dq(count - 1);
            shared.rows.producer_acquire(count);  // all that the other block sends must arrive first
            shared.ds.producer_acquire(count);
            barrier_sync(kRowBlocksDone, 128 * Shape::kConsumers + 32);  // dQ has been added, sK has been read
        }
        store();
    }

    template <bool kIsFirst> __device__ void add_row_block(uint32_t i) {
        const uint32_t stage = vote<2>(i % 2), c = vote<2>(consumer);
        const auto &rows = (c ? shared.sdO : shared.sQ)[stage], &others = (c ? shared.sQ : shared.sdO)[stage];
        shared.rows.consumer_wait(i);
        const RowBlock &block = shared.row_block(i);
        const bool is_full = block.is_full;
        uint32_t seen = ~0u;
        if constexpr (Shape::kMasked)
            if (consumer == 0 && !is_full) seen = word_of_unit<true>(p.block_mask, block.unit[rank][0], idx);
        if (!is_full) clear_tiles<64>(seen_rows(work, block.m_block), shared.sQ[stage], shared.sdO[stage]);
        warpgroup_arrive();
        multiply_abt<T>(acc[0], c ? shared.sV : shared.sK, rows);
        if constexpr (!kIsFirst) {
            warpgroup_wait<1>(acc_sum, operand);  // of the row block before
            if (lane_idx < 2) mbarrier_arrive(shared.rows.empty[(i - 1) % Shape::kStages], lane_idx);  // to both blocks
            form_dq(i - 1);
        }
        const uint32_t kept =
            kDropout && consumer == 0 ? kept_of_64_rows(Dropout(p, work.tile.b, block.h), row(block), key()) : ~0u;
        warpgroup_wait<kIsFirst ? 0 : 1>(acc[0]);
        if (consumer == 0) {
            exponentiate(acc[0], shared.lse_log2[stage], p.score_factor, lane_idx);
            if (!is_full) {
                Mask(work.seq, p).apply_transposed(acc, work.blocks, block.m_block, key(), row(block));
                if (Shape::kMasked) hide_unseen(acc[0], 0, seen, 0.f);
            }
        }
        if constexpr (!kIsFirst) {
            warpgroup_wait<0>(acc_dq);
            shared.ds.consumer_release(i - 1, lane_idx);
            if (lane_idx == 0) mbarrier_arrive(shared.may_send, 1 - rank);
        }
        if (consumer == 0) {
            hand_over_P(i, kept);
        } else {
            if (!kIsFirst) add_dq(i - 1);  // while P is under way
            form_ds(i, stage);
        }
        warpgroup_arrive();
        multiply_ab<T>(acc_sum, operand, others);
        if (!kIsFirst && consumer == 0) add_dq(i - 1);
    }
    __device__ void hand_over_P(uint32_t i, uint32_t kept) {
        shared.ds.producer_acquire(i);
#pragma unroll
        for (int kk = 0; kk < kNTiles / 2; kk++) {
            uint32_t signed_P[4];
            for (int j = 0; j < 4; j++) {
                const int n = 2 * kk + j / 2, e = j % 2 * 2;
                const float(&P)[4] = acc[0][n];
                const bool is_kept0 = is_kept(kept, n, e), is_kept1 = is_kept(kept, n, e + 1);
                operand[kk][j] = pack<T>(is_kept0 ? P[e] : 0.f, is_kept1 ? P[e + 1] : 0.f);
                signed_P[j] = kDropout ? pack<T>(is_kept0 ? P[e] : -P[e], is_kept1 ? P[e + 1] : -P[e + 1])
                                       : operand[kk][j];
            }
            stmatrix_trans(signed_P, ds_address + 16 * kk * shared.sdS.kRowBytes);
        }
        __syncwarp();  // unobserved by the emulator: its stmatrix is one step of all lanes
        if (lane_idx == 0) mbarrier_arrive(shared.has_P);
    }
    __device__ float ds_of(float P, float dp, float delta) const {
        return kDropout ? fabsf(P) * fmaf(dp, P >= 0.f ? p.dv_scale : 0.f, -delta) : P * (dp - delta);
    }
    __device__ void form_ds(uint32_t i, int stage) {
        uint32_t P[kNTiles / 2][4];
        mbarrier_wait(shared.has_P, i % 2);
#pragma unroll
        for (int kk = 0; kk < kNTiles / 2; kk++) ldmatrix_trans(P[kk], ds_address + 16 * kk * shared.sdS.kRowBytes);
#pragma unroll
        for (int kk = 0; kk < kNTiles / 2; kk++) {
            const float4 x = of_rows(shared.delta[stage], kk, lane_idx);
            for (int j = 0; j < 4; j++) {
                const float(&dp)[4] = acc[0][2 * kk + j / 2];
                const float2 pair = unpack<T>(P[kk][j]);
                operand[kk][j] = pack<T>(ds_of(pair.x, dp[j % 2 * 2], j / 2 ? x.z : x.x),
                                         ds_of(pair.y, dp[j % 2 * 2 + 1], j / 2 ? x.w : x.y));
            }
            stmatrix_trans(operand[kk], ds_address + 16 * kk * shared.sdS.kRowBytes);
        }
        fence_proxy_async();
        barrier_sync(kOneConsumer + 1, 128);
        if (idx == 0) {
            mbarrier_wait(shared.may_send, (i + 1) % 2);
            copy_to_block(&shared.sOtherdS, &shared.sdS, sizeof(shared.sdS), shared.ds.full_barrier(i), 1 - rank);
            mbarrier_arrive_expect_tx(shared.ds.full_barrier(i), sizeof(shared.sOtherdS));
        }
    }

    __device__ bool has_part() const { return Shape::kDqParts == 4 || consumer < Shape::parts_of(rank); }
    __device__ void form_dq(uint32_t i) {
        const uint32_t c = vote<2>(consumer), col = 64 * c + 128 * vote<2>(rank);
        shared.ds.consumer_wait(i);
        if (c == 0)  // what the other block has sent has arrived
            if (idx == 0) mbarrier_arrive(shared.ds.empty[0], 1 - rank);
        if (has_part()) {
            warpgroup_arrive();
#pragma unroll
            for (int kk = 0; kk < 4; kk++)
                wgmma_ab<T>(acc_dq, shared.sdS.columns_desc(kk), shared.sK.rows_desc(kk, col), kk > 0);
#pragma unroll
            for (int kk = 0; kk < 4; kk++)
                wgmma_ab<T>(acc_dq, shared.sOtherdS.columns_desc(kk), shared.sOtherK.rows_desc(kk, 64 * c), true);
        }
        warpgroup_commit_batch();
    }
    __device__ void add_dq(uint32_t i) {
        sm90::add_dq(p, shared, i, 8 * rank + 4 * consumer + idx / 32, lane_idx, acc_dq, has_part());
    }

    __device__ void store() {  // dV through sK, dK through sV, rows for each warp
        const int row0 = idx / 32 * 16, first = key0() + row0;
        const Tensor &x = consumer ? p.dk : p.dv;
        store_accumulators<T>(acc_sum, consumer ? p.dk_scale : p.dv_scale, work.seq.seqlen_k - first,
                              consumer ? shared.sV : shared.sK, row0,
                              rows_of<uint16_t>(x, work.tile.b, work.tile.h_k, work.seq.k_begin + first),
                              x.row_stride, work.seq.padded_k - first, consumer ? p.head_dim : p.head_dim_v);
    }
};

template <typename T, typename Shape, bool kDropout>
__global__ void __launch_bounds__(Shape::kNThreads, 1) flash_bwd_wide(const __grid_constant__ BwdParams<Shape> p) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    __trap();
#else
    auto &shared = shared_memory<WideShared<Shape>>();
    const int rank = blockIdx.x % 2;
    const bool takes_turns = p.takes_turns();
    if (threadIdx.x == 0) shared.init_barriers();
    if (takes_turns) {  // one ticket for a pair
        if (rank == 0 && threadIdx.x == 32) {
            wait_for_previous_kernel();  // unobserved by the emulator: turns are then waited for forever
            shared.ticket = atomicAdd(p.layout.ticket(p), 1);
        }
        cluster_sync();  // unobserved by the emulator: turns are then waited for forever
    } else {
        cluster_sync_relaxed();
    }
    if (threadIdx.x == 32) {  // now the other block has its barriers
        shared.work.begin = 0;
        shared.work.find(p, takes_turns ? load_from_block(shared.ticket, 0) : int(blockIdx.x / 2));
    }
    __syncthreads();
    const uint32_t warpgroup_idx = warp_uniform(threadIdx.x / 128);
    if (warpgroup_idx == 0) {
        warpgroup_reg_dealloc<Shape::kProducerRegisters>();
        if (threadIdx.x == 0) load_wide_tiles<Shape>(p, shared, rank);
        else if (threadIdx.x >= 32 && threadIdx.x < 64) {
            wait_for_previous_kernel();
            let_next_kernel_begin();  // flash_bwd_dq reads dq_arrivals
            load_numbers<Shape>(p, shared, shared.work);
            if (shared.work.count() > 0) barrier_sync(kRowBlocksDone, 128 * Shape::kConsumers + 32);
            if (threadIdx.x == 32) report_dq<Shape>(p, shared.work);
        } else if (threadIdx.x == 96 && takes_turns) end_turns<Shape>(p, shared, shared.work, rank);
        else if (threadIdx.x == 64 && takes_turns)
            shared.work.for_each(p, [&](uint32_t i, int h, int m_block) {
                wait_for_turn<Shape>(p, shared, shared.work, i, h, m_block, rank);
            });
    } else {
        warpgroup_reg_alloc<Shape::kConsumerRegisters>();
        WideConsumer<T, Shape, kDropout>{p, shared, shared.work, int(warpgroup_idx) - 1, rank}.run();
    }
    // The other block has read the ticket.
    if (takes_turns) cluster_sync_relaxed();  // unobserved by the emulator: too seldom it would end before that
#endif
}

template <typename F> auto with_wide_shape(const AttnBackwardParams &p, F f) {
    auto masked = [&]<bool kMasked> {
        return p.max_head_dim() <= 192 ? f.template operator()<WideShape<192, kMasked>>()
                                       : f.template operator()<WideShape<256, kMasked>>();
    };
    return p.block_mask.rows ? masked.template operator()<true>() : masked.template operator()<false>();
}

int64_t backward_workspace_wide(const AttnBackwardParams &p) {
    return with_wide_shape(p, [&]<typename Shape> { return BwdWorkspace<Shape>(p).bytes(p.deterministic); });
}

void flash_backward_wide(const AttnBackwardParams &p) {
    auto launch = [&]<typename T, typename Shape> {
        static_assert(sizeof(WideShared<Shape>) <= 227 << 10);
        auto *kernel = flash_bwd_wide<T, Shape, false>;
        if constexpr (!Shape::kMasked)
            if (p.dropout_seed) kernel = flash_bwd_wide<T, Shape, true>;
        launch_bwd<T, Shape, sizeof(WideShared<Shape>)>(p, kernel);
    };
    with_wide_shape(p, [&]<typename Shape> {
        if (p.dtype == DType::kFloat16) launch.template operator()<__half, Shape>();
        else launch.template operator()<__nv_bfloat16, Shape>();
    });
}

}  // namespace sm90
