// sm90/bwd/ has the backward pass on Hopper. Order: dq.cuh, producer.cuh, consumer.cuh, launch.cuh,
// flash_bwd_sm90.cuh, flash_bwd_sm90.cu.
// Beside it, for other head_dims above 128: flash_bwd_wide_sm90.cu. This file: dq_accum becomes dq, a head when whole.
#pragma once

#include "common/bwd_workspace.cuh"
#include "sm90/tiles.cuh"

namespace sm90 {

using namespace device;

// A part of dQ [kBlockM, kHeadDim]: 64 columns, 64 rows, all of it in turns, or 64 columns transposed. Each consumer
// has one; at head_dim 192 they take the third in turns.
enum class DqPart { kColumns, kRows, kTurns, kTransposed };

// Whether fragment n of a warp has columns of dQ, not only padding. Other kernels have no registers to ask.
template <typename Shape> __device__ bool has_dq(const AttnBackwardParams &p, int warp_idx, int n) {
    return Shape::kDqPart != DqPart::kColumns || warp_idx / 4 * 64 + 8 * n < p.head_dim;
}

// A key head's sums are whole after `arrivals` reports, or if 0 (keys are split) after the previous kernel.
template <typename T, typename Shape>
__global__ void __launch_bounds__(32 * Shape::kDqWarps)
    flash_bwd_dq(const __grid_constant__ AttnBackwardParams p, const __grid_constant__ BwdWorkspace<Shape> workspace,
                 const __grid_constant__ TileOrder<Divisor> order, const float scale, const int arrivals) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    __trap();
#else
    constexpr int kBlockM = Shape::kBlockM, kHeadDim = Shape::kHeadDim, kVecs = kHeadDim / 8;
    const Tile tile = RowTiles<kBlockM>::at(p, order, blockIdx.x);
    const Sequence seq(p, tile.b);
    if (arrivals == 0) wait_for_previous_kernel();  // unobserved by the emulator: flash_bwd_dkv lets no kernel begin
    else if (threadIdx.x == 0)
        while (load_acquire(workspace.dq_arrivals(p, tile)) != arrivals) sleep_briefly();
    __syncthreads();  // unobserved by the emulator: kernels run one after the other there
    auto &sdQ = shared_memory<SmemTile<kBlockM, kHeadDim>>();
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32, part = warp_idx / 4 * 64;
    const float *dq_accum = workspace.dq_accum(p, workspace.row_tile(p, tile.b, tile.h, tile.block), warp_idx,
                                               thread_idx() % 32);
    float4 x[Shape::kDqTiles];
#pragma unroll
    for (int n = 0; n < Shape::kDqTiles; n++)
        x[n] = has_dq<Shape>(p, warp_idx, n) ? *reinterpret_cast<const float4 *>(dq_accum + 128 * n) : float4{};
    const int m0 = warp_idx % 4 * 16;
#pragma unroll
    for (int n = 0; n < Shape::kDqTiles; n += 2) {
        uint32_t packed[4];
        for (int j = 0; j < 4; j++) {
            const float4 &y = x[n + j / 2];
            packed[j] = j % 2 ? pack<T>(y.z * scale, y.w * scale) : pack<T>(y.x * scale, y.y * scale);
        }
        if constexpr (Shape::kDqPart == DqPart::kTransposed)
            stmatrix_trans(packed, sdQ.address(8 * n + lane_idx / 16 * 8 + lane_idx % 8,
                                               part + m0 + lane_idx / 8 % 2 * 8));
        else
            stmatrix(packed, sdQ.address(m0 + lane_idx % 16 + (Shape::kDqPart == DqPart::kRows ? part : 0),
                                         8 * n + lane_idx / 16 * 8 + (Shape::kDqPart == DqPart::kColumns ? part : 0)));
    }
    __syncthreads();  // unobserved by racecheck: stmatrix is not in its view
    const float *lse_log2 = p.lse_log2 + lse_index(p, seq.q_begin, tile.b, tile.h);
    for (int i = threadIdx.x; i < kBlockM * kVecs; i += 32 * Shape::kDqWarps) {
        const int row = tile.block * kBlockM + i / kVecs, col = i % kVecs * 8;
        if (row >= seq.padded_q || col >= p.head_dim) continue;
        const bool is_empty = row >= seq.seqlen_q || lse_log2[row] == INFINITY;  // sum is NaN or unset
        *reinterpret_cast<uint4 *>(rows_of<T>(p.dq, tile.b, tile.h, seq.q_begin + row) + col) =
            is_empty ? uint4{} : sdQ.template at<uint4>(i / kVecs, col);
    }
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0)
        wait_for_previous_kernel();  // unobserved by the emulator: the next kernel relies on it, and no case has one
#endif
}

}  // namespace sm90
