// What a block of threads on Hopper works at: the tiles of out that it takes in turn, its shared memory, and the two
// threads of its producer warpgroup. One finds the tiles, the other one asks TMA for Q, K and V. For the keys of a
// cache, two warps ask.
#pragma once

#include <algorithm>

#include "common/mask.cuh"
#include "common/scheduler.cuh"
#include "common/sequence.cuh"
#include "flash.h"
#include "sm90/key_blocks.cuh"
#include "sm90/mods/bias.cuh"
#include "sm90/mods/mask_bits.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tiles.cuh"

namespace sm90 {

// What a kernel does beside plain attention. kMods: scores are changed by more than a factor, see score_mods.cuh.
// kCached: the keys are those of a cache.
enum class Kind { kPlain, kDropout, kMods, kCached };

template <int kHeadDim_, int kConsumers_, int kBlockN_, int kStages_ = 2, int kQStages_ = 2, Kind kKind = Kind::kPlain>
struct Shape {
    static constexpr int kHeadDim = kHeadDim_, kConsumers = kConsumers_, kBlockM = 64 * kConsumers_;
    static constexpr int kBlockN = kBlockN_, kStages = kStages_, kQStages = kQStages_;
    static constexpr bool kDropout = kKind == Kind::kDropout, kMods = kKind == Kind::kMods;
    static constexpr bool kCached = kKind == Kind::kCached;
    using Input = std::conditional_t<kCached, DecodeParams, AttnParams>;
    using KeyBlocks = std::conditional_t<kCached, CachedKeyBlocks<kBlockN>, sm90::KeyBlocks<kBlockN>>;
    static constexpr int kNThreads = 128 * (kConsumers + 1);
    // Registers a thread: what the producer does not need goes to the consumers.
    static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
};

// A tile of out and what find_tiles() knows of its sample, so that other threads need no registers for it. Aligned, so
// that 16 bytes at a time are written and read.
template <int kConsumers> struct alignas(16) Work {
    BlockRange blocks[kConsumers];  // of keys, for the rows of a consumer
    int blocks_begin, blocks_end;   // those of all consumers
    int first_block;                // of them, with kMods: the others follow downwards, then those above it
    const uint32_t *mask_words;     // of the head, see MaskBits
    int first_key;                  // those before it are seen by no row of the tile
    Tile tile;
    Sequence seq;
    Mask mask;
};

template <typename Shape> struct SharedMemory {
    SmemTile<64, Shape::kHeadDim> sQ[Shape::kQStages * Shape::kConsumers];  // then rows of out
    SmemTile<Shape::kBlockN, Shape::kHeadDim> sK[Shape::kStages], sV[Shape::kStages];
    Ring<Shape::kQStages> q[Shape::kConsumers];  // one for each consumer: they end a tile at different times
    Ring<Shape::kStages> k, v;
    // The tile of each Q, and of as many before it: consumers still read them when find_tiles() writes the next one.
    using Work = sm90::Work<Shape::kConsumers>;
    Work works[2 * Shape::kQStages];
    Ring<1> found;  // from the thread that finds tiles to those that load them
    [[no_unique_address]] std::conditional_t<Shape::kMods, BiasTiles<Shape::kConsumers, Shape::kBlockN>, NoBiasTiles>
        bias;

    __device__ static int q_index(uint32_t i, int c) { return i % Shape::kQStages * Shape::kConsumers + c; }
    __device__ Work &work(uint32_t i) { return works[i % (2 * Shape::kQStages)]; }
    __device__ void init_barriers() {
        for (auto &ring : q) ring.init(4);
        k.init(4 * Shape::kConsumers), v.init(4 * Shape::kConsumers);
        found.init(Shape::KeyBlocks::kLoaders), bias.init_barriers();
        fence_mbarrier_init();
    }
};

// Tiles of query rows for persistent blocks of threads. If all tiles take equally long, they are dealt out in turn. If
// not, a block that is done takes the next one by a counter in memory. Tiles of a group of heads are then neighbours;
// the K and V of a group fit L2 together. Where every head has a bias that all samples share, neighbours are tiles of
// the same head, of one sample after the other. Two launches that share tiles take all of them by the counter.
template <typename Shape> struct Scheduler {
    RowTiles<Shape::kBlockM, Shape::kCached> tiles;
    uint32_t num_tiles;
    uint32_t heads;         // nheads, times batch_size unless the batch is packed
    uint32_t group;         // heads whose K and V fit L2 together
    uint32_t heads_per_kv;  // query heads that read one key/value head
    uint32_t samples;       // that share the bias of a head, or 1

    Scheduler(const Shape::Input &p, int64_t num_tiles)
        : tiles(p), num_tiles(num_tiles), heads(num_tiles / tiles.slots), group(1),
          heads_per_kv(p.nheads / p.nheads_k), samples(1) {
        const Bias &x = p.bias;
        if (x.data && x.row_stride && x.head_stride && !x.batch_stride) samples = uint32_t(p.batch_size);
        if (!p.tile_counter) return;
        // K and V, of 16 bits. Those of several samples differ.
        const double kv_bytes = 2. * p.seqlen_k * (p.head_dim + p.head_dim_v), l2_bytes = 32 << 20;
        const double head_bytes = samples > 1 ? kv_bytes : kv_bytes / heads_per_kv;
        while (2 * group * head_bytes <= l2_bytes && 2 * group <= heads) group *= 2;
    }
    // Among the tiles of a group the last rows, which see most under a causal mask, go first.
    __device__ Tile at(const AttnParams &p, uint32_t idx) const {
        if (idx >= num_tiles) return {0, 0, 0, 0, false};
        const uint32_t slots = tiles.slots, bh0 = idx / (group * slots) * group, i = idx - bh0 * slots;
        const uint32_t heads_now = min(group, heads - bh0), row = i / heads_now;
        uint32_t bh = bh0 + i - row * heads_now;
        if (samples > 1) bh = bh % samples * p.nheads + bh / samples;
        return tiles.tile(bh, slots - 1 - row, Number(p.nheads), Number(heads_per_kv));
    }
    // The tile after idx, or the first one of this block if idx is negative.
    __device__ int next(const Shape::Input &p, int idx) const {
        if constexpr (Shape::kCached)
            if (p.phase != Phase::kAlone) return atomicAdd(p.tile_counter, 1);
        if (idx < 0) return blockIdx.x;
        return gridDim.x + (p.tile_counter ? atomicAdd(p.tile_counter, 1) : idx);
    }
};

template <typename Shape> struct Params : Shape::Input {
    TmaTensor q_tma, k_tma, v_tma, o_tma;
    Scheduler<Shape> scheduler;
    BiasTensor bias_tensor;
    MaskBits mask_bits;
    ScoreFactors<float> factors;
    ScoreKind score_kind;
};

// Where the walk along the keys begins: at the last block, as in dense calls. A mask of the sample's end or a causal
// one is then met at the start. With ALiBi scores fall on both sides of the diagonal. Where all rows see all keys, the
// walk begins at the diagonal, so that row_max grows in the first blocks alone. All consumers then walk the same way. A
// tile without keys has no block to begin at.
template <typename Shape> __device__ int first_block(const Params<Shape> &p, const Work<Shape::kConsumers> &work) {
    const Mask &mask = work.mask;
    const int last_row = work.tile.block * Shape::kBlockM + Shape::kBlockM - 1;
    const bool sees_all = last_row < mask.seqlen_q && mask.left <= -mask.seqlen_q && mask.right >= mask.seqlen_k;
    if (!p.alibi_slopes || !sees_all || work.blocks_end == 0) return work.blocks_end - 1;
    return max(0, min(last_row + mask.seqlen_k - mask.seqlen_q, mask.seqlen_k - 1)) / Shape::kBlockN;
}

// One thread finds the tiles. It takes the next tile while another thread loads the last keys of this one. If it took
// the tile earlier, the tile would wait here, and a block of threads without work could not have it.
template <typename Shape> __device__ void find_tiles(const Params<Shape> &p, SharedMemory<Shape> &shared) {
    constexpr int kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN;
    uint32_t item = 0;
    for (int idx = -1;;) {
        shared.found.producer_acquire(item);
        idx = p.scheduler.next(p, idx);
        auto &work = shared.work(item);  // read anew where it is needed: this thread has few registers
        work.tile = p.scheduler.at(p, idx);
        const Tile &tile = work.tile;
        if (!tile.is_valid) break;
        const Sequence &seq = work.seq = Sequence(p, tile.b);
        if (tile.block * kBlockM >= seq.padded_q) continue;  // a slot that its sample does without
        if constexpr (Shape::kCached)
            if (!seq.is_served(p)) continue;
        const Mask mask = work.mask = Mask(seq, p);
        const BlockRange all = mask.key_blocks<kBlockM, kBlockN>(tile.block * kBlockM);
        work.blocks_begin = all.begin, work.blocks_end = all.end;
        work.first_key = mask.keys(tile.block * kBlockM).begin;
#pragma unroll 1
        for (int c = 0; c < Shape::kConsumers; c++)
            work.blocks[c] = mask.key_blocks<64, kBlockN>(tile.block * kBlockM + 64 * c);
        if constexpr (Shape::kMods) {
            work.first_block = first_block<Shape>(p, work);
            if (p.mask_bits.rows) work.mask_words = p.mask_bits.of_head(tile.b, tile.h);
        }
        mbarrier_arrive(shared.found.full_barrier(item++));
    }
    mbarrier_arrive(shared.found.full_barrier(item));  // the tile that is not valid
}

// What load_tiles() asks for; Q goes with the keys.
enum class Loads { kAll, kKeys, kValues };

// One thread loads Q for each tile, and K and V block by block. Of a cache, one warp loads Q and K, another one V.
template <typename Shape, Loads kLoads>
__device__ void load_tiles(const Params<Shape> &p, SharedMemory<Shape> &shared) {
    constexpr int kBlockM = Shape::kBlockM, kAhead = 2 * Shape::kStages;
    constexpr bool kKeys = kLoads != Loads::kValues, kValues = kLoads != Loads::kKeys;
    const int lane_idx = Shape::kCached ? threadIdx.x % 32 : 0;
    prefetch(p.q_tma.map), prefetch(p.k_tma.map), prefetch(p.v_tma.map), prefetch(p.o_tma.map);
    uint32_t q_item = 0, kv_item = 0;  // of the rings
    for (;; q_item++) {
        shared.found.consumer_wait(q_item);
        Shape::KeyBlocks::begin_tile();
        const auto &work = shared.work(q_item);
        if (!work.tile.is_valid) break;
        const int q_row = work.seq.q_begin + work.tile.block * kBlockM, b = work.tile.b;
#pragma unroll 1
        for (int c = 0; c < Shape::kConsumers; c++) {
            if (!kKeys || lane_idx > 0) continue;
            shared.q[c].producer_acquire(q_item);
            load_tile(shared.sQ[shared.q_index(q_item, c)], p.q_tma, shared.q[c].full_barrier(q_item), q_row + 64 * c,
                      work.tile.h, b);
        }
        const int n_begin = work.blocks_begin;
        // When n_next blocks are left, find_tiles() may look for the next tile. It writes over the oldest of `works`.
        // All consumers are done with that one: they have released a Q that came after it. Of two warps that load, one
        // waits for Q, and find_tiles() waits for both.
        const int num_blocks = work.blocks_end - n_begin, n_next = min(num_blocks, kAhead + 1);
        int n_block = Shape::kMods ? work.first_block : work.blocks_end - 1;
        typename Shape::KeyBlocks keys(p, work.tile, work.seq, n_block);
        if (num_blocks <= 0) shared.found.consumer_release(q_item, lane_idx);
#pragma unroll 1
        for (int n_left = num_blocks; n_left > 0; n_left--, n_block--, kv_item++) {
            if (Shape::kMods && n_block < n_begin) n_block = work.blocks_end - 1;
            const uint32_t stage = kv_item % Shape::kStages;
            keys.find(n_block);
            if (n_left == n_next) shared.found.consumer_release(q_item, lane_idx);
            if constexpr (kKeys) {
                shared.k.producer_acquire(kv_item);
                keys.load(shared.sK[stage], p.k_tma, shared.k.full_barrier(kv_item));
            }
            if constexpr (Shape::kMods)
                shared.bias.load(p.bias_tensor, kv_item, work.tile.block * kBlockM, keys.key, work.tile.h, keys.b);
            if constexpr (kValues) {
                shared.v.producer_acquire(kv_item);
                keys.load(shared.sV[stage], p.v_tma, shared.v.full_barrier(kv_item));
            }
        }
    }
    if (kKeys && lane_idx == 0)
        for (auto &ring : shared.q) {  // the tile that is not valid ends each consumer
            ring.producer_acquire(q_item);
            mbarrier_arrive(ring.full_barrier(q_item));
        }
}

// The producer warpgroup.
template <typename Shape> __device__ void produce(const Params<Shape> &p, SharedMemory<Shape> &shared) {
    if constexpr (Shape::kCached) {
        if (threadIdx.x / 32 == 0) load_tiles<Shape, Loads::kKeys>(p, shared);
        else if (threadIdx.x == 32) find_tiles<Shape>(p, shared);
        else if (threadIdx.x / 32 == 2) load_tiles<Shape, Loads::kValues>(p, shared);
    } else if (threadIdx.x == 0) load_tiles<Shape, Loads::kAll>(p, shared);
    else if (threadIdx.x == 32) find_tiles<Shape>(p, shared);
}

}  // namespace sm90
