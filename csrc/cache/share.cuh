// The folder cache/ has attention to long caches, see decode.cu. Order in cache/: share.cuh, keys.cuh, rows.cuh,
// result.cuh, join.cuh, decode.cu. Beside it: decode_sm90.cu, prefill_sm90.cu, boxes.cuh.
//
// A sample's packed rows are cut into tiles, its keys into chunks of equal length. An item is a chunk for one tile of
// one key head. All items lie on one line, in steps of kBlockN keys, and every block has an equal share of the line. A
// run is a tile's neighbouring chunks in a share.
//
// With num_splits, a sample's own lengths cut its chunks and each has a result, so its bits do not depend on the batch.
// Without, a chunk is one step and a run has one result: work is even, and at most two results of a block wait in
// memory for other blocks.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/cache_sequence.cuh"
#include "common/launch.h"
#include "common/mask.cuh"

namespace decoding {

// A step has 16 KB of K and of V each.
template <int kHeadDim_, int kNumWarps_> struct KeyShape {
    static constexpr int kHeadDim = kHeadDim_, kBlockN = 8192 / kHeadDim;
    static constexpr int kNumWarps = kNumWarps_, kNumThreads = 32 * kNumWarps;
    static constexpr int kPitch = kHeadDim + 4;  // floats of a row in the workspace
};

// Unsigned divisions take fewer instructions.
__device__ inline int floor_div(unsigned x, unsigned y) { return int(x / y); }
__device__ inline int ceil_div(unsigned x, unsigned y) { return int((x + y - 1) / y); }

// The workspace in global memory. A share has two slots: for a tile from an earlier share, and for one that goes on in
// a later share. With num_splits, a sample and key head has `splits` slots, one for each chunk; a sample that needs
// more is not cut.
struct Room {
    int group;           // query heads of a key head
    uint32_t per_group;  // the next integer above 2^31 / group
    int rows;            // of a result
    int splits;          // num_splits, or 0
    int tiles;           // TileCounters of a sample and key head

    Room(const DecodeParams &p, int block_m)
        : group(p.nheads / p.nheads_k), per_group((1u << 31) / group + 1), splits(p.num_splits) {
        const int64_t packed_rows = int64_t(group) * p.max_seqlen_q;
        rows = int(packed_rows < block_m ? packed_rows : block_m);
        tiles = int(std::min<int64_t>((packed_rows + block_m - 1) / block_m, splits));
    }
};

struct TileCounters {
    int chunks;  // with a result
    int groups;  // of rows, taken by blocks
    int left;    // chunks whose blocks have left
};

template <typename Shape> int64_t workspace_bytes(const DecodeParams &p, int64_t blocks) {
    const Room room(p, Shape::kBlockM);
    const int64_t slots = room.splits ? p.batch_size * p.nheads_k * room.splits : 2 * blocks;
    return room.splits == 1 ? 0 : slots * room.rows * int64_t(4 * Shape::kPitch);
}

template <typename Shape> int64_t num_counters(const DecodeParams &p, int64_t blocks) {
    const Room room(p, Shape::kBlockM);
    const int64_t tiles = room.splits ? p.batch_size * p.nheads_k * room.tiles : blocks;
    return room.splits == 1 ? 0 : tiles * int(sizeof(TileCounters) / sizeof(int));
}

// Key heads often lie side by side in memory and are fastest to read together: `heads` neighbouring blocks read the
// same keys, each for its own head. Each of these heads has a line, and all lines are cut alike.
struct Line {
    int heads;
    int heads_of_line;   // one after another on a line
    int shares;          // of a line, at most
    uint32_t per_share;  // 2^32 / shares, rounded up
    uint32_t per_head;   // the next integer above 2^31 / heads

    Line(int nheads_k, int blocks) : heads(1) {
        for (int n = 2; n <= 16; n++)
            if (nheads_k % n == 0 && blocks % n == 0) heads = n;
        heads_of_line = nheads_k / heads;
        shares = blocks / heads, per_share = UINT32_MAX / shares + 1, per_head = (1u << 31) / heads + 1;
    }
    __device__ int share() const { return __umulhi(2 * blockIdx.x, per_head); }
    __device__ int head() const { return blockIdx.x - share() * heads; }
};

template <typename Shape> void check_size(const DecodeParams &p, const Room &room, const Line &line) {
    if (room.group > 1 << 15) throw std::invalid_argument("minimal_attn: a key head has over 32768 query heads");
    const int64_t all_rows = p.cu_seqlens_q ? p.seqlen_q : p.batch_size * p.seqlen_q;
    const int64_t rows = std::min(all_rows, p.batch_size * p.max_rows);
    const int64_t tiles = rows * room.group / Shape::kBlockM + p.batch_size;
    const int64_t chunks = p.seqlen_k / Shape::kBlockN + 2, rounding = room.splits ? 2 : 1;
    if (tiles > INT32_MAX / 2 / (chunks * rounding * line.heads_of_line))
        throw std::invalid_argument("minimal_attn: the call has over 2^30 steps of a tile of rows and " +
                                    std::to_string(Shape::kBlockN) + " keys; divide the batch into several calls");
}

// The shares of a line, none empty.
struct Shares {
    int steps, count;
    uint32_t per_share;

    __device__ Shares(const Line &line, int steps)
        : steps(steps), count(min(line.shares, steps)), per_share(line.per_share) {}

    // steps · share / count, rounded alike for all.
    __device__ int begin(int share) const {
        if (count == steps || share == count) return count == steps ? share : steps;
        return __umulhi(steps, share * per_share);
    }
    __device__ int of(int step) const {
        int share = min(int(__fdividef(float(step), float(steps)) * float(count)), count - 1);  // a guess
        while (begin(share) > step) share--;
        while (begin(share + 1) <= step) share++;
        return share;
    }
};

template <typename X> __device__ void copy_words(X &to, const X &from) {
    for (unsigned i = threadIdx.x % 32; i < sizeof(X) / 4; i += 32)
        reinterpret_cast<uint32_t *>(&to)[i] = reinterpret_cast<const uint32_t *>(&from)[i];
}

// A sample's tiles and chunks. With num_splits, a key head has about that many items: more tiles mean fewer chunks.
template <typename Shape> struct Cut {
    static constexpr int kBlockN = Shape::kBlockN;
    Sequence seq;
    int group;
    uint32_t per_group;
    int num_rows, num_tiles;
    int num_chunks, chunk_steps = 1;  // of a tile, of a chunk
    int begin, end;                   // the keys that some row sees

    Cut() = default;
    __device__ Cut(const DecodeParams &p, const Room &room, int b)
        : seq(p, b), group(room.group), per_group(room.per_group) {
        num_rows = seq.is_served(p) ? seq.seqlen_q * group : 0;
        num_tiles = ceil_div(num_rows, Shape::kBlockM);
        begin = max(0, seq.seqlen_k - seq.seqlen_q - p.window_left), end = seq.seqlen_k;  // as Mask has it
        num_chunks = max(1, ceil_div(end - aligned_begin(), kBlockN));
        if (room.splits == 0 && (room.rows == Shape::kBlockM || num_rows <= room.rows)) return;
        const int splits = num_tiles <= room.tiles ? floor_div(room.splits, max(1, num_tiles)) : 1;
        chunk_steps = ceil_div(num_chunks, max(1, splits)), num_chunks = ceil_div(num_chunks, chunk_steps);
    }
    __device__ int aligned_begin() const { return floor_div(begin, kBlockN) * kBlockN; }
    __device__ Range keys(int first, int last) const {
        const int chunk_size = chunk_steps * kBlockN;
        return {aligned_begin() + first * chunk_size, min(aligned_begin() + last * chunk_size, end)};
    }
    __device__ int items(const Line &line) const { return num_tiles * num_chunks * line.heads_of_line; }
    __device__ int steps(const Line &line) const { return items(line) * chunk_steps; }
    __device__ int chunks_of(int steps) const { return chunk_steps == 1 ? steps : ceil_div(steps, chunk_steps); }
    __device__ int items_before(int step, const Line &line) const { return min(items(line), chunks_of(max(0, step))); }
};

// Copies in shared memory: functions that are not inlined would read the kernel's parameters as global memory.
struct Call {
    DecodeParams p;
    Room room;
    Line line;

    // By two warps, before the barrier in find_first_run().
    __device__ void copy(const DecodeParams &from_p, const Room &from_room, const Line &from_line) {
        if (threadIdx.x < 32) copy_words(p, from_p);
        else if (threadIdx.x < 64) copy_words(room, from_room), copy_words(line, from_line);
    }
};

template <typename Shape> struct Run;

// Not inlined: few batches have more samples than a block has threads.
template <typename Shape>
__device__ __noinline__ int steps_of(const DecodeParams &p, const Room &room, const Line &line, int b_begin,
                                     int b_end) {
    int steps = 0;
    for (int b = b_begin; b < b_end; b++) steps += Cut<Shape>(p, room, b).steps(line);
    return steps;
}

// A product replaces a slow division.
struct PackedRow {
    int token, head;
    template <typename Shape> __device__ PackedRow(const Run<Shape> &run, int row) {
        const int offset = run.head_of_group + row, tokens = __umulhi(2 * offset, run.cut.per_group);
        token = run.token + tokens, head = run.h_k * run.cut.group + offset - tokens * run.cut.group;
    }
};

// Chunks [chunk_begin, chunk_end) of a tile. One thread moves the run on.
template <typename Shape> struct alignas(16) Run {
    int place, end;  // the run's place on the line, and the end of the block's share
    int b, index;    // sample, and the first chunk among its items
    Shares shares;
    Cut<Shape> cut;
    int h_k, tile, chunk_begin, chunk_end, key_begin, key_end;
    int token, head_of_group;  // first row of the tile
    Range full;  // the keys that all rows see

    __device__ Run(const DecodeParams &p, const Line &line, const Shares &shares, int b, const Cut<Shape> &cut,
                   int index, int place, int end)
        : place(place), end(end), b(b), index(index), shares(shares), cut(cut) {
        if (index < cut.items(line)) settle(p, line);
    }
    __device__ void next(const Call &call) {
        place += num_chunks() * cut.chunk_steps, index += num_chunks();
        if (is_valid()) go_on(call.p, call.room, call.line, place);  // a call at the end would do nothing
    }
    // Goes to a later sample's first item at or behind `begin`. Not inlined: most steps do not come here.
    __device__ __noinline__ void go_on(const DecodeParams &p, const Room &room, const Line &line, int begin) {
        while (is_valid() && index == cut.items(line)) {
            cut = Cut<Shape>(p, room, ++b);
            index = cut.items_before(begin - place, line), place += index * cut.chunk_steps;
        }
        if (is_valid()) settle(p, line);
    }
    __device__ bool is_valid() const { return place < end; }
    __device__ int num_chunks() const { return chunk_end - chunk_begin; }
    __device__ bool has_whole_tile() const { return num_chunks() == cut.num_chunks; }
    __device__ bool has_one_result(const Room &room) const {
        return has_whole_tile() && (room.splits == 0 || cut.num_chunks == 1);
    }
    __device__ bool all_rows_see(int key) const { return key >= full.begin && key + Shape::kBlockN <= full.end; }
    __device__ int valid_rows() const { return min(Shape::kBlockM, cut.num_rows - tile * Shape::kBlockM); }
    __device__ int part_end(int chunk, const Room &room) const { return room.splits ? chunk + 1 : chunk_end; }
    __device__ Range keys(int first, int last) const {
        const Range all = cut.keys(first, last);
        return {max(all.begin, key_begin), min(all.end, key_end)};
    }
    __device__ int first_share() const { return shares.of(place - chunk_begin * cut.chunk_steps); }
    __device__ int last_share() const {
        return shares.of(place + (cut.num_chunks - chunk_begin) * cut.chunk_steps - 1);
    }

  private:
    __device__ void settle(const DecodeParams &p, const Line &line) {
        chunk_begin = index, tile = 0, h_k = line.head();
        if (index >= cut.num_chunks) {  // divisions are slow
            const int tiles = floor_div(index, cut.num_chunks), heads = floor_div(tiles, cut.num_tiles);
            chunk_begin -= tiles * cut.num_chunks, tile = tiles - heads * cut.num_tiles, h_k += heads * line.heads;
        }
        chunk_end = min(cut.num_chunks, chunk_begin + cut.chunks_of(end - place));
        token = cut.num_tiles > 1 ? floor_div(tile * Shape::kBlockM, cut.group) : 0;
        head_of_group = tile * Shape::kBlockM - token * cut.group;
        const int last_token = PackedRow(*this, valid_rows() - 1).token;
        const Mask mask(cut.seq.seqlen_q, cut.seq.seqlen_k, p);
        const Range first = mask.keys(token), last = mask.keys(last_token), all = cut.keys(chunk_begin, chunk_end);
        key_begin = max(all.begin, floor_div(first.begin, Shape::kBlockN) * Shape::kBlockN);
        key_end = min(all.end, last.end);
        full = {last.begin, p.tree_mask ? cut.seq.seqlen_k - cut.seq.seqlen_q : first.end};
    }
};

// A block's view of a tile with several results.
struct Join {
    bool has_all;
    int group;
};

// The first run, and later ones by turns in four slots: decode.cu uses three at a time, but i % 3 costs 22 registers.
template <typename Shape> struct Runs {
    Run<Shape> slots[5];
    Join joins[2];  // tiles of the first and last run

    __device__ Run<Shape> &operator[](int i) { return slots[i == 0 ? 4 : i % 4]; }
};

// Threads divide the samples and scan their sums. The one whose sample holds the share's begin finds the run.
template <typename Shape>
__device__ void find_first_run(Run<Shape> &run, int (&steps_of_warps)[Shape::kNumWarps], const DecodeParams &p,
                               const Room &room, const Line &line) {
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32, batch_size = int(p.batch_size);
    const int samples = ceil_div(batch_size, Shape::kNumThreads);  // of a thread
    const int b_begin = threadIdx.x * samples, b_end = min(b_begin + samples, batch_size);
    Cut<Shape> cut;
    int steps = 0;
    if (b_begin < b_end) cut = Cut<Shape>(p, room, b_begin), steps = cut.steps(line);
    if (b_begin + 1 < b_end) steps += steps_of<Shape>(p, room, line, b_begin + 1, b_end);
    int place = steps;  // on the line, where this thread's samples end
#pragma unroll 1
    for (int lanes = 1; lanes < min(batch_size, 32); lanes *= 2) {
        const int before = __shfl_up_sync(~0u, place, lanes);
        if (lane_idx >= lanes) place += before;
    }
    int total = __shfl_sync(~0u, place, min(batch_size, 32) - 1);
    if (batch_size > 32) {  // otherwise the first warp has all samples
        if (lane_idx == 0) steps_of_warps[warp_idx] = total;
        __syncthreads();
        total = 0;
        for (int warp = 0; warp < Shape::kNumWarps; warp++) {
            if (warp < warp_idx) place += steps_of_warps[warp];
            total += steps_of_warps[warp];
        }
    }
    const Shares shares(line, total);
    const int share = line.share(), begin = share < shares.count ? shares.begin(share) : total;
    if (threadIdx.x == 0 && begin == total) run.place = run.end = 0;  // no share
    place -= steps;
    if (begin < total && begin >= place && begin < place + steps) {
        const int item = cut.items_before(begin - place, line);
        run = Run<Shape>(p, line, shares, b_begin, cut, item, place + item * cut.chunk_steps, shares.begin(share + 1));
        if (item == cut.items(line)) run.go_on(p, room, line, begin);
    }
    __syncthreads();
}

template <typename Shape> struct StepsAhead {
    const DecodeParams &p;
    const Call &call;
    Run<Shape> &run;  // of this warp
    int key;          // first of the next step

    __device__ StepsAhead(const DecodeParams &p, const Call &call, Run<Shape> &run)
        : p(p), call(call), run(run), key(run.is_valid() ? run.key_begin : 0) {}

    // All lanes of a warp call it.
    __device__ void settle() {
        while (run.is_valid() && key >= run.key_end) {
            __syncwarp();  // all lanes have read the run
            if (threadIdx.x % 32 == 0) run.next(call);
            __syncwarp();  // the next one is there
            key = run.key_begin;
        }
    }
};

}  // namespace decoding
