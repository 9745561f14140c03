// The folder simt/ has kernels in plain CUDA C++, for every GPU and for the CPU. Order in simt/: tiles.h, flash_bwd.cu,
// flash_bwd_bias.cu, append.cu. They follow flash.cu.
//
// Tiles in shared memory, in fp32 or, on the CPU alone, in fp64: how they are loaded and multiplied. A block's threads
// form a kTy × kTx grid over a product. Each has groups of four neighbouring rows and columns (place()), to read them
// as vectors. Factors lie with the summed index first: a term is an outer product, 8 × 8 FMAs for 4 reads of 16 bytes.
#pragma once

#include <type_traits>

#ifdef __CUDACC__
#include "common/launch.h"
namespace simt { using namespace device; }
#endif
#include "common/mask.cuh"
#include "common/scheduler.cuh"
#include "common/scores.cuh"
#include "mods/dropout.h"
#include "mods/score_mods.cuh"

namespace simt {

template <typename T> using Sum = SumOf<T>;

template <bool kMods, typename T>
__device__ auto scores_of(const AttnParams &p, const Sequence &seq, const int &b, const int &h) {
    if constexpr (kMods) {
        ScoreMods<T> mods(p, seq.seqlen_q, seq.seqlen_k, b, h);
        if (p.block_mask.rows) mods.mask = &p.block_mask;
        return mods;
    } else {
        return Scores<Sum<T>>(p);
    }
}

template <typename Run> void with_dtype(DType dtype, Run run) {
    switch (dtype) {
        case DType::kFloat32: return run.template operator()<float>();
        case DType::kFloat16: return run.template operator()<__half>();
        case DType::kBFloat16: return run.template operator()<__nv_bfloat16>();
#ifdef __CUDACC__
        case DType::kFloat64: throw std::runtime_error("minimal_attn: float64 is for the CPU");
#else
        case DType::kFloat64: return run.template operator()<double>();
#endif
        case DType::kBool: throw std::runtime_error("minimal_attn: bool is for masks");
    }
}

// Shared memory of a block. Qi, Kj and P lie transposed, with a pitch of 4 (mod 32) floats.
template <int kHeadDim_, int Br_, int Bc_, int kTy_, int kTx_, int kStep_, typename Sum = float> struct Tiles {
    static constexpr int kHeadDim = kHeadDim_, Br = Br_, Bc = Bc_, kTy = kTy_, kTx = kTx_, kStep = kStep_;
    static constexpr int kNThreads = kTy * kTx;
    alignas(4 * sizeof(Sum)) Sum Qi[kHeadDim][Br + 4];
    Sum P[Bc][Br + 4];
    union Stage {
        Sum Kj[kStep][Bc + 4];    // kStep columns
        Sum Vj[kStep][kHeadDim];  // kStep rows
    } stages[2];
    Sum partial[kTx][Br + 4];  // for reduce_rows()
};

// {kHeadDim, Br, Bc, kTy, kTx, kStep}. Narrow tiles are for 64 KB of shared memory (sm_75), wide ones for long
// sequences (64 from sm_80 on, all on sm_90): 8×8 of S and of O a thread are fastest where they fill the GPU.
using Tiles64 = Tiles<64, 64, 64, 16, 8, 32>;
using Tiles64Wide = Tiles<64, 128, 64, 16, 8, 64>;
using Tiles128Narrow = Tiles<128, 64, 32, 16, 8, 16>;
using Tiles128 = Tiles<128, 64, 64, 8, 16, 32>;
using Tiles128Wide = Tiles<128, 128, 128, 16, 16, 64>;
using Tiles256Narrow = Tiles<256, 32, 32, 8, 16, 8>;
using Tiles256 = Tiles<256, 32, 64, 8, 16, 16>;
using Tiles256Wide = Tiles<256, 64, 128, 16, 16, 32>;
using Tiles64Double = Tiles<64, 64, 64, 16, 8, 32, double>;
using Tiles256Double = Tiles<256, 32, 64, 8, 16, 16, double>;
static_assert(sizeof(Tiles64) <= 64 << 10 && sizeof(Tiles128Narrow) <= 64 << 10 && sizeof(Tiles256Narrow) <= 64 << 10);
static_assert(sizeof(Tiles128) <= 99 << 10 && sizeof(Tiles256) <= 99 << 10);  // sm_86, sm_89 and sm_120
static_assert(sizeof(Tiles128Wide) <= 227 << 10 && sizeof(Tiles256Wide) <= 227 << 10);  // sm_90

template <typename T> bool is_aligned(const Tensor &x, int head_dim) {
    return (x.batch_stride | x.head_stride | x.row_stride | head_dim) % 4 == 0 &&
           uintptr_t(x.data) % (4 * sizeof(T)) == 0;
}

template <int kWide, typename Sum> struct alignas(kWide * sizeof(Sum)) Vec { Sum x[kWide]; };

// 4 elements, 0 from `count` on.
template <bool kAligned, typename T> __device__ Vec<4, T> load4(const T *p, int count) {
    Vec<4, T> x = {};
    if constexpr (kAligned) x = *reinterpret_cast<const Vec<4, T> *>(p);
    else for (int e = 0; e < 4 && e < count; e++) x.x[e] = p[e];
    return x;
}
template <typename T> __device__ Vec<4, Sum<T>> to_floats(const Vec<4, T> &x) {
    return {to_float(x.x[0]), to_float(x.x[1]), to_float(x.x[2]), to_float(x.x[3])};
}

// tile[r][d] = src[r][d], or tile[d][r] if transposed, kWide elements at a time. Rows before first_row may hold NaN:
// they become copies of it. Beyond rows × cols the tile gets copies of the last row and column, which kernels mask,
// drop or multiply by P = 0; with rows <= 0 that row lies before src. Transposed, a warp copies 8 elements of 4 rows at
// a time: whole sectors, to 32 banks if the pitch is 4 (mod 16) floats.
template <int kNThreads, bool kTransposed, int kWide, int kM, int kN, typename T>
__device__ void load_tile(Sum<T> (&tile)[kM][kN], const T *src, int64_t row_stride, int rows, int cols,
                          int first_row = 0) {
    constexpr int kRows = kTransposed ? kN - 4 : kM, kCols = kTransposed ? kM : kN;
    constexpr int kLanes = kTransposed ? 8 : kN / 4, kPass = kNThreads / kLanes;
    static_assert(kRows % kPass == 0 && kCols % (kLanes * kWide) == 0);
    const int r0 = threadIdx.x / kLanes, d0 = threadIdx.x % kLanes * kWide;
    auto copy = [&]<bool kWhole>() {
#pragma unroll(kWhole ? kRows / kPass : 1)
        for (int i = 0; i < kRows; i += kPass) {
            const T *row = src + (kWhole ? r0 + i : max(first_row, min(r0 + i, rows - 1))) * row_stride;
            for (int d = 0; d < kCols; d += kLanes * kWide) {
                Sum<T> *to = kTransposed ? &tile[d0 + d][r0 + i] : &tile[r0 + i][d0 + d];
                const T *from = row + (kWhole ? d0 + d : min(d0 + d, cols - kWide));
                if constexpr (std::is_same_v<T, Sum<T>>) __pipeline_memcpy_async(to, from, kWide * sizeof(T));
                else if constexpr (kWide == 4) *reinterpret_cast<Vec<4, float> *>(to) = to_floats(load4<true>(from, 4));
                else *to = to_float(*from);
            }
        }
    };
    if (rows >= kRows && cols >= kCols && first_row <= 0) copy.template operator()<true>();
    else copy.template operator()<false>();
    __pipeline_commit();
}

// Waits for stages[at] and returns it, while load() fills the other one.
template <typename Stage, typename Load> __device__ const Stage &next_stage(Stage (&stages)[2], int &at, Load load) {
    __pipeline_wait_prior(0);
    __syncthreads();  // this stage is written, and the other one has been read
    const Stage &stage = stages[at];
    at ^= 1, load();
    return stage;
}

// Streams tiles of K and V through shared memory: Kj by kStep columns, then Vj by kStep rows.
template <typename T, typename Tiles> struct Pipeline {
    static constexpr int kNThreads = Tiles::kNThreads, kStep = Tiles::kStep;
    using Stage = typename Tiles::Stage;
    Stage (&stages)[2];
    const T *gK, *gV;
    const int64_t k_row_stride, v_row_stride;
    const int head_dim, head_dim_v, first_key, seqlen_k;
    const bool aligned;
    const int j_end;
    int j;                 // the tile to load,
    int part = 0, at = 0;  // its next part, and the stage for it

    __device__ Pipeline(Tiles &tiles, const AttnParams &p, const Sequence &seq, const Tile &tile, int first_key,
                        const BlockRange &blocks, bool aligned)
        : stages(tiles.stages), gK(rows_of<const T>(p.k, tile.b, tile.h_k, seq.k_begin)),
          gV(rows_of<const T>(p.v, tile.b, tile.h_k, seq.k_begin)), k_row_stride(p.k.row_stride),
          v_row_stride(p.v.row_stride), head_dim(p.head_dim), head_dim_v(p.head_dim_v), first_key(first_key),
          seqlen_k(seq.seqlen_k), aligned(aligned), j_end(blocks.end), j(blocks.begin) {}

    __device__ void load() {
        if (j >= j_end) return;
        const int parts_K = (head_dim + kStep - 1) / kStep, d = part * kStep;
        const int key = j * Tiles::Bc + max(0, d - parts_K * kStep), rest = seqlen_k - key, first = first_key - key;
        const T *k = gK + key * k_row_stride + d, *v = gV + key * v_row_stride;
        if (part < parts_K) load_tile<kNThreads, true, 1>(stages[at].Kj, k, k_row_stride, rest, head_dim - d);
        else if (aligned) load_tile<kNThreads, false, 4>(stages[at].Vj, v, v_row_stride, rest, head_dim_v, first);
        else load_tile<kNThreads, false, 1>(stages[at].Vj, v, v_row_stride, rest, head_dim_v, first);
        if (++part == parts_K + Tiles::Bc / kStep) part = 0, j++;
    }

    __device__ const Stage &next() { return next_stage(stages, at, [&] { load(); }); }
};

// The i-th of kCount rows or columns of thread t < n.
template <int n, int kCount> __device__ int place(int t, int i) {
    constexpr int kWide = kCount < 4 ? kCount : 4;
    return kWide * (t + n * (i / kWide)) + i % kWide;
}

// Scores for mods/score_mods.cuh, in a tile from row0 and key0 on.
template <int kTy, int kTx, int kRows, int kCols, typename Sum>
__device__ auto grid_tile(Sum (&S)[kRows][kCols], int row0, int ty, int key0, int tx) {
    return score_tile<kRows, kCols>([&S](int i, int c) -> Sum & { return S[i][c]; },
                                    row0 + place<kTy, kRows>(ty, 0), [](int i) { return place<kTy, kRows>(0, i); },
                                    key0 + place<kTx, kCols>(tx, 0), [](int c) { return place<kTx, kCols>(0, c); });
}

// x[i] = row[place(t, i)]
template <int n, int kCount, typename Sum> __device__ void read(Sum (&x)[kCount], const Sum *row, int t) {
    constexpr int kWide = kCount < 4 ? kCount : 4;
    for (int i = 0; i < kCount; i += kWide) {
        const auto v = *reinterpret_cast<const Vec<kWide, Sum> *>(row + place<n, kCount>(t, i));
        for (int e = 0; e < kWide; e++) x[i + e] = v.x[e];
    }
}

// x[i] becomes op over the x[i] of the row's kTx threads, all in one warp. A barrier must lie between two calls.
template <int kTy, int kRows, int kTx, int kLd, typename Sum, typename Op>
__device__ void reduce_rows(Sum (&x)[kRows], Sum (&partial)[kTx][kLd], int ty, int tx, Op op) {
    for (int i = 0; i < kRows; i++) partial[tx][place<kTy, kRows>(ty, i)] = x[i];
    __syncwarp();  // partial is written
    read<kTy>(x, partial[0], ty);
    for (int t = 1; t < kTx; t++) {
        Sum y[kRows];
        read<kTy>(y, partial[t], ty);
        for (int i = 0; i < kRows; i++) x[i] = op(x[i], y[i]);
    }
}

// acc[i][c] += Σ_k A[k][place(ty, i)] · B[k][place(tx, c)], k < end.
template <int kTy, int kTx, int kRows, int kCols, int kLdA, int kLdB, typename Sum>
__device__ void multiply(Sum (&acc)[kRows][kCols], const Sum (*A)[kLdA], const Sum (*B)[kLdB], int ty, int tx,
                         int end) {
#pragma unroll 8
    for (int k = 0; k < end; k++) {
        Sum a[kRows], b[kCols];
        read<kTy>(a, A[k], ty), read<kTx>(b, B[k], tx);
        for (int c = 0; c < kCols; c++)
            for (int n = 0; n < kRows; n++) {  // to and fro: fewer reads of registers
                const int i = c % 2 ? kRows - 1 - n : n;
                acc[i][c] += a[i] * b[c];
            }
    }
}

// Bit i · kCols + c: dropout keeps row(i), col(c). A thread has two neighbours of the eight elements of Philox's call.
template <int kRows, int kCols, typename Row, typename Col>
__device__ uint64_t kept(const Dropout &dropout, Row row, Col col) {
    static_assert(kRows * kCols <= 64 && kCols % 2 == 0);
    uint64_t bits = 0;
#pragma unroll 1  // one copy of Philox
    for (int n = 0; n < kRows * kCols; n += 2) {
        const int r = row(n / kCols), c = col(n % kCols);
        uint32_t pairs[4];
        dropout.keep_bits(pairs, r / 16 * 16 + r % 8, c / 16 * 16 + c % 8);
        const uint32_t left = r / 8 % 2 ? pairs[1] : pairs[0], right = r / 8 % 2 ? pairs[3] : pairs[2];
        const uint32_t pair = c / 8 % 2 ? right : left;  // an index would put pairs into local memory
        bits |= uint64_t((pair >> 15 & 1) + (pair >> 31) * 2) << n;
    }
    return bits;
}

}  // namespace simt
