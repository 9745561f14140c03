// The rows of a cache: where they lie, new ones, and their rows in the tables of a rotation by position (RoPE).
#pragma once

#include "common/sequence.cuh"

// Where a row lies in a cache. The caller's numbers of sequences and pages may be any.
struct CachePlace { int sequence, row; };
template <typename Params> __device__ CachePlace place_in_cache(const Params &p, int b, int row) {
    if (!p.page_table) return {p.cache_batch_idx ? p.cache_batch_idx[b] : b, row};
    const int page = unsigned(row) / unsigned(p.page_size);
    return {p.page_table[b * p.page_table_stride + page], row - page * p.page_size};
}

// The sample of a row: row i of sample b is row `row` of element `batch`. The last packed sample has all rows after it.
struct SampleRow {
    int b, i, row, batch;

    // index: among all rows. seqlen: of the tensor.
    __device__ SampleRow(const int *cu_seqlens, unsigned index, int batch_size, int seqlen) {
        if (!cu_seqlens) {
            b = batch = int(index / unsigned(seqlen)), i = row = int(index % unsigned(seqlen));
            return;
        }
        b = last_sample(batch_size, [&](int b) { return begin_of(cu_seqlens, b, seqlen) <= int(index); });
        batch = 0, row = int(index), i = row - begin_of(cu_seqlens, b, seqlen);
    }
};

__device__ inline SampleRow q_row_of(const AppendParams &p, unsigned index) {
    return SampleRow(p.cu_seqlens_q, index, p.batch_size, p.seqlen_q);
}

// The new rows of a sample, and the places that are taken before them.
struct NewRows {
    int count, taken;

    __device__ NewRows(const AppendParams &p, int b) : count(p.seqlen_new), taken(0) {
        if (p.cu_seqlens_new) {
            const int begin = begin_of(p.cu_seqlens_new, b, p.seqlen_new);
            count = max(0, begin_of(p.cu_seqlens_new, b + 1, p.seqlen_new) - begin);
        }
        if (p.seqused_k) taken = max(0, min(p.seqused_k[b], p.capacity));
    }
};

// Row i of the tables of cos and sin for sample b.
__device__ inline int rotary_row(const AppendParams &p, int b, int i) {
    const int64_t position = int64_t(i) + (p.rotary_seqlens ? p.rotary_seqlens[b] : NewRows(p, b).taken);
    return int(max(int64_t(0), min(position, int64_t(p.seqlen_rotary) - 1)));
}
