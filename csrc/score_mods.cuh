// Scores that are changed by more than a factor. ScoreMods is for them what Scores is for others:
//
//   score = sign · q·k                                        or tanh(softmax_scale / softcap · q·k) with a softcap
//           - slope / unit · |row + seqlen_k - seqlen_q - key|    ALiBi (Press et al., 2022), bottom-right aligned
//           + bias / unit                                         -inf where a mask of bool is false
//   unit  = |softmax_scale|, or the softcap, so that tanh needs no factor (Gemma 2, 2024, section 2)
//
//   forward    P = exp2(softmax_scale_log2 · score - row_max), with softmax_scale_log2 = unit · log2(e)
//   backward   P = exp(unit · score - lse)    dbias = dS    d(q·k) = softmax_scale · dS, times 1 - tanh² with a softcap
//
// A bias is read by its strides from memory. Rows and keys beyond the end read the last ones: they are masked later.
//
// Read next: scheduler.cuh, which tile a block of threads computes.
#pragma once

#include <cmath>
#include <type_traits>

#ifdef __CUDACC__
#include "launch.h"
using device::to_float;
#else
#include "host_cuda.h"
using host::to_float, host::__half, host::__nv_bfloat16;
#endif
#include "sequence.cuh"

// The scores that a thread has. at(i, j) is that of row row0 + row(i) and key key0 + key(j), i < kRows and j < kCols.
// row and key depend on constants alone, so that most of a distance is known at compile time.
template <int kRows_, int kCols_, typename At, typename Row, typename Key> struct ScoreTile {
    static constexpr int kRows = kRows_, kCols = kCols_;
    At at;
    int row0;
    Row row;
    int key0;
    Key key;
};
template <int kRows, int kCols, typename At, typename Row, typename Key>
__device__ auto score_tile(At at, int row0, Row row, int key0, Key key) {
    return ScoreTile<kRows, kCols, At, Row, Key>{at, row0, row, key0, key};
}
// The same scores, where rows and columns of a thread's grid are keys and rows.
template <typename Tile> __device__ auto transposed(Tile tile) {
    return score_tile<Tile::kCols, Tile::kRows>([tile](int i, int j) -> auto & { return tile.at(j, i); }, tile.key0,
                                                tile.key, tile.row0, tile.row);
}
// acc_s [rows, keys]: accumulators as in softmax.cuh; row and key are the first of this lane's.
template <int kMTiles, int kNTiles>
__device__ auto score_tile(float (&acc_s)[kMTiles][kNTiles][4], int row, int key) {
    return score_tile<2 * kMTiles, 2 * kNTiles>(
        [&acc_s](int i, int j) -> float & { return acc_s[i / 2][j / 2][i % 2 * 2 + j % 2]; }, row,
        [](int i) { return 8 * i; }, key, [](int j) { return j / 2 * 8 + j % 2; });
}

template <typename Sum> __device__ Sum tanh_exact(Sum x) { return tanh(x); }

// Of the scores of one head. tanh_of: tensor cores for 16 bits make do with an approximation.
template <typename Sum, Sum (*tanh_of)(Sum) = tanh_exact<Sum>> struct ScoreMods {
    static constexpr Sum kLog2E = Sum(1.4426950408889634);
    // A finite bias below this is this: finfo.min, with which some models mask, would overflow to -inf, and rows that
    // have no other are not without keys.
    static constexpr Sum kLowest = Sum(-1e30);

    static constexpr bool is_raw = false;
    Sum softmax_scale, softmax_scale_log2;
    Sum unit_, factor;  // of q·k: sign, or what tanh takes
    Sum per_unit, slope;
    bool has_softcap;
    int seqlen_q, seqlen_k;
    const void *bias;  // of row 0 and key 0, or nullptr
    int64_t bias_row_stride, bias_key_stride;
    DType bias_dtype;

    __device__ ScoreMods(const AttnParams &p, const Sequence &seq, int64_t b, int64_t h)
        : softmax_scale(Sum(p.softmax_scale)), has_softcap(p.softcap > 0), seqlen_q(seq.seqlen_q),
          seqlen_k(seq.seqlen_k), bias(p.bias.data), bias_row_stride(p.bias.row_stride),
          bias_key_stride(p.bias.key_stride), bias_dtype(p.bias.dtype) {
        unit_ = has_softcap ? Sum(p.softcap) : softmax_scale == 0 ? Sum(1) : fabs(softmax_scale);
        per_unit = 1 / unit_, factor = softmax_scale / unit_, softmax_scale_log2 = unit_ * kLog2E;
        slope = p.alibi_slopes ? Sum(p.alibi_slopes[b * p.alibi_batch_stride + h]) * per_unit : Sum(0);
        if (!bias) return;
        const int64_t at = b * p.bias.batch_stride + h * p.bias.head_stride;
        bias = static_cast<const char *>(bias) + at * (bias_dtype == DType::kBool      ? 1
                                                       : bias_dtype == DType::kFloat64 ? 8
                                                       : bias_dtype == DType::kFloat32 ? 4
                                                                                       : 2);
    }

    // q·k become scores.
    template <typename Tile> __device__ void apply(const Tile &tile) const { cap(tile), add(tile); }

    // The same, and dp becomes the derivative by factor · q·k. dp(i, j): that by the score.
    template <typename Tile, typename At> __device__ void apply(const Tile &tile, At dp) const {
        cap(tile);
        if (has_softcap)
            for_each(tile, [&](int i, int j) { dp(i, j) *= 1 - tile.at(i, j) * tile.at(i, j); });
        add(tile);
    }

    // As those of Scores, of scores.
    __device__ Sum score(Sum score) const { return score; }
    __device__ Sum unit() const { return unit_; }
    __device__ Sum probability(Sum score, Sum lse) const {
        return lse == -INFINITY ? Sum(0) : exp2(-fabs(fma(score, unit_, -lse)) * kLog2E);
    }
    __device__ float probability_log2(float score, float lse_log2) const {
        return -fabsf(score * softmax_scale_log2 - lse_log2);
    }

  private:
    template <typename Tile, typename F> __device__ static void for_each(const Tile &, F f) {
#pragma unroll
        for (int i = 0; i < Tile::kRows; i++)
#pragma unroll
            for (int j = 0; j < Tile::kCols; j++) f(i, j);
    }
    template <typename Tile> __device__ void cap(const Tile &tile) const {
        if (has_softcap) for_each(tile, [&](int i, int j) { tile.at(i, j) = tanh_of(tile.at(i, j) * factor); });
        else if (factor != 1) for_each(tile, [&](int i, int j) { tile.at(i, j) *= factor; });
    }
    template <typename Tile> __device__ void add(const Tile &tile) const {
        if (slope != 0) {
            const Sum distance = Sum(tile.row0 + seqlen_k - seqlen_q - tile.key0);
            for_each(tile, [&](int i, int j) {
                tile.at(i, j) -= slope * fabs(distance + Sum(tile.row(i) - tile.key(j)));
            });
        }
        if (!bias) return;
        switch (bias_dtype) {
            case DType::kBool: return add_bias<bool>(tile);
            case DType::kFloat16: return add_bias<__half>(tile);
            case DType::kBFloat16: return add_bias<__nv_bfloat16>(tile);
            case DType::kFloat32: return add_bias<float>(tile);
            case DType::kFloat64:
                if constexpr (std::is_same_v<Sum, double>) add_bias<double>(tile);
        }
    }
    template <typename T, typename Tile> __device__ void add_bias(const Tile &tile) const {
#pragma unroll
        for (int i = 0; i < Tile::kRows; i++) {
            const int row = min(tile.row0 + tile.row(i), seqlen_q - 1);
            const T *of_row = static_cast<const T *>(bias) + row * bias_row_stride;
#pragma unroll
            for (int j = 0; j < Tile::kCols; j++)
                tile.at(i, j) += value(of_row[min(tile.key0 + tile.key(j), seqlen_k - 1) * bias_key_stride]);
        }
    }
    template <typename T> __device__ Sum value(T x) const {
        if constexpr (std::is_same_v<T, bool>) return x ? Sum(0) : Sum(-INFINITY);
        else {
            const Sum y = Sum(to_float(x));
            return y > -INFINITY ? fmax(y * per_unit, kLowest) : y;  // -inf and NaN stay what they are
        }
    }
};
