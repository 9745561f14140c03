// Attention of a few query tokens to long caches ("decode") on tensor cores, fp16 and bf16: Ampere (sm_80) and newer.
//
// Every key is read once and meets few rows, so the time is that of memory. The query heads of a key head and the
// tokens of a sample are packed into one tile, so that a key meets all of them at once: packed row r is token r / group
// of query head h_k · group + r % group. Each warp streams keys of its own, without a barrier of the block:
//   cp.async       K(0) V(0)    K(1) V(1)    K(2) V(2)    ...                  two steps ahead, in a ring of three
//   tensor cores                             S = Q K(0)ᵀ, P, O += P V(0)       ...
// At the end of a chunk the warps' results are merged through shared memory, in a fixed order.
//
// The keys of a sample are cut into chunks by its own lengths alone, so its bits do not depend on its batch. Every
// block finds its share of all chunks from the lengths on the device (decode_share.cuh). So the host plans nothing, and
// a CUDA graph may change the lengths. The result of a chunk goes to a workspace. The block that stores the last
// chunk of a tile merges all of them, in their order.
//
// Read next: ptx_sm90.cuh, Hopper's instructions.
#include "decode_share.cuh"
#include "device.h"
#include "score_mods.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "tiles_sm80.cuh"

namespace sm80 {

using namespace device;

// The result of a warp for 16 rows, one column for each lane.
template <typename Shape> struct WarpResult {
    float acc_o[Shape::kDTiles * 4][32];
    float row_max[2][32], row_sum[2][32];
};

template <typename Shape> struct Ring {
    alignas(128) uint16_t sK[Shape::kStages][Shape::kBlockN][Shape::kHeadDim];
    uint16_t sV[Shape::kStages][Shape::kBlockN][Shape::kHeadDim];
};

// A block's shared memory: a ring for every warp, then a result for every second one.
template <typename Shape> struct DecodeMemory {
    Share share;
    int64_t costs[Shape::kMaxWarps];
    bool is_last;
    Ring<Shape> rings[1];

    __device__ WarpResult<Shape> *results() {
        return reinterpret_cast<WarpResult<Shape> *>(rings + blockDim.x / 32);
    }
    static size_t bytes(int num_warps) {
        return sizeof(DecodeMemory) + (num_warps - 1) * sizeof(Ring<Shape>) +
               (num_warps + 1) / 2 * sizeof(WarpResult<Shape>);
    }
};

// The keys of a warp, on their way from the cache to its ring. They run ahead of what the warp computes, also from one
// item to the next.
template <typename T, typename Shape> struct KeyStream {
    Item<Shape> item;
    Ring<Shape> &ring;
    int key;

    __device__ KeyStream(const DecodeParams &p, const Room &room, const Share &share, Ring<Shape> &ring)
        : item(p, room, share), ring(ring), key(item.is_valid() ? item.warp_begin() : 0) {}

    // Starts the copies of the next kBlockN keys and values to a stage, if there are any. They are one group of copies.
    __device__ void load(int stage) {
        while (item.is_valid() && key >= item.key_end) {
            item.next();
            if (item.is_valid()) key = item.warp_begin();
        }
        if (item.is_valid()) copy(stage), key += item.key_step();
        cp_async_commit();
    }

  private:
    __device__ void copy(int stage) {
        using Swizzle = sm80::Swizzle<Shape::kHeadDim>;
        constexpr int kVecs = Shape::kHeadDim / 8, kRowStep = 32 / kVecs;
        const DecodeParams &p = item.p;
        const Cut<Shape> &cut = item.cut;
        const int lane_idx = threadIdx.x % 32, b = item.b, vec = lane_idx % kVecs;
        // Lane l finds where key + l lies.
        int row = cut.seq.k_begin + min(key + lane_idx % Shape::kBlockN, cut.end - 1), sequence = b;
        if (p.page_table) {
            const int page = row / p.page_size;
            sequence = p.page_table[b * p.page_table_stride + page], row -= page * p.page_size;
        } else if (p.cache_batch_idx) sequence = p.cache_batch_idx[b];
        sequence = max(0, min(sequence, p.num_sequences - 1));
        const T *gK = rows_of<const T>(p.k, 0, item.h_k, 0) + 8 * vec;
        const T *gV = rows_of<const T>(p.v, 0, item.h_k, 0) + 8 * vec;
        const uint32_t k_address = shared_address(ring.sK[stage]), v_address = shared_address(ring.sV[stage]);
#pragma unroll 4
        for (int r0 = 0; r0 < Shape::kBlockN; r0 += kRowStep) {
            const int r = r0 + lane_idx / kVecs;
            const int64_t of_sequence = __shfl_sync(~0u, sequence, r), of_row = __shfl_sync(~0u, row, r);
            const bool inside = key + r >= cut.begin && key + r < cut.end;
            const uint32_t offset = Swizzle::offset(r, vec);
            cp_async(k_address + offset, gK + of_sequence * p.k.batch_stride + of_row * p.k.row_stride,
                     inside && 8 * vec < p.head_dim);
            cp_async(v_address + offset, gV + of_sequence * p.v.batch_stride + of_row * p.v.row_stride,
                     inside && 8 * vec < p.head_dim_v);
        }
    }
};

// Row `row` of an item's tile of packed rows.
struct PackedRow {
    int token, head;
    template <typename Shape> __device__ PackedRow(const Item<Shape> &item, int row) {
        const int group = item.p.nheads / item.p.nheads_k;
        row += item.tile * Shape::kBlockM;
        token = row / group, head = item.h_k * group + row % group;
    }
};

// Where this lane's rows of Q begin; nullptr for one beyond the sample.
template <typename T, typename Shape>
__device__ void find_q(const T *(&gQ)[Shape::kRows], const Item<Shape> &item) {
    for (int i = 0; i < Shape::kRows; i++) {
        const PackedRow row(item, threadIdx.x % 32 / 4 + 8 * i);
        gQ[i] = row.token < item.cut.seq.seqlen_q
                    ? rows_of<const T>(item.p.q, item.b, row.head, item.cut.seq.q_begin + row.token) : nullptr;
    }
}

// q[m]: fragments of the columns [16·kk, 16·kk + 16), 0 beyond the sample and beyond head_dim.
template <typename T, int kMTiles>
__device__ void load_q(uint32_t (&q)[kMTiles][4], const T *const (&gQ)[2 * kMTiles], int kk, int head_dim) {
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; i++)
        for (int j = 0; j < 2; j++) {
            const int col = 16 * kk + 8 * j + threadIdx.x % 4 * 2;
            q[i / 2][2 * j + i % 2] =
                gQ[i] && col < head_dim ? *reinterpret_cast<const uint32_t *>(gQ[i] + col) : 0;
        }
}

// q·k become scores, see scores.cuh and score_mods.cuh. Every row has a slope of its own.
template <typename Shape>
__device__ void change_scores(float (&acc_s)[Shape::kMTiles][Shape::kBlockN / 8][4], const Scores<> &scores,
                              const ScoreFactors<float> &factors, const Item<Shape> &item, int key) {
    const DecodeParams &p = item.p;
    const int lane_idx = threadIdx.x % 32;
    auto for_scores = [&](int i, auto change) {
#pragma unroll
        for (int n = 0; n < Shape::kBlockN / 8; n++)
            for (int e = 0; e < 2; e++) change(acc_s[i / 2][n][i % 2 * 2 + e], key + 8 * n + lane_idx % 4 * 2 + e);
    };
#pragma unroll
    for (int i = 0; i < Shape::kRows; i++) {
        if (factors.has_softcap) for_scores(i, [&](float &s, int) { s = tanh_approx(s * factors.of_qk); });
        else if (!scores.is_raw) for_scores(i, [&](float &s, int) { s = scores.score(s); });
        if (!p.alibi_slopes) continue;
        const PackedRow row(item, lane_idx / 4 + 8 * i);
        if (row.token >= item.cut.seq.seqlen_q) continue;
        const float slope = p.alibi_slopes[item.b * p.alibi_batch_stride + row.head] * factors.per_unit;
        const int diagonal = row.token + item.cut.seq.seqlen_k - item.cut.seq.seqlen_q;
        for_scores(i, [&](float &s, int key) { s -= slope * fabsf(float(diagonal - key)); });
    }
}

// Scores of keys that a row does not see become -inf.
template <typename Shape>
__device__ void hide_scores(float (&acc_s)[Shape::kMTiles][Shape::kBlockN / 8][4], const Item<Shape> &item, int key) {
    const int lane_idx = threadIdx.x % 32;
    const Mask mask(item.cut.seq.seqlen_q, item.cut.seq.seqlen_k, item.p);
#pragma unroll
    for (int i = 0; i < Shape::kRows; i++) {
        const Range seen = mask.keys(PackedRow(item, lane_idx / 4 + 8 * i).token);
#pragma unroll
        for (int n = 0; n < Shape::kBlockN / 8; n++)
            for (int e = 0; e < 2; e++)
                if (!seen.contains(key + 8 * n + lane_idx % 4 * 2 + e)) acc_s[i / 2][n][i % 2 * 2 + e] = -INFINITY;
    }
}

// The results of two parts of the keys of a row become one.
__device__ inline void merge_rows(float &row_max, float &row_sum, float &alpha, float &beta, float other_max,
                                  float other_sum) {
    const float new_max = fmaxf(row_max, other_max);
    alpha = exp2_approx(row_max - new_max), beta = exp2_approx(other_max - new_max);
    row_max = new_max, row_sum = row_sum * alpha + other_sum * beta;
}

// The results of all warps are merged into warp 0's, in pairs that are always the same. Only 16 rows are merged at a
// time. So both shapes of a head_dim have room for as many warps, and a sample has the same bits by both.
template <typename Shape>
__device__ void merge_warps(float (&acc_o)[Shape::kMTiles][Shape::kDTiles][4], Softmax<Shape::kMTiles> &softmax,
                            WarpResult<Shape> *results) {
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < Shape::kMTiles; m++)
        for (int half = blockDim.x / 64; half > 0; half /= 2) {
            float *row_max = &softmax.row_max[2 * m], *row_sum = &softmax.row_sum[2 * m];
            if (warp_idx >= half && warp_idx < 2 * half) {
                WarpResult<Shape> &to = results[warp_idx - half];
#pragma unroll
                for (int i = 0; i < Shape::kDTiles * 4; i++) to.acc_o[i][lane_idx] = acc_o[m][i / 4][i % 4];
                for (int i = 0; i < 2; i++) to.row_max[i][lane_idx] = row_max[i], to.row_sum[i][lane_idx] = row_sum[i];
            }
            __syncthreads();  // the results are written
            if (warp_idx < half) {
                const WarpResult<Shape> &from = results[warp_idx];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float alpha, beta;
                    merge_rows(row_max[i], row_sum[i], alpha, beta, from.row_max[i][lane_idx],
                               from.row_sum[i][lane_idx]);
#pragma unroll
                    for (int d = 0; d < Shape::kDTiles; d++)
                        for (int e = 2 * i; e < 2 * i + 2; e++)
                            acc_o[m][d][e] = acc_o[m][d][e] * alpha + from.acc_o[4 * d + e][lane_idx] * beta;
                }
            }
            __syncthreads();  // the results have been read
        }
}

// What acc_o is multiplied by to become a row of the output, and its lse.
struct RowEnd {
    bool has_keys;
    float scale, lse;

    __device__ RowEnd(float row_max, float row_sum, const float *sink) : has_keys(row_sum != 0.f) {
        float factor = 1.f;
        if (sink) {
            float sink_log2 = *sink * 1.4426950408889634f;
            if (sink_log2 > FLT_MAX) sink_log2 = FLT_MAX;
            const float new_max = fmaxf(row_max, sink_log2);
            factor = exp2_approx(row_max - new_max);
            row_sum = row_sum * factor + exp2_approx(sink_log2 - new_max), row_max = new_max;
        }
        scale = factor / row_sum;
        lse = row_sum == 0.f ? -INFINITY : float(row_max * 0.6931471805599453 + logf(row_sum));
    }
};

// A row's output and lse: columns [col, col + kCount) of this thread.
template <typename T, int kCount, typename Shape>
__device__ void store_row(const Item<Shape> &item, const PackedRow &row, const RowEnd &end, const float (&o)[kCount],
                          int col) {
    const DecodeParams &p = item.p;
    if (col == 0) static_cast<float *>(p.lse)[lse_index(p, item.cut.seq, item.b, row.head) + row.token] = end.lse;
    if (col >= p.head_dim_v) return;
    T *gO = rows_of<T>(p.o, item.b, row.head, item.cut.seq.q_begin + row.token) + col;
#pragma unroll
    for (int d = 0; d < kCount; d += 2)
        reinterpret_cast<uint32_t *>(gO)[d / 2] = end.has_keys ? pack<T>(o[d] * end.scale, o[d + 1] * end.scale) : 0u;
}

// The results of a tile's chunks: [num_chunks, room.rows, kPitch].
template <typename Shape> __device__ float *chunk_results(const Item<Shape> &item) {
    const int64_t heads = int64_t(item.b) * item.p.nheads_k + item.h_k;
    const int64_t chunks = heads * item.room.chunks + item.tile * item.cut.num_chunks;
    return static_cast<float *>(item.p.workspace) + chunks * item.room.rows * Shape::kPitch;
}

// Whether this block is the last one of those that store the chunks of the item's tile. Then it can read all of them.
template <typename Shape>
__device__ bool arrive_last(const Item<Shape> &item, DecodeMemory<Shape> &shared) {
    __syncthreads();  // the result of this block is stored
    if (threadIdx.x == 0) {
        int *counter = item.p.counters +
                       (int64_t(item.b) * item.p.nheads_k + item.h_k) * item.room.tiles + item.tile;
        __threadfence();
        shared.is_last = atomicAdd(counter, 1) == item.cut.num_chunks - 1;
        if (shared.is_last) __threadfence();  // what other blocks stored is read after this
    }
    __syncthreads();
    return shared.is_last;
}

// The chunks of a tile become its output, in their order: four columns of a row at a time.
template <typename T, typename Shape> __device__ void merge_chunks(const Item<Shape> &item) {
    constexpr int kVecs = Shape::kHeadDim / 4;
    const int64_t chunk_stride = int64_t(item.room.rows) * Shape::kPitch;
    for (int i = threadIdx.x; i < item.valid_rows() * kVecs; i += blockDim.x) {
        const float *from = chunk_results(item) + i / kVecs * Shape::kPitch;
        float row_max = -FLT_MAX, row_sum = 0.f, o[4] = {};
        for (int c = 0; c < item.cut.num_chunks; c++)
            row_max = fmaxf(row_max, from[c * chunk_stride + Shape::kHeadDim]);
        for (int c = 0; c < item.cut.num_chunks; c++, from += chunk_stride) {
            const float weight = exp2_approx(from[Shape::kHeadDim] - row_max);
            const float4 x = *reinterpret_cast<const float4 *>(from + i % kVecs * 4);
            row_sum += from[Shape::kHeadDim + 1] * weight;
            o[0] += x.x * weight, o[1] += x.y * weight, o[2] += x.z * weight, o[3] += x.w * weight;
        }
        const PackedRow row(item, i / kVecs);
        store_row<T>(item, row, RowEnd(row_max, row_sum, sink_of<float>(item.p, row.head)), o, i % kVecs * 4);
    }
}

// Warp 0 stores what the block has of an item: the output, or the result of a chunk.
template <typename T, typename Shape>
__device__ void store_item(const Item<Shape> &item, const float (&acc_o)[Shape::kMTiles][Shape::kDTiles][4],
                           const Softmax<Shape::kMTiles> &softmax) {
    const int lane_idx = threadIdx.x % 32, col0 = lane_idx % 4 * 2;
    float *to = nullptr;
    if (item.cut.num_chunks > 1) to = chunk_results(item) + int64_t(item.chunk) * item.room.rows * Shape::kPitch;
#pragma unroll
    for (int i = 0; i < Shape::kRows; i++) {
        const int r = lane_idx / 4 + 8 * i;
        if (r >= item.valid_rows()) continue;
        auto for_pairs = [&](auto store) {
#pragma unroll
            for (int d = 0; d < Shape::kDTiles; d++)
                store(float2{acc_o[i / 2][d][i % 2 * 2], acc_o[i / 2][d][i % 2 * 2 + 1]}, 8 * d + col0);
        };
        if (to) {
            float *row = to + r * Shape::kPitch;
            for_pairs([&](float2 o, int col) { *reinterpret_cast<float2 *>(row + col) = o; });
            if (col0 == 0)
                *reinterpret_cast<float2 *>(row + Shape::kHeadDim) = {softmax.row_max[i], softmax.row_sum[i]};
        } else {
            const PackedRow row(item, r);
            const RowEnd end(softmax.row_max[i], softmax.row_sum[i], sink_of<float>(item.p, row.head));
            for_pairs([&](float2 o, int col) { store_row<T, 2>(item, row, end, {o.x, o.y}, col); });
        }
    }
}

// Rows that are not a sample's get 0 and -inf.
template <typename T> __device__ void store_padding(const DecodeParams &p) {
    const int warp_idx = threadIdx.x / 32, col = threadIdx.x % 32 * 8;
    for (int b = blockIdx.x; b < p.batch_size; b += gridDim.x) {
        const Sequence seq(p, b);
        const int64_t count = int64_t(seq.padded_q - seq.seqlen_q) * p.nheads;
        for (int64_t i = warp_idx; i < count; i += blockDim.x / 32) {
            const int row = seq.seqlen_q + int(i / p.nheads), h = int(i % p.nheads);
            if (col == 0) static_cast<float *>(p.lse)[lse_index(p, seq, b, h) + row] = -INFINITY;
            if (col < p.head_dim_v)
                *reinterpret_cast<uint4 *>(rows_of<T>(p.o, b, h, seq.q_begin + row) + col) = uint4{};
        }
    }
}

template <typename T, typename Shape>
__global__ void __launch_bounds__(32 * Shape::kMaxWarps, 1)
    decode(const __grid_constant__ DecodeParams p, const __grid_constant__ Room room) {
#if __CUDA_ARCH__ < 800  // of a build for several GPUs, the part for those that have no such instructions
    __trap();
#else
    constexpr int kHeadDim = Shape::kHeadDim, kBlockN = Shape::kBlockN, kMTiles = Shape::kMTiles;
    using Swizzle = sm80::Swizzle<kHeadDim>;
    DecodeMemory<Shape> &shared = shared_memory<DecodeMemory<Shape>>();
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    store_padding<T>(p);
    find_share<Shape>(p, room, shared.share, shared.costs);

    Ring<Shape> &ring = shared.rings[warp_idx];
    KeyStream<T, Shape> keys(p, room, shared.share, ring);
    for (int i = 0; i + 1 < Shape::kStages; i++) keys.load(i);
    const Scores<> scores(p);
    const ScoreFactors<float> factors(p);
    const uint32_t k_offset = shared_address(ring.sK) + Swizzle::across(lane_idx);
    const uint32_t v_offset = shared_address(ring.sV) + Swizzle::down(lane_idx);
    int stage = 0;
    for (Item<Shape> item(p, room, shared.share); item.is_valid(); item.next()) {
        const T *gQ[Shape::kRows];
        find_q<T>(gQ, item);
        uint32_t q[Shape::kKeepsQ ? kHeadDim / 16 : 1][kMTiles][4];
        if constexpr (Shape::kKeepsQ)
#pragma unroll
            for (int kk = 0; kk < kHeadDim / 16; kk++) load_q<T, kMTiles>(q[kk], gQ, kk, p.head_dim);
        float acc_o[kMTiles][Shape::kDTiles][4] = {};
        Softmax<kMTiles> softmax(factors.softmax_scale_log2);
        for (int key = item.warp_begin(); key < item.key_end; key += item.key_step()) {
            cp_async_wait<Shape::kStages - 2>();
            // The keys of all lanes have arrived, and the stage that is loaded next has been read.
            __syncwarp();  // unobserved by the emulator: the lanes of a warp meet at its products as well
            keys.load(stage == 0 ? Shape::kStages - 1 : stage - 1);  // the one before this
            float acc_s[kMTiles][kBlockN / 8][4] = {};
            const int stage_bytes = stage * int(sizeof(ring.sK[0]));
#pragma unroll
            for (int kk = 0; kk < kHeadDim / 16; kk++) {
                auto &a = q[Shape::kKeepsQ ? kk : 0];
                if constexpr (!Shape::kKeepsQ) load_q<T, kMTiles>(a, gQ, kk, p.head_dim);
#pragma unroll
                for (int n = 0; n < kBlockN / 8; n += 2) {
                    uint32_t b[4];
                    ldmatrix(b, Swizzle::move(k_offset, 8 * n, kk) + stage_bytes);
                    for (int m = 0; m < kMTiles; m++) {
                        mma<T>(acc_s[m][n], a[m], b[0], b[1]);
                        mma<T>(acc_s[m][n + 1], a[m], b[2], b[3]);
                    }
                }
            }
            change_scores<Shape>(acc_s, scores, factors, item, key);
            if (!item.all_rows_see(key)) hide_scores<Shape>(acc_s, item, key);
            float alpha[Shape::kRows];
            if (softmax.update_row_max(acc_s, alpha)) softmax.rescale(acc_o, alpha);
#pragma unroll
            for (int kk = 0; kk < kBlockN / 16; kk++) {
                uint32_t P[kMTiles][4];
                for (int m = 0; m < kMTiles; m++) softmax.template probabilities<T>(P[m], acc_s[m], m, kk);
                multiply_ab<T, kHeadDim>(acc_o, P, v_offset, stage_bytes + kk * 16 * Swizzle::kRowBytes);
            }
            stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
        }
        for (float &sum : softmax.row_sum) sum = quad_reduce(sum, [](float x, float y) { return x + y; });
        merge_warps<Shape>(acc_o, softmax, shared.results());
        if (warp_idx == 0) store_item<T>(item, acc_o, softmax);
        if (item.cut.num_chunks > 1 && arrive_last(item, shared)) merge_chunks<T>(item);
    }
#endif
}

template <typename T, typename Shape> void launch_decode(const DecodeParams &p) {
    int num_warps = Shape::kMaxWarps;
    while (DecodeMemory<Shape>::bytes(num_warps) > max_shared_memory()) num_warps /= 2;
    const int64_t blocks = p.batch_size && p.nheads && p.seqlen_q ? num_sms() : 0;
    launch(decode<T, Shape>, blocks, 32 * num_warps, DecodeMemory<Shape>::bytes(num_warps), p.stream, p,
           Room(p, Shape::kBlockM));
}

// run<Shape>() for the shape of p. A tile of 32 rows serves what has more than 16 and a head_dim up to 128: beyond,
// acc_o would not fit the registers. A warp loads 8 KB at a time, 16 KB from head_dim 129 on.
template <typename Run> auto with_decode_shape(const DecodeParams &p, Run run) {
    const int head_dim = p.max_head_dim();
    const bool is_wide = int64_t(p.nheads / p.nheads_k) * p.max_seqlen_q > 16;
    if (head_dim <= 64)
        return is_wide ? run.template operator()<DecodeShape<64, 32, 2>>()
                       : run.template operator()<DecodeShape<64, 32, 1>>();
    if (head_dim <= 128)
        return is_wide ? run.template operator()<DecodeShape<128, 16, 2>>()
                       : run.template operator()<DecodeShape<128, 16, 1>>();
    return run.template operator()<DecodeShape<256, 16, 1>>();
}

int64_t decode_workspace(const DecodeParams &p) {
    return with_decode_shape(p, [&]<typename Shape>() {
        const Room room(p, Shape::kBlockM);
        return room.chunks <= 1 ? 0
                                : p.batch_size * p.nheads_k * room.chunks * room.rows * int64_t(4 * Shape::kPitch);
    });
}

int64_t num_decode_counters(const DecodeParams &p) {
    return with_decode_shape(p, [&]<typename Shape>() {
        const Room room(p, Shape::kBlockM);
        return room.chunks <= 1 ? 0 : p.batch_size * p.nheads_k * room.tiles;
    });
}

void flash_decode(const DecodeParams &p) {
    with_decode_shape(p, [&]<typename Shape>() {
        p.dtype == DType::kFloat16 ? launch_decode<__half, Shape>(p) : launch_decode<__nv_bfloat16, Shape>(p);
    });
}

}  // namespace sm80
