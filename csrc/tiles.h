// Tiles in shared memory and the two products of them, for flash.cu: fp32 throughout, whatever the tensors hold.
//
// The threads of a block form a kTy × kTx grid over a product. Thread (ty, tx) has the rows ty + kTy·i, i < kRows, and
// computes its part as outer products in registers: that, not memory, decides the speed, since every 16-byte read from
// shared memory must feed many FMAs. Rows of a tile have one vector more than they use: with a pitch of 4 (mod 32) floats
// the vectors of 8 neighbouring rows lie in 32 different banks.
#pragma once

#include <type_traits>

namespace simt {

struct alignas(16) Vec4 { float x[4]; };

template <typename T> __device__ Vec4 load4(const T *p) {
    struct alignas(4 * sizeof(T)) Raw { T x[4]; } raw = *reinterpret_cast<const Raw *>(p);
    return {to_float(raw.x[0]), to_float(raw.x[1]), to_float(raw.x[2]), to_float(raw.x[3])};
}

// tile = src[0..rows)[0..head_dim), kWide elements at a time; what lies outside is never read and becomes 0.
// fp32 goes to shared memory without passing through registers and is there after __pipeline_wait_prior(0).
template <int kThreads, int kWide, int kRows, int kPitch, typename T>
__device__ void load_tile(Vec4 (&tile)[kRows][kPitch], const T *src, int64_t row_stride, int rows, int head_dim) {
    constexpr int kSteps = 4 * (kPitch - 1) / kWide;
#pragma unroll 2
    for (int i = threadIdx.x; i < kRows * kSteps; i += kThreads) {
        const int r = i / kSteps, d = i % kSteps * kWide;
        const bool inside = r < rows && d < head_dim;
        const T *from = inside ? src + r * row_stride + d : src;
        float *to = &tile[r][d / 4].x[d % 4];
        if constexpr (std::is_same_v<T, float>) __pipeline_memcpy_async(to, from, 4 * kWide, inside ? 0 : 4 * kWide);
        else if constexpr (kWide == 4) tile[r][d / 4] = inside ? load4(from) : Vec4{};
        else *to = inside ? to_float(*from) : 0.f;
    }
    __pipeline_commit();
}

// acc[i][c] += A[ty + kTy·i] · B[tx + kTx·c], the dot products over the vectors [d, end) of the rows.
template <int kTy, int kTx, int kRows, int kCols, int kBr, int kBc, int kPitch>
__device__ void multiply_transposed(float (&acc)[kRows][kCols], const Vec4 (&A)[kBr][kPitch],
                                    const Vec4 (&B)[kBc][kPitch], int ty, int tx, int d, int end) {
#pragma unroll 2
    for (; d < end; d++) {
        Vec4 a[kRows];
        for (int i = 0; i < kRows; i++) a[i] = A[ty + kTy * i][d];
        for (int c = 0; c < kCols; c++) {
            const Vec4 b = B[tx + kTx * c][d];
            for (int i = 0; i < kRows; i++)
                for (int e = 0; e < 4; e++) acc[i][c] += a[i].x[e] * b.x[e];
        }
    }
}

// acc[i][d] += Σ_c A[ty + kTy·i][c] · B[c][first + tx + kTx·d], where the second index of B counts vectors.
template <int kTy, int kTx, int kRows, int kVecs, int kBr, int kLd, int kBc, int kPitch>
__device__ void multiply(Vec4 (&acc)[kRows][kVecs], const float (&A)[kBr][kLd], const Vec4 (&B)[kBc][kPitch], int ty,
                         int tx, int first) {
#pragma unroll 2
    for (int c = 0; c < kBc; c += 4) {
        Vec4 a[kRows];
        for (int i = 0; i < kRows; i++) a[i] = load4(&A[ty + kTy * i][c]);
        for (int k = 0; k < 4; k++)
            for (int d = 0; d < kVecs; d++) {
                const Vec4 b = B[c + k][first + tx + kTx * d];
                for (int i = 0; i < kRows; i++)
                    for (int e = 0; e < 4; e++) acc[i][d].x[e] += a[i].x[k] * b.x[e];
            }
    }
}

}  // namespace simt
