// Online softmax on accumulator fragments, for every kernel on tensor cores (Dao, FlashAttention-2, 2023, Algorithm 1).
//
// acc[m][n][4] are a warp's accumulators [16·kMTiles, 8·kNTiles]: m16n8 tiles (ptx/sm80.cuh), or a warp's part of a
// wgmma accumulator, which looks the same. The four lanes of a quad hold the same rows. A lane's row i is 2·m for row r
// and 2·m + 1 for row r + 8 of tile m. acc_s is fp32, acc_o fp32 or fp64.
//
// The running maximum is lazy. P = exp2(softmax_scale_log2 · S - row_max) is right for any row_max near the true
// maximum, so row_max stays until the true one is 8 binary orders ahead. P up to 2^8 rounds as well as P up to 1, and
// acc_o is rescaled at a row's first keys and then almost never. No row depends on the other rows of its warp. Hopper's
// forward pass does without a maximum in most blocks, see sm90/plain_scores.cuh.
#pragma once

#include <cfloat>
#include <cmath>

#include "common/sequence.cuh"
#include "ptx/sm80.cuh"

template <typename Op> __device__ float quad_reduce(float x, Op op) {
    x = op(x, __shfl_xor_sync(~0u, x, 1));
    return op(x, __shfl_xor_sync(~0u, x, 2));
}

// Adds a sink, a score in units of log2, at most FLT_MAX, to the sum of a row. Returns the factor of the terms so far.
__device__ inline float add_sink(float &row_max, float &row_sum, float sink_log2) {
    if (sink_log2 > FLT_MAX) sink_log2 = FLT_MAX;
    const float new_max = fmaxf(row_max, sink_log2), factor = ptx::exp2_approx(row_max - new_max);
    row_sum = row_sum * factor + ptx::exp2_approx(sink_log2 - new_max);
    row_max = new_max;
    return factor;
}

// Writes the largest scores of rows, NaN where a score is. row_max, in units of log2, and row_sum are those of this
// lane's columns; row: its first.
template <int kRows>
__device__ void store_max_logits(const AttnParams &p, const float (&row_max)[kRows], const float (&row_sum)[kRows],
                                 const Sequence &seq, int b, int h, int row) {
    float *gMax = static_cast<float *>(p.max_logits) + lse_index(p, seq.q_begin, b, h);
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        float x = row_max[i] + (row_sum[i] - row_sum[i]);
        x = quad_reduce(x, [](float x, float y) { return x > y || x != x ? x : y; }) * 0.6931471805599453f;
        if (row + 8 * i < seq.padded_q && threadIdx.x % 4 == 0)
            gMax[row + 8 * i] = row + 8 * i < seq.seqlen_q ? x : -INFINITY;
    }
}

// The natural log of a row's sum of exponentials. row_max is in units of log2.
struct LogSumExp {
    __device__ float operator()(float row_max, float row_sum) const {
        return (row_max + ptx::log2_approx(row_sum)) * 0.6931471805599453f;
    }
};

template <int kMTiles> struct Softmax {
    static constexpr int kRows = 2 * kMTiles;
    static constexpr float kRescaleThreshold = 8.f;  // in units of log2

    float softmax_scale_log2;  // above 0: see scores.cuh
    float row_max[kRows];      // in units of log2; finite at the start, so that exp2(-inf - row_max) is 0, not NaN
    float row_sum[kRows];      // over this lane's columns, until finalize()

    __device__ explicit Softmax(float softmax_scale_log2) : softmax_scale_log2(softmax_scale_log2) {
        for (int i = 0; i < kRows; i++) row_max[i] = -FLT_MAX, row_sum[i] = 0.f;
    }

    // Before exponentiate(): row_max grows in rows that may_grow and whose scores are far ahead of it. Returns whether
    // one of the warp did; row_sum is then multiplied by alpha, and the caller rescales acc_o.
    template <int kNTiles>
    __device__ bool update_row_max(const float (&acc_s)[kMTiles][kNTiles][4], float (&alpha)[kRows],
                                   const bool *may_grow = nullptr) {
        bool has_grown = false;
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            float block_max = -INFINITY;
#pragma unroll
            for (int n = 0; n < kNTiles; n++)
                block_max = fmaxf(block_max, fmaxf(acc_s[i / 2][n][i % 2 * 2], acc_s[i / 2][n][i % 2 * 2 + 1]));
            block_max = quad_reduce(block_max, fmaxf);
            block_max = __fmul_rn(block_max, softmax_scale_log2);  // rounded as row_max is, so not part of an FMA
            const float growth = block_max - row_max[i];
            const bool grows = growth > kRescaleThreshold && (!may_grow || may_grow[i]);
            alpha[i] = grows ? ptx::exp2_approx(-growth) : 1.f;
            row_max[i] = grows ? block_max : row_max[i];
            has_grown |= grows;
        }
        if (!__any_sync(~0u, has_grown)) return false;
        for (int i = 0; i < kRows; i++) row_sum[i] *= alpha[i];
        return true;
    }

    template <int kDTiles, typename Sum, typename Factor>
    __device__ static void rescale(Sum (&acc_o)[kMTiles][kDTiles][4], const Factor (&alpha)[kRows]) {
#pragma unroll
        for (int i = 0; i < kRows; i++)
#pragma unroll
            for (int d = 0; d < kDTiles; d++)
                for (int e = 0; e < 2; e++) acc_o[i / 2][d][i % 2 * 2 + e] *= alpha[i];
    }

    // Scores of row i become P. Returns the sum over this lane's columns, which the caller adds to row_sum.
    template <int kNTiles> __device__ float exponentiate(float (&acc_s)[kMTiles][kNTiles][4], int i) const {
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < kNTiles; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = acc_s[i / 2][n][i % 2 * 2 + e];
                sum += x = ptx::exp2_approx(x * softmax_scale_log2 - row_max[i]);
            }
        return sum;
    }

    // P of the columns [16·kk, 16·kk + 16) of tile m as the A operand of P V, also added to row_sum.
    template <typename T, int kNTiles>
    __device__ void probabilities(uint32_t (&p)[4], const float (&acc_s)[kNTiles][4], int m, int kk) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int i = 2 * m + j % 2;
            const float(&s)[4] = acc_s[2 * kk + j / 2];
            const float x = ptx::exp2_approx(s[j % 2 * 2] * softmax_scale_log2 - row_max[i]);
            const float y = ptx::exp2_approx(s[j % 2 * 2 + 1] * softmax_scale_log2 - row_max[i]);
            row_sum[i] += x + y;
            p[j] = ptx::pack<T>(x, y);
        }
    }

    // acc_o becomes the output times `scale`, and lse is written. row: this lane's first; gLse: of row 0, or nullptr.
    // A row without keys, whose sums may be 0 · NaN, and a row beyond the sample get output 0, or NaN if a score was +inf
    // (row_max - row_max). lse_of: see LogSumExp.
    template <int kDTiles, typename Sum, typename Lse = LogSumExp>
    __device__ void finalize(Sum (&acc_o)[kMTiles][kDTiles][4], float *gLse, const Sequence &seq, int row,
                             const float *sink, float scale = 1.f, Lse lse_of = {}) {
        bool has_keys[kRows];
        float scale_sum[kRows];  // factor of the sums without the sink
        for (int i = 0; i < kRows; i++) {
            if (row + 8 * i >= seq.seqlen_q) row_max[i] = -FLT_MAX, row_sum[i] = 0.f;
            row_sum[i] = quad_reduce(row_sum[i], [](float x, float y) { return x + y; });
            has_keys[i] = row_sum[i] != 0.f, scale_sum[i] = scale;
        }
        if (sink) [[unlikely]]
            for (int i = 0; i < kRows; i++)
                if (row + 8 * i < seq.seqlen_q)
                    scale_sum[i] *= add_sink(row_max[i], row_sum[i], *sink * 1.4426950408889634f);
        Sum scale_o[kRows];
        bool all_have_keys = true;
        for (int i = 0; i < kRows; i++) {
            if constexpr (std::is_same_v<Sum, float>) scale_o[i] = scale_sum[i] * ptx::rcp_approx(row_sum[i]);
            else scale_o[i] = scale_sum[i] / Sum(row_sum[i]);
            all_have_keys = all_have_keys && has_keys[i];
        }
        if (__any_sync(~0u, !all_have_keys)) [[unlikely]]
#pragma unroll
            for (int i = 0; i < kRows; i++) {
                if (has_keys[i]) continue;
                scale_o[i] = 1;
                for (auto &x : acc_o[i / 2]) x[i % 2 * 2] = x[i % 2 * 2 + 1] = row_max[i] - row_max[i];
            }
        rescale(acc_o, scale_o);
#pragma unroll
        for (int i = 0; i < kRows; i++)
            if (gLse && row + 8 * i < seq.padded_q && threadIdx.x % 4 == 0)
                gLse[row + 8 * i] = row_sum[i] == 0.f ? row_max[i] - row_max[i] - INFINITY  // as out, 0 or NaN
                                                      : lse_of(row_max[i], row_sum[i]);
    }
};
