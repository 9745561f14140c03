// What a block of threads of flash_bwd_sm90.cu works at: its steps, its shared memory, and its producer. One thread
// asks TMA for K and V, and for Q and dO step by step. One warp loads what P and dS need of each row. Two more threads
// keep the turns of a deterministic pass. flash_bwd_wide_sm90.cu has StepAt, place_of_row() and clear_outside() from
// here.
//
// Read next: flash_bwd_sm90.cu, the consumers.
#pragma once

#include "bwd_workspace_sm90.cuh"
#include "score_mods.cuh"

namespace sm90 {

template <typename Shape> struct BwdParams : AttnBackwardParams {
    TmaTensor q_tma, k_tma, v_tma, dout_tma;
    ScoreFactors<float> factors;
    float score_factor, dk_scale, dv_scale;  // P = exp2(score_factor · score - lse_log2)
};

// The steps of a block of threads: its rows, of one query head after the other.
template <typename Shape> struct Steps {
    Tile tile;  // tile.h is the first head
    Sequence seq;
    BlockRange blocks;                  // of rows
    int first_row;                      // that sees a key
    int split_idx, splits, h_end;       // this block has the heads [tile.h, h_end)

    // Blocks that wait for their turn are numbered as they start, and wait for lower numbers alone: those have started.
    __device__ static int index(const BwdParams<Shape> &p) {
        return p.deterministic && p.dq.data ? atomicAdd(BwdWorkspace<Shape>(p).ticket(p), 1) : int(blockIdx.x);
    }
    __device__ explicit Steps(const BwdParams<Shape> &p) : Steps(p, index(p), BwdWorkspace<Shape>(p).max_splits) {}
    __device__ Steps(const BwdParams<Shape> &p, int idx, int max_splits)
        : tile(KeyTiles<Shape::kBlockN>::at(p, idx / max_splits)), seq(p, tile.b),
          blocks(Mask(seq, p).row_blocks<Shape::kBlockM, Shape::kBlockN>(tile.block * Shape::kBlockN)),
          first_row(Mask(seq, p).rows(0).begin), split_idx(idx % max_splits),
          splits(min(max_splits, num_splits<Shape>(p, seq.seqlen_q, seq.seqlen_k))) {
        const int group = p.nheads / p.nheads_k, h = tile.h;
        tile.h = h + group * min(split_idx, splits) / splits, h_end = h + group * min(split_idx + 1, splits) / splits;
    }
    // In a deterministic pass, how many blocks of keys add to dQ of these rows before this one does.
    __device__ int turn(const AttnBackwardParams &p, int m_block) const {
        const auto of_keys = Mask(seq, p).key_blocks<Shape::kBlockM, Shape::kBlockN>(m_block * Shape::kBlockM);
        return KeyTiles<Shape::kBlockN>::is_last_first(p) ? of_keys.end - 1 - tile.block : tile.block - of_keys.begin;
    }
    __device__ int count() const { return (h_end - tile.h) * max(0, blocks.end - blocks.begin); }
};
// A step. The producer tells the consumers, which have no registers for all of this.
struct StepAt {
    int h, m_block;
    int dq_tile;   // of all tiles of query rows
    bool is_full;  // no mask
    float slope;   // of ALiBi, see score_mods.cuh

    __device__ void advance(const BlockRange &blocks) {
        if (++m_block == blocks.end) m_block = blocks.begin, h++;
    }
};

// Of 16 rows a lane needs the numbers of four, those of its accumulators. They are neighbours in shared memory.
__device__ inline int place_of_row(int row) {
    return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

// Rows of a tile before `begin` or from `end` on become 0, by two consumers.
template <int kRows, int kHeadDim> __device__ void clear_outside(SmemTile<kRows, kHeadDim> &tile, int begin, int end) {
    constexpr int kVecs = SmemTile<kRows, kHeadDim>::kRowBytes / 16;
#pragma unroll 1
    for (int i = threadIdx.x - 128; i < tile.kPanels * kRows * kVecs; i += 256)
        if (const int row = i / kVecs % kRows; row < begin || row >= end)
            reinterpret_cast<uint4 *>(tile.panel)[i] = uint4{};
}
__device__ inline void after_clear() {  // before wgmma reads the tile
    fence_proxy_async();
    barrier_sync(kAllConsumers, 256);
}

template <typename Shape> struct BwdSharedMemory {
    static constexpr int kBlockM = Shape::kBlockM, kHeadDim = Shape::kHeadDim, kStages = Shape::kStages;
    SmemTile<64, kHeadDim> sK[Shape::kConsumers], sV[Shape::kConsumers];  // then dK and dV
    SmemTile<kBlockM, kHeadDim> sQ[kStages], sdO[kStages];
    SmemTile<kBlockM, Shape::kBlockN> sdS[2];  // [rows, keys]
    // In the order of place_of_row().
    alignas(16) float lse_log2[kStages][kBlockM], delta[kStages][kBlockM];
    StepAt at[2 * kStages];  // of this step and those before it: dQ is late
    Ring<1> keys;        // sK and sV
    Ring<kStages> rows;  // sQ, sdO, lse_log2, delta and `at` of a step
    Ring<2> ds;          // from all consumers to all of them
    Ring<2> dq_turns;    // if deterministic: steps for which it is this block's turn to add dQ
    Barrier dq_added[2]; // all warps have added it
    Steps<Shape> steps;

    __device__ void init_barriers() {
        keys.init(Shape::kNWarps), rows.init(Shape::kNWarps, 2), ds.init(Shape::kDqWarps, Shape::kNWarps);
        dq_turns.init(1);
        for (Barrier &added : dq_added) mbarrier_init(added, Shape::kDqWarps);
        fence_mbarrier_init();
    }
};

// One thread asks TMA for K and V, and for Q and dO step by step.
template <typename Shape>
__device__ void load_tiles(const BwdParams<Shape> &p, BwdSharedMemory<Shape> &shared, const Steps<Shape> &steps) {
    const Tile &tile = steps.tile;
    const int key0 = steps.seq.k_begin + tile.block * Shape::kBlockN, num_steps = steps.count();
    if (num_steps == 0) return;
    mbarrier_arrive_expect_tx(shared.keys.full_barrier(0), sizeof(shared.sK) + sizeof(shared.sV));
    for (int c = 0; c < Shape::kConsumers; c++) {
        load_bytes(shared.sK[c], p.k_tma, shared.keys.full_barrier(0), key0 + 64 * c, tile.h_k, tile.b);
        load_bytes(shared.sV[c], p.v_tma, shared.keys.full_barrier(0), key0 + 64 * c, tile.h_k, tile.b);
    }
    StepAt at{tile.h, steps.blocks.begin};
#pragma unroll 1
    for (int i = 0; i < num_steps; i++, at.advance(steps.blocks)) {
        shared.rows.producer_acquire(i);
        Barrier &full = shared.rows.full_barrier(i);
        const int row = steps.seq.q_begin + at.m_block * Shape::kBlockM, stage = i % Shape::kStages;
        mbarrier_arrive_expect_tx(full, sizeof(shared.sQ[0]) + sizeof(shared.sdO[0]));
        load_bytes(shared.sQ[stage], p.q_tma, full, row, at.h, tile.b);
        load_bytes(shared.sdO[stage], p.dout_tma, full, row, at.h, tile.b);
    }
}

// A warp loads lse_log2 and delta. For rows that see no key, or that are beyond the end, P is 0. This warp alone reads
// what the previous kernel wrote, that of preprocess_backward(). All else that a block reads is older, since that
// kernel is launched plainly. At the end it tells flash_bwd_dq that this block has added its dQ. Where keys are split,
// flash_bwd_dq waits for flash_bwd_dkv instead.
template <typename Shape>
__device__ void load_numbers(const BwdParams<Shape> &p, BwdSharedMemory<Shape> &shared, const Steps<Shape> &steps) {
    constexpr int kBlockM = Shape::kBlockM, kCount = (kBlockM + 31) / 32;
    const int lane_idx = threadIdx.x % 32, num_steps = steps.count();
    device::let_next_kernel_begin();
    device::wait_for_previous_kernel();
    StepAt at{steps.tile.h, steps.blocks.begin};
#pragma unroll 1
    for (int i = 0; i < num_steps; i++, at.advance(steps.blocks)) {
        const int64_t head = lse_index(p, steps.seq, steps.tile.b, at.h);
        float lse_log2[kCount], delta[kCount];
#pragma unroll
        for (int j = 0; j < kCount; j++) {
            const int row = at.m_block * kBlockM + 32 * j + lane_idx;
            const bool is_row = row >= steps.first_row && row < steps.seq.seqlen_q;
            lse_log2[j] = is_row ? p.lse_log2[head + row] : INFINITY;
            delta[j] = is_row ? static_cast<const float *>(p.delta)[head + row] : 0.f;
        }
        shared.rows.producer_acquire(i);
        const int stage = i % Shape::kStages;
#pragma unroll
        for (int j = 0; j < kCount; j++)
            if (const int row = 32 * j + lane_idx; row < kBlockM) {
                shared.lse_log2[stage][place_of_row(row)] = lse_log2[j];
                shared.delta[stage][place_of_row(row)] = delta[j];
            }
        if (lane_idx == 0) {
            const RowTiles<kBlockM> tiles(p);
            at.dq_tile = tiles.first_tile(steps.tile.b, p.nheads) + at.h * tiles.slots + at.m_block;
            at.is_full = steps.blocks.is_full(at.m_block);
            if (p.alibi_slopes)
                at.slope = p.alibi_slopes[steps.tile.b * p.alibi_batch_stride + at.h] * p.factors.per_unit;
            shared.at[i % (2 * Shape::kStages)] = at;
        }
        __syncwarp();
        if (lane_idx == 0) mbarrier_arrive(shared.rows.full_barrier(i));
    }
    if (num_steps > 0) barrier_sync(kStepsDone, 128 * Shape::kConsumers + 32);
    if (lane_idx == 0 && p.dq.data && steps.splits == 1)
        atomic_add_acq_rel(BwdWorkspace<Shape>(p).dq_arrivals(p, steps.tile), 1);
}

// In a deterministic pass, blocks of keys add to a tile of dQ one after the other. A thread of warp 2 waits until it is
// this block's turn, and the consumers may add then. When all have, a thread of warp 3 tells the next block.
template <typename Shape>
__device__ void keep_turns(const BwdParams<Shape> &p, BwdSharedMemory<Shape> &shared, const Steps<Shape> &steps) {
    const RowTiles<Shape::kBlockM> tiles(p);
    const BwdWorkspace<Shape> workspace(p);
    const bool waits = threadIdx.x / 32 == 2;
    const int first_tile = tiles.first_tile(steps.tile.b, p.nheads), num_steps = steps.count();
    StepAt at{steps.tile.h, steps.blocks.begin};
#pragma unroll 1
    for (int i = 0; i < num_steps; i++, at.advance(steps.blocks)) {
        int *semaphore = workspace.dq_semaphore(p, first_tile + at.h * tiles.slots + at.m_block);
        const int turn = steps.turn(p, at.m_block);
        if (waits) {
            shared.dq_turns.producer_acquire(i);
            while (load_acquire(semaphore) != turn) {}
            mbarrier_arrive(shared.dq_turns.full_barrier(i));
        } else {
            mbarrier_wait(shared.dq_added[i % 2], i / 2 % 2);
            store_release(semaphore, turn + 1);
            mbarrier_arrive(shared.dq_turns.empty[i % 2]);
        }
    }
}

}  // namespace sm90
