// A tile of 16 or 32 rows on m16n8k16, for decode.cu and decode_sm90.cu. The warps of a block divide the keys of a step
// and do not wait for one another: each copies its own keys ahead in a ring of stages, and has its own maximum, sum and
// output. They are added at the end (combine.cuh).
#pragma once

#include <algorithm>

#include "cache/combine.cuh"

namespace decoding {

// A warp has 32 keys of a step at head_dim 64, otherwise 16.
template <int kHeadDim_, int kBlockM_> struct WarpShape : KeyShape<kHeadDim_, kBlockM_, kHeadDim_ == 256 ? 2 : 4> {
    static constexpr int kWarpKeys = WarpShape::kBlockN / WarpShape::kNumWarps, kMTiles = kBlockM_ / 16;
    static constexpr int kParts = WarpShape::kNumWarps;  // partial results of a block
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
    static constexpr int kMostStages = 6;
    alignas(1024) uint16_t q[Shape::kBlockM * Shape::kHeadDim];
    typename Scheduler<Shape>::Shared scheduler;
    uint64_t full[kMostStages][Shape::kNumWarps];   // barriers of TMA
    union Buffer {
        WarpStage<Shape> stages[Shape::kNumWarps];  // of the warps, as often as the ring has stages
        PartialResult<Shape> parts[Shape::kParts];  // after a work item's last step
    } buffer;

    __device__ WarpStage<Shape> &stage(int i) { return buffer.stages[i * Shape::kNumWarps + threadIdx.x / 32]; }
    static size_t bytes(int num_stages) {
        return sizeof(WarpsMemory) - sizeof(Buffer) + std::max(num_stages * sizeof(Buffer::stages), sizeof(Buffer));
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
    if (key < item.full.begin || key + kKeys > item.full.end) hide_scores(acc_s, p, item, row, lane_key);
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

// What a block does. keys.begin() begins to copy this warp's keys, from its first one on; keys.next() waits for those of
// a step and copies later ones; keys.end() leaves nothing under way.
template <typename T, typename Shape, typename Keys>
__device__ void decode_by_warps(const DecodeParams &p, const Splits &splits, const Scores<> &scores,
                                const ScoreFactors<float> &factors, WarpsMemory<Shape> &shared, Keys &keys) {
    if (p.phase == Phase::kAlone) wait_for_previous_kernel();
    Scheduler<Shape> scheduler(p, splits, shared.scheduler);
    const int stride = splits.cluster * Shape::kBlockN, warp_idx = threadIdx.x / 32;
    for (WorkItem<Shape> item = scheduler.first(); item.is_valid(); item = scheduler.next(item)) {
        const int begin = item.begin + scheduler.rank * Shape::kBlockN + warp_idx * Shape::kWarpKeys;
        load_q<T>(shared.q, p, item, PanelSwizzle<Shape::kBlockM>::offset);
        keys.begin(item, begin, stride);
        float acc_o[Shape::kMTiles][Shape::kHeadDim / 8][4] = {};
        Softmax<Shape::kMTiles> softmax(factors.softmax_scale_log2);
        keys.wait_for_q();
        __syncthreads();  // Q is there
        for (int key = begin; key < item.end; key += stride)
            attend<T, Shape>(shared.q, keys.next(item, key), acc_o, softmax, item, key, p, scores, factors);
        let_next_kernel_begin();
        keys.end();
        __syncthreads();  // all warps have read their stages
        shared.buffer.parts[warp_idx].store(item, acc_o, softmax, 0);
        combine<T>(p, scheduler, item, shared.buffer.parts);
    }
    store_padding<T>(p);
    if (p.phase != Phase::kAlone && blockIdx.x == 0) wait_for_previous_kernel();  // the next kernel relies on it
}

}  // namespace decoding
