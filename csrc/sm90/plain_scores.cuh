// How a consumer on Hopper makes probabilities of scores. After a tile's first blocks row_max stays as it is. If a sum
// shows that a probability has grown too large, which is rare, the scores of that row are computed once more.
#pragma once

#include "common/scores.cuh"
#include "common/softmax.cuh"
#include "sm90/producer.cuh"

namespace sm90 {

using namespace device;

// Where the scores of a block begin: row and key are this lane's.
struct ScoreOrigin { int n_block, warp_row, row, key; };

// A consumer's walk along its blocks of keys, from the last to the first.
template <typename Shape> struct Walk {
    const BlockRange &blocks;
    const uint32_t num_full;
    int n_block;
    uint32_t from_full;  // n_block - full_begin

    __device__ Walk(const WorkItem<Shape> &, const BlockRange &blocks, uint32_t num_full, int n_block)
        : blocks(blocks), num_full(num_full), n_block(n_block), from_full(n_block - blocks.full_begin) {}
    __device__ void next() { n_block--, from_full--; }
    __device__ int block_after() const { return n_block - 1; }
    __device__ int block_after_last() const { return blocks.begin - 1; }
    __device__ bool is_first() const { return n_block == blocks.end - 1; }
    __device__ bool is_last() const { return n_block == blocks.begin; }
    __device__ bool is_full() const { return from_full < num_full; }
};

// A consumer's registers, and functions that sm90/mods/ replaces.
template <typename T, typename Shape, typename Softmax> struct PlainScores {
    using WorkItem = Shape::WorkItem;
    static constexpr int kHeadDim = Shape::kHeadDim, kBlockN = Shape::kBlockN, kStages = Shape::kStages;
    static constexpr int kNTiles = kBlockN / 8, kDTiles = Shape::kHeadDimV / 8;
    static constexpr bool kHasGaps = false;      // blocks that these rows do not see lie between others
    static constexpr float kMaxSum = 1 << 15;  // of a lane's P in a row: below it, each fits fp16

    const Params<Shape> &p;
    Shape::SharedMemory &shared;
    const int consumer, warp_idx = warp_uniform(threadIdx.x / 32 % 4);
    // thread_idx() reads a slow register: here once for the loop. Functions off the loop call it, and cost it nothing.
    const int lane_idx = thread_idx() % 32;
    const Scores<> scores{p};
    uint32_t q_item = 0, kv_item = 0;
    bool was_full = false;  // the block before
    float acc_s[1][kNTiles][4], acc_o[1][kDTiles][4];
    uint32_t P[kBlockN / 16][4];
    Softmax softmax{1.f};

    __device__ int q_index() const { return shared.q.index(q_item, consumer); }

    __device__ void begin_tile(const WorkItem &) {
        softmax = Softmax(scores.softmax_scale_log2);
        was_full = false;
    }
    // Before the sink joins the sums; the int is this lane's first row.
    __device__ void end_tile(const WorkItem &, int) {}
    // Whether blocks without a mask need no change of their scores.
    __device__ bool has_full_blocks() const { return scores.is_raw; }
    __device__ float out_scale() const { return 1.f; }
    __device__ Walk<Shape> begin_walk(const WorkItem &work, const BlockRange &blocks, uint32_t num_full, int n_block) {
        return {work, blocks, num_full, n_block};
    }
    __device__ int block_after(int n_block) const { return n_block - 1; }  // of all consumers
    // Whether these rows have blocks; whether n_block is none of them, but other consumers'.
    __device__ bool sees(const BlockRange &blocks) const { return blocks.begin < blocks.end; }
    __device__ bool skips(int n_block, int end) const { return n_block >= end; }
    // Loads what the scores of a block need, before its product.
    __device__ void prefetch(const WorkItem &, int, int) {}
    __device__ void skip_block() {}

    // acc_s becomes P, row_sum grows. Returns whether acc_o must be multiplied by alpha. hide() hides more scores of a
    // block that is not full.
    struct Nothing { __device__ void operator()() const {} };
    template <typename Hide = Nothing>
    __device__ bool exponentiate(const WorkItem &work, const BlockRange &blocks, const ScoreOrigin &at, bool is_full,
                                 float (&alpha)[2], Hide hide = {}) {
        // After the first block without a mask each row has seen keys. recompute_large_rows() knows no mask.
        const bool updates_max = !is_full || !was_full;
        was_full = is_full;
        if (!is_full) {
            if (!scores.is_raw) scores.apply(acc_s);
            work.mask.apply(acc_s, blocks, at.n_block, at.row, at.key);
            hide();
        }
        bool has_grown = false;
        float sum[2];
        if (updates_max) has_grown = softmax.update_row_max(acc_s, alpha);
        for (int i = 0; i < 2; i++) sum[i] = softmax.exponentiate(acc_s, i);
        if (!updates_max && is_too_large(sum)) {
            recompute_large_rows(sum, alpha, [&](int, auto &s) { scores.apply(s); });
            has_grown = true;
        }
        for (int i = 0; i < 2; i++) softmax.row_sum[i] += sum[i];
        return has_grown;
    }

    __device__ static bool is_too_large(const float (&sum)[2]) {
        return __any_sync(~0u, fmaxf(sum[0], sum[1]) > kMaxSum);
    }

    // The slow path: rows whose P may be too large for T get new scores, row_max and P. A warp computes them alone, by
    // mma: wgmma in a branch makes ptxas spill. Its other rows must not depend on them. change(n, s) makes scores of
    // q·k, for the keys [8·n, 8·n + 8).
    template <typename Change>
    __device__ void recompute_large_rows(float (&sum)[2], float (&alpha)[2], Change change) {
        const int warp_idx = thread_idx() / 32 % 4, lane_idx = thread_idx() % 32;
        bool is_large[2];
        for (int i = 0; i < 2; i++) is_large[i] = quad_reduce(sum[i], fmaxf) > kMaxSum;
        const auto &sQ = shared.sQ[q_index()];
        const auto &sK = shared.sK[kv_item % kStages];
#pragma unroll
        for (int n = 0; n < kNTiles; n++) {
            float s[1][1][4] = {};
#pragma unroll 1
            for (int d = 0; d < kHeadDim; d += 32) {
                uint32_t a[4], b[4];
                ldmatrix(b, sK.address(8 * n + lane_idx % 8, d + lane_idx / 8 * 8));
                ldmatrix(a, sQ.address(16 * warp_idx + lane_idx % 16, d + lane_idx / 16 * 8));
                mma<T>(s[0][0], a, b[0], b[1]);
                ldmatrix(a, sQ.address(16 * warp_idx + lane_idx % 16, d + 16 + lane_idx / 16 * 8));
                mma<T>(s[0][0], a, b[2], b[3]);
            }
            change(n, s);
            for (int e = 0; e < 4; e++)
                if (is_large[e / 2]) acc_s[0][n][e] = s[0][0][e];
        }
        softmax.update_row_max(acc_s, alpha, is_large);
        for (int i = 0; i < 2; i++)
            if (is_large[i]) sum[i] = softmax.exponentiate(acc_s, i);
    }
};

}  // namespace sm90
