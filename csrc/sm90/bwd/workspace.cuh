// The folder sm90/bwd/ has the backward pass on Hopper: one kernel up to head_dim 128, and another one above. Order in
// sm90/bwd/: workspace.cuh, producer.cuh, launch.cuh, flash_bwd_sm90.cu. Beside it: flash_bwd_wide_sm90.cu.
//
// What the blocks of threads of flash_bwd_sm90.cu and flash_bwd_wide_sm90.cu sum in memory, because no block has the
// whole sum: dQ always, and dK and dV where several blocks share a tile of keys. A kernel brings the sums of dQ into
// the order and type of dq, a head as soon as its sums are whole, while other blocks still compute. bwd_splits.cuh has
// one for dK and dV.
#pragma once

#include <algorithm>

#include "common/bwd_splits.cuh"
#include "common/key_tiles.cuh"
#include "common/mask.cuh"
#include "common/scores.cuh"
#include "sm90/tiles.cuh"

namespace sm90 {

using namespace device;

// Which part of a step's dQ [kBlockM, kHeadDim] a consumer forms, always 64 rows of accumulators: 64 columns, 64 rows,
// everything in turns, or 64 columns transposed. The last is for a kBlockM that is no multiple of 64.
enum class DqPart { kColumns, kRows, kTurns, kTransposed };

template <int kHeadDim_, int kConsumers_, int kBlockM_, int kStages_>
struct BwdShape {
    static constexpr int kHeadDim = kHeadDim_, kConsumers = kConsumers_, kBlockM = kBlockM_, kStages = kStages_;
    static constexpr int kBlockN = 64 * kConsumers, kNThreads = 128 * (kConsumers + 1), kNWarps = 4 * kConsumers;
    static constexpr DqPart kDqPart = kBlockM % 64      ? DqPart::kTransposed
                                      : kBlockM == 128  ? DqPart::kRows
                                      : kHeadDim == 128 ? DqPart::kColumns
                                                        : DqPart::kTurns;
    static constexpr int kDqParts = kDqPart == DqPart::kTurns ? 1 : kConsumers, kDqWarps = 4 * kDqParts;
    static constexpr int kDqFloats = kBlockM * kHeadDim, kDqTiles = kDqFloats / (512 * kDqParts);
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr int kValueStages = kBlockM == 80 ? 1 : 2;  // what shared memory has room for
    static constexpr int kMaxSplits = 16;        // blocks of threads that share a tile of keys, each for some heads
    static constexpr int kTileBlocks = 1;        // a cluster of blocks, which has a tile of keys together
    static constexpr bool kIsPersistent = true;  // a block takes one tile after the other
    static_assert(kConsumers == 2);
    static_assert(kDqTiles == (kDqPart == DqPart::kTransposed ? kBlockM / 8 : 8));
};

// How many blocks of threads share a tile of keys of a sample, each for whole query heads: as few as fill a GPU, if one
// sample has not enough tiles for that. Under a causal mask the first tiles take longest, so it takes twice as many to
// keep all of a GPU busy to the end, if there are rows enough for them. A split has at least 1024 rows, and all splits
// together have no more sums than the group has elements of Q. The number depends on the lengths of the sample and the
// numbers of heads alone, so that a sample's bits do not depend on its batch. A packed batch is not split: the host
// knows the length of no sample.
// kMost: the most that a sample of a padded batch may have, where the host knows no lengths either. It is too low if
// keys are padded to many more than there are rows. Only then does padding change the number of splits.
template <typename Shape, bool kMost = false>
__host__ __device__ int num_splits(const AttnParams &p, int seqlen_q, int seqlen_k) {
    if (p.cu_seqlens_q) return 1;
    const int64_t group = p.nheads / p.nheads_k, rows = group * seqlen_q;
    const int64_t tiles = int64_t(p.nheads_k) * num_blocks<Shape::kBlockN>(seqlen_k);
    const int64_t enough = p.window_right == 0 && rows >= 16384 ? 512 : 256;  // tiles
    auto is_too_many = [&](int64_t splits) {
        return (!kMost && (splits - 1) * tiles >= enough) || splits * 1024 > rows || splits * seqlen_k > rows;
    };
    int64_t splits = group < Shape::kMaxSplits ? group : Shape::kMaxSplits;
    while (splits > 1 && is_too_many(splits)) splits--;
    return int(splits);
}
template <typename Shape> __host__ __device__ int max_num_splits(const AttnParams &p) {
    return p.seqused_q || p.seqused_k ? num_splits<Shape, true>(p, p.seqlen_q, p.seqlen_k)
                                      : num_splits<Shape>(p, p.seqlen_q, p.seqlen_k);
}

// Global memory beyond the tensors:
//   ticket        how many tiles of keys have been taken, in 128 bytes
//   dq_sums       [tiles of query rows, kDqWarps, fragments of 128 floats], if dq is needed
//   dq_arrivals   [key heads of samples]: how many tiles of keys have added their dQ, each block of a pair
//   dq_semaphore  [tiles of query rows, kTileBlocks], if deterministic and dq is needed
//   dkv_sums      [max_splits, 2, batch_size, nheads_k, padded_keys, kHeadDim], if there are several splits
template <typename Shape> struct BwdWorkspace {
    static constexpr int kHeadDim = Shape::kHeadDim;
    RowTiles<Shape::kBlockM> row_tiles;
    int64_t tiles;       // of query rows; 0 if dq is not needed
    int max_splits;
    int64_t dkv_floats;  // of one split's dK, and of its dV; 0 if nothing is split
    int64_t key_heads;   // of all samples, or of one packed batch
    int padded_keys;     // those of the tiles
    explicit __host__ __device__ BwdWorkspace(const AttnBackwardParams &p)
        : row_tiles(p), tiles(p.dq.data ? RowTiles<Shape::kBlockM>::count(p) : 0),
          max_splits(max_num_splits<Shape>(p)),
          dkv_floats(max_splits == 1 ? 0
                                     : KeyTiles<Shape::kBlockN>::count(p) * (Shape::kBlockN * Shape::kHeadDim)),
          key_heads(p.nheads_k * (p.cu_seqlens_k ? 1 : p.batch_size)),
          padded_keys(KeyTiles<Shape::kBlockN>(p).slots * Shape::kBlockN) {}

    // What the launcher sets to 0: all but dkv_sums, which begin at a multiple of 128 bytes, or stores would be slow.
    __host__ __device__ int64_t zeroed_bytes(bool deterministic) const {
        const int64_t numbers = key_heads + (deterministic ? Shape::kTileBlocks * tiles : 0);
        return 128 + 4 * tiles * Shape::kDqFloats + (4 * numbers + 127) / 128 * 128;
    }
    __host__ __device__ int64_t bytes(bool deterministic) const {
        return zeroed_bytes(deterministic) + 4 * max_splits * 2 * dkv_floats;
    }
    // This lane's part of the first fragment of a warp.
    __device__ static float *dq_sums(const AttnBackwardParams &p, int tile, int warp_idx) {
        return static_cast<float *>(p.workspace) + 32 + int64_t(tile) * Shape::kDqFloats +
               (warp_idx * (128 * Shape::kDqTiles) + thread_idx() % 32 * 4);
    }
    __device__ static int *ticket(const AttnBackwardParams &p) { return static_cast<int *>(p.workspace); }
    // That of the key head of a tile of rows or of keys.
    __device__ int *dq_arrivals(const AttnBackwardParams &p, const Tile &tile) const {
        return first_arrivals(p) + (p.cu_seqlens_k ? 0 : tile.b * p.nheads_k) + tile.h_k;
    }
    // The blocks of keys that have added to it so far.
    __device__ int *dq_semaphore(const AttnBackwardParams &p, int64_t tile, int rank = 0) const {
        return first_arrivals(p) + key_heads + tile * Shape::kTileBlocks + rank;
    }
    __device__ int *first_arrivals(const AttnBackwardParams &p) const {
        return ticket(p) + 32 + tiles * Shape::kDqFloats;
    }
    __device__ int splits_of(const AttnBackwardParams &p, const Sequence &seq) const {
        return max_splits > 1 ? min(max_splits, num_splits<Shape>(p, seq.seqlen_q, seq.seqlen_k)) : 1;
    }
    // Of dK, or of a tile of it; that of dV follows dkv_floats later.
    __device__ float *dkv_sums(const AttnBackwardParams &p, int split_idx) const {
        char *begin = static_cast<char *>(p.workspace) + zeroed_bytes(p.deterministic);
        return reinterpret_cast<float *>(begin) + 2 * split_idx * dkv_floats;
    }
    __device__ float *dkv_sums(const AttnBackwardParams &p, int split_idx, const Tile &tile) const {
        const int64_t bh = int64_t(tile.b) * p.nheads_k + tile.h_k;
        return dkv_sums(p, split_idx) + (bh * padded_keys + tile.block * Shape::kBlockN) * kHeadDim;
    }
};

// dq of a tile of rows: its sums times `scale`, as rows of q's type, by way of shared memory. `arrivals`: how often
// blocks of threads report for a key head. Its sums are whole then. 0, if keys are split: wait for the previous kernel.
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
    if (arrivals == 0) wait_for_previous_kernel();
    else if (threadIdx.x == 0)
        while (load_acquire(workspace.dq_arrivals(p, tile)) != arrivals) sleep_briefly();
    __syncthreads();  // unobserved by the emulator: kernels run one after the other there
    auto &sdQ = shared_memory<SmemTile<kBlockM, kHeadDim>>();
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32, part = warp_idx / 4 * 64;
    const int first_tile = workspace.row_tiles.first_tile(tile.b, p.nheads);
    const float *sums =
        workspace.dq_sums(p, first_tile + tile.h * workspace.row_tiles.slots + tile.block, warp_idx);
    float4 x[Shape::kDqTiles];
#pragma unroll
    for (int n = 0; n < Shape::kDqTiles; n++) x[n] = *reinterpret_cast<const float4 *>(sums + 128 * n);
    const int m0 = warp_idx % 4 * 16;  // of the accumulators' rows, the warp's first
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
    const float *lse_log2 = p.lse_log2 + lse_index(p, seq, tile.b, tile.h);
    for (int i = threadIdx.x; i < kBlockM * kVecs; i += 32 * Shape::kDqWarps) {
        const int row = tile.block * kBlockM + i / kVecs, col = i % kVecs * 8;
        if (row >= seq.padded_q || col >= p.head_dim) continue;
        const bool is_empty = row >= seq.seqlen_q || lse_log2[row] == INFINITY;  // the sum may be NaN
        *reinterpret_cast<uint4 *>(rows_of<T>(p.dq, tile.b, tile.h, seq.q_begin + row) + col) =
            is_empty ? uint4{} : sdQ.template at<uint4>(i / kVecs, col);
    }
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) wait_for_previous_kernel();  // the next kernel relies on it
#endif
}

}  // namespace sm90
