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

    __device__ RowEnd(bool has_keys, float scale, float lse) : has_keys(has_keys), scale(scale), lse(lse) {}
    __device__ RowEnd(RowState row, const float *sink) : has_keys(row.sum != 0.f) {
        const float factor = sink ? add_sink(row.max, row.sum, *sink * 1.4426950408889634f) : 1.f;
        scale = factor / row.sum;
        lse = row.sum == 0.f ? -INFINITY : float(row.max * 0.6931471805599453 + logf(row.sum));
    }
};

// The rows of a tile for some of the keys: those of this lane, Shape::row_of_lane(i) with i below kLaneRows, and their
// columns Shape::col_of_lane(j), of which kVec are neighbours.
template <typename Shape> struct TileState {
    typename Shape::AccO acc_o = {};
    RowState rows[Shape::kLaneRows];

    // The maximum of row i becomes `max`, which is not below it.
    __device__ void grow(int i, float max) {
        const float alpha = exp2_approx(rows[i].max - max);
        rows[i].max = max, rows[i].sum *= alpha;
#pragma unroll
        for (int j = 0; j < Shape::kLaneCols; j++) Shape::at(acc_o, i, j) *= alpha;
    }
    // act(x, col) for the columns of row i, kVec at a time, and the first of them.
    template <typename Act> __device__ void for_columns(int i, Act act) {
#pragma unroll
        for (int j = 0; j < Shape::kLaneCols; j += Shape::kVec) {
            float x[Shape::kVec];
            for (int e = 0; e < Shape::kVec; e++) x[e] = Shape::at(acc_o, i, j + e);
            act(x, Shape::col_of_lane(j));
        }
    }
};

// A row's output and lse: columns [col, col + kCount) of this thread.
template <typename T, int kCount, typename Shape>
__device__ void store_row(const DecodeParams &p, const Run<Shape> &run, const PackedRow &row, const RowEnd &end,
                          const float (&o)[kCount], int col) {
    if (col == 0) static_cast<float *>(p.lse)[lse_index(p, run.cut.seq, run.b, row.head) + row.token] = end.lse;
    if (col >= p.head_dim_v) return;
    T *gO = rows_of<T>(p.o, run.b, row.head, run.cut.seq.q_begin + row.token) + col;
    if constexpr (kCount == 1) *gO = device::from_float<T>(end.has_keys ? o[0] * end.scale : 0.f);
    else
#pragma unroll
        for (int d = 0; d < kCount; d += 2)
            reinterpret_cast<uint32_t *>(gO)[d / 2] =
                end.has_keys ? pack<T>(o[d] * end.scale, o[d + 1] * end.scale) : 0u;
}

template <typename T, typename Shape>
__device__ void store_tile(const DecodeParams &p, const Run<Shape> &run, TileState<Shape> &state) {
#pragma unroll
    for (int i = 0; i < Shape::kLaneRows; i++) {
        const int r = Shape::row_of_lane(i);
        if (r >= run.valid_rows()) continue;
        const PackedRow row(run, r);
        const RowEnd end(state.rows[i], sink_of<float>(p, row.head));
        state.for_columns(i, [&](const auto &o, int col) { store_row<T>(p, run, row, end, o, col); });
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
        state.for_columns(i, [&]<int kVec>(const float (&o)[kVec], int col) {
            if constexpr (kVec == 1) row[col] = o[0];
            else *reinterpret_cast<float2 *>(row + col) = {o[0], o[1]};
        });
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

// How the next result of a row joins those before it: x becomes x · alpha + other · beta.
struct Join { float alpha, beta; };

// The results of a tile become its output, in their order. A thread has four columns of some rows. `joins` is shared
// memory, for kBatch results of each row; a thread finds those of one row.
template <typename T, typename Shape>
__device__ void join_results(const DecodeParams &p, const Results &results, const Run<Shape> &run,
                             Join (&joins)[Shape::kBlockM][8]) {
    constexpr int kBatch = 8, kVecs = Shape::kHeadDim / 4, kRowStep = Shape::kNumThreads / kVecs;
    constexpr int kRows = Shape::kBlockM / kRowStep, kAhead = kRows < 16 ? 16 / kRows : 1;  // loads of 16 bytes
    const int row0 = threadIdx.x / kVecs, col = threadIdx.x % kVecs * 4, last_row = run.valid_rows() - 1;
    RowState state;  // of row threadIdx.x
    float o[kRows][4] = {};
#pragma unroll 1
    for (int first = 0; first < results.count; first += kBatch) {
        const int count = min(kBatch, results.count - first);
        if (threadIdx.x < Shape::kBlockM) {
            const float *row = results.at(first) + min(int(threadIdx.x), last_row) * Shape::kPitch + Shape::kHeadDim;
            float2 end[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; j++)
                end[j] = *reinterpret_cast<const float2 *>(row + (results.at(first + min(j, count - 1)) -
                                                                  results.at(first)));
#pragma unroll
            for (int j = 0; j < kBatch; j++) {
                const float max = fmaxf(state.max, end[j].x);
                const Join join{exp2_approx(state.max - max), exp2_approx(end[j].x - max)};
                joins[threadIdx.x][j] = join;
                if (j < count) state = {max, fmaf(state.sum, join.alpha, end[j].y * join.beta)};
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int j = 0; j < count; j += kAhead) {
            float4 x[kAhead][kRows];
#pragma unroll
            for (int k = 0; k < kAhead; k++)
                for (int i = 0; i < kRows; i++)
                    x[k][i] = *reinterpret_cast<const float4 *>(results.at(first + min(j + k, count - 1)) + col +
                                                                min(row0 + i * kRowStep, last_row) * Shape::kPitch);
#pragma unroll
            for (int k = 0; k < kAhead; k++)
                for (int i = 0; i < kRows && j + k < count; i++) {
                    const Join join = joins[row0 + i * kRowStep][j + k];
                    for (int e = 0; e < 4; e++) o[i][e] = fmaf(o[i][e], join.alpha, (&x[k][i].x)[e] * join.beta);
                }
        }
        __syncthreads();
    }
    if (threadIdx.x <= last_row) {  // alpha and beta: what a row is multiplied by, and its lse
        const RowEnd end(state, sink_of<float>(p, PackedRow(run, threadIdx.x).head));
        joins[threadIdx.x][0] = {end.has_keys ? end.scale : 0.f, end.lse};
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        const int r = row0 + i * kRowStep;
        if (r > last_row) continue;
        const Join end = joins[r][0];
        store_row<T>(p, run, PackedRow(run, r), {end.alpha != 0.f, end.alpha, end.beta}, o[i], col);
    }
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
__device__ void end_run(const DecodeParams &p, const Room &room, const Line &line, Run<Shape> &run,
                        Join (&joins)[Shape::kBlockM][8], bool &is_last) {
    if (!run.has_one_result(room) && arrive_last(p, room, line, run, is_last))
        join_results<T>(p, results_of(p, room, line, run), run, joins);
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
