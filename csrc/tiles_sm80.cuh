// Tiles of 16-bit elements in shared memory for the kernels on Ampere's tensor cores: where their vectors lie, how they
// come from global memory, and how results go back.
//
// Read next: flash_sm80.cu, flash_bwd_sm80.cu.
#pragma once

#include <climits>

#include "ptx_sm80.cuh"

namespace sm80 {

using namespace ptx;

// Where the 16-byte vector `vec` of row `row` lies in a tile. The vectors of a row trade places within 128 bytes
// (within 64, where rows are an odd multiple of that), so that one vector of 8 neighbouring rows lies in 32 different
// banks.
template <int kHeadDim> struct Swizzle {
    static constexpr int kVecs = kHeadDim % 64 == 0 ? 8 : 4, kRowBytes = 2 * kHeadDim;
    static __device__ uint32_t offset(int row, int vec) {
        return row * kRowBytes + (vec ^ (kVecs == 8 ? row : row / 2) % kVecs) * 16;
    }
    // tile + offset(row + rows, vec + 2·pairs) of base = tile + offset(row, vec), where rows % 8 == 0 and vec < 2.
    static __device__ uint32_t move(uint32_t base, int rows, int pairs) {
        return (base ^ pairs % (kVecs / 2) * 32) + rows * kRowBytes + pairs / (kVecs / 2) * (16 * kVecs);
    }
};

// The kRows rows from `from` on go to the tile at `to`; `from` moves on to the rows after them. A thread copies 16
// bytes of every kRowStep-th row; both pointers and the limits are as seen from its first copy. What lies outside the
// rows [row_begin, row_end) and the columns [0, cols) is not read and becomes 0.
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

}  // namespace sm80
