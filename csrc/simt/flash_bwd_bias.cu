// The gradient of a bias: dbias = Σ dS (flash_bwd.cu) over the samples, heads, rows and keys that share an element.
// A block owns kBlock rows and keys of a head of dbias and walks along all that share them. It forms S and dP anew and
// sums dbias in registers: no atomics, the same bits in every run.
#include "flash_bwd.h"
#include "simt/tiles.h"

namespace simt {

template <typename Sum> struct BiasTiles {
    static constexpr int kBlock = 64, kTy = 16, kTx = 8, kStep = 16, kNThreads = kTy * kTx;
    alignas(4 * sizeof(Sum)) Sum rows[kStep][kBlock + 4], keys[kStep][kBlock + 4];
    Sum partial[kBlock][kBlock + 4];  // dbias
};

struct BiasOwner {
    Range batch, heads, rows, keys;  // rows and keys in blocks

    __device__ BiasOwner(const AttnBackwardParams &p, int block, int idx) {
        const auto &d = p.dbias;
        keys = take(d.key_stride, idx, (p.seqlen_k + block - 1) / block);
        rows = take(d.row_stride, idx, (p.seqlen_q + block - 1) / block);
        heads = take(d.head_stride, idx, p.nheads);
        batch = take(d.batch_stride, idx, int(p.batch_size));
    }
    static int64_t count(const AttnBackwardParams &p, int block) {
        const auto &d = p.dbias;
        const int keys = d.key_stride ? (p.seqlen_k + block - 1) / block : 1;
        const int rows = d.row_stride ? (p.seqlen_q + block - 1) / block : 1;
        return int64_t(keys) * rows * (d.head_stride ? p.nheads : 1) * (d.batch_stride ? p.batch_size : 1);
    }

  private:
    // All, if shared. Otherwise one, and idx counts the rest.
    __device__ static Range take(int64_t stride, int &idx, int size) {
        if (!stride) return {0, size};
        const int i = idx % size;
        idx /= size;
        return {i, i + 1};
    }
};

template <typename T>
__global__ void __launch_bounds__(BiasTiles<Sum<T>>::kNThreads) flash_bwd_bias(const AttnBackwardParams p) {
    using Sum = simt::Sum<T>;
    using Tiles = BiasTiles<Sum>;
    constexpr int kBlock = Tiles::kBlock, kTy = Tiles::kTy, kTx = Tiles::kTx, kStep = Tiles::kStep;
    constexpr int kRows = kBlock / kTy, kCols = kBlock / kTx, kNThreads = Tiles::kNThreads;
    Tiles &tiles = shared_memory<Tiles>();
    const int tx = threadIdx.x % kTx, ty = threadIdx.x / kTx;
    const BiasOwner own(p, kBlock, blockIdx.x);
    Sum dbias[kRows][kCols] = {};

    for (int b = own.batch.begin; b < own.batch.end; b++) {
        const Sequence seq(p, b);
        const Mask mask(seq, p);
        for (int h = own.heads.begin; h < own.heads.end; h++)
            for (int m = own.rows.begin; m < own.rows.end; m++) {
                const BlockRange blocks = mask.key_blocks<kBlock, kBlock>(m * kBlock);
                for (int n = max(own.keys.begin, blocks.begin); n < min(own.keys.end, blocks.end); n++) {
                    const int row0 = m * kBlock, key0 = n * kBlock, h_k = h / (p.nheads / p.nheads_k);
                    // acc = x yᵀ
                    auto product = [&](Sum (&acc)[kRows][kCols], const Tensor &x, const Tensor &y, int cols) {
                        const T *of_rows = rows_of<const T>(x, b, h, row0);
                        const T *of_keys = rows_of<const T>(y, b, h_k, key0);
                        for (int d = 0; d < cols; d += kStep) {
                            load_tile<kNThreads, true, 1>(tiles.rows, of_rows + d, x.row_stride, seq.seqlen_q - row0,
                                                          cols - d);
                            load_tile<kNThreads, true, 1>(tiles.keys, of_keys + d, y.row_stride, seq.seqlen_k - key0,
                                                          cols - d);
                            __pipeline_wait_prior(0);
                            __syncthreads();
                            multiply<kTy, kTx>(acc, tiles.rows, tiles.keys, ty, tx, min(kStep, cols - d));
                            __syncthreads();  // both have been read
                        }
                    };
                    Sum S[kRows][kCols] = {}, dP[kRows][kCols] = {};
                    product(S, p.q, p.k, p.head_dim), product(dP, p.dout, p.v, p.head_dim_v);

                    auto row = [&](int i) { return row0 + place<kTy, kRows>(ty, i); };
                    auto key = [&](int c) { return key0 + place<kTx, kCols>(tx, c); };
                    const uint64_t keep =
                        p.dropout_seed ? kept<kRows, kCols>(Dropout(p, b, h), row, key) : ~uint64_t(0);
                    const Sum keep_scale = p.dropout_seed ? Sum(p.keep_scale) : Sum(1);
                    const auto scores = scores_of<true, T>(p, seq, b, h);
                    scores.apply(grid_tile<kTy, kTx>(S, row0, ty, key0, tx));
                    const int64_t at = lse_index(p, seq.q_begin, b, h);
                    for (int i = 0; i < kRows; i++) {
                        const int in_bounds = min(row(i), seq.seqlen_q - 1);
                        const Sum lse = static_cast<const Sum *>(p.lse)[at + in_bounds];
                        const Sum delta = static_cast<const Sum *>(p.delta)[at + in_bounds];
                        const Range keys = mask.keys(row(i));
                        for (int c = 0; c < kCols; c++) {
                            const Sum dropped = keep >> (i * kCols + c) & 1 ? dP[i][c] * keep_scale : Sum(0);
                            if (keys.contains(key(c)))
                                dbias[i][c] += scores.probability(S[i][c], lse) * (dropped - delta);
                        }
                    }
                }
            }
    }

    for (int i = 0; i < kRows; i++)
        for (int c = 0; c < kCols; c++)
            tiles.partial[place<kTy, kRows>(ty, i)][place<kTx, kCols>(tx, c)] = dbias[i][c];
    __syncthreads();
    const auto &d = p.dbias;
    const int row0 = own.rows.begin * kBlock, key0 = own.keys.begin * kBlock;
    const int rows = d.row_stride ? min(kBlock, p.seqlen_q - row0) : 1;
    const int keys = d.key_stride ? min(kBlock, p.seqlen_k - key0) : 1;
    Sum *to = static_cast<Sum *>(d.data) + own.batch.begin * d.batch_stride + own.heads.begin * d.head_stride +
              row0 * d.row_stride + key0 * d.key_stride;
    for (int i = threadIdx.x; i < rows * keys; i += kNThreads) {
        const int row = i / keys, key = i % keys;
        Sum sum = 0;
        for (int r = row; r < (d.row_stride ? row + 1 : kBlock); r++)
            for (int c = key; c < (d.key_stride ? key + 1 : kBlock); c++) sum += tiles.partial[r][c];
        to[row * d.row_stride + key * d.key_stride] = sum;
    }
}

void bias_backward(const AttnBackwardParams &p) {
    with_dtype(p.dtype, [&]<typename T>() {
        using Tiles = BiasTiles<Sum<T>>;
        launch(flash_bwd_bias<T>, BiasOwner::count(p, Tiles::kBlock), Tiles::kNThreads, sizeof(Tiles), p.stream, p);
    });
}

}  // namespace simt
