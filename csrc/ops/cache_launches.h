// Which samples of a cache go to which of three kernels, and on how many multiprocessors.
#pragma once

#include <algorithm>
#include <climits>
#include <optional>

#include "flash_cache.h"
#include "ops/kernels.h"

// The fewest rows of a sample for sm90::flash_decode and sm90::flash_prefill. sm80::flash_decode serves the rest.
struct FewestRows { int tall = INT_MAX, prefill = INT_MAX; };

inline FewestRows fewest_rows(const DecodeParams &p, Gpu gpu) {
    FewestRows fewest;
    const std::optional<Kernel> forced = forced_kernel;
    if ((forced && forced != Kernel::kSm90) || why_not(Kernel::kSm90, p, gpu, false)) return fewest;
    if (p.page_table && (p.page_size % 16 || p.leftpad_k)) return fewest;  // a box of TMA has at least 16 keys
    // Each tile of decode.cu has 32 packed rows and reads the keys again.
    if (p.max_head_dim() <= 128) fewest.tall = 32 / (p.nheads / p.nheads_k) + 1;
    // flash_prefill splits no keys: it needs tiles of rows for half of a GPU.
    constexpr int kFewestRows = 65, kFewestTiles = 64;
    const int tiles = (kFewestTiles + p.nheads - 1) / p.nheads, tile_rows = p.max_head_dim() <= 128 ? 192 : 128;
    // flash_prefill knows no changes of scores, chunks or trees: decode_sm90.cu serves these prompts, more slowly.
    if (num_mods(p) == 0 && !p.tree_mask)
        fewest.prefill = std::max(kFewestRows, (tiles - 1) * tile_rows + 1);
    return fewest;
}

// The kernel for the most rows also serves samples with more than p.max_seqlen_q.
//
// Launches of a mixed batch run side by side where the GPU can. Tensor cores bound prompts, memory bounds caches: three
// quarters of the multiprocessors read caches nearly as fast as all. Prompts begin on the rest, and a second prefill(p)
// continues them on the others once the caches have been read. One or two of these stay busy with a block that waits
// for an earlier launch. The first prefill(p) has waited for earlier work, so the launches after it begin at once.
template <typename Prefill, typename Tall, typename Few>
void launch_by_rows(DecodeParams p, FewestRows fewest, int all_sms, bool can_overlap, Prefill prefill, Tall tall,
                    Few few) {
    const bool are_alike = !p.cu_seqlens_q && !p.seqused_q;  // all samples have seqlen_q rows
    const int longest = p.max_seqlen_q;
    const bool has_prompts = longest >= fewest.prefill, is_mixed = has_prompts && !are_alike && can_overlap;
    const int of_caches = (3 * all_sms + 3) / 4;
    const int of_prompts = std::max(1, all_sms - of_caches);
    auto serve = [&](Phase phase, int sms, int min_rows, int max_rows, auto launch) {
        p.phase = is_mixed ? phase : Phase::kAlone, p.num_sms = is_mixed ? sms : all_sms;
        p.min_rows = min_rows, p.max_rows = max_rows, p.max_seqlen_q = std::min(longest, max_rows);
        launch(p);
    };
    if (has_prompts) serve(Phase::kPrefill, of_prompts, fewest.prefill, INT_MAX, prefill);
    if (has_prompts && are_alike) return;
    // If one row is tall, samples without rows are too: their padding is written.
    const int least_tall = fewest.tall == 1 ? 0 : fewest.tall, most = has_prompts ? fewest.prefill - 1 : INT_MAX;
    const bool has_tall = longest >= fewest.tall, has_few = !has_tall || (least_tall > 0 && !are_alike);
    if (has_few) serve(Phase::kDecode, of_caches, 0, has_tall ? least_tall - 1 : most, few);
    if (has_tall) serve(Phase::kDecode, of_caches, least_tall, most, tall);
    if (is_mixed) serve(Phase::kPrefillRest, of_caches, fewest.prefill, INT_MAX, prefill);
}
