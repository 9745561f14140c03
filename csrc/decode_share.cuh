// How decode.cu cuts a batch into work, and which share of it a block has.
//
// The packed rows of a sample are cut into tiles, and its keys into chunks of equal length. A chunk for one tile of one
// key head is an item. All items of the batch lie on one line. The length of an item on the line is an estimate of its
// time, and every block has an equal part of the line. The device finds all of this, from lengths that it alone knows.
//
// Read next: decode.cu, what is done with an item.
#pragma once

#include "flash.h"
#include "launch.h"
#include "mask.cuh"

namespace sm80 {

template <int kHeadDim_, int kBlockN_, int kMTiles_> struct DecodeShape {
    static constexpr int kHeadDim = kHeadDim_, kBlockN = kBlockN_, kMTiles = kMTiles_;
    static constexpr int kBlockM = 16 * kMTiles, kRows = 2 * kMTiles, kDTiles = kHeadDim / 8;
    static constexpr int kStages = 3, kMaxWarps = 8;
    static constexpr bool kKeepsQ = kBlockM * kHeadDim <= 2048;  // in registers; else it comes from L1 every time
    static constexpr int kPitch = kHeadDim + 4;  // floats of a row in the workspace: acc_o, row_max, row_sum, 2 unused
};

constexpr int kMinChunk = 64, kMaxChunk = 2048;  // keys
constexpr int kMinSplits = 16, kMaxSplits = 32;  // 16 splits up to 32K keys, then one for each 2048 keys, 32 at most
constexpr int kChunkCost = 64;                   // what the end of a chunk costs a block, in keys

__host__ __device__ inline int ceil_div(int x, int y) { return (x + y - 1) / y; }
__host__ __device__ inline int num_splits_of(int keys) {
    const int splits = ceil_div(keys, kMaxChunk);
    return splits < kMinSplits ? kMinSplits : splits > kMaxSplits ? kMaxSplits : splits;
}

// The room in the workspace for a sample and a key head: `tiles` counters, and the results of `chunks` chunks, each of
// `rows` rows. What needs more is not cut.
struct Room {
    int rows, tiles, chunks;

    Room(const DecodeParams &p, int block_m) {
        const int64_t packed_rows = int64_t(p.nheads / p.nheads_k) * p.max_seqlen_q;
        const int64_t most_tiles = (packed_rows + block_m - 1) / block_m;
        rows = int(packed_rows < block_m ? packed_rows : block_m);
        chunks = p.num_splits == 0 ? num_splits_of(p.seqlen_k) : p.num_splits;
        if (p.num_splits > 1 && chunks < kMaxSplits) chunks = kMaxSplits;  // for several tiles
        tiles = int(most_tiles < chunks ? most_tiles : chunks);
    }
};

// How the valid packed rows of a sample are cut into tiles, and its keys into chunks. A sample has about num_splits_of
// its keys items for each key head, so more tiles mean fewer chunks. Padding has no part in it.
template <typename Shape> struct Cut {
    Sequence seq;
    int num_rows, num_tiles;
    int num_chunks, chunk_size;  // of a tile, and in keys
    int begin, end;              // the keys that some row sees

    __device__ Cut(const DecodeParams &p, const Room &room, int b) : seq(p, b) {
        const Mask mask(seq.seqlen_q, seq.seqlen_k, p);
        num_rows = seq.seqlen_q * (p.nheads / p.nheads_k);
        num_tiles = ceil_div(num_rows, Shape::kBlockM);
        begin = num_rows ? mask.keys(0).begin : 0, end = num_rows ? mask.keys(seq.seqlen_q - 1).end : 0;
        const int keys = max(0, end - aligned_begin());
        const int most = p.num_splits ? min(p.num_splits, room.chunks / max(1, num_tiles))
                                      : num_splits_of(keys) / max(1, num_tiles);
        const bool fits = num_tiles <= room.tiles && min(num_rows, Shape::kBlockM) <= room.rows;
        const int splits = fits ? max(1, most) : 1;
        chunk_size = max(kMinChunk, ceil_div(ceil_div(keys, splits), Shape::kBlockN) * Shape::kBlockN);
        num_chunks = max(1, ceil_div(keys, chunk_size));
    }
    __device__ int aligned_begin() const { return begin / Shape::kBlockN * Shape::kBlockN; }
    __device__ int items(const DecodeParams &p) const { return num_tiles * num_chunks * p.nheads_k; }
    __device__ int64_t cost() const { return int64_t(chunk_size) + kChunkCost; }  // of one item
};

// Where the share of a block begins and ends on the line.
struct Share {
    int b, item;
    int64_t place, end;
};

// One item of a block's share: a chunk of keys for a tile of packed rows of a key head.
template <typename Shape> struct Item {
    const DecodeParams &p;
    const Room &room;
    int b, index;        // of the sample, and among its items
    int64_t place;       // on the line
    const int64_t &end;  // of the block's share. A reference, as registers are few
    Cut<Shape> cut;
    int h_k, tile, chunk, key_begin, key_end;
    Range full;  // the keys that all rows see

    __device__ Item(const DecodeParams &p, const Room &room, const Share &share)
        : p(p), room(room), b(share.b), index(share.item), place(share.place), end(share.end), cut(p, room, b) {
        settle();
    }
    __device__ bool is_valid() const { return place < end; }
    __device__ void next() {
        place += cut.cost(), index++;
        settle();
    }
    // Where this warp begins, and how far it goes at a time.
    __device__ int warp_begin() const { return key_begin + int(threadIdx.x / 32) * Shape::kBlockN; }
    __device__ int key_step() const { return int(blockDim.x / 32) * Shape::kBlockN; }
    __device__ bool all_rows_see(int key) const { return key >= full.begin && key + Shape::kBlockN <= full.end; }
    __device__ int valid_rows() const { return min(Shape::kBlockM, cut.num_rows - tile * Shape::kBlockM); }

  private:
    __device__ void settle() {
        while (is_valid() && index == cut.items(p)) {
            b++, index = 0;
            cut = Cut<Shape>(p, room, b);
        }
        if (!is_valid()) return;
        tile = index % cut.num_tiles;  // neighbours share keys
        chunk = index / cut.num_tiles % cut.num_chunks, h_k = index / cut.num_tiles / cut.num_chunks;
        const int group = p.nheads / p.nheads_k, row0 = tile * Shape::kBlockM;
        const int last_row = min(row0 + Shape::kBlockM, cut.num_rows) - 1;
        const int begin = cut.aligned_begin() + chunk * cut.chunk_size;
        const Mask mask(cut.seq.seqlen_q, cut.seq.seqlen_k, p);
        const Range first = mask.keys(row0 / group), last = mask.keys(last_row / group);
        key_begin = max(begin, first.begin / Shape::kBlockN * Shape::kBlockN);
        key_end = min(begin + min(cut.chunk_size, cut.end - begin), last.end);
        full = {last.begin, first.end};
    }
};

// The share of this block: samples are dealt out to threads, whose sums are scanned.
template <typename Shape>
__device__ void find_share(const DecodeParams &p, const Room &room, Share &share, int64_t (&costs)[Shape::kMaxWarps]) {
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32, num_threads = blockDim.x;
    const int64_t samples = (p.batch_size + num_threads - 1) / num_threads;  // of a thread
    const int b_begin = int(min(threadIdx.x * samples, p.batch_size));
    const int b_end = int(min(b_begin + samples, p.batch_size));
    int64_t cost = 0;
    for (int b = b_begin; b < b_end; b++) {
        const Cut<Shape> cut(p, room, b);
        cost += cut.items(p) * cut.cost();
    }
    int64_t place = cost;  // on the line, of the end of this thread's samples
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int64_t before = __shfl_sync(~0u, place, max(lane_idx - lanes, 0));
        if (lane_idx >= lanes) place += before;
    }
    if (lane_idx == 31) costs[warp_idx] = place;
    if (threadIdx.x == 0) share = {0, 0, 0, 0};  // an empty one, if there is no work at all
    __syncthreads();
    int64_t total = 0;
    for (int warp = 0; warp < num_threads / 32; warp++) {
        if (warp < warp_idx) place += costs[warp];
        total += costs[warp];
    }
    const int64_t begin = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;
    place -= cost;
    if (begin >= place && begin < place + cost)
        for (int b = b_begin; b < b_end; b++) {
            const Cut<Shape> cut(p, room, b);
            const int64_t cost_of_sample = cut.items(p) * cut.cost();
            if (begin < place + cost_of_sample) {  // the first item that begins in the share
                const int item = int((begin - place + cut.cost() - 1) / cut.cost());
                share = {b, item, place + item * cut.cost(), end};
                break;
            }
            place += cost_of_sample;
        }
    __syncthreads();
}

}  // namespace sm80
