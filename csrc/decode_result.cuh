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

// How the results of two parts of the keys of a row become one: x becomes x · alpha + other · beta. The operations are
// spelled out, so that registers and the workspace give the same bits.
struct Join {
    float alpha, beta;

    __device__ Join(RowState &row, const RowState &other) {
        const float max = fmaxf(row.max, other.max);
        alpha = exp2_approx(row.max - max), beta = exp2_approx(other.max - max);
        row.max = max, apply(row.sum, other.sum);
    }
    __device__ void apply(float &x, float other) const { x = fmaf(x, alpha, __fmul_rn(other, beta)); }
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
// columns from Shape::first_col() on, in pairs, eight columns apart.
template <typename Shape> struct TileState {
    float acc_o[Shape::kMTiles][Shape::kDTiles][4] = {};  // [i / 2][…][i % 2 * 2 and the next], as in softmax.cuh
    RowState rows[Shape::kLaneRows];

    // act(x, col) for this lane's pairs of columns of row i.
    template <typename Act> __device__ void for_pairs(int i, Act act) {
#pragma unroll
        for (int d = 0; d < Shape::kDTiles; d++)
            act(*reinterpret_cast<float2 *>(&acc_o[i / 2][d][i % 2 * 2]), Shape::first_col() + 8 * d);
    }
    // The maximum of row i becomes `max`, which is not below it.
    __device__ void grow(int i, float max) {
        const float alpha = exp2_approx(rows[i].max - max);
        rows[i].max = max, rows[i].sum *= alpha;
        for_pairs(i, [&](float2 &o, int) { o = {o.x * alpha, o.y * alpha}; });
    }
    __device__ void join(TileState &other) {
#pragma unroll
        for (int i = 0; i < Shape::kLaneRows; i++) {
            const Join join(rows[i], other.rows[i]);
            for (int d = 0; d < Shape::kDTiles; d++)
                for (int e = i % 2 * 2; e < i % 2 * 2 + 2; e++)
                    join.apply(acc_o[i / 2][d][e], other.acc_o[i / 2][d][e]);
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
    float *first, *second;
    int64_t stride;  // from the second one on
    int count;       // at most

    __device__ float *at(int i) const { return i == 0 ? first : second + (i - 1) * stride; }
};

// With num_splits there is a place for each chunk, and a result of several chunks lies where the first of them would.
// Without, the first share has the result in its second slot, and the others in their first.
template <typename Shape>
__device__ Results results_of(const DecodeParams &p, const Room &room, const Line &line, const Run<Shape> &run) {
    const int64_t size = int64_t(room.rows) * Shape::kPitch;
    float *workspace = static_cast<float *>(p.workspace);
    if (room.splits) {
        const int64_t heads = int64_t(run.b) * p.nheads_k + run.h_k;
        float *first = workspace + (heads * room.splits + run.tile * run.cut.num_chunks) * size;
        return {first, first + size, size, run.cut.num_chunks};
    }
    const int share = run.first_share(), head = blockIdx.x % line.heads;
    float *slots = workspace + 2 * (share * line.heads + head) * size;
    return {slots + size, slots + 2 * line.heads * size, 2 * line.heads * size, run.last_share() - share + 1};
}

// That of the chunks [chunk, chunk + num_chunks) of the run.
template <typename Shape>
__device__ void store_result(const DecodeParams &p, const Room &room, const Line &line, const Run<Shape> &run,
                             TileState<Shape> &state, int chunk, int num_chunks) {
    const int64_t size = int64_t(room.rows) * Shape::kPitch;
    float *to = room.splits ? results_of(p, room, line, run).at(chunk)
                            : static_cast<float *>(p.workspace) + (2 * blockIdx.x + (chunk == 0)) * size;
#pragma unroll
    for (int i = 0; i < Shape::kLaneRows; i++) {
        const int r = Shape::row_of_lane(i);
        if (r >= run.valid_rows()) continue;
        float *row = to + r * Shape::kPitch;
        state.for_pairs(i, [&](float2 o, int col) { *reinterpret_cast<float2 *>(row + col) = o; });
        if (Shape::first_col() == 0)
            *reinterpret_cast<float4 *>(row + Shape::kHeadDim) = {
                state.rows[i].max, state.rows[i].sum, __int_as_float(room.splits ? num_chunks : 1), 0.f};
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

// The results of a tile become its output, in their order: four columns of a row at a time. kBatch results are on their
// way from memory at a time.
template <typename T, typename Shape>
__device__ void join_results(const DecodeParams &p, const Room &room, const Line &line, const Run<Shape> &run) {
    constexpr int kVecs = Shape::kHeadDim / 4, kBatch = Shape::kHeadDim <= 128 ? 16 : 8;
    const Results results = results_of(p, room, line, run);
    for (int i = threadIdx.x; i < run.valid_rows() * kVecs; i += Shape::kNumThreads) {
        RowState state;
        float o[4] = {};
        int next = 0;
        for (int first = 0; first < results.count; first += kBatch) {
            float4 end[kBatch], x[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; j++) {
                const float *row = results.at(min(first + j, results.count - 1)) + i / kVecs * Shape::kPitch;
                end[j] = *reinterpret_cast<const float4 *>(row + Shape::kHeadDim);
                x[j] = *reinterpret_cast<const float4 *>(row + i % kVecs * 4);
            }
#pragma unroll
            for (int j = 0; j < kBatch; j++) {
                const bool is_next = first + j == next && next < results.count;
                RowState joined = state;
                const Join join(joined, {end[j].x, end[j].y});
                for (int e = 0; e < 4; e++) {
                    float sum = o[e];
                    join.apply(sum, (&x[j].x)[e]);
                    o[e] = is_next ? sum : o[e];
                }
                state.max = is_next ? joined.max : state.max, state.sum = is_next ? joined.sum : state.sum;
                next += is_next ? __float_as_int(end[j].z) : 0;
            }
        }
        const PackedRow row(run, i / kVecs);
        store_row<T>(p, run, row, RowEnd(state, sink_of<float>(p, row.head)), o, i % kVecs * 4);
    }
}

// Store what a block has of its run, and go on to the next one. `joined` has the chunks of the run if the first one of
// its tile is among them. The others are stored already.
template <typename T, typename Shape>
__device__ void end_run(const DecodeParams &p, const Room &room, const Line &line, Run<Shape> &run,
                        TileState<Shape> &joined, bool &is_last) {
    if (run.is_whole_tile()) store_tile<T>(p, run, joined);
    else {
        if (run.chunk_begin == 0) store_result(p, room, line, run, joined, 0, run.num_chunks());
        if (arrive_last(p, room, line, run, is_last)) join_results<T>(p, room, line, run);
    }
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
