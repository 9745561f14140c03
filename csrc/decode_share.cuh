// How decode.cu and decode_sm90.cu cut a batch into work, and which share of it a block has.
//
// The packed rows of a sample are cut into tiles, and its keys into chunks of equal length. A chunk for one tile of one
// key head is an item. All items of the batch lie on one line. The length of an item on the line is an estimate of its
// time, and every block has an equal share of the line. The device finds all of this, from lengths that it alone knows.
// Samples that another launch serves have no items.
// Neighbouring chunks of a tile within the share of a block are a run.
//
// Read next: decode_cache.cuh, how the keys of runs come to shared memory.
#pragma once

#include "flash.h"
#include "launch.h"
#include "mask.cuh"

namespace decoding {

// What the kernels' shapes have in common: four warps, and kBlockN keys a step, 16 KB of K and as many of V.
template <int kHeadDim_> struct KeyShape {
    static constexpr int kHeadDim = kHeadDim_, kBlockN = 8192 / kHeadDim;
    static constexpr int kNumWarps = 4, kNumThreads = 32 * kNumWarps;
    static constexpr int kPitch = kHeadDim + 4;  // floats of a row in the workspace: acc_o, row_max, row_sum, chunks
};

constexpr int kMinChunk = 64, kMaxChunk = 2048;  // keys
constexpr int kMinSplits = 16, kMaxSplits = 32;  // 16 splits up to 32K keys, then one for each 2048 keys, 32 at most
constexpr int kChunkCost = 16;                   // what the end of a chunk costs a block, in keys

__host__ __device__ inline int ceil_div(int x, int y) { return (x + y - 1) / y; }
__host__ __device__ inline int num_splits_of(int keys) {
    const int splits = ceil_div(keys, kMaxChunk);
    return splits < kMinSplits ? kMinSplits : splits > kMaxSplits ? kMaxSplits : splits;
}

// The room in the workspace for a sample and a key head: `tiles` counters, and the results of `chunks` chunks, each of
// `rows` rows. A sample that needs more room is not cut.
struct Room {
    int group;  // query heads of a key head
    int rows, tiles, chunks;

    Room(const DecodeParams &p, int block_m) : group(p.nheads / p.nheads_k) {
        const int64_t packed_rows = int64_t(group) * p.max_seqlen_q;
        const int64_t most_tiles = (packed_rows + block_m - 1) / block_m;
        rows = int(packed_rows < block_m ? packed_rows : block_m);
        chunks = p.num_splits == 0 ? num_splits_of(p.seqlen_k) : p.num_splits;
        if (p.num_splits > 1 && most_tiles > 1 && chunks < kMaxSplits) chunks = kMaxSplits;
        tiles = int(most_tiles < chunks ? most_tiles : chunks);
    }
};

template <typename Shape> int64_t workspace_bytes(const DecodeParams &p) {
    const Room room(p, Shape::kBlockM);
    return room.chunks <= 1 ? 0 : p.batch_size * p.nheads_k * room.chunks * room.rows * int64_t(4 * Shape::kPitch);
}

template <typename Shape> int64_t num_counters(const DecodeParams &p) {
    const Room room(p, Shape::kBlockM);
    return room.chunks <= 1 ? 0 : p.batch_size * p.nheads_k * room.tiles;
}

// The key heads of a key often lie side by side in memory, where it is fastest to read all of them at once. So `heads`
// neighbouring blocks work on the same keys, each for a head of its own. There is a line for each of these heads, and
// all lines are cut into shares in the same way.
struct Line {
    int heads;           // side by side
    int heads_of_line;   // one after another on a line
    int64_t shares;      // of a line
    uint64_t per_share;  // 2^64 / shares

    Line(int nheads_k, int64_t blocks) : heads(1) {
        for (int n = 2; n <= 16; n++)
            if (nheads_k % n == 0 && blocks % n <= blocks / 32) heads = n;
        heads_of_line = nheads_k / heads;
        shares = blocks / heads, per_share = ~uint64_t(0) / uint64_t(shares);
    }
};

// How the valid packed rows of a sample are cut into tiles, and its keys into chunks. A sample has about num_splits_of
// its keys items for each key head, so more tiles mean fewer chunks. Padding does not count.
template <typename Shape> struct Cut {
    Sequence seq;
    int group, num_rows, num_tiles;
    int num_chunks = 1, chunk_size = kMinChunk;  // of a tile, and in keys
    int begin = 0, end = 0;                      // the keys that some row sees

    __device__ Cut(const DecodeParams &p, const Room &room, int b) : seq(p, b), group(room.group) {
        const Mask mask(seq.seqlen_q, seq.seqlen_k, p);
        num_rows = seq.is_served(p) ? seq.seqlen_q * group : 0;
        num_tiles = ceil_div(num_rows, Shape::kBlockM);
        if (num_rows == 0) return;
        begin = mask.keys(0).begin, end = mask.keys(seq.seqlen_q - 1).end;
        const int keys = max(0, end - aligned_begin());
        int splits = p.num_splits ? room.chunks : num_splits_of(keys);  // of all tiles together
        if (num_tiles > 1) splits = max(1, splits / num_tiles);
        if (p.num_splits) splits = min(splits, p.num_splits);
        if (num_tiles > room.tiles || min(num_rows, Shape::kBlockM) > room.rows) splits = 1;
        chunk_size = max(kMinChunk, ceil_div(ceil_div(keys, splits), Shape::kBlockN) * Shape::kBlockN);
        num_chunks = max(1, ceil_div(keys, chunk_size));
    }
    __device__ int aligned_begin() const { return begin / Shape::kBlockN * Shape::kBlockN; }
    __device__ Range keys(int chunk) const {
        const int first = aligned_begin() + chunk * chunk_size;
        return {first, first + min(chunk_size, end - first)};
    }
    __device__ int items(const Line &line) const { return num_tiles * num_chunks * line.heads_of_line; }
    __device__ unsigned cost() const { return unsigned(chunk_size) + kChunkCost; }  // of one item
    __device__ int64_t total_cost(const Line &line) const { return int64_t(items(line)) * cost(); }
};

// A run: the chunks [chunk_begin, chunk_end) of a tile of packed rows of a key head. It lies in shared memory, and one
// thread moves it on for all.
template <typename Shape> struct Run {
    int b, index;        // of the sample, and of the first chunk among its items
    int64_t place, end;  // on the line: of the run, and of the block's share
    Cut<Shape> cut;
    int h_k, tile, chunk_begin, chunk_end, key_begin, key_end;
    Range full;  // the keys that all rows see

    __device__ Run(const DecodeParams &p, const Room &room, const Line &line, int b, const Cut<Shape> &cut, int index,
                   int64_t place, int64_t end)
        : b(b), index(index), place(place), end(end), cut(cut) {
        settle(p, room, line);
    }
    __device__ void next(const DecodeParams &p, const Room &room, const Line &line) {
        place += num_chunks() * int64_t(cut.cost()), index += num_chunks();
        settle(p, room, line);
    }
    __device__ bool is_valid() const { return place < end; }
    __device__ int num_chunks() const { return chunk_end - chunk_begin; }
    __device__ bool is_whole_tile() const { return num_chunks() == cut.num_chunks; }
    __device__ bool all_rows_see(int key) const { return key >= full.begin && key + Shape::kBlockN <= full.end; }
    __device__ int valid_rows() const { return min(Shape::kBlockM, cut.num_rows - tile * Shape::kBlockM); }
    // The keys of a chunk that some row of the tile sees.
    __device__ Range keys(int chunk) const {
        const Range all = cut.keys(chunk);
        return {max(all.begin, key_begin), min(all.end, key_end)};
    }

  private:
    __device__ void settle(const DecodeParams &p, const Room &room, const Line &line) {
        while (is_valid() && index == cut.items(line)) {
            b++, index = 0;
            cut = Cut<Shape>(p, room, b);
        }
        if (!is_valid()) return;
        chunk_begin = index, tile = 0, h_k = blockIdx.x % line.heads;
        if (index >= cut.num_chunks) {  // divisions are slow
            const int tiles = index / cut.num_chunks;
            chunk_begin -= tiles * cut.num_chunks, tile = tiles % cut.num_tiles;
            h_k += tiles / cut.num_tiles * line.heads;
        }
        chunk_end = cut.num_chunks;
        if (end - place < num_chunks() * int64_t(cut.cost()))
            chunk_end = chunk_begin + int((unsigned(end - place) + cut.cost() - 1) / cut.cost());
        const int end_row = (tile + 1) * Shape::kBlockM;
        const Mask mask(cut.seq.seqlen_q, cut.seq.seqlen_k, p);
        const Range first = mask.keys(tile == 0 ? 0 : tile * Shape::kBlockM / cut.group);
        const Range last = mask.keys(end_row >= cut.num_rows ? cut.seq.seqlen_q - 1 : (end_row - 1) / cut.group);
        key_begin = max(cut.keys(chunk_begin).begin, first.begin / Shape::kBlockN * Shape::kBlockN);
        key_end = min(cut.keys(chunk_end - 1).end, last.end);
        full = {last.begin, p.tree_mask ? cut.seq.seqlen_k - cut.seq.seqlen_q : first.end};
    }
};

// Row `row` of a run's tile of packed rows.
struct PackedRow {
    int token, head;
    template <typename Shape> __device__ PackedRow(const Run<Shape> &run, int row) {
        row += run.tile * Shape::kBlockM;
        token = row < run.cut.group ? 0 : row / run.cut.group;  // divisions are slow
        head = run.h_k * run.cut.group + row - token * run.cut.group;
    }
};

// The first run of this block's share, in shared memory. Samples are dealt out to threads, whose sums are scanned. The
// thread that has the sample in which the share begins finds the run.
template <typename Shape>
__device__ void find_first_run(Run<Shape> &run, int64_t (&costs)[Shape::kNumWarps], const DecodeParams &p,
                               const Room &room, const Line &line) {
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    const int samples = int((p.batch_size + Shape::kNumThreads - 1) / Shape::kNumThreads);  // of a thread
    const int b_begin = min(int(threadIdx.x) * samples, int(p.batch_size));
    const int b_end = min(b_begin + samples, int(p.batch_size));
    Cut<Shape> cut(p, room, min(b_begin, int(p.batch_size) - 1));
    int64_t cost = b_begin < b_end ? cut.total_cost(line) : 0;
    for (int b = b_begin + 1; b < b_end; b++) cost += Cut<Shape>(p, room, b).total_cost(line);
    int64_t place = cost;  // on the line, of the end of this thread's samples
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int64_t before = __shfl_sync(~0u, place, max(lane_idx - lanes, 0));
        if (lane_idx >= lanes) place += before;
    }
    if (lane_idx == 31) costs[warp_idx] = place;
    if (threadIdx.x == 0) run.place = run.end = 0;  // no run, if no share begins anywhere
    __syncthreads();
    int64_t total = 0;
    for (int warp = 0; warp < Shape::kNumWarps; warp++) {
        if (warp < warp_idx) place += costs[warp];
        total += costs[warp];
    }
    // Share i begins at total · i / shares, rounded in the same way for all.
    const int share = blockIdx.x / line.heads;
    const int64_t begin = __umul64hi(total, share * line.per_share);
    const int64_t end = share + 1 == line.shares ? total : __umul64hi(total, (share + 1) * line.per_share);
    place -= cost;
    if (begin < end && begin >= place && begin < place + cost) {
        int b = b_begin;
        while (begin >= place + cut.total_cost(line)) {
            place += cut.total_cost(line), b++;
            cut = Cut<Shape>(p, room, b);
        }
        const int item = int((begin - place + cut.cost() - 1) / cut.cost());  // the first that begins in the share
        run = Run<Shape>(p, room, line, b, cut, item, place + item * int64_t(cut.cost()), end);
    }
    __syncthreads();
}

// A copy by the lanes of a warp.
template <typename X> __device__ void copy_words(X &to, const X &from) {
    for (unsigned i = threadIdx.x % 32; i < sizeof(X) / 4; i += 32)
        reinterpret_cast<uint32_t *>(&to)[i] = reinterpret_cast<const uint32_t *>(&from)[i];
}

// The steps of a block's share, as they are loaded, ahead of what is computed.
template <typename Shape> struct StepsAhead {
    const DecodeParams &p;
    const Room &room;
    const Line &line;
    Run<Shape> &run;  // of this warp
    int key;          // the first of the next step, if the run is valid

    __device__ StepsAhead(const DecodeParams &p, const Room &room, const Line &line, Run<Shape> &run)
        : p(p), room(room), line(line), run(run), key(run.is_valid() ? run.key_begin : 0) {}

    // Go on to the next run when the last one has no more keys. By all lanes of a warp.
    __device__ void settle() {
        while (run.is_valid() && key >= run.key_end) {
            __syncwarp();  // all lanes have read the run
            if (threadIdx.x % 32 == 0) run.next(p, room, line);
            __syncwarp();  // the next one is there
            key = run.key_begin;
        }
    }
};

}  // namespace decoding
