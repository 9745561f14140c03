// The folder sm80/ has forward and backward pass on Ampere's tensor cores, fp16 and bf16. Order in sm80/:
// tiles.cuh, flash_sm80.cu, bwd_dq.cuh, flash_bwd_sm80.cu.
//
// Tiles of 16-bit elements in shared memory: swizzle, loads, products, stores.
#pragma once

#include <climits>

#include "ptx/sm80.cuh"

namespace sm80 {

using namespace ptx;

// Where 16-byte vector `vec` of a row lies. Vectors trade places within 128 bytes (64, if rows are an odd multiple of
// that), so that one of 8 neighbouring rows lies in 32 different banks.
template <int kCols> struct Swizzle {
    static constexpr int kVecs = kCols % 64 == 0 ? 8 : 4, kRowBytes = 2 * kCols;
    static __device__ uint32_t offset(int row, int vec) {
        return row * kRowBytes + (vec ^ (kVecs == 8 ? row : row / 2) % kVecs) * 16;
    }
    // tile + offset(row + rows, vec + 2·pairs) of base = tile + offset(row, vec), where rows % 8 == 0 and vec < 2.
    static __device__ uint32_t move(uint32_t base, int rows, int pairs) {
        return (base ^ pairs % (kVecs / 2) * 32) + rows * kRowBytes + pairs / (kVecs / 2) * (16 * kVecs);
    }
    // A lane's row for ldmatrix of a 16×16 tile, whose matrices go down first (A, or B transposed) or across first (B).
    static __device__ uint32_t down(int lane_idx) { return offset(lane_idx % 16, lane_idx / 16); }
    static __device__ uint32_t across(int lane_idx) {
        return offset(lane_idx / 16 * 8 + lane_idx % 8, lane_idx / 8 % 2);
    }
};

// Copies kRows rows from `from`, which moves on, to the tile `to`. Pointers and limits count from a thread's first copy
// of 16 bytes. Outside of rows [row_begin, row_end) and columns [0, cols), nothing is read, and the tile becomes 0.
template <int kRows, int kHeadDim, int kNThreads, typename T>
__device__ void load_tile(uint32_t to, const T *&from, int64_t row_stride, int row_end, int cols,
                          int row_begin = INT_MIN) {
    constexpr int kVecs = Swizzle<kHeadDim>::kVecs, kRowStep = kNThreads / kVecs;
    static_assert(kRows % kRowStep == 0 && kRowStep % 8 == 0);
#pragma unroll
    for (int r = 0; r < kRows; r += kRowStep, from += kRowStep * row_stride)
#pragma unroll
        for (int d = 0; d < kHeadDim; d += 8 * kVecs)
            cp_async(to + (r * kHeadDim + d) * 2, from + d, r >= row_begin && r < row_end && d < cols);
    cp_async_commit();
}

// acc += A Bᵀ: A [16·kMTiles, kK] and B [8·kNTiles, kK] in shared memory. a_address has Swizzle::down, b_address
// Swizzle::across; each matrix begins `offset` bytes further. Registers hold 64 columns at a time.
template <typename T, int kK, int kMTiles, int kNTiles>
__device__ void multiply_abt(float (&acc)[kMTiles][kNTiles][4], uint32_t a_address, uint32_t b_address,
                             int a_offset = 0, int b_offset = 0) {
    using Swizzle = sm80::Swizzle<kK>;
    constexpr int kGroup = kNTiles < 8 ? kNTiles : 8;
    static_assert(kNTiles % kGroup == 0);
#pragma unroll
    for (int n0 = 0; n0 < kNTiles; n0 += kGroup)
#pragma unroll
        for (int kk = 0; kk < kK / 16; kk++) {
            uint32_t a[kMTiles][4], b[4];
            for (int m = 0; m < kMTiles; m++) ldmatrix(a[m], Swizzle::move(a_address, 16 * m, kk) + a_offset);
#pragma unroll
            for (int n = n0; n < n0 + kGroup; n += 2) {
                ldmatrix(b, Swizzle::move(b_address, 8 * n, kk) + b_offset);
                for (int m = 0; m < kMTiles; m++) {
                    mma<T>(acc[m][n], a[m], b[0], b[1]);
                    mma<T>(acc[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
}

// acc += A B for 16 terms: A in registers, B [16, kCols] in shared memory (Swizzle::down), from column 8·n0 on.
template <typename T, int kCols, int kMTiles, int kNTiles>
__device__ void multiply_ab(float (&acc)[kMTiles][kNTiles][4], const uint32_t (&a)[kMTiles][4], uint32_t b_address,
                            int b_offset = 0, int n0 = 0) {
#pragma unroll
    for (int n = 0; n < kNTiles; n += 2) {
        uint32_t b[4];
        ldmatrix_trans(b, Swizzle<kCols>::move(b_address, 0, (n0 + n) / 2) + b_offset);
        for (int m = 0; m < kMTiles; m++) {
            mma<T>(acc[m][n], a[m], b[0], b[1]);
            mma<T>(acc[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

// Writes scale · acc of a warp to `to`, through the warp's own part of the tile, from row0 and column 8·n0 on, so that
// a lane writes 16 bytes: `rows` and `cols` of the tile, and zeros for rows with is_zero(row).
template <typename T, int kHeadDim, int kMTiles, int kNTiles, typename IsZero>
__device__ void store_tile(const float (&acc)[kMTiles][kNTiles][4], float scale, uint16_t (*tile)[kHeadDim], int row0,
                           int n0, T *to, int64_t row_stride, int rows, int cols, IsZero is_zero) {
    using Swizzle = sm80::Swizzle<kHeadDim>;
    const int lane_idx = threadIdx.x % 32;
    char *s = reinterpret_cast<char *>(tile);
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; i++)
#pragma unroll
        for (int n = 0; n < kNTiles; n++)
            *reinterpret_cast<uint32_t *>(s + Swizzle::offset(row0 + 8 * i + lane_idx / 4, n0 + n) + lane_idx % 4 * 4) =
                pack<T>(acc[i / 2][n][i % 2 * 2] * scale, acc[i / 2][n][i % 2 * 2 + 1] * scale);
    __syncwarp();
#pragma unroll
    for (int i = lane_idx; i < 16 * kMTiles * kNTiles; i += 32) {
        const int row = row0 + i / kNTiles, n = n0 + i % kNTiles;
        if (row < rows && 8 * n < cols)
            *reinterpret_cast<uint4 *>(to + row * row_stride + 8 * n) =
                is_zero(row) ? uint4{} : *reinterpret_cast<const uint4 *>(s + Swizzle::offset(row, n));
    }
}

}  // namespace sm80
