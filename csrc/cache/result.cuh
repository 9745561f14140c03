// The state of a tile after some of its keys, stored as output or as a partial result.
#pragma once

#include "cache/rows.cuh"
#include "common/scores.cuh"
#include "common/softmax.cuh"

namespace decoding {

// row_max in units of log2, and the sum of exp2(score - row_max).
struct RowState {
    float max = -FLT_MAX, sum = 0.f;  // max is finite: exp2(-inf - max) is 0, not NaN
};

struct RowEnd {
    bool has_keys;
    float scale, lse;

    __device__ RowEnd(RowState row, const float *sink) : has_keys(row.sum != 0.f) {
        const float factor = sink ? add_sink(row.max, row.sum, *sink * 1.4426950408889634f) : 1.f;
        scale = factor / row.sum;
        lse = row.sum == 0.f ? -INFINITY : float(row.max * 0.6931471805599453 + logf(row.sum));
    }
};

// This lane's rows and pairs of columns.
template <typename Shape> struct TileState {
    typename Shape::AccO acc_o = {};
    RowState rows[Shape::kLaneRows];

    template <typename Act> __device__ void for_pairs(int i, Act act) {
#pragma unroll
        for (int j = 0; j < Shape::kLaneCols; j += 2)
            act(reinterpret_cast<float2 &>(Shape::at(acc_o, i, j)), Shape::col_of_lane(j));
    }
    __device__ void grow(int i, float max) {
        const float alpha = exp2_approx(rows[i].max - max);
        rows[i].max = max, rows[i].sum *= alpha;
        for_pairs(i, [&](float2 &o, int) { o = {o.x * alpha, o.y * alpha}; });
    }
};

// The thread with the first column stores the row's lse.
template <typename T> struct OutputRow {
    const RowEnd end;
    T *const o;

    template <typename Shape>
    __device__ OutputRow(const DecodeParams &p, const Run<Shape> &run, int r, RowState state, int col)
        : OutputRow(p, run, PackedRow(run, r), state, col) {}
    __device__ void store(const DecodeParams &p, int col, float x, float y) const {
        if (col < p.head_dim_v)
            *reinterpret_cast<uint32_t *>(o + col) = end.has_keys ? pack<T>(x * end.scale, y * end.scale) : 0u;
    }

  private:
    template <typename Shape>
    __device__ OutputRow(const DecodeParams &p, const Run<Shape> &run, const PackedRow &row, RowState state, int col)
        : end(state, sink_of<float>(p, row.head)),
          o(rows_of<T>(p.o, run.b, row.head, run.cut.seq.q_begin + row.token)) {
        const int64_t lse_row = lse_index(p, run.cut.seq.q_begin, run.b, row.head) + row.token;
        if (col == 0) static_cast<float *>(p.lse)[lse_row] = end.lse;
    }
};

template <typename T, typename Shape>
__device__ void store_tile(const DecodeParams &p, const Run<Shape> &run, TileState<Shape> &state) {
#pragma unroll
    for (int i = 0; i < Shape::kLaneRows; i++) {
        const int r = Shape::row_of_lane(i);
        if (r >= run.valid_rows()) continue;
        const OutputRow<T> row(p, run, r, state.rows[i], Shape::col_of_lane(0));
        state.for_pairs(i, [&](float2 x, int col) { row.store(p, col, x.x, x.y); });
    }
}

// A tile's partial results by key: acc_o [room.rows, kHeadDim], then row_max and row_sum [room.rows, 4].
struct Results {
    float *first;
    int second, stride;  // offset of the second one, and from each to the next
    int count;
    int ends;  // offset of row_max and row_sum

    __device__ float *at(int i) const { return first + (i == 0 ? 0 : second + (i - 1) * stride); }
};

template <typename Shape>
__device__ Results results_of(const DecodeParams &p, const Room &room, const Line &line, const Run<Shape> &run) {
    const int size = room.rows * Shape::kPitch;
    float *workspace = static_cast<float *>(p.workspace);
    if (room.splits) {
        const int64_t heads = int64_t(run.b) * p.nheads_k + run.h_k;
        const int64_t chunk = heads * room.splits + run.tile * run.cut.num_chunks;
        return {workspace + chunk * size, size, size, run.cut.num_chunks, room.rows * Shape::kHeadDim};
    }
    const int share = run.first_share(), slots = 2 * line.heads;
    const int slot = share * slots + line.head() * 2 + 1;
    return {workspace + slot * int64_t(size), (slots - 1) * size, slots * size, run.last_share() - share + 1,
            room.rows * Shape::kHeadDim};
}

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
        float *row = to + r * Shape::kHeadDim, *end = to + room.rows * Shape::kHeadDim + 4 * r;
        state.for_pairs(i, [&](float2 o, int col) { *reinterpret_cast<float2 *>(row + col) = o; });
        if (Shape::col_of_lane(0) == 0) *reinterpret_cast<float2 *>(end) = {state.rows[i].max, state.rows[i].sum};
    }
}

template <typename T, typename Shape>
__device__ void end_part(const DecodeParams &p, const Room &room, const Line &line, const Run<Shape> &run,
                         TileState<Shape> &state, int chunk) {
    if (run.has_one_result(room)) store_tile<T>(p, run, state);
    else store_result(p, room, line, run, state, chunk);
}

// Rows outside of samples get 0 and -inf.
template <typename T> __device__ void store_padding(const DecodeParams &p) {
    if (!p.cu_seqlens_q && !p.seqused_q) return;
    const int warp_idx = threadIdx.x / 32, col = threadIdx.x % 32 * 8;
    for (int b = blockIdx.x; b < p.batch_size; b += gridDim.x) {
        const Sequence seq(p, b);
        if (!seq.is_served(p)) continue;
        const int64_t count = int64_t(seq.padded_q - seq.seqlen_q) * p.nheads;
        for (int64_t i = warp_idx; i < count; i += blockDim.x / 32) {
            const int row = seq.seqlen_q + int(i / p.nheads), h = int(i % p.nheads);
            if (col == 0) static_cast<float *>(p.lse)[lse_index(p, seq.q_begin, b, h) + row] = -INFINITY;
            if (col < p.head_dim_v)
                *reinterpret_cast<uint4 *>(rows_of<T>(p.o, b, h, seq.q_begin + row) + col) = uint4{};
        }
    }
}

}  // namespace decoding
