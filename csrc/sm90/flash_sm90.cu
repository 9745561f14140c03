// The forward pass on Hopper: which kernel serves a call.
#include "sm90/flash_sm90.cuh"

namespace sm90 {

void flash_forward(const AttnParams &p) {
    if (compute_capability() != 90) throw std::runtime_error("minimal_attn: flash_sm90.cu needs a GPU of sm_90");
    if (p.has_score_mods() && !p.walks_mask()) return flash_forward_mods(p);
    if (p.block_mask.rows || p.walks_mask()) return flash_forward_masked(p);
    if (p.dropout_seed) return flash_forward_dropout(p);
    if (p.max_logits || p.attention_chunk) return flash_forward_max_logits(p);
    const int head_dim = p.max_head_dim();
    const int64_t keys_of_a_row = std::min<int64_t>(p.seqlen_k, int64_t(p.window_left) + p.window_right + 1);
    // Packed batches all have the same tiles: a sample's bits must not depend on the others.
    const bool is_packed = p.cu_seqlens_q, is_128 = head_dim > 96 && head_dim <= 128;
    // Short calls: three small blocks share a multiprocessor, and hide one another's first and last steps. They read K
    // and V more often, so long calls are slower (journal, forward.md).
    if (head_dim <= 64 && !is_packed && p.seqlen_k <= 80) return launch_fwd<Shape<64, 1, 80, 2, 2, Plain, 64, 3>>(p);
    if (head_dim <= 64 && !is_packed && p.seqlen_k <= (p.has_mask() ? 1024 : 256))
        return launch_fwd<Shape<64, 1, 64, 2, 2, Plain, 64, 3>>(p);
    // A third to a half of two tiles of 192 rows would be empty.
    if (is_128 && !is_packed && p.seqlen_q > 192 && p.seqlen_q <= 256) return launch_fwd<Shape<128, 2, 128>>(p);
    // For many keys two stages of 80, as registers allow, are faster than four of 64 (journal, Hopper).
    if (is_128 && !is_packed && keys_of_a_row > 2048) return launch_fwd<Shape<128, 3, 80>>(p);
    // O leaves registers for 128 keys, and smaller tiles of V memory.
    if (p.head_dim > 128 && p.head_dim <= 192 && p.head_dim_v <= 128)
        return launch_fwd<Shape<192, 2, 128, 2, 2, Plain, 128>>(p);
    with_shape<Plain>(head_dim, [&]<typename Shape>() { launch_fwd<Shape>(p); });
}

}  // namespace sm90
