// Q and scores of a work item's packed rows.
#pragma once

#include "cache/work.cuh"
#include "common/scores.cuh"
#include "mods/score_mods.cuh"
#include "ptx/sm80.cuh"

namespace decoding {

// One group of copies, with 0 beyond the sample and head_dim. offset_of(row, vec) is where 16 bytes lie in sQ.
template <typename T, typename Shape, typename OffsetOf>
__device__ void load_q(void *sQ, const DecodeParams &p, const WorkItem<Shape> &item, OffsetOf offset_of) {
    constexpr int kVecs = Shape::kHeadDim / 8;
    for (int i = threadIdx.x; i < Shape::kBlockM * kVecs; i += blockDim.x) {
        const int r = i / kVecs, vec = i % kVecs;
        const bool is_needed = r < item.rows && 8 * vec < p.head_dim;
        const PackedRow at(item, is_needed ? r : 0);
        const T *gQ = rows_of<const T>(p.q, item.b, at.head, item.seq.q_begin + at.token) + 8 * vec;
        cp_async(shared_address(sQ) + offset_of(r, vec), gQ, is_needed);
    }
    cp_async_commit();
}

// q·k become scores (common/scores.cuh, mods/score_mods.cuh). Rows differ in slope. acc_s: accumulators as in
// softmax.cuh; row and key: the first of this lane.
template <typename Shape, int kMTiles, int kNTiles>
__device__ void change_scores(float (&acc_s)[kMTiles][kNTiles][4], const Scores<> &scores,
                              const ScoreFactors<float> &factors, const DecodeParams &p, const WorkItem<Shape> &item,
                              int row, int key) {
    if (!factors.has_softcap && scores.is_raw && !p.alibi_slopes) return;
    auto for_scores = [&](int i, auto change) {
#pragma unroll
        for (int n = 0; n < kNTiles; n++)
            for (int e = 0; e < 2; e++) change(acc_s[i / 2][n][i % 2 * 2 + e], key + 8 * n + e);
    };
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; i++) {
        if (factors.has_softcap) for_scores(i, [&](float &s, int) { s = tanh_approx(s * factors.of_qk); });
        else if (!scores.is_raw) for_scores(i, [&](float &s, int) { s = scores.score(s); });
        if (!p.alibi_slopes) continue;
        const PackedRow at(item, row + 8 * i);
        if (at.token >= item.seq.seqlen_q) continue;
        const float slope = p.alibi_slopes[item.b * p.alibi_batch_stride + at.head] * factors.per_unit;
        const int diagonal = at.token + item.seq.seqlen_k - item.seq.seqlen_q;
        for_scores(i, [&](float &s, int key) { s -= slope * fabsf(float(diagonal - key)); });
    }
}

// A row of a tree sees all old keys, and the new ones in its word.
struct Branches {
    uint64_t word = ~0ull;
    int first_new = 0;

    template <typename Shape> __device__ Branches(const DecodeParams &p, const WorkItem<Shape> &item, int token) {
        if (!p.tree_mask || token >= item.seq.seqlen_q) return;
        word = p.tree_mask[item.b * p.tree_batch_stride + token];
        first_new = item.seq.seqlen_k - item.seq.seqlen_q;
    }
    __device__ bool contains(int key) const {
        const unsigned bit = key - first_new;
        return bit >= 64 || word >> bit & 1;
    }
};

template <typename Shape, int kMTiles, int kNTiles>
__device__ void hide_scores(float (&acc_s)[kMTiles][kNTiles][4], const DecodeParams &p, const WorkItem<Shape> &item,
                            int row, int key) {
    const Mask mask(item.seq.seqlen_q, item.seq.seqlen_k, p);
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; i++) {
        const int token = PackedRow(item, row + 8 * i).token;
        const Range seen = mask.keys(token);
        const Branches branches(p, item, token);
#pragma unroll
        for (int n = 0; n < kNTiles; n++)
            for (int e = 0; e < 2; e++) {
                const int k = key + 8 * n + e;
                if (!seen.contains(k) || !branches.contains(k)) acc_s[i / 2][n][i % 2 * 2 + e] = -INFINITY;
            }
    }
}

}  // namespace decoding
