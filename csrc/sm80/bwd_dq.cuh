// Tiles of the Ampere backward pass, and the kernel that brings dq_accum into the order and type of dq.
#pragma once

#include "common/bwd_workspace.cuh"
#include "common/scores.cuh"
#include "mods/score_mods.cuh"
#include "sm80/tiles.cuh"

namespace sm80 {

using namespace device;

// kDimSplit warps share keys: each scores a part of the rows and sums some columns of dK and dV.
template <int kHeadDim_, int kBlockM_, int kBlockN_, int kNWarps_, int kDimSplit_, int kStages_, int kBlocksPerSM_>
struct BwdShape {
    static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_, kNWarps = kNWarps_;
    static constexpr int kDimSplit = kDimSplit_, kStages = kStages_, kBlocksPerSM = kBlocksPerSM_;
    static constexpr int kNThreads = 32 * kNWarps, kMaxSplits = 16;
    static constexpr bool kFillsGpu = false, kCountsArrivals = false, kOneTile = false;
    static constexpr int kWarpN = kBlockN * kDimSplit / kNWarps;
    static constexpr int kSub = kBlockM / kDimSplit < 32 ? kBlockM / kDimSplit : 32;  // rows scored at a time
    // A warp's acc_dq has 32 rows and kHeadDim / kDqSplit columns.
    static constexpr int kDqSplit = kNWarps / (kBlockM / 32), kDqTiles = kHeadDim / kDqSplit / 8;
    static constexpr int kDqWarps = kNWarps, kSemaphores = kNWarps;
    static_assert(kWarpN % 16 == 0 && kBlockM % 32 == 0 && kDqTiles % 2 == 0 && kHeadDim % (16 * kDimSplit) == 0);
    static_assert(kNWarps % (kBlockM / 32) == 0 && kNThreads >= kBlockM && kStages <= 2);
    static_assert(kWarpN * kSub / 32 <= 32);  // a lane's scores: drop() has a bit for each
    static_assert(kDimSplit == 1 || kSub * kDimSplit == kBlockM);  // a warp scores its part at once
};

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kNThreads) flash_bwd_dq(const __grid_constant__ AttnBackwardParams p) {
#if __CUDA_ARCH__ < 800
    __trap();
#else
    const Tile tile = RowTiles<Shape::kBlockM>::at(p, blockIdx.x);
    const Sequence seq(p, tile.b);
    const BwdWorkspace<Shape> workspace(p);
    const float *dq_accum = workspace.dq_accum(p, workspace.row_tile(p, tile.b, tile.h, tile.block), threadIdx.x / 32,
                                               threadIdx.x % 32);
    float acc_dq[2][Shape::kDqTiles][4];
#pragma unroll
    for (int j = 0; j < 2 * Shape::kDqTiles; j++)
        *reinterpret_cast<float4 *>(acc_dq[j % 2][j / 2]) = *reinterpret_cast<const float4 *>(dq_accum + 128 * j);
    const int warp_idx = threadIdx.x / 32, row0 = tile.block * Shape::kBlockM;
    const float *lse_log2 = p.lse_log2 + lse_index(p, seq.q_begin, tile.b, tile.h) + row0;
    store_tile<T>(acc_dq, Scores<>(p).softmax_scale, shared_memory<uint16_t[Shape::kBlockM][Shape::kHeadDim]>(),
                  warp_idx / Shape::kDqSplit * 32, warp_idx % Shape::kDqSplit * Shape::kDqTiles,
                  rows_of<T>(p.dq, tile.b, tile.h, seq.q_begin + row0), p.dq.row_stride, seq.padded_q - row0,
                  p.head_dim, [&](int r) { return lse_log2[r] == INFINITY; });  // no keys: the sum may be NaN
#endif
}

}  // namespace sm80
