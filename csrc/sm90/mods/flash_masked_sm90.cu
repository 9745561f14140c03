// The forward pass on Hopper with a block mask. The producer walks along the blocks that some row of the tile sees. With
// each it tells the consumers which block comes next, and which units of the mask that has, so that a thread has its
// bits of a partial unit when the scores are there. A consumer leaves out the blocks before the first and behind the
// last one that its own 64 rows see. Between them it may meet a hidden block, of which it hides all scores.
#include "sm90/flash_sm90.cuh"
#include "sm90/mods/mask_units.cuh"

namespace sm90 {

template <typename Shape> struct MaskedBlock {
    static constexpr int kUnits = Shape::kBlockN / Unit::kSize;
    int n_block, unit[Shape::kConsumers][kUnits];

    __device__ void find(const HeadMask &mask, int row, int n_block) {  // row: of units
        this->n_block = n_block;
#pragma unroll
        for (int c = 0; c < Shape::kConsumers; c++)
#pragma unroll
            for (int u = 0; u < kUnits; u++) unit[c][u] = mask.unit(row + c, n_block * kUnits + u);
    }
};

template <typename Shape> struct MaskedWorkItem : WorkItem<Shape> {
    static constexpr int kUnits = Shape::kBlockN / Unit::kSize;
    using Base = WorkItem<Shape>;
    using Base::n_block_min, Base::n_block_max, Base::blocks, Base::tile;
    int count;
    MaskedBlock<Shape> first;
    SeenBlocks<Shape::kConsumers, kUnits> seen;

    __device__ int first_block() const { return first.n_block; }
    __device__ int block_after(int n_block) const { return seen.last(n_block_min, n_block); }
    __device__ int num_blocks() const { return count; }
    __device__ int row() const { return tile.block * Shape::kConsumers; }  // of units
    __device__ void extend(const AttnParams &p) {
        const HeadMask mask(p.block_mask, tile.b, tile.h);
#pragma unroll 1
        for (int c = 0; c < Shape::kConsumers; c++) {
            const auto own = mask.keys_of<1, kUnits>(row() + c);
            BlockRange &x = blocks[c];
            x.begin = own.first(x.begin, x.end), x.end = own.last(x.begin, x.end) + 1;
        }
        seen = mask.keys_of<Shape::kConsumers, kUnits>(row());
        count = seen.count(n_block_min, n_block_max);
        first.find(mask, row(), seen.last(n_block_min, n_block_max));
    }
};

template <typename Shape> struct MaskedMemory : SharedMemory<Shape> {
    MaskedBlock<Shape> after[Shape::kStages];  // after the block in that stage of K

    __device__ void announce(const AttnParams &p, uint32_t item, const MaskedWorkItem<Shape> &work, int n_block) {
        after[item % Shape::kStages].find(HeadMask(p.block_mask, work.tile.b, work.tile.h), work.row(), n_block);
    }
};

template <typename Shape, typename Scores> struct MaskedWalk : Walk<Shape> {
    using Base = Walk<Shape>;
    using Base::blocks, Base::n_block, Base::from_full;
    const Scores &scores;

    __device__ void next() { n_block = block_after(), from_full = n_block - blocks.full_begin; }
    __device__ int block_after() const { return scores.next_block; }
    __device__ int block_after_last() const { return block_after(); }
    __device__ bool is_full() const { return Base::is_full() && scores.sees_all(); }
};

template <typename T, typename Shape> struct MaskedScores : PlainScores<T, Shape> {
    static constexpr int kUnits = Shape::kBlockN / Unit::kSize;
    using Base = PlainScores<T, Shape>;
    using WorkItem = Shape::WorkItem;
    using Base::p, Base::shared, Base::consumer, Base::kv_item, Base::acc_s;
    int next_block, next_unit[kUnits], unit[kUnits];  // of the block after this one, and of this one
    uint32_t seen[kUnits];

    __device__ bool sees_all() const {
        bool all = true;
        for (int x : unit) all &= x == Unit::kSeen;
        return all;
    }
    __device__ void begin_tile(const WorkItem &work) {
        Base::begin_tile(work);
        set_next(work.first);
    }
    __device__ MaskedWalk<Shape, MaskedScores> begin_walk(const WorkItem &work, const BlockRange &blocks,
                                                          uint32_t num_full, int n_block) {
        return {{work, blocks, num_full, n_block}, *this};
    }
    __device__ int block_after(int) {
        set_next(shared.after[kv_item % Shape::kStages]);
        return next_block;
    }
    __device__ void prefetch(const WorkItem &, int, int) {
        for (int u = 0; u < kUnits; u++) {
            unit[u] = next_unit[u];
            seen[u] = word_of_unit(p.block_mask, unit[u], thread_idx() % 128);
        }
    }
    __device__ bool exponentiate(const WorkItem &work, const BlockRange &blocks, const ScoreOrigin &at, bool is_full,
                                 float (&alpha)[2]) {
        set_next(shared.after[kv_item % Shape::kStages]);
        return Base::exponentiate(work, blocks, at, is_full, alpha, [&] {
            for (int u = 0; u < kUnits; u++) hide_unseen(acc_s[0], 8 * u, seen[u]);
        });
    }

  private:
    __device__ void set_next(const MaskedBlock<Shape> &block) {
        next_block = block.n_block;
        for (int u = 0; u < kUnits; u++) next_unit[u] = block.unit[consumer][u];
    }
};

struct Masked : Plain {
    template <typename Shape> using WorkItem = MaskedWorkItem<Shape>;
    template <typename Shape> using SharedMemory = MaskedMemory<Shape>;
    template <typename T, typename Shape> using ScorePolicy = MaskedScores<T, Shape>;
};

void flash_forward_masked(const AttnParams &given) {
    if (given.has_mask_alone()) launch_pack_units(given);
    const AttnParams p = with_units(given);
    const int head_dim = p.max_head_dim();  // tiles of whole units
    if (head_dim <= 64) return launch_fwd<Shape<64, 3, 128, 4, 2, Masked>>(p);
    if (head_dim <= 96) return launch_fwd<Shape<96, 3, 64, 4, 2, Masked>>(p);
    if (head_dim <= 128) return launch_fwd<Shape<128, 3, 64, 4, 2, Masked>>(p);
    if (head_dim <= 192) return launch_fwd<Shape<192, 2, 64, 2, 2, Masked>>(p);
    launch_fwd<Shape<256, 2, 64, 2, 1, Masked>>(p);
}

}  // namespace sm90
