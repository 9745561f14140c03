// What the blocks of threads of flash_bwd_sm80.cu sum in memory, because no block has the whole sum: dQ always, and dK
// and dV where several blocks share a tile of keys. Two kernels bring these sums into the order and type of dq, dk and
// dv.
//
// Read next: flash_bwd_sm80.cu, the backward pass.
#pragma once

#include "device.h"
#include "flash.h"
#include "launch.h"
#include "scheduler.cuh"
#include "score_mods.cuh"
#include "scores.cuh"
#include "sequence.cuh"
#include "tiles_sm80.cuh"

namespace sm80 {

using namespace device;

// kDimSplit warps share their keys: each forms the scores of a part of the rows, and sums a part of the columns of dK
// and dV.
template <int kHeadDim_, int kBlockM_, int kBlockN_, int kNWarps_, int kDimSplit_, int kStages_, int kBlocksPerSM_>
struct BwdShape {
    static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_, kNWarps = kNWarps_;
    static constexpr int kDimSplit = kDimSplit_, kStages = kStages_, kBlocksPerSM = kBlocksPerSM_;
    static constexpr int kNThreads = 32 * kNWarps;
    static constexpr int kWarpN = kBlockN * kDimSplit / kNWarps;    // keys of a warp
    static constexpr int kSub = kBlockM / kDimSplit < 32 ? kBlockM / kDimSplit : 32;  // rows that it scores at a time
    // acc_dq: of 32 rows, and of kHeadDim / kDqSplit columns.
    static constexpr int kDqSplit = kNWarps / (kBlockM / 32), kDqTiles = kHeadDim / kDqSplit / 8;
    static_assert(kWarpN % 16 == 0 && kBlockM % 32 == 0 && kDqTiles % 2 == 0 && kHeadDim % (16 * kDimSplit) == 0);
    static_assert(kNWarps % (kBlockM / 32) == 0 && kNThreads >= kBlockM && kStages <= 2);
    static_assert(kWarpN * kSub / 32 <= 32);  // a lane's scores, of which Backward::drop() has a bit each
    static_assert(kDimSplit == 1 || kSub * kDimSplit == kBlockM);  // each forms its part in one go
};

// How many blocks of threads share a tile of keys of a sample, one block or more for each. A split has at least 1024 of
// the group's rows, masked ones included, to be worth its sums in memory. All splits together have no more sums than
// the group has elements of Q. The number depends on the sample's lengths and the group alone, so that a sample's bits
// do not depend on its batch. It does not fall where the lengths grow, so the padded lengths give the maximum. A packed
// batch is not split: the host knows the length of no sample.
__host__ __device__ inline int num_splits(const AttnParams &p, int seqlen_q, int seqlen_k) {
    if (p.cu_seqlens_q) return 1;
    const int64_t group = p.nheads / p.nheads_k, rows = group * seqlen_q;
    int64_t splits = group < 16 ? group : 16;
    while (splits > 1 && (splits * 1024 > rows || splits * seqlen_k > rows)) splits--;  // a division takes registers
    return int(splits);
}

// Global memory beyond the tensors:
//   dq_accum      [tiles of query rows, kBlockM · kHeadDim], if dq is needed
//   dq_semaphore  [tiles of query rows, kNWarps], and one counter of tickets, if deterministic
//   dkv_accum     [max_splits, 2, batch_size, nheads_k, n_blocks · kBlockN, kHeadDim], if there are several splits
template <typename Shape> struct Workspace {
    RowTiles<Shape::kBlockM> row_tiles;
    int n_blocks, max_splits;
    int64_t tiles;       // of query rows; 0 if dq is not needed
    int64_t dkv_floats;  // of one split's dK, and of its dV; 0 if nothing is split
    explicit __host__ __device__ Workspace(const AttnBackwardParams &p)
        : row_tiles(p), n_blocks(num_blocks<Shape::kBlockN>(p.seqlen_k)),
          max_splits(num_splits(p, p.seqlen_q, p.seqlen_k)),
          tiles(p.dq.data ? RowTiles<Shape::kBlockM>::count(p) : 0),
          dkv_floats(max_splits > 1 ? p.batch_size * p.nheads_k * n_blocks * (Shape::kBlockN * Shape::kHeadDim) : 0) {}
    __host__ __device__ int64_t floats() const { return tiles * (Shape::kBlockM * Shape::kHeadDim); }
    // What the launcher sets to 0: dq_accum and, if deterministic, semaphores and counter.
    __host__ __device__ int64_t zeroed_bytes(bool deterministic) const {
        return 4 * floats() + (deterministic && tiles ? (4 * (tiles * Shape::kNWarps + 1) + 15) / 16 * 16 : 0);
    }
    __host__ __device__ int64_t bytes(const AttnBackwardParams &p) const {
        return zeroed_bytes(p.deterministic) + 4 * max_splits * 2 * dkv_floats;
    }
    // Of dK; that of dV follows.
    __host__ __device__ float *dkv_accum(const AttnBackwardParams &p, int split_idx) const {
        char *begin = static_cast<char *>(p.workspace) + zeroed_bytes(p.deterministic);
        return reinterpret_cast<float *>(begin) + 2 * split_idx * dkv_floats;
    }
    // A warp's part of the sums of a tile of query rows, and this lane's in it. Fragment i of 2 · kDqTiles is 128·i
    // floats further.
    __device__ float *dq_accum(const AttnBackwardParams &p, int tile) const {
        const int lane_idx = threadIdx.x % 32;
        return static_cast<float *>(p.workspace) + part(tile) * (256 * Shape::kDqTiles) + lane_idx * 4;
    }
    // The key blocks that have added to it so far.
    __device__ int *dq_semaphore(const AttnBackwardParams &p, int tile) const {
        return static_cast<int *>(p.workspace) + floats() + part(tile);
    }
    __device__ int *ticket(const AttnBackwardParams &p) const {
        return static_cast<int *>(p.workspace) + floats() + tiles * Shape::kNWarps;
    }
    __device__ static int64_t part(int tile) { return int64_t(tile) * Shape::kNWarps + threadIdx.x / 32; }
};

// dk and dv of keys whose tiles were split: the sums of the splits, added up in order. A thread has 8 columns of a key.
constexpr int kCombineThreads = 256;

template <typename T, typename Shape>
__global__ void __launch_bounds__(kCombineThreads) flash_bwd_dkv(const __grid_constant__ AttnBackwardParams p) {
#if __CUDA_ARCH__ < 800  // of a build for several GPUs, the part for those that have no such instructions
    __trap();
#else
    constexpr int kVecs = Shape::kHeadDim / 8;
    const Workspace<Shape> workspace(p);
    const int64_t vec = int64_t(blockIdx.x) * kCombineThreads + threadIdx.x, row = vec / kVecs;
    const int padded_keys = workspace.n_blocks * Shape::kBlockN, key = row % padded_keys, col = vec % kVecs * 8;
    const int b = row / padded_keys / p.nheads_k, h_k = row / padded_keys % p.nheads_k;
    if (b >= p.batch_size) return;
    const Sequence seq(p, b);
    const int splits = min(workspace.max_splits, num_splits(p, seq.seqlen_q, seq.seqlen_k));
    if (key >= seq.padded_k || splits == 1) return;  // if not split, dk and dv are there
    auto combine = [&](int64_t offset, float scale, const Tensor &x, int cols) {
        if (col >= cols) return;
        float sum[8] = {};
        for (int split_idx = 0; split_idx < splits && key < seq.seqlen_k; split_idx++) {
            const auto *from = reinterpret_cast<const float4 *>(workspace.dkv_accum(p, split_idx) + offset);
            const float4 low = from[0], high = from[1];
            const float part[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            for (int i = 0; i < 8; i++) sum[i] += part[i];
        }
        uint32_t packed[4];
        for (int i = 0; i < 4; i++) packed[i] = pack<T>(sum[2 * i] * scale, sum[2 * i + 1] * scale);
        *reinterpret_cast<uint4 *>(rows_of<T>(x, b, h_k, seq.k_begin + key) + col) =
            {packed[0], packed[1], packed[2], packed[3]};
    };
    combine(8 * vec, Scores<>(p).softmax_scale, p.dk, p.head_dim);
    combine(workspace.dkv_floats + 8 * vec, p.dropout_seed ? float(p.keep_scale) : 1.f, p.dv, p.head_dim_v);
#endif
}

// dq of kBlockM rows: dq_accum times softmax_scale, as rows of q's type.
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kNThreads) flash_bwd_dq(const __grid_constant__ AttnBackwardParams p) {
#if __CUDA_ARCH__ < 800
    __trap();
#else
    const Tile tile = RowTiles<Shape::kBlockM>::at(p, blockIdx.x);
    const Sequence seq(p, tile.b);
    const Workspace<Shape> workspace(p);
    const float *dq_accum = workspace.dq_accum(
        p, workspace.row_tiles.first_tile(tile.b, p.nheads) + tile.h * workspace.row_tiles.slots + tile.block);
    float acc_dq[2][Shape::kDqTiles][4];
#pragma unroll
    for (int j = 0; j < 2 * Shape::kDqTiles; j++)
        *reinterpret_cast<float4 *>(acc_dq[j % 2][j / 2]) = *reinterpret_cast<const float4 *>(dq_accum + 128 * j);
    const int warp_idx = threadIdx.x / 32, row0 = tile.block * Shape::kBlockM;
    const float *lse_log2 = p.lse_log2 + lse_index(p, seq, tile.b, tile.h) + row0;
    store_tile<T>(acc_dq, Scores<>(p).softmax_scale, shared_memory<uint16_t[Shape::kBlockM][Shape::kHeadDim]>(),
                  warp_idx / Shape::kDqSplit * 32, warp_idx % Shape::kDqSplit * Shape::kDqTiles,
                  rows_of<T>(p.dq, tile.b, tile.h, seq.q_begin + row0), p.dq.row_stride, seq.padded_q - row0,
                  p.head_dim, [&](int r) { return lse_log2[r] == INFINITY; });  // no keys: the sum may be NaN
#endif
}

}  // namespace sm80
