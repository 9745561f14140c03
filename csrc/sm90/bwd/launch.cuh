// Launches of the backward pass on Hopper: delta and zeros, the kernel, and sums to gradients.
#pragma once

#include "common/scores.cuh"
#include "sm90/bwd/producer.cuh"

namespace sm90 {

template <typename T, typename Shape, size_t kSharedBytes>
void launch_bwd(const typename Shape::Input &p, void (*kernel)(BwdParams<Shape>)) {
    constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM, kTileBlocks = Shape::kTileBlocks;
    const BwdWorkspace<Shape> workspace(p);
    const KeyTiles<Shape::kBlockN> tiles(p);
    const int64_t num_items = tiles.count(p) * workspace.max_splits, blocks = kTileBlocks * num_items;
    if (blocks + num_sms() > INT32_MAX)
        throw std::runtime_error("minimal_attn: batch_size · nheads_k · seqlen_k is too large: k has 2^31 tiles");
    ZeroBytes zeros{workspace.zeros_end(p.deterministic)};
    if (Shape::kOneTile) zeros.gap_begin = workspace.kTicketBytes, zeros.gap_end = workspace.dq_end();  // dQ is stored
    simt::preprocess_backward(p, zeros);
    auto tma = [&](const char *name, const Tensor &x, int heads, int rows, int head_dim, int box_rows) {
        return make_tma_tensor<kHeadDim>(name, x, p.batch_size, heads, rows, head_dim, box_rows);
    };
    const ScoreFactors<float> factors(p);
    const Scores<> scores(p);
    const float score_factor =
        p.has_score_mods() ? factors.softmax_scale_log2 : scores.sign * scores.softmax_scale_log2;
    const float scale = scores.softmax_scale, dv_scale = p.dropout_seed ? float(p.keep_scale) : 1.f;
    const bool rows_first = p.nheads > p.nheads_k && p.window_right == 0 && !p.attention_chunk && !Shape::kMasked &&
                            !p.cu_seqlens_k && !p.deterministic;
    const BwdParams<Shape> params{p,
                                  tma("q", p.q, p.nheads, p.seqlen_q, p.head_dim, kBlockM),
                                  tma("k", p.k, p.nheads_k, p.seqlen_k, p.head_dim, 64),
                                  tma("v", p.v, p.nheads_k, p.seqlen_k, p.head_dim_v, 64),
                                  tma("dout", p.dout, p.nheads, p.seqlen_q, p.head_dim_v, kBlockM),
                                  workspace, tiles.template order<Divisor>(p), int(num_items),
                                  rows_first, tiles.heads_together(1, p.nheads_k),
                                  factors, score_factor, scale, dv_scale};
    launch_clusters(kTileBlocks, kernel, Shape::kIsPersistent ? std::min<int64_t>(blocks, num_sms()) : blocks,
                    Shape::kNThreads, kSharedBytes, p.stream, params);
    if constexpr (Shape::kMaxSplits > 1) launch_dkv<T>(p, workspace, scale, dv_scale);
    if (p.dq.data)
        launch_early(flash_bwd_dq<T, Shape>, workspace.tiles, 32 * Shape::kDqWarps, 2 * workspace.kDqFloats, p.stream,
                     p, workspace, RowTiles<kBlockM>::template order<Divisor>(p), scale,
                     workspace.max_splits == 1 ? kTileBlocks * tiles.slots : 0);
}

}  // namespace sm90
