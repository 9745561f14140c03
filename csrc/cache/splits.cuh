// The folder cache/ has attention to long caches, see decode.cu. Order in cache/: splits.cuh, work.cuh,
// combine.cuh, decode.cu. Beside it: decode_sm90.cu, boxes.cuh, prefill_sm90.cu.
//
// How the keys of a cache are divided among blocks of threads. A work item is a tile of rows with a range of its keys,
// for the blocks of a cluster. They read the steps of the range in turn, and add their results through distributed
// shared memory. The work items of a tile add theirs in a workspace in global memory.
//
// Lengths are known to the GPU alone. How many work items has a sample?
//   - With num_splits, and alone in its batch, as many as its length allows.
//   - Where tiles are few and may be long, its share of all keys: together they fill the GPU once.
//   - Otherwise one. A sample that is much longer than the mean has later ones, see work.cuh.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "common/launch.h"
#include "flash_cache.h"
#include "mods/score_mods.cuh"

namespace decoding {

using namespace device;

// Unsigned divisions take fewer instructions than signed ones, and shifts the fewest.
__device__ inline int floor_div(unsigned x, unsigned y) { return int(x / y); }
__host__ __device__ inline int ceil_div(unsigned x, unsigned y) { return int((x + y - 1) / y); }
__device__ inline int shift_div(unsigned x, int power_of_two) { return int(x >> __popc(power_of_two - 1)); }

// Blocks of a cluster have neighbouring numbers, and so have key heads, which lie side by side in memory.
struct Splits {
    static constexpr int kMaxBlocks = 8;  // of a cluster
    int group;                   // query heads of a key head
    uint32_t per_group;          // the next integer above 2^31 / group
    int rows;                    // of a partial result
    int tiles;                   // of a sample and key head, by max_seqlen_q
    int tiles_of_head;           // of all samples
    int cluster, num_warps;      // blocks of a cluster, warps of a block
    int num_stages;              // of the ring of keys of a part of a block
    int block_keys, step_keys;   // of a step of a block, and of a cluster
    int num_clusters, resident;  // of the launch; at most so many run at the same time
    int min_steps;               // of a work item of a sample that has several; a power of two
    int max_items;               // of a sample; 0: it has a first work item, and may have later ones
    bool by_share;               // work items of a sample by its share of all keys, not by its own length
    bool may_split;              // a sample may have several work items
    bool may_overlap;            // the next launch may begin before this one's blocks have ended

    // blocks_per_sm of Shape::kNumWarps warps. If may_double, one block of twice as many fits a multiprocessor.
    template <typename Shape> static Splits make(const DecodeParams &p, int blocks_per_sm, bool may_double) {
        Splits x{.num_stages = Shape::kStages};
        const int64_t items = x.set_tiles<Shape>(p);
        const bool are_few = x.set_cluster<Shape>(p, items), are_alone = x.set_warps<Shape>(p, items, may_double);
        x.resident = std::max(1, p.num_sms * (are_alone ? 1 : blocks_per_sm) / x.cluster);
        // More rows take longer to add.
        x.min_steps = std::max(1, (are_few ? Shape::kBlockM / 2 : p.num_splits ? 32 : 128) / x.num_warps);
        const int64_t steps = p.seqlen_k / x.step_keys + 2;
        const int64_t most = are_few ? x.resident / p.nheads_k : p.num_splits / x.cluster;
        x.max_items = int(std::min(most, std::max<int64_t>(1, steps / x.min_steps)));
        x.may_split = x.max_items ? x.max_items > 1 : steps > x.min_steps;
        x.by_share = are_few && x.may_split && p.batch_size > 1;
        // With shares, a sample with less than one has a work item, too.
        const int64_t clusters_of_head = x.max_items + p.batch_size - 1;
        x.num_clusters = int(x.by_share ? p.nheads_k * clusters_of_head : items * std::max(1, x.max_items));
        x.resident = std::min(x.num_clusters, x.resident);
        return x;
    }
    __device__ bool has_clusters() const {  // they need Hopper
#if __CUDA_ARCH__ >= 900
        return cluster > 1;
#else
        return false;
#endif
    }
    // Floats of a row of a partial result in the workspace.
    __host__ __device__ static constexpr int pitch(int head_dim) { return head_dim + 2 * kMaxBlocks; }
    // Counters: the next later item, and clusters that have ended; then results of a sample's key head for each block.
    DecodeSizes sizes(const DecodeParams &p, int head_dim) const {
        if (!may_split) return {0, 0};
        const int64_t slots = by_share    ? num_clusters
                              : max_items ? p.batch_size * p.nheads_k * max_items
                                          : 8 * resident + (3 * p.batch_size + 1) * p.nheads_k;
        return {slots * rows * int64_t(sizeof(float) * pitch(head_dim)), 2 + p.batch_size * p.nheads_k * cluster};
    }

  private:
    // Returns the number of tiles of all samples and key heads.
    template <typename Shape> int64_t set_tiles(const DecodeParams &p) {
        group = p.nheads / p.nheads_k, per_group = (1u << 31) / group + 1;
        if (group > 1 << 15) throw std::invalid_argument("minimal_attn: a key head has over 32768 query heads");
        const int64_t packed_rows = int64_t(group) * p.max_seqlen_q;
        const int64_t most_tiles = (packed_rows + Shape::kBlockM - 1) / Shape::kBlockM;
        const int64_t items = p.batch_size * p.nheads_k * most_tiles;
        // Samples of a packed batch may have more than max_seqlen_q rows.
        const int64_t all_rows = int64_t(group) * p.seqlen_q * (p.cu_seqlens_q ? 1 : p.batch_size);
        const int64_t block_steps = (all_rows / Shape::kBlockM + p.batch_size) *
                                    (p.seqlen_k / Shape::kBlockKeys + 1);
        if (items > INT32_MAX / 512 || block_steps > INT32_MAX / 2)
            throw std::invalid_argument("minimal_attn: the call has over 2^22 tiles of rows, or 2^30 steps of a tile "
                                        "and its keys; divide the batch into several calls");
        rows = int(std::min<int64_t>(packed_rows, Shape::kBlockM));
        tiles = int(most_tiles), tiles_of_head = int(p.batch_size * most_tiles);
        return items;
    }
    // Returns whether tiles are few and may be long, so that samples get their share of the GPU.
    template <typename Shape> bool set_cluster(const DecodeParams &p, int64_t items) {
        const int pair = compute_capability() >= 90 && p.num_splits != 1 ? 2 : 1;
        const int most_blocks = p.num_splits ? pair : pair == 2 ? std::min(kMaxBlocks, max_cluster()) : 1;
        // Clusters of 2 fill the GPU once. Those of 4 and 8 fill half of it: more may not fit, as they must lie within
        // parts of a GPU that differ in size.
        cluster = p.num_splits ? pair : 1;
        while (cluster < most_blocks && (cluster == 1 ? 2 : 4 * cluster) * items <= p.num_sms) cluster *= 2;
        // From 256 KB of K a block on, half of the GPU is too slow: work items of pairs of blocks fill all of it.
        const bool are_few = !p.num_splits && tiles == 1 && 2 * pair * items <= p.num_sms &&
                             p.seqlen_k > (128 << 10) / Shape::kHeadDim * cluster;
        if (are_few) cluster = pair;
        return are_few;
    }
    // Returns whether a block has a multiprocessor for itself. Then it has twice as many warps, unless steps are few.
    template <typename Shape> bool set_warps(const DecodeParams &p, int64_t items, bool may_double) {
        const bool are_alone = may_double && !p.num_splits && cluster * items <= p.num_sms &&
                               p.seqlen_k > 2 * Shape::kBlockKeys * cluster;
        // Begun early, such blocks would gather on multiprocessors that are free. A mixed batch overlaps anyway.
        may_overlap = !are_alone || p.phase != Phase::kAlone;
        num_warps = (are_alone ? 2 : 1) * Shape::kNumWarps;
        block_keys = (are_alone ? 2 : 1) * Shape::kBlockKeys, step_keys = block_keys * cluster;
        if (p.seqlen_k > INT32_MAX - 2 * step_keys)
            throw std::invalid_argument("minimal_attn: a sample has over 2^31 - 4096 keys");
        return are_alone;
    }
};

// Arguments of a kernel.
struct KernelParams : DecodeParams {
    Splits splits;
    ScoreFactors<float> factors;
    bool is_raw;  // without a softcap, q·k is the score
};

}  // namespace decoding
