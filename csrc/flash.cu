// FlashAttention, forward pass: O = softmax(scale · Q Kᵀ) V, a block of query rows at a time, no score in memory.
// Plain CUDA C++ in true fp32: any GPU from sm_75 on and, by way of flash_host.cpp, the CPU. Read this file first.
//
// Names are the paper's (Dao et al. 2022, Algorithm 1; loop order of FlashAttention-2, Dao 2023, Algorithm 1):
//   Br, Bc           rows of a block of Q, rows of a block of K and V      (kBlockM, kBlockN in the other kernels)
//   Qi, KVj, P       tiles in shared memory: of Q, of K and then V, and P = exp(scale · (S - m))
//   Tr, Tc           number of blocks of Q, of K and V that a row block sees
//   m, l             running maximum and sum of a row                      (row_max, row_sum in the other kernels)
//
// A block of threads owns Br rows of one head and walks along K and V, so O, m and l live in registers and go to memory
// once. The threads form a kTy × kTx grid over each of the two products. Thread (ty, tx) computes
//   S[ty + kTy·i][tx + kTx·c]             its kRows × kCols part of S = Qi Kjᵀ, and
//   O[ty + kTy·i][4·(tx + kTx·d) + 0..3]  its kRows × 4·kVecs part of O += P Vj.
//
// Read next: tiles.h, the products; flash.h, the parameters; launch.h, the launch; main.cpp, where torch calls it.
#include "flash.h"
#ifdef __CUDACC__
#include "launch.h"
#endif
#include "tiles.h"

namespace simt {

// One block's shared memory.
template <int kHeadDim_, int Br_, int Bc_, int kTy_, int kTx_> struct Tiles {
    static constexpr int kHeadDim = kHeadDim_, Br = Br_, Bc = Bc_, kTy = kTy_, kTx = kTx_, kThreads = kTy * kTx;
    Vec4 Qi[Br][kHeadDim / 4 + 1];
    Vec4 KVj[Bc][kHeadDim / 4 + 1];  // Kj, then Vj
    float P[Br][Bc + 4];
    float partial[Br][kTx];  // each thread's share of a row's maximum, at the end of its sum
};

template <typename T, typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, 2)  // two blocks an SM: up to 255 registers a thread
    flash_fwd(const AttnParams p, const bool aligned) {
    constexpr int Br = Tiles::Br, Bc = Tiles::Bc, kTy = Tiles::kTy, kTx = Tiles::kTx, kThreads = Tiles::kThreads;
    constexpr int kRows = Br / kTy, kCols = Bc / kTx, kVecs = Tiles::kHeadDim / 4 / kTx;
    static_assert(kRows * kTy == Br && kCols * kTx == Bc && kVecs * kTx * 4 == Tiles::kHeadDim);
    static_assert(Bc % 4 == 0 && kVecs % 2 == 0);
    Tiles &tiles = shared_memory<Tiles>();
    // Neighbouring lanes have two rows, and pairs of them 8 columns: so a warp's 16-byte reads take the fewest passes.
    const int tx = threadIdx.x / 2 % kTx, ty = threadIdx.x / (2 * kTx) * 2 + threadIdx.x % 2;

    // Blocks of one head are neighbours, to share its K and V in L2; the rows that see most under a causal mask go
    // first.
    const int Tr = (p.seqlen_q + Br - 1) / Br, row0 = (Tr - 1 - blockIdx.x % Tr) * Br;
    const int64_t bh = blockIdx.x / Tr, b = bh / p.nheads, h = bh % p.nheads, h_k = h / (p.nheads / p.nheads_k);
    const T *gQ = static_cast<const T *>(p.q) + b * p.q_batch_stride + h * p.q_head_stride + row0 * p.q_row_stride;
    const T *gK = static_cast<const T *>(p.k) + b * p.k_batch_stride + h_k * p.k_head_stride;
    const T *gV = static_cast<const T *>(p.v) + b * p.v_batch_stride + h_k * p.v_head_stride;
    T *gO = static_cast<T *>(p.o) + b * p.o_batch_stride + h * p.o_head_stride + row0 * p.o_row_stride;

    // The whole mask is one number a row: row r of this block sees the keys [0, visible(r)).
    const int seq_len = p.seq_lens ? max(0, min(p.seq_lens[b], p.seqlen_k)) : p.seqlen_k;
    const int rows = min(Br, (p.seq_lens ? seq_len : p.seqlen_q) - row0);
    auto visible = [&](int r) {
        return r >= rows ? 0 : p.is_causal ? min(seq_len, row0 + r + 1 + (p.seqlen_k - p.seqlen_q)) : seq_len;
    };
    const int Tc = rows > 0 ? (max(0, visible(rows - 1)) + Bc - 1) / Bc : 0;

    Vec4 O[kRows][kVecs] = {};
    float m[kRows], l[kRows] = {};
    for (float &x : m) x = -INFINITY;
    // exp(scale · (S - m)) = exp2(scale_log2 · (S - m)) needs scale_log2 > 0 to hide a masked score of -inf: the sign of
    // the scale goes to S, and a scale of 0 makes every score 0.
    const float sign = (p.softmax_scale > 0.f) - (p.softmax_scale < 0.f);
    const float scale_log2 = p.softmax_scale == 0.f ? 1.f : fabsf(p.softmax_scale) * 1.4426950408889634f;

    auto load = [&](auto &tile, const T *src, int64_t row_stride, int end) {
        if (aligned) load_tile<kThreads, 4>(tile, src, row_stride, end, p.head_dim);
        else load_tile<kThreads, 1>(tile, src, row_stride, end, p.head_dim);
    };
    if (Tc > 0) load(tiles.Qi, gQ, p.q_row_stride, rows);
    for (int j = 0; j < Tc; j++) {
        const int col0 = j * Bc;
        load(tiles.KVj, gK + col0 * p.k_row_stride, p.k_row_stride, seq_len - col0);
        __pipeline_wait_prior(0);
        __syncthreads();  // Qi and Kj are written

        const int vecs = (p.head_dim + 3) / 4;
        float S[kRows][kCols] = {};
        if constexpr (Tiles::kHeadDim <= 128) multiply_transposed<kTy, kTx>(S, tiles.Qi, tiles.KVj, ty, tx, 0, vecs);
        else
            for (int d = 0; d < vecs; d += 16) {  // 64 products at a time: short sums round less
                float sum[kRows][kCols] = {};
                multiply_transposed<kTy, kTx>(sum, tiles.Qi, tiles.KVj, ty, tx, d, min(d + 16, vecs));
                for (int i = 0; i < kRows; i++)
                    for (int c = 0; c < kCols; c++) S[i][c] += sum[i][c];
            }
        for (int i = 0; i < kRows; i++) {
            const int end = visible(ty + kTy * i) - col0;
            float row_max = -INFINITY;
            for (int c = 0; c < kCols; c++) {
                S[i][c] = tx + kTx * c < end ? S[i][c] * sign : -INFINITY;
                row_max = fmaxf(row_max, S[i][c]);
            }
            tiles.partial[ty + kTy * i][tx] = row_max;
        }
        __syncthreads();  // partial is written, Kj has been read

        load(tiles.KVj, gV + col0 * p.v_row_stride, p.v_row_stride, seq_len - col0);
        float alpha[kRows];
        for (int i = 0; i < kRows; i++) {
            float m_new = m[i], row_sum = 0.f;
            for (float x : tiles.partial[ty + kTy * i]) m_new = fmaxf(m_new, x);
            const float m_sub = m_new == -INFINITY ? 0.f : m_new;  // nothing seen yet: exp2(-inf) is 0, not NaN
            for (int c = 0; c < kCols; c++) {
                const float p_ij = exp2f((S[i][c] - m_sub) * scale_log2);
                row_sum += p_ij, tiles.P[ty + kTy * i][tx + kTx * c] = p_ij;
            }
            alpha[i] = exp2f((m[i] - m_sub) * scale_log2);
            l[i] = l[i] * alpha[i] + row_sum, m[i] = m_new;
        }
        __pipeline_wait_prior(0);
        __syncthreads();  // P and Vj are written

        // P Vj is summed apart from O: short sums round less, and O takes its rescaling in the same FMA.
#pragma unroll
        for (int d0 = 0; d0 < kVecs; d0 += 2) {
            Vec4 PV[kRows][2] = {};
            multiply<kTy, kTx>(PV, tiles.P, tiles.KVj, ty, tx, kTx * d0);
            for (int i = 0; i < kRows; i++)
                for (int d = 0; d < 2; d++)
                    for (int e = 0; e < 4; e++) O[i][d0 + d].x[e] = O[i][d0 + d].x[e] * alpha[i] + PV[i][d].x[e];
        }
        __syncthreads();  // P and Vj have been read
    }

    for (int i = 0; i < kRows; i++) tiles.partial[ty + kTy * i][tx] = l[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        const int r = ty + kTy * i;
        if (row0 + r >= p.seqlen_q) continue;
        float sum = 0.f;
        for (float x : tiles.partial[r]) sum += x;
        const bool empty = sum == 0.f;  // its out is 0 even where V, times its probabilities of 0, gave NaN
        const float scale_o = 1.f / sum, lse = empty ? -INFINITY : m[i] * fabsf(p.softmax_scale) + logf(sum);
        if (tx == 0) p.lse[bh * p.seqlen_q + row0 + r] = lse;
#pragma unroll
        for (int d = 0; d < kVecs; d++)
            for (int e = 0; e < 4; e++) {
                const int x = 4 * (tx + kTx * d) + e;
                if (x < p.head_dim) gO[r * p.o_row_stride + x] = from_float<T>(empty ? 0.f : O[i][d].x[e] * scale_o);
            }
    }
}

template <typename T, typename Tiles> void launch_fwd(const AttnParams &p) {
    const int64_t blocks = (int64_t(p.seqlen_q) + Tiles::Br - 1) / Tiles::Br * p.batch_size * p.nheads;
    launch(flash_fwd<T, Tiles>, blocks, Tiles::kThreads, sizeof(Tiles), p.stream, p, is_aligned(p, 4 * sizeof(T), 4));
}

// Tiles by head_dim: {kHeadDim, Br, Bc, kTy, kTx}. The narrow ones are for 64 KB of shared memory (sm_75).
using Tiles64 = Tiles<64, 64, 64, 16, 8>;  // 4×8 of S and of O a thread: 8×8 starves a GPU that is not full
using Tiles128 = Tiles<128, 64, 64, 8, 16>;  // 8×4 of S, 8×8 of O
using Tiles128Narrow = Tiles<128, 64, 32, 8, 16>;
using Tiles256 = Tiles<256, 32, 32, 8, 16>;  // half the rows, for 99 KB
using Tiles256Narrow = Tiles<256, 32, 16, 8, 16>;
static_assert(sizeof(Tiles64) <= 64 << 10 && sizeof(Tiles128Narrow) <= 64 << 10 && sizeof(Tiles256Narrow) <= 64 << 10);
static_assert(sizeof(Tiles128) <= 99 << 10 && sizeof(Tiles256) <= 99 << 10);  // sm_86, sm_89 and sm_120

template <typename T> void dispatch(const AttnParams &p) {
    if (p.head_dim <= 64) return launch_fwd<T, Tiles64>(p);
    const bool narrow = max_shared_memory() < 99 << 10;
    if (p.head_dim <= 128) return narrow ? launch_fwd<T, Tiles128Narrow>(p) : launch_fwd<T, Tiles128>(p);
    return narrow ? launch_fwd<T, Tiles256Narrow>(p) : launch_fwd<T, Tiles256>(p);
}

void flash_forward(const AttnParams &p) {
    switch (p.dtype) {
        case DType::kFloat32: return dispatch<float>(p);
        case DType::kFloat16: return dispatch<__half>(p);
        case DType::kBFloat16: return dispatch<__nv_bfloat16>(p);
    }
}

}  // namespace simt
