// What a kernel has of a tile for some of the keys, how such results become one, and how they are stored: in the
// workspace or as the output.
//
// Read next: decode.cu, the kernel made of these.
#pragma once

#include "decode_rows.cuh"
#include "device.h"
#include "scores.cuh"
#include "softmax.cuh"

namespace decoding {

// What a row has of some of its keys: row_max in units of log2, and the sum and acc_o of exp2(score - row_max).
struct RowState {
    float max = -FLT_MAX, sum = 0.f;  // max is finite: exp2(-inf - max) is 0, not NaN
};

// What acc_o is multiplied by to become a row of the output, and its lse.
struct RowEnd {
    bool has_keys;
    float scale, lse;

    __device__ RowEnd(RowState row, const float *sink) : has_keys(row.sum != 0.f) {
        const float factor = sink ? add_sink(row.max, row.sum, *sink * 1.4426950408889634f) : 1.f;
        scale = factor / row.sum;
        lse = row.sum == 0.f ? -INFINITY : float(row.max * 0.6931471805599453 + logf(row.sum));
    }
};

// The rows of a tile for some of the keys: those of this lane, Shape::row_of_lane(i) with i below kLaneRows, and their
// columns Shape::col_of_lane(j), which come in pairs.
template <typename Shape> struct TileState {
    typename Shape::AccO acc_o = {};
    RowState rows[Shape::kLaneRows];

    // act(x, col) for this lane's pairs of columns of row i.
    template <typename Act> __device__ void for_pairs(int i, Act act) {
#pragma unroll
        for (int j = 0; j < Shape::kLaneCols; j += 2)
            act(reinterpret_cast<float2 &>(Shape::at(acc_o, i, j)), Shape::col_of_lane(j));
    }
    // The maximum of row i becomes `max`, which is not below it.
    __device__ void grow(int i, float max) {
        const float alpha = exp2_approx(rows[i].max - max);
        rows[i].max = max, rows[i].sum *= alpha;
        for_pairs(i, [&](float2 &o, int) { o = {o.x * alpha, o.y * alpha}; });
    }
};

// A row's output and lse: columns [col, col + kCount) of this thread.
template <typename T, int kCount, typename Shape>
__device__ void store_row(const DecodeParams &p, const Run<Shape> &run, const PackedRow &row, const RowEnd &end,
                          const float (&o)[kCount], int col) {
    if (col == 0) static_cast<float *>(p.lse)[lse_index(p, run.cut.seq, run.b, row.head) + row.token] = end.lse;
    if (col >= p.head_dim_v) return;
    T *gO = rows_of<T>(p.o, run.b, row.head, run.cut.seq.q_begin + row.token) + col;
#pragma unroll
    for (int d = 0; d < kCount; d += 2)
        reinterpret_cast<uint32_t *>(gO)[d / 2] = end.has_keys ? pack<T>(o[d] * end.scale, o[d + 1] * end.scale) : 0u;
}

template <typename T, typename Shape>
__device__ void store_tile(const DecodeParams &p, const Run<Shape> &run, TileState<Shape> &state) {
#pragma unroll
    for (int i = 0; i < Shape::kLaneRows; i++) {
        const int r = Shape::row_of_lane(i);
        if (r >= run.valid_rows()) continue;
        const PackedRow row(run, r);
        const RowEnd end(state.rows[i], sink_of<float>(p, row.head));
        state.for_pairs(i, [&](float2 o, int col) { store_row<T, 2>(p, run, row, end, {o.x, o.y}, col); });
    }
}

// The results of a tile in the workspace, in the order of their keys. Each is [room.rows, kPitch].
struct Results {
    float *first;
    int second, stride;  // where the second one lies, and how far the others are from one another
    int count;

    __device__ float *at(int i) const { return first + (i == 0 ? 0 : second + (i - 1) * stride); }
};

// With num_splits there is a place for each chunk. Without, the first share has the result in its second slot, and the
// others have theirs in their first.
template <typename Shape>
__device__ Results results_of(const DecodeParams &p, const Room &room, const Line &line, const Run<Shape> &run) {
    const int size = room.rows * Shape::kPitch;
    float *workspace = static_cast<float *>(p.workspace);
    if (room.splits) {
        const int64_t heads = int64_t(run.b) * p.nheads_k + run.h_k;
        const int64_t chunk = heads * room.splits + run.tile * run.cut.num_chunks;
        return {workspace + chunk * size, size, size, run.cut.num_chunks};
    }
    const int share = run.first_share(), slots = 2 * line.heads;
    const int slot = share * slots + blockIdx.x % line.heads * 2 + 1;
    return {workspace + slot * int64_t(size), (slots - 1) * size, slots * size, run.last_share() - share + 1};
}

// That of the part of the run that begins at a chunk.
template <typename Shape>
__device__ void store_result(const DecodeParams &p, const Room &room, const Line &line, const Run<Shape> &run,
                             TileState<Shape> &state, int chunk) {
    const int64_t size = int64_t(room.rows) * Shape::kPitch;
    float *to = room.splits ? results_of(p, room, line, run).at(chunk)
                            : static_cast<float *>(p.workspace) + (2 * blockIdx.x + (chunk == 0)) * size;
#pragma unroll
    for (int i = 0; i < Shape::kLaneRows; i++) {
        const int r = Shape::row_of_lane(i);
        if (r >= run.valid_rows()) continue;
        float *row = to + r * Shape::kPitch;
        state.for_pairs(i, [&](float2 o, int col) { *reinterpret_cast<float2 *>(row + col) = o; });
        if (Shape::col_of_lane(0) == 0)
            *reinterpret_cast<float2 *>(row + Shape::kHeadDim) = {state.rows[i].max, state.rows[i].sum};
    }
}

// Whether this block is the last one of those that store results of the run's tile. Then it can read all of them, and
// the counter is 0 again, for the next call. It counts chunks.
template <typename Shape>
__device__ bool arrive_last(const DecodeParams &p, const Room &room, const Line &line, const Run<Shape> &run,
                            bool &is_last) {
    __syncthreads();  // the results of this block are stored
    if (threadIdx.x == 0) {
        const int64_t i = room.splits ? (int64_t(run.b) * p.nheads_k + run.h_k) * room.tiles + run.tile
                                      : run.first_share() * line.heads + blockIdx.x % line.heads;
        is_last = atomic_add_acq_rel(p.counters + i, run.num_chunks()) + run.num_chunks() == run.cut.num_chunks;
        if (is_last) p.counters[i] = 0;
    }
    __syncthreads();
    return is_last;
}

// The results of a tile become its output, in their order: four columns of kRows rows by a thread, of which the first
// is number `vec` of the tile. kBatch results of each row are on their way from memory at a time.
template <typename T, int kRows, int kBatch, typename Shape>
__device__ void join_rows(const DecodeParams &p, const Results &results, const Run<Shape> &run, int vec) {
    constexpr int kVecs = Shape::kHeadDim / 4, kRowStep = Shape::kNumThreads / kVecs;
    const int row0 = vec / kVecs, col = vec % kVecs * 4;
    RowState states[kRows];
    float o[kRows][4] = {};
#pragma unroll 1
    for (int first = 0; first < results.count; first += kBatch) {
        float2 end[kBatch][kRows];
        float4 x[kBatch][kRows];
#pragma unroll
        for (int j = 0; j < kBatch; j++)
            for (int i = 0; i < kRows; i++) {
                const float *row = results.at(min(first + j, results.count - 1)) +
                                   min(row0 + i * kRowStep, run.valid_rows() - 1) * Shape::kPitch;
                end[j][i] = *reinterpret_cast<const float2 *>(row + Shape::kHeadDim);
                x[j][i] = *reinterpret_cast<const float4 *>(row + col);
            }
#pragma unroll
        for (int j = 0; j < kBatch; j++)
            for (int i = 0; i < kRows; i++) {
                RowState &state = states[i];
                const float max = first + j < results.count ? fmaxf(state.max, end[j][i].x) : state.max;
                const float alpha = exp2_approx(state.max - max);
                const float beta = first + j < results.count ? exp2_approx(end[j][i].x - max) : 0.f;
                state = {max, fmaf(state.sum, alpha, end[j][i].y * beta)};
                for (int e = 0; e < 4; e++) o[i][e] = fmaf(o[i][e], alpha, (&x[j][i].x)[e] * beta);
            }
    }
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        if (row0 + i * kRowStep >= run.valid_rows()) continue;
        const PackedRow row(run, row0 + i * kRowStep);
        store_row<T>(p, run, row, RowEnd(states[i], sink_of<float>(p, row.head)), o[i], col);
    }
}

template <typename T, typename Shape>
__device__ void join_results(const DecodeParams &p, const Results &results, const Run<Shape> &run) {
    constexpr int kThreads = Shape::kNumThreads;
    const int vecs = run.valid_rows() * (Shape::kHeadDim / 4);
    if (vecs <= kThreads) {  // few rows, and often many results
        if (threadIdx.x < vecs) join_rows<T, 1, 16>(p, results, run, threadIdx.x);
    } else
        for (int vec = threadIdx.x; vec < vecs; vec += 4 * kThreads) join_rows<T, 4, 4>(p, results, run, vec);
}

// Store what the block has of a part of its run.
template <typename T, typename Shape>
__device__ void end_part(const DecodeParams &p, const Room &room, const Line &line, const Run<Shape> &run,
                         TileState<Shape> &state, int chunk) {
    if (run.has_one_result(room)) store_tile<T>(p, run, state);
    else store_result(p, room, line, run, state, chunk);
}

// Go on to the next run, once the results of the tile are one if this block stored the last of them.
template <typename T, typename Shape>
__device__ void end_run(const DecodeParams &p, const Room &room, const Line &line, Run<Shape> &run, bool &is_last) {
    if (!run.has_one_result(room) && arrive_last(p, room, line, run, is_last))
        join_results<T>(p, results_of(p, room, line, run), run);
    __syncthreads();  // all threads have read the run
    if (threadIdx.x == 0) run.next(p, room, line);
    __syncthreads();  // the next one is there
}

// Rows that are not a sample's get 0 and -inf.
template <typename T> __device__ void store_padding(const DecodeParams &p) {
    if (!p.cu_seqlens_q && !p.seqused_q) return;
    const int warp_idx = threadIdx.x / 32, col = threadIdx.x % 32 * 8;
    for (int b = blockIdx.x; b < p.batch_size; b += gridDim.x) {
        const Sequence seq(p, b);
        if (!seq.is_served(p)) continue;
        const int64_t count = int64_t(seq.padded_q - seq.seqlen_q) * p.nheads;
        for (int64_t i = warp_idx; i < count; i += blockDim.x / 32) {
            const int row = seq.seqlen_q + int(i / p.nheads), h = int(i % p.nheads);
            if (col == 0) static_cast<float *>(p.lse)[lse_index(p, seq, b, h) + row] = -INFINITY;
            if (col < p.head_dim_v)
                *reinterpret_cast<uint4 *>(rows_of<T>(p.o, b, h, seq.q_begin + row) + col) = uint4{};
        }
    }
}

}  // namespace decoding
