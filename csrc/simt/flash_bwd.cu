// FlashAttention, backward pass: dQ, dK and dV of O = softmax(scale · Q Kᵀ) V, from dO, O and lse. Plain CUDA C++ in
// true fp32, and on the CPU, in fp64 too.
//
//   P = exp(scale · Q Kᵀ - lse)      dP = dO Vᵀ               dV = Pᵀ dO
//   delta = rowsum(dO ∘ O) - dlse    dS = P ∘ (dP - delta)    dK = scale · dSᵀ Q    dQ = scale · dS K
//
// Dropout masks and scales dP, and the P of dV. dlse is in delta because d lse / d S = P.
//
// One kernel forms delta. Two share one source: a block owns kBlockM rows of A and B, walks along C and D, kBlockN rows
// at a time, and sums dA and dB in registers:
//
//   kOwnsKeys    A   B    C   D     A Cᵀ   B Dᵀ    dA           dB
//   true         K   V    Q   dO    Sᵀ     dPᵀ     += dSᵀ Q     += Pᵀ dO    of all query heads that share K and V
//   false        Q   dO   K   V     S      dP      += dS K
//
// S and dP are formed twice, but without atomics (as for dQ in Dao 2023, Algorithm 2): all runs have the same bits.
#include "common/key_tiles.cuh"
#include "simt/tiles.h"

namespace simt {

// 8 threads of a row add 4 neighbours at a time: bits do not depend on alignment. Rows without keys, whose dO may be
// NaN, get delta 0, or -dlse with a sink, and lse_log2 +inf.
constexpr int kPreprocessTy = 16, kPreprocessTx = 8, kPreprocessM = 64;
struct alignas(16) Zeros { int64_t x[2]; };
template <typename Sum> struct PreprocessTiles { Sum partial[kPreprocessTx][kPreprocessM + 4]; };

template <typename T>
__global__ void __launch_bounds__(kPreprocessTy * kPreprocessTx)
    flash_bwd_preprocess(const AttnBackwardParams p, const ZeroBytes zeros, const bool aligned) {
    let_next_kernel_begin();
    constexpr int64_t kThreads = kPreprocessTy * kPreprocessTx, kSize = sizeof(Zeros);
    for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < zeros.end / kSize; i += gridDim.x * kThreads)
        if (i < zeros.gap_begin / kSize || i >= zeros.gap_end / kSize) static_cast<Zeros *>(p.workspace)[i] = {};
    using Sum = simt::Sum<T>;
    constexpr int kTy = kPreprocessTy, kTx = kPreprocessTx, kRows = kPreprocessM / kTy;
    const int tx = threadIdx.x % kTx, ty = threadIdx.x / kTx;
    const Tile tile = RowTiles<kPreprocessM>::at(p, blockIdx.x);
    const Sequence seq(p, tile.b);
    const T *gO = rows_of<const T>(p.o, tile.b, tile.h, seq.q_begin);
    const T *gdO = rows_of<const T>(p.dout, tile.b, tile.h, seq.q_begin);
    const int64_t at = lse_index(p, seq.q_begin, tile.b, tile.h);
    const Sum *lse = static_cast<const Sum *>(p.lse) + at;
    const Mask mask(seq, p);
    auto row_of = [&](int i) { return tile.block * kPreprocessM + place<kTy, kRows>(ty, i); };
    Sum sum[kRows] = {}, lse_of_keys[kRows];  // -inf without keys
    for (int i = 0; i < kRows; i++) lse_of_keys[i] = mask.keys(row_of(i)).is_empty() ? -INFINITY : lse[row_of(i)];
    auto is_empty = [&](int i) { return lse_of_keys[i] == -INFINITY; };
    const int cols = seq.seqlen_q > 0 ? p.head_dim_v : 0;
    auto add_products = [&]<bool kAligned>() {
        for (int d = 4 * tx; d < cols; d += 4 * kTx) {
            Vec<4, T> o[kRows], dout[kRows];
#pragma unroll
            for (int i = 0; i < kRows; i++) {  // no branch: all loads are on the way together
                const int row = min(row_of(i), seq.seqlen_q - 1);
                o[i] = load4<kAligned>(gO + row * p.o.row_stride + d, cols - d);
                dout[i] = load4<kAligned>(gdO + row * p.dout.row_stride + d, cols - d);
            }
#pragma unroll
            for (int i = 0; i < kRows; i++)
                for (int e = 0; e < 4; e++) sum[i] = fma(to_float(o[i].x[e]), to_float(dout[i].x[e]), sum[i]);
        }
    };
    if (aligned) add_products.template operator()<true>();
    else add_products.template operator()<false>();
    for (int i = 0; i < kRows; i++)
        if (is_empty(i)) sum[i] = 0;  // in place of NaN
    reduce_rows<kTy>(sum, shared_memory<PreprocessTiles<Sum>>().partial, ty, tx, [](Sum x, Sum y) { return x + y; });
    for (int i = 0; i < kRows; i++) {
        const int row = row_of(i);
        if (tx > 0 || row >= seq.padded_q) continue;
        if (p.dlse.data && lse[row] != -INFINITY)
            sum[i] -= *rows_of<const Sum>(p.dlse, tile.b, tile.h, seq.q_begin + row);
        static_cast<Sum *>(p.delta)[at + row] = sum[i];
        if (p.lse_log2) p.lse_log2[at + row] = is_empty(i) ? INFINITY : Scores<>::lse_log2(float(lse_of_keys[i]));
    }
}

template <typename Sum, int kHeadDim_, int kBlockM_, int kBlockN_, int kTy_, int kTx_, int kStep_> struct BwdTiles {
    static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_, kTy = kTy_, kTx = kTx_;
    static constexpr int kStep = kStep_, kNThreads = kTy * kTx;
    alignas(4 * sizeof(Sum)) Sum A[kHeadDim][kBlockM + 4], B[kHeadDim][kBlockM + 4];
    Sum P[kBlockN][kBlockM + 4];  // P, then dS
    union Stage {  // of C or D
        Sum cols[kStep][kBlockN + 4];
        Sum rows[kStep][kHeadDim];
    } stages[2];
};

// Owned rows stay in shared memory, their sums in 2 · 32 registers: wider rows are fewer. All fit the 64 KB of sm_75.
template <typename Sum> using BwdTiles64 = BwdTiles<Sum, 64, 64, 64, 16, 8, 16>;
template <typename Sum> using BwdTiles128 = BwdTiles<Sum, 128, 32, 64, 8, 16, 16>;
template <typename Sum> using BwdTiles256 = BwdTiles<Sum, 256, 16, 64, 8, 16, 8>;
static_assert(sizeof(BwdTiles64<float>) <= 64 << 10 && sizeof(BwdTiles128<float>) <= 64 << 10 &&
              sizeof(BwdTiles256<float>) <= 64 << 10);

template <typename T> struct Matrix {  // [rows, cols] of a head
    const T *data;
    int64_t head_stride, row_stride;
    int cols;

    __device__ Matrix(const Tensor &x, int cols, int64_t b, int64_t h, int64_t row)
        : data(rows_of<const T>(x, b, h, row)), head_stride(x.head_stride), row_stride(x.row_stride), cols(cols) {}
};

// Stages hold kStep columns of C, then of D, then kStep rows of D (only with kOwnsKeys) and of C, for each kBlockN
// rows. Each is loaded while the one before is used.
template <typename T, typename Tiles, bool kOwnsKeys> struct Walk {
    static constexpr int kNThreads = Tiles::kNThreads, kStep = Tiles::kStep;
    using Stage = typename Tiles::Stage;
    Stage (&stages)[2];
    Matrix<T> C, D;
    int heads;  // left
    const int begin, first, end;  // rows before `first` may hold NaN
    const bool aligned;
    int row = begin;  // of the stage to load
    enum { kColsC, kColsD, kRowsD, kRowsC } of = kColsC;
    int x = 0, at = 0;

    __device__ void load() {
        if (heads == 0 || begin >= end) return;
        const bool is_C = of == kColsC || of == kRowsC, is_cols = of <= kColsD;
        const int64_t row_stride = is_C ? C.row_stride : D.row_stride;
        const int cols = is_C ? C.cols : D.cols;
        const T *src = (is_C ? C.data : D.data) + row * row_stride + x * (is_cols ? 1 : row_stride);
        const int row0 = row + (is_cols ? 0 : x), rows = end - row0, first_row = first - row0;
        if (is_cols) load_tile<kNThreads, true, 1>(stages[at].cols, src, row_stride, rows, cols - x, first_row);
        else if (aligned) load_tile<kNThreads, false, 4>(stages[at].rows, src, row_stride, rows, cols, first_row);
        else load_tile<kNThreads, false, 1>(stages[at].rows, src, row_stride, rows, cols, first_row);
        if ((x += kStep) < (is_cols ? cols : Tiles::kBlockN)) return;
        x = 0;
        if (of == kColsC) of = kColsD;
        else if (of == kColsD) of = kOwnsKeys ? kRowsD : kRowsC;
        else if (of == kRowsD) of = kRowsC;
        else {
            of = kColsC, row += Tiles::kBlockN;
            if (row >= end) row = begin, heads--, C.data += C.head_stride, D.data += D.head_stride;
        }
    }

    __device__ const Stage &next() { return next_stage(stages, at, [&] { load(); }); }
};

// Products become scores, and dP the derivative by them.
template <bool kOwnsKeys, typename Mods, typename Grid, typename Sum, int kRows, int kCols>
__device__ void modify(const Mods &scores, const Grid &grid, Sum (&dP)[kRows][kCols]) {
    auto of_row = [&](int i, int j) -> Sum & { return kOwnsKeys ? dP[j][i] : dP[i][j]; };
    if constexpr (kOwnsKeys) scores.apply(transposed(grid), of_row);
    else scores.apply(grid, of_row);
}

template <typename T, typename Tiles, bool kOwnsKeys, bool kMods>
__global__ void __launch_bounds__(Tiles::kNThreads, 256 / Tiles::kNThreads)
    flash_bwd(const AttnBackwardParams p, const bool aligned) {
    using Sum = simt::Sum<T>;
    constexpr int kBlockM = Tiles::kBlockM, kBlockN = Tiles::kBlockN, kTy = Tiles::kTy, kTx = Tiles::kTx;
    constexpr int kNThreads = Tiles::kNThreads, kStep = Tiles::kStep;
    constexpr int kRows = kBlockM / kTy, kCols = kBlockN / kTx, kDims = Tiles::kHeadDim / kTx;
    static_assert(kRows * kTy == kBlockM && kCols * kTx == kBlockN && kDims * kTx == Tiles::kHeadDim && 16 % kTx == 0);
    Tiles &tiles = shared_memory<Tiles>();
    const int tx = threadIdx.x / 2 % kTx, ty = threadIdx.x / (2 * kTx) * 2 + threadIdx.x % 2;  // as in flash.cu

    const Tile tile = kOwnsKeys ? KeyTiles<kBlockM>::at(p, blockIdx.x) : RowTiles<kBlockM>::at(p, blockIdx.x);
    const int own0 = tile.block * kBlockM;
    const int heads = kOwnsKeys ? p.nheads / p.nheads_k : 1;  // from tile.h on
    const Sequence seq(p, tile.b);
    const MaskOf<kMods> mask(seq, p);
    const Matrix<T> Q(p.q, p.head_dim, tile.b, tile.h, seq.q_begin);
    const Matrix<T> K(p.k, p.head_dim, tile.b, tile.h_k, seq.k_begin);
    const Matrix<T> V(p.v, p.head_dim_v, tile.b, tile.h_k, seq.k_begin);
    const Matrix<T> dO(p.dout, p.head_dim_v, tile.b, tile.h, seq.q_begin);
    const Matrix<T> A = kOwnsKeys ? K : Q, B = kOwnsKeys ? V : dO, C = kOwnsKeys ? Q : K, D = kOwnsKeys ? dO : V;

    // Not rounded to blocks: dO of a row that sees no key here may be NaN. If owned, it reaches only its own sums. Keys
    // begin at an even one: kept() asks for two neighbours.
    const int own_end = kOwnsKeys ? seq.seqlen_k : seq.seqlen_q, own_rows = min(kBlockM, own_end - own0);
    const int first = kOwnsKeys ? mask.rows(own0).begin : mask.keys(own0).begin;
    const Range walked = own_rows <= 0 ? Range{0, 0}
                         : kOwnsKeys   ? Range{first, mask.rows(own0 + own_rows - 1).end}
                                       : Range{first / 2 * 2, mask.keys(own0 + own_rows - 1).end};

    const Sum keep_scale = p.dropout_seed ? Sum(p.keep_scale) : Sum(1);
    Sum dA[kRows][kDims] = {}, dB[kOwnsKeys ? kRows : 1][kDims] = {};
    if (!walked.is_empty()) {
        load_tile<kNThreads, true, 1>(tiles.A, A.data + own0 * A.row_stride, A.row_stride, own_rows, A.cols);
        load_tile<kNThreads, true, 1>(tiles.B, B.data + own0 * B.row_stride, B.row_stride, own_rows, B.cols);
    }
    Walk<T, Tiles, kOwnsKeys> walk{tiles.stages, C, D, heads, walked.begin, first, walked.end, aligned};
    walk.load();
    auto product = [&](Sum (&acc)[kRows][kCols], const Sum (*own)[kBlockM + 4], int cols) {  // A Cᵀ or B Dᵀ
        for (int d0 = 0; d0 < cols; d0 += 64) {  // short sums round less
            Sum sum[kRows][kCols] = {};
            for (int d = d0; d < min(d0 + 64, cols); d += kStep)
                multiply<kTy, kTx>(sum, own + d, walk.next().cols, ty, tx, min(kStep, cols - d));
            for (int i = 0; i < kRows; i++)
                for (int c = 0; c < kCols; c++) acc[i][c] += sum[i][c];
        }
    };
    auto add_product = [&](Sum (&acc)[kRows][kDims], const Sum (&factor)[kRows][kCols]) {  // dS C or P D
        for (int c = 0; c < kCols; c++)
            for (int i = 0; i < kRows; i++) tiles.P[place<kTx, kCols>(tx, c)][place<kTy, kRows>(ty, i)] = factor[i][c];
        Sum sum[kRows][kDims] = {};
        for (int c = 0; c < kBlockN; c += kStep) multiply<kTy, kTx>(sum, tiles.P + c, walk.next().rows, ty, tx, kStep);
        for (int i = 0; i < kRows; i++)
            for (int d = 0; d < kDims; d++) acc[i][d] += sum[i][d];
    };

    for (int h = tile.h; h < tile.h + heads; h++)
        for (int walk0 = walked.begin; walk0 < walked.end; walk0 += kBlockN) {
            auto own = [&](int i) { return own0 + place<kTy, kRows>(ty, i); };
            auto walk_row = [&](int c) { return walk0 + place<kTx, kCols>(tx, c); };
            uint64_t keep = ~uint64_t(0);
            if (p.dropout_seed) {
                if constexpr (kOwnsKeys) keep = kept<kCols, kRows>(Dropout(p, tile.b, h), walk_row, own);
                else keep = kept<kRows, kCols>(Dropout(p, tile.b, h), own, walk_row);
            }
            Sum S[kRows][kCols] = {}, dP[kRows][kCols] = {};
            product(S, tiles.A, A.cols), product(dP, tiles.B, B.cols);
            constexpr int kStats = kOwnsKeys ? kCols : kRows;
            Sum lse[kStats], delta[kStats];
            for (int n = 0; n < kStats; n++) {
                const int row = min(kOwnsKeys ? walk_row(n) : own(n), seq.seqlen_q - 1);
                const int64_t at = lse_index(p, seq.q_begin, tile.b, h) + row;
                lse[n] = static_cast<const Sum *>(p.lse)[at], delta[n] = static_cast<const Sum *>(p.delta)[at];
            }
            auto keeps = [&](int i, int c) { return keep >> (kOwnsKeys ? c * kRows + i : i * kCols + c) & 1; };
            for (int i = 0; i < kRows; i++)
                for (int c = 0; c < kCols; c++)
                    dP[i][c] = (keeps(i, c) ? dP[i][c] * keep_scale : Sum(0)) - delta[kOwnsKeys ? c : i];
            const auto scores = scores_of<kMods, T>(p, seq, tile.b, h);
            if constexpr (kMods) modify<kOwnsKeys>(scores, grid_tile<kTy, kTx>(S, own0, ty, walk0, tx), dP);
#pragma unroll
            for (int i = 0; i < kRows; i++)
#pragma unroll
                for (int c = 0; c < kCols; c++) {
                    const int row = kOwnsKeys ? walk_row(c) : own(i), key = kOwnsKeys ? own(i) : walk_row(c);
                    const bool sees = mask.keys(row).contains(key);
                    const Sum P = sees ? scores.probability(S[i][c], lse[kOwnsKeys ? c : i]) : Sum(0);
                    S[i][c] = keeps(i, c) ? P : Sum(0);
                    dP[i][c] = sees ? P * dP[i][c] : Sum(0);  // dS
                }
            if constexpr (kOwnsKeys) {
                add_product(dB, S);
                __syncwarp();  // this warp alone has read tiles.P
            }
            add_product(dA, dP);
        }

    auto store = [&](const Tensor &to, int cols, int64_t begin, auto &acc, Sum factor) {
        T *x = rows_of<T>(to, tile.b, kOwnsKeys ? tile.h_k : tile.h, begin);
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            const int row = own0 + place<kTy, kRows>(ty, i);
            if (row >= (kOwnsKeys ? seq.padded_k : seq.padded_q)) continue;
            // Where nothing is seen the sum may be NaN.
            const bool is_empty = kOwnsKeys ? mask.rows(row).is_empty() : mask.keys(row).is_empty();
#pragma unroll
            for (int d = 0; d < kDims; d++) {
                const int col = place<kTx, kDims>(tx, d);
                if (col >= cols) continue;
                x[row * to.row_stride + col] = from_float<T>(is_empty ? Sum(0) : acc[i][d] * factor);
            }
        }
    };
    if constexpr (kOwnsKeys) {
        store(p.dk, p.head_dim, seq.k_begin, dA, Sum(p.softmax_scale));
        store(p.dv, p.head_dim_v, seq.k_begin, dB, keep_scale);
    } else {
        store(p.dq, p.head_dim, seq.q_begin, dA, Sum(p.softmax_scale));
    }
}

template <typename T, typename Tiles, bool kMods> void launch_bwd(const AttnBackwardParams &p) {
    // Only for rows: columns are loaded by element.
    const bool aligned_kv = is_aligned<T>(p.q, p.head_dim) && is_aligned<T>(p.dout, p.head_dim_v);
    const bool aligned_q = is_aligned<T>(p.k, p.head_dim);
    if (p.dk.data)
        launch(flash_bwd<T, Tiles, true, kMods>, KeyTiles<Tiles::kBlockM>::count(p), Tiles::kNThreads, sizeof(Tiles),
               p.stream, p, aligned_kv);
    if (p.dq.data)
        launch(flash_bwd<T, Tiles, false, kMods>, RowTiles<Tiles::kBlockM>::count(p), Tiles::kNThreads, sizeof(Tiles),
               p.stream, p, aligned_q);
}

void preprocess_backward(const AttnBackwardParams &p, const ZeroBytes &zeros) {
    with_dtype(p.dtype, [&]<typename T>() {
        launch(flash_bwd_preprocess<T>, RowTiles<kPreprocessM>::count(p), kPreprocessTy * kPreprocessTx,
               sizeof(PreprocessTiles<Sum<T>>), p.stream, p, zeros,
               is_aligned<T>(p.o, p.head_dim_v) && is_aligned<T>(p.dout, p.head_dim_v));
    });
}

void flash_backward(const AttnBackwardParams &p) {
    preprocess_backward(p, ZeroBytes{});
    with_dtype(p.dtype, [&]<typename T>() {
        auto run = [&]<bool kMods>() {
            if (p.max_head_dim() <= 64) launch_bwd<T, BwdTiles64<Sum<T>>, kMods>(p);
            else if (p.max_head_dim() <= 128) launch_bwd<T, BwdTiles128<Sum<T>>, kMods>(p);
            else launch_bwd<T, BwdTiles256<Sum<T>>, kMods>(p);
        };
        p.has_mods() ? run.template operator()<true>() : run.template operator()<false>();
    });
    if (p.dbias.data) bias_backward(p);
}

}  // namespace simt
