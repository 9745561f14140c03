// The forward pass on Hopper with a block mask. The producer walks along the blocks that some row of the tile sees. With
// each it tells the consumers which block comes next, and which units of the mask that has, so that a thread has its
// bits of a partial unit when the scores are there. A consumer leaves out the blocks before the first and behind the
// last one that its own 64 rows see. Between them it may meet a hidden block, of which it hides all scores.
#include "sm90/flash_sm90.cuh"
#include "sm90/mods/mask_bits.cuh"
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

// A block of threads packs a unit.
struct PackMemory {
    alignas(16) uint8_t seen[Unit::kSize][Unit::kSize + 16];
    bool is_seen[4], is_hidden[4];  // some score of a warp
};
__global__ void __launch_bounds__(128)
    pack_units(Bias from, BlockMask mask, uint32_t *words, int seqlen_q, int seqlen_k) {
    auto &shared = shared_memory<PackMemory>();
    const int unit = blockIdx.x, n = unit % mask.keys, m = unit / mask.keys % mask.rows, thread = threadIdx.x;
    const int head = unit / mask.keys / mask.rows, b = head / mask.heads, h = head % mask.heads;
    const int row0 = Unit::kSize * m, key0 = Unit::kSize * n, row = thread / 2;
    for (int key = thread % 2 * 32; key < thread % 2 * 32 + 32; key += 16) {
        const auto *keys = static_cast<const uint8_t *>(from.data) + b * from.batch_stride + h * from.head_stride +
                           (row0 + row) * from.row_stride + (key0 + key) * from.key_stride;
        const int count = row0 + row < seqlen_q ? seqlen_k - key0 - key : 0;
        *reinterpret_cast<uint4 *>(&shared.seen[row][key]) = load_16_keys(keys, from.key_stride, count);
    }
    __syncthreads();
    uint32_t word = 0, transposed = 0, exists = 0;
    auto seen = [&](int row, int key) { return uint32_t(shared.seen[row][key]); };
    for (int bit = 0; bit < 32; bit++) {
        const int i = thread / 32 * 16 + bit / 16 * 8 + thread % 32 / 4, j = bit % 16 / 2 * 8 + thread % 4 * 2 + bit % 2;
        word |= seen(i, j) << bit, transposed |= seen(j, i) << bit;
        exists |= uint32_t(row0 + i < seqlen_q && key0 + j < seqlen_k) << bit;
    }
    const bool is_seen = __any_sync(~0u, word != 0), is_hidden = __any_sync(~0u, word != exists);
    if (thread % 32 == 0) shared.is_seen[thread / 32] = is_seen, shared.is_hidden[thread / 32] = is_hidden;
    __syncthreads();  // unobserved by the emulator: its unset flags are true, and keep bits that a unit may have
    bool some_seen = false, some_hidden = false;
    for (int i = 0; i < 4; i++) some_seen |= shared.is_seen[i], some_hidden |= shared.is_hidden[i];
    const int kind = !some_seen ? Unit::kHidden : !some_hidden ? Unit::kSeen : unit;
    if (kind >= 0) {
        uint32_t *bits = words + (mask.bits - words) + int64_t(unit) * 256;
        bits[thread] = word, bits[128 + thread] = transposed;
    }
    if (thread > 0) return;
    words[unit] = kind;
    if (!some_seen) return;
    auto set_bit = [&](const uint32_t *of, int64_t row, int size, int i) {  // once: a sum is as good as an `or`
        atomicAdd(reinterpret_cast<int *>(words + (of - words)) + row * ((size + 31) / 32) + i / 32, 1 << i % 32);
    };
    set_bit(mask.row_words, int64_t(head) * mask.rows + m, mask.keys, n);
    set_bit(mask.key_words, int64_t(head) * mask.keys + n, mask.rows, m);
}

void launch_pack_units(const AttnParams &p) {
    const BlockMask mask = units_of_mask(p);
    device::check_cuda(cudaMemsetAsync(p.mask_words + mask.num_bits, 0, 4 * (mask.bits - mask.row_words),
                                       static_cast<cudaStream_t>(p.stream)));
    device::launch(pack_units, mask.num_bits, 128, sizeof(PackMemory), p.stream, p.bias, mask, p.mask_words, p.seqlen_q,
                   p.seqlen_k);
}

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
