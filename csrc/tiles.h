// Tiles in shared memory and the product of two of them, for flash.cu: fp32 throughout, whatever the tensors hold.
//
// The threads of a block form a kTy × kTx grid over the product. Thread (ty, tx) has rows and columns in groups of four
// neighbours, see place(), to read them as vectors. Both factors lie with the summed index first: a term of the sum is
// the outer product of a row of each, which a thread adds in registers: 8 × 8 FMAs for 4 reads of 16 bytes.
#pragma once

#include <type_traits>

namespace simt {

template <int kWide> struct alignas(4 * kWide) Vec { float x[kWide]; };

template <typename T> __device__ Vec<4> load4(const T *p) {
    struct alignas(4 * sizeof(T)) Raw { T x[4]; } raw = *reinterpret_cast<const Raw *>(p);
    return {to_float(raw.x[0]), to_float(raw.x[1]), to_float(raw.x[2]), to_float(raw.x[3])};
}

// tile[r][d] = src[r][d], or tile[d][r] if transposed, kWide elements at a time. Where the tile is larger than the
// rows × cols of src it gets copies of the last row and column, which the kernel masks, drops or multiplies by P = 0.
// fp32 does not pass through registers, and is there after __pipeline_wait_prior(0). Transposed, a warp copies 8
// elements of 4 rows at a time: whole sectors of memory, to 32 banks if the pitch is 4 (mod 32) floats.
template <int kNThreads, bool kTransposed, int kWide, int kM, int kN, typename T>
__device__ void load_tile(float (&tile)[kM][kN], const T *src, int64_t row_stride, int rows, int cols) {
    constexpr int kRows = kTransposed ? kN - 4 : kM, kCols = kTransposed ? kM : kN;
    constexpr int kLanes = kTransposed ? 8 : kN / 4, kPass = kNThreads / kLanes;
    static_assert(kRows % kPass == 0 && kCols % (kLanes * kWide) == 0);
    const int r0 = threadIdx.x / kLanes, d0 = threadIdx.x % kLanes * kWide;
    auto copy = [&]<bool kWhole>() {
#pragma unroll(kWhole ? kRows / kPass : 1)
        for (int i = 0; i < kRows; i += kPass) {
            const T *row = src + (kWhole ? r0 + i : min(r0 + i, rows - 1)) * row_stride;
            for (int d = 0; d < kCols; d += kLanes * kWide) {
                float *to = kTransposed ? &tile[d0 + d][r0 + i] : &tile[r0 + i][d0 + d];
                const T *from = row + (kWhole ? d0 + d : min(d0 + d, cols - kWide));
                if constexpr (std::is_same_v<T, float>) __pipeline_memcpy_async(to, from, 4 * kWide);
                else if constexpr (kWide == 4) *reinterpret_cast<Vec<4> *>(to) = load4(from);
                else *to = to_float(*from);
            }
        }
    };
    if (rows >= kRows && cols >= kCols) copy.template operator()<true>();
    else copy.template operator()<false>();
    __pipeline_commit();
}

// The place in a tile of a thread's i-th row or column, of kCount: it is the t-th of n threads.
template <int n, int kCount> __device__ int place(int t, int i) {
    constexpr int kWide = kCount < 4 ? kCount : 4;
    return kWide * (t + n * (i / kWide)) + i % kWide;
}

// x[i] = row[place(t, i)]
template <int n, int kCount> __device__ void read(float (&x)[kCount], const float *row, int t) {
    constexpr int kWide = kCount < 4 ? kCount : 4;
    for (int i = 0; i < kCount; i += kWide) {
        const auto v = *reinterpret_cast<const Vec<kWide> *>(row + place<n, kCount>(t, i));
        for (int e = 0; e < kWide; e++) x[i + e] = v.x[e];
    }
}

// acc[i][c] += Σ_k A[k][place(ty, i)] · B[k][place(tx, c)], k < end.
template <int kTy, int kTx, int kRows, int kCols, int kLdA, int kLdB>
__device__ void multiply(float (&acc)[kRows][kCols], const float (*A)[kLdA], const float (*B)[kLdB], int ty, int tx,
                         int end) {
#pragma unroll 8
    for (int k = 0; k < end; k++) {
        float a[kRows], b[kCols];
        read<kTy>(a, A[k], ty), read<kTx>(b, B[k], tx);
        for (int c = 0; c < kCols; c++)
            for (int n = 0; n < kRows; n++) {  // to and fro: neighbours share an operand, and registers are read less
                const int i = c % 2 ? kRows - 1 - n : n;
                acc[i][c] += a[i] * b[c];
            }
    }
}

}  // namespace simt
