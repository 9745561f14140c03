// A tile of 16 or 32 rows on m16n8k16, for decode.cu. The warps of a block divide the keys of a step and do not wait for
// one another: each has its own ring of keys, maximum, sum and output, which combine.cuh adds.
#pragma once

#include <algorithm>
#include <cstddef>

#include "cache/combine.cuh"

namespace decoding {

// A warp has 32 keys of a step at head_dim 64, otherwise 16: 4 or 8 KB of K, and of V.
template <int kHeadDim_, int kBlockM_> struct WarpShape {
    static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kMTiles = kBlockM / 16;
    static constexpr int kNumWarps = kHeadDim == 256 ? 2 : 4, kMaxWarps = 2 * kNumWarps;
    static constexpr int kWarpKeys = kHeadDim == 64 ? 32 : 16, kAlignment = kWarpKeys;
    static constexpr bool kWarpsHaveKeys = true;  // of their own
    static constexpr int block_keys(int num_warps) { return num_warps * kWarpKeys; }
};

// Tiles of 32 rows end at head_dim 128: beyond, two blocks would not fit the registers.
template <typename Act> auto with_warp_shape(const DecodeParams &p, Act act) {
    const int head_dim = p.max_head_dim();
    const bool has_more_rows = int64_t(p.nheads / p.nheads_k) * p.max_seqlen_q > 16;
    if (head_dim <= 64)
        return has_more_rows ? act.template operator()<WarpShape<64, 32>>()
                             : act.template operator()<WarpShape<64, 16>>();
    if (head_dim <= 128)
        return has_more_rows ? act.template operator()<WarpShape<128, 32>>()
                             : act.template operator()<WarpShape<128, 16>>();
    return act.template operator()<WarpShape<256, 16>>();
}

// Where 16 bytes lie in a tile [kRows, kHeadDim] of panels of 64 columns, swizzled as by TMA. See sm80::Swizzle.
template <int kRows> struct PanelSwizzle {
    static constexpr int kRowBytes = 128;
    static __device__ uint32_t offset(int row, int vec) {
        return vec / 8 * (kRows * kRowBytes) + row * kRowBytes + (vec ^ row) % 8 * 16;
    }
    static __device__ uint32_t move(uint32_t base, int rows, int pairs) {
        return (base ^ pairs % 4 * 32) + rows * kRowBytes + pairs / 4 * (kRows * kRowBytes);
    }
    static __device__ uint32_t down(int lane_idx) { return offset(lane_idx % 16, lane_idx / 16); }
    static __device__ uint32_t across(int lane_idx) {
        return offset(lane_idx / 16 * 8 + lane_idx % 8, lane_idx / 8 % 2);
    }
};

// The keys of a warp and of a step.
template <typename Shape> struct alignas(1024) WarpStage {
    uint16_t k[Shape::kWarpKeys * Shape::kHeadDim], v[Shape::kWarpKeys * Shape::kHeadDim];
};

template <typename Shape> struct WarpsMemory {
    alignas(1024) uint16_t q[Shape::kBlockM * Shape::kHeadDim];
    typename Scheduler<Shape>::Shared scheduler;
    Barrier results_full;
    union Buffer {
        WarpStage<Shape> stages[1];       // of the warps, as often as the ring has stages
        PartialResult<Shape> partial[1];  // of the warps after a work item's last step; then ClusterResults
    } buffer;

    __device__ ClusterResults<Shape> &results() {
        return reinterpret_cast<ClusterResults<Shape> &>(buffer.partial[blockDim.x / 32]);
    }
    static size_t bytes(int num_warps, int num_stages) {
        return offsetof(WarpsMemory, buffer) +
               std::max(num_warps * num_stages * sizeof(WarpStage<Shape>),
                        num_warps * sizeof(PartialResult<Shape>) + sizeof(ClusterResults<Shape>));
    }
};

// A step of a warp: scores, probabilities and output of its keys.
template <typename T, typename Shape>
__device__ void attend(const uint16_t *q, const WarpStage<Shape> &stage,
                       float (&acc_o)[Shape::kMTiles][Shape::kHeadDim / 8][4], Softmax<Shape::kMTiles> &softmax,
                       const WorkItem<Shape> &item, int key, const DecodeParams &p, const Scores<> &scores,
                       const ScoreFactors<float> &factors) {
    constexpr int kMTiles = Shape::kMTiles, kKeys = Shape::kWarpKeys;
    using QSwizzle = PanelSwizzle<Shape::kBlockM>;
    using Swizzle = PanelSwizzle<kKeys>;
    const int lane_idx = threadIdx.x % 32;
    const uint32_t q_address = shared_address(q) + QSwizzle::down(lane_idx);
    const uint32_t k_address = shared_address(stage.k) + Swizzle::across(lane_idx);
    float acc_s[kMTiles][kKeys / 8][4] = {};
#pragma unroll
    for (int kk = 0; kk < Shape::kHeadDim / 16; kk++) {
        uint32_t a[kMTiles][4], b[4];
        for (int m = 0; m < kMTiles; m++) ldmatrix(a[m], QSwizzle::move(q_address, 16 * m, kk));
#pragma unroll
        for (int n = 0; n < kKeys / 8; n += 2) {
            ldmatrix(b, Swizzle::move(k_address, 8 * n, kk));
            for (int m = 0; m < kMTiles; m++) {
                mma<T>(acc_s[m][n], a[m], b[0], b[1]);
                mma<T>(acc_s[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
    const int row = lane_idx / 4, lane_key = key + lane_idx % 4 * 2;
    change_scores(acc_s, scores, factors, p, item, row, lane_key);
    if (!item.all_rows_see(key, kKeys)) hide_scores(acc_s, p, item, row, lane_key);
    float alpha[2 * kMTiles];
    if (softmax.update_row_max(acc_s, alpha)) softmax.rescale(acc_o, alpha);
    const uint32_t v_address = shared_address(stage.v) + Swizzle::down(lane_idx);
#pragma unroll
    for (int kk = 0; kk < kKeys / 16; kk++) {
        uint32_t P[kMTiles][4], b[4];
        for (int m = 0; m < kMTiles; m++) softmax.template probabilities<T>(P[m], acc_s[m], m, kk);
#pragma unroll
        for (int d = 0; d < Shape::kHeadDim / 8; d += 2) {
            ldmatrix_trans(b, Swizzle::move(v_address, 16 * kk, d / 2));
            for (int m = 0; m < kMTiles; m++) {
                mma<T>(acc_o[m][d], P[m], b[0], b[1]);
                mma<T>(acc_o[m][d + 1], P[m], b[2], b[3]);
            }
        }
    }
}

}  // namespace decoding
