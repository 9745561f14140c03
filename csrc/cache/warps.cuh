// A tile of 16 or 32 rows on m16n8k16, for decode.cu. The warps of a block divide the keys of a step and do not wait
// for one another: each has its own ring of keys, maximum, sum and output, which combine.cuh adds.
#pragma once

#include "cache/combine.cuh"
#include "sm80/tiles.cuh"

namespace decoding {

// A warp has 32 keys of a step at head_dim 64, otherwise 16: 4 or 8 KB of K, and of V.
template <int kHeadDim_, int kBlockM_> struct WarpShape {
    static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kMTiles = kBlockM / 16;
    static constexpr int kNumWarps = kHeadDim == 256 ? 2 : 4, kMaxWarps = 2 * kNumWarps;
    static constexpr int kWarpKeys = kHeadDim == 64 ? 32 : 16, kAlignment = kWarpKeys;
    static constexpr int kPartWarps = 1;
    static constexpr int block_keys(int num_warps) { return num_warps * kWarpKeys; }
    struct Barriers {};
    using Q = uint16_t[kBlockM * kHeadDim];
    struct alignas(1024) Stage { uint16_t k[kWarpKeys * kHeadDim], v[kWarpKeys * kHeadDim]; };
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

// A step of a warp: scores, probabilities and output of its keys.
template <typename T, typename Shape>
__device__ void attend(const uint16_t *q, const typename Shape::Stage &stage,
                       float (&acc_o)[Shape::kMTiles][Shape::kHeadDim / 8][4], Softmax<Shape::kMTiles> &softmax,
                       const WorkItem<Shape> &item, int key, const DecodeParams &p, const Scores<> &scores,
                       const ScoreFactors<float> &factors) {
    constexpr int kMTiles = Shape::kMTiles, kKeys = Shape::kWarpKeys, kHeadDim = Shape::kHeadDim;
    using Swizzle = sm80::Swizzle<kHeadDim>;
    const int lane_idx = threadIdx.x % 32;
    float acc_s[kMTiles][kKeys / 8][4] = {};
    sm80::multiply_abt<T, kHeadDim>(acc_s, shared_address(q) + Swizzle::down(lane_idx),
                                    shared_address(stage.k) + Swizzle::across(lane_idx));
    const int row = lane_idx / 4, lane_key = key + lane_idx % 4 * 2;
    change_scores(acc_s, scores, factors, p, item, row, lane_key);
    if (!item.all_rows_see(key, kKeys)) hide_scores(acc_s, p, item, row, lane_key);
    float alpha[2 * kMTiles];
    if (softmax.update_row_max(acc_s, alpha)) softmax.rescale(acc_o, alpha);
    const uint32_t v_address = shared_address(stage.v) + Swizzle::down(lane_idx);
#pragma unroll
    for (int kk = 0; kk < kKeys / 16; kk++) {
        uint32_t P[kMTiles][4];
        for (int m = 0; m < kMTiles; m++) softmax.template probabilities<T>(P[m], acc_s[m], m, kk);
        sm80::multiply_ab<T, kHeadDim>(acc_o, P, v_address, 16 * kk * Swizzle::kRowBytes);
    }
}

}  // namespace decoding
