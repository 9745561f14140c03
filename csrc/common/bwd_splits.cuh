// dk and dv where several blocks of threads, the splits, share a tile of keys: the sums of the splits, added up in
// order. For flash_bwd_sm80.cu and flash_bwd_sm90.cu.
#pragma once

#include "common/launch.h"
#include "common/sequence.cuh"
#include "flash.h"
#include "ptx/sm80.cuh"

namespace splits {

constexpr int kThreads = 256;

// A thread has 8 columns of a key. Where a sample has one split, dk and dv are there already.
template <typename T, typename Workspace>
__global__ void __launch_bounds__(kThreads)
    flash_bwd_dkv(const __grid_constant__ AttnBackwardParams p, const float dk_scale, const float dv_scale) {
    const Workspace workspace(p);
    constexpr int kVecs = Workspace::kHeadDim / 8;
    const int64_t vec = int64_t(blockIdx.x) * kThreads + threadIdx.x, row = vec / kVecs;
    const int padded_keys = workspace.padded_keys, key = row % padded_keys, col = vec % kVecs * 8;
    const int b = row / padded_keys / p.nheads_k, h_k = row / padded_keys % p.nheads_k;
    if (b >= p.batch_size) return;
    const Sequence seq(p, b);
    const int splits = workspace.splits_of(p, seq);
    if (key >= seq.padded_k || splits == 1) return;
    auto combine = [&](int64_t offset, float scale, const Tensor &x, int cols) {
        if (col >= cols) return;
        float sum[8] = {};
        for (int split_idx = 0; split_idx < splits && key < seq.seqlen_k; split_idx++) {
            const auto *from = reinterpret_cast<const float4 *>(workspace.dkv_sums(p, split_idx) + offset + 8 * vec);
            const float4 low = from[0], high = from[1];
            const float part[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            for (int i = 0; i < 8; i++) sum[i] += part[i];
        }
        uint32_t packed[4];
        for (int i = 0; i < 4; i++) packed[i] = ptx::pack<T>(sum[2 * i] * scale, sum[2 * i + 1] * scale);
        *reinterpret_cast<uint4 *>(rows_of<T>(x, b, h_k, seq.k_begin + key) + col) =
            {packed[0], packed[1], packed[2], packed[3]};
    };
    combine(0, dk_scale, p.dk, p.head_dim);
    combine(workspace.dkv_floats, dv_scale, p.dv, p.head_dim_v);
}

template <typename T, typename Workspace>
void launch_dkv(const AttnBackwardParams &p, const Workspace &workspace, float dk_scale, float dv_scale) {
    const int64_t vecs = workspace.dkv_floats / 8;
    device::launch(flash_bwd_dkv<T, Workspace>, (vecs + kThreads - 1) / kThreads, kThreads, 0, p.stream, p, dk_scale,
                   dv_scale);
}

}  // namespace splits
