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
    static_assert(kDimSplit == 1 || kSub * kDimSplit == kBlockM);  // each forms its part in one go
};

// At most so many blocks of threads share a tile of keys, each with one query head or more of those that read it.
__host__ __device__ inline int64_t most_splits(const AttnParams &p) {
    const int64_t group = p.nheads / p.nheads_k;
    return group < 16 ? group : 16;
}

constexpr int64_t kPackedSplitRows = 8192;

// How many blocks of threads share a tile of keys of a sample. A split has at least 1024 of the group's rows, masked
// ones included, to be worth its sums in memory. A packed batch has tiles enough. There splits only keep the tile that
// most rows of a long sample see from being waited for, so they have more rows, and without a mask there are none. All
// splits of a sample together have at most most_splits keys for each of its rows. The number depends on the sample's
// lengths, the group and the mask alone, so that a sample's bits do not depend on its batch. It grows with seqlen_q and
// falls with seqlen_k.
__host__ __device__ inline int num_splits(const AttnParams &p, int seqlen_q, int seqlen_k) {
    const int64_t most = most_splits(p), rows = int64_t(p.nheads / p.nheads_k) * seqlen_q;
    const bool has_mask = p.window_left < p.seqlen_k || p.window_right < p.seqlen_q;
    if (p.cu_seqlens_q && !has_mask) return 1;
    const int64_t least_rows = p.cu_seqlens_q ? kPackedSplitRows : 1024;
    int64_t splits = most;
    while (splits > 1 && (splits * least_rows > rows || splits * seqlen_k > most * seqlen_q))
        splits--;  // a division takes registers
    return int(splits);
}

// Global memory beyond the tensors:
//   dq_accum      [tiles of query rows, kBlockM · kHeadDim], if dq is needed
//   dq_semaphore  [tiles of query rows, kNWarps], and one counter of tickets, if deterministic
//   dkv_accum     [2, batch_size, nheads_k, dkv_rows, kHeadDim], if there are several splits: the sums of a sample's
//                 splits, one after the other, each of its valid keys. In a packed batch batch_size counts as 1. A
//                 sample then has room for most_splits keys for each of its rows: the host does not know its lengths.
template <typename Shape> struct Workspace {
    RowTiles<Shape::kBlockM> row_tiles;
    int max_splits;
    int64_t tiles;       // of query rows; 0 if dq is not needed
    int64_t dkv_rows;    // of a key/value head; 0 if nothing is split
    int64_t dkv_floats;  // of dK, and of dV
    explicit __host__ __device__ Workspace(const AttnBackwardParams &p)
        : row_tiles(p),
          max_splits(num_splits(p, p.seqlen_q, p.cu_seqlens_q || p.seqused_k ? 0 : p.seqlen_k)),
          tiles(p.dq.data ? RowTiles<Shape::kBlockM>::count(p) : 0),
          dkv_rows(max_splits > 1 ? num_dkv_rows(p) : 0),
          dkv_floats((p.cu_seqlens_q ? 1 : p.batch_size) * p.nheads_k * dkv_rows * Shape::kHeadDim) {}
    __host__ __device__ int64_t floats() const { return tiles * (Shape::kBlockM * Shape::kHeadDim); }
    // What the launcher sets to 0: dq_accum and, if deterministic, semaphores and counter.
    __host__ __device__ int64_t zeroed_bytes(bool deterministic) const {
        return 4 * floats() + (deterministic && tiles ? (4 * (tiles * Shape::kNWarps + 1) + 15) / 16 * 16 : 0);
    }
    __host__ __device__ int64_t bytes(const AttnBackwardParams &p) const {
        return zeroed_bytes(p.deterministic) + 4 * 2 * dkv_floats;
    }
    __host__ __device__ int64_t num_dkv_rows(const AttnBackwardParams &p) const {
        const int64_t by_rows = most_splits(p) * p.seqlen_q, by_keys = int64_t(max_splits) * p.seqlen_k;
        return p.cu_seqlens_q || by_rows < by_keys ? by_rows : by_keys;
    }
    // A split's dK of a sample's first key; dkv_floats further is its dV.
    __device__ float *dkv_accum(const AttnBackwardParams &p, const Sequence &seq, const Tile &tile,
                                int split_idx) const {
        const int64_t head = (p.cu_seqlens_q ? 0 : int64_t(tile.b) * p.nheads_k) + tile.h_k;
        const int64_t row = head * dkv_rows + most_splits(p) * seq.q_begin + int64_t(split_idx) * seq.seqlen_k;
        char *begin = static_cast<char *>(p.workspace) + zeroed_bytes(p.deterministic);
        return reinterpret_cast<float *>(begin) + row * Shape::kHeadDim;
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

// dk and dv of keys whose tiles were split: the sums of the splits, added up in order. A thread has 8 columns of a key,
// and kCombineBlocks blocks of threads have a tile.
constexpr int kCombineThreads = 256;
template <typename Shape> constexpr int kCombineBlocks = Shape::kBlockN * Shape::kHeadDim / 8 / kCombineThreads;

template <typename T, typename Shape>
__global__ void __launch_bounds__(kCombineThreads) flash_bwd_dkv(const __grid_constant__ AttnBackwardParams p) {
#if __CUDA_ARCH__ < 800  // of a build for several GPUs, the part for those that have no such instructions
    __trap();
#else
    constexpr int kVecs = Shape::kHeadDim / 8, kBlocks = kCombineBlocks<Shape>;
    static_assert(kBlocks * kCombineThreads == Shape::kBlockN * kVecs);
    const Workspace<Shape> workspace(p);
    const Tile tile = KeyTiles<Shape::kBlockN>::at(p, blockIdx.x / kBlocks);
    const int vec = blockIdx.x % kBlocks * kCombineThreads + threadIdx.x, col = vec % kVecs * 8;
    const int key = tile.block * Shape::kBlockN + vec / kVecs;
    const Sequence seq(p, tile.b);
    const int splits = num_splits(p, seq.seqlen_q, seq.seqlen_k);
    if (key >= seq.padded_k || splits == 1) return;  // if not split, dk and dv are there
    auto combine = [&](int64_t offset, float scale, const Tensor &x, int cols) {
        if (col >= cols) return;
        float sum[8] = {};
        for (int split_idx = 0; split_idx < splits && key < seq.seqlen_k; split_idx++) {
            const float *accum = workspace.dkv_accum(p, seq, tile, split_idx) + offset;
            const auto *from = reinterpret_cast<const float4 *>(accum + int64_t(key) * Shape::kHeadDim + col);
            const float4 low = from[0], high = from[1];
            const float part[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            for (int i = 0; i < 8; i++) sum[i] += part[i];
        }
        uint32_t packed[4];
        for (int i = 0; i < 4; i++) packed[i] = pack<T>(sum[2 * i] * scale, sum[2 * i + 1] * scale);
        *reinterpret_cast<uint4 *>(rows_of<T>(x, tile.b, tile.h_k, seq.k_begin + key) + col) =
            {packed[0], packed[1], packed[2], packed[3]};
    };
    combine(0, Scores<>(p).softmax_scale, p.dk, p.head_dim);
    combine(workspace.dkv_floats, p.dropout_seed ? float(p.keep_scale) : 1.f, p.dv, p.head_dim_v);
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
