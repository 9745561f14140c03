// The backward pass on Hopper: which tiles and which kernel serve a call.
#include "sm90/bwd/flash_bwd_sm90.cuh"

namespace sm90 {

// {kHeadDim, kConsumers, kBlockM, kStages, kChunks, kMasked, kOneTile, kHeadDimV}. 64 rows leave registers for dropout,
// changed scores and chunks. 80 rows are slower below 2048 rows, or at 2048 under a causal mask (journal). Beside a dK
// of 192 columns there are registers for 48 rows. Packed batches of any length have the same tiles: a sample's bits
// must not depend on it.
template <typename F> auto with_bwd_shape(const AttnBackwardParams &p, F f) {
    if (p.head_dim > 128) return f.template operator()<BwdShape<192, 2, 48, 2, false, false, false, 128>>();
    if (p.block_mask.rows)
        return p.max_head_dim() <= 64 ? f.template operator()<BwdShape<64, 2, 128, 2, false, true>>()
                                      : f.template operator()<BwdShape<128, 2, 64, 2, false, true>>();
    if (p.attention_chunk || p.has_score_mods())
        return p.max_head_dim() <= 64 ? f.template operator()<BwdShape<64, 2, 64, 4, true>>()
                                      : f.template operator()<BwdShape<128, 2, 64, 2, true>>();
    if (p.seqlen_k <= 128 && !p.cu_seqlens_k && !p.dropout_seed)
        return p.max_head_dim() <= 64 ? f.template operator()<BwdShape<64, 2, 128, 2, false, false, true>>()
                                      : f.template operator()<BwdShape<128, 2, 64, 2, false, false, true>>();
    if (p.max_head_dim() <= 64)
        return p.dropout_seed ? f.template operator()<BwdShape<64, 2, 64, 4>>()
                              : f.template operator()<BwdShape<64, 2, 128, 2>>();
    const bool has_many_rows = !p.cu_seqlens_q && p.seqlen_q >= (p.window_right == 0 ? 2049 : 2048);
    return has_many_rows && !p.dropout_seed ? f.template operator()<BwdShape<128, 2, 80, 2>>()
                                            : f.template operator()<BwdShape<128, 2, 64, 2>>();
}

// Whether flash_bwd_wide_sm90.cu serves it: dropout and masks come in tiles of 64 rows.
static bool is_wide(const AttnBackwardParams &p) {
    return p.max_head_dim() > (p.head_dim_v > 128 || p.dropout_seed || p.has_mods() ? 128 : 192);
}

int64_t backward_workspace(const AttnBackwardParams &given) {
    const AttnBackwardParams p = with_units(given);
    if (is_wide(p)) return backward_workspace_wide(p);
    return with_bwd_shape(p, [&]<typename Shape> { return BwdWorkspace<Shape>(p).bytes(p.deterministic); });
}

void flash_backward(const AttnBackwardParams &given) {
    if (given.walks_mask()) launch_pack_units(given);
    const AttnBackwardParams p = with_units(given);
    if (is_wide(p)) return flash_backward_wide(p);
    with_bwd_shape(p, [&]<typename Shape> {
        if (p.dtype == DType::kFloat16) launch_kernel<__half, Shape>(p);
        else launch_kernel<__nv_bfloat16, Shape>(p);
    });
}

}  // namespace sm90
