// FlashAttention backward on Hopper's tensor cores, fp16 and bf16 with fp32 sums: H100, H200 (sm_90a).
//
// A block of threads owns kBlockN keys of one key/value head and walks along the rows that see them, kBlockM at a time,
// of every query head that reads it (Dao, FlashAttention-2, 2023, Algorithm 2). Each of two consumer warpgroups has 64
// of the keys. Scores are formed transposed, so that P and dS go from the accumulators of one product straight into the
// A operand of the next, and dK and dV stay in registers to the end. One step of a consumer:
//
//   S = K Qᵀ                     [64, kBlockM]
//   dP = V dOᵀ - delta           [64, kBlockM]: the accumulators begin with -delta
//   dQ += dS(before)ᵀ K          its part of the step before, over the keys of both consumers
//   P = exp(scale · S - lse)     dS = P ∘ dP, which goes to shared memory, too
//   dV += P dO    dK += dS Q
//
// dQ is one step late, so that no consumer waits for the dS of the other one: one's exponentials run beside the
// products of the other one. All blocks of keys sum dQ in memory, in fp32, in the order of the accumulators, so that a
// warp adds 512 neighbouring bytes; flash_bwd_dq brings it into q's order and type.
//
// Read next: flash_dmma.cu, fp32 on the same GPUs.
#include "device.h"
#include "flash.h"
#include "launch.h"
#include "mask.cuh"
#include "pipeline_sm90.cuh"
#include "scheduler.cuh"
#include "scores.cuh"
#include "sequence.cuh"
#include "softmax.cuh"
#include "tiles_sm90.cuh"

namespace sm90 {

using namespace device;

// kDqSplit consumers form a step's dQ, a part of the columns each. If it is one, consumers take turns.
template <int kHeadDim_, int kConsumers_, int kStages_> struct BwdShape {
    static constexpr int kHeadDim = kHeadDim_, kConsumers = kConsumers_, kStages = kStages_, kBlockM = 64;
    static constexpr int kBlockN = 64 * kConsumers, kNThreads = 128 * (kConsumers + 1), kNWarps = 4 * kConsumers;
    static constexpr int kDqSplit = kHeadDim / 64, kDqCols = 64, kDqWarps = 4 * kDqSplit;
    static constexpr int kDqFloats = kBlockM * kHeadDim;
    static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
    static_assert(kDqSplit == 1 || kDqSplit == kConsumers);
};

// The sums of dQ in memory: [tiles of query rows, kDqWarps, fragments of 128 floats]. If deterministic, behind them a
// number for each warp of a tile, how many blocks of keys have added to it so far, and one counter of tickets.
template <typename Shape> struct DqWorkspace {
    RowTiles<Shape::kBlockM> row_tiles;
    int64_t tiles;  // of query rows; 0 if dq is not needed
    explicit __host__ __device__ DqWorkspace(const AttnBackwardParams &p)
        : row_tiles(p), tiles(p.dq.data ? RowTiles<Shape::kBlockM>::count(p) : 0) {}
    __host__ __device__ int64_t bytes(bool deterministic) const {
        return 4 * (tiles * Shape::kDqFloats + (deterministic && tiles ? tiles * Shape::kDqWarps + 1 : 0));
    }
    __device__ int *semaphore(const AttnBackwardParams &p, int64_t tile, int warp_idx) const {
        return static_cast<int *>(p.workspace) + tiles * Shape::kDqFloats + tile * Shape::kDqWarps + warp_idx;
    }
    __device__ int *ticket(const AttnBackwardParams &p) const { return semaphore(p, tiles, 0); }
    // This lane's part of the first fragment of a warp.
    __device__ static float *sums(const AttnBackwardParams &p, int64_t tile, int warp_idx) {
        return static_cast<float *>(p.workspace) + (tile * Shape::kDqWarps + warp_idx) *
               (Shape::kDqFloats / Shape::kDqWarps) + thread_idx() % 32 * 4;
    }
};

template <typename Shape> struct BwdParams : AttnBackwardParams {
    TmaTensor q_tma, k_tma, v_tma, dout_tma;
};

// The steps of a block of threads: its rows, of one query head after the other.
template <typename Shape> struct Steps {
    Tile tile;
    Sequence seq;
    BlockRange blocks;  // of rows
    int group, first_row;  // the first that sees a key

    // Blocks that wait for their turn are numbered as they start, so that none waits for one that cannot start.
    __device__ static int index(const AttnBackwardParams &p) {
        return p.deterministic && p.dq.data ? atomicAdd(DqWorkspace<Shape>(p).ticket(p), 1) : int(blockIdx.x);
    }
    __device__ explicit Steps(const AttnBackwardParams &p)
        : tile(KeyTiles<Shape::kBlockN>::at(p, index(p))), seq(p, tile.b),
          blocks(Mask(seq, p).row_blocks<Shape::kBlockM, Shape::kBlockN>(tile.block * Shape::kBlockN)),
          group(p.nheads / p.nheads_k), first_row(Mask(seq, p).rows(0).begin) {}
    __device__ int per_head() const { return max(0, blocks.end - blocks.begin); }
    __device__ int count() const { return group * per_head(); }
};

template <typename Shape> struct BwdSharedMemory {
    static constexpr int kBlockM = Shape::kBlockM, kHeadDim = Shape::kHeadDim, kStages = Shape::kStages;
    SmemTile<64, kHeadDim> sK[Shape::kConsumers], sV[Shape::kConsumers];  // then dK and dV
    SmemTile<kBlockM, kHeadDim> sQ[kStages], sdO[kStages];
    SmemTile<kBlockM, Shape::kBlockN> sdS[2];  // [rows, keys]
    float lse_log2[kStages][kBlockM], delta[kStages][kBlockM];
    Ring<1> keys;        // sK and sV
    Ring<kStages> rows;  // sQ, sdO, lse_log2 and delta of a step
    Ring<2> ds;          // from all consumers to all of them
    Steps<Shape> steps;

    __device__ void init_barriers() {
        keys.init(Shape::kNWarps), rows.init(Shape::kNWarps, 2), ds.init(Shape::kDqWarps, Shape::kNWarps);
        fence_mbarrier_init();
    }
};

// One thread asks TMA for K and V, and for Q and dO step by step.
template <typename Shape>
__device__ void load_tiles(const BwdParams<Shape> &p, BwdSharedMemory<Shape> &shared, const Steps<Shape> &steps) {
    const Tile &tile = steps.tile;
    const int key0 = steps.seq.k_begin + tile.block * Shape::kBlockN, num_steps = steps.count();
    if (num_steps == 0) return;
    for (int c = 0; c < Shape::kConsumers; c++) {  // one arrival, of all bytes
        load_bytes(shared.sK[c], p.k_tma, shared.keys.full_barrier(0), key0 + 64 * c, tile.h_k, tile.b);
        load_bytes(shared.sV[c], p.v_tma, shared.keys.full_barrier(0), key0 + 64 * c, tile.h_k, tile.b);
    }
    mbarrier_arrive_expect_tx(shared.keys.full_barrier(0), sizeof(shared.sK) + sizeof(shared.sV));
    int h = tile.h, m_block = steps.blocks.begin;
#pragma unroll 1
    for (int i = 0; i < num_steps; i++) {
        shared.rows.producer_acquire(i);
        Barrier &full = shared.rows.full_barrier(i);
        const int row = steps.seq.q_begin + m_block * Shape::kBlockM, stage = i % Shape::kStages;
        mbarrier_arrive_expect_tx(full, 4 * Shape::kBlockM * Shape::kHeadDim);
        load_bytes(shared.sQ[stage], p.q_tma, full, row, h, tile.b);
        load_bytes(shared.sdO[stage], p.dout_tma, full, row, h, tile.b);
        if (++m_block == steps.blocks.end) m_block = steps.blocks.begin, h++;
    }
}

// One warp loads lse_log2 and delta. For rows that see no key, or that are beyond the end, P is 0.
template <typename Shape>
__device__ void load_numbers(const BwdParams<Shape> &p, BwdSharedMemory<Shape> &shared, const Steps<Shape> &steps) {
    const int lane_idx = threadIdx.x % 32, num_steps = steps.count();
    int h = steps.tile.h, m_block = steps.blocks.begin;
#pragma unroll 1
    for (int i = 0; i < num_steps; i++) {
        const int64_t at = lse_index(p, steps.seq, steps.tile.b, h);
        float lse_log2[Shape::kBlockM / 32], delta[Shape::kBlockM / 32];
#pragma unroll
        for (int j = 0; j < Shape::kBlockM / 32; j++) {
            const int row = m_block * Shape::kBlockM + 32 * j + lane_idx;
            const bool is_seen = row >= steps.first_row && row < steps.seq.seqlen_q;
            lse_log2[j] = is_seen ? p.lse_log2[at + row] : INFINITY;
            delta[j] = is_seen ? static_cast<const float *>(p.delta)[at + row] : 0.f;
        }
        shared.rows.producer_acquire(i);
#pragma unroll
        for (int j = 0; j < Shape::kBlockM / 32; j++) {
            shared.lse_log2[i % Shape::kStages][32 * j + lane_idx] = lse_log2[j];
            shared.delta[i % Shape::kStages][32 * j + lane_idx] = delta[j];
        }
        __syncwarp();
        if (lane_idx == 0) mbarrier_arrive(shared.rows.full_barrier(i));
        if (++m_block == steps.blocks.end) m_block = steps.blocks.begin, h++;
    }
}

// A warpgroup: 64 keys.
template <typename T, typename Shape> struct BwdConsumer {
    static constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM, kStages = Shape::kStages;
    static constexpr int kNTiles = kBlockM / 8, kDTiles = kHeadDim / 8, kDqTiles = Shape::kDqCols / 8;

    const BwdParams<Shape> &p;
    BwdSharedMemory<Shape> &shared;
    const Steps<Shape> &steps;
    const int consumer;
    const int warp_idx = warp_uniform(threadIdx.x / 32 % 4), lane_idx = thread_idx() % 32;
    const Scores<> scores{p};
    __device__ Mask mask() const { return Mask(steps.seq, p); }
    // Registers are few: acc_s is that of dQ, too, and acc_dp becomes the operands P and dS.
    float acc_s[1][kNTiles][4], acc_dp[kNTiles][4], acc_dk[kDTiles][4], acc_dv[kDTiles][4];
    static_assert(kDqTiles <= kNTiles);
    using DqFragment = float[kDqTiles][4];

    __device__ DqFragment &acc_dq() { return reinterpret_cast<DqFragment &>(acc_s); }

    __device__ void run() {
        for (auto &x : acc_dk) x[0] = x[1] = x[2] = x[3] = 0.f;
        for (auto &x : acc_dv) x[0] = x[1] = x[2] = x[3] = 0.f;
        const int num_steps = steps.count();
        if (num_steps > 0) {
            shared.keys.consumer_wait(0);
            clear_keys();
            int h = steps.tile.h, m_block = steps.blocks.begin;
            step<true, false>(0, h, m_block);
            warpgroup_wait<0>(acc_dv, acc_dk, acc_dp);
#pragma unroll 1
            for (int i = 1; i < num_steps; i++) {
                const int h_before = h, m_before = m_block;
                if (++m_block == steps.blocks.end) m_block = steps.blocks.begin, h++;
                if (Shape::kDqSplit > 1 || forms_dq(i - 1)) step<false, true>(i, h_before, m_block, m_before);
                else step<false, false>(i, h_before, m_block, m_before);
            }
            warpgroup_wait<0>(acc_dv, acc_dk, acc_dp);
            if (forms_dq(num_steps - 1)) {
                form_dq(num_steps - 1);
                warpgroup_wait<0>(acc_dq());
                add_dq(num_steps - 1, h, m_block);
            }
            barrier_sync(kAllConsumers, 128 * Shape::kConsumers);  // sK has been read
        }
        store();
    }

    template <bool kIsFirst, bool kForms> __device__ void step(int i, int h_before, int m_block, int m_before = 0) {
        form_scores(i, m_block);
        if constexpr (!kIsFirst) {
            warpgroup_wait<1>(acc_dv, acc_dk, acc_dp);  // those of the step before
            shared.rows.consumer_release(i - 1, lane_idx);
        }
        form_dp(i);
        warpgroup_wait<1>(acc_s[0]);
        exponentiate(i, m_block);
        warpgroup_wait<0>(acc_dp);
        form_ds(i);
        if constexpr (kIsFirst) warpgroup_fence_operand(acc_dk), warpgroup_fence_operand(acc_dv);
        else if constexpr (kForms) form_dq(i - 1);
        warpgroup_arrive();
#pragma unroll
        for (int kk = 0; kk < kBlockM / 16; kk++)
            wgmma<T>(acc_dv, operand(2 * kk), shared.sdO[i % kStages].rows_desc(kk));
        warpgroup_commit_batch();
#pragma unroll
        for (int kk = 0; kk < kBlockM / 16; kk++)
            wgmma<T>(acc_dk, operand(2 * kk + 1), shared.sQ[i % kStages].rows_desc(kk));
        warpgroup_commit_batch();
        if constexpr (!kIsFirst)
            if constexpr (kForms) {
                warpgroup_wait<2>(acc_dq());
                add_dq(i - 1, h_before, m_before);
            }
    }

    // Rows of a tile before `begin` or from `end` on become 0, by all consumers.
    template <int kRows> __device__ void clear(SmemTile<kRows, kHeadDim> &tile, int begin, int end) {
        constexpr int kVecs = SmemTile<kRows, kHeadDim>::kRowBytes / 16;
        for (auto &panel : tile.panel)
            for (int i = threadIdx.x - 128; i < kRows * kVecs; i += 128 * Shape::kConsumers)
                if (i / kVecs < begin || i / kVecs >= end) reinterpret_cast<uint4 *>(panel)[i] = uint4{};
    }
    __device__ void after_clear() {
        fence_proxy_async();
        barrier_sync(kAllConsumers, 128 * Shape::kConsumers);
    }
    // Keys that no row sees may hold NaN, and 0 · NaN is NaN. What lies beyond the tensor is 0 already.
    __device__ void clear_keys() {
        const int key0 = steps.tile.block * Shape::kBlockN, begin = mask().keys(0).begin - key0;
        const int end = steps.seq.keys_follow(p) ? steps.seq.seqlen_k - key0 : Shape::kBlockN;
        if (begin <= 0 && end >= Shape::kBlockN) return;
        for (int c = 0; c < Shape::kConsumers; c++)
            clear(shared.sK[c], begin - 64 * c, end - 64 * c), clear(shared.sV[c], begin - 64 * c, end - 64 * c);
        after_clear();
    }
    // The same of rows that see no key, or are those of the next sample.
    __device__ void clear_rows(int stage, int m_block) {
        const int row0 = m_block * kBlockM, begin = steps.first_row - row0, end = steps.seq.seqlen_q - row0;
        if (begin <= 0 && end >= kBlockM) return;
        clear(shared.sQ[stage], begin, end), clear(shared.sdO[stage], begin, end);
        after_clear();
    }

    // S is on its way.
    __device__ void form_scores(int i, int m_block) {
        const int stage = i % kStages;
        shared.rows.consumer_wait(i);
        if (!steps.blocks.is_full(m_block)) clear_rows(stage, m_block);
        warpgroup_arrive();
        multiply_abt<T>(acc_s[0], shared.sK[consumer], shared.sQ[stage]);
    }
    // dP - delta is on its way.
    __device__ void form_dp(int i) {
        const int stage = i % kStages;
#pragma unroll
        for (int n = 0; n < kNTiles; n++) {
            const float2 delta = *reinterpret_cast<const float2 *>(&shared.delta[stage][8 * n + lane_idx % 4 * 2]);
            acc_dp[n][0] = acc_dp[n][2] = -delta.x, acc_dp[n][1] = acc_dp[n][3] = -delta.y;
        }
        warpgroup_fence_operand(acc_dp);  // equal values get registers of their own
        warpgroup_arrive();
        multiply_abt<T>(acc_dp, shared.sV[consumer], shared.sdO[stage], true);
    }

    __device__ bool forms_dq(int i) const { return Shape::kDqSplit > 1 || i % Shape::kConsumers == consumer; }

    // This consumer's part of the dQ of step i is on its way.
    __device__ void form_dq(int i) {
        shared.ds.consumer_wait(i);
        warpgroup_arrive();
        const int col0 = Shape::kDqSplit > 1 ? consumer * Shape::kDqCols : 0;
#pragma unroll
        for (int kk = 0; kk < Shape::kBlockN / 16; kk++)
            wgmma_ab<T>(acc_dq(), shared.sdS[i % 2].columns_desc(kk), shared.sK[kk / 4].rows_desc(kk % 4, col0), kk > 0);
        warpgroup_commit_batch();
    }

    // S becomes P.
    __device__ void exponentiate(int i, int m_block) {
        const int stage = i % kStages;
#pragma unroll
        for (int n = 0; n < kNTiles; n++) {
            const float2 lse = *reinterpret_cast<const float2 *>(&shared.lse_log2[stage][8 * n + lane_idx % 4 * 2]);
            for (int e = 0; e < 4; e++)
                acc_s[0][n][e] = exp2_approx(scores.probability_log2(acc_s[0][n][e], e % 2 ? lse.y : lse.x));
        }
        if (!steps.blocks.is_full(m_block)) {
            const int key = steps.tile.block * Shape::kBlockN + 64 * consumer + 16 * warp_idx + lane_idx / 4;
            mask().apply_transposed(acc_s, key, m_block * kBlockM + lane_idx % 4 * 2);
        }
    }

    // The operand for 16 rows: P and dS take turns.
    __device__ uint32_t (&operand(int i))[4] { return reinterpret_cast<uint32_t (&)[4]>(acc_dp[i]); }

    // P and dS as operands, and dS in shared memory, as [rows, keys].
    __device__ void form_ds(int i) {
#pragma unroll
        for (int kk = 0; kk < kBlockM / 16; kk++) {
            uint32_t P[4], dS[4];
            for (int j = 0; j < 4; j++) {
                const float(&s)[4] = acc_s[0][2 * kk + j / 2], (&dp)[4] = acc_dp[2 * kk + j / 2];
                const int e = j % 2 * 2;
                P[j] = pack<T>(s[e], s[e + 1]), dS[j] = pack<T>(s[e] * dp[e], s[e + 1] * dp[e + 1]);
            }
            for (int j = 0; j < 4; j++) operand(2 * kk)[j] = P[j], operand(2 * kk + 1)[j] = dS[j];
        }
        shared.ds.producer_acquire(i);
        const int col = 64 * consumer + 16 * warp_idx + lane_idx / 8 % 2 * 8, row = lane_idx / 16 * 8 + lane_idx % 8;
#pragma unroll
        for (int kk = 0; kk < kBlockM / 16; kk++) stmatrix_trans(operand(2 * kk + 1), shared.sdS[i % 2].address(16 * kk + row, col));
        fence_proxy_async();
        __syncwarp();
        if (lane_idx == 0) mbarrier_arrive(shared.ds.full_barrier(i));
    }

    // To the sums in memory.
    __device__ void add_dq(int i, int h, int m_block) {
        shared.ds.consumer_release(i, lane_idx);
        if (!p.dq.data) return;
        const RowTiles<kBlockM> row_tiles(p);
        const int64_t tile = row_tiles.first_tile(steps.tile.b, p.nheads) + int64_t(h) * row_tiles.slots + m_block;
        const int part = Shape::kDqSplit > 1 ? 4 * consumer + warp_idx : warp_idx;
        float *sums = DqWorkspace<Shape>::sums(p, tile, part);
        int *semaphore = nullptr, turn = 0;
        if (p.deterministic) {
            const BlockRange blocks = mask().template key_blocks<kBlockM, Shape::kBlockN>(m_block * kBlockM);
            const int block = steps.tile.block;
            turn = KeyTiles<Shape::kBlockN>::is_last_first(p) ? blocks.end - 1 - block : block - blocks.begin;
            semaphore = DqWorkspace<Shape>(p).semaphore(p, tile, part);
            if (lane_idx == 0)
                while (load_acquire(semaphore) != turn) {}
            __syncwarp();
        }
#pragma unroll
        for (int n = 0; n < kDqTiles; n++) red_add(sums + 128 * n, acc_dq()[n]);
        if (p.deterministic) {
            __syncwarp();
            if (lane_idx == 0) store_release(semaphore, turn + 1);
        }
    }

    // dK and dV go through sK and sV. Each warp has its own part of them.
    __device__ void store() {
        const int key = 64 * consumer + 16 * warp_idx, key0 = steps.tile.block * Shape::kBlockN + key;
        auto store_keys = [&](float (&acc)[kDTiles][4], float scale, SmemTile<64, kHeadDim> &to, const Tensor &x, int cols) {
#pragma unroll
            for (int d = 0; d < kDTiles; d += 2) {
                uint32_t packed[4];
                for (int j = 0; j < 4; j++) {
                    const bool is_key = key0 + lane_idx / 4 + j % 2 * 8 < steps.seq.seqlen_k;  // others: 0 · NaN
                    const float(&a)[4] = acc[d + j / 2];
                    packed[j] = is_key ? pack<T>(a[j % 2 * 2] * scale, a[j % 2 * 2 + 1] * scale) : 0;
                }
                stmatrix(packed, to.address(16 * warp_idx + lane_idx % 16, 8 * d + lane_idx / 16 * 8));
            }
            __syncwarp();
            store_some_rows(to, 16 * warp_idx, rows_of<uint16_t>(x, steps.tile.b, steps.tile.h_k, steps.seq.k_begin + key0),
                            x.row_stride, steps.seq.padded_k - key0, cols);
        };
        store_keys(acc_dk, scores.softmax_scale, shared.sK[consumer], p.dk, p.head_dim);
        store_keys(acc_dv, 1.f, shared.sV[consumer], p.dv, p.head_dim_v);
    }
};

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kNThreads, 1) flash_bwd(const __grid_constant__ BwdParams<Shape> p) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    __trap();
#else
    auto &shared = shared_memory<BwdSharedMemory<Shape>>();
    if (threadIdx.x == 0) shared.init_barriers();
    if (threadIdx.x == 32) shared.steps = Steps<Shape>(p);
    __syncthreads();
    const Steps<Shape> &steps = shared.steps;
    const uint32_t warpgroup_idx = warp_uniform(threadIdx.x / 128);
    if (warpgroup_idx == 0) {
        warpgroup_reg_dealloc<Shape::kProducerRegisters>();
        if (threadIdx.x == 0) load_tiles<Shape>(p, shared, steps);
        else if (threadIdx.x / 32 == 1) load_numbers<Shape>(p, shared, steps);
    } else {
        warpgroup_reg_alloc<Shape::kConsumerRegisters>();
        BwdConsumer<T, Shape>{p, shared, steps, int(warpgroup_idx) - 1}.run();
    }
#endif
}

// dq of kBlockM rows: their sums times softmax_scale, as rows of q's type.
template <typename T, typename Shape>
__global__ void __launch_bounds__(32 * Shape::kDqWarps) flash_bwd_dq(const __grid_constant__ AttnBackwardParams p) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    __trap();
#else
    const Tile tile = RowTiles<Shape::kBlockM>::at(p, blockIdx.x);
    const Sequence seq(p, tile.b);
    const RowTiles<Shape::kBlockM> row_tiles(p);
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    const int64_t at = row_tiles.first_tile(tile.b, p.nheads) + int64_t(tile.h) * row_tiles.slots + tile.block;
    const float *sums = DqWorkspace<Shape>::sums(p, at, warp_idx), scale = Scores<>(p).softmax_scale;
    const int row0 = tile.block * Shape::kBlockM + warp_idx % 4 * 16 + lane_idx / 4;
    const int col0 = warp_idx / 4 * Shape::kDqCols + lane_idx % 4 * 2;
    const float *lse_log2 = p.lse_log2 + lse_index(p, seq, tile.b, tile.h);
#pragma unroll
    for (int n = 0; n < Shape::kDqCols / 8; n++) {
        const float4 x = *reinterpret_cast<const float4 *>(sums + 128 * n);
        for (int i = 0; i < 2; i++) {
            const int row = row0 + 8 * i, col = col0 + 8 * n;
            if (row >= seq.padded_q || col >= p.head_dim) continue;
            const bool is_empty = row >= seq.seqlen_q || lse_log2[row] == INFINITY;  // the sum may be NaN
            const uint32_t packed = pack<T>((i ? x.z : x.x) * scale, (i ? x.w : x.y) * scale);
            *reinterpret_cast<uint32_t *>(rows_of<T>(p.dq, tile.b, tile.h, seq.q_begin + row) + col) = is_empty ? 0 : packed;
        }
    }
#endif
}

template <typename T, typename Shape> void launch_bwd(const AttnBackwardParams &p) {
    static_assert(sizeof(BwdSharedMemory<Shape>) <= 227 << 10);
    constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM;
    const DqWorkspace<Shape> workspace(p);
    if (p.dq.data) check_cuda(cudaMemsetAsync(p.workspace, 0, workspace.bytes(p.deterministic), static_cast<cudaStream_t>(p.stream)));
    auto tma = [&](const char *name, const Tensor &x, int heads, int rows, int head_dim, int box_rows) {
        return make_tma_tensor<kHeadDim>(name, x, p.batch_size, heads, rows, head_dim, box_rows);
    };
    const BwdParams<Shape> params{p,
                                  tma("q", p.q, p.nheads, p.seqlen_q, p.head_dim, kBlockM),
                                  tma("k", p.k, p.nheads_k, p.seqlen_k, p.head_dim, 64),
                                  tma("v", p.v, p.nheads_k, p.seqlen_k, p.head_dim_v, 64),
                                  tma("dout", p.dout, p.nheads, p.seqlen_q, p.head_dim_v, kBlockM)};
    launch(flash_bwd<T, Shape>, KeyTiles<Shape::kBlockN>::count(p), Shape::kNThreads, sizeof(BwdSharedMemory<Shape>),
           p.stream, params);
    if (p.dq.data) launch(flash_bwd_dq<T, Shape>, workspace.tiles, 32 * Shape::kDqWarps, 0, p.stream, p);
}

template <typename F> auto with_bwd_shape(const AttnBackwardParams &p, F f) {
    if (p.max_head_dim() <= 64) return f.template operator()<BwdShape<64, 2, 4>>();
    return f.template operator()<BwdShape<128, 2, 2>>();
}

int64_t backward_workspace(const AttnBackwardParams &p) {
    return with_bwd_shape(p, [&]<typename Shape> { return DqWorkspace<Shape>(p).bytes(p.deterministic); });
}

void flash_backward(const AttnBackwardParams &p) {
    simt::preprocess_backward(p);
    with_bwd_shape(p, [&]<typename Shape> {
        if (p.dtype == DType::kFloat16) launch_bwd<__half, Shape>(p);
        else launch_bwd<__nv_bfloat16, Shape>(p);
    });
}

}  // namespace sm90
