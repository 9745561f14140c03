// Shapes, shared memory and the order of tiles on Hopper; the producer: a thread finds tiles, another loads Q, K and V.
#pragma once

#include "common/mask.cuh"
#include "common/scheduler.cuh"
#include "common/softmax.cuh"
#include "sm90/tiles.cuh"

namespace sm90 {

template <int kBlockN> struct KeyBlocks;
template <typename Shape> struct WorkItem;
template <typename Shape> struct SharedMemory;
template <typename Shape> struct TileWalk;
template <typename T, typename Shape, typename Softmax = Softmax<1>> struct PlainScores;  // plain_scores.cuh

// Parts that other kernels replace: sm90/mods/, cache/prefill_sm90.cu.
struct Plain {
    static constexpr bool kCached = false;  // keys come from a cache
    static constexpr bool kChunks = false;  // attention_chunk
    static constexpr bool kWarpLoads = false;  // a warp loads Q, K and V, not one thread
    using Input = AttnParams;
    template <int kBlockN> using KeyBlocks = sm90::KeyBlocks<kBlockN>;
    template <typename Shape> using WorkItem = sm90::WorkItem<Shape>;
    template <typename Shape> using SharedMemory = sm90::SharedMemory<Shape>;
    template <typename Shape> using TileWalk = sm90::TileWalk<Shape>;
    template <typename T, typename Shape> using ScorePolicy = PlainScores<T, Shape>;
};

// kStages: buffers of K, and as many of V. kQBuffers: buffers of 64 rows of Q, for all consumers together. kBlocksPerSm:
// blocks that share a multiprocessor.
template <int kHeadDim_, int kConsumers_, int kBlockN_, int kStages_ = 2, int kQBuffers_ = 2 * kConsumers_,
          typename Kind = Plain, int kHeadDimV_ = kHeadDim_, int kBlocksPerSm_ = 1>
struct Shape {
    static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
    static constexpr int kConsumers = kConsumers_, kBlockM = 64 * kConsumers_;
    static constexpr int kBlockN = kBlockN_, kStages = kStages_, kQBuffers = kQBuffers_;
    static constexpr int kNThreads = 128 * (kConsumers + 1);
    static constexpr int kBlocksPerSm = kBlocksPerSm_;
    static constexpr int kRegisters = 65536 / (kNThreads * kBlocksPerSm) / 8 * 8;  // a thread begins with so many
    static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
    static constexpr int kConsumerRegisters =
        (kRegisters * (kConsumers + 1) - kProducerRegisters) / kConsumers / 8 * 8;

    static constexpr bool kCached = Kind::kCached, kWarpLoads = kCached || Kind::kWarpLoads;
    using Mask = MaskOf<Kind::kChunks>;
    using Input = Kind::Input;
    using KeyBlocks = Kind::template KeyBlocks<kBlockN>;
    using WorkItem = Kind::template WorkItem<Shape>;
    using SharedMemory = Kind::template SharedMemory<Shape>;
    using TileWalk = Kind::template TileWalk<Shape>;
    template <typename T> using ScorePolicy = Kind::template ScorePolicy<T, Shape>;
};

template <int kBlockN> struct KeyBlocks {
    static constexpr int kLoaders = 1;
    const int h_k, b, k_begin;
    int key;

    template <int kHeadDim>
    static TmaTensor make_tensor(const char *name, const Tensor &x, const AttnParams &p, int head_dim) {
        return make_tma_tensor<kHeadDim>(name, x, p.batch_size, p.nheads_k, p.seqlen_k, head_dim, kBlockN);
    }
    __device__ KeyBlocks(const AttnParams &, const Tile &tile, const Sequence &seq, int)
        : h_k(tile.h_k), b(tile.b), k_begin(seq.k_begin) {}
    __device__ static void begin_tile() {}
    __device__ void find(int n_block) { key = k_begin + n_block * kBlockN; }
    template <int kHeadDim>
    __device__ void load(SmemTile<kBlockN, kHeadDim> &to, const TmaTensor &x, Barrier &full) const {
        load_tile(to, x, full, key, h_k, b);
    }
};

// A tile of out and its keys, in shared memory to save registers. Aligned for accesses of 16 bytes.
template <typename Shape> struct alignas(16) WorkItem {
    BlockRange blocks[Shape::kConsumers];  // of keys, for 64 rows each
    int n_block_min, n_block_max;          // of all rows
    int first_key;                         // that some row sees
    Tile tile;
    Sequence seq;
    Shape::Mask mask;
    int unused[4];  // with a size of 128 bytes, ptxas spills one number more at head_dim 64

    // The walk begins at the last block, which may need a mask.
    __device__ int first_block() const { return n_block_max - 1; }
    __device__ int block_after(int n_block) const { return n_block - 1; }
    __device__ int num_blocks() const { return n_block_max - n_block_min; }
    __device__ void extend(const Shape::Input &) {}
};

// A ring of Q's buffers. Consumer c takes its i-th Q from buffer (kConsumers · i + c) % kBuffers. Where the consumers of
// a buffer alternate, each has its own `full` barrier for it: who waits by parity must see every phase.
template <int kBuffers, int kConsumers> struct QRing {
    static constexpr bool kAlternate = kBuffers % kConsumers != 0;
    static constexpr int kFulls = kAlternate ? kBuffers * kConsumers : kBuffers, kStages = kFulls / kConsumers;
    Barrier full[kFulls], empty[kBuffers];

    __device__ static uint32_t index(uint32_t i, int c) {
        return kAlternate ? full_index(i, c) % kBuffers : full_index(i, c);
    }
    __device__ static uint32_t full_index(uint32_t i, int c) { return i % kStages * kConsumers + c; }
    __device__ Barrier &full_barrier(uint32_t i, int c) { return full[full_index(i, c)]; }
    __device__ void init() {
        for (auto &barrier : full) mbarrier_init(barrier, 1);
        for (auto &barrier : empty) mbarrier_init(barrier, 4);
    }
    __device__ void producer_acquire(uint32_t i, int c) {
        const uint32_t uses = kAlternate ? (kConsumers * i + c) / kBuffers : i / kStages;  // of the buffer so far
        mbarrier_wait(empty[index(i, c)], uses % 2 ^ 1);
    }
    __device__ void consumer_wait(uint32_t i, int c) { mbarrier_wait(full_barrier(i, c), i / kStages % 2); }
    __device__ void consumer_release(uint32_t i, int c, int lane_idx) {
        if (lane_idx == 0) mbarrier_arrive(empty[index(i, c)]);
    }
};

template <typename Shape> struct SharedMemory {
    SmemTile<64, Shape::kHeadDim> sQ[Shape::kQBuffers];  // later out
    SmemTile<Shape::kBlockN, Shape::kHeadDim> sK[Shape::kStages];
    SmemTile<Shape::kBlockN, Shape::kHeadDimV> sV[Shape::kStages];
    QRing<Shape::kQBuffers, Shape::kConsumers> q;  // consumers end a tile at different times
    Ring<Shape::kStages> k, v;
    // Twice the work items whose Q the ring holds: consumers still read older ones when find_tiles() writes the next.
    static constexpr int kWorks = (Shape::kQBuffers + Shape::kConsumers - 1) / Shape::kConsumers * 2;
    Shape::WorkItem works[kWorks];
    Ring<1> found;  // from find_tiles() to load_tiles()

    __device__ Shape::WorkItem &work(uint32_t i) { return works[i % kWorks]; }
    __device__ void init_barriers() {
        q.init(), k.init(4 * Shape::kConsumers), v.init(4 * Shape::kConsumers);
        found.init(Shape::KeyBlocks::kLoaders);
        fence_mbarrier_init();
    }
    template <typename Keys>
    __device__ void load_more(const Shape::Input &, uint32_t, const Shape::WorkItem &, const Keys &) {}
};

// The producer's walk along the blocks of a tile.
template <typename Shape> struct TileWalk {
    const Shape::WorkItem &work;
    __device__ TileWalk(const Shape::Input &, Shape::SharedMemory &, const Shape::WorkItem &work) : work(work) {}
    __device__ int block_after(int n_block) const { return work.block_after(n_block); }
    __device__ void announce(uint32_t) const {}  // tells consumers which block comes after that in a stage of K
};

// The most tiles of heads that go together: their Q and O pass through L2, where K and V should stay.
constexpr uint32_t kTilesInL2 = 1024;

// The order of tiles for persistent blocks. Tiles that take equally long are dealt out in turn. Others, and those that
// two launches share, are taken by a counter in memory, and heads whose K and V fit L2 together are interleaved. Where
// all samples share a head's bias, they come one after another.
template <typename Shape> struct Scheduler {
    RowTiles<Shape::kBlockM, Shape::kCached> tiles;
    uint32_t num_tiles;
    uint32_t heads;         // of all samples, or of a packed batch
    uint32_t group;         // heads that are interleaved
    uint32_t heads_per_kv;  // query heads
    uint32_t samples;       // that share a head's bias, or 1

    Scheduler(const Shape::Input &p, int64_t num_tiles)
        : tiles(p), num_tiles(num_tiles), heads(num_tiles / tiles.slots), group(1),
          heads_per_kv(p.nheads / p.nheads_k), samples(1) {
        const Bias &x = p.bias;
        if (x.data && x.row_stride && x.head_stride && !x.batch_stride) samples = uint32_t(p.batch_size);
        if (!p.tile_counter) return;
        const double kv_bytes = 2. * p.seqlen_k * (p.head_dim + p.head_dim_v), l2_bytes = 32 << 20;
        const double head_bytes = samples > 1 ? kv_bytes : kv_bytes / heads_per_kv;
        auto has_room = [&](uint32_t n) { return n * head_bytes <= l2_bytes && n * tiles.slots <= kTilesInL2; };
        while (2 * group <= heads && has_room(2 * group)) group *= 2;
    }
    // The last rows go first: under a causal mask they see most keys.
    __device__ Tile at(const AttnParams &p, uint32_t idx) const {
        if (idx >= num_tiles) return {0, 0, 0, 0, false};
        const uint32_t slots = tiles.slots, bh0 = idx / (group * slots) * group, i = idx - bh0 * slots;
        const uint32_t heads_now = min(group, heads - bh0), row = i / heads_now;
        uint32_t bh = bh0 + i - row * heads_now;
        if (samples > 1) bh = bh % samples * p.nheads + bh / samples;
        return tiles.tile(bh, slots - 1 - row, Number(p.nheads), Number(heads_per_kv));
    }
    // A negative idx stands before the first tile of this block.
    __device__ int next(const Shape::Input &p, int idx) const {
        if constexpr (Shape::kCached)
            if (p.phase != Phase::kAlone) return atomicAdd(p.tile_counter, 1);
        if (idx < 0) return blockIdx.x;
        return gridDim.x + (p.tile_counter ? atomicAdd(p.tile_counter, 1) : idx);
    }
    // The last block leaves the counters as they were, 0.
    __device__ void end(const Shape::Input &p) const {
        if constexpr (!Shape::kCached)
            if (p.tile_counter && atomicAdd(p.tile_counter + 1, 1) == gridDim.x - 1)
                p.tile_counter[0] = p.tile_counter[1] = 0;
    }
};

template <typename Shape> struct Params : Shape::Input {
    Scheduler<Shape> scheduler;
    TmaTensor q_tma, k_tma, v_tma, o_tma;
};

// By a thread, while the last keys of the tile before are loaded: a tile taken earlier waits, beside idle blocks.
template <typename Shape> __device__ void find_tiles(const Params<Shape> &p, typename Shape::SharedMemory &shared) {
    constexpr int kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN;
    uint32_t item = 0;
    for (int idx = -1;;) {
        shared.found.producer_acquire(item);
        idx = p.scheduler.next(p, idx);
        auto &work = shared.work(item);  // this thread has few registers
        work.tile = p.scheduler.at(p, idx);
        const Tile &tile = work.tile;
        if (!tile.is_valid) break;
        const Sequence &seq = work.seq = Sequence(p, tile.b);
        if (tile.block * kBlockM >= seq.padded_q) continue;  // its sample is shorter
        if constexpr (Shape::kCached)
            if (!seq.is_served(p)) continue;
        const auto mask = work.mask = typename Shape::Mask(seq, p);
        const BlockRange all = mask.template key_blocks<kBlockM, kBlockN>(tile.block * kBlockM);
        work.n_block_min = all.begin, work.n_block_max = all.end;
        work.first_key = mask.keys(tile.block * kBlockM).begin;
#pragma unroll 1
        for (int c = 0; c < Shape::kConsumers; c++)
            work.blocks[c] = mask.template key_blocks<64, kBlockN>(tile.block * kBlockM + 64 * c);
        work.extend(p);
        mbarrier_arrive(shared.found.full_barrier(item++));
    }
    mbarrier_arrive(shared.found.full_barrier(item));  // of a tile that is not valid
    p.scheduler.end(p);
}

// One thread or warp loads Q, K and V. With a cache, one warp loads Q and K, another one V.
enum class Loads { kAll, kKeys, kValues };
template <typename Shape, Loads kLoads>
__device__ void load_tiles(const Params<Shape> &p, typename Shape::SharedMemory &shared) {
    constexpr int kBlockM = Shape::kBlockM, kAhead = 2 * Shape::kStages;
    // kEarly: how many consumers get Q before the first keys are asked for. Where consumers alternate, consumer 1 gets
    // the buffer that consumer 0 had for the tile before, and keys do not wait for the end of that tile.
    constexpr int kEarly = decltype(shared.q)::kAlternate ? 1 : Shape::kConsumers;
    constexpr bool kKeys = kLoads != Loads::kValues, kValues = kLoads != Loads::kKeys;
    const int lane_idx = Shape::kWarpLoads ? threadIdx.x % 32 : 0;
    prefetch(p.q_tma.map), prefetch(p.k_tma.map), prefetch(p.v_tma.map), prefetch(p.o_tma.map);
    uint32_t q_item = 0, kv_item = 0;  // of the rings
    for (;; q_item++) {
        shared.found.consumer_wait(q_item);
        Shape::KeyBlocks::begin_tile();
        const auto &work = shared.work(q_item);
        if (!work.tile.is_valid) break;
        const int q_row = work.seq.q_begin + work.tile.block * kBlockM, b = work.tile.b;
        auto load_q = [&](int begin, int end) {
#pragma unroll 1
            for (int c = begin; c < end; c++) {
                if (!kKeys || lane_idx > 0) continue;
                shared.q.producer_acquire(q_item, c);
                load_tile(shared.sQ[shared.q.index(q_item, c)], p.q_tma, shared.q.full_barrier(q_item, c),
                          q_row + 64 * c, work.tile.h, b);
            }
        };
        load_q(0, kEarly);
        // When n_next blocks are left, find_tiles() may overwrite the oldest work item: consumers have released a later
        // Q. One of two warps has not waited for that, but find_tiles() waits for both.
        const int num_blocks = work.num_blocks(), n_next = min(num_blocks, kAhead + 1);
        int n_block = work.first_block();
        typename Shape::KeyBlocks keys(p, work.tile, work.seq, n_block);
        typename Shape::TileWalk walk(p, shared, work);
        if (num_blocks <= 0) {
            load_q(kEarly, Shape::kConsumers);
            shared.found.consumer_release(q_item, lane_idx);
        }
#pragma unroll 1
        for (int n_left = num_blocks, next; n_left > 0; n_left--, n_block = next, kv_item++) {
            const uint32_t stage = kv_item % Shape::kStages;
            next = walk.block_after(n_block);
            keys.find(n_block);
            if (n_left == n_next) shared.found.consumer_release(q_item, lane_idx);
            if constexpr (kKeys) {
                shared.k.producer_acquire(kv_item);
                walk.announce(stage);
                if (Shape::kCached || lane_idx == 0)
                    keys.load(shared.sK[stage], p.k_tma, shared.k.full_barrier(kv_item));
            }
            shared.load_more(p, kv_item, work, keys);
            if constexpr (kValues) {
                shared.v.producer_acquire(kv_item);
                if (Shape::kCached || lane_idx == 0)
                    keys.load(shared.sV[stage], p.v_tma, shared.v.full_barrier(kv_item));
            }
            if (n_left == num_blocks) load_q(kEarly, Shape::kConsumers);
        }
    }
    if (kKeys && lane_idx == 0)
        for (int c = 0; c < Shape::kConsumers; c++) {  // which ends each consumer
            shared.q.producer_acquire(q_item, c);
            mbarrier_arrive(shared.q.full_barrier(q_item, c));
        }
}

template <typename Shape> __device__ void produce(const Params<Shape> &p, typename Shape::SharedMemory &shared) {
    if constexpr (Shape::kCached) {
        if (threadIdx.x / 32 == 0) load_tiles<Shape, Loads::kKeys>(p, shared);
        else if (threadIdx.x == 32) find_tiles<Shape>(p, shared);
        else if (threadIdx.x / 32 == 2) load_tiles<Shape, Loads::kValues>(p, shared);
    } else if (Shape::kWarpLoads ? threadIdx.x < 32 : threadIdx.x == 0) load_tiles<Shape, Loads::kAll>(p, shared);
    else if (threadIdx.x == 32) find_tiles<Shape>(p, shared);
}

}  // namespace sm90
