// Where a raw score q·k becomes the number that softmax sees, and the way back:
//
//   forward    score = sign · q·k                P = exp2(softmax_scale_log2 · score - row_max)
//   backward   P = exp(softmax_scale · q·k - lse)    d(q·k) = softmax_scale · dS
//
// The factor of the softmax is above 0: -inf must stay -inf. A negative scale flips the scores, and 0 makes all 0.
#pragma once

#include <cmath>

#include "flash.h"

// The sink of a query head, or nullptr.
template <typename Sum> __device__ const Sum *sink_of(const AttnParams &p, int h) {
    return p.sinks ? static_cast<const Sum *>(p.sinks) + h : nullptr;
}

template <typename Sum = float> struct Scores {
    static constexpr Sum kLog2E = Sum(1.4426950408889634);
    Sum softmax_scale;
    Sum softmax_scale_log2;  // above 0
    Sum sign;                // of softmax_scale, or 0
    bool is_raw;             // score = q·k

    __host__ __device__ explicit Scores(const AttnParams &p)
        : softmax_scale(Sum(p.softmax_scale)),
          softmax_scale_log2(softmax_scale == 0 ? Sum(1) : fabs(softmax_scale) * kLog2E),
          sign((softmax_scale > 0) - (softmax_scale < 0)), is_raw(sign == 1) {}

    __device__ Sum score(Sum qk) const { return qk * sign; }
    __device__ Sum unit() const { return fabs(softmax_scale); }

    // acc_s: accumulators of Q Kᵀ.
    template <int kMTiles, int kNTiles> __device__ void apply(Sum (&acc_s)[kMTiles][kNTiles][4]) const {
#pragma unroll
        for (int i = 0; i < kMTiles * kNTiles * 4; i++) {
            Sum &s = acc_s[i / (kNTiles * 4)][i / 4 % kNTiles][i % 4];
            s = score(s);
        }
    }

    // P of the backward pass in fp32 and fp64; lse is -inf without keys. Large scores and their lse cancel, so one FMA
    // rounds the difference once, before the factor log2(e). Only rounding makes it positive: -|x| keeps P finite.
    __device__ Sum probability(Sum qk, Sum lse) const {
        return lse == -INFINITY ? Sum(0) : exp2(-fabs(fma(qk, softmax_scale, -lse)) * kLog2E);
    }
    // For 16 bits P = exp2(probability_log2(q·k, lse_log2)) takes one operation less. The forward pass formed lse in
    // units of log2, so the rounding of softmax_scale_log2 cancels. A row without keys has lse_log2 +inf.
    __device__ static float lse_log2(float lse) { return float(lse * 1.4426950408889634); }
    __device__ float probability_log2(float qk, float lse_log2) const {
        return -fabsf(qk * (sign * softmax_scale_log2) - lse_log2);
    }
};
