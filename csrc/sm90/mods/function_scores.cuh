// Both passes on Hopper with a score_mod (mods/score_function.cuh), for the libraries that are compiled for one.
#pragma once

#include "mods/score_function.cuh"
#include "sm90/bwd/flash_bwd_sm90.cuh"
#include "sm90/flash_sm90.cuh"
#include "sm90/mods/masked_scores.cuh"

namespace sm90 {

// A row goes on with updates of row_max while it grows, is infinite (no key seen), or is not below kOrdinary, where
// sums with it are exact enough. Other rows keep it (plain_scores.cuh).
template <typename T, typename Shape, typename F> struct FunctionScores : PlainScores<T, Shape> {
    using Base = PlainScores<T, Shape>;
    using WorkItem = Shape::WorkItem;
    using Base::kBlockN, Base::kNTiles;
    using Base::p, Base::consumer, Base::softmax, Base::acc_s, Base::is_too_large;
    static constexpr float kOrdinary = 1 << 14;

    bool updates[2], some_update;  // rows that must update row_max in the next block; any of the warp

    __device__ void begin_tile(const WorkItem &) {
        updates[0] = updates[1] = some_update = true;
        softmax = Softmax<1>(1.f);  // scores are in units of log2
    }
    __device__ bool has_full_blocks() const { return true; }

    template <typename Hide = Base::Nothing>
    __device__ bool exponentiate(const WorkItem &work, const BlockRange &blocks, const ScoreOrigin &at, bool is_full,
                                 float (&alpha)[2], Hide hide = {}) {
        const int b = work.tile.b, h = work.tile.h;
        const Index row(at.row), key(at.key);
#pragma unroll
        for (int n = 0; n < kNTiles; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                acc_s[0][n][e] = changed(acc_s[0][n][e], {b, h, row + e / 2 * 8, key + (8 * n + e % 2)});
        if (!is_full) {
            work.mask.apply(acc_s, blocks, at.n_block, at.row, at.key);
            hide();
        }
        bool has_grown = false;
        float sum[2];
        alpha[0] = alpha[1] = 1.f;
        if (!is_full || some_update) {
            const bool may_grow[2] = {!is_full || updates[0], !is_full || updates[1]};
            has_grown = softmax.update_row_max(acc_s, alpha, may_grow);
        }
        for (int i = 0; i < 2; i++) sum[i] = softmax.exponentiate(acc_s, i);
        const bool is_large = is_too_large(sum);
        if (is_large) {
            const float before[] = {alpha[0], alpha[1]};
            this->recompute_large_rows(sum, alpha, [&](int n, auto &s) { change_again(work, at, n, s[0][0]); });
            for (int i = 0; i < 2; i++) alpha[i] *= before[i];
            has_grown = true;
        }
        if (!is_full || some_update || is_large) end_block(work, at.row, alpha);
        for (int i = 0; i < 2; i++) softmax.row_sum[i] += sum[i];
        return has_grown;
    }

  private:
    __device__ float changed(float qk, const ScorePlace &at) const {
        return changed_log2<F>(qk * this->scores.softmax_scale, at, p.captured);
    }
    // q·k of keys [8·n, 8·n + 8), of a block that all rows see, become scores.
    __device__ void change_again(const WorkItem &work, const ScoreOrigin &at, int n, float (&s)[4]) const {
#pragma unroll 1
        for (int e = 0; e < 4; e++) {
            const int row = at.row + e / 2 * 8, key = at.key + 8 * n + e % 2;
            s[e] = changed(s[e], {work.tile.b, work.tile.h, Index(row), Index(key)});
        }
    }
    __device__ void end_block(const WorkItem &work, int row, const float (&alpha)[2]) {
        for (int i = 0; i < 2; i++) {
            updates[i] = alpha[i] != 1.f || !(fabsf(softmax.row_max[i]) < kOrdinary);
            // Rows beyond the sample's end do not count: their P is 0.
            if (row + 8 * i >= work.seq.seqlen_q) updates[i] = false, softmax.row_max[i] = INFINITY;
        }
        some_update = __any_sync(~0u, updates[0] || updates[1]);
    }
};

template <typename F> struct WithFunction : Plain {
    using Input = WithCaptured<AttnParams, F>;
    template <typename T, typename Shape> using ScorePolicy = FunctionScores<T, Shape, F>;
};
template <typename F> struct MaskedWithFunction : Masked {
    using Input = WithCaptured<AttnParams, F>;
    template <typename T, typename Shape> using ScorePolicy = MaskedScores<T, Shape, FunctionScores<T, Shape, F>>;
};

// The launchers serve masks, windows, lengths, packed batches and sinks, head_dims up to kHeadDim, and a block mask if
// kMasked.
inline void check_function_call(const AttnParams &p, int head_dim, bool is_masked) {
    if (p.max_head_dim() > head_dim || bool(p.block_mask.rows) != is_masked)
        throw std::invalid_argument("minimal_attn: this library of a score_mod is for other calls");
    if (p.has_score_mods() || p.attention_chunk || p.dropout_seed || p.return_max_logits)
        throw std::invalid_argument("minimal_attn: beside a score_mod, there is no change of the scores, "
                                    "attention_chunk, dropout or max_logits");
}

template <int kHeadDim, bool kMasked, typename F>
void flash_forward_function(const WithCaptured<AttnParams, F> &p) {
    check_function_call(p, kHeadDim, kMasked);
    using Kind = std::conditional_t<kMasked, MaskedWithFunction<F>, WithFunction<F>>;
    if constexpr (kHeadDim == 64) launch_fwd<Shape<64, 3, 128, 4, 6, Kind>>(p);
    if constexpr (kHeadDim == 128) launch_fwd<Shape<128, 3, 64, 4, 6, Kind>>(p);
    if constexpr (kHeadDim == 256) launch_fwd<Shape<256, 2, 64, 2, kMasked ? 2 : 3, Kind>>(p);  // as without one
}

// kHeadDim is 64 or 128. 64 rows leave registers for the function.
template <int kHeadDim, bool kMasked, typename F>
using FunctionBwdShape = BwdShape<kHeadDim, 2, 64, kHeadDim == 64 ? 4 : 2, false, kMasked, false, kHeadDim, F>;

template <int kHeadDim, bool kMasked, typename F>
int64_t backward_workspace_function(const AttnBackwardParams &p) {  // bytes
    return BwdWorkspace<FunctionBwdShape<kHeadDim, kMasked, F>>(p).bytes(p.deterministic);
}
template <int kHeadDim, bool kMasked, typename F>
void flash_backward_function(const WithCaptured<AttnBackwardParams, F> &p) {
    check_function_call(p, kHeadDim, kMasked);
    using Shape = FunctionBwdShape<kHeadDim, kMasked, F>;
    p.dtype == DType::kFloat16 ? launch_kernel<__half, Shape>(p) : launch_kernel<__nv_bfloat16, Shape>(p);
}

}  // namespace sm90
