// The forward pass on Hopper with a block mask. The producer walks along the blocks of keys that some row of the tile
// sees. With each block it tells the consumers which block comes next, and its units of the mask. So a thread has its
// bits of a partial unit when the scores are there. A consumer skips the blocks that its own 64 rows do not see.
#pragma once

#include "common/block_mask.cuh"
#include "sm90/flash_sm90.cuh"

namespace sm90 {

// A block of keys, for 64 rows of each consumer.
template <typename Shape> struct MaskedBlock {
    static constexpr int kUnits = Shape::kBlockN / Unit::kSize;
    enum Kind { kFull, kPartial, kSkipped, kNone };
    int place[Shape::kConsumers];  // 4 · its number + its Kind; -1 behind the last block
    int unit[Shape::kConsumers][kUnits];

    __device__ void find(const AttnParams &p, const Shape::WorkItem &work, int n_block) {
        const HeadMask mask(p.block_mask, work.tile.b, work.tile.h);
#pragma unroll
        for (int c = 0; c < Shape::kConsumers; c++) {
            const BlockRange &blocks = work.blocks[c];
            bool is_seen = false, is_full = n_block >= blocks.full_begin && n_block < blocks.full_end;
#pragma unroll
            for (int u = 0; u < kUnits; u++) {
                const int x = unit[c][u] = mask.unit(work.row() + c, n_block * kUnits + u);
                is_seen |= x != Unit::kHidden, is_full &= x == Unit::kSeen;
            }
            is_seen &= n_block >= blocks.begin && n_block < blocks.end;
            place[c] = 4 * n_block + (n_block < 0 ? kNone : !is_seen ? kSkipped : is_full ? kFull : kPartial);
        }
    }
};

template <typename Shape> struct MaskedWorkItem : WorkItem<Shape> {
    static constexpr int kUnits = Shape::kBlockN / Unit::kSize;
    using Base = WorkItem<Shape>;
    using Base::n_block_min, Base::n_block_max, Base::tile;
    int count;
    MaskedBlock<Shape> first;
    SeenBlocks<Shape::kConsumers, kUnits> seen;

    __device__ int first_block() const { return first.place[0] >> 2; }
    __device__ int num_blocks() const { return count; }
    __device__ int row() const { return tile.block * Shape::kConsumers; }  // of units
    __device__ void extend(const AttnParams &p) {
        seen = HeadMask(p.block_mask, tile.b, tile.h).keys_of<Shape::kConsumers, kUnits>(row());
        count = seen.count(n_block_min, n_block_max);
        first.find(p, *this, seen.last(n_block_min, n_block_max));
    }
};

template <typename Shape> struct MaskedMemory : SharedMemory<Shape> {
    MaskedBlock<Shape> after[Shape::kStages];  // after the block in that stage of K
    MaskedBlock<Shape> of_units[32];           // that a word of 32 units lies in, for MaskedTileWalk
};

// The walk of the producer's warp. It takes words of 32 units, and each lane looks at the block of one of them.
template <typename Shape> struct MaskedTileWalk {
    static constexpr int kUnits = Shape::kBlockN / Unit::kSize, kInts = sizeof(MaskedBlock<Shape>) / sizeof(int);
    const AttnParams &p;
    Shape::SharedMemory &shared;
    const Shape::WorkItem &work;
    int word, bit = 0;  // of the block that block_after() found last; no bit behind the last block
    uint32_t left;      // bits of the blocks that come after it

    __device__ MaskedTileWalk(const AttnParams &p, Shape::SharedMemory &shared, const Shape::WorkItem &work)
        : p(p), shared(shared), work(work) {
        const int first = work.first_block() * kUnits;
        take(first / 32);
        left &= (1u << first % 32) - 1;
    }
    __device__ void take(int i) {
        word = i, left = work.seen.word(i, work.n_block_min, work.n_block_max);
        if (left) shared.of_units[threadIdx.x].find(p, work, (32 * i + threadIdx.x) / kUnits);
        __syncwarp();
    }
    __device__ int block_after(int) {
        while (!left && 32 * word > work.n_block_min * kUnits) take(word - 1);
        bit = 31 - __clz(left), left &= ~(1u << bit);
        return bit < 0 ? -1 : (32 * word + bit) / kUnits;
    }
    __device__ void announce(uint32_t stage) const {
        const int i = threadIdx.x;
        auto ints = [](MaskedBlock<Shape> &block) { return reinterpret_cast<int *>(&block); };
        if (i < kInts) ints(shared.after[stage])[i] = bit < 0 ? -1 : ints(shared.of_units[bit])[i];
        __syncwarp();
    }
};

template <typename Shape, typename Scores> struct MaskedWalk : Walk<Shape> {  // a run of blocks that these rows see
    using Base = Walk<Shape>;
    using Base::n_block;
    const Scores &scores;
    const int first = n_block;

    __device__ void next() { n_block = block_after(); }
    __device__ int block_after() const { return scores.next >> 2; }
    __device__ int block_after_last() const { return block_after(); }
    __device__ bool is_first() const { return n_block == first; }
    __device__ bool is_last() const { return !scores.sees_next(); }
    __device__ bool is_full() const { return scores.is_next_full(); }
};

template <typename T, typename Shape, typename Base_ = PlainScores<T, Shape>> struct MaskedScores : Base_ {
    using Base = Base_;
    using Block = MaskedBlock<Shape>;
    using WorkItem = Shape::WorkItem;
    using Base::p, Base::shared, Base::consumer, Base::kv_item, Base::acc_s;
    static constexpr bool kHasGaps = true;
    int next;  // place of the block after this one; before a run, of its first one
    uint32_t seen[Block::kUnits];  // bits of a partial block

    __device__ bool is_next_full() const { return (next & 3) == Block::kFull && Base::has_full_blocks(); }
    __device__ bool sees_next() const { return (next & 3) < Block::kSkipped; }
    __device__ bool sees(const BlockRange &) const { return sees_next(); }
    __device__ bool skips(int, int) const { return (next & 3) == Block::kSkipped; }
    __device__ void begin_tile(const WorkItem &work) {
        Base::begin_tile(work);
        set_next(work.first, work.first.place[consumer]);
    }
    __device__ MaskedWalk<Shape, MaskedScores> begin_walk(const WorkItem &work, const BlockRange &blocks,
                                                          uint32_t num_full, int n_block) {
        return {{work, blocks, num_full, n_block}, *this};
    }
    __device__ int block_after(int) {
        const Block &after = shared.after[kv_item % Shape::kStages];
        set_next(after, after.place[consumer]);
        return next >> 2;
    }
    __device__ bool exponentiate(const WorkItem &work, const BlockRange &blocks, const ScoreOrigin &at, bool is_full,
                                 float (&alpha)[2]) {
        const Block &after = shared.after[kv_item % Shape::kStages];
        const int place = after.place[consumer];  // loaded early
        const bool has_grown = Base::exponentiate(work, blocks, at, is_full, alpha, [&] {
            for (int u = 0; u < Block::kUnits; u++) hide_unseen(acc_s[0], 8 * u, seen[u]);
        });
        set_next(after, place);
        __syncwarp();  // a lane releases the stage of K
        return has_grown;
    }

  private:
    __device__ void set_next(const Block &block, int place) {
        next = place;
        if (!sees_next() || is_next_full()) return;
        for (int u = 0; u < Block::kUnits; u++)
            seen[u] = word_of_unit(p.block_mask, block.unit[consumer][u], thread_idx() % 128);
    }
};

struct Masked : Plain {
    static constexpr bool kWarpLoads = true;
    template <typename Shape> using WorkItem = MaskedWorkItem<Shape>;
    template <typename Shape> using SharedMemory = MaskedMemory<Shape>;
    template <typename Shape> using TileWalk = MaskedTileWalk<Shape>;
    template <typename T, typename Shape> using ScorePolicy = MaskedScores<T, Shape>;
};

}  // namespace sm90
