// Producer warps of flash_bwd_sm90.cu: one loads tiles, one lse and delta, one takes work items, one reports added dQ.
// If deterministic, the last two keep turns. flash_bwd_wide_sm90.cu uses some of this.
#pragma once

#include "common/block_mask.cuh"
#include "mods/score_mods.cuh"
#include "sm90/bwd/dq.cuh"

namespace sm90 {

template <typename Shape> struct BwdParams : Shape::Input {
    TmaTensor q_tma, k_tma, v_tma, dout_tma;
    BwdWorkspace<Shape> layout;
    TileOrder<Divisor> order;
    int num_items;             // key tiles · max_splits
    bool rows_first;           // see BwdWorkItem
    uint32_t together;         // key heads together in a lone sample; a power of 2
    ScoreFactors<float> factors;
    float score_factor, dk_scale, dv_scale;  // P = exp2(score_factor · score - lse_log2)

    __host__ __device__ bool takes_turns() const { return this->deterministic && this->dq.data; }
};

// A tile of keys, or a split of it, and its row blocks, head by head or rows first.
// Rows first: query heads that share keys under a causal mask all take the same rows, then the next. A wave is as many
// tiles as a GPU computes at once. Even waves begin at the last rows, which all tiles see, and go backwards. As short
// tiles end, long ones of the odd wave go forwards from their first rows. So blocks are at two places of the rows, and
// Q, dO and dq_accum there should fit in L2, for all heads. Deterministic passes and packed batches order tiles
// otherwise, and windows make them short: these go head by head.
template <typename Shape> struct alignas(8) BwdWorkItem {  // so that two members are read at once
    using Mask = Shape::Mask;
    Tile tile;
    Sequence seq;
    BlockRange blocks;             // of rows
    int first_row;                 // that sees a key
    int split_idx, splits, h_end;  // heads [tile.h, h_end)
    int direction;                 // rows first: 1 forwards, -1 backwards; 0: head by head
    int num_seen, last_head, last_m_block;  // with a block mask: row blocks of all heads, and the last one
    // A block counts items, and row blocks: here [begin, end()). volatile: threads with few registers reread them.
    volatile uint32_t idx, begin;

    __device__ void find(const BwdParams<Shape> &p, int i) {  // writes members as soon as known: registers are few
        const int max_splits = Shape::kMaxSplits == 1 ? 1 : p.layout.max_splits;
        tile = KeyTiles<Shape::kBlockN>::at(p, p.order, max_splits > 1 ? i / max_splits : i);
        split_idx = max_splits > 1 ? i % max_splits : 0;
        seq = Sequence(p, tile.b);
        direction = !p.rows_first || p.window_left < seq.seqlen_k - 1 ? 0 : wave(p, max_splits) % 2 ? 1 : -1;
        first_row = Mask(seq, p).rows(0).begin;
        blocks = Mask(seq, p).template row_blocks<Shape::kBlockM, Shape::kBlockN>(tile.block * Shape::kBlockN);
        const int group = p.order.heads_per_kv.value, h = tile.h;
        splits = 1, h_end = h + group;
        if (max_splits > 1) {
            splits = p.layout.splits_of(p, seq);
            tile.h = h + group * min(split_idx, splits) / splits;
            h_end = h + group * min(split_idx + 1, splits) / splits;
        }
        if constexpr (Shape::kMasked) {
            num_seen = 0;
#pragma unroll 1
            for (int head = tile.h; head < h_end; head++) {
                const auto seen = seen_blocks(p, head);
                if (const int n = seen.count(blocks.begin, blocks.end))
                    num_seen += n, last_head = head, last_m_block = seen.last(blocks.begin, blocks.end);
            }
        }
    }
    __device__ auto seen_blocks(const BwdParams<Shape> &p, int h) const {
        constexpr int kUnits = Shape::kBlockN / Unit::kSize;
        return HeadMask(p.block_mask, tile.b, h)
            .template rows_of<kUnits, Shape::kBlockM / Unit::kSize>(tile.block * kUnits);
    }
    // The wave if the sample were alone: dk and dv must not depend on other samples.
    __device__ uint32_t wave(const BwdParams<Shape> &p, int max_splits) const {
        const uint32_t in_group = tile.h_k & p.together - 1;
        const uint32_t i = (tile.h_k - in_group) * p.order.slots + tile.block * p.together + in_group;
        return (i * max_splits + split_idx) * Shape::kTileBlocks / kTilesAtOnce;
    }
    // Key tiles that add dQ of these rows before this one.
    __device__ int turn(const AttnBackwardParams &p, int h, int m_block) const {
        if constexpr (Shape::kMasked) {
            constexpr int kRows = Shape::kBlockM / Unit::kSize;
            const BlockRange keys =
                Mask(seq, p).template key_blocks<Shape::kBlockM, Shape::kBlockN>(m_block * Shape::kBlockM);
            const auto seen = HeadMask(p.block_mask, tile.b, h)
                                  .template keys_of<kRows, Shape::kBlockN / Unit::kSize>(m_block * kRows);
            return KeyTiles<Shape::kBlockN>::is_last_first(p) ? seen.count(tile.block + 1, keys.end)
                                                              : seen.count(keys.begin, tile.block);
        }
        return dq_turn<Shape>(p, Mask(seq, p), tile, m_block);
    }
    __device__ int count() const {  // row blocks of all heads
        return Shape::kMasked ? num_seen : (h_end - tile.h) * max(0, blocks.end - blocks.begin);
    }
    __device__ uint32_t end() const { return begin + count(); }
    template <typename F> __device__ void for_each(const BwdParams<Shape> &p, F f) const {  // f(i, query head, m_block)
        if constexpr (Shape::kMasked) {
            uint32_t i = begin;
#pragma unroll 1
            for (int h = tile.h; h < h_end; h++) {
                seen_blocks(p, h).for_each(blocks.begin, blocks.end, [&](int m_block) { f(i++, h, m_block); });
            }
            return;
        }
        int h = tile.h, m_block = direction < 0 ? blocks.end - 1 : blocks.begin;
        const uint32_t i_end = end();
#pragma unroll 1
        for (uint32_t i = begin; i < i_end; i++) {
            f(i, h, m_block);
            if (direction == 0 && ++m_block < blocks.end) continue;
            h++;
            if (direction == 0) m_block = blocks.begin;
            else if (h == h_end) h = tile.h, m_block += direction;
        }
    }
};
struct RowBlock {  // consumers have no registers to find it
    int h, m_block;
    int dq_tile;   // among all tiles of rows
    bool is_full;
    float slope;
    int unit[2][2];  // of a block mask, [keys / 64, rows / 64]
};

// Place of a row's lse and delta. The four of 16 rows that a lane needs are neighbours.
__device__ inline int slot_of_row(int row) {
    return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

template <typename Shape> struct BwdSharedMemory {
    static constexpr int kConsumers = Shape::kConsumers, kBlockM = Shape::kBlockM, kHeadDim = Shape::kHeadDim;
    static constexpr int kHeadDimV = Shape::kHeadDimV, kStages = Shape::kStages, kValueStages = Shape::kValueStages;
    SmemTile<64, kHeadDim> sK[2][kConsumers];              // of two work items
    SmemTile<64, kHeadDimV> sV[kValueStages][kConsumers];  // then dK and dV
    SmemTile<kBlockM, kHeadDim> sQ[kStages];
    SmemTile<kBlockM, kHeadDimV> sdO[kStages];
    SmemTile<kBlockM, Shape::kBlockN> sdS[2];  // [rows, keys]
    alignas(16) float lse_log2[kStages][kBlockM], delta[kStages][kBlockM];  // by slot_of_row()
    RowBlock row_blocks[2 * kStages];  // dQ is late
    BwdWorkItem<Shape> work_items[4];
    Ring<4> work;
    Barrier is_loaded;        // a work item has been asked for
    Ring<2> keys;
    Ring<kValueStages> values[kConsumers];
    Ring<kStages> rows;       // sQ, sdO, lse_log2, delta, row_blocks
    Ring<2> ds;               // sdS, from all consumers to all
    Barrier dq_done[4];       // all dQ of an item has been added
    Ring<2> dq_turns;         // if deterministic
    Barrier dq_added[2];

    __device__ BwdWorkItem<Shape> &work_of(uint32_t t) { return work_items[t % 4]; }
    __device__ RowBlock &row_block(uint32_t i) { return row_blocks[i % (2 * kStages)]; }
    __device__ void init_barriers() {
        work.init(Shape::kNWarps + 3), mbarrier_init(is_loaded, 1);
        keys.init(Shape::kNWarps), rows.init(Shape::kNWarps, 2);
        for (auto &ring : values) ring.init(4);
        ds.init(Shape::kDqWarps, Shape::kNWarps), dq_turns.init(1);
        for (Barrier &done : dq_done) mbarrier_init(done, Shape::kNWarps);
        for (Barrier &added : dq_added) mbarrier_init(added, Shape::kDqWarps);
        fence_mbarrier_init();
    }
};

// Turns of key tiles, if deterministic: one thread waits for the turn, consumers add dQ, another thread ends it. Blocks
// of a pair add different columns, in turns of their own.
template <typename Shape>
__device__ int *dq_semaphore(const BwdParams<Shape> &p, const BwdWorkItem<Shape> &work, int h, int m_block, int rank) {
    return p.layout.dq_semaphore(p, p.layout.row_tile(p, work.tile.b, h, m_block), rank);
}
template <typename Shape, typename Shared>
__device__ void wait_for_turn(const BwdParams<Shape> &p, Shared &shared, const BwdWorkItem<Shape> &work, uint32_t i,
                              int h, int m_block, int rank = 0) {
    const int turn = work.turn(p, h, m_block), *semaphore = dq_semaphore(p, work, h, m_block, rank);
    shared.dq_turns.producer_acquire(i);
    while (load_acquire(semaphore) != turn) {}
    mbarrier_arrive(shared.dq_turns.full_barrier(i));
}
template <typename Shape, typename Shared>
__device__ void end_turns(const BwdParams<Shape> &p, Shared &shared, const BwdWorkItem<Shape> &work, int rank = 0) {
    work.for_each(p, [&](uint32_t i, int h, int m_block) {
        mbarrier_wait(shared.dq_added[i % 2], i / 2 % 2);
        store_release(dq_semaphore(p, work, h, m_block, rank), work.turn(p, h, m_block) + 1);
        mbarrier_arrive(shared.dq_turns.empty[i % 2]);
    });
}

// Tells flash_bwd_dq, which waits for flash_bwd_dkv instead if keys are split.
template <typename Shape> __device__ void report_dq(const BwdParams<Shape> &p, const BwdWorkItem<Shape> &work) {
    if (p.dq.data && work.splits == 1) atomic_add_acq_rel(p.layout.dq_arrivals(p, work.tile), 1);
}

// No row sees these keys.
template <typename Shape> __device__ void store_zeros(const BwdParams<Shape> &p, const BwdWorkItem<Shape> &work) {
    if (work.split_idx >= work.splits) return;  // beyond the sample's splits
    if (work.splits > 1 && work.tile.block * Shape::kBlockN >= work.seq.seqlen_k) return;  // nobody reads them
    constexpr int kBlockN = Shape::kBlockN, kHeadDim = Shape::kHeadDim;
    const Tile &tile = work.tile;
    auto clear = [&](void *to, int64_t row_bytes, int rows, int vecs, int kVecs) {
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < rows * kVecs; i += 32)
            if (i % kVecs < vecs)
                reinterpret_cast<uint4 *>(static_cast<char *>(to) + i / kVecs * row_bytes)[i % kVecs] = uint4{};
    };
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        const Tensor &x = i == 0 ? p.dk : p.dv;
        const int cols = i == 0 ? p.head_dim : p.head_dim_v;
        if (work.splits == 1)
            clear(rows_of<uint16_t>(x, tile.b, tile.h_k, work.seq.k_begin + tile.block * kBlockN), 2 * x.row_stride,
                  min(kBlockN, work.seq.padded_k - tile.block * kBlockN), (cols + 7) / 8, kHeadDim / 8);
        else
            clear(p.layout.dkv_accum(p, work.split_idx, tile) + i * p.layout.dkv_floats, 4 * kHeadDim, kBlockN,
                  kHeadDim / 4, kHeadDim / 4);
    }
}

// An item is taken when all tiles of the last one are on their way: earlier, it would wait here and not go to an idle
// block. Other warps see none without row blocks. If deterministic, tiles wait only for lower ones, which run already.
// The next item is taken before the last turn, which may come late. Elsewhere, a block's first item is that of its own
// number: its loads need not wait until preprocess_backward() has cleared the ticket.
template <typename Shape> __device__ void take_work(const BwdParams<Shape> &p, BwdSharedMemory<Shape> &shared) {
    const int lane_idx = threadIdx.x % 32, first_ticket = p.takes_turns() ? 0 : gridDim.x;
    bool needs_ticket = p.takes_turns();
#pragma unroll 1
    for (uint32_t t = 0;; t++) {
        if (t > 0) mbarrier_wait(shared.is_loaded, (t - 1) % 2);
        shared.work.producer_acquire(t);
        BwdWorkItem<Shape> &work = shared.work_of(t);
        if (lane_idx == 0) work.idx = t, work.begin = t == 0 ? 0 : shared.work_of(t - 1).end();
        bool is_due = p.takes_turns() && t > 0;  // of the last row block before
        auto wait_for_last_turn = [&] {
            const BwdWorkItem<Shape> &before = shared.work_of(work.idx - 1);
            const int h = Shape::kMasked ? before.last_head : before.h_end - 1;
            const int m_block = Shape::kMasked ? before.last_m_block : before.blocks.end - 1;
            if (is_due && lane_idx == 0)
                wait_for_turn<Shape>(p, shared, before, before.end() - 1, h, m_block);
            is_due = false;
        };
        for (;;) {
            if (lane_idx == 0) {
                int i = blockIdx.x;
                if (needs_ticket) {
                    wait_for_previous_kernel();  // unobserved by the emulator: turns are then waited for forever
                    i = first_ticket + atomicAdd(p.layout.ticket(p), 1);
                }
                if (i < p.num_items) work.find(p, i);
                work.tile.is_valid = i < p.num_items;
            }
            needs_ticket = true;
            __syncwarp();
            if (!work.tile.is_valid || work.count() > 0) break;
            wait_for_last_turn();
            store_zeros<Shape>(p, work);
            if (lane_idx == 0) {
                wait_for_previous_kernel();  // unobserved by the emulator: flash_bwd_dq, which relies on it, sleeps
                report_dq<Shape>(p, work);
            }
            __syncwarp();
        }
        if (lane_idx == 0) mbarrier_arrive(shared.work.full_barrier(work.idx));
        wait_for_last_turn();
        if (lane_idx == 0 && p.takes_turns() && work.tile.is_valid)
            work.for_each(p, [&](uint32_t i, int h, int m_block) {
                if (i != work.end() - 1) wait_for_turn<Shape>(p, shared, work, i, h, m_block);
            });
        __syncwarp();
        if (!work.tile.is_valid) break;
        t = work.idx;
    }
}

template <typename Shape>
__device__ void load_tiles(const BwdParams<Shape> &p, BwdSharedMemory<Shape> &shared, const BwdWorkItem<Shape> &work) {
    const Tile &tile = work.tile;
    const uint32_t t = work.idx;
    auto load_keys = [&](auto &to, const TmaTensor &x, Barrier &full, int c) {
        load_bytes(to, x, full, work.seq.k_begin + tile.block * Shape::kBlockN + 64 * c, tile.h_k, tile.b);
    };
    shared.keys.producer_acquire(t);
    mbarrier_arrive_expect_tx(shared.keys.full_barrier(t), sizeof(shared.sK[0]));
    for (int c = 0; c < Shape::kConsumers; c++)
        load_keys(shared.sK[t % 2][c], p.k_tma, shared.keys.full_barrier(t), c);
    work.for_each(p, [&](uint32_t i, int h, int m_block) {
        shared.rows.producer_acquire(i);
        Barrier &full = shared.rows.full_barrier(i);
        const int row = work.seq.q_begin + m_block * Shape::kBlockM, stage = i % Shape::kStages;
        mbarrier_arrive_expect_tx(full, sizeof(shared.sQ[0]) + sizeof(shared.sdO[0]));
        load_bytes(shared.sQ[stage], p.q_tma, full, row, h, tile.b);
        load_bytes(shared.sdO[stage], p.dout_tma, full, row, h, tile.b);
        if (i != work.begin) return;
#pragma unroll 1
        for (int c = 0; c < Shape::kConsumers; c++) {  // dK and dV leave by sV
            shared.values[c].producer_acquire(t);
            mbarrier_arrive_expect_tx(shared.values[c].full_barrier(t), sizeof(shared.sV[0][0]));
            load_keys(shared.sV[t % Shape::kValueStages][c], p.v_tma, shared.values[c].full_barrier(t), c);
        }
    });
}

// P becomes 0 for rows without keys or beyond the end.
template <typename Shape, typename Shared>
__device__ void load_numbers(const BwdParams<Shape> &p, Shared &shared, const BwdWorkItem<Shape> &work) {
    constexpr int kBlockM = Shape::kBlockM, kCount = (kBlockM + 31) / 32;
    const int lane_idx = threadIdx.x % 32;
    work.for_each(p, [&](uint32_t i, int h, int m_block) {
        const int64_t head = lse_index(p, work.seq.q_begin, work.tile.b, h);
        float lse_log2[kCount], delta[kCount];
#pragma unroll
        for (int j = 0; j < kCount; j++) {
            const int row = m_block * kBlockM + 32 * j + lane_idx;
            const bool is_row = row >= work.first_row && row < work.seq.seqlen_q;
            lse_log2[j] = is_row ? p.lse_log2[head + row] : INFINITY;
            delta[j] = is_row ? static_cast<const float *>(p.delta)[head + row] : 0.f;
        }
        int unit = Unit::kSeen;  // lane 2 · i + j finds unit[i][j]
        if constexpr (Shape::kMasked)
            if (constexpr int kRows = kBlockM / Unit::kSize; lane_idx < 4 && lane_idx % 2 < kRows)
                unit = HeadMask(p.block_mask, work.tile.b, h)
                           .unit(m_block * kRows + lane_idx % 2, work.tile.block * 2 + lane_idx / 2);
        const bool is_full = work.blocks.is_full(m_block) && !(Shape::kMasked && __any_sync(~0u, unit != Unit::kSeen));
        shared.rows.producer_acquire(i);
        const int stage = i % Shape::kStages, slot = slot_of_row(thread_idx() % 32);
#pragma unroll
        for (int j = 0; j < kCount; j++)
            if (32 * j + lane_idx < kBlockM)
                shared.lse_log2[stage][32 * j + slot] = lse_log2[j], shared.delta[stage][32 * j + slot] = delta[j];
        RowBlock &block = shared.row_block(i);
        if (Shape::kMasked && lane_idx < 4) block.unit[lane_idx / 2][lane_idx % 2] = unit;
        if (lane_idx == 0) {
            block.h = h, block.m_block = m_block, block.is_full = is_full;
            block.dq_tile = p.layout.row_tile(p, work.tile.b, h, m_block);
            block.slope = p.alibi_slopes
                              ? p.alibi_slopes[work.tile.b * p.alibi_batch_stride + h] * p.factors.per_unit : 0.f;
        }
        __syncwarp();
        if (lane_idx == 0) mbarrier_arrive(shared.rows.full_barrier(i));
    });
}

// load_numbers() waits for preprocess_backward(). All others touch its results only after a row block of load_numbers(),
// or after a wait of their own.
template <typename Shape> __device__ void produce(const BwdParams<Shape> &p, BwdSharedMemory<Shape> &shared) {
    auto for_work = [&](auto f) {
#pragma unroll 1
        for (uint32_t t = 0;; t++) {
            shared.work.consumer_wait(t);  // unobserved by the emulator: some threads would run on forever
            const BwdWorkItem<Shape> &work = shared.work_of(t);
            if (!work.tile.is_valid) break;
            f(work);
            t = work.idx;
            if (threadIdx.x / 32 == 1) __syncwarp();  // unobserved by the emulator: `work` changes much later
            shared.work.consumer_release(t, threadIdx.x % 32);
        }
    };
    if (threadIdx.x == 0) {
        for_work([&](const BwdWorkItem<Shape> &work) {
            load_tiles<Shape>(p, shared, work);
            mbarrier_arrive(shared.is_loaded);
        });
    } else if (threadIdx.x / 32 == 1) {
        wait_for_previous_kernel();
        let_next_kernel_begin();  // flash_bwd_dq reads dq_arrivals
        for_work([&](const BwdWorkItem<Shape> &work) { load_numbers<Shape>(p, shared, work); });
    } else if (threadIdx.x / 32 == 2) {
        take_work<Shape>(p, shared);
    } else if (threadIdx.x == 96) {
        for_work([&](const BwdWorkItem<Shape> &work) {
            if (p.takes_turns()) end_turns<Shape>(p, shared, work);
            const uint32_t t = work.idx;
            mbarrier_wait(shared.dq_done[t % 4], t / 4 % 2);  // unobserved by the emulator: flash_bwd_dq comes later
            report_dq<Shape>(p, work);
        });
    }
}

}  // namespace sm90
