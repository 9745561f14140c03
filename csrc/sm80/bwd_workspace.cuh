// What the blocks of threads of flash_bwd_sm80.cu sum in memory, because no block has the whole sum: dQ always, and dK
// and dV where several blocks share a tile of keys. A kernel brings the sums of dQ into the order and type of dq.
// bwd_splits.cuh has one for dK and dV.
#pragma once

#include "common/bwd_splits.cuh"
#include "common/device.h"
#include "common/key_tiles.cuh"
#include "common/scores.cuh"
#include "mods/score_mods.cuh"
#include "sm80/tiles.cuh"

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
//   dkv_sums      [max_splits, 2, batch_size, nheads_k, padded_keys, kHeadDim], if there are several splits
template <typename Shape> struct Workspace {
    static constexpr int kHeadDim = Shape::kHeadDim;
    RowTiles<Shape::kBlockM> row_tiles;
    int padded_keys, max_splits;
    int64_t tiles;       // of query rows; 0 if dq is not needed
    int64_t dkv_floats;  // of one split's dK, and of its dV; 0 if nothing is split
    explicit __host__ __device__ Workspace(const AttnBackwardParams &p)
        : row_tiles(p), padded_keys(num_blocks<Shape::kBlockN>(p.seqlen_k) * Shape::kBlockN),
          max_splits(num_splits(p, p.seqlen_q, p.seqlen_k)),
          tiles(p.dq.data ? RowTiles<Shape::kBlockM>::count(p) : 0),
          dkv_floats(max_splits > 1 ? p.batch_size * p.nheads_k * padded_keys * kHeadDim : 0) {}
    __host__ __device__ int64_t floats() const { return tiles * (Shape::kBlockM * Shape::kHeadDim); }
    // What the launcher sets to 0: dq_accum and, if deterministic, semaphores and counter.
    __host__ __device__ int64_t zeroed_bytes(bool deterministic) const {
        return 4 * floats() + (deterministic && tiles ? (4 * (tiles * Shape::kNWarps + 1) + 127) / 128 * 128 : 0);
    }
    __host__ __device__ int64_t bytes(const AttnBackwardParams &p) const {
        return zeroed_bytes(p.deterministic) + 4 * max_splits * 2 * dkv_floats;
    }
    __device__ int splits_of(const AttnBackwardParams &p, const Sequence &seq) const {
        return min(max_splits, num_splits(p, seq.seqlen_q, seq.seqlen_k));
    }
    // Of dK; that of dV follows.
    __host__ __device__ float *dkv_sums(const AttnBackwardParams &p, int split_idx) const {
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
