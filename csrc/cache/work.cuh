// How the GPU divides the keys of a cache by the lengths of samples (splits.cuh). Q and scores of a work item's rows.
#pragma once

#include "cache/splits.cuh"
#include "common/cache_sequence.cuh"
#include "common/mask.cuh"
#include "common/scores.cuh"
#include "common/softmax.cuh"
#include "ptx/cluster.cuh"

namespace decoding {

using namespace ptx;

// A sample's rows and keys as tiles and steps.
template <typename Shape> struct Sample {
    Sequence seq;
    int num_rows, num_tiles;
    int num_steps;   // for one tile with all rows
    bool may_split;  // its partial results fit the workspace

    __device__ Sample(const KernelParams &p, int b) : seq(p, b) {
        const Splits &splits = p.splits;
        num_rows = seq.is_served(p) ? seq.seqlen_q * splits.group : 0;
        num_tiles = ceil_div(num_rows, Shape::kBlockM);
        may_split = splits.may_split && num_rows > 0 && num_rows <= splits.rows;
        const int begin = Mask(seq.seqlen_q, seq.seqlen_k, p).keys(0).begin & -Shape::kPartKeys;
        num_steps = num_tiles ? shift_div(seq.seqlen_k - begin + splits.step_keys - 1, splits.step_keys) : 0;
    }
};

// How many work items the samples of this batch have, and of how many steps.
struct Plan {
    int total;         // steps of all samples
    int first, later;  // of the first item of a sample, and of each later one
    bool has_later;

    template <typename Shape> __device__ int count(const Splits &splits, const Sample<Shape> &sample) const {
        const int steps = sample.num_steps;
        if (!sample.may_split) return 1;
        if (!splits.max_items) return steps <= first ? 1 : 1 + ceil_div(steps - first, later);
        const int most = splits.by_share ? int(int64_t(steps) * splits.max_items / total) : splits.max_items;
        return max(1, min(most, shift_div(steps, splits.min_steps)));
    }
    // count: of the sample, above 1.
    __device__ Range steps(const Splits &splits, int num_steps, int count, int split) const {
        const int size = splits.max_items ? ceil_div(num_steps, count) : later, size0 = splits.max_items ? size : first;
        return {split ? size0 + (split - 1) * size : 0, min(num_steps, size0 + split * size)};
    }
    // The first slot of a sample with later items. The next sample's is at least count() further, as first >= later.
    __device__ int slot(int b, int steps_before) const { return steps_before / later + b; }
};

// A work item before its lengths are known. No more items: b is -1.
struct ItemIndex { int b, h_k, tile, split, first_slot; };
struct PackedRow { int token, head; };

// A tile of rows, and steps of keys for a cluster.
template <typename Shape> struct WorkItem : ItemIndex {
    const Splits &splits;
    Sequence seq;
    int rows;                  // of the tile; 0: there is no such item
    int token, head_of_group;  // of its first row
    int begin, end;            // the keys of the cluster; begin is that of a step
    Range keys, full;          // those that some row sees, those that all rows see
    int num_splits;            // work items of the sample
    int slot;                  // of its result in the workspace

    __device__ WorkItem(const KernelParams &p, const Plan &plan, const ItemIndex &at)
        : ItemIndex(at), splits(p.splits), slot((first_slot + split) * p.nheads_k + h_k) {
        const Sample<Shape> sample(p, b);
        seq = sample.seq;
        rows = max(0, min(Shape::kBlockM, sample.num_rows - tile * Shape::kBlockM));
        token = tile ? floor_div(tile * Shape::kBlockM, splits.group) : 0;
        head_of_group = tile * Shape::kBlockM - token * splits.group;
        const Mask mask(seq.seqlen_q, seq.seqlen_k, p);
        const Range first = mask.keys(token), last = mask.keys(packed_row(max(0, rows - 1)).token);
        keys = {first.begin, last.end};
        full = {last.begin, p.tree_mask ? seq.seqlen_k - seq.seqlen_q : first.end};
        begin = keys.begin & -Shape::kPartKeys, end = keys.end;
        num_splits = plan.count(splits, sample);
        if (split >= num_splits) rows = 0;
        if (num_splits == 1) return;
        const Range steps = plan.steps(splits, sample.num_steps, num_splits, split);
        end = min(end, begin + steps.end * splits.step_keys), begin += steps.begin * splits.step_keys;
    }
    __device__ bool all_rows_see(int key, int count) const { return key >= full.begin && key + count <= full.end; }
    // A product replaces a slow division.
    __device__ PackedRow packed_row(int row) const {
        const int offset = head_of_group + row, tokens = __umulhi(2 * offset, splits.per_group);
        return {token + tokens, h_k * splits.group + offset - tokens * splits.group};
    }
};

// One group of copies, with 0 beyond the sample and head_dim. offset_of(row, vec) is where 16 bytes lie in sQ.
template <typename T, typename Shape, typename OffsetOf>
__device__ void load_q(void *sQ, const KernelParams &p, const WorkItem<Shape> &item, OffsetOf offset_of) {
    constexpr int kVecs = Shape::kHeadDim / 8;
    for (int i = threadIdx.x; i < Shape::kBlockM * kVecs; i += blockDim.x) {
        const int r = i / kVecs, vec = i % kVecs;
        const bool is_needed = r < item.rows && 8 * vec < p.head_dim;
        const PackedRow at = item.packed_row(is_needed ? r : 0);
        const T *gQ = rows_of<const T>(p.q, item.b, at.head, item.seq.q_begin + at.token) + 8 * vec;
        cp_async(shared_address(sQ) + offset_of(r, vec), gQ, is_needed);
    }
    cp_async_commit();
}

// q·k of a step, from `key0` on, become scores (mods/score_mods.cuh), -inf where a row sees no key. The softmax and
// acc_o follow the maximum. acc_s: accumulators as in softmax.cuh; row0: the warp's first.
template <typename Shape, int kMTiles, int kNTiles, int kDTiles>
__device__ void update(float (&acc_s)[kMTiles][kNTiles][4], float (&acc_o)[kMTiles][kDTiles][4],
                       Softmax<kMTiles> &softmax, const KernelParams &p, const WorkItem<Shape> &item, int row0,
                       int key0) {
    const int row = row0 + threadIdx.x % 32 / 4, lane_key = key0 + threadIdx.x % 4 * 2;
    const int first_new = item.seq.seqlen_k - item.seq.seqlen_q;  // key that the first row has on its diagonal
    auto for_scores = [&](int i, auto change) {
#pragma unroll
        for (int n = 0; n < kNTiles; n++)
            for (int e = 0; e < 2; e++) change(acc_s[i / 2][n][i % 2 * 2 + e], lane_key + 8 * n + e);
    };
    const ScoreFactors<float> &factors = p.factors;
    const bool is_raw = !factors.has_softcap && p.is_raw && !p.alibi_slopes;
#pragma unroll
    for (int i = 0; i < 2 * kMTiles && !is_raw; i++) {
        if (factors.has_softcap) for_scores(i, [&](float &s, int) { s = tanh_approx(s * factors.of_qk); });
        else if (!p.is_raw) for_scores(i, [&](float &s, int) { s *= factors.of_qk; });
        if (!p.alibi_slopes) continue;
        const PackedRow at = item.packed_row(row + 8 * i);  // rows differ in slope
        if (at.token >= item.seq.seqlen_q) continue;
        const float slope = p.alibi_slopes[item.b * p.alibi_batch_stride + at.head] * factors.per_unit;
        for_scores(i, [&](float &s, int key) { s -= slope * fabsf(float(at.token + first_new - key)); });
    }
    const bool is_full = item.all_rows_see(key0, 8 * kNTiles);
    const Mask mask(item.seq.seqlen_q, item.seq.seqlen_k, p);
#pragma unroll
    for (int i = 0; i < 2 * kMTiles && !is_full; i++) {
        const int token = item.packed_row(row + 8 * i).token;
        const Range seen = mask.keys(token);
        uint64_t word = ~0ull;  // a row of a tree sees all old keys, and the new ones in its word
        int first_bit = 0;
        if (p.tree_mask && token < item.seq.seqlen_q)
            word = p.tree_mask[item.b * p.tree_batch_stride + token], first_bit = first_new;
        for_scores(i, [&](float &s, int key) {
            const unsigned bit = key - first_bit;
            if (!seen.contains(key) || !(bit >= 64 || word >> bit & 1)) s = -INFINITY;
        });
    }
    float alpha[2 * kMTiles];
    if (softmax.update_row_max(acc_s, alpha)) softmax.rescale(acc_o, alpha);
}

// A cluster's work items, one after another.
template <typename Shape> struct Scheduler {
    struct Sums {
        int total, before, longest;
        __device__ void reduce() {
            total = __reduce_add_sync(~0u, total), before = __reduce_add_sync(~0u, before);
            longest = __reduce_max_sync(~0u, longest);
        }
    };
    struct Shared {
        Sums sums[8];  // of the warps
        int next[2];   // later items, by turns
        int arrived;   // work items of a sample before this one
    };
    const KernelParams &p;
    const Splits &splits;
    Shared &shared;
    const int cluster_idx, rank;  // of this cluster, and of this block in it
    Plan plan{};
    int turn = 0;
    bool has_taken = false;

    __device__ Scheduler(const KernelParams &p, Shared &shared)
        : p(p), splits(p.splits), shared(shared), cluster_idx(shift_div(blockIdx.x, splits.cluster)),
          rank(blockIdx.x - cluster_idx * splits.cluster) {}

    __device__ ItemIndex first() {
        const int index = floor_div(cluster_idx, p.nheads_k), h_k = cluster_idx - index * p.nheads_k;
        // Each work item has a cluster of its own, or none if the sample has fewer.
        const int split = splits.max_items && !splits.by_share ? floor_div(index, splits.tiles_of_head) : 0;
        const int tile = index - split * splits.tiles_of_head;
        const int b = splits.tiles == 1 ? tile : floor_div(tile, splits.tiles);
        const int slot = splits.may_split ? make_plan(b) : 0;
        if (splits.by_share) return find(index, h_k, 0);
        return {b, h_k, tile - b * splits.tiles, split, slot};
    }
    // Takes a later item while the present one is combined, since that takes a while.
    __device__ void take_next() {
        if (!has_taken && plan.has_later && rank == 0 && threadIdx.x == 0) shared.next[turn] = atomicAdd(p.counters, 1);
        has_taken = true;
    }
    __device__ ItemIndex next(const ItemIndex &at) {
        // A sample of a packed batch may have more rows than max_seqlen_q.
        if (p.cu_seqlens_q && at.split == 0 && at.tile + splits.tiles < Sample<Shape>(p, at.b).num_tiles)
            return {at.b, at.h_k, at.tile + splits.tiles, 0, at.first_slot};
        return later();
    }

  private:
    // By all threads. Returns the first slot of sample b.
    __device__ int make_plan(int b) {
        if (splits.max_items && !splits.by_share) return b * splits.max_items;
        Sums sums{};
        for (int i = threadIdx.x; i < p.batch_size; i += blockDim.x) {
            const Sample<Shape> sample(p, i);
            sums.total += sample.num_tiles * sample.num_steps, sums.before += i < b ? sample.num_steps : 0;
            if (sample.may_split) sums.longest = max(sums.longest, sample.num_steps);
        }
        const int lane_idx = threadIdx.x % 32;
        sums.reduce();
        if (lane_idx == 0) shared.sums[threadIdx.x / 32] = sums;
        __syncthreads();
        sums = lane_idx < splits.num_warps ? shared.sums[lane_idx] : Sums{};
        sums.reduce();
        const int total = plan.total = max(1, sums.total);
        if (splits.by_share) return 0;  // find() knows the slot
        // Nearly equal samples stay whole. Later items are small: they fill what first ones leave of the GPU.
        const int64_t of_clusters = int64_t(total) * p.nheads_k;
        const int of_cluster = int(min(int64_t(total), (of_clusters + splits.resident - 1) / splits.resident));
        const int mean = min(of_cluster, ceil_div(total, int(p.batch_size)));
        plan.first = max(splits.min_steps, mean + mean / 8);
        plan.later = min(plan.first, max(ceil_div(splits.min_steps, 8), ceil_div(of_cluster, 8)));
        plan.has_later = sums.longest > plan.first;
        return plan.slot(b, sums.before);
    }

    // Takes a later item of some sample from the counter, by all threads of the cluster.
    __device__ ItemIndex later() {
        if (!plan.has_later) return {-1};
        take_next();
        __syncthreads();  // the item is known
        int index = shared.next[turn];
        if (splits.has_clusters()) {
            cluster_sync();  // unobserved by the emulator: rank 0 sends sums after the number, and others await them
            index = load_from_block(shared.next[turn], 0);
        }
        turn ^= 1, has_taken = false;
        const int i = floor_div(index, p.nheads_k);
        const ItemIndex at = find(i, index - i * p.nheads_k, 1);
        if (at.b >= 0) return at;
        if (splits.has_clusters()) cluster_sync_relaxed();  // all have read it
        // The last cluster leaves zeros.
        if (rank == 0 && threadIdx.x == 0 && atomicAdd(p.counters + 1, 1) == splits.num_clusters - 1)
            p.counters[0] = p.counters[1] = 0;
        return {-1};
    }

    // Item `index` of a key head, counted sample by sample from split `first_split` of each on. By a warp.
    __device__ ItemIndex find(int index, int h_k, int first_split) const {
        const int lane_idx = threadIdx.x % 32;
        int items_before = 0, steps_before = 0;
        for (int b0 = 0; b0 < p.batch_size; b0 += 32) {
            int items = 0, steps = 0;
            if (b0 + lane_idx < p.batch_size) {
                const Sample<Shape> sample(p, b0 + lane_idx);
                steps = sample.num_steps, items = plan.count(splits, sample) - first_split;
            }
            int items_end = items, steps_end = steps;
            for (int lanes = 1; lanes < 32; lanes *= 2) {
                const int other_items = __shfl_up_sync(~0u, items_end, lanes);
                const int other_steps = __shfl_up_sync(~0u, steps_end, lanes);
                if (lane_idx >= lanes) items_end += other_items, steps_end += other_steps;
            }
            items_end += items_before, steps_end += steps_before;
            const int lane = __popc(__ballot_sync(~0u, items_end <= index));  // whose sample has the item
            if (lane < 32) {
                const int i = index - __shfl_sync(~0u, items_end - items, lane), b = b0 + lane;
                const int steps_until = __shfl_sync(~0u, steps_end - steps, lane);
                return {b, h_k, 0, first_split + i, splits.by_share ? index - i : plan.slot(b, steps_until)};
            }
            items_before = __shfl_sync(~0u, items_end, 31), steps_before = __shfl_sync(~0u, steps_end, 31);
        }
        return {-1};
    }
};

}  // namespace decoding
