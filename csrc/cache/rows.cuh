// Q and scores of a work item's packed rows.
#pragma once

#include "cache/work.cuh"
#include "common/scores.cuh"
#include "common/softmax.cuh"
#include "ptx/sm80.cuh"

namespace decoding {

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

// q·k of a step, from `key0` on, become scores (mods/score_mods.cuh). Hidden ones are -inf. The softmax and acc_o follow
// the maximum. acc_s: accumulators as in softmax.cuh; row0: the warp's first.
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

}  // namespace decoding
