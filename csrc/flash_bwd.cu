// FlashAttention, backward pass: dQ, dK and dV of O = softmax(scale · Q Kᵀ) V, from dO, O and lse. Plain CUDA C++ in
// true fp32 for whatever flash.cu serves, and on the CPU as it is, in fp64 too.
//
//   P = exp(scale · Q Kᵀ - lse)      dP = dO Vᵀ               dV = Pᵀ dO
//   delta = rowsum(dO ∘ O) - dlse    dS = P ∘ (dP - delta)    dK = scale · dSᵀ Q    dQ = scale · dS K
//
// With dropout, dP and the P of dV are masked and scaled as the P of O was. dlse is in delta because d lse / d S = P.
//
// Two kernels, one source. A block of threads owns some rows of A and B, walks along those of C and D, and adds up dA
// and dB in registers:
//
//   kOwnsKeys    A   B    C   D     A Cᵀ   B Dᵀ    dA           dB
//   true         K   V    Q   dO    Sᵀ     dPᵀ     += dSᵀ Q     += Pᵀ dO    of all query heads that share K and V
//   false        Q   dO   K   V     S      dP      += dS K
//
// So S and dP are formed twice, but nothing is added up in memory: no atomics, no workspace, the same bits in every
// run. (Dao 2023, Algorithm 2 adds up dQ in memory instead.) The threads form a grid over the products as in flash.cu.
//
// Read next: tiles.h; flash_bwd_sm80.cu, the same on tensor cores.
#include "flash.h"
#ifdef __CUDACC__
#include "launch.h"
namespace simt { using namespace device; }
#endif
#include "tiles.h"

namespace simt {

// delta, 32 rows a block: 16 threads share a row. Of rows that see no key, and have lse -inf, nothing else is read.
constexpr int kRowsTy = 8, kRowsTx = 16, kRowsOwned = 32;
template <typename Sum> struct RowTiles { Sum partial[kRowsTx][kRowsOwned + 4]; };

template <typename T>
__global__ void __launch_bounds__(kRowsTy * kRowsTx) row_sums_bwd(const AttnBackwardParams p) {
    using Sum = simt::Sum<T>;
    constexpr int kRows = kRowsOwned / kRowsTy;
    const int tx = threadIdx.x % kRowsTx, ty = threadIdx.x / kRowsTx;
    const int blocks = (p.seqlen_q + kRowsOwned - 1) / kRowsOwned, row0 = blockIdx.x % blocks * kRowsOwned;
    const int64_t bh = blockIdx.x / blocks, b = bh / p.nheads, h = bh % p.nheads;
    const T *gO = static_cast<const T *>(p.o) + b * p.o_batch_stride + h * p.o_head_stride;
    const T *gdO = static_cast<const T *>(p.dout) + b * p.dout_batch_stride + h * p.dout_head_stride;
    const Sum *lse = static_cast<const Sum *>(p.lse) + bh * p.seqlen_q;
    const Sum *dlse = static_cast<const Sum *>(p.dlse);
    if (dlse) dlse += b * p.dlse_batch_stride + h * p.dlse_head_stride;
    auto is_empty = [&](int r) { return r >= p.seqlen_q || lse[r] == -INFINITY; };

    Sum sum[kRows] = {};
    for (int i = 0; i < kRows; i++) {
        const int r = row0 + place<kRowsTy, kRows>(ty, i);
        for (int d = is_empty(r) ? p.head_dim : tx; d < p.head_dim; d += kRowsTx)
            sum[i] += to_float(gO[r * p.o_row_stride + d]) * to_float(gdO[r * p.dout_row_stride + d]);
    }
    reduce_rows<kRowsTy>(sum, shared_memory<RowTiles<Sum>>().partial, ty, tx, [](Sum x, Sum y) { return x + y; });
    for (int i = 0; i < kRows; i++) {
        const int r = row0 + place<kRowsTy, kRows>(ty, i);
        if (tx > 0 || r >= p.seqlen_q) continue;
        if (dlse && !is_empty(r)) sum[i] -= dlse[r * p.dlse_row_stride];
        static_cast<Sum *>(p.delta)[bh * p.seqlen_q + r] = sum[i];
    }
}

// One block's shared memory, as Tiles in tiles.h.
template <typename Sum, int kHeadDim_, int kOwned_, int kWalked_, int kTy_, int kTx_, int kStep_> struct BwdTiles {
    static constexpr int kHeadDim = kHeadDim_, kOwned = kOwned_, kWalked = kWalked_, kTy = kTy_, kTx = kTx_;
    static constexpr int kStep = kStep_, kNThreads = kTy * kTx;
    alignas(4 * sizeof(Sum)) Sum A[kHeadDim][kOwned + 4], B[kHeadDim][kOwned + 4];
    Sum P[kWalked][kOwned + 4];  // P, then dS
    union Step {
        Sum cols[kStep][kWalked + 4];  // kStep elements of every row of a block of C or D
        Sum rows[kStep][kHeadDim];     // kStep rows of it
    } steps[2];
};

// By head_dim: {kHeadDim, kOwned, kWalked, kTy, kTx, kStep}. What is owned stays in shared memory, its sums in 2 · 32
// registers a thread, so that the wider a row the fewer there are. All fit the 64 KB of sm_75.
template <typename Sum> using BwdTiles64 = BwdTiles<Sum, 64, 64, 64, 16, 8, 16>;
template <typename Sum> using BwdTiles128 = BwdTiles<Sum, 128, 32, 64, 8, 16, 16>;
template <typename Sum> using BwdTiles256 = BwdTiles<Sum, 256, 16, 64, 8, 16, 8>;
static_assert(sizeof(BwdTiles64<float>) <= 64 << 10 && sizeof(BwdTiles128<float>) <= 64 << 10 &&
              sizeof(BwdTiles256<float>) <= 64 << 10);

template <typename T> struct Matrix {  // [rows, head_dim] of a head
    const T *data;
    int64_t head_stride, row_stride;

    __device__ Matrix(const void *x, int64_t b, int64_t h, int64_t batch_stride, int64_t head_stride,
                      int64_t row_stride)
        : data(static_cast<const T *>(x) + b * batch_stride + h * head_stride), head_stride(head_stride),
          row_stride(row_stride) {}
};

// The rows [begin, end) of C and D of some heads, kWalked at a time: of each block kStep columns of C after the other,
// then of D, then kStep rows of D after the other (with kOwnsKeys), then of C. Each step is loaded while the one before
// it is used.
template <typename T, typename Tiles, bool kOwnsKeys> struct Walk {
    static constexpr int kNThreads = Tiles::kNThreads, kStep = Tiles::kStep;
    using Step = typename Tiles::Step;
    Step (&steps)[2];
    Matrix<T> C, D;
    int heads;  // still to come
    const int begin, end, head_dim;
    const bool aligned;
    // The step to load: its block, what it is of, its first column or row in the block, and its place.
    int row = begin;
    enum { kColsC, kColsD, kRowsD, kRowsC } of = kColsC;
    int x = 0, at = 0;

    __device__ Walk(Step (&steps)[2], Matrix<T> C, Matrix<T> D, int heads, int begin, int end, int head_dim,
                    bool aligned)
        : steps(steps), C(C), D(D), heads(heads), begin(begin), end(end), head_dim(head_dim), aligned(aligned) {
        load();
    }

    __device__ void load() {
        if (heads == 0 || begin >= end) return;
        const bool is_C = of == kColsC || of == kRowsC, is_cols = of <= kColsD;
        const int64_t row_stride = is_C ? C.row_stride : D.row_stride;
        const T *src = (is_C ? C.data : D.data) + row * row_stride + x * (is_cols ? 1 : row_stride);
        if (is_cols) load_tile<kNThreads, true, 1>(steps[at].cols, src, row_stride, end - row, head_dim - x);
        else if (aligned) load_tile<kNThreads, false, 4>(steps[at].rows, src, row_stride, end - row - x, head_dim);
        else load_tile<kNThreads, false, 1>(steps[at].rows, src, row_stride, end - row - x, head_dim);
        if ((x += kStep) < (is_cols ? head_dim : Tiles::kWalked)) return;
        x = 0;
        if (of == kColsC) of = kColsD;
        else if (of == kColsD) of = kOwnsKeys ? kRowsD : kRowsC;
        else if (of == kRowsD) of = kRowsC;
        else {
            of = kColsC, row += Tiles::kWalked;
            if (row >= end) row = begin, heads--, C.data += C.head_stride, D.data += D.head_stride;
        }
    }

    __device__ const Step &next() { return next_step(steps, at, [&] { load(); }); }
};

template <typename T, typename Tiles, bool kOwnsKeys>
__global__ void __launch_bounds__(Tiles::kNThreads, 256 / Tiles::kNThreads)
    flash_bwd(const AttnBackwardParams p, const bool aligned) {
    using Sum = simt::Sum<T>;
    constexpr int kOwned = Tiles::kOwned, kWalked = Tiles::kWalked, kTy = Tiles::kTy, kTx = Tiles::kTx;
    constexpr int kNThreads = Tiles::kNThreads, kStep = Tiles::kStep;
    constexpr int kRows = kOwned / kTy, kCols = kWalked / kTx, kDims = Tiles::kHeadDim / kTx;
    static_assert(kRows * kTy == kOwned && kCols * kTx == kWalked && kDims * kTx == Tiles::kHeadDim && 16 % kTx == 0);
    Tiles &tiles = shared_memory<Tiles>();
    const int tx = threadIdx.x / 2 % kTx, ty = threadIdx.x / (2 * kTx) * 2 + threadIdx.x % 2;  // as in flash.cu

    // Blocks of one head are neighbours. Under a causal mask keys that most rows see, and rows that see most, go first.
    const int seqlen = kOwnsKeys ? p.seqlen_k : p.seqlen_q, blocks = (seqlen + kOwned - 1) / kOwned;
    const int block = blockIdx.x % blocks, own0 = (kOwnsKeys ? block : blocks - 1 - block) * kOwned;
    const int group = p.nheads / p.nheads_k, heads = kOwnsKeys ? p.nheads_k : p.nheads;
    const int64_t b = blockIdx.x / blocks / heads, own_h = blockIdx.x / blocks % heads;
    const int walk_heads = kOwnsKeys ? group : 1;  // query heads to walk along, from h on
    const int64_t h = own_h * walk_heads, h_k = h / group;
    const Matrix<T> Q(p.q, b, h, p.q_batch_stride, p.q_head_stride, p.q_row_stride);
    const Matrix<T> K(p.k, b, h_k, p.k_batch_stride, p.k_head_stride, p.k_row_stride);
    const Matrix<T> V(p.v, b, h_k, p.v_batch_stride, p.v_head_stride, p.v_row_stride);
    const Matrix<T> dO(p.dout, b, h, p.dout_batch_stride, p.dout_head_stride, p.dout_row_stride);
    const Matrix<T> A = kOwnsKeys ? K : Q, B = kOwnsKeys ? V : dO, C = kOwnsKeys ? Q : K, D = kOwnsKeys ? dO : V;

    // As in flash.cu a query row sees the keys [0, visible(row)).
    const int seq_len = p.seq_lens ? max(0, min(p.seq_lens[b], p.seqlen_k)) : p.seqlen_k;
    const int row_end = p.seq_lens ? seq_len : p.seqlen_q;
    auto visible = [&](int row) {
        return row >= row_end ? 0 : p.is_causal ? row + 1 + (p.seqlen_k - p.seqlen_q) : seq_len;
    };
    // Rows that are walked along see a key of this block, or are copies of the last one that does: the dO of a row that
    // sees no key, NaN for all we know, is not read. Where it is owned it meets nothing but the sums of its own row.
    const int own_rows = min(kOwned, (kOwnsKeys ? seq_len : row_end) - own0);
    const int begin = kOwnsKeys && p.is_causal ? max(0, p.seqlen_q - (p.seqlen_k - own0)) : 0;
    const int end = own_rows <= 0 ? 0 : kOwnsKeys ? row_end : visible(own0 + own_rows - 1);

    const Sum scale = p.softmax_scale, scale_log2 = scale * Sum(1.4426950408889634);
    const Sum keep_scale = p.dropout_seed ? Sum(p.keep_scale) : Sum(1);
    Sum dA[kRows][kDims] = {}, dB[kOwnsKeys ? kRows : 1][kDims] = {};
    if (begin < end) {
        load_tile<kNThreads, true, 1>(tiles.A, A.data + own0 * A.row_stride, A.row_stride, own_rows, p.head_dim);
        load_tile<kNThreads, true, 1>(tiles.B, B.data + own0 * B.row_stride, B.row_stride, own_rows, p.head_dim);
    }
    Walk<T, Tiles, kOwnsKeys> walk(tiles.steps, C, D, walk_heads, begin, end, p.head_dim, aligned);
    auto product = [&](Sum (&acc)[kRows][kCols], const Sum (*own)[kOwned + 4]) {  // A Cᵀ or B Dᵀ
        for (int d0 = 0; d0 < p.head_dim; d0 += 64) {  // short sums round less, as in flash.cu
            Sum sum[kRows][kCols] = {};
            for (int d = d0; d < min(d0 + 64, p.head_dim); d += kStep)
                multiply<kTy, kTx>(sum, own + d, walk.next().cols, ty, tx, min(kStep, p.head_dim - d));
            for (int i = 0; i < kRows; i++)
                for (int c = 0; c < kCols; c++) acc[i][c] += sum[i][c];
        }
    };
    auto add_product = [&](Sum (&acc)[kRows][kDims], const Sum (&factor)[kRows][kCols]) {  // dS C or P D
        for (int c = 0; c < kCols; c++)
            for (int i = 0; i < kRows; i++) tiles.P[place<kTx, kCols>(tx, c)][place<kTy, kRows>(ty, i)] = factor[i][c];
        Sum sum[kRows][kDims] = {};
        for (int c = 0; c < kWalked; c += kStep) multiply<kTy, kTx>(sum, tiles.P + c, walk.next().rows, ty, tx, kStep);
        for (int i = 0; i < kRows; i++)
            for (int d = 0; d < kDims; d++) acc[i][d] += sum[i][d];
    };

    for (int g = 0; g < walk_heads; g++)
        for (int walk0 = begin; walk0 < end; walk0 += kWalked) {
            auto owned = [&](int i) { return own0 + place<kTy, kRows>(ty, i); };
            auto walked = [&](int c) { return walk0 + place<kTx, kCols>(tx, c); };
            uint64_t keep = ~uint64_t(0);
            if (p.dropout_seed) {
                if constexpr (kOwnsKeys) keep = kept<kCols, kRows>(Dropout(p, b, h + g), walked, owned);
                else keep = kept<kRows, kCols>(Dropout(p, b, h), owned, walked);
            }
            Sum S[kRows][kCols] = {}, dP[kRows][kCols] = {};
            product(S, tiles.A), product(dP, tiles.B);

            constexpr int kStats = kOwnsKeys ? kCols : kRows;
            Sum lse_log2[kStats], delta[kStats];
            for (int n = 0; n < kStats; n++) {
                const int row = min(kOwnsKeys ? walked(n) : owned(n), row_end - 1);
                const int64_t at = (b * p.nheads + h + g) * p.seqlen_q + row;
                const Sum lse = static_cast<const Sum *>(p.lse)[at];
                lse_log2[n] = lse == -INFINITY ? Sum(INFINITY) : lse * Sum(1.4426950408889634);  // no keys: P = 0
                delta[n] = static_cast<const Sum *>(p.delta)[at];
            }
#pragma unroll
            for (int i = 0; i < kRows; i++)
#pragma unroll
                for (int c = 0; c < kCols; c++) {
                    const int row = kOwnsKeys ? walked(c) : owned(i), key = kOwnsKeys ? owned(i) : walked(c);
                    const int n = kOwnsKeys ? c : i;
                    const bool sees = key < visible(row);
                    const bool keeps = keep >> (kOwnsKeys ? c * kRows + i : i * kCols + c) & 1;
                    const Sum P = sees ? exp2(S[i][c] * scale_log2 - lse_log2[n]) : Sum(0);
                    S[i][c] = keeps ? P : Sum(0);
                    dP[i][c] = sees ? P * ((keeps ? dP[i][c] * keep_scale : Sum(0)) - delta[n]) : Sum(0);  // dS
                }
            if constexpr (kOwnsKeys) {
                add_product(dB, S);
                __syncwarp();  // tiles.P has been read, by threads of this warp alone
            }
            add_product(dA, dP);
        }

    auto store = [&](void *to, int64_t batch_stride, int64_t head_stride, int64_t row_stride, auto &acc, Sum factor) {
        T *matrix = static_cast<T *>(to) + b * batch_stride + own_h * head_stride;
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            const int row = own0 + place<kTy, kRows>(ty, i);
            if (row >= seqlen) continue;
            const bool is_zero = kOwnsKeys ? row >= seq_len : visible(row) <= 0;  // also where a sum of 0 · NaN is not
#pragma unroll
            for (int d = 0; d < kDims; d++) {
                const int x = place<kTx, kDims>(tx, d);
                if (x < p.head_dim) matrix[row * row_stride + x] = from_float<T>(is_zero ? Sum(0) : acc[i][d] * factor);
            }
        }
    };
    if constexpr (kOwnsKeys) {
        store(p.dk, p.dk_batch_stride, p.dk_head_stride, p.dk_row_stride, dA, scale);
        store(p.dv, p.dv_batch_stride, p.dv_head_stride, p.dv_row_stride, dB, keep_scale);
    } else {
        store(p.dq, p.dq_batch_stride, p.dq_head_stride, p.dq_row_stride, dA, scale);
    }
}

template <typename T, typename Tiles> void launch_bwd(const AttnBackwardParams &p) {
    auto blocks = [&](int seqlen) { return (int64_t(seqlen) + Tiles::kOwned - 1) / Tiles::kOwned * p.batch_size; };
    // The rows of q and dout, or of k: of v, and of what is owned, columns alone are loaded, element by element.
    const bool aligned_kv =
        is_aligned<T>(p.q, p.q_batch_stride, p.q_head_stride, p.q_row_stride, p.head_dim) &&
        is_aligned<T>(p.dout, p.dout_batch_stride, p.dout_head_stride, p.dout_row_stride, p.head_dim);
    const bool aligned_q = is_aligned<T>(p.k, p.k_batch_stride, p.k_head_stride, p.k_row_stride, p.head_dim);
    if (p.dk)
        launch(flash_bwd<T, Tiles, true>, blocks(p.seqlen_k) * p.nheads_k, Tiles::kNThreads, sizeof(Tiles), p.stream, p,
               aligned_kv);
    if (p.dq)
        launch(flash_bwd<T, Tiles, false>, blocks(p.seqlen_q) * p.nheads, Tiles::kNThreads, sizeof(Tiles), p.stream, p,
               aligned_q);
}

void row_sums(const AttnBackwardParams &p) {
    with_dtype(p.dtype, [&]<typename T>() {
        const int64_t blocks = (int64_t(p.seqlen_q) + kRowsOwned - 1) / kRowsOwned * p.batch_size * p.nheads;
        launch(row_sums_bwd<T>, blocks, kRowsTy * kRowsTx, sizeof(RowTiles<Sum<T>>), p.stream, p);
    });
}

void flash_backward(const AttnBackwardParams &p) {
    row_sums(p);
    with_dtype(p.dtype, [&]<typename T>() {
        if (p.head_dim <= 64) launch_bwd<T, BwdTiles64<Sum<T>>>(p);
        else if (p.head_dim <= 128) launch_bwd<T, BwdTiles128<Sum<T>>>(p);
        else launch_bwd<T, BwdTiles256<Sum<T>>>(p);
    });
}

}  // namespace simt
