// The folder cache/ has attention to long caches, see decode.cu. Order in cache/: work.cuh, rows.cuh, combine.cuh,
// warps.cuh, decode.cu. Beside it: decode_sm90.cu, boxes.cuh, prefill_sm90.cu.
// How the keys of a cache are divided among blocks of threads. A tile packs rows of one sample and key head. Its keys
// are read in steps, by the blocks of a cluster in turn, which add their results through distributed shared memory.
// Lengths are known to the GPU alone. A sample that is much longer than the batch's mean is split once more: clusters
// that have ended take its later work items from a counter, and partial results meet in a workspace in global memory.
// With num_splits the splits of a sample follow from its own length, and its bits do not depend on the batch.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "common/cache_sequence.cuh"
#include "common/device.h"
#include "common/launch.h"
#include "common/mask.cuh"
#include "ptx/cluster.cuh"

namespace decoding {

using namespace device;
using namespace ptx;

// Unsigned divisions take fewer instructions.
__device__ inline int floor_div(unsigned x, unsigned y) { return int(x / y); }
__host__ __device__ inline int ceil_div(unsigned x, unsigned y) { return int((x + y - 1) / y); }

// How a launch divides its work. Blocks of a cluster have neighbouring numbers, and so have key heads, which lie side
// by side in memory.
struct Splits {
    static constexpr int kMaxBlocks = 8;  // of a cluster
    // Warp-steps of a block before a sample is split once more, and in each work item with num_splits.
    static constexpr int kMinWarpSteps = 128, kMinFixed = 32;
    int group;                   // query heads of a key head
    uint32_t per_group;          // the next integer above 2^31 / group
    int rows;                    // of a partial result
    int tiles;                   // of a sample and key head, by max_seqlen_q
    int items;                   // tiles of all samples and key heads
    int cluster, num_warps;      // blocks of a cluster, warps of a block
    int block_keys, step_keys;   // of a step of a block, and of a cluster
    int num_clusters, resident;  // of the launch; at most so many run at the same time
    int max_items;               // work items of a sample with num_splits; 0: as its batch needs
    int min_steps;               // of a work item
    bool are_alone;              // blocks, on their multiprocessors: nothing hides where an item begins and ends
    bool may_split;              // a sample may have several work items

    // blocks_per_sm of Shape::kNumWarps warps. If may_double, one block of twice as many fits a multiprocessor.
    template <typename Shape> static Splits make(const DecodeParams &p, int blocks_per_sm, bool may_double) {
        Splits x;
        x.group = p.nheads / p.nheads_k, x.per_group = (1u << 31) / x.group + 1;
        if (x.group > 1 << 15) throw std::invalid_argument("minimal_attn: a key head has over 32768 query heads");
        const int64_t packed_rows = int64_t(x.group) * p.max_seqlen_q;
        x.rows = int(std::min<int64_t>(packed_rows, Shape::kBlockM));
        const int64_t tiles = (packed_rows + Shape::kBlockM - 1) / Shape::kBlockM;
        const int64_t items = p.batch_size * p.nheads_k * tiles;
        const int64_t block_steps = p.batch_size * tiles * (p.seqlen_k / Shape::block_keys(Shape::kNumWarps) + 1);
        if (items > INT32_MAX / 512 || block_steps > INT32_MAX / 2)
            throw std::invalid_argument("minimal_attn: the call has over 2^22 tiles of rows, or 2^30 steps of a tile "
                                        "and its keys; divide the batch into several calls");
        x.tiles = int(tiles), x.items = int(items), x.cluster = 1;
        // Clusters fill the multiprocessors once: a block has a multiprocessor for itself, and twice as many warps if
        // it may. With num_splits nothing depends on the batch. Large clusters are slow where there are many.
        const int max_blocks = compute_capability() < 90 ? 1 : p.num_splits ? std::min(2, p.num_splits) : kMaxBlocks;
        auto has_room = [&] {
            return 2 * x.cluster * items <= p.num_sms ||
                   (blocks_per_sm > 1 && !may_double && x.cluster == 1 && items <= p.num_sms);
        };
        while (2 * x.cluster <= max_blocks && (p.num_splits || has_room())) x.cluster *= 2;
        const int64_t few_keys = 2 * Shape::block_keys(Shape::kNumWarps) * x.cluster;
        const bool doubles = may_double && !p.num_splits && x.cluster * items <= p.num_sms && p.seqlen_k > few_keys;
        x.are_alone = doubles, x.num_warps = doubles ? 2 * Shape::kNumWarps : Shape::kNumWarps;
        x.block_keys = Shape::block_keys(x.num_warps), x.step_keys = x.block_keys * x.cluster;
        if (p.seqlen_k > INT32_MAX - 2 * x.step_keys)
            throw std::invalid_argument("minimal_attn: a sample has over 2^31 - 4096 keys");
        x.min_steps = std::max(1, (p.num_splits ? kMinFixed : kMinWarpSteps) / x.num_warps);
        const int64_t steps = p.seqlen_k / x.step_keys + 2;
        x.max_items = p.num_splits ? int(std::clamp<int64_t>(steps / x.min_steps, 1, p.num_splits / x.cluster)) : 0;
        x.may_split = p.num_splits ? x.max_items > 1 : steps > x.min_steps;
        // More clusters than items only where these leave half of the GPU idle.
        x.resident = std::max(1, p.num_sms * (doubles ? 1 : blocks_per_sm) / x.cluster);
        const bool are_few = 2 * x.cluster * items <= p.num_sms;
        x.num_clusters = x.items;
        if (x.may_split && x.max_items) x.num_clusters *= x.max_items;
        else if (x.may_split && are_few) x.num_clusters = std::max(x.items, x.resident);
        x.resident = std::min(x.num_clusters, x.resident);
        return x;
    }
    // Partial results in the workspace, see Plan::slot().
    int64_t slots(const DecodeParams &p) const {
        if (!may_split) return 0;
        return p.nheads_k * (max_items ? p.batch_size * max_items : 8 * resident / p.nheads_k + 3 * p.batch_size + 1);
    }
    // Floats of a row there.
    __host__ __device__ static constexpr int pitch(int head_dim) { return head_dim + 2 * kMaxBlocks; }
    int64_t workspace_bytes(const DecodeParams &p, int head_dim) const {
        return slots(p) * rows * int64_t(sizeof(float) * pitch(head_dim));
    }
    // The next later item, and clusters that have ended. Then results of a sample's key head, one for each block.
    int64_t num_counters(const DecodeParams &p) const {
        return may_split ? 2 + p.batch_size * p.nheads_k * cluster : 0;
    }
};

// A sample's rows and keys as tiles and steps.
template <typename Shape> struct Sample {
    Sequence seq;
    int num_rows, num_tiles;
    int num_steps;   // for one tile with all rows
    bool may_split;  // its partial results fit the workspace

    __device__ Sample(const DecodeParams &p, const Splits &splits, int b) : seq(p, b) {
        num_rows = seq.is_served(p) ? seq.seqlen_q * splits.group : 0;
        num_tiles = ceil_div(num_rows, Shape::kBlockM);
        may_split = splits.may_split && num_rows > 0 && num_rows <= splits.rows;
        const int begin = max(0, seq.seqlen_k - seq.seqlen_q - p.window_left) & -Shape::kAlignment;
        num_steps = num_tiles ? ceil_div(seq.seqlen_k - begin, splits.step_keys) : 0;
    }
};

// The steps of each work item of a sample.
struct Plan {
    int first, later;  // of the first item, of each later one
    bool has_later;    // in this batch

    __device__ int count(const Splits &splits, int num_steps) const {
        if (splits.max_items) return max(1, min(splits.max_items, num_steps / splits.min_steps));
        return num_steps <= first ? 1 : 1 + ceil_div(num_steps - first, later);
    }
    __device__ Range steps(const Splits &splits, int num_steps, int split) const {
        if (splits.max_items) {
            const int size = ceil_div(num_steps, count(splits, num_steps));
            return {split * size, min(num_steps, (split + 1) * size)};
        }
        return {split ? first + (split - 1) * later : 0, min(num_steps, first + split * later)};
    }
    // The first slot of a sample. The next sample's is at least count() further, as first >= later.
    __device__ int slot(const Splits &splits, int b, int steps_before) const {
        return splits.max_items ? b * splits.max_items : steps_before / later + b;
    }
};

// A work item before its lengths are known. No more items: b is -1.
struct ItemIndex {
    int b, h_k, tile, split, first_slot;
};

template <typename Shape> struct PackedRow;

// A tile of rows, and steps of keys for a cluster.
template <typename Shape> struct WorkItem {
    Sequence seq;
    int b, h_k;
    int rows;                  // of the tile; 0: there is no such item
    int group;
    uint32_t per_group;
    int token, head_of_group;  // of its first row
    int begin, end;            // the keys of the cluster; begin is that of a step
    Range keys, full;          // those that some row sees, those that all rows see
    int num_splits, split;     // work items of the sample, and the number of this one
    int slot;                  // of its result in the workspace

    __device__ WorkItem(const DecodeParams &p, const Splits &splits, const Plan &plan, const ItemIndex &at)
        : b(at.b), h_k(at.h_k), group(splits.group), per_group(splits.per_group), num_splits(1), split(at.split),
          slot((at.first_slot + at.split) * p.nheads_k + at.h_k) {
        const Sample<Shape> sample(p, splits, b);
        seq = sample.seq;
        rows = max(0, min(Shape::kBlockM, sample.num_rows - at.tile * Shape::kBlockM));
        token = at.tile ? floor_div(at.tile * Shape::kBlockM, group) : 0;
        head_of_group = at.tile * Shape::kBlockM - token * group;
        const Mask mask(seq.seqlen_q, seq.seqlen_k, p);
        const Range first = mask.keys(token), last = mask.keys(PackedRow<Shape>(*this, max(0, rows - 1)).token);
        keys = {first.begin, last.end};
        full = {last.begin, p.tree_mask ? seq.seqlen_k - seq.seqlen_q : first.end};
        begin = keys.begin & -Shape::kAlignment, end = keys.end;
        if (sample.may_split) num_splits = plan.count(splits, sample.num_steps);
        if (split >= num_splits) rows = 0;
        if (num_splits == 1) return;
        const Range steps = plan.steps(splits, sample.num_steps, split);
        end = min(end, begin + steps.end * splits.step_keys), begin += steps.begin * splits.step_keys;
    }
    __device__ bool all_rows_see(int key, int count) const { return key >= full.begin && key + count <= full.end; }
};

// A product replaces a slow division.
template <typename Shape> struct PackedRow {
    int token, head;
    __device__ PackedRow(const WorkItem<Shape> &item, int row) {
        const int offset = item.head_of_group + row, tokens = __umulhi(2 * offset, item.per_group);
        token = item.token + tokens, head = item.h_k * item.group + offset - tokens * item.group;
    }
};

// Clusters need Hopper.
#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
#define MINIMAL_ATTN_HAS_CLUSTERS 1
#else
#define MINIMAL_ATTN_HAS_CLUSTERS 0
#endif

// A cluster's work items, one after another.
template <typename Shape> struct Scheduler {
    struct Shared {
        int sums[8][3];   // of the warps
        int next[2];      // later items, by turns
        int arrived;
    };
    const DecodeParams &p;
    const Splits &splits;
    Shared &shared;
    const int cluster_idx, rank;  // of this cluster, and of this block in it
    Plan plan{1, 1, false};
    int turn = 0;
    bool has_taken = false;

    __device__ Scheduler(const DecodeParams &p, const Splits &splits, Shared &shared)
        : p(p), splits(splits), shared(shared), cluster_idx(floor_div(blockIdx.x, splits.cluster)),
          rank(blockIdx.x - cluster_idx * splits.cluster) {}

    __device__ ItemIndex first() {
        // With num_splits each work item has a cluster of its own, or none if the sample has fewer.
        const int split = splits.max_items ? floor_div(cluster_idx, splits.items) : 0;
        const int index = cluster_idx - split * splits.items;
        const int heads = floor_div(index, p.nheads_k), h_k = index - heads * p.nheads_k;
        const int b = splits.tiles == 1 ? heads : floor_div(heads, splits.tiles);
        const int slot = splits.may_split ? make_plan(b) : 0;
        if (b < p.batch_size) return {b, h_k, heads - b * splits.tiles, split, slot};
        return later();
    }
    // Takes a later item while the present one is combined, since that takes a while.
    __device__ void take_next() {
        if (!has_taken && plan.has_later && rank == 0 && threadIdx.x == 0) shared.next[turn] = atomicAdd(p.counters, 1);
        has_taken = true;
    }
    __device__ ItemIndex next(const ItemIndex &at) {
        // A sample of a packed batch may have more rows than max_seqlen_q.
        if (p.cu_seqlens_q && at.split == 0 && at.tile + splits.tiles < Sample<Shape>(p, splits, at.b).num_tiles)
            return {at.b, at.h_k, at.tile + splits.tiles, 0, at.first_slot};
        return later();
    }

  private:
    // By all threads. Returns the first slot of sample b.
    __device__ int make_plan(int b) {
        if (splits.max_items) return plan.slot(splits, b, 0);
        int total = 0, before = 0, longest = 0;
        for (int i = threadIdx.x; i < p.batch_size; i += blockDim.x) {
            const Sample<Shape> sample(p, splits, i);
            total += sample.num_tiles * sample.num_steps, before += i < b ? sample.num_steps : 0;
            if (sample.may_split) longest = max(longest, sample.num_steps);
        }
        for (int lanes = 16; lanes > 0; lanes /= 2) {
            total += __shfl_xor_sync(~0u, total, lanes), before += __shfl_xor_sync(~0u, before, lanes);
            longest = max(longest, __shfl_xor_sync(~0u, longest, lanes));
        }
        int (&mine)[3] = shared.sums[threadIdx.x / 32];
        if (threadIdx.x % 32 == 0) mine[0] = total, mine[1] = before, mine[2] = longest;
        __syncthreads();
        total = before = longest = 0;
        for (int warp = 0; warp < splits.num_warps; warp++) {
            const int (&sums)[3] = shared.sums[warp];
            total += sums[0], before += sums[1], longest = max(longest, sums[2]);
        }
        // Nearly equal samples stay whole. Later items are small, as they fill what first ones leave.
        const int64_t of_clusters = int64_t(total) * p.nheads_k;
        const int of_cluster = int(min(int64_t(total), (of_clusters + splits.resident - 1) / splits.resident));
        const int mean = min(of_cluster, ceil_div(total, int(p.batch_size)));
        plan.first = max(splits.min_steps, mean + mean / 8);
        plan.later = min(plan.first, max(ceil_div(splits.min_steps, 8), ceil_div(of_cluster, 8)));
        plan.has_later = longest > plan.first;
        return plan.slot(splits, b, before);
    }

    // A later item of some sample, by all threads of the cluster.
    __device__ ItemIndex later() {
        if (!plan.has_later) return {-1};
        take_next();
        __syncthreads();  // the item is known
        int index = shared.next[turn];
#if MINIMAL_ATTN_HAS_CLUSTERS
        if (splits.cluster > 1) {
            cluster_sync();  // unobserved by the emulator: clusters that begin with a later item need a larger GPU
            index = load_from_block(shared.next[turn], 0);
        }
#endif
        turn ^= 1, has_taken = false;
        const int lane_idx = threadIdx.x % 32;
        int items_before = 0, steps_before = 0;
        for (int b0 = 0; b0 < p.batch_size; b0 += 32) {
            int items = 0, steps = 0;
            if (b0 + lane_idx < p.batch_size) {
                const Sample<Shape> sample(p, splits, b0 + lane_idx);
                steps = sample.num_steps;
                if (sample.may_split) items = (plan.count(splits, steps) - 1) * p.nheads_k;
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
                const int slot = plan.slot(splits, b, __shfl_sync(~0u, steps_end - steps, lane));
                return {b, i % p.nheads_k, 0, 1 + i / p.nheads_k, slot};
            }
            items_before = __shfl_sync(~0u, items_end, 31), steps_before = __shfl_sync(~0u, steps_end, 31);
        }
#if MINIMAL_ATTN_HAS_CLUSTERS
        if (splits.cluster > 1) cluster_sync_relaxed();  // all have read it
#endif
        // The last cluster leaves zeros.
        if (rank == 0 && threadIdx.x == 0 && atomicAdd(p.counters + 1, 1) == splits.num_clusters - 1)
            p.counters[0] = p.counters[1] = 0;
        return {-1};
    }
};

}  // namespace decoding
