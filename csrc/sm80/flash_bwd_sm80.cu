// FlashAttention backward on tensor cores, fp16 and bf16 with fp32 sums: Ampere (sm_80) and every newer GPU.
// A block of threads owns kBlockN keys and walks along the rows of all query heads that see them, kBlockM at a time
// (Dao, FlashAttention-2, 2023, Algorithm 2). Scores are transposed and a warp owns whole keys: P and dS go from
// accumulators straight into A operands, and dK and dV stay in registers:
//   acc_s = K Qᵀ                 [kWarpN, kBlockM]
//   P = exp(scale · acc_s - lse)
//   acc_dp = V dOᵀ
//   acc_dv += P dO
//   dS = P ∘ (acc_dp - delta)    also to sdS, where all warps can read it
//   acc_dk += dS Q
//   acc_dq = dSᵀ K               the one product across warps; all blocks of keys sum it in memory, in fp32
// Two stages copy Q and dO beside the row block before; one stage takes less memory, and a third barrier. dq_accum has
// the order of acc_dq's registers: a warp adds 512 neighbouring bytes.
#include "mods/dropout_transposed.cuh"
#include "sm80/bwd_dq.cuh"

namespace sm80 {

template <typename Shape> struct BwdSharedMemory {
    struct Stage {
        alignas(128) uint16_t sQ[Shape::kBlockM][Shape::kHeadDim], sdO[Shape::kBlockM][Shape::kHeadDim];
    };
    alignas(128) uint16_t sK[Shape::kBlockN][Shape::kHeadDim], sV[Shape::kBlockN][Shape::kHeadDim];  // then dK, dV
    Stage stages[Shape::kStages];
    union {
        alignas(128) uint16_t sdS[Shape::kDimSplit > 1 ? 2 : 1][Shape::kBlockN][Shape::kBlockM];  // [1] is sP
        int ticket;  // before the first row block
    };
    float lse_log2[Shape::kStages][Shape::kBlockM], delta[Shape::kStages][Shape::kBlockM];
};

// dP becomes dropout's dP - delta. Returns kept elements, eight bits an operand.
template <int kMTiles, int kNTiles>
__device__ uint32_t drop(float (&acc_dp)[kMTiles][kNTiles][4], const float *delta, const Dropout &dropout,
                         float keep_scale, int row, int key) {
    uint32_t all_kept = 0;
#pragma unroll
    for (int kk = 0; kk < kNTiles / 2; kk++)
#pragma unroll
        for (int m = 0; m < kMTiles; m++) {
            const uint32_t kept = kept_transposed(dropout, row + 16 * kk, key + 16 * m);
            for (int i = 0; i < 2; i++) {
                const int n = 2 * kk + i;
                const float2 x = *reinterpret_cast<const float2 *>(&delta[8 * n]);
                for (int e = 0; e < 4; e++) {
                    float &dp = acc_dp[m][n][e];
                    dp = (kept >> bit_transposed(i, e) & 1 ? dp * keep_scale : 0.f) - (e % 2 ? x.y : x.x);
                }
            }
            all_kept |= kept << 4 * (m * (kNTiles / 2) + kk);
        }
    return all_kept;
}

// kMods: changed scores, perhaps with dropout.
template <typename T, typename Shape, bool kDropout, bool kMods> struct Backward {
    static constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN;
    static constexpr int kWarpN = Shape::kWarpN, kSub = Shape::kSub, kDimSplit = Shape::kDimSplit;
    static constexpr int kMTiles = kWarpN / 16, kDTiles = kHeadDim / kDimSplit / 8, kNTiles = kSub / 8;
    using Swizzle = sm80::Swizzle<kHeadDim>;
    using SwizzleS = sm80::Swizzle<kBlockM>;
    using Fragment = float[kMTiles][kNTiles][4];  // [kWarpN keys, kSub rows]
    // Bytes from sK to sV, sQ to sdO, sdS to sP.
    static constexpr int kToV = 2 * kBlockN * kHeadDim, kToDO = 2 * kBlockM * kHeadDim, kToP = 2 * kBlockN * kBlockM;

    const AttnBackwardParams &p;
    BwdSharedMemory<Shape> &shared;
    const Tile tile;
    const Sequence &seq;
    // Shuffles keep these in uniform registers: no others are left.
    const int q_begin = uniform(seq.q_begin), seqlen_q = uniform(seq.seqlen_q), seqlen_k = uniform(seq.seqlen_k);
    const int first_row = uniform(Mask(seq, p).rows(0).begin);  // that sees a key
    const int first_tile = uniform(RowTiles<kBlockM>(p).first_tile(tile.b, p.nheads));
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    const int r = lane_idx / 4, c = lane_idx % 4 * 2;     // keys r, r + 8 of 16, rows c, c + 1 of 8
    const int key0 = warp_idx / kDimSplit * kWarpN;
    const int part = warp_idx % kDimSplit, dim0 = part * kDTiles;  // its rows, and dK's columns by 8
    float acc_dk[kMTiles][kDTiles][4] = {}, acc_dv[kMTiles][kDTiles][4] = {};

    __device__ static int uniform(int x) { return __shfl_sync(~0u, x, 0); }
    __device__ Mask mask() const { return Mask(seqlen_q, seqlen_k, p); }

    // Rows outside of [begin, end), counted from `from`, become 0: unseen ones may hold NaN.
    template <int kRows>
    __device__ void load(uint16_t (&to)[kRows][kHeadDim], const T *from, int64_t row_stride, int begin, int end,
                         int cols) {
        const int row = thread_idx() / Swizzle::kVecs, vec = thread_idx() % Swizzle::kVecs;
        from += row * row_stride + vec * 8;
        load_tile<kRows, kHeadDim, Shape::kNThreads>(shared_address(to) + Swizzle::offset(row, vec), from, row_stride,
                                                     end - row, cols - vec * 8, begin - row);
    }
    __device__ void load_keys() {
        const int key = tile.block * kBlockN, end = seq.seqlen_k - key, begin = Mask(seq, p).keys(0).begin - key;
        load(shared.sK, rows_of<const T>(p.k, tile.b, tile.h_k, seq.k_begin + key), p.k.row_stride, begin, end,
             p.head_dim);
        load(shared.sV, rows_of<const T>(p.v, tile.b, tile.h_k, seq.k_begin + key), p.v.row_stride, begin, end,
             p.head_dim_v);
    }
    __device__ void load_rows(int stage, int h, int m_block) {
        const int row0 = m_block * kBlockM, begin = first_row - row0, end = seqlen_q - row0;
        load(shared.stages[stage].sQ, rows_of<const T>(p.q, tile.b, h, q_begin + row0), p.q.row_stride, begin, end,
             p.head_dim);
        load(shared.stages[stage].sdO, rows_of<const T>(p.dout, tile.b, h, q_begin + row0), p.dout.row_stride, begin,
             end, p.head_dim_v);
        const int i = thread_idx();
        if (i < kBlockM) {
            const int64_t row = lse_index(p, q_begin, tile.b, h) + row0 + i;
            cp_async_4(&shared.lse_log2[stage][i], p.lse_log2 + row, i >= begin && i < end);
            cp_async_4(&shared.delta[stage][i], static_cast<const float *>(p.delta) + row, i >= begin && i < end);
        }
        cp_async_commit();
    }

    __device__ bool drops() const { return kDropout && (!kMods || p.dropout_seed); }

    __device__ void add_own_rows(int stage, int h, int m_block, bool is_full, int row0) {
        const uint32_t k_address = shared_address(shared.sK[key0]) + Swizzle::down(lane_idx);
        const uint32_t q_across = shared_address(shared.stages[stage].sQ) + Swizzle::across(lane_idx);
        Fragment acc_s = {}, acc_dp;  // acc_dp begins with -delta, unless dropout follows
#pragma unroll
        for (int n = 0; n < kNTiles; n++) {
            const float2 delta = *reinterpret_cast<const float2 *>(&shared.delta[stage][row0 + 8 * n + c]);
            for (int m = 0; m < kMTiles; m++)
                for (int e = 0; e < 4; e++) acc_dp[m][n][e] = drops() ? 0.f : -(e % 2 ? delta.y : delta.x);
        }
        multiply_abt<T, kHeadDim>(acc_s, k_address, q_across, 0, row0 * Swizzle::kRowBytes);
        multiply_abt<T, kHeadDim>(acc_dp, k_address, q_across, kToV, row0 * Swizzle::kRowBytes + kToDO);
        const int key = tile.block * kBlockN + key0 + r, row = m_block * kBlockM + row0 + c;  // this lane's first
        const uint32_t kept = drops() ? drop(acc_dp, &shared.delta[stage][row0 + c], Dropout(p, tile.b, h),
                                             float(p.keep_scale), row, key) : ~0u;
        const auto scores = scores_of(h);
        if constexpr (kMods)
            scores.apply(transposed(score_tile(acc_s, key, row)),
                         [&](int i, int j) -> float & { return acc_dp[j / 2][i / 2][j % 2 * 2 + i % 2]; });
#pragma unroll
        for (int n = 0; n < kNTiles; n++) {
            const float2 lse = *reinterpret_cast<const float2 *>(&shared.lse_log2[stage][row0 + 8 * n + c]);
            for (int m = 0; m < kMTiles; m++)
                for (int e = 0; e < 4; e++)
                    acc_s[m][n][e] = exp2_approx(scores.probability_log2(acc_s[m][n][e], e % 2 ? lse.y : lse.x));
        }
        if (kMods && p.block_mask.rows) {
            const HeadMask block_mask(p.block_mask, tile.b, h);
            for (int m = 0; m < kMTiles; m++) {
                const uint32_t word = block_mask.word_of_16<true>(key - r + 16 * m, row - c, lane_idx);
                hide_unseen(acc_s[m], 0, word >> (row - c) % Unit::kSize / 4, 0.f);
            }
        }
        if (!is_full) [[unlikely]]
            Mask::hide(acc_s, 0.f, [&, mask = mask()](int i) {
                const Range seen = mask.rows(key + i);
                return Range{seen.begin - row, seen.end - row};
            });
        if (drops())  // dS needs dropped P: a negative sign marks it
#pragma unroll
            for (int i = 0; i < 4 * kMTiles * kNTiles; i++) {
                const int m = i / (4 * kNTiles), n = i / 4 % kNTiles, operand = m * (kSub / 16) + n / 2;
                float &s = acc_s[m][n][i % 4];
                s = kept >> (4 * operand + bit_transposed(n % 2, i % 4)) & 1 ? s : -s;
            }
        multiply_own_rows(acc_s, acc_dp, stage, row0);
    }

    __device__ auto scores_of(const int &h) const {
        if constexpr (kMods) return ScoreMods<T, ptx::tanh_approx>(p, seqlen_q, seqlen_k, tile.b, h);
        else return Scores<>(p);
    }

    __device__ void multiply_own_rows(const Fragment &acc_s, const Fragment &acc_dp, int stage, int row0) {
        const uint32_t q_down = q_address(stage);
        const uint32_t ds_write = shared_address(shared.sdS) + SwizzleS::offset(key0 + r, 0) + 2 * c;
#pragma unroll
        for (int kk = 0; kk < kSub / 16; kk++) {
            uint32_t P[kMTiles][4], dS[kMTiles][4];
            for (int m = 0; m < kMTiles; m++)
                for (int j = 0; j < 4; j++) {
                    const int n = 2 * kk + j / 2, e = j % 2 * 2;
                    const float x = acc_s[m][n][e], y = acc_s[m][n][e + 1];
                    P[m][j] = kDropout ? pack<T>(x < 0.f ? 0.f : x, y < 0.f ? 0.f : y) : pack<T>(x, y);
                    dS[m][j] = pack<T>(fabsf(x) * acc_dp[m][n][e], fabsf(y) * acc_dp[m][n][e + 1]);
                    const uint32_t at = SwizzleS::move(ds_write, 16 * m + j % 2 * 8, 0) ^ (row0 / 8 + n) * 16;
                    store_shared(at, dS[m][j]);
                    if (kDimSplit > 1) store_shared(at + kToP, P[m][j]);
                }
            multiply_ab<T, kHeadDim>(acc_dv, P, q_down, (row0 + 16 * kk) * Swizzle::kRowBytes + kToDO);
            multiply_ab<T, kHeadDim>(acc_dk, dS, q_down, (row0 + 16 * kk) * Swizzle::kRowBytes);
        }
    }

    __device__ void add_other_rows(int stage) {  // from warps that share the keys
        const uint32_t q_down = q_address(stage), ds_down = shared_address(shared.sdS) + SwizzleS::down(lane_idx);
#pragma unroll
        for (int other = 1; other < kDimSplit; other++)
#pragma unroll
            for (int kk = 0; kk < kSub / 16; kk++) {
                const int row0 = (part + other) % kDimSplit * kSub + 16 * kk;
                uint32_t P[kMTiles][4], dS[kMTiles][4];
                for (int m = 0; m < kMTiles; m++) {
                    ldmatrix(P[m], SwizzleS::move(ds_down + kToP, key0 + 16 * m, row0 / 16));
                    ldmatrix(dS[m], SwizzleS::move(ds_down, key0 + 16 * m, row0 / 16));
                }
                multiply_ab<T, kHeadDim>(acc_dv, P, q_down, row0 * Swizzle::kRowBytes + kToDO);
                multiply_ab<T, kHeadDim>(acc_dk, dS, q_down, row0 * Swizzle::kRowBytes);
            }
    }

    __device__ void add_dq(int h, int m_block) {  // a part and turns for each warp
        const uint32_t ds_across = shared_address(shared.sdS) + SwizzleS::across(lane_idx);
        const uint32_t k_down = shared_address(shared.sK) + Swizzle::down(lane_idx);
        const int row0 = warp_idx / Shape::kDqSplit * 32, n0 = warp_idx % Shape::kDqSplit * Shape::kDqTiles;
        float acc_dq[2][Shape::kDqTiles][4] = {};
#pragma unroll
        for (int kk = 0; kk < kBlockN / 16; kk++) {
            uint32_t dS[2][4];
            for (int m = 0; m < 2; m++) ldmatrix_trans(dS[m], SwizzleS::move(ds_across, 16 * kk, row0 / 16 + m));
            multiply_ab<T, kHeadDim>(acc_dq, dS, k_down, 16 * kk * Swizzle::kRowBytes, n0);
        }
        const BwdWorkspace<Shape> workspace(p);
        const int row_tile = first_tile + h * workspace.row_tiles.slots + m_block;
        int *dq_semaphore = nullptr;
        int turn = 0;
        if (p.deterministic) {
            turn = dq_turn<Shape>(p, mask(), tile, m_block);
            dq_semaphore = workspace.dq_semaphore(p, row_tile, warp_idx);
            if (lane_idx == 0)
                while (load_acquire(dq_semaphore) != turn) {}
            __syncwarp();  // unobserved by racecheck: it knows of no order in global memory
        }
        float *dq_accum = workspace.dq_accum(p, row_tile, warp_idx, lane_idx);
#pragma unroll
        for (int j = 0; j < 2 * Shape::kDqTiles; j++) red_add(dq_accum + 128 * j, acc_dq[j % 2][j / 2]);
        if (p.deterministic) {
            __syncwarp();  // unobserved by racecheck: it knows of no order in global memory
            if (lane_idx == 0) store_release(dq_semaphore, turn + 1);
        }
    }

    __device__ void store() {  // dK and dV go through sK and sV, a part for each warp
        const Sequence seq(p, tile.b);  // again: no register keeps it
        const int key = tile.block * kBlockN;
        auto is_zero = [&](int i) { return key + i >= seq.seqlen_k; };  // may be NaN
        auto store_keys = [&](const auto &acc, float scale, auto &sX, const Tensor &x, int cols) {
            store_tile<T>(acc, scale, sX, key0, dim0, rows_of<T>(x, tile.b, tile.h_k, seq.k_begin + key), x.row_stride,
                          min(kBlockN, seq.padded_k - key), cols, is_zero);
        };
        store_keys(acc_dk, Scores<>(p).softmax_scale, shared.sK, p.dk, p.head_dim);
        store_keys(acc_dv, drops() ? float(p.keep_scale) : 1.f, shared.sV, p.dv, p.head_dim_v);
    }

    __device__ void store_split(int split_idx) {
        const BwdWorkspace<Shape> workspace(p);
#pragma unroll
        for (int m = 0; m < kMTiles; m++)
            workspace.store_split(workspace.dkv_accum(p, split_idx, tile, key0 + 16 * m + r) + 8 * dim0 + c, acc_dk[m],
                                  acc_dv[m]);
    }

    __device__ uint32_t q_address(int stage) const {  // this warp's columns; dO lies kToDO further
        return Swizzle::move(shared_address(shared.stages[stage].sQ) + Swizzle::down(lane_idx), 0, dim0 / 2);
    }
};

// kSplit is a constant because no register is left.
template <typename T, typename Shape, bool kDropout, bool kSplit, bool kMods>
__global__ void __launch_bounds__(Shape::kNThreads, Shape::kBlocksPerSM)
    flash_bwd(const __grid_constant__ AttnBackwardParams p) {
#if __CUDA_ARCH__ < 800
    __trap();
#else
    constexpr int kBlockM = Shape::kBlockM, kStages = Shape::kStages;
    auto &shared = shared_memory<BwdSharedMemory<Shape>>();
    int block_idx = blockIdx.x;
    if (p.deterministic && p.dq.data) {
        // Blocks are numbered as they start: none waits for one that cannot start.
        if (threadIdx.x == 0) shared.ticket = atomicAdd(BwdWorkspace<Shape>(p).ticket(p), 1);
        __syncthreads();  // unobserved by racecheck: without it a block may wait for ever
        block_idx = shared.ticket;
    }
    const BwdWorkspace<Shape> workspace(p);
    const int max_splits = kSplit ? workspace.max_splits : 1, split_idx = block_idx % max_splits;
    const Tile tile = KeyTiles<Shape::kBlockN>::at(p, block_idx / max_splits);
    const Sequence seq(p, tile.b);
    const int splits = kSplit ? workspace.splits_of(p, seq) : 1;
    if (split_idx >= splits) return;
    Backward<T, Shape, kDropout, kMods> backward{p, shared, tile, seq};
    const BlockRange blocks = Mask(seq, p).row_blocks<kBlockM, Shape::kBlockN>(tile.block * Shape::kBlockN);
    const int group = p.nheads / p.nheads_k, h_begin = tile.h + group * split_idx / splits;
    const int h_end = blocks.begin < blocks.end ? tile.h + group * (split_idx + 1) / splits : 0;
    if (h_begin < h_end) backward.load_keys(), backward.load_rows(0, h_begin, blocks.begin);

    for (int h = h_begin, m_block = blocks.begin, stage = 0; h < h_end; stage ^= kStages - 1) {
        cp_async_wait<0>();
        __syncthreads();  // the stage has arrived; sdS, sP and the other have been read
        const bool is_last = m_block + 1 == blocks.end;
        auto load_next = [&] {
            if (h + is_last < h_end)
                backward.load_rows(stage ^ (kStages - 1), h + is_last, is_last ? blocks.begin : m_block + 1);
        };
        const bool is_full = blocks.is_full(m_block);
        const bool is_hidden = kMods && p.block_mask.rows && !p.deterministic &&  // turns count hidden blocks, too
                               HeadMask(p.block_mask, tile.b, h).template hides<kBlockM, Shape::kBlockN>(
                                   m_block * kBlockM, tile.block * Shape::kBlockN);
        if (kStages == 2) load_next();
#pragma unroll 1
        for (int row0 = backward.part * Shape::kSub; !is_hidden && row0 < kBlockM;
             row0 += Shape::kSub * Shape::kDimSplit)
            backward.add_own_rows(stage, h, m_block, is_full, row0);
        __syncthreads();  // dS and P are there
        if (!is_hidden) backward.add_other_rows(stage);
        if (p.dq.data && !is_hidden) backward.add_dq(h, m_block);
        if (kStages == 1) {
            __syncthreads();  // the stage has been read
            load_next();
        }
        h += is_last, m_block = is_last ? blocks.begin : m_block + 1;
    }
    __syncthreads();  // sK has been read
    if (splits == 1) backward.store();
    else backward.store_split(split_idx);
#endif
}

template <typename T, typename Shape> void launch_bwd(const AttnBackwardParams &p) {
    const BwdWorkspace<Shape> workspace(p);
    constexpr int kSharedBytes = sizeof(BwdSharedMemory<Shape>), kPerSM = 164 << 10;  // sm_80; a block takes 1 KB more
    static_assert(Shape::kBlocksPerSM * (kSharedBytes + 1024) <= kPerSM);
    simt::preprocess_backward(p, ZeroBytes{p.dq.data ? workspace.zeros_end(p.deterministic) : 0});
    const bool has_dropout = p.dropout_seed, is_split = workspace.max_splits > 1;
    auto *kernel =
        p.has_score_mods() || p.block_mask.rows ? flash_bwd<T, Shape, true, true, true>
        : is_split ? (has_dropout ? flash_bwd<T, Shape, true, true, false> : flash_bwd<T, Shape, false, true, false>)
                   : (has_dropout ? flash_bwd<T, Shape, true, false, false> : flash_bwd<T, Shape, false, false, false>);
    launch(kernel, KeyTiles<Shape::kBlockN>::count(p) * workspace.max_splits, Shape::kNThreads, kSharedBytes,
           p.stream, p);
    launch_dkv<T>(p, workspace, Scores<>(p).softmax_scale, has_dropout ? float(p.keep_scale) : 1.f);
    if (p.dq.data)
        launch(flash_bwd_dq<T, Shape>, workspace.tiles, Shape::kNThreads, 2 * Shape::kBlockM * Shape::kHeadDim,
               p.stream, p);
}

using BwdShape128Narrow = BwdShape<128, 32, 64, 4, 1, 2, 1>;  // for the 99 KB of sm_86, sm_89 and sm_120
using BwdShape256Narrow = BwdShape<256, 32, 32, 4, 2, 1, 1>;
static_assert(sizeof(BwdSharedMemory<BwdShape128Narrow>) <= 99 << 10 &&
              sizeof(BwdSharedMemory<BwdShape256Narrow>) <= 99 << 10);

// {kHeadDim, kBlockM, kBlockN, kNWarps, kDimSplit, kStages, kBlocksPerSM}
template <typename F> auto with_shape(const AttnBackwardParams &p, F f) {
    const bool narrow = max_shared_memory() < 160 << 10;
    // 32 keys a warp: each load of Q and dO feeds two products.
    const int head_dim = p.max_head_dim();
    if (head_dim <= 64) return f.template operator()<BwdShape<64, 64, 128, 4, 1, 2, 2>>();
    if (head_dim <= 96) return f.template operator()<BwdShape<96, 64, 64, 4, 1, 2, 2>>();
    // Two warps have 32 keys, a half of dK and dV each: 128 of 255 registers. 128 keys halve what is added to memory.
    if (head_dim <= 128)
        return narrow ? f.template operator()<BwdShape128Narrow>()
                      : f.template operator()<BwdShape<128, 64, 128, 8, 2, 2, 1>>();
    return narrow ? f.template operator()<BwdShape256Narrow>()
                  : f.template operator()<BwdShape<256, 32, 64, 8, 2, 2, 1>>();
}

int64_t backward_workspace(const AttnBackwardParams &p) {
    return with_shape(p, [&]<typename Shape> { return BwdWorkspace<Shape>(p).bytes(p.deterministic); });
}

void flash_backward(const AttnBackwardParams &p) {
    with_shape(p, [&]<typename Shape> {
        if (p.dtype == DType::kFloat16) launch_bwd<__half, Shape>(p);
        else launch_bwd<__nv_bfloat16, Shape>(p);
    });
    if (p.dbias.data) simt::bias_backward(p);
}

}  // namespace sm80
