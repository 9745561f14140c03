// FlashAttention backward on Hopper's tensor cores for head_dim above 128. Accumulators of dK and dV of 128 keys do not
// fit the registers, and fewer keys a block would make the sums of dQ in memory the bound. So there are two kernels, as
// in flash_bwd.cu: one owns keys and sums dK and dV, one owns rows and sums dQ. S and dP are formed twice, nothing is
// summed in memory, and every run gives the same bits.
//
// dkv: a block of threads owns 64 keys. Its two consumers share the work of a step of 64 rows:
//   consumer 0   S = K Qᵀ             P = exp(scale · S - lse)     dV += P dO
//   consumer 1   dP = V dOᵀ           dS = P ∘ (dP - delta)        dK += dS Q
// P goes from each thread of the first to one of the second, which has the same elements. While one forms P or dS, the
// other one multiplies. What dropout drops of P goes there with a negative sign.
//
// dq: a block of threads owns 128 rows, 64 for each consumer, and walks along the keys, 64 at a time:
//   S = Q Kᵀ    dP = dO Vᵀ    dS = exp(scale · S - lse) ∘ (dP - delta)    dQ += dS K beside S of the next keys
// It needs nothing of dkv, so its blocks begin where dkv has left a multiprocessor free.
//
// Read next: flash_dmma.cu, fp32 on the same GPUs.
#include "bwd_producer_sm90.cuh"
#include "dropout_transposed.cuh"

namespace sm90 {

template <int kHeadDim_> struct WideShape {
    static constexpr int kHeadDim = kHeadDim_, kDTiles = kHeadDim / 8;
    static constexpr int kBlock = 64, kNTiles = kBlock / 8;  // keys and rows of a step, and a consumer's of its own
    static constexpr int kDqBlockM = 128, kNThreads = 384;
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    using Tile = SmemTile<kBlock, kHeadDim>;
};

struct WideParams : AttnBackwardParams {
    TmaTensor q_tma, k_tma, v_tma, dout_tma;
    float score_factor, scale, keep_scale;
};

// A fragment of dK, dV or dQ goes through a tile of shared memory to 16 rows of x. is_zero[i]: of row i of this lane.
template <typename T, int kHeadDim>
__device__ void store_wide(float (&acc)[kHeadDim / 8][4], float scale, SmemTile<64, kHeadDim> &to,
                           const bool (&is_zero)[2], uint16_t *rows, int64_t row_stride, int count, int cols) {
    const int row0 = thread_idx() / 32 % 4 * 16, lane_idx = thread_idx() % 32;
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; d += 2) {
        uint32_t packed[4];
        for (int j = 0; j < 4; j++) {
            const float(&a)[4] = acc[d + j / 2];
            packed[j] = is_zero[j % 2] ? 0 : pack<T>(a[j % 2 * 2] * scale, a[j % 2 * 2 + 1] * scale);
        }
        stmatrix(packed, to.address(row0 + lane_idx % 16, 8 * d + lane_idx / 16 * 8));
    }
    __syncwarp();  // unobserved by the emulator: its stmatrix is one step of all lanes
    store_some_rows(to, row0, rows, row_stride, count, cols);
}

// The rows of two tiles outside of [begin, end) become 0. What no row or key sees may hold NaN, and 0 · NaN is NaN.
// What lies beyond the tensor is 0 already.
template <typename Tile> __device__ void clear_both(Tile &x, Tile &y, int begin, int end) {
    if (begin <= 0 && end >= 64) return;
    clear_outside(x, begin, end), clear_outside(y, begin, end);
    after_clear();
}
template <typename Tile>
__device__ void clear_keys(Tile &sK, Tile &sV, const WideParams &p, const Sequence &seq, int block) {
    const int key0 = block * 64, end = seq.keys_follow(p) ? seq.seqlen_k - key0 : 64;
    clear_both(sK, sV, Mask(seq, p).keys(0).begin - key0, end);
}

// dP - delta, after dropout.
template <bool kDropout> __device__ float subtract_delta(const WideParams &p, float dp, bool is_kept, float delta) {
    return kDropout ? fmaf(dp, is_kept ? p.keep_scale : 0.f, -delta) : dp - delta;
}

// The rows of 64 keys.
struct WideSteps {
    Tile tile;
    Sequence seq;
    BlockRange blocks;
    int first_row, num_steps;
    __device__ explicit WideSteps(const AttnBackwardParams &p)
        : tile(KeyTiles<64>::at(p, blockIdx.x)), seq(p, tile.b),
          blocks(Mask(seq, p).row_blocks<64, 64>(tile.block * 64)), first_row(Mask(seq, p).rows(0).begin),
          num_steps(p.nheads / p.nheads_k * max(0, blocks.end - blocks.begin)) {}
};

template <typename Shape> struct WideDkvShared {
    typename Shape::Tile sK, sV, sQ[2], sdO[2];
    float4 P[2][Shape::kNTiles][128];  // a fragment of each thread
    alignas(16) float lse_log2[2][64], delta[2][64];
    StepAt at[2];
    Ring<1> keys;
    Ring<2> rows, probabilities;
    WideSteps steps;

    __device__ void init_barriers() {
        keys.init(8), rows.init(8, 2), probabilities.init(4, 4);
        fence_mbarrier_init();
    }
};

template <typename Shape> __device__ void load_wide_tiles(const WideParams &p, WideDkvShared<Shape> &shared) {
    const auto &[tile, seq, blocks, first_row, num_steps] = shared.steps;
    if (num_steps == 0) return;
    const int key0 = seq.k_begin + tile.block * 64;
    mbarrier_arrive_expect_tx(shared.keys.full_barrier(0), sizeof(shared.sK) + sizeof(shared.sV));
    load_bytes(shared.sK, p.k_tma, shared.keys.full_barrier(0), key0, tile.h_k, tile.b);
    load_bytes(shared.sV, p.v_tma, shared.keys.full_barrier(0), key0, tile.h_k, tile.b);
    StepAt at{tile.h, blocks.begin};
#pragma unroll 1
    for (int i = 0; i < num_steps; i++, at.advance(blocks)) {
        shared.rows.producer_acquire(i);
        Barrier &full = shared.rows.full_barrier(i);
        mbarrier_arrive_expect_tx(full, 2 * sizeof(shared.sQ[0]));
        load_bytes(shared.sQ[i % 2], p.q_tma, full, seq.q_begin + at.m_block * 64, at.h, tile.b);
        load_bytes(shared.sdO[i % 2], p.dout_tma, full, seq.q_begin + at.m_block * 64, at.h, tile.b);
    }
}
template <typename Shape> __device__ void load_wide_numbers(const WideParams &p, WideDkvShared<Shape> &shared) {
    const auto &[tile, seq, blocks, first_row, num_steps] = shared.steps;
    const int lane_idx = threadIdx.x % 32;
    StepAt at{tile.h, blocks.begin};
#pragma unroll 1
    for (int i = 0; i < num_steps; i++, at.advance(blocks)) {
        const int64_t of_head = lse_index(p, seq, tile.b, at.h);
        float lse_log2[2], delta[2];
        for (int j = 0; j < 2; j++) {
            const int row = at.m_block * 64 + 32 * j + lane_idx;
            const bool is_seen = row >= first_row && row < seq.seqlen_q;
            lse_log2[j] = is_seen ? p.lse_log2[of_head + row] : INFINITY;
            delta[j] = is_seen ? static_cast<const float *>(p.delta)[of_head + row] : 0.f;
        }
        shared.rows.producer_acquire(i);
        for (int j = 0; j < 2; j++) {
            const int to = place_of_row(32 * j + lane_idx);
            shared.lse_log2[i % 2][to] = lse_log2[j], shared.delta[i % 2][to] = delta[j];
        }
        at.is_full = blocks.is_full(at.m_block);
        if (lane_idx == 0) shared.at[i % 2] = at;
        __syncwarp();
        if (lane_idx == 0) mbarrier_arrive(shared.rows.full_barrier(i));
    }
}

template <typename T, typename Shape, bool kDropout> struct WideDkvConsumer {
    static constexpr int kHeadDim = Shape::kHeadDim, kNTiles = Shape::kNTiles, kDTiles = Shape::kDTiles;
    const WideParams &p;
    WideDkvShared<Shape> &shared;
    const WideSteps &steps;
    const int consumer;
    const int lane_idx = thread_idx() % 32, idx = thread_idx() % 128;
    // acc is S or dP, then P or dS; acc_sum is dV or dK.
    float acc[1][kNTiles][4], acc_sum[kDTiles][4];
    uint32_t operand[kNTiles / 2][4];

    __device__ Mask mask() const { return Mask(steps.seq, p); }
    __device__ void run() {
        for (auto &x : acc_sum) x[0] = x[1] = x[2] = x[3] = 0.f;
        if (steps.num_steps > 0) {
            shared.keys.consumer_wait(0);
            clear_keys(shared.sK, shared.sV, p, steps.seq, steps.tile.block);
            for (int i = 0; i < steps.num_steps; i++) step(i);
            warpgroup_wait<0>(acc_sum, operand);
        }
        barrier_sync(kOneConsumer + consumer, 128);  // unobserved by the emulator: all warps have waited for S there
        const int key0 = steps.tile.block * 64 + idx / 32 * 16, first = key0 + lane_idx / 4;
        const bool is_zero[2] = {first >= steps.seq.seqlen_k, first + 8 >= steps.seq.seqlen_k};  // others: 0 · NaN
        const Tensor &x = consumer ? p.dk : p.dv;
        const float scale = consumer ? p.scale : kDropout ? p.keep_scale : 1.f;
        store_wide<T>(acc_sum, scale, consumer ? shared.sV : shared.sK, is_zero,
                      rows_of<uint16_t>(x, steps.tile.b, steps.tile.h_k, steps.seq.k_begin + key0), x.row_stride,
                      steps.seq.padded_k - key0, consumer ? p.head_dim : p.head_dim_v);
    }

    __device__ void step(uint32_t i) {
        const uint32_t stage = vote<2>(i % 2), c = vote<2>(consumer);
        const auto &rows = (c ? shared.sdO : shared.sQ)[stage], &others = (c ? shared.sQ : shared.sdO)[stage];
        shared.rows.consumer_wait(i);
        const StepAt &at = shared.at[stage];
        const bool is_full = at.is_full;
        if (!is_full) clear_rows(stage, at.m_block);
        warpgroup_arrive();
        multiply_abt<T>(acc[0], c ? shared.sV : shared.sK, rows);
        warpgroup_wait<1>(acc_sum, operand);  // of the step before
        if (i > 0) shared.rows.consumer_release(i - 1, lane_idx);
        const uint32_t kept = kDropout && consumer == 0 ? kept_bits(at) : ~0u;
        warpgroup_wait<0>(acc[0]);
        if (consumer == 0) form_P(i, at.m_block, is_full, kept);
        else form_ds(i);
#pragma unroll
        for (int j = 0; j < 2 * kNTiles; j++)
            operand[j / 4][j % 4] = pack<T>(acc[0][j / 2][j % 2 * 2], acc[0][j / 2][j % 2 * 2 + 1]);
        warpgroup_arrive();
        multiply_ab<T>(acc_sum, operand, others);
    }
    __device__ float4 of_rows(const float (&x)[64], int kk) const {
        return *reinterpret_cast<const float4 *>(&x[16 * kk + lane_idx % 4 * 4]);
    }
    __device__ int key() const { return steps.tile.block * 64 + idx / 32 * 16 + lane_idx / 4; }  // this lane's first
    __device__ uint32_t kept_bits(const StepAt &at) const {
        return kept_of_64_rows(Dropout(p, steps.tile.b, at.h), at.m_block * 64 + lane_idx % 4 * 2, key());
    }
    __device__ void form_P(uint32_t i, int m_block, bool is_full, uint32_t kept) {
        const float factor = p.score_factor;
#pragma unroll
        for (int kk = 0; kk < kNTiles / 2; kk++) {
            const float4 x = of_rows(shared.lse_log2[i % 2], kk);
            for (int e = 0; e < 8; e++) {
                float &s = acc[0][2 * kk + e / 4][e % 4];
                s = exp2_approx(-fabsf(s * factor - (e / 4 ? (e % 2 ? x.w : x.z) : (e % 2 ? x.y : x.x))));
            }
        }
        if (!is_full)
            mask().apply_transposed(acc, steps.blocks, m_block, key(), m_block * 64 + lane_idx % 4 * 2);
        shared.probabilities.producer_acquire(i);  // unobserved by the emulator: the ring of rows waits too
#pragma unroll
        for (int n = 0; n < kNTiles; n++) {
            float P[4];
            for (int e = 0; e < 4; e++) {
                float &s = acc[0][n][e];
                P[e] = is_kept(kept, n, e) ? s : -s, s = is_kept(kept, n, e) ? s : 0.f;
            }
            shared.P[i % 2][n][idx] = {P[0], P[1], P[2], P[3]};
        }
        __syncwarp();
        if (lane_idx == 0) mbarrier_arrive(shared.probabilities.full_barrier(i));
    }
    __device__ float form_ds(float P, float dp, float delta) const {
        return (kDropout ? fabsf(P) : P) * subtract_delta<kDropout>(p, dp, P >= 0.f, delta);
    }
    __device__ void form_ds(uint32_t i) {
        shared.probabilities.consumer_wait(i);
#pragma unroll
        for (int kk = 0; kk < kNTiles / 2; kk++) {
            const float4 x = of_rows(shared.delta[i % 2], kk);
            for (int n = 0; n < 2; n++) {
                const float4 P = shared.P[i % 2][2 * kk + n][idx];
                float(&dp)[4] = acc[0][2 * kk + n];
                const float even = n ? x.z : x.x, odd = n ? x.w : x.y;
                dp[0] = form_ds(P.x, dp[0], even), dp[1] = form_ds(P.y, dp[1], odd);
                dp[2] = form_ds(P.z, dp[2], even), dp[3] = form_ds(P.w, dp[3], odd);
            }
        }
        __syncwarp();  // unobserved by the emulator: the same
        shared.probabilities.consumer_release(i, lane_idx);
    }

    __device__ void clear_rows(int stage, int m_block) {
        const int row0 = m_block * 64;
        clear_both(shared.sQ[stage], shared.sdO[stage], steps.first_row - row0, steps.seq.seqlen_q - row0);
    }
};

template <typename T, typename Shape, bool kDropout>
__global__ void __launch_bounds__(Shape::kNThreads, 1) flash_bwd_wide_dkv(const __grid_constant__ WideParams p) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    __trap();
#else
    auto &shared = shared_memory<WideDkvShared<Shape>>();
    if (threadIdx.x == 0) shared.init_barriers();
    // The lengths are older than the previous kernel: preprocess_backward() launches that one plainly.
    if (threadIdx.x == 32) shared.steps = WideSteps(p);
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_begin();  // only now: flash_bwd_wide_dq reads what the previous kernel wrote, too
    const uint32_t warpgroup_idx = warp_uniform(threadIdx.x / 128);
    if (warpgroup_idx == 0) {
        warpgroup_reg_dealloc<Shape::kProducerRegisters>();
        if (threadIdx.x == 0) load_wide_tiles<Shape>(p, shared);
        else if (threadIdx.x / 32 == 1) load_wide_numbers<Shape>(p, shared);
    } else {
        warpgroup_reg_alloc<Shape::kConsumerRegisters>();
        WideDkvConsumer<T, Shape, kDropout>{p, shared, shared.steps, int(warpgroup_idx) - 1}.run();
    }
#endif
}

// Of 128 rows of a head.
template <typename Shape> struct WideDqShared {
    typename Shape::Tile sQ[2], sdO[2];  // of each consumer; sQ then has dQ
    typename Shape::Tile sK[2], sV;
    Ring<1> q, v;
    Ring<2> k;
    Tile tile;
    Sequence seq;
    BlockRange blocks;  // of keys

    __device__ void init_barriers() {
        q.init(8), v.init(8), k.init(8);
        fence_mbarrier_init();
    }
    __device__ void find_blocks(const AttnBackwardParams &p) {
        tile = RowTiles<Shape::kDqBlockM>::at(p, blockIdx.x), seq = Sequence(p, tile.b);
        blocks = Mask(seq, p).key_blocks<Shape::kDqBlockM, 64>(tile.block * Shape::kDqBlockM);
    }
};

template <typename Shape> __device__ void load_wide_keys(const WideParams &p, WideDqShared<Shape> &shared) {
    const Tile &tile = shared.tile;
    if (shared.blocks.begin >= shared.blocks.end) return;
    const int row0 = shared.seq.q_begin + tile.block * Shape::kDqBlockM;
    mbarrier_arrive_expect_tx(shared.q.full_barrier(0), sizeof(shared.sQ) + sizeof(shared.sdO));
    for (int c = 0; c < 2; c++) {
        load_bytes(shared.sQ[c], p.q_tma, shared.q.full_barrier(0), row0 + 64 * c, tile.h, tile.b);
        load_bytes(shared.sdO[c], p.dout_tma, shared.q.full_barrier(0), row0 + 64 * c, tile.h, tile.b);
    }
#pragma unroll 1
    for (int i = 0; i < shared.blocks.end - shared.blocks.begin; i++) {
        const int key = shared.seq.k_begin + (shared.blocks.end - 1 - i) * 64;
        shared.k.producer_acquire(i);
        load_tile(shared.sK[i % 2], p.k_tma, shared.k.full_barrier(i), key, tile.h_k, tile.b);
        shared.v.producer_acquire(i);
        load_tile(shared.sV, p.v_tma, shared.v.full_barrier(i), key, tile.h_k, tile.b);
    }
}

template <typename T, typename Shape, bool kDropout> struct WideDqConsumer {
    static constexpr int kHeadDim = Shape::kHeadDim, kNTiles = Shape::kNTiles, kDTiles = Shape::kDTiles;
    const WideParams &p;
    WideDqShared<Shape> &shared;
    const int consumer;
    const int lane_idx = thread_idx() % 32, row0 = shared.tile.block * Shape::kDqBlockM + 64 * consumer +
                                                  thread_idx() / 32 % 4 * 16;  // of the warp
    float lse_log2[2], delta[2];  // of this lane's rows
    float acc_s[1][kNTiles][4], acc_dp[kNTiles][4], acc_dq[kDTiles][4];
    uint32_t dS[kNTiles / 2][4];

    __device__ void run() {
        const int64_t of_head = lse_index(p, shared.seq, shared.tile.b, shared.tile.h);
        const int num_blocks = shared.blocks.end - shared.blocks.begin;
        for (int i = 0; i < 2; i++) {
            const int row = row0 + lane_idx / 4 + 8 * i;
            const bool is_valid = row < shared.seq.seqlen_q;
            lse_log2[i] = is_valid ? p.lse_log2[of_head + row] : INFINITY;
            delta[i] = is_valid ? static_cast<const float *>(p.delta)[of_head + row] : 0.f;
        }
        for (auto &x : acc_dq) x[0] = x[1] = x[2] = x[3] = 0.f;
        if (num_blocks > 0) {
            shared.q.consumer_wait(0);
            for (int i = 0; i < num_blocks; i++) step(i, shared.blocks.end - 1 - i);
            warpgroup_wait<0>(acc_dq, dS);
        }
        barrier_sync(kOneConsumer + consumer, 128);  // unobserved by the emulator: the same
        const bool is_zero[2] = {lse_log2[0] == INFINITY, lse_log2[1] == INFINITY};  // the sum may be NaN
        store_wide<T>(acc_dq, p.scale, shared.sQ[consumer], is_zero,
                      rows_of<uint16_t>(p.dq, shared.tile.b, shared.tile.h, shared.seq.q_begin + row0), p.dq.row_stride,
                      shared.seq.padded_q - row0, p.head_dim);
    }

    __device__ void step(uint32_t i, int n_block) {
        const uint32_t stage = vote<2>(i % 2), c = vote<2>(consumer);
        const bool is_full = shared.blocks.is_full(n_block);
        const float factor = p.score_factor;
        shared.k.consumer_wait(i);
        shared.v.consumer_wait(i);
        if (!is_full) clear_keys(shared.sK[stage], shared.sV, p, shared.seq, n_block);
        warpgroup_arrive();
        multiply_abt<T>(acc_s[0], shared.sQ[c], shared.sK[stage]);
        multiply_abt<T>(acc_dp, shared.sdO[c], shared.sV);
        warpgroup_wait<2>(acc_dq, dS);  // of the step before
        if (i > 0) shared.k.consumer_release(i - 1, lane_idx);
        const uint32_t kept = kDropout ? kept_bits(n_block) : ~0u;
        warpgroup_wait<1>(acc_s[0]);
#pragma unroll
        for (int j = 0; j < 4 * kNTiles; j++) {
            float &s = acc_s[0][j / 4][j % 4];
            s = exp2_approx(-fabsf(s * factor - lse_log2[j / 2 % 2]));
        }
        if (!is_full)
            Mask(shared.seq, p).apply(acc_s, shared.blocks, n_block, row0 + lane_idx / 4,
                                      n_block * 64 + lane_idx % 4 * 2, 0.f);
        warpgroup_wait<0>(acc_dp);
        shared.v.consumer_release(i, lane_idx);
#pragma unroll
        for (int j = 0; j < 2 * kNTiles; j++) {
            const float(&s)[4] = acc_s[0][j / 2], (&dp)[4] = acc_dp[j / 2];
            auto ds = [&](int e) {
                return s[e] * subtract_delta<kDropout>(p, dp[e], kept >> (j + e % 2 * 16) & 1, delta[j % 2]);
            };
            dS[j / 4][j % 4] = pack<T>(ds(j % 2 * 2), ds(j % 2 * 2 + 1));
        }
        warpgroup_arrive();
        multiply_ab<T>(acc_dq, dS, shared.sK[stage]);
    }
    // Which elements dropout keeps: bits j and j + 16 are for those of register j of dS.
    __device__ uint32_t kept_bits(int n_block) const {
        const Dropout dropout(p, shared.tile.b, shared.tile.h);
        uint32_t bits = 0;
#pragma unroll 2  // a loop: straight code would move behind the products, to where the bits are needed
        for (int kk = 0; kk < kNTiles / 2; kk++) {
            uint32_t kept[4];
            dropout.keep_bits(kept, row0 + lane_idx / 4, n_block * 64 + 16 * kk + lane_idx % 4 * 2);
            for (uint32_t pair : kept) bits = bits >> 1 | (pair & 0x80008000);
        }
        return bits;
    }
};

template <typename T, typename Shape, bool kDropout>
__global__ void __launch_bounds__(Shape::kNThreads, 1) flash_bwd_wide_dq(const __grid_constant__ WideParams p) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    __trap();
#else
    auto &shared = shared_memory<WideDqShared<Shape>>();
    if (threadIdx.x == 0) shared.init_barriers();
    if (threadIdx.x == 32) shared.find_blocks(p);
    __syncthreads();
    const uint32_t warpgroup_idx = warp_uniform(threadIdx.x / 128);
    if (warpgroup_idx == 0) {
        warpgroup_reg_dealloc<Shape::kProducerRegisters>();
        if (threadIdx.x == 0) load_wide_keys<Shape>(p, shared);
        else if (threadIdx.x == 32 && blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();  // for the next one
    } else {
        warpgroup_reg_alloc<Shape::kConsumerRegisters>();
        WideDqConsumer<T, Shape, kDropout>{p, shared, int(warpgroup_idx) - 1}.run();
    }
#endif
}

template <typename T, typename Shape> void launch_bwd_wide(const AttnBackwardParams &p) {
    static_assert(sizeof(WideDkvShared<Shape>) <= 227 << 10 && sizeof(WideDqShared<Shape>) <= 227 << 10);
    auto tma = [&](const char *name, const Tensor &x, int heads, int rows, int head_dim) {
        return make_tma_tensor<Shape::kHeadDim>(name, x, p.batch_size, heads, rows, head_dim, 64);
    };
    const Scores<> scores(p);
    const WideParams params{p,
                            tma("q", p.q, p.nheads, p.seqlen_q, p.head_dim),
                            tma("k", p.k, p.nheads_k, p.seqlen_k, p.head_dim),
                            tma("v", p.v, p.nheads_k, p.seqlen_k, p.head_dim_v),
                            tma("dout", p.dout, p.nheads, p.seqlen_q, p.head_dim_v),
                            scores.sign * scores.softmax_scale_log2,
                            scores.softmax_scale, float(p.keep_scale)};
    auto *dkv = p.dropout_seed ? flash_bwd_wide_dkv<T, Shape, true> : flash_bwd_wide_dkv<T, Shape, false>;
    auto *dq = p.dropout_seed ? flash_bwd_wide_dq<T, Shape, true> : flash_bwd_wide_dq<T, Shape, false>;
    simt::preprocess_backward(p);
    if (p.dk.data)
        launch_early(dkv, KeyTiles<64>::count(p), Shape::kNThreads, sizeof(WideDkvShared<Shape>), p.stream, params);
    auto *launch_dq = p.dk.data ? launch_early<WideParams> : launch<WideParams>;
    if (p.dq.data)
        launch_dq(dq, RowTiles<Shape::kDqBlockM>::count(p), Shape::kNThreads, sizeof(WideDqShared<Shape>), p.stream,
                  params);
}

void flash_backward_wide(const AttnBackwardParams &p) {
    auto run = [&]<typename T> {
        p.max_head_dim() <= 192 ? launch_bwd_wide<T, WideShape<192>>(p) : launch_bwd_wide<T, WideShape<256>>(p);
    };
    p.dtype == DType::kFloat16 ? run.template operator()<__half>() : run.template operator()<__nv_bfloat16>();
}

}  // namespace sm90
