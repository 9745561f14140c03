// FlashAttention forward in fp32 on Hopper's fp64 tensor cores (DMMA), as fast at peak as its fp32 units. In fp64 a
// product of two floats is exact and a sum nearly so: results are better than from fp32 units, and one instruction does
// 32 FMAs of a warp. Only operands and sums of the two products are fp64. A warp has 16 query rows:
//   sums = Q Kᵀ         Q is fp64 in shared memory, K becomes fp64 on its way to the registers
//   P = softmax(sums)   in fp32, then fp64: the accumulators of one product are the A operand of the next
//   acc_o += P V        V like K
// A sum's terms and a product's columns may have any order: a lane reads four neighbours along head_dim at a time, in V
// for four products. K and V have one buffer each, refilled while it is idle, a few copies a step:
//   tensor cores          Q K(0)ᵀ         P V(0)          Q K(1)ᵀ   ...
//   cp.async       K(0)   V(0) → sV       K(1) → sK       V(1) → sV ...
#include "common/launch.h"
#include "common/mask.cuh"
#include "common/scheduler.cuh"
#include "common/scores.cuh"
#include "common/softmax.cuh"
#include "ptx/dmma.cuh"
#include "ptx/sm90.cuh"

namespace dmma {

using namespace device;
using namespace ptx;

template <int kHeadDim_, int kBlockN_> struct Shape {
    static constexpr int kHeadDim = kHeadDim_, kBlockN = kBlockN_, kBlockM = 64, kNThreads = 2 * kBlockM;
};

// These pitches let eight lanes read 16 bytes each from 32 banks. Rows r and r + 8 of a warp's Q alternate by element,
// as the product takes them. Element 16·i + 4·c + e of head_dim lies at 16·i + 4·e + c.
template <typename Shape> struct SharedMemory {
    alignas(128) double2 sQ[Shape::kBlockM / 16][8][Shape::kHeadDim + 4];
    float sK[Shape::kBlockN][Shape::kHeadDim + 16], sV[Shape::kBlockN][Shape::kHeadDim + 4];
};

__device__ inline void read4(float (&x)[4], const float *from) {
    const float4 vec = *reinterpret_cast<const float4 *>(from);
    x[0] = vec.x, x[1] = vec.y, x[2] = vec.z, x[3] = vec.w;
}

template <typename Shape>
__device__ void load_q(decltype(SharedMemory<Shape>::sQ) &sQ, const float *gQ, int64_t row_stride, int rows, int cols) {
    constexpr int kVecs = Shape::kHeadDim / 4;
#pragma unroll 4
    for (int i = threadIdx.x; i < Shape::kBlockM / 2 * kVecs; i += Shape::kNThreads) {
        const int vec = i % kVecs, pair = i / kVecs, row = pair / 8 * 16 + pair % 8;
        const float *from = gQ + row * row_stride + vec * 4;
        float x[4] = {}, y[4] = {};
        if (row < rows && vec * 4 < cols) read4(x, from);
        if (row + 8 < rows && vec * 4 < cols) read4(y, from + 8 * row_stride);
        for (int e = 0; e < 4; e++) sQ[pair / 8][pair % 8][vec / 4 * 16 + 4 * e + vec % 4] = {x[e], y[e]};
    }
}

// P of eight keys, whose scores are s, as the A operand of a product in fp64; added to row_sum. The columns c and c + 4
// of A (ptx/dmma.cuh) are the keys 2c and 2c + 1, as scores are stored.
__device__ inline void probabilities(double (&p)[4], const float (&s)[4], Softmax<1> &softmax) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float x = exp2_approx(s[j % 2 * 2 + j / 2] * softmax.softmax_scale_log2 - softmax.row_max[j % 2]);
        softmax.row_sum[j % 2] += x;
        p[j] = x;
    }
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kNThreads, 2)  // 255 registers a thread
    flash_fwd(const __grid_constant__ AttnParams p) {
#if __CUDA_ARCH__ != 900  // no m16n8k8 in fp64
    __trap();
#else
    constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN;
    constexpr int kNThreads = Shape::kNThreads, kVecs = kHeadDim / 4, kNTiles = kBlockN / 8, kDTiles = kHeadDim / 8;
    auto &[sQ, sK, sV] = shared_memory<SharedMemory<Shape>>();
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    const int r = lane_idx / 4, c = lane_idx % 4;

    const Tile tile = RowTiles<kBlockM>::at(p, blockIdx.x);
    const Sequence seq(p, tile.b);
    const MaskOf<false> mask(seq, p);
    const Scores<> scores(p);
    const int row0 = tile.block * kBlockM;
    const BlockRange blocks = mask.key_blocks<kBlockM, kBlockN>(row0);
    const float *gQ = rows_of<const float>(p.q, tile.b, tile.h, seq.q_begin + row0);
    const float *gK = rows_of<const float>(p.k, tile.b, tile.h_k, seq.k_begin);
    const float *gV = rows_of<const float>(p.v, tile.b, tile.h_k, seq.k_begin);

    // A step's copies; all begin in half of the steps. Unseen keys become 0: V may hold NaN, and 0 · NaN is NaN.
    const int key_begin = mask.keys(row0).begin, num_keys = max(0, min(seq.seqlen_k, blocks.end * kBlockN) - key_begin);
    auto copy = [&](auto &tile, const float *from, int64_t row_stride, int cols, int n_block, int step, int steps) {
        constexpr int kRowStep = kNThreads / kVecs, kCopies = kBlockN / kRowStep;
        static_assert(kRowStep * kVecs == kNThreads && kCopies * kRowStep == kBlockN);
#pragma unroll
        for (int i = 2 * step * kCopies / steps; i < min(2 * (step + 1) * kCopies / steps, kCopies); i++) {
            const int row = threadIdx.x / kVecs + i * kRowStep, col = threadIdx.x % kVecs * 4;
            const int key = n_block * kBlockN + row;
            cp_async(shared_address(&tile[row][col]), from + key * row_stride + col,
                     uint32_t(key - key_begin) < num_keys && col < cols);
        }
    };

    copy(sK, gK, p.k.row_stride, p.head_dim, blocks.begin, 0, 2);
    load_q<Shape>(sQ, gQ, p.q.row_stride, seq.seqlen_q - row0, p.head_dim);
    double acc_o[1][kDTiles][4] = {};
    Softmax<1> softmax(scores.softmax_scale_log2);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // Q and K have arrived
    for (int n_block = blocks.begin; n_block < blocks.end; n_block++) {
        double sums[kNTiles][4] = {};
#pragma unroll
        for (int kk = 0; kk < kHeadDim / 16; kk++) {
            copy(sV, gV, p.v.row_stride, p.head_dim_v, n_block, kk, kHeadDim / 16);
            float k[kNTiles][4];
#pragma unroll
            for (int n = 0; n < kNTiles; n++) read4(k[n], &sK[8 * n + r][16 * kk + 4 * c]);
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const double2 *q = &sQ[warp_idx][r][16 * kk + 4 * e + c], x = q[0], y = q[4];
#pragma unroll
                for (int n = 0; n < kNTiles; n++) mma(sums[n], {x.x, x.y, y.x, y.y}, {k[n][e], k[n][e + 1]});
            }
        }
        float acc_s[1][kNTiles][4];
#pragma unroll
        for (int n = 0; n < kNTiles; n++)
            for (int e = 0; e < 4; e++) acc_s[0][n][e] = float(sums[n][e]);

        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();  // V has arrived, K has been read
        if (!scores.is_raw || !blocks.is_full(n_block)) {
            scores.apply(acc_s);
            mask.apply(acc_s, blocks, n_block, row0 + warp_idx * 16 + r, n_block * kBlockN + c * 2);
        }
        float alpha[2];
        if (softmax.update_row_max(acc_s, alpha)) softmax.rescale(acc_o, alpha);
#pragma unroll
        for (int n = 0; n < kNTiles; n++) {
            copy(sK, gK, p.k.row_stride, p.head_dim, n_block + 1, n, kNTiles);
            double P[4];
            probabilities(P, acc_s[0][n], softmax);
#pragma unroll
            for (int d = 0; d < kDTiles; d += 4) {
                float v[2][4];
                for (int i = 0; i < 2; i++) read4(v[i], &sV[8 * n + 2 * c + i][8 * d + 4 * r]);
                for (int e = 0; e < 4; e++) mma(acc_o[0][d + e], P, {v[0][e], v[1][e]});
            }
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();  // K has arrived, V has been read
    }

    const Sequence again(p, tile.b);  // seq would take registers in the loop
    // Column 2c + e of product d + i is column 8·d + 4·(2c + e) + i of O.
    const int row = row0 + warp_idx * 16 + r;  // and row + 8
    // flash_bwd.cu needs lse without the rounding of softmax_scale_log2.
    const double ln_2 = fabs(p.softmax_scale) / scores.softmax_scale_log2;
    float *gLse = static_cast<float *>(p.lse) + lse_index(p, again.q_begin, tile.b, tile.h);
    softmax.finalize(acc_o, gLse, again, row, nullptr, 1.f, [=](float row_max, float row_sum) {
        return float(row_max * ln_2 + logf(row_sum));
    });
    float *gO = rows_of<float>(p.o, tile.b, tile.h, again.q_begin);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (row + 8 * i >= again.padded_q) continue;
#pragma unroll
        for (int d = 0; d < kDTiles; d += 4)
            for (int e = 2 * i; e < 2 * i + 2; e++) {
                const int col = 8 * d + 4 * (2 * c + e % 2);
                if (col >= p.head_dim_v) continue;
                const auto &o = acc_o[0];
                *reinterpret_cast<float4 *>(gO + (row + 8 * i) * p.o.row_stride + col) = {
                    float(o[d][e]), float(o[d + 1][e]), float(o[d + 2][e]), float(o[d + 3][e])};
            }
    }
#endif
}

template <typename Shape> void launch_fwd(const AttnParams &p) {
    static_assert(sizeof(SharedMemory<Shape>) <= 113 << 10);  // two blocks an SM, of 228 KB less 1 KB each
    launch(flash_fwd<Shape>, RowTiles<Shape::kBlockM>::count(p), Shape::kNThreads, sizeof(SharedMemory<Shape>),
           p.stream, p);
}

void flash_forward(const AttnParams &p) {
    if (p.max_head_dim() <= 64) launch_fwd<Shape<64, 64>>(p);
    else launch_fwd<Shape<128, 32>>(p);  // acc_o alone takes half the registers
}

}  // namespace dmma
