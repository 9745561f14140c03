// FlashAttention backward on Hopper's tensor cores, fp16 and bf16 with fp32 sums: H100, H200 (sm_90a), head_dim to 128.
//
// A block of threads owns kBlockN keys of one key/value head and walks along the rows that see them, kBlockM at a time,
// of every query head that reads it (Dao, FlashAttention-2, 2023, Algorithm 2). Each consumer warpgroup has 64 of the
// keys. Scores are formed transposed, so that P and dS go from the accumulators of one product straight into the A
// operand of the next, and dK and dV stay in registers to the end. One step of a consumer:
//
//   S = K Qᵀ                     [64, kBlockM]
//   dP = V dOᵀ - delta           [64, kBlockM]: the accumulators begin with -delta
//   P = exp(scale · S - lse)     beside dP
//   dS = P ∘ dP                  also to shared memory
//   dQ += dS(before)ᵀ K          its part of the step before, over the keys of all consumers
//   dV += P dO    dK += dS Q     beside S of the next step
//
// dQ is one step late, so that no consumer waits for the dS of another one: the exponentials of one run beside the
// products of the other. All blocks of keys sum dQ in memory, see bwd_workspace_sm90.cuh.
//
// Read next: flash_bwd_wide_sm90.cu, the same for head_dim above 128.
#include "bwd_producer_sm90.cuh"
#include "dropout_transposed.cuh"
#include "score_mods.cuh"
#include "softmax.cuh"

namespace sm90 {

// A warpgroup: 64 keys. kMods: scores are changed by more than a factor, and there may be dropout too.
template <typename T, typename Shape, bool kDropout, bool kMods> struct BwdConsumer {
    static constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM, kStages = Shape::kStages;
    static constexpr int kNTiles = kBlockM / 8, kDTiles = kHeadDim / 8, kThreads = 128 * Shape::kConsumers;

    const BwdParams<Shape> &p;
    BwdSharedMemory<Shape> &shared;
    const Steps<Shape> &steps;
    const int consumer;
    const int warp_idx = warp_uniform(threadIdx.x / 32 % 4), lane_idx = thread_idx() % 32;
    const uint32_t ds_address = shared.sdS[0].address(  // of this lane
        lane_idx / 16 * 8 + lane_idx % 8, 64 * consumer + 16 * warp_idx + lane_idx / 8 % 2 * 8);
    // Registers are few: acc_s is that of dQ, too, and acc_dp becomes the operands P and dS.
    float acc_s[1][kNTiles][4], acc_dp[kNTiles][4], acc_dk[kDTiles][4], acc_dv[kDTiles][4];
    using DqFragment = float[Shape::kDqTiles][4];
    __device__ DqFragment &acc_dq() { return reinterpret_cast<DqFragment &>(acc_s); }

    __device__ Mask mask() const { return Mask(steps.seq, p); }
    // With 128 rows votes take a register too many. ptxas would then wait for each product before the next one.
    __device__ uint32_t uniform_consumer() const {
        return kBlockM == 128 ? warp_uniform(consumer) : vote<Shape::kConsumers>(consumer);
    }
    __device__ bool drops() const { return kDropout && (!kMods || p.dropout_seed); }

    __device__ void run() {
        for (auto &x : acc_dk) x[0] = x[1] = x[2] = x[3] = 0.f;
        for (auto &x : acc_dv) x[0] = x[1] = x[2] = x[3] = 0.f;
        const int num_steps = steps.count();
        if (num_steps > 0) {
            shared.keys.consumer_wait(0);
            clear_keys();
            step<true, false>(0);
            // If products were under way when the loop begins, ptxas would let none run beside anything.
            warpgroup_wait<0>(acc_dk, acc_dv, acc_dp);  // unobserved by the emulator: ptxas alone needs it
#pragma unroll 1
            for (int i = 1; i < num_steps; i++) {
                if (Shape::kDqParts > 1 || forms_dq(i - 1)) step<false, true>(i);
                else step<false, false>(i);
            }
            warpgroup_wait<0>(acc_dk, acc_dv, acc_dp);
            if (Shape::kDqParts > 1 || forms_dq(num_steps - 1)) {
                form_dq(num_steps - 1);
                warpgroup_wait<0>(acc_dq());
                add_dq(num_steps - 1);
            }
            barrier_sync(kStepsDone, kThreads + 32);  // dQ has been added, and sK has been read
        }
        if (steps.split_idx >= steps.splits) return;  // its sample has fewer
        steps.splits == 1 ? store() : store_split();
    }
    __device__ const StepAt &step_at(uint32_t i) const { return shared.at[i % (2 * kStages)]; }

    template <bool kIsFirst, bool kForms> __device__ void step(int i) {
        const uint32_t item = i, stage = warp_uniform(i) % kStages;
        shared.rows.consumer_wait(item);
        const StepAt &at = step_at(item);
        const bool is_full = at.is_full;
        if (!is_full) clear_rows(stage, at.m_block);
        if (kIsFirst && consumer > 0) barrier_sync(kLateStart, kThreads);
        const uint32_t c = uniform_consumer();
        warpgroup_arrive();
        multiply_abt<T>(acc_s[0], shared.sK[c], shared.sQ[stage]);
        if constexpr (!kIsFirst) {
            warpgroup_wait<1>(acc_dk, acc_dv, acc_dp);  // of the step before
            shared.rows.consumer_release(item - 1, lane_idx);
        }
        begin_dp(stage);
        warpgroup_arrive();
        multiply_abt<T>(acc_dp, shared.sV[c], shared.sdO[stage], !kDropout || kMods);
        const uint32_t kept = drops() ? kept_bits(at) : ~0u;
        if constexpr (kMods) {
            warpgroup_wait<0>(acc_s[0], acc_dp);
            change_scores(stage, at, kept);
        } else {
            warpgroup_wait<1>(acc_s[0]);
        }
        exponentiate(stage);
        if (!is_full) hide(at.m_block);
        if (kIsFirst && consumer == 0) barrier_sync(kLateStart, kThreads);
        if constexpr (!kMods) {
            warpgroup_wait<0>(acc_dp);
        }
        if (kDropout && !kMods) drop(stage, kept);
        form_ds(item, kept);
        if constexpr (kForms) form_dq(item - 1);
        if (kIsFirst) warpgroup_fence_operand(acc_dk), warpgroup_fence_operand(acc_dv);
        warpgroup_arrive();
        multiply_rows(acc_dv, operands(0), shared.sdO[stage]);
        multiply_rows(acc_dk, operands(1), shared.sQ[stage]);
        if constexpr (kForms) {
            warpgroup_wait<2>(acc_dq());
            add_dq(item - 1);
        }
    }

    // Keys that no row sees may hold NaN, and 0 · NaN is NaN. What lies beyond the tensor is 0 already.
    __device__ void clear_keys() {
        const int key0 = steps.tile.block * Shape::kBlockN, begin = mask().keys(0).begin - key0;
        const int end = steps.seq.keys_follow(p) ? steps.seq.seqlen_k - key0 : Shape::kBlockN;
        if (begin <= 0 && end >= Shape::kBlockN) return;
        for (int c = 0; c < Shape::kConsumers; c++)
            for (auto *tile : {&shared.sK[c], &shared.sV[c]}) clear_outside(*tile, begin - 64 * c, end - 64 * c);
        after_clear();
    }
    // The same of rows that see no key, or are those of the next sample.
    __device__ void clear_rows(int stage, int m_block) {
        const int row0 = m_block * kBlockM, begin = steps.first_row - row0, end = steps.seq.seqlen_q - row0;
        if (begin <= 0 && end >= kBlockM) return;
        clear_outside(shared.sQ[stage], begin, end), clear_outside(shared.sdO[stage], begin, end);
        after_clear();
    }

    __device__ void hide(int m_block) {
        mask().apply_transposed(acc_s, steps.blocks, m_block, key(), m_block * kBlockM + lane_idx % 4 * 2);
    }

    // This lane's first key in the sample, and its four numbers of the rows [16 kk, 16 kk + 16).
    __device__ int key() const {
        return steps.tile.block * Shape::kBlockN + 64 * consumer + 16 * warp_idx + lane_idx / 4;
    }
    __device__ float4 of_rows(const float (&x)[kBlockM], int kk) const {
        return *reinterpret_cast<const float4 *>(&x[16 * kk + lane_idx % 4 * 4]);
    }
    // Each score becomes f(score, number of its row).
    template <typename F> __device__ void for_rows(float (&acc)[kNTiles][4], const float (&of_row)[kBlockM], F f) {
#pragma unroll
        for (int kk = 0; kk < kBlockM / 16; kk++) {
            const float4 x = of_rows(of_row, kk);
            for (int e = 0; e < 4; e++) {
                acc[2 * kk][e] = f(acc[2 * kk][e], e % 2 ? x.y : x.x, 8 * kk + e);
                acc[2 * kk + 1][e] = f(acc[2 * kk + 1][e], e % 2 ? x.w : x.z, 8 * kk + 4 + e);
            }
        }
    }

    // acc_dp begins with -delta, unless dropout comes in between.
    __device__ void begin_dp(int stage) {
        if constexpr (!kDropout || kMods) {
            for_rows(acc_dp, shared.delta[stage], [&](float, float x, int) { return drops() ? 0.f : -x; });
            warpgroup_fence_operand(acc_dp);  // equal values get registers of their own
        }
    }
    // Which elements dropout keeps.
    __device__ uint32_t kept_bits(const StepAt &at) const {
        static_assert(!kDropout || kBlockM == 64);
        return kept_of_64_rows(Dropout(p, steps.tile.b, at.h), at.m_block * kBlockM + lane_idx % 4 * 2, key());
    }
    // acc_dp, which is dP, becomes dropout's dP - delta.
    __device__ void drop(int stage, uint32_t kept) {
        const float keep_scale = float(p.keep_scale);
        for_rows(acc_dp, shared.delta[stage], [&](float dp, float delta, int i) {
            return fmaf(dp, is_kept(kept, i / 4, i % 4) ? keep_scale : 0.f, -delta);
        });
    }
    // acc_s becomes scores, and acc_dp the derivative by factor · q·k.
    __device__ void change_scores(int stage, const StepAt &at, uint32_t kept) {
        if (drops()) drop(stage, kept);
        ScoreMods<T, ptx::tanh_approx> mods(p, p.factors, steps.seq.seqlen_q, steps.seq.seqlen_k, steps.tile.b, at.h);
        mods.bias = Bias{}, mods.slope = at.slope, mods.shift = steps.seq.seqlen_k - steps.seq.seqlen_q;
        mods.apply(transposed(score_tile(acc_s, key(), at.m_block * kBlockM + lane_idx % 4 * 2)),
                   [&](int i, int j) -> float & { return acc_dp[i / 2][j % 2 * 2 + i % 2]; });
    }
    // S becomes P.
    __device__ void exponentiate(int stage) {
        const float factor = p.score_factor;
        for_rows(acc_s[0], shared.lse_log2[stage],
                 [&](float s, float lse_log2, int) { return exp2_approx(-fabsf(s * factor - lse_log2)); });
    }

    // Operands for 16 rows: P and dS take turns in acc_dp.
    struct Operands {
        float (&acc)[kNTiles][4];
        int first;
        __device__ uint32_t (&operator[](int kk))[4] { return reinterpret_cast<uint32_t (&)[4]>(acc[2 * kk + first]); }
    };
    __device__ Operands operands(int first) { return {acc_dp, first}; }
    // P and dS as operands, and dS in shared memory, as [rows, keys].
    __device__ void form_ds(uint32_t i, uint32_t kept) {
#pragma unroll
        for (int kk = 0; kk < kBlockM / 16; kk++) {
            uint32_t P[4], dS[4];
            for (int j = 0; j < 4; j++) {
                const float(&s)[4] = acc_s[0][2 * kk + j / 2], (&dp)[4] = acc_dp[2 * kk + j / 2];
                const int n = 2 * kk + j / 2, e = j % 2 * 2;
                P[j] = pack<T>(is_kept(kept, n, e) ? s[e] : 0.f, is_kept(kept, n, e + 1) ? s[e + 1] : 0.f);
                dS[j] = pack<T>(s[e] * dp[e], s[e + 1] * dp[e + 1]);
            }
            for (int j = 0; j < 4; j++) operands(0)[kk][j] = P[j], operands(1)[kk][j] = dS[j];
        }
        shared.ds.producer_acquire(i);
        const uint32_t to = ds_address + i % 2 * sizeof(shared.sdS[0]);
#pragma unroll
        for (int kk = 0; kk < kBlockM / 16; kk++)  // 16 rows further the swizzle is the same
            stmatrix_trans(operands(1)[kk], to + 16 * kk * shared.sdS[0].kRowBytes);
        fence_proxy_async();
        __syncwarp();
        if (lane_idx == 0) mbarrier_arrive(shared.ds.full_barrier(i));
    }
    template <typename A>
    __device__ void multiply_rows(float (&acc)[kDTiles][4], A &&a, const SmemTile<kBlockM, kHeadDim> &b) {
#pragma unroll
        for (int kk = 0; kk < kBlockM / 16; kk++) wgmma<T>(acc, a[kk], b.rows_desc(kk));
        warpgroup_commit_batch();
    }

    __device__ bool forms_dq(int i) const { return i % Shape::kConsumers == consumer; }
    // This consumer's part of the dQ of step i is on its way.
    __device__ void form_dq(uint32_t i) {
        const uint32_t part = Shape::kDqParts > 1 ? 64 * vote<Shape::kConsumers>(consumer) : 0;
        const auto &sdS = shared.sdS[warp_uniform(i) % 2];
        shared.ds.consumer_wait(i);
        warpgroup_arrive();
#pragma unroll
        for (int kk = 0; kk < Shape::kBlockN / 16; kk++) {
            const auto &sK = shared.sK[kk / 4];
            if constexpr (Shape::kDqPart == DqPart::kTransposed)
                wgmma_atbt<T>(acc_dq(), sK.rows_desc(kk % 4, part), sdS.columns_desc(kk), kk > 0);
            else if constexpr (Shape::kDqPart == DqPart::kRows)
                wgmma_ab<T>(acc_dq(), sdS.columns_desc(kk, part), sK.rows_desc(kk % 4), kk > 0);
            else
                wgmma_ab<T>(acc_dq(), sdS.columns_desc(kk), sK.rows_desc(kk % 4, part), kk > 0);
        }
        warpgroup_commit_batch();
    }
    // To the sums in memory.
    __device__ void add_dq(uint32_t i) {
        shared.ds.consumer_release(i, lane_idx);
        if (!p.dq.data) return;
        const int tile = step_at(i).dq_tile, warp = (Shape::kDqParts > 1 ? 4 * consumer : 0) + warp_idx;
        float *sums = BwdWorkspace<Shape>::dq_sums(p, tile, warp);
        if (p.deterministic) shared.dq_turns.consumer_wait(i);
#pragma unroll
        for (int n = 0; n < Shape::kDqTiles; n++) red_add(sums + 128 * n, acc_dq()[n]);
        if (p.deterministic) {
            __syncwarp();  // unobserved by racecheck: it knows of no order in global memory
            if (lane_idx == 0) mbarrier_arrive(shared.dq_added[i % 2]);
        }
    }

    // dK and dV go through sK and sV. Each warp has its own part of them.
    __device__ void store() {
        const int key = 64 * consumer + 16 * warp_idx, key0 = steps.tile.block * Shape::kBlockN + key;
        auto store_keys = [&](float (&acc)[kDTiles][4], float scale, auto &to, const Tensor &x, int cols) {
#pragma unroll
            for (int d = 0; d < kDTiles; d += 2) {
                uint32_t packed[4];
                for (int j = 0; j < 4; j++) {
                    const bool is_key = key0 + lane_idx / 4 + j % 2 * 8 < steps.seq.seqlen_k;  // others: 0 · NaN
                    const float(&a)[4] = acc[d + j / 2];
                    packed[j] = is_key ? pack<T>(a[j % 2 * 2] * scale, a[j % 2 * 2 + 1] * scale) : 0;
                }
                stmatrix(packed, to.address(16 * warp_idx + lane_idx % 16, 8 * d + lane_idx / 16 * 8));
            }
            __syncwarp();
            auto *rows = rows_of<uint16_t>(x, steps.tile.b, steps.tile.h_k, steps.seq.k_begin + key0);
            store_some_rows(to, 16 * warp_idx, rows, x.row_stride, steps.seq.padded_k - key0, cols);
        };
        store_keys(acc_dk, p.dk_scale, shared.sK[consumer], p.dk, p.head_dim);
        store_keys(acc_dv, p.dv_scale, shared.sV[consumer], p.dv, p.head_dim_v);
    }
    // The sums of a split.
    __device__ void store_split() {
        const BwdWorkspace<Shape> workspace(p);
        const int64_t bh = int64_t(steps.tile.b) * p.nheads_k + steps.tile.h_k;
        float *dk = workspace.dkv_sums(p, steps.split_idx) + (bh * workspace.padded_keys + key()) * kHeadDim +
                    lane_idx % 4 * 2;
        float *dv = dk + workspace.dkv_floats;
#pragma unroll
        for (int d = 0; d < kDTiles; d++)
            for (int i = 0; i < 2; i++) {
                const int at = 8 * i * kHeadDim + 8 * d;
                *reinterpret_cast<float2 *>(dk + at) = {acc_dk[d][2 * i], acc_dk[d][2 * i + 1]};
                *reinterpret_cast<float2 *>(dv + at) = {acc_dv[d][2 * i], acc_dv[d][2 * i + 1]};
            }
    }
};

template <typename T, typename Shape, bool kDropout, bool kMods>
__global__ void __launch_bounds__(Shape::kNThreads, 1) flash_bwd(const __grid_constant__ BwdParams<Shape> p) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    __trap();
#else
    auto &shared = shared_memory<BwdSharedMemory<Shape>>();
    if (threadIdx.x == 32) shared.steps = Steps<Shape>(p);  // in other orders, ptxas serializes wgmma (C7511)
    else if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();
    const uint32_t warpgroup_idx = warp_uniform(threadIdx.x / 128);
    if (warpgroup_idx == 0) {
        warpgroup_reg_dealloc<Shape::kProducerRegisters>();
        if (threadIdx.x == 0) load_tiles<Shape>(p, shared, shared.steps);
        else if (threadIdx.x >= 32 && threadIdx.x < 64) load_numbers<Shape>(p, shared, shared.steps);
        else if (threadIdx.x % 32 == 0 && p.deterministic && p.dq.data) keep_turns<Shape>(p, shared, shared.steps);
    } else {
        warpgroup_reg_alloc<Shape::kConsumerRegisters>();
        BwdConsumer<T, Shape, kDropout, kMods>{p, shared, shared.steps, int(warpgroup_idx) - 1}.run();
    }
#endif
}

template <typename T, typename Shape> void launch_bwd(const AttnBackwardParams &p) {
    static_assert(sizeof(BwdSharedMemory<Shape>) <= 227 << 10);
    constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM;
    const BwdWorkspace<Shape> workspace(p);
    auto *stream = static_cast<cudaStream_t>(p.stream);
    if (p.dq.data) check_cuda(cudaMemsetAsync(p.workspace, 0, workspace.zeroed_bytes(p.deterministic), stream));
    simt::preprocess_backward(p);
    auto tma = [&](const char *name, const Tensor &x, int heads, int rows, int head_dim, int box_rows) {
        return make_tma_tensor<kHeadDim>(name, x, p.batch_size, heads, rows, head_dim, box_rows);
    };
    const ScoreFactors<float> factors(p);
    const Scores<> scores(p);
    const float score_factor =
        p.has_score_mods() ? factors.softmax_scale_log2 : scores.sign * scores.softmax_scale_log2;
    const float scale = scores.softmax_scale, dv_scale = p.dropout_seed ? float(p.keep_scale) : 1.f;
    const BwdParams<Shape> params{p,
                                  tma("q", p.q, p.nheads, p.seqlen_q, p.head_dim, kBlockM),
                                  tma("k", p.k, p.nheads_k, p.seqlen_k, p.head_dim, 64),
                                  tma("v", p.v, p.nheads_k, p.seqlen_k, p.head_dim_v, 64),
                                  tma("dout", p.dout, p.nheads, p.seqlen_q, p.head_dim_v, kBlockM),
                                  factors, score_factor, scale, dv_scale};
    auto *kernel = flash_bwd<T, Shape, false, false>;
    if constexpr (kBlockM == 64) {
        if (p.has_score_mods()) kernel = flash_bwd<T, Shape, true, true>;
        else if (p.dropout_seed) kernel = flash_bwd<T, Shape, true, false>;
    }
    launch_early(kernel, KeyTiles<Shape::kBlockN>::count(p) * workspace.max_splits, Shape::kNThreads,
                 sizeof(BwdSharedMemory<Shape>), p.stream, params);
    splits::launch_dkv<T>(p, workspace, scale, dv_scale);
    if (p.dq.data)
        launch_early(flash_bwd_dq<T, Shape>, workspace.tiles, 32 * Shape::kDqWarps, 2 * Shape::kDqFloats, p.stream, p,
                     scale, workspace.max_splits == 1 ? KeyTiles<Shape::kBlockN>(p).slots : 0);
}

// {kHeadDim, kConsumers, kBlockM, kStages}. With 64 rows there are registers for dropout and for changed scores. 80
// rows take fewer steps, but up to 2048 rows their padding costs more (journal). A packed batch has the same tiles
// whatever its length is: a sample's bits must not depend on it.
template <typename F> auto with_bwd_shape(const AttnBackwardParams &p, F f) {
    const bool is_plain = !p.dropout_seed && !p.has_score_mods();
    if (p.max_head_dim() <= 64)
        return is_plain ? f.template operator()<BwdShape<64, 2, 128, 2>>()
                        : f.template operator()<BwdShape<64, 2, 64, 4>>();
    return is_plain && !p.cu_seqlens_q && p.seqlen_q > 2048 ? f.template operator()<BwdShape<128, 2, 80, 2>>()
                                                            : f.template operator()<BwdShape<128, 2, 64, 2>>();
}

int64_t backward_workspace(const AttnBackwardParams &p) {
    if (p.max_head_dim() > 128) return 0;
    return with_bwd_shape(p, [&]<typename Shape> { return BwdWorkspace<Shape>(p).bytes(p.deterministic); });
}

void flash_backward(const AttnBackwardParams &p) {
    if (p.max_head_dim() > 128) return flash_backward_wide(p);
    with_bwd_shape(p, [&]<typename Shape> {
        if (p.dtype == DType::kFloat16) launch_bwd<__half, Shape>(p);
        else launch_bwd<__nv_bfloat16, Shape>(p);
    });
}

}  // namespace sm90
