// FlashAttention backward on Hopper's tensor cores, fp16 and bf16 with fp32 sums: H100, H200 (sm_90a), head_dim to 128.
//
// A block of threads takes one tile after the other, kBlockN keys of one key/value head. It walks along the rows that
// see them, kBlockM at a time, of every query head that reads it (Dao, FlashAttention-2, 2023, Algorithm 2). Each
// consumer warpgroup has 64 of the keys. Scores are formed transposed, so that P and dS go from the accumulators of one
// product straight into the A operand of the next, and dK and dV stay in registers to the end of a tile. One step of a
// consumer:
//
//   S = K Qᵀ                     [64, kBlockM]
//   dP = V dOᵀ - delta           [64, kBlockM]: the accumulators begin with -delta
//   P = exp(scale · S - lse)     beside dP
//   dS = P ∘ dP                  also to shared memory
//   dQ += dS(before)ᵀ K          its part of the step before, over the keys of all consumers
//   dV += P dO    dK += dS Q     beside S of the next step
//
// dQ is one step late, so that no consumer waits for the dS of another one: the exponentials of one run beside the
// products of the other. That of a tile's last step is formed in the next tile, or at once in a deterministic pass. All
// tiles sum dQ in memory, see sm90/bwd/workspace.cuh. K, Q and dO of the next tile arrive while the last steps run, and
// V, too, where there is room for two.
#include "common/softmax.cuh"
#include "mods/dropout_transposed.cuh"
#include "mods/score_mods.cuh"
#include "sm90/bwd/launch.cuh"

namespace sm90 {

// A warpgroup: 64 keys. kMods: scores are changed by more than a factor, and there may be dropout too.
template <typename T, typename Shape, bool kDropout, bool kMods> struct BwdConsumer {
    static constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM, kStages = Shape::kStages;
    static constexpr int kValueStages = Shape::kValueStages;
    static constexpr int kNTiles = kBlockM / 8, kDTiles = kHeadDim / 8;

    const BwdParams<Shape> &p;
    BwdSharedMemory<Shape> &shared;
    const int consumer;
    const int warp_idx = warp_uniform(threadIdx.x / 32 % 4), lane_idx = thread_idx() % 32;
    const uint32_t ds_address = shared.sdS[0].address(  // of this lane
        lane_idx / 16 * 8 + lane_idx % 8, 64 * consumer + 16 * warp_idx + lane_idx / 8 % 2 * 8);
    // Registers are few: acc_s is that of dQ, too, and acc_dp becomes the operands P and dS.
    float acc_s[1][kNTiles][4], acc_dp[kNTiles][4], acc_dk[kDTiles][4], acc_dv[kDTiles][4];
    using DqFragment = float[Shape::kDqTiles][4];
    __device__ DqFragment &acc_dq() { return reinterpret_cast<DqFragment &>(acc_s); }

    __device__ Mask mask(uint32_t t) const { return Mask(shared.steps_of(t).seq, p); }
    __device__ bool drops() const { return kDropout && (!kMods || p.dropout_seed); }

    __device__ void run() {
        uint32_t item = 0;  // counts the steps of all tiles
        // Every step forms dQ of the step before, one of tile `late_tile`. So there is something before the first step.
        // It is of no tile and is not added. The number is even: that product reads sK[0], which is there.
        uint32_t late_tile = -2u;
        bool is_added = true;
        if (lane_idx == 0) mbarrier_arrive(shared.ds.full_barrier(0));
#pragma unroll 1
        for (uint32_t t = 0;; t++) {
            shared.tiles.consumer_wait(t);
            const Steps<Shape> &steps = shared.steps_of(t);
            if (!steps.tile.is_valid) break;
            for (auto &x : acc_dk) x[0] = x[1] = x[2] = x[3] = 0.f;
            for (auto &x : acc_dv) x[0] = x[1] = x[2] = x[3] = 0.f;
            clear_keys(t);
            shared.keys.consumer_wait(t);
            const uint32_t end = steps.end();
#pragma unroll 1
            for (; item < end; item++) {
                if (forms_dq(item)) step<true>(item, t, late_tile, is_added);
                else step<false>(item, t, late_tile, is_added);
                if (late_tile != t && t > 0) end_dq(late_tile);
                late_tile = t, is_added = false;
            }
            warpgroup_wait<0>(acc_dk, acc_dv, acc_dp);
            shared.rows.consumer_release(item - 1, lane_idx);
            is_added = p.takes_turns();
            if (is_added) add_last_dq(item, t);  // other tiles wait for it
            barrier_sync(kOneConsumer + consumer, 128);  // all have read sV
            if (steps.splits == 1) store(steps);
            else store_split(steps);
            __syncwarp();
            shared.values[consumer].consumer_release(t, lane_idx);
            shared.tiles.consumer_release(t, lane_idx);
        }
        if (item == 0) return;
        if (!is_added) add_last_dq(item, late_tile);
        end_dq(late_tile);
    }
    __device__ const StepAt &step_at(uint32_t i) const { return shared.at[i % (2 * kStages)]; }
    // All dQ of tile t has been added.
    __device__ void end_dq(uint32_t t) {
        shared.keys.consumer_release(t, lane_idx);
        __syncwarp();  // unobserved by the emulator: flash_bwd_dq comes later
        if (lane_idx == 0) mbarrier_arrive(shared.dq_done[t % 4]);
    }

    template <bool kForms> __device__ void step(uint32_t item, uint32_t t, uint32_t late_tile, bool is_added) {
        const uint32_t stage = warp_uniform(item) % kStages;
        shared.rows.consumer_wait(item);
        const StepAt at = step_at(item);
        const bool is_full = at.is_full;
        if (!is_full) clear_rows(stage, at.m_block, t);
        warpgroup_arrive();
        multiply_abt<T>(acc_s[0], shared.sK[warp_uniform(t) % 2][consumer], shared.sQ[stage]);
        warpgroup_wait<1>(acc_dk, acc_dv, acc_dp);  // of the step before
        if (late_tile == t) {
            shared.rows.consumer_release(item - 1, lane_idx);
        } else {
            shared.values[consumer].consumer_wait(t);
        }
        begin_dp(stage);
        warpgroup_arrive();
        multiply_abt<T>(acc_dp, shared.sV[t % kValueStages][consumer], shared.sdO[stage], !kDropout || kMods);
        const uint32_t kept = drops() ? kept_bits(at, t) : ~0u;
        if constexpr (kMods) {
            warpgroup_wait<0>(acc_s[0], acc_dp);
            change_scores(stage, at, kept, t);
        } else {
            warpgroup_wait<1>(acc_s[0]);
        }
        exponentiate(stage);
        if (!is_full) hide(at.m_block, t);
        if constexpr (!kMods) {
            warpgroup_wait<0>(acc_dp);
        }
        if (kDropout && !kMods) drop(stage, kept);
        form_ds(item, kept);
        if constexpr (kForms) form_dq(item, late_tile);
        warpgroup_arrive();
        multiply_rows(acc_dv, operands(0), shared.sdO[stage]);
        multiply_rows(acc_dk, operands(1), shared.sQ[stage]);
        if constexpr (kForms) {
            warpgroup_wait<2>(acc_dq());
            shared.ds.consumer_release(item, lane_idx);
            if (!is_added) add_dq(item - 1);
        }
    }

    // Keys that no row sees. Both consumers clear those of both.
    __device__ void clear_keys(uint32_t t) {
        const Steps<Shape> &steps = shared.steps_of(t);
        const int key0 = steps.tile.block * Shape::kBlockN, begin = mask(t).keys(0).begin - key0;
        const int end = steps.seq.keys_follow(p) ? steps.seq.seqlen_k - key0 : Shape::kBlockN;
        if (begin <= 0 && end >= Shape::kBlockN) return;
        shared.keys.consumer_wait(t);
        for (auto &ring : shared.values) ring.consumer_wait(t);
        for (int c = 0; c < Shape::kConsumers; c++)
            clear_tiles<64>(begin - 64 * c, end - 64 * c, shared.sK[t % 2][c], shared.sV[t % kValueStages][c]);
    }
    // Rows that see no key, or are those of the next sample.
    __device__ void clear_rows(int stage, int m_block, uint32_t t) {
        const Steps<Shape> &steps = shared.steps_of(t);
        const int row0 = m_block * kBlockM, begin = steps.first_row - row0, end = steps.seq.seqlen_q - row0;
        clear_tiles<kBlockM>(begin, end, shared.sQ[stage], shared.sdO[stage]);
    }

    __device__ void hide(int m_block, uint32_t t) {
        mask(t).apply_transposed(acc_s, shared.steps_of(t).blocks, m_block, key(t),
                                 m_block * kBlockM + lane_idx % 4 * 2);
    }

    // This lane's first key in the sample, and its four numbers of the rows [16 kk, 16 kk + 16).
    __device__ int key(uint32_t t) const {
        return shared.steps_of(t).tile.block * Shape::kBlockN + 64 * consumer + 16 * warp_idx + lane_idx / 4;
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
    __device__ uint32_t kept_bits(const StepAt &at, uint32_t t) const {
        static_assert(!kDropout || kBlockM == 64);
        return kept_of_64_rows(Dropout(p, shared.steps_of(t).tile.b, at.h), at.m_block * kBlockM + lane_idx % 4 * 2,
                               key(t));
    }
    // acc_dp, which is dP, becomes dropout's dP - delta.
    __device__ void drop(int stage, uint32_t kept) {
        const float keep_scale = float(p.keep_scale);
        for_rows(acc_dp, shared.delta[stage], [&](float dp, float delta, int i) {
            return fmaf(dp, is_kept(kept, i / 4, i % 4) ? keep_scale : 0.f, -delta);
        });
    }
    // acc_s becomes scores, and acc_dp the derivative by factor · q·k.
    __device__ void change_scores(int stage, const StepAt &at, uint32_t kept, uint32_t t) {
        if (drops()) drop(stage, kept);
        const Steps<Shape> &steps = shared.steps_of(t);
        ScoreMods<T, ptx::tanh_approx> mods(p, p.factors, steps.seq.seqlen_q, steps.seq.seqlen_k, steps.tile.b, at.h);
        mods.bias = Bias{}, mods.slope = at.slope, mods.shift = steps.seq.seqlen_k - steps.seq.seqlen_q;
        mods.apply(transposed(score_tile(acc_s, key(t), at.m_block * kBlockM + lane_idx % 4 * 2)),
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
        shared.ds.producer_acquire(i + 1);
        const uint32_t to = ds_address + (i + 1) % 2 * sizeof(shared.sdS[0]);
#pragma unroll
        for (int kk = 0; kk < kBlockM / 16; kk++)  // 16 rows further the swizzle is the same
            stmatrix_trans(operands(1)[kk], to + 16 * kk * shared.sdS[0].kRowBytes);
        fence_proxy_async();
        __syncwarp();
        if (lane_idx == 0) mbarrier_arrive(shared.ds.full_barrier(i + 1));
    }
    template <typename A>
    __device__ void multiply_rows(float (&acc)[kDTiles][4], A &&a, const SmemTile<kBlockM, kHeadDim> &b) {
#pragma unroll
        for (int kk = 0; kk < kBlockM / 16; kk++) wgmma<T>(acc, a[kk], b.rows_desc(kk));
        warpgroup_commit_batch();
    }

    __device__ bool forms_dq(uint32_t i) const { return Shape::kDqParts > 1 || i % Shape::kConsumers == consumer; }
    // This consumer's part of the dQ of the step before step i, one of tile t, is on its way.
    __device__ void form_dq(uint32_t i, uint32_t t) {
        const uint32_t part = Shape::kDqParts > 1 ? 64 * consumer : 0;
        const auto &sdS = shared.sdS[warp_uniform(i) % 2];
        const auto &K = shared.sK[warp_uniform(t) % 2];
        shared.ds.consumer_wait(i);
        warpgroup_arrive();
#pragma unroll
        for (int kk = 0; kk < Shape::kBlockN / 16; kk++) {
            const auto &sK = K[kk / 4];
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
    // That of the step before step i, the last one of tile t. The next step, if any, forms it again, but does not add
    // it.
    __device__ void add_last_dq(uint32_t i, uint32_t t) {
        if (!forms_dq(i)) return;
        form_dq(i, t);
        warpgroup_wait<0>(acc_dq());
        add_dq(i - 1);
    }

    // dV and dK, one after the other, go through this consumer's V. Each warp has its own part of it.
    __device__ void store(const Steps<Shape> &steps) {
        const int key0 = steps.tile.block * Shape::kBlockN + 64 * consumer + 16 * warp_idx;
        auto store_keys = [&](float (&acc)[kDTiles][4], float scale, const Tensor &x, int cols) {
            auto *rows = rows_of<uint16_t>(x, steps.tile.b, steps.tile.h_k, steps.seq.k_begin + key0);
            store_accumulators<T>(acc, scale, steps.seq.seqlen_k - key0,
                                  shared.sV[steps.tile_idx % kValueStages][consumer],
                                  16 * warp_idx, rows, x.row_stride, steps.seq.padded_k - key0, cols);
        };
        store_keys(acc_dv, p.dv_scale, p.dv, p.head_dim_v);
        __syncwarp();
        store_keys(acc_dk, p.dk_scale, p.dk, p.head_dim);
        fence_proxy_async();  // unobserved by the emulator: it would be if TMA wrote to sV at once
    }
    // The sums of a split.
    __device__ void store_split(const Steps<Shape> &steps) {
        const int key = 64 * consumer + 16 * warp_idx + lane_idx / 4;
        float *dk = p.sums.dkv_sums(p, steps.split_idx, steps.tile) + key * kHeadDim + lane_idx % 4 * 2;
        float *dv = dk + p.sums.dkv_floats;
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
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();
    const uint32_t warpgroup_idx = warp_uniform(threadIdx.x / 128);
    if (warpgroup_idx == 0) {
        warpgroup_reg_dealloc<Shape::kProducerRegisters>();
        produce_steps<Shape>(p, shared);
    } else {
        warpgroup_reg_alloc<Shape::kConsumerRegisters>();
        BwdConsumer<T, Shape, kDropout, kMods>{p, shared, int(warpgroup_idx) - 1}.run();
    }
#endif
}

template <typename T, typename Shape> void launch_kernel(const AttnBackwardParams &p) {
    static_assert(sizeof(BwdSharedMemory<Shape>) <= 227 << 10);
    auto *kernel = flash_bwd<T, Shape, false, false>;
    if constexpr (Shape::kBlockM == 64) {
        if (p.has_score_mods()) kernel = flash_bwd<T, Shape, true, true>;
        else if (p.dropout_seed) kernel = flash_bwd<T, Shape, true, false>;
    }
    launch_bwd<T, Shape, sizeof(BwdSharedMemory<Shape>)>(p, kernel);
}

// {kHeadDim, kConsumers, kBlockM, kStages}. With 64 rows there are registers for dropout and for changed scores. 80
// rows take fewer steps, but their padding costs more if there are fewer than 2048 rows, or just as many under a causal
// mask (journal). A packed batch has the same tiles whatever its length is: a sample's bits must not depend on it.
template <typename F> auto with_bwd_shape(const AttnBackwardParams &p, F f) {
    const bool is_plain = !p.dropout_seed && !p.has_score_mods();
    if (p.max_head_dim() <= 64)
        return is_plain ? f.template operator()<BwdShape<64, 2, 128, 2>>()
                        : f.template operator()<BwdShape<64, 2, 64, 4>>();
    const bool has_many_rows = !p.cu_seqlens_q && p.seqlen_q >= (p.window_right == 0 ? 2049 : 2048);
    return is_plain && has_many_rows ? f.template operator()<BwdShape<128, 2, 80, 2>>()
                                     : f.template operator()<BwdShape<128, 2, 64, 2>>();
}

int64_t backward_workspace(const AttnBackwardParams &p) {
    if (p.max_head_dim() > 128) return backward_workspace_wide(p);
    return with_bwd_shape(p, [&]<typename Shape> { return BwdWorkspace<Shape>(p).bytes(p.deterministic); });
}

void flash_backward(const AttnBackwardParams &p) {
    if (p.max_head_dim() > 128) return flash_backward_wide(p);
    with_bwd_shape(p, [&]<typename Shape> {
        if (p.dtype == DType::kFloat16) launch_kernel<__half, Shape>(p);
        else launch_kernel<__nv_bfloat16, Shape>(p);
    });
}

}  // namespace sm90
