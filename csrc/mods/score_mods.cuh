// The folder mods/ has what a plain call does without: changed scores and dropout. A first reading leaves it out. Order
// in mods/: score_mods.cuh, dropout.h, dropout_transposed.cuh, score_function.cuh.
//
// ScoreMods is the counterpart of Scores for scores that are changed by more than a factor:
//
//   score = of_qk · q·k                                           or of_tanh · tanh(of_qk · q·k) with a softcap
//           - slope / unit · |row + seqlen_k - seqlen_q - key|    ALiBi (Press et al., 2022), bottom-right aligned
//           + bias / unit                                         -inf where a mask of bool is false
//
//   forward    P = exp2(softmax_scale_log2 · score - row_max), with softmax_scale_log2 = unit · log2(e)
//   backward   P = exp(unit · score - lse)    dbias = dS    d(q·k) = softmax_scale · dS, times 1 - tanh² with a softcap
//
// The unit saves a factor. It is the softcap, so that tanh needs none (Gemma 2, 2024, section 2), or |softmax_scale|.
// With a bias it is ln(2): softmax_scale_log2 is then 1, and products with it are exact. Otherwise a bias of -1e10 that
// hides all keys of a row would leave a rounding error that exp2 makes infinite.
#pragma once

#include <cmath>
#include <type_traits>

#ifdef __CUDACC__
#include "common/launch.h"
using device::to_float;
#else  // host/cuda.h is there already
using host::to_float, host::__half, host::__nv_bfloat16;
#endif
#include "common/block_mask.cuh"
#include "common/sequence.cuh"

// The scores of a thread: at(i, j) has row row0 + row(i) and key key0 + key(j), i < kRows and j < kCols. row() and
// key() depend on constants alone, so that most of a distance is known at compile time.
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
// Swaps rows and columns, for a grid [keys, rows].
template <typename Tile> __device__ auto transposed(Tile tile) {
    return score_tile<Tile::kCols, Tile::kRows>([tile](int i, int j) -> auto & { return tile.at(j, i); }, tile.key0,
                                                tile.key, tile.row0, tile.row);
}
// acc_s [rows, keys]: accumulators as in softmax.cuh; row and key: the first of this lane.
template <int kMTiles, int kNTiles>
__device__ auto score_tile(float (&acc_s)[kMTiles][kNTiles][4], int row, int key) {
    return score_tile<2 * kMTiles, 2 * kNTiles>(
        [&acc_s](int i, int j) -> float & { return acc_s[i / 2][j / 2][i % 2 * 2 + j % 2]; }, row,
        [](int i) { return 8 * i; }, key, [](int j) { return j / 2 * 8 + j % 2; });
}

template <typename T> using SumOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename Sum> __device__ Sum tanh_exact(Sum x) { return tanh(x); }

// The factors that depend on the call alone. A kernel that has them among its parameters saves registers.
template <typename Sum> struct ScoreFactors {
    static constexpr Sum kLog2E = Sum(1.4426950408889634);

    bool has_softcap;
    Sum unit, per_unit, of_qk, of_tanh;  // see above; per_unit is 1 / unit, of_tanh is softcap / unit
    Sum softmax_scale_log2;

    // in_log2: the unit is ln(2), also without a bias.
    __host__ __device__ explicit ScoreFactors(const AttnParams &p, bool in_log2 = false) : has_softcap(p.softcap > 0) {
        const Sum softmax_scale = Sum(p.softmax_scale), softcap = Sum(p.softcap);
        in_log2 |= p.bias.data && p.bias.dtype != DType::kBool;
        unit = in_log2 ? 1 / kLog2E : has_softcap ? softcap : softmax_scale == 0 ? Sum(1) : Sum(fabs(softmax_scale));
        per_unit = in_log2 ? kLog2E : 1 / unit;
        of_qk = has_softcap ? softmax_scale / softcap
                : in_log2   ? softmax_scale * per_unit
                            : Sum((softmax_scale > 0) - (softmax_scale < 0));
        of_tanh = in_log2 && has_softcap ? softcap * per_unit : 1;
        softmax_scale_log2 = in_log2 ? 1 : unit * kLog2E;
    }
};

// Changes the scores of one head, for inputs of type T. tanh_of: an approximation is enough for 16 bits.
template <typename T, auto tanh_of = tanh_exact<SumOf<T>>> struct ScoreMods {
    using Sum = SumOf<T>;
    // The lowest score that a finite bias can give. Some models mask with finfo.min, which would overflow to -inf here.
    // A row in which all keys have it would then count as one without keys.
    static constexpr Sum kLowest = Sum(-1e30);

    static constexpr bool is_raw = false;
    ScoreFactors<Sum> factors;
    Sum softmax_scale, softmax_scale_log2;
    const int &seqlen_q, &seqlen_k, &b, &h;  // references: flash_sm90.cu has them in shared memory
    Bias bias;                               // without data if another part of the kernel adds it
    const BlockMask *mask = nullptr;         // nullptr also if another part of the kernel knows it
    Sum slope;                               // ALiBi's slope / unit
    int shift;                               // seqlen_k - seqlen_q

    __device__ ScoreMods(const AttnParams &p, const int &seqlen_q, const int &seqlen_k, const int &b, const int &h)
        : ScoreMods(p, ScoreFactors<Sum>(p), seqlen_q, seqlen_k, b, h) {
        set_alibi(p);
    }
    __device__ ScoreMods(const AttnParams &p, const ScoreFactors<Sum> &factors, const int &seqlen_q,
                         const int &seqlen_k, const int &b, const int &h)
        : factors(factors), softmax_scale(Sum(p.softmax_scale)), softmax_scale_log2(factors.softmax_scale_log2),
          seqlen_q(seqlen_q), seqlen_k(seqlen_k), b(b), h(h), bias(p.bias) {}
    __device__ void set_alibi(const AttnParams &p) {
        slope = p.alibi_slopes ? Sum(p.alibi_slopes[b * p.alibi_batch_stride + h]) * factors.per_unit : Sum(0);
        shift = seqlen_k - seqlen_q;
    }

    // q·k becomes the score.
    template <typename Tile> __device__ void apply(const Tile &tile) const { cap(tile), add(tile); }

    // Also turns dp(i, j), the derivative by the score, into that by factor · q·k.
    template <typename Tile, typename At> __device__ void apply(const Tile &tile, At dp) const {
        cap(tile);
        if (factors.has_softcap)
            for_each(tile, [&](int i, int j) { dp(i, j) *= 1 - tile.at(i, j) * tile.at(i, j); });
        add(tile);
    }

    // The functions of Scores, applied to changed scores.
    __device__ Sum score(Sum score) const { return score; }
    __device__ Sum unit() const { return factors.unit; }
    __device__ Sum probability(Sum score, Sum lse) const {
        return lse == -INFINITY ? Sum(0) : exp2(-fabs(fma(score, factors.unit, -lse)) * ScoreFactors<Sum>::kLog2E);
    }
    __device__ float probability_log2(float score, float lse_log2) const {
        return -fabsf(score * softmax_scale_log2 - lse_log2);
    }

    // score + x, an element of a bias. -inf and NaN stay. Only an x below kLowest / 2 can give kLowest.
    __device__ static Sum plus_bias(Sum score, Sum x, Sum per_unit) {
        const Sum sum = fma(x, per_unit, score);
        return sum < kLowest && x > -INFINITY ? kLowest : sum;
    }

  private:
    template <typename Tile, typename F> __device__ static void for_each(const Tile &, F f) {
#pragma unroll
        for (int i = 0; i < Tile::kRows; i++)
#pragma unroll
            for (int j = 0; j < Tile::kCols; j++) f(i, j);
    }
    template <typename Tile> __device__ void cap(const Tile &tile) const {
        const Sum of_qk = factors.of_qk;
        if (factors.has_softcap) for_each(tile, [&](int i, int j) { tile.at(i, j) = tanh_of(tile.at(i, j) * of_qk); });
        else if (of_qk != 1) for_each(tile, [&](int i, int j) { tile.at(i, j) *= of_qk; });
    }
    template <typename Tile> __device__ void add(const Tile &tile) const {
        if (factors.of_tanh != 1) for_each(tile, [&](int i, int j) { tile.at(i, j) *= factors.of_tanh; });
        if (slope != 0) {
            const Sum distance = Sum(tile.row0 + shift - tile.key0);
            for_each(tile, [&](int i, int j) {
                tile.at(i, j) -= slope * fabs(distance + Sum(tile.row(i) - tile.key(j)));
            });
        }
        if (bias.data) {
            if (bias.dtype == DType::kBool) add_bias<bool>(tile);
            else if (bias.dtype == DType::kFloat32) add_bias<float>(tile);
            else add_bias<T>(tile);
        }
        if (!mask) return;
        const HeadMask of_head(*mask, b, h);
        for_each(tile, [&](int i, int j) {
            if (!of_head.sees(tile.row0 + tile.row(i), tile.key0 + tile.key(j))) tile.at(i, j) = -INFINITY;
        });
    }
    template <typename Element, typename Tile> __device__ void add_bias(const Tile &tile) const {
        auto *of_head = static_cast<const Element *>(bias.data) + b * bias.batch_stride + h * bias.head_stride;
        const Element *of_row[Tile::kRows];
#pragma unroll
        for (int i = 0; i < Tile::kRows; i++)
            of_row[i] = of_head + min(tile.row0 + tile.row(i), seqlen_q - 1) * bias.row_stride;
#pragma unroll
        for (int j = 0; j < Tile::kCols; j++) {
            const int64_t key = min(tile.key0 + tile.key(j), seqlen_k - 1) * bias.key_stride;
#pragma unroll
            for (int i = 0; i < Tile::kRows; i++) {
                const Element x = of_row[i][key];
                if constexpr (std::is_same_v<Element, bool>) tile.at(i, j) = x ? tile.at(i, j) : Sum(-INFINITY);
                else tile.at(i, j) = plus_bias(tile.at(i, j), Sum(to_float(x)), factors.per_unit);
            }
        }
    }
};
