// New keys and values for a cache: one kernel stores them, rotates keys and q, and counts the keys. Memory bounds it. A
// thread has 16 bytes, or one element if some tensor is not aligned, and waits for no other: the CPU has a plain loop.
#include "common/cache_sequence.cuh"
#include "simt/tiles.h"

namespace simt {

constexpr int kAppendThreads = 256;

struct AppendGrid {
    unsigned new_parts, q_parts;  // blocks of a row
    int64_t new_blocks, q_blocks, blocks;

    AppendGrid(const AppendParams &p, int vec) {
        auto parts = [](int items) { return (unsigned(items) + kAppendThreads - 1) / kAppendThreads; };
        new_parts = parts(p.nheads_k * (p.head_dim + p.head_dim_v) / vec), q_parts = parts(p.nheads * p.head_dim / vec);
        new_blocks = new_parts * int64_t(p.seqlen_new) * (p.cu_seqlens_new ? 1 : p.batch_size);
        q_blocks = q_parts * int64_t(p.seqlen_q) * (p.cu_seqlens_q ? 1 : p.batch_size);
        blocks = new_blocks + q_blocks + (p.lengths ? parts(p.batch_size) : 0);
    }
};

// Sequence -1 is nowhere.
__device__ inline CachePlace place_of(const AppendParams &p, const SampleRow &at) {
    if (p.slot_mapping) {
        const int64_t slot = p.slot_mapping[at.row];
        if (slot < 0 || p.page_size == 0) return {-1};
        const int64_t sequence = min(slot / p.page_size, int64_t(p.num_sequences));
        return {int(sequence), int(slot - sequence * p.page_size)};
    }
    const NewRows rows(p, at.b);
    if (at.i >= min(rows.count, p.capacity - rows.taken)) return {-1};
    return place_in_cache(p, at.b, rows.taken + at.i);
}

template <int kVec, typename T> __device__ Vec<kVec, T> load(const T *from) {
    return *reinterpret_cast<const Vec<kVec, T> *>(from);
}

// Pairs (x, y) become (x cos - y sin, y cos + x sin) in fp32, rounded once. Row i of sample b gives the position.
template <int kVec, typename T>
__device__ Vec<kVec, T> rotated(const AppendParams &p, const T *x, int col, int b, int i) {
    const Vec<kVec, T> own = load<kVec>(x + col);
    if (col >= p.rotary_dim) return own;
    const bool is_interleaved = p.rotary_interleaved;
    const int half = p.rotary_dim / 2, opposite = col < half ? col + half : col - half;
    const Vec<kVec, T> others = load<kVec>(x + (is_interleaved ? (kVec == 1 ? col ^ 1 : col) : opposite));
    const int64_t at = int64_t(rotary_row(p, b, i)) * half + (is_interleaved ? col / 2 : min(col, opposite));
    auto numbers = [&](const void *table) {  // cos or sin of the columns
        constexpr int kHalf = (kVec + 1) / 2;
        const T *from = static_cast<const T *>(table) + at;
        const Vec<kHalf, T> low = load<kHalf>(from), high = is_interleaved ? low : load<kHalf>(from + kVec / 2);
        Vec<kVec, T> out;
#pragma unroll
        for (int e = 0; e < kVec; e++) out.x[e] = is_interleaved ? low.x[e / 2] : (e < kHalf ? low : high).x[e % kHalf];
        return out;
    };
    const auto cos = numbers(p.rotary_cos), sin = numbers(p.rotary_sin);
    Vec<kVec, T> out;
#pragma unroll
    for (int e = 0; e < kVec; e++) {
        const bool is_first = is_interleaved ? (col + e) % 2 == 0 : col < half;
        const Sum<T> other = to_float(is_interleaved ? others.x[kVec == 1 ? 0 : e ^ 1] : others.x[e]);
        const Sum<T> turned = other * to_float(sin.x[e]);
        out.x[e] = from_float<T>(to_float(own.x[e]) * to_float(cos.x[e]) + (is_first ? -turned : turned));
    }
    return out;
}

template <typename T, int kVec> __device__ void append_vec(const AppendParams &p, const SampleRow &at, int vec) {
    const int k_vecs = p.head_dim / kVec, vecs = k_vecs + p.head_dim_v / kVec, h = vec / vecs, of_head = vec - h * vecs;
    if (h >= p.nheads_k) return;
    const bool is_k = of_head < k_vecs;
    const int col = (is_k ? of_head : of_head - k_vecs) * kVec;
    const CachePlace to = place_of(p, at);
    const T *from = rows_of<const T>(is_k ? p.k_new : p.v_new, at.batch, h, at.row);
    const Vec<kVec, T> x = is_k ? rotated<kVec>(p, from, col, at.b, at.i) : load<kVec>(from + col);
    if (to.sequence < 0 || to.sequence >= p.num_sequences) return;
    *reinterpret_cast<Vec<kVec, T> *>(rows_of<T>(is_k ? p.k_cache : p.v_cache, to.sequence, h, to.row) + col) = x;
}

template <typename T, int kVec> __device__ void rotate_vec(const AppendParams &p, const SampleRow &at, int vec) {
    const int vecs = p.head_dim / kVec, h = vec / vecs, col = (vec - h * vecs) * kVec;
    if (h >= p.nheads) return;
    const T *from = rows_of<const T>(p.q, at.batch, h, at.row);
    *reinterpret_cast<Vec<kVec, T> *>(rows_of<T>(p.q_rotated, at.batch, h, at.row) + col) =
        rotated<kVec>(p, from, col, at.b, p.q_advances ? at.i : 0);
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kAppendThreads) append(const AppendParams p, const AppendGrid grid) {
    // The next kernel, often decode.cu, waits for these keys itself. launch() has waited for all earlier ones.
    let_next_kernel_begin();
    unsigned block = blockIdx.x;
    if (block < grid.new_blocks) {
        const SampleRow at(p.cu_seqlens_new, block / grid.new_parts, p.batch_size, p.seqlen_new);
        return append_vec<T, kVec>(p, at, block % grid.new_parts * kAppendThreads + threadIdx.x);
    }
    block -= unsigned(grid.new_blocks);
    if (block < grid.q_blocks)
        return rotate_vec<T, kVec>(p, q_row_of(p, block / grid.q_parts),
                                   block % grid.q_parts * kAppendThreads + threadIdx.x);
    const int b = int(block - unsigned(grid.q_blocks)) * kAppendThreads + int(threadIdx.x);
    if (b >= p.batch_size) return;
    const NewRows rows(p, b);
    p.lengths[b] = min(p.capacity, rows.taken + rows.count);
}

template <typename T, int kVec> void launch_append(const AppendParams &p) {
    const AppendGrid grid(p, kVec);
#ifdef __CUDACC__
    launch(append<T, kVec>, grid.blocks, kAppendThreads, 0, p.stream, p, grid);
#else
    for (blockIdx.x = 0; blockIdx.x < grid.blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < kAppendThreads; threadIdx.x++) append<T, kVec>(p, grid);
#endif
}

// Rows of a table begin at multiples of 16 bytes if the first one does.
template <typename T> bool has_vectors(const AppendParams &p) {
    int64_t elements = p.head_dim | p.head_dim_v, addresses = int64_t(p.rotary_cos) | int64_t(p.rotary_sin);
    for (const Tensor &x : {p.k_new, p.v_new, p.k_cache, p.v_cache, p.q, p.q_rotated})
        elements |= x.batch_stride | x.head_stride | x.row_stride, addresses |= int64_t(x.data);
    return elements * int64_t(sizeof(T)) % 16 == 0 && addresses % 16 == 0;
}

void append_kvcache(const AppendParams &p) {
    with_dtype(p.dtype, [&]<typename T>() {
        has_vectors<T>(p) ? launch_append<T, 16 / sizeof(T)>(p) : launch_append<T, 1>(p);
    });
}

}  // namespace simt
