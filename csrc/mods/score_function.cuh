// A score_mod inside a kernel: a function of the user's in place of the changes of score_mods.cuh. Its source is printed
// by minimal_attn/score_library.py, as a struct F of static functions, and compiled with the kernels of one head_dim:
//
//   F::changed(score, at, captured)         the score that softmax sees; score = softmax_scale · q·k
//   F::derivative(score, at, captured)      the derivative of that by the score
//   F::add_gradients(ds, score, at, captured, add)
//                                           calls add<i>(gradient, place, term) for gradient i
//   F::kNumCaptured, kNumGradients, axes(i) how many tensors it reads, and elements with a gradient; see GradientSums
//   F::kMayBeLow                            whether it reads floats, or has numbers, that may be as low as finfo.min
#pragma once

#include <algorithm>
#include <concepts>

#include "common/launch.h"
#include "ptx/sm80.cuh"

constexpr int kMaxCapturedDims = 8;

// A contiguous tensor of less than 2^31 elements. gradient: fp32, of the same shape, to add to; or nullptr.
struct Captured {
    const void *data;
    float *gradient;
    int size[kMaxCapturedDims];
};

template <typename Params, typename F> struct WithCaptured : Params {
    Captured captured[F::kNumCaptured > 0 ? F::kNumCaptured : 1];
};
template <typename Params, typename F>  // F: void without a score_mod
using InputOf = std::conditional_t<std::is_void_v<F>, Params, WithCaptured<Params, F>>;

template <typename F, typename Params> WithCaptured<Params, F> with_captured(const Params &p, const Captured *captured) {
    WithCaptured<Params, F> x{p};
    std::copy_n(captured, F::kNumCaptured, x.captured);
    return x;
}

// The index of a row or a key, or a difference of them: `offset` from the first one of the lane's scores, and known at
// compile time. Conversions of integers to floats are slow: the one of the first index serves all.
struct Index {
    int first;
    float first_as_float;
    int offset;

    __device__ explicit Index(int first) : Index(first, float(first), 0) {}
    __device__ Index(int first, float first_as_float, int offset)
        : first(first), first_as_float(first_as_float), offset(offset) {}
    template <std::same_as<int> I> __device__ Index operator+(I x) const { return {first, first_as_float, offset + x}; }
    template <std::same_as<int> I> __device__ Index operator-(I x) const { return *this + -x; }  // other types: no Index
    __device__ Index operator-() const { return {-first, -first_as_float, -offset}; }
    __device__ Index operator-(const Index &x) const {
        return {first - x.first, first_as_float - x.first_as_float, offset - x.offset};
    }
    __device__ operator int() const { return first + offset; }
    __device__ explicit operator float() const { return first_as_float + float(offset); }
};
struct ScorePlace {
    int b, h;
    Index q_idx, kv_idx;  // in the sample
};

// Operations of printed functions, see CUDA in minimal_attn/score_library.py. Whole numbers divide as in Python.
struct ScoreOps {
    template <typename X, typename Y> static __device__ auto floor_div(X x, Y y) {
        const auto quotient = x / y;
        return quotient - (quotient * y != x && (x < 0) != (y < 0));
    }
    template <typename X, typename Y> static __device__ auto remainder(X x, Y y) { return floor_div(x, y) * -y + x; }

    // Where index i is in a dimension: from the end if it is negative. Out-of-range indices are clamped.
    template <typename I> static __device__ int place(I i, int size) {
        const auto at = i < 0 ? i + size : i;
        return int(at < 0 ? 0 : at < size ? at : size - 1);
    }
    template <typename T> static __device__ auto element(const Captured &x, int at) {
        const T value = static_cast<const T *>(x.data)[at];
        if constexpr (std::is_integral_v<T>) return value;
        else if constexpr (std::is_same_v<T, double>) return float(value);
        else return device::to_float(value);
    }

    static __device__ float maximum(float x, float y) { return fmaxf(x, y); }
    static __device__ float minimum(float x, float y) { return fminf(x, y); }
    static __device__ float absolute(float x) { return fabsf(x); }
    static __device__ int absolute(int x) { return x < 0 ? -x : x; }
    template <typename X, typename Y> static __device__ auto maximum(X x, Y y) { return x > y ? x : y; }  // integers
    template <typename X, typename Y> static __device__ auto minimum(X x, Y y) { return x < y ? x : y; }
    static __device__ int64_t absolute(int64_t x) { return x < 0 ? -x : x; }

    // Approximations. Scores come from products of 16 bits; quotient() is for what depends on them.
    static __device__ float quotient(float x, float y) { return x * ptx::rcp_approx(y); }
    static __device__ float exp2(float x) { return ptx::exp2_approx(x); }
    static __device__ float exp(float x) { return ptx::exp2_approx(x * 1.4426950408889634f); }
    static __device__ float log(float x) { return ptx::log2_approx(x) * 0.6931471805599453f; }
    static __device__ float tanh(float x) { return ptx::tanh_approx(x); }
    static __device__ float sigmoid(float x) { return ptx::rcp_approx(1.f + exp(-x)); }
};

// Scores in units of log2, in which exp2(score - row_max) is exact where they are equal. As a bias (score_mods.cuh), a
// finite score counts as at least -1e30.
template <typename F>
__device__ float changed_log2(float score, const ScorePlace &at, const Captured *captured) {
    constexpr float kLog2E = 1.4426950408889634f, kLowest = -1e30f;
    const float x = F::changed(score, at, captured);
    return F::kMayBeLow && x > -INFINITY ? fmaxf(x, kLowest) * kLog2E : x * kLog2E;
}

// Sums of gradients over a block of rows, for a lane's scores [rows, 2 keys], before they are added in memory. F::axes
// says which scores share an element: its place depends on the row (1), the key (2), both (3) or neither (0).
template <typename F> struct GradientSums {
    static constexpr int kNum = F::kNumGradients > 0 ? F::kNumGradients : 1;
    float *gradient[kNum];
    int place[kNum][2];
    float sum[kNum][2] = {};

    // Adds a term of gradient i, for the element `at`, from this lane's key 0 or 1. All lanes of a warp call it.
    template <int i> __device__ void add(float *to, int at, float term, int key, int lane_idx) {
        constexpr int kAxes = F::axes(i);
        if constexpr (kAxes % 2 == 0) {
            gradient[i] = to, place[i][kAxes ? key : 0] = at, sum[i][kAxes ? key : 0] += term;
        } else if (to) {
            if constexpr (kAxes == 1)
                for (int lanes = 4; lanes < 32; lanes *= 2) term += __shfl_xor_sync(~0u, term, lanes);
            if (term != 0 && (kAxes == 3 || lane_idx < 4)) atomicAdd(to + at, term);
        }
    }
    __device__ void flush(int lane_idx) const {
#pragma unroll
        for (int i = 0; i < F::kNumGradients; i++)
#pragma unroll
            for (int key = 0; key < 2; key++) {
                if (F::axes(i) % 2 || (F::axes(i) == 0 && key) || !gradient[i]) continue;
                const int num_lanes = F::axes(i) ? 4 : 32;
                float x = sum[i][key];
                for (int lanes = 1; lanes < num_lanes; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
                if (x != 0 && lane_idx % num_lanes == 0) atomicAdd(gradient[i] + place[i][key], x);
            }
    }
};
