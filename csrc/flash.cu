// FlashAttention, forward pass: O = softmax(scale · Q Kᵀ) V, with no score in global memory. Plain CUDA C++ in true
// fp32: any GPU from sm_75 on and, by host/flash_host.cpp, the CPU, which takes fp64 as well. Read this file first;
// docs/developing.md names the way from here to the fastest kernel, sm90/flash_sm90.cu.
//
// It is Algorithm 1 of FlashAttention-2 (Dao 2023), in the paper's names. A block of threads owns one tile of rows. It
// walks along the keys, and keeps O, m and l in registers:
//   Qi, Kj, Vj                             tiles of Br rows of Q, of Bc rows of K and V (elsewhere kBlockM, kBlockN)
//   S = Qi Kjᵀ                             scores of the tile
//   m_new = max(m, row maximum of S)       (elsewhere row_max)
//   P = exp(scale · (S - m_new))
//   alpha = exp(scale · (m - m_new))       rescales what came before
//   l = alpha · l + row sum of P           (elsewhere row_sum)
//   O = alpha · O + P Vj                   after the last tile, O / l and lse = scale · m + log(l) are stored
//
// Thread (ty, tx) of a kTy × kTx grid computes kRows × kCols of S and kRows × kDims of O. The threads of a row are in
// one warp: P and row maxima need no barrier of the block. A stage of Kj or Vj is loaded while the last is multiplied.
#include "simt/tiles.h"

namespace simt {

// log(exp(x) + exp(y)). Both may be -inf.
template <typename Sum> __device__ Sum log_add_exp(Sum x, Sum y) {
    return x == y ? x + log(Sum(2)) : fmax(x, y) + log1p(exp(-fabs(x - y)));
}

// kMods: mods/score_mods.cuh may change the scores, and there may be chunks.
template <typename T, typename Tiles, bool kMods>
__global__ void __launch_bounds__(Tiles::kNThreads, 256 / Tiles::kNThreads)  // 8 warps an SM: 255 registers a thread
    flash_fwd(const AttnParams p, const bool aligned) {
    constexpr int Br = Tiles::Br, Bc = Tiles::Bc, kTy = Tiles::kTy, kTx = Tiles::kTx, kStep = Tiles::kStep;
    using Sum = simt::Sum<T>;
    constexpr int kNThreads = Tiles::kNThreads, kRows = Br / kTy, kCols = Bc / kTx, kDims = Tiles::kHeadDim / kTx;
    static_assert(kRows * kTy == Br && kCols * kTx == Bc && kDims * kTx == Tiles::kHeadDim && 16 % kTx == 0);
    Tiles &tiles = shared_memory<Tiles>();
    // Lanes 2n and 2n + 1 share tx: then a warp's reads take the fewest passes.
    const int tx = threadIdx.x / 2 % kTx, ty = threadIdx.x / (2 * kTx) * 2 + threadIdx.x % 2;

    const Tile tile = RowTiles<Br>::at(p, blockIdx.x);
    const Sequence seq(p, tile.b);
    const MaskOf<kMods> mask(seq, p);
    const auto scores = scores_of<kMods, T>(p, seq, tile.b, tile.h);
    const int row0 = tile.block * Br;
    const BlockRange blocks = mask.template key_blocks<Br, Bc>(row0);

    Sum O[kRows][kDims] = {}, m[kRows], l[kRows] = {};
    for (Sum &x : m) x = -INFINITY;
    if (blocks.begin < blocks.end)
        load_tile<kNThreads, true, 1>(tiles.Qi, rows_of<const T>(p.q, tile.b, tile.h, seq.q_begin + row0),
                                      p.q.row_stride, seq.seqlen_q - row0, p.head_dim);
    Pipeline<T, Tiles> pipeline(tiles, p, seq, tile, mask.keys(row0).begin, blocks, aligned);
    pipeline.load();
    for (int j = blocks.begin; j < blocks.end; j++) {
        Sum S[kRows][kCols] = {};
        auto multiply_QK = [&](Sum (&acc)[kRows][kCols], int d) {
            multiply<kTy, kTx>(acc, tiles.Qi + d, pipeline.next().Kj, ty, tx, min(kStep, p.head_dim - d));
        };
        if constexpr (Tiles::kHeadDim <= 64 || kRows * kCols == 64)  // 64 scores leave no registers for `sum`
            for (int d = 0; d < p.head_dim; d += kStep) multiply_QK(S, d);
        else
            for (int end = 64; end - 64 < p.head_dim; end += 64) {  // 64 products at a time: short sums round less
                Sum sum[kRows][kCols] = {};
                for (int d = end - 64; d < min(end, p.head_dim); d += kStep) multiply_QK(sum, d);
                for (int i = 0; i < kRows; i++)
                    for (int c = 0; c < kCols; c++) S[i][c] += sum[i][c];
            }
        if constexpr (kMods) scores.apply(grid_tile<kTy, kTx>(S, row0, ty, j * Bc, tx));
        if (kMods || !scores.is_raw || !blocks.is_full(j))
            for (int i = 0; i < kRows; i++) {
                const Range keys = mask.keys(row0 + place<kTy, kRows>(ty, i));
                for (int c = 0; c < kCols; c++)
                    S[i][c] = keys.contains(j * Bc + place<kTx, kCols>(tx, c)) ? scores.score(S[i][c]) : -INFINITY;
            }
        Sum m_new[kRows], alpha[kRows];
        for (int i = 0; i < kRows; i++) {
            m_new[i] = m[i];
            for (Sum x : S[i]) m_new[i] = fmax(m_new[i], x);
        }
        reduce_rows<kTy>(m_new, tiles.partial, ty, tx, [](Sum x, Sum y) { return fmax(x, y); });
        for (int i = 0; i < kRows; i++) {
            Sum row_sum = 0;
            const Sum m_sub = m_new[i] == -INFINITY ? Sum(0) : m_new[i];  // nothing seen yet: exp2(-inf) is 0, not NaN
            for (Sum &x : S[i]) row_sum += x = exp2((x - m_sub) * scores.softmax_scale_log2);
            alpha[i] = exp2((m[i] - m_sub) * scores.softmax_scale_log2);
            l[i] = l[i] * alpha[i] + row_sum, m[i] = m_new[i];
        }
        for (int c = 0; c < kCols; c++)
            for (int i = 0; i < kRows; i++) tiles.P[place<kTx, kCols>(tx, c)][place<kTy, kRows>(ty, i)] = S[i][c];
        if (p.dropout_seed) {  // after l is summed; in memory, as Philox needs S's registers
            auto row = [&](int i) { return row0 + place<kTy, kRows>(ty, i); };
            auto col = [&](int c) { return j * Bc + place<kTx, kCols>(tx, c); };
            const uint64_t keep = kept<kRows, kCols>(Dropout(p, tile.b, tile.h), row, col);
#pragma unroll 1
            for (int n = 0; n < kRows * kCols; n++)
                if (!(keep >> n & 1)) tiles.P[place<kTx, kCols>(tx, n % kCols)][place<kTy, kRows>(ty, n / kCols)] = 0;
        }

        // P Vj is summed apart: short sums round less, and an FMA rescales O.
        Sum PV[kRows][kDims] = {};
        for (int c = 0; c < Bc; c += kStep) multiply<kTy, kTx>(PV, tiles.P + c, pipeline.next().Vj, ty, tx, kStep);
        for (int i = 0; i < kRows; i++)
            for (int d = 0; d < kDims; d++) O[i][d] = O[i][d] * alpha[i] + PV[i][d];
    }

    reduce_rows<kTy>(l, tiles.partial, ty, tx, [](Sum x, Sum y) { return x + y; });
    const Sum keep_scale = p.dropout_seed ? Sum(p.keep_scale) : Sum(1);
    T *gO = rows_of<T>(p.o, tile.b, tile.h, seq.q_begin);
    const int64_t lse_begin = lse_index(p, seq.q_begin, tile.b, tile.h);
    Sum *lse = static_cast<Sum *>(p.lse) + lse_begin;
    const Sum *sink = sink_of<Sum>(p, tile.h);
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        const int row = row0 + place<kTy, kRows>(ty, i);
        if (row >= seq.padded_q) continue;
        // A row without keys gets 0. Its sums may be NaN, from 0 · NaN in V.
        const bool is_empty = l[i] == 0 || row >= seq.seqlen_q;
        const Sum lse_keys = is_empty ? Sum(-INFINITY) : m[i] * scores.unit() + log(l[i]);
        const Sum lse_row = sink && row < seq.seqlen_q ? log_add_exp(lse_keys, *sink) : lse_keys;
        const Sum scale_o = keep_scale / l[i] * (sink ? exp(lse_keys - lse_row) : Sum(1));
        if (tx == 0) lse[row] = lse_row;
        if (tx == 0 && p.max_logits)
            static_cast<Sum *>(p.max_logits)[lse_begin + row] =
                is_empty ? -INFINITY : m[i] * scores.unit() + (l[i] - l[i]);  // NaN if a score is
        for (int d = 0; d < kDims; d++) {
            const int x = place<kTx, kDims>(tx, d);
            if (x < p.head_dim_v) gO[row * p.o.row_stride + x] = from_float<T>(is_empty ? Sum(0) : O[i][d] * scale_o);
        }
    }
}

template <typename T, typename Tiles, bool kMods = false> void launch_fwd(const AttnParams &p) {
    // Only v: rows of q and k are transposed element by element.
    launch(flash_fwd<T, Tiles, kMods>, RowTiles<Tiles::Br>::count(p), Tiles::kNThreads, sizeof(Tiles), p.stream, p,
           is_aligned<T>(p.v, p.head_dim_v));
}

template <typename T, typename Narrow, typename Medium = Narrow, typename Wide = Narrow>
void launch_best(const AttnParams &p, bool wide) {
    const size_t memory = max_shared_memory();
    if (p.has_mods())
        return sizeof(Medium) <= memory ? launch_fwd<T, Medium, true>(p) : launch_fwd<T, Narrow, true>(p);
    if constexpr (std::is_same_v<T, float>)  // for 16 bits there are faster kernels
        if (wide && sizeof(Wide) <= memory) return launch_fwd<T, Wide>(p);
    sizeof(Medium) <= memory ? launch_fwd<T, Medium>(p) : launch_fwd<T, Narrow>(p);
}

void flash_forward(const AttnParams &p) {
    // Batch, heads and a packed batch's length do not count: a sample's bits must not depend on them.
    const int head_dim = p.max_head_dim();
    const bool is_long = p.cu_seqlens_q || p.seqlen_q > 512;
    with_dtype(p.dtype, [&]<typename T>() {
        if constexpr (std::is_same_v<T, double>)
            head_dim <= 64 ? launch_best<T, Tiles64Double>(p, false) : launch_best<T, Tiles256Double>(p, false);
        else if (head_dim <= 64) launch_best<T, Tiles64, Tiles64, Tiles64Wide>(p, is_long);
        else if (head_dim <= 128) launch_best<T, Tiles128Narrow, Tiles128, Tiles128Wide>(p, is_long);
        else launch_best<T, Tiles256Narrow, Tiles256, Tiles256Wide>(p, is_long);
    });
}

}  // namespace simt
