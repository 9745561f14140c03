// What a block of threads of flash_bwd_sm90.cu works at: its tiles of keys, their steps, its shared memory, and the
// four warps of its producer. The first one asks TMA for K and V of a tile, and for Q and dO step by step. The second
// one loads what P and dS need of each row. The third one takes tiles. The fourth one tells flash_bwd_dq when dQ of a
// tile has been added. In a deterministic pass the last two keep its turns as well. flash_bwd_wide_sm90.cu uses all of
// this that is about a single tile.
#pragma once

#include "mods/score_mods.cuh"
#include "sm90/bwd/workspace.cuh"

namespace sm90 {

template <typename Shape> struct BwdParams : AttnBackwardParams {
    TmaTensor q_tma, k_tma, v_tma, dout_tma;
    BwdWorkspace<Shape> sums;    // where those of dQ are
    TileOrder<Divisor> order;    // of the tiles of keys
    int num_tiles;               // of keys; each counts as often as it may be split
    bool rows_first;             // all query heads of a tile go through the same rows together, see Steps
    uint32_t together;           // key heads of a sample that go together if it is alone; a power of 2
    ScoreFactors<float> factors;
    float score_factor, dk_scale, dv_scale;  // P = exp2(score_factor · score - lse_log2)

    __host__ __device__ bool takes_turns() const { return deterministic && dq.data; }
};

// The steps of a tile of keys, or of a split of it: its rows, of one query head after the other.
//
// The order is another one where query heads share keys under a causal mask. All query heads of the tile take their
// turn at the same rows, then at the next rows. Tiles come in waves, of as many as a GPU computes at the same time.
// Those of an even wave begin together with the last rows, which all of them see, and go backwards. The short ones end
// first. Then the tiles of the odd wave begin, the long ones first: each later than the one before, and at later rows.
// They go forwards, so they are at the same rows, too, and all end at the last rows. So at any time, blocks are at two
// places of the rows at most. There, Q, dO and the sums of dQ of all heads should fit in L2. Deterministic passes and
// packed batches take tiles in another order, and with a window all tiles are short: all of these go head by head.
template <typename Shape> struct Steps {
    Tile tile;  // tile.h is the first head
    Sequence seq;
    BlockRange blocks;                  // of rows
    int first_row;                      // that sees a key
    int split_idx, splits, h_end;       // this split has the heads [tile.h, h_end)
    // Along the rows, with all heads at the same rows: 1 forwards, -1 backwards. 0: forwards, head by head.
    int direction;
    // Among the tiles and the steps of this block of threads. volatile: threads with few registers read it anew.
    volatile uint32_t tile_idx, first_step;

    // Of tile idx. Each member is written when it is known: the thread has few registers.
    __device__ void find(const BwdParams<Shape> &p, int idx) {
        const int max_splits = Shape::kMaxSplits == 1 ? 1 : p.sums.max_splits;
        tile = KeyTiles<Shape::kBlockN>::at(p, p.order, max_splits > 1 ? idx / max_splits : idx);
        split_idx = max_splits > 1 ? idx % max_splits : 0;
        seq = Sequence(p, tile.b);
        direction = !p.rows_first || p.window_left < seq.seqlen_k - 1 ? 0 : wave(p, max_splits) % 2 ? 1 : -1;
        first_row = Mask(seq, p).rows(0).begin;
        blocks = Mask(seq, p).row_blocks<Shape::kBlockM, Shape::kBlockN>(tile.block * Shape::kBlockN);
        const int group = p.order.heads_per_kv.value, h = tile.h;
        splits = 1, h_end = h + group;
        if (max_splits == 1) return;
        splits = p.sums.splits_of(p, seq);
        tile.h = h + group * min(split_idx, splits) / splits, h_end = h + group * min(split_idx + 1, splits) / splits;
    }
    // Which wave this tile would be in if its sample were alone. dk and dv must not depend on other samples.
    __device__ uint32_t wave(const BwdParams<Shape> &p, int max_splits) const {
        const uint32_t in_group = tile.h_k & p.together - 1;
        const uint32_t idx = (tile.h_k - in_group) * p.order.slots + tile.block * p.together + in_group;
        return (idx * max_splits + split_idx) * Shape::kTileBlocks / kTilesAtOnce;
    }
    // In a deterministic pass, how many blocks of keys add to dQ of these rows before this one does.
    __device__ int turn(const AttnBackwardParams &p, int m_block) const {
        const auto of_keys = Mask(seq, p).key_blocks<Shape::kBlockM, Shape::kBlockN>(m_block * Shape::kBlockM);
        return KeyTiles<Shape::kBlockN>::is_last_first(p) ? of_keys.end - 1 - tile.block : tile.block - of_keys.begin;
    }
    __device__ int count() const { return (h_end - tile.h) * max(0, blocks.end - blocks.begin); }
    __device__ uint32_t end() const { return first_step + count(); }
    // f(step, query head, block of rows) for each.
    template <typename F> __device__ void for_each(F f) const {
        int h = tile.h, m_block = direction < 0 ? blocks.end - 1 : blocks.begin;
        const uint32_t end_step = end();
#pragma unroll 1
        for (uint32_t item = first_step; item < end_step; item++) {
            f(item, h, m_block);
            if (direction == 0 && ++m_block < blocks.end) continue;
            h++;
            if (direction == 0) m_block = blocks.begin;
            else if (h == h_end) h = tile.h, m_block += direction;
        }
    }
};
// A step. The producer tells the consumers, which have no registers for all of this.
struct StepAt {
    int h, m_block;
    int dq_tile;   // of all tiles of query rows
    bool is_full;  // no mask
    float slope;   // of ALiBi, see score_mods.cuh
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
// The same of several tiles of kRows rows, before wgmma reads them. What nothing sees may hold NaN, and 0 · NaN is NaN.
// What lies beyond the tensor is 0 already.
template <int kRows, typename... Tiles> __device__ void clear_tiles(int begin, int end, Tiles &...tiles) {
    if (begin <= 0 && end >= kRows) return;
    (clear_outside(tiles, begin, end), ...);
    fence_proxy_async();
    barrier_sync(kAllConsumers, 256);
}

template <typename Shape> struct BwdSharedMemory {
    static constexpr int kConsumers = Shape::kConsumers, kBlockM = Shape::kBlockM, kHeadDim = Shape::kHeadDim;
    static constexpr int kStages = Shape::kStages, kValueStages = Shape::kValueStages;
    SmemTile<64, kHeadDim> sK[2][kConsumers];             // of a tile and the next one
    SmemTile<64, kHeadDim> sV[kValueStages][kConsumers];  // then dK and dV on their way to memory
    SmemTile<kBlockM, kHeadDim> sQ[kStages], sdO[kStages];
    SmemTile<kBlockM, Shape::kBlockN> sdS[2];  // [rows, keys]
    // In the order of place_of_row().
    alignas(16) float lse_log2[kStages][kBlockM], delta[kStages][kBlockM];
    StepAt at[2 * kStages];   // of this step and those before it: dQ is late
    Steps<Shape> steps[4];    // of a tile, and of those before and after it
    Ring<4> tiles;            // `steps`, from the thread that takes tiles to all others
    Barrier is_loaded;        // all of a tile has been asked for
    Ring<2> keys;             // sK
    Ring<kValueStages> values[kConsumers];  // sV of a consumer
    Ring<kStages> rows;       // sQ, sdO, lse_log2, delta and `at` of a step
    Ring<2> ds;               // from all consumers to all of them
    Barrier dq_done[4];       // all warps have added dQ of a tile
    Ring<2> dq_turns;         // in a deterministic pass: steps for which it is this block's turn to add dQ
    Barrier dq_added[2];      // all warps have added it

    __device__ Steps<Shape> &steps_of(uint32_t t) { return steps[t % 4]; }
    __device__ void init_barriers() {
        tiles.init(Shape::kNWarps + 3), mbarrier_init(is_loaded, 1);
        keys.init(Shape::kNWarps), rows.init(Shape::kNWarps, 2);
        for (auto &ring : values) ring.init(4);
        ds.init(Shape::kDqWarps, Shape::kNWarps), dq_turns.init(1);
        for (Barrier &done : dq_done) mbarrier_init(done, Shape::kNWarps);
        for (Barrier &added : dq_added) mbarrier_init(added, Shape::kDqWarps);
        fence_mbarrier_init();
    }
};

// In a deterministic pass, tiles of keys add to a tile of dQ one after the other. One thread waits until it is this
// one's turn, and the consumers may add then. When all have, another thread tells the next one. The blocks of a pair
// add different columns. Each has turns of its own.
template <typename Shape>
__device__ int *dq_semaphore(const BwdParams<Shape> &p, const Steps<Shape> &steps, int h, int m_block, int rank) {
    const auto &tiles = p.sums.row_tiles;
    return p.sums.dq_semaphore(p, tiles.first_tile(steps.tile.b, p.nheads) + h * tiles.slots + m_block, rank);
}
template <typename Shape, typename Shared>
__device__ void wait_for_turn(const BwdParams<Shape> &p, Shared &shared, const Steps<Shape> &steps, uint32_t item,
                              int h, int m_block, int rank = 0) {
    const int turn = steps.turn(p, m_block), *semaphore = dq_semaphore(p, steps, h, m_block, rank);
    shared.dq_turns.producer_acquire(item);
    while (load_acquire(semaphore) != turn) {}
    mbarrier_arrive(shared.dq_turns.full_barrier(item));
}
template <typename Shape, typename Shared>
__device__ void end_turns(const BwdParams<Shape> &p, Shared &shared, const Steps<Shape> &steps, int rank = 0) {
    steps.for_each([&](uint32_t item, int h, int m_block) {
        mbarrier_wait(shared.dq_added[item % 2], item / 2 % 2);
        store_release(dq_semaphore(p, steps, h, m_block, rank), steps.turn(p, m_block) + 1);
        mbarrier_arrive(shared.dq_turns.empty[item % 2]);
    });
}

// Tells flash_bwd_dq that dQ of a tile of keys has been added. Where keys are split, it waits for flash_bwd_dkv
// instead.
template <typename Shape> __device__ void report_dq(const BwdParams<Shape> &p, const Steps<Shape> &steps) {
    if (p.dq.data && steps.splits == 1) atomic_add_acq_rel(p.sums.dq_arrivals(p, steps.tile), 1);
}

// dK and dV of keys that no row sees, by a warp.
template <typename Shape> __device__ void store_zeros(const BwdParams<Shape> &p, const Steps<Shape> &steps) {
    if (steps.split_idx >= steps.splits) return;  // a split that its sample does without
    if (steps.splits > 1 && steps.tile.block * Shape::kBlockN >= steps.seq.seqlen_k) return;  // sums that nobody reads
    constexpr int kBlockN = Shape::kBlockN, kHeadDim = Shape::kHeadDim;
    const Tile &tile = steps.tile;
    auto clear = [&](void *to, int64_t row_bytes, int rows, int vecs, int kVecs) {  // the first vecs of kVecs in a row
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < rows * kVecs; i += 32)
            if (i % kVecs < vecs)
                reinterpret_cast<uint4 *>(static_cast<char *>(to) + i / kVecs * row_bytes)[i % kVecs] = uint4{};
    };
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        const Tensor &x = i == 0 ? p.dk : p.dv;
        const int cols = i == 0 ? p.head_dim : p.head_dim_v;
        if (steps.splits == 1)
            clear(rows_of<uint16_t>(x, tile.b, tile.h_k, steps.seq.k_begin + tile.block * kBlockN), 2 * x.row_stride,
                  min(kBlockN, steps.seq.padded_k - tile.block * kBlockN), (cols + 7) / 8, kHeadDim / 8);
        else
            clear(p.sums.dkv_sums(p, steps.split_idx, tile) + i * p.sums.dkv_floats, 4 * kHeadDim, kBlockN,
                  kHeadDim / 4, kHeadDim / 4);
    }
}

// A warp takes tiles until none is left. It takes a tile when all of the one before has been asked for. If it were
// earlier, the tile would wait here, and a block without work could not have it. The other warps never see a tile
// without steps. In a deterministic pass a tile waits for lower ones alone: blocks that run have taken those. The turn
// of its last step may come late. So the warp takes the next tile before it waits for that.
template <typename Shape> __device__ void take_tiles(const BwdParams<Shape> &p, BwdSharedMemory<Shape> &shared) {
    const int lane_idx = threadIdx.x % 32;
#pragma unroll 1
    for (uint32_t t = 0;; t++) {
        if (t > 0) mbarrier_wait(shared.is_loaded, (t - 1) % 2);
        shared.tiles.producer_acquire(t);
        Steps<Shape> &steps = shared.steps_of(t);
        if (lane_idx == 0) steps.tile_idx = t, steps.first_step = t == 0 ? 0 : shared.steps_of(t - 1).end();
        bool is_due = p.takes_turns() && t > 0;  // the turn of the last step of the tile before
        auto wait_for_last_turn = [&] {
            const Steps<Shape> &before = shared.steps_of(steps.tile_idx - 1);
            if (is_due && lane_idx == 0)
                wait_for_turn<Shape>(p, shared, before, before.end() - 1, before.h_end - 1, before.blocks.end - 1);
            is_due = false;
        };
        for (;;) {
            if (lane_idx == 0) {
                const int idx = atomicAdd(p.sums.ticket(p), 1);
                if (idx < p.num_tiles) steps.find(p, idx);
                steps.tile.is_valid = idx < p.num_tiles;
            }
            __syncwarp();
            if (!steps.tile.is_valid || steps.count() > 0) break;
            wait_for_last_turn();
            store_zeros<Shape>(p, steps);
            if (lane_idx == 0) {
                wait_for_previous_kernel();  // flash_bwd_dq relies on it
                report_dq<Shape>(p, steps);
            }
            __syncwarp();
        }
        if (lane_idx == 0) mbarrier_arrive(shared.tiles.full_barrier(steps.tile_idx));
        wait_for_last_turn();
        if (lane_idx == 0 && p.takes_turns() && steps.tile.is_valid)
            steps.for_each([&](uint32_t item, int h, int m_block) {
                if (item != steps.end() - 1) wait_for_turn<Shape>(p, shared, steps, item, h, m_block);
            });
        __syncwarp();
        if (!steps.tile.is_valid) break;
        t = steps.tile_idx;  // read anew
    }
}

// One thread asks TMA for K and V of a tile, and for Q and dO step by step.
template <typename Shape>
__device__ void load_steps(const BwdParams<Shape> &p, BwdSharedMemory<Shape> &shared, const Steps<Shape> &steps) {
    const Tile &tile = steps.tile;
    const uint32_t t = steps.tile_idx;
    auto load_keys = [&](SmemTile<64, Shape::kHeadDim> &to, const TmaTensor &x, Barrier &full, int c) {
        load_bytes(to, x, full, steps.seq.k_begin + tile.block * Shape::kBlockN + 64 * c, tile.h_k, tile.b);
    };
    shared.keys.producer_acquire(t);
    mbarrier_arrive_expect_tx(shared.keys.full_barrier(t), sizeof(shared.sK[0]));
    for (int c = 0; c < Shape::kConsumers; c++)
        load_keys(shared.sK[t % 2][c], p.k_tma, shared.keys.full_barrier(t), c);
    steps.for_each([&](uint32_t item, int h, int m_block) {
        shared.rows.producer_acquire(item);
        Barrier &full = shared.rows.full_barrier(item);
        const int row = steps.seq.q_begin + m_block * Shape::kBlockM, stage = item % Shape::kStages;
        mbarrier_arrive_expect_tx(full, sizeof(shared.sQ[0]) + sizeof(shared.sdO[0]));
        load_bytes(shared.sQ[stage], p.q_tma, full, row, h, tile.b);
        load_bytes(shared.sdO[stage], p.dout_tma, full, row, h, tile.b);
        if (item != steps.first_step) return;
#pragma unroll 1
        for (int c = 0; c < Shape::kConsumers; c++) {  // dK and dV of the tile before leave by sV
            shared.values[c].producer_acquire(t);
            mbarrier_arrive_expect_tx(shared.values[c].full_barrier(t), sizeof(shared.sV[0][0]));
            load_keys(shared.sV[t % Shape::kValueStages][c], p.v_tma, shared.values[c].full_barrier(t), c);
        }
    });
}

// A warp loads lse_log2 and delta of a tile's steps. For rows that see no key, or that are beyond the end, P is 0.
template <typename Shape, typename Shared>
__device__ void load_numbers(const BwdParams<Shape> &p, Shared &shared, const Steps<Shape> &steps) {
    constexpr int kBlockM = Shape::kBlockM, kCount = (kBlockM + 31) / 32;
    const int lane_idx = threadIdx.x % 32;
    steps.for_each([&](uint32_t item, int h, int m_block) {
        const int64_t head = lse_index(p, steps.seq, steps.tile.b, h);
        float lse_log2[kCount], delta[kCount];
#pragma unroll
        for (int j = 0; j < kCount; j++) {
            const int row = m_block * kBlockM + 32 * j + lane_idx;
            const bool is_row = row >= steps.first_row && row < steps.seq.seqlen_q;
            lse_log2[j] = is_row ? p.lse_log2[head + row] : INFINITY;
            delta[j] = is_row ? static_cast<const float *>(p.delta)[head + row] : 0.f;
        }
        shared.rows.producer_acquire(item);
        const int stage = item % Shape::kStages, place = place_of_row(thread_idx() % 32);
#pragma unroll
        for (int j = 0; j < kCount; j++)
            if (32 * j + lane_idx < kBlockM)
                shared.lse_log2[stage][32 * j + place] = lse_log2[j], shared.delta[stage][32 * j + place] = delta[j];
        if (lane_idx == 0) {
            const auto &tiles = p.sums.row_tiles;
            StepAt &at = shared.at[item % (2 * Shape::kStages)];
            at.h = h, at.m_block = m_block, at.is_full = steps.blocks.is_full(m_block);
            at.dq_tile = tiles.first_tile(steps.tile.b, p.nheads) + h * tiles.slots + m_block;
            at.slope = p.alibi_slopes
                           ? p.alibi_slopes[steps.tile.b * p.alibi_batch_stride + h] * p.factors.per_unit : 0.f;
        }
        __syncwarp();
        if (lane_idx == 0) mbarrier_arrive(shared.rows.full_barrier(item));
    });
}

// The producer warpgroup. The warp of load_numbers() alone reads what the previous kernel wrote, that of
// preprocess_backward(). All else that a block reads is older, since that kernel is launched plainly.
template <typename Shape> __device__ void produce_steps(const BwdParams<Shape> &p, BwdSharedMemory<Shape> &shared) {
    auto for_tiles = [&](auto f) {
#pragma unroll 1
        for (uint32_t t = 0;; t++) {
            shared.tiles.consumer_wait(t);  // unobserved by the emulator: some threads would run on forever
            const Steps<Shape> &steps = shared.steps_of(t);
            if (!steps.tile.is_valid) break;
            f(steps);
            t = steps.tile_idx;  // read anew
            if (threadIdx.x / 32 == 1) __syncwarp();  // unobserved by the emulator: `steps` change much later
            shared.tiles.consumer_release(t, threadIdx.x % 32);
        }
    };
    if (threadIdx.x == 0) {
        for_tiles([&](const Steps<Shape> &steps) {
            load_steps<Shape>(p, shared, steps);
            mbarrier_arrive(shared.is_loaded);
        });
    } else if (threadIdx.x / 32 == 1) {
        let_next_kernel_begin();
        wait_for_previous_kernel();
        for_tiles([&](const Steps<Shape> &steps) { load_numbers<Shape>(p, shared, steps); });
    } else if (threadIdx.x / 32 == 2) {
        take_tiles<Shape>(p, shared);
    } else if (threadIdx.x == 96) {
        for_tiles([&](const Steps<Shape> &steps) {
            if (p.takes_turns()) end_turns<Shape>(p, shared, steps);
            const uint32_t t = steps.tile_idx;
            mbarrier_wait(shared.dq_done[t % 4], t / 4 % 2);  // unobserved by the emulator: flash_bwd_dq comes later
            report_dq<Shape>(p, steps);
        });
    }
}

}  // namespace sm90
