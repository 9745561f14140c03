// Workspace of the backward kernels on tensor cores: sums of dQ, and of dK and dV if splits share a tile of keys.
// dq_accum has the order of accumulators, so that each architecture has its own flash_bwd_dq.
#pragma once

#include "common/key_tiles.cuh"
#include "common/launch.h"
#include "common/mask.cuh"
#include "ptx/memory.cuh"

// Splits of a tile of keys, each for whole query heads. To be worth their sums in memory, each has at least 1024 rows,
// masked or not, and all have no more sums than the group has elements of Q. If Shape::kFillsGpu, one sample needs them
// all to fill a GPU, or twice that under a causal mask, whose first tiles take longest. Only a sample's lengths and the
// heads count: its bits must not depend on its batch. A packed batch is not split: the host knows no lengths.
// kMost: the most for any sample of a padded batch. If keys are padded to many more than there are rows, it is too low:
// only then does padding change the number.
template <typename Shape, bool kMost = !Shape::kFillsGpu>
__host__ __device__ int num_splits(const AttnParams &p, int seqlen_q, int seqlen_k) {
    if (p.cu_seqlens_q) return 1;
    const int64_t group = p.nheads / p.nheads_k, rows = group * seqlen_q;
    const int64_t tiles = int64_t(p.nheads_k) * num_blocks<Shape::kBlockN>(seqlen_k);
    const int64_t enough = p.window_right == 0 && rows >= 16384 ? 512 : 256;  // tiles
    auto is_too_many = [&](int64_t splits) {
        return (!kMost && (splits - 1) * tiles >= enough) || splits * 1024 > rows || splits * seqlen_k > rows;
    };
    int64_t splits = group < Shape::kMaxSplits ? group : Shape::kMaxSplits;
    while (splits > 1 && is_too_many(splits)) splits--;  // a division takes registers
    return int(splits);
}
template <typename Shape> __host__ __device__ int max_num_splits(const AttnParams &p) {
    return !Shape::kFillsGpu || p.seqused_q || p.seqused_k ? num_splits<Shape, true>(p, p.seqlen_q, p.seqlen_k)
                                                           : num_splits<Shape>(p, p.seqlen_q, p.seqlen_k);
}

// The workspace:
//   ticket        tiles of keys taken, in 128 bytes
//   dq_accum      [tiles of query rows, kDqWarps, fragments of 128 floats], if dq is needed
//   dq_arrivals   [key heads of samples]: blocks that have added dQ, if Shape::kCountsArrivals
//   dq_semaphore  [tiles of query rows, kSemaphores]: turns taken, if deterministic and dq is needed
//   dkv_accum     [max_splits, 2, batch_size, nheads_k, padded_keys, kHeadDim], if split
template <typename Shape> struct BwdWorkspace {
    static constexpr int kHeadDim = Shape::kHeadDim, kBlockN = Shape::kBlockN;
    static constexpr int kTicketBytes = 128, kDqFloats = Shape::kBlockM * kHeadDim;
    static constexpr int kWarpFloats = kDqFloats / Shape::kDqWarps;
    RowTiles<Shape::kBlockM> row_tiles;
    int64_t tiles;       // of query rows; 0 if dq is not needed
    int max_splits;
    int64_t dkv_floats;  // of a split's dK; 0 if nothing is split
    int64_t key_heads;
    int padded_keys;
    explicit __host__ __device__ BwdWorkspace(const AttnBackwardParams &p)
        : row_tiles(p), tiles(p.dq.data ? RowTiles<Shape::kBlockM>::count(p) : 0),
          max_splits(max_num_splits<Shape>(p)),
          key_heads(Shape::kCountsArrivals ? p.nheads_k * (p.cu_seqlens_k ? 1 : p.batch_size) : 0),
          padded_keys(num_blocks<kBlockN>(p.seqlen_k) * kBlockN) {
        dkv_floats = max_splits > 1 ? p.batch_size * p.nheads_k * padded_keys * kHeadDim : 0;
    }

    __host__ __device__ int64_t dq_end() const { return kTicketBytes + 4 * tiles * kDqFloats; }
    // Rounded for dkv_accum: stores off a multiple of 128 bytes are slow.
    __host__ __device__ int64_t zeros_end(bool deterministic) const {
        const int64_t numbers = key_heads + (deterministic ? Shape::kSemaphores * tiles : 0);
        return dq_end() + (4 * numbers + 127) / 128 * 128;
    }
    __host__ __device__ int64_t bytes(bool deterministic) const {
        return zeros_end(deterministic) + 4 * max_splits * 2 * dkv_floats;
    }
    __device__ int row_tile(const AttnBackwardParams &p, int b, int h, int m_block) const {
        return row_tiles.first_tile(b, p.nheads) + h * row_tiles.slots + m_block;
    }
    __device__ static int *ticket(const AttnBackwardParams &p) { return static_cast<int *>(p.workspace); }
    // A lane's part of a warp's first fragment; the next is 128 floats further.
    __device__ static float *dq_accum(const AttnBackwardParams &p, int tile, int warp_idx, uint32_t lane_idx) {
        return static_cast<float *>(p.workspace) + kTicketBytes / 4 + int64_t(tile) * kDqFloats +
               (warp_idx * kWarpFloats + lane_idx * 4);
    }
    __device__ int *dq_arrivals(const AttnBackwardParams &p, const Tile &tile) const {
        return first_arrivals(p) + (p.cu_seqlens_k ? 0 : tile.b * p.nheads_k) + tile.h_k;
    }
    __device__ int *dq_semaphore(const AttnBackwardParams &p, int64_t tile, int i) const {
        return first_arrivals(p) + key_heads + tile * Shape::kSemaphores + i;
    }
    __device__ int *first_arrivals(const AttnBackwardParams &p) const {
        return ticket(p) + kTicketBytes / 4 + tiles * kDqFloats;
    }
    __device__ int splits_of(const AttnBackwardParams &p, const Sequence &seq) const {
        return min(max_splits, num_splits<Shape>(p, seq.seqlen_q, seq.seqlen_k));
    }
    __device__ float *dkv_accum(const AttnBackwardParams &p, int split_idx) const {  // dV is dkv_floats further
        char *begin = static_cast<char *>(p.workspace) + zeros_end(p.deterministic);
        return reinterpret_cast<float *>(begin) + 2 * split_idx * dkv_floats;
    }
    __device__ float *dkv_accum(const AttnBackwardParams &p, int split_idx, const Tile &tile, int key = 0) const {
        const int64_t bh = int64_t(tile.b) * p.nheads_k + tile.h_k;
        return dkv_accum(p, split_idx) + (bh * padded_keys + (tile.block * kBlockN + key)) * kHeadDim;
    }
    // Accumulators of 16 keys; dk is the lane's first place.
    template <int kDTiles, int kDVTiles>
    __device__ void store_split(float *dk, const float (&acc_dk)[kDTiles][4],
                                const float (&acc_dv)[kDVTiles][4]) const {
        float *dv = dk + dkv_floats;
#pragma unroll
        for (int d = 0; d < kDTiles; d++)
            for (int i = 0; i < 2; i++) {
                const int at = 8 * i * kHeadDim + 8 * d;
                *reinterpret_cast<float2 *>(dk + at) = {acc_dk[d][2 * i], acc_dk[d][2 * i + 1]};
                if (d < kDVTiles) *reinterpret_cast<float2 *>(dv + at) = {acc_dv[d][2 * i], acc_dv[d][2 * i + 1]};
            }
    }
};

// Blocks of keys that add dQ before this one. Under a causal mask the last goes first: it begins with these rows.
template <typename Shape, bool kChunks>
__device__ int dq_turn(const AttnBackwardParams &p, const MaskOf<kChunks> &mask, const Tile &tile, int m_block) {
    const BlockRange keys = mask.template key_blocks<Shape::kBlockM, Shape::kBlockN>(m_block * Shape::kBlockM);
    return KeyTiles<Shape::kBlockN>::is_last_first(p) ? keys.end - 1 - tile.block : tile.block - keys.begin;
}

// dk and dv of samples with several splits, 8 columns of a key a thread.
constexpr int kDkvThreads = 256;
template <typename T, typename Shape>
__global__ void __launch_bounds__(kDkvThreads)
    flash_bwd_dkv(const __grid_constant__ AttnBackwardParams p, const float dk_scale, const float dv_scale) {
    const BwdWorkspace<Shape> workspace(p);
    constexpr int kVecs = Shape::kHeadDim / 8;
    const int64_t vec = int64_t(blockIdx.x) * kDkvThreads + threadIdx.x, row = vec / kVecs;
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
            const auto *from = reinterpret_cast<const float4 *>(workspace.dkv_accum(p, split_idx) + offset + 8 * vec);
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

template <typename T, typename Shape>
void launch_dkv(const AttnBackwardParams &p, const BwdWorkspace<Shape> &workspace, float dk_scale, float dv_scale) {
    const int64_t vecs = workspace.dkv_floats / 8;
    device::launch(flash_bwd_dkv<T, Shape>, (vecs + kDkvThreads - 1) / kDkvThreads, kDkvThreads, 0, p.stream, p,
                   dk_scale, dv_scale);
}
