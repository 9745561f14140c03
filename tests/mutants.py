"""Faults of the sources and the tests that must see them, in a copy of the tree with one fault at a time:

    python tests/mutants.py [NAME ...]      all faults, or some
    python tests/mutants.py --clean         all of the tests, without a fault: they must pass in the same time

Run it before and after you delete or change tests, so that none of their strength is lost. ccache compiles again what
a fault changes and nothing else; without it, faults in csrc take minutes. Tests that hang or crash have seen the fault.
"""
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPY = Path(tempfile.gettempdir()) / "minimal_attn_mutants"
TREE, EXTENSIONS, MADE = COPY / "tree", COPY / "extensions", COPY / "made"  # MADE: what fixtures make of csrc
ENV = {**os.environ, "MINIMAL_ATTN_MADE_ONCE": str(MADE), "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
       "PATH": f"/usr/lib/ccache:{os.environ['PATH']}"}
SECONDS = int(os.environ.get("MUTANT_SECONDS", 60))  # for the tests of a fault, on a machine that is idle


def kernel(*names):
    return " ".join(f"emulator/test_emulator.py::test_kernel[{name}]" for name in names)


def host(file, names="against_a_loop"):
    return f"{file} -k 'host and ({names})'"


LENGTHS, SCORES, KV = "attention/test_lengths.py", "attention/test_scores.py", "caches/test_kvcache.py"
FORWARD, BACKWARD, DROPOUT = (f"attention/test_{name}.py" for name in ("forward", "backward", "dropout"))
BLOCK_MASK, SCORE_MOD = "attention/test_block_mask.py", "attention/test_score_mod.py"
PACKED, TWIN_LENGTHS = "attention/test_packed.py", f"{LENGTHS} -k 'triton and against_a_loop'"
APPEND, CACHE_ERRORS, CACHE_NAMES = (f"caches/test_{name}.py" for name in ("append", "cache_errors", "cache_names"))
ACTIVATE, FACADE, ERRORS = (f"facade/test_{name}.py" for name in ("activate", "facade", "errors"))
RANKS = "distributed/test_distributed.py"
SHARDS = "distributed/test_shards.py"
OF_TRANSFORMERS = "integrations/test_integrations_transformers.py"
OF_VLLM = "integrations/test_vllm_steps.py"

# (file, name, what is there once, what the fault puts in its place, arguments of pytest below tests/). The name says
# what goes wrong. Where nothing in `make test` sees a fault, "slow" stands before other tests.
MUTANTS = [
    ("csrc/common/mask.cuh", "dkv_lacks_last_row_of_window", "end = key + 1 - left;",
     "end = key - left;", host(LENGTHS)),
    ("csrc/common/sequence.cuh", "shared_keys_cut_short", "max(0, min(p.seqused_k[b], p.seqlen_k - k_begin));",
     "max(0, min(p.seqused_k[b], seqlen_k));", host(f"{LENGTHS} {PACKED}", "shared_keys")),
    ("csrc/common/sequence.cuh", "rows_behind_last_sample_unwritten", "(b + 1 == batch_size ? seqlen : end)", "end",
     host(LENGTHS)),
    ("csrc/mods/score_mods.cuh", "alibi_by_lengths_of_tensors", "shift = seqlen_k - seqlen_q;",
     "shift = p.seqlen_k - p.seqlen_q;", host(SCORES, "scores_of_batches")),
    ("csrc/mods/score_mods.cuh", "bias_of_minus_inf_is_finite", "return sum < kLowest && x > -INFINITY ?",
     "return sum < kLowest ?", host(SCORES, "scores_of_batches or infinities")),
    ("csrc/common/scores.cuh", "lse_of_negative_scale", "return fabs(softmax_scale); }", "return softmax_scale; }",
     host(BACKWARD, "against_fp64 and negative")),
    ("csrc/mods/dropout.h", "dropout_of_keys_of_a_part", "uint32_t(origin[1]) / 4;", "uint32_t(origin[1]) / 2;",
     host(DROPOUT, "part")),
    ("csrc/simt/tiles.h", "odd_head_dim_counts_as_aligned", "x.row_stride | head_dim) % 4", "x.row_stride) % 4",
     host(FORWARD, "against_fp64")),
    ("csrc/flash.cu", "nan_before_window", "mask.keys(row0).begin, blocks", "0, blocks",
     host(LENGTHS, "nan_before")),
    ("csrc/simt/flash_bwd.cu", "dout_walks_by_stride_of_q", "D.data += D.head_stride;", "D.data += C.head_stride;",
     host(BACKWARD, "dout_of_any_strides")),
    ("csrc/simt/flash_bwd_bias.cu", "dbias_by_other_heads_of_keys", "h_k = h / (p.nheads / p.nheads_k);",
     "h_k = h % p.nheads_k;", host(SCORES, "scores_of_batches")),
    ("csrc/common/softmax.cuh", "padding_gets_the_sink", "if (row + 8 * i < seq.seqlen_q)",
     "if (row + 8 * i < seq.padded_q)", kernel("sm80/flash_sm80.cu")),
    ("csrc/sm80/flash_sm80.cu", "sm80_negative_scale_in_full_blocks", "if (kMods || !scores.is_raw) blocks",
     "if (kMods) blocks", kernel("sm80/flash_sm80.cu")),
    ("csrc/sm80/flash_sm80.cu", "sm80_first_keys_not_awaited", "cp_async_wait<1>();", "cp_async_wait<2>();",
     kernel("sm80/flash_sm80.cu")),
    ("csrc/sm80/flash_sm80.cu", "sm80_no_barrier_after_values", "__syncthreads();  // K has arrived",
     "// K has arrived", kernel("sm80/flash_sm80.cu")),
    ("csrc/sm80/flash_sm80.cu", "sm80_rows_beyond_the_sample", "p.o.row_stride, seq.padded_q - row0,",
     "p.o.row_stride, kBlockM,", kernel("sm80/flash_sm80.cu")),
    ("csrc/sm80/flash_bwd_sm80.cu", "bwd_sm80_drops_other_keys", "row + 16 * kk, key + 16 * m);",
     "row + 16 * kk, key + 8 * m);", kernel("sm80/flash_bwd_sm80.cu")),
    ("csrc/sm80/flash_bwd_sm80.cu", "bwd_sm80_no_barrier_after_step", "__syncthreads();  // the stage has been",
     ";  // the stage has been", kernel("sm80/flash_bwd_sm80.cu")),
    ("csrc/sm80/flash_bwd_sm80.cu", "bwd_sm80_takes_no_turns", "while (load_acquire(dq_semaphore) != turn) {}", "{}",
     kernel("sm80/flash_bwd_sm80.cu")),
    ("csrc/sm90/plain_scores.cuh", "sm90_fp16_overflows", "kMaxSum = 1 << 15;", "kMaxSum = 1 << 20;",
     kernel("sm90/flash_sm90.cu")),
    ("csrc/sm90/flash_sm90.cuh", "sm90_stores_over_next_sample", "row0 + 16 > seq.padded_q && seq",
     "row0 >= seq.padded_q && seq", kernel("sm90/flash_sm90.cu")),
    ("csrc/sm90/flash_sm90.cuh", "sm90_values_not_awaited",
     "shared.v.consumer_wait(kv_item);\n                if (!is_full)", "if (!is_full)",
     kernel("sm90/flash_sm90.cu")),
    ("csrc/sm90/flash_sm90.cuh", "sm90_out_not_rescaled", "if (has_grown) softmax.rescale(acc_o, alpha);", "",
     kernel("sm90/flash_sm90.cu")),
    ("csrc/sm90/tiles.cuh", "sm90_no_fence_after_clearing", "fence_proxy_async();\n    barrier_sync(barrier",
     "barrier_sync(barrier", kernel("sm90/flash_sm90.cu")),
    ("csrc/sm90/producer.cuh", "sm90_skips_tiles_of_padding", "kBlockM >= seq.padded_q) continue;",
     "kBlockM >= seq.seqlen_q) continue;", kernel("sm90/flash_sm90.cu", "cache/decode_sm90.cu")),
    ("csrc/sm90/producer.cuh", "sm90_values_overwritten_early", "shared.v.producer_acquire(kv_item);", "",
     kernel("sm90/flash_sm90.cu")),
    ("csrc/sm90/bwd/flash_bwd_sm90.cuh", "bwd_sm90_ds_without_fence",
     "fence_proxy_async();\n        __syncwarp();\n        if (lane_idx == 0) mbar",
     "__syncwarp();\n        if (lane_idx == 0) mbar", kernel("sm90/bwd/flash_bwd_sm90.cu")),
    ("csrc/sm90/bwd/flash_bwd_sm90.cuh", "bwd_sm90_alibi_not_shifted",
     "mods.shift = work.seq.seqlen_k - work.seq.seqlen_q;",
     "mods.shift = 0;", kernel("sm90/mods/flash_mods_sm90.cu")),
    ("csrc/sm90/bwd/consumer.cuh", "bwd_sm90_takes_no_turns",
     "if (p.deterministic) shared.dq_turns.consumer_wait(i);", "", kernel("sm90/bwd/flash_bwd_sm90.cu")),
    ("csrc/sm90/bwd/flash_bwd_sm90.cuh", "bwd_sm90_keys_not_awaited",
     "shared.keys.consumer_wait(t);\n        for (auto &ring",
     "for (auto &ring", kernel("sm90/flash_sm90.cu")),
    ("csrc/sm90/bwd/flash_bwd_wide_sm90.cu", "bwd_wide_clears_wrong_half",
     "seen_keys<64>(p, work, key0() + 64 * (1 - 2 * rank)), shared.sOtherK);",
     "seen_keys<64>(p, work, key0()), shared.sOtherK);",
     kernel("sm90/bwd/flash_bwd_wide_sm90.cu")),
    ("csrc/sm90/bwd/flash_bwd_wide_sm90.cu", "bwd_wide_keeps_the_pair_waiting",
     "if (idx == 0) mbarrier_arrive(shared.ds.empty[0], 1 - rank);", ";", kernel("sm90/bwd/flash_bwd_wide_sm90.cu")),
    ("csrc/sm90/bwd/producer.cuh", "bwd_sm90_zeros_keys_of_the_next",
     "min(kBlockN, work.seq.padded_k - tile.block * kBlockN), (cols", "kBlockN, (cols",
     kernel("sm90/bwd/flash_bwd_sm90.cu")),
    ("csrc/sm90/flash_dmma.cu", "dmma_rows_of_padding_unwritten", ">= again.padded_q) continue;",
     ">= again.seqlen_q) continue;", kernel("sm90/flash_dmma.cu")),
    ("csrc/sm90/flash_dmma.cu", "dmma_no_barrier_before_values", "__syncthreads();  // V has arrived",
     ";  // V has arrived", kernel("sm90/flash_dmma.cu")),
    ("csrc/cache/decode.cu", "decode_begins_too_early", "if (p.phase == Phase::kAlone) wait_for_previous_kernel();", "",
     kernel("cache/decode.cu")),
    ("csrc/cache/decode.cu", "decode_no_barrier_before_q", "__syncthreads();  // Q is there", ";  // Q is there",
     kernel("cache/decode.cu")),
    ("csrc/cache/decode.cu", "decode_leftpad_across_pages",
     "(p.page_size % kRows == 0 && item.seq.k_begin % kRows == 0);", "p.page_size % kRows == 0;",
     kernel("cache/decode.cu")),
    ("csrc/cache/combine.cuh", "partial_sum_not_rescaled", "next.add(sum);", "next.row_sum = sum.row_sum, next.o = sum.o;",
     kernel("cache/decode.cu")),
    ("csrc/cache/combine.cuh", "results_of_blocks_not_awaited", "mbarrier_wait(full, parity);", "", kernel("cache/decode.cu")),
    ("csrc/cache/combine.cuh", "last_work_item_is_the_first", "scheduler.shared.arrived == item.num_splits - 1",
     "scheduler.shared.arrived == 0", kernel("cache/decode.cu")),
    ("csrc/cache/work.cuh", "decode_window_of_one_token", "Mask(seq.seqlen_q, seq.seqlen_k, p).keys(0)",
     "Mask(1, seq.seqlen_k, p).keys(0)", kernel("cache/decode.cu")),
    ("csrc/cache/work.cuh", "later_item_of_the_sample_before", "items_end <= index", "items_end < index",
     kernel("cache/decode.cu")),
    ("csrc/cache/work.cuh", "tree_of_all_rows", "first_new = item.seq.seqlen_k - item.seq.seqlen_q;",
     "first_new = item.seq.seqlen_k - p.seqlen_q;", kernel("cache/decode.cu")),
    ("csrc/cache/decode_sm90.cu", "decode_sm90_q_without_fence",
     "fence_proxy_async();\n        __syncthreads();  // Q is there", "__syncthreads();  // Q is there",
     kernel("cache/decode_sm90.cu")),
    ("csrc/ops/cache_launches.h", "pages_with_leftpad_by_tma", "(p.page_size % 16 || p.leftpad_k)", "p.page_size % 16",
     "attention/test_kernels.py -k rows_decide"),
    ("csrc/simt/append.cu", "negative_slot_is_written", "if (slot < 0 || p.page_size == 0)", "if (p.page_size == 0)",
     f"{APPEND} -k 'cuda and (slots or reshape)'"),
    ("csrc/simt/append.cu", "append_length_beyond_capacity", "min(p.capacity, rows.taken + rows.count)",
     "rows.taken + rows.count", f"{APPEND} -k 'cuda and (without_a_place or append_against)'"),
    ("csrc/simt/append.cu", "q_always_advances", "p.q_advances ? at.i : 0", "at.i",
     f"{APPEND} -k 'cuda and stands_still'"),
    ("csrc/ops/decode_op.cpp", "op_decode_takes_any_page_table", "page_table, {p.batch_size, max_pages}",
     "page_table, {page_table ? page_table->size(0) : 0, max_pages}", CACHE_ERRORS + " -k op_refuses"),
    ("csrc/ops/append_op.cpp", "op_append_to_other_heads", "k_cache.size(1) == nheads_k &&", "",
     CACHE_ERRORS + " -k op_refuses"),
    ("csrc/ops/ops.cpp", "op_ignores_dlse", "if (dlse) p.dlse = tensor_of(*dlse, kBHSD, is_packed);", "",
     host(LENGTHS)),
    ("csrc/ops/ops.cpp", "op_takes_any_lse", 'check_value(find_fault("lse", lse, rows, lse_dtype(q), q));', "",
     BACKWARD + " -k op_refuses"),
    ("csrc/ops/ops.cpp", "op_leaves_dq_unwritten", "for (TorchTensor *x : {&dq, &dk, &dv})",
     "for (TorchTensor *x : {&dk, &dv})", FACADE + " -k ops_take_empty"),
    ("csrc/ops/params.h", "op_takes_any_k_stride", "if (!has_contiguous_rows(*x))", "if (false)",
     f"{FACADE} -k op_refuses"),
    ("triton_ref/mask.py", "triton_narrow_window_counts_twice",
     "    full_end = tl.where(mask.kIsLocal, tl.maximum(full_end, full_begin), full_end)\n", "",
     TWIN_LENGTHS),
    ("triton_ref/mask.py", "triton_window_one_key_short", "tl.minimum(window_left, seq.seqlen_k)",
     "tl.minimum(window_left - 1, seq.seqlen_k)", TWIN_LENGTHS),
    ("triton_ref/block_mask.py", "triton_tiles_of_one_full_unit", " | (tl.min(units, 1) != -1)", "",
     f"slow {BLOCK_MASK} -k 'several_units'"),
    ("triton_ref/scores.py", "triton_alibi_beside_softcap", "+ h) * per_unit", "+ h)",
     f"{SCORES} -k 'triton and scores_of_batches'"),
    ("triton_ref/scores.py", "triton_no_derivative_of_softcap", "ds *= 1 - s * s", "ds *= 1",
     f"{SCORES} -k 'triton and scores_of_batches'"),
    ("triton_ref/score_function.py", "triton_floor_div_rounds_to_0",
     " - ((quotient * y != x) & ((x < 0) != (y < 0))).to(tl.int32)", "", f"{SCORE_MOD} -k 'triton and strided'"),
    ("triton_ref/score_function.py", "triton_last_element_is_the_first", "tl.where(i < 0, i + size, i)", "i",
     f"{SCORE_MOD} -k 'triton and full_bias'"),
    ("triton_ref/score_function.py", "triton_gradients_of_rows_by_keys", "2 - kAxes, keep_dims", "kAxes - 1, keep_dims",
     f"{SCORE_MOD} -k 'triton and row_and_key_bias'"),
    ("triton_ref/launching.py", "triton_plans_of_any_score_mod", "(mod.source, *layouts", "(*layouts",
     f"{SCORE_MOD} -k 'triton and mixed_up'"),
    ("triton_ref/attention.py", "triton_out_without_share_of_sink", "scale_o *= factor", "scale_o *= 1.0",
     TWIN_LENGTHS),
    ("triton_ref/attention.py", "triton_nan_in_padding_by_tma",
     "kClearV: tl.constexpr = kIsPacked or lengths.seqused_k is not None", "kClearV: tl.constexpr = kIsPacked",
     "attention/test_twin.py -k samples_by_descriptors"),
    ("triton_ref/attention_bwd_kernels.py", "triton_ignores_dlse", "delta -= tl.load(dlse +", "delta -= 0 * tl.load(dlse +",
     TWIN_LENGTHS),
    ("triton_ref/attention_bwd_kernels.py", "triton_dq_drops_by_sample_0",
     "kept = keep_tile(dropout, seq.b, h,", "kept = keep_tile(dropout, 0, h,",
     f"{DROPOUT} {LENGTHS} -k 'triton and packed'"),
    ("triton_ref/attention_bwd_kernels.py", "triton_splits_count_a_head_twice",
     "(group * split_idx + num_splits - 1) // num_splits)", "group * split_idx // num_splits)",
     f"{LENGTHS} -k 'triton and split'"),
    ("triton_ref/attention_bwd_kernels.py", "triton_dk_not_scaled", "dk = tl.where(is_used, dk * softmax_scale, 0.0)",
     "dk = tl.where(is_used, dk, 0.0)", f"{BACKWARD} -k 'triton and against_fp64'"),
    ("triton_ref/attention_bwd_kernels.py", "triton_dbias_without_keep_scale",
     "tl.where(kept, dp * dropout.keep_scale, 0.0)", "tl.where(kept, dp, 0.0)",
     f"{SCORES} -k 'triton and (dropout or scores_of_batches)'"),
    ("triton_ref/dropout.py", "triton_dropout_of_a_part_of_heads",
     "        h += tl.load(origin_ptr + 2).to(tl.int32)\n", "",
     f"{DROPOUT} -k 'triton and part'"),
    ("triton_ref/decode.py", "triton_padding_of_split_samples",
     "tl.where(share.num_splits == 1, 0, seq.seqlen_q)", "tl.where(share.num_splits == 1, 0, seq.padded_q)",
     KV + " -k 'triton and against_a_loop'"),
    ("triton_ref/decode.py", "triton_tree_of_all_rows", "_sees_in_tree(trees, cols - (seq.seqlen_k - seq.seqlen_q))",
     "_sees_in_tree(trees, cols - (seq.seqlen_k - seqlen_q))", KV + " -k 'triton and against_a_loop'"),
    ("triton_ref/decode.py", "triton_page_is_not_clamped", "tl.minimum(tl.maximum(block, 0), num_sequences - 1), row",
     "block, row", KV + " -k 'triton and clamped'"),
    ("triton_ref/decode.py", "triton_parts_not_rescaled", "acc_o = acc_o * rescale + tl.sum", "acc_o = acc_o + tl.sum",
     KV + " -k 'triton and against_a_loop'"),
    ("triton_ref/append.py", "triton_append_length_beyond_capacity",
     "taken + tl.minimum(count, capacity - taken), mask=samples", "taken + count, mask=samples",
     f"{APPEND} -k 'triton and (without_a_place or append_against)'"),
    ("triton_ref/append.py", "triton_rotates_the_wrong_way", "tl.where(is_first, -sin, sin)",
     "tl.where(is_first, sin, -sin)", f"{APPEND} -k 'triton and append_against'"),
    ("triton_ref/matmul.py", "triton_matmul_unaligned_tma", "stride * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0:",
     "stride * x.itemsize % 16 == 0:", "attention/test_matmul.py -k 'descriptors or layouts'"),
    ("minimal_attn/score_graph.py", "quotient_rises_with_its_divisor",
     'g("neg", g("mul", g("div", dy, b), y))', 'g("mul", g("div", dy, b), y)', f"{SCORE_MOD} -k derivatives"),
    ("minimal_attn/score_graph.py", "maximum_gives_both_all", 'dy, g("where", g("lt", *pair), zero, half)', "dy, half",
     f"{SCORE_MOD} -k 'derivatives or drawn'"),
    ("minimal_attn/score_function.py", "numbers_of_the_first_call", "_mark(captured[name]) == mark", "True",
     f"{SCORE_MOD} -k read_once"),
    ("minimal_attn/checks.py", "scale_of_nan", "if not holds(x >= low) or high is not None and not holds(x <= high):",
     "if holds(x < low) or high is not None and holds(x > high):",
     f"{FACADE} {ERRORS} -k scale"),
    ("minimal_attn/checks.py", "sinks_of_any_length", '"sinks": Rule((), (("H",),)),', '"sinks": Rule((), (("any",),)),',
     ERRORS + " -k sinks"),
    ("minimal_attn/checks.py", "window_dropped_early", "is_known(left >= k.shape[-2] - 1)",
     "is_known(left >= k.shape[-2] - 2)", f"{LENGTHS} -k 'windows or (against_a_loop and reference)'"),
    ("minimal_attn/checks.py", "cu_seqlens_need_not_begin_at_0", "if bounds[0] != 0 or not 0", "if not 0",
     f"{ERRORS} -k cu_seqlens"),
    ("minimal_attn/checks.py", "seq_lens_are_not_clamped", "seq_lens.clamp(0, seqlen).to(", "seq_lens.to(",
     "attention/test_ops.py -k clamped"),
    ("minimal_attn/reference/scores.py", "alibi_replaces_bias", "alibi if bias is None else bias + alibi", "alibi",
     f"{SCORES} -k 'torch and scores_of_batches'"),
    ("minimal_attn/checks.py", "strided_slopes", "return x.contiguous()", "return x",
     "attention/test_scores.py facade/test_scores_facade.py -k 'slopes or alibi'"),
    ("minimal_attn/checks.py", "bias_of_other_heads", "and broadcasts(attn_bias.shape, shape)",
     "and not any(size % n for n, size in zip(attn_bias.shape[::-1], shape[::-1]))", ERRORS + " -k attn_bias"),
    ("minimal_attn/reference/packed.py", "lse_of_padding_is_that_of_a_row", '.t()[None].masked_fill(is_padding, float("-inf"))',
     ".t()[None]", f"{LENGTHS} -k 'against_a_loop and (torch or reference)'"),
    ("csrc/common/mask.cuh", "chunk_of_the_next_row", "const int begin = position / chunk * chunk;",
     "const int begin = (position + 1) / chunk * chunk;", f"{LENGTHS} -k 'against_a_loop and chunks and host'"),
    ("minimal_attn/modules.py", "module_without_chunks", "attention_chunk=self.attention_chunk, return_lse",
     "return_lse", "facade/test_mha.py -k chunks"),
    ("minimal_attn/reference/scores.py", "chunks_of_rows_alone", "mask & (cols // chunk == own // chunk)",
     "mask & (cols // chunk <= own // chunk)", f"{LENGTHS} -k 'against_a_loop and chunks and reference'"),
    ("minimal_attn/reference/pages.py", "last_page_unchecked", "(end - 1) // size + 1].tolist()", "end // size].tolist()",
     f"{CACHE_ERRORS} -k bad_input"),
    ("minimal_attn/reference/pages.py", "leftpad_counts_twice", "(seqused - leftpad).clamp(min=0)",
     "(seqused - 2 * leftpad).clamp(min=0)", f"{KV} -k 'reference and loop'"),
    ("minimal_attn/reference/append.py", "slot_behind_the_last", "last < num_slots,", "last <= num_slots,", f"{CACHE_ERRORS} -k reshape_and_cache"),
    ("minimal_attn/reference/append.py", "writes_where_none_is_valid", "torch.where(is_valid.any(), rows[source], cache[at])",
     "rows[source]", f"{APPEND} -k 'reference or torch'"),
    ("minimal_attn/reference/append.py", "no_room_for_the_last_row", "holds(begin + num_new <= capacity):",
     "holds(begin + num_new <= capacity + 1):", f"{CACHE_ERRORS} -k bad"),
    ("minimal_attn/caches.py", "window_does_not_advance_q", "q_advances=options.mask != NO_MASK",
     "q_advances=causal", APPEND + " -k 'attention_against and not triton'"),
    ("minimal_attn/caches.py", "new_keys_are_not_seen", "options._replace(seqused_k=seqused_k)", "options",
     APPEND + " -k 'attention_against and not triton'"),
    ("minimal_attn/checks.py", "right_bound_of_causal", "bias = 0 if causal else right,", "bias = right,",
     KV + " -k 'against_a_loop and not triton'"),
    ("minimal_attn/reference/tree_mask.py", "tree_of_65_tokens", "holds(seqlen <= MAX_TOKENS):",
     "holds(seqlen <= MAX_TOKENS + 1):", CACHE_ERRORS + " -k tree_mask"),
    ("minimal_attn/sdpa/function.py", "is_causal_bottom_right", "window = -1, q.shape[2] - k.shape[2]", "window = -1, 0",
     "facade/test_torch_sdpa.py"),
    ("minimal_attn/backends/torch.py", "lse_by_mask_of_first_rows", "with_mask(scores, mask[..., rows, :])",
     "with_mask(scores, mask[..., :scores.shape[2], :])", f"{FORWARD} {LENGTHS} -k 'torch and (fp64 or loop)'"),
    ("minimal_attn/sdpa/aten.py", "unseen_keys_get_garbage", "padded = torch.zeros_like(x)", "padded = torch.empty_like(x)",
     ACTIVATE),
    ("minimal_attn/sdpa/aten.py", "causal_flash_sees_all", "0 if is_causal else -1 if right is None else right",
     "-1 if right is None else right", ACTIVATE),
    ("minimal_attn/sdpa/aten.py", "bias_of_other_dtype", "attn_bias.dtype not in (query.dtype, torch.float32)",
     "False", ACTIVATE),
    ("minimal_attn/sdpa/aten.py", "lse_is_not_rounded_up", "if missing := -lse.shape[2] % 32:", "if missing := 0:",
     ACTIVATE),
    ("minimal_attn/sdpa/activation.py", "inner_activated_ends_outer", "            if before is None:\n",
     "            if before in (None, NAME):\n", ACTIVATE),
    ("minimal_attn/sdpa/activation.py", "unserved_calls_return_none",
     "return original.call_boxed(keys, *args, **kwargs)", "return None", ACTIVATE),
    ("minimal_attn/backends/reference.py", "gradient_without_share", "dlse = share * (dout", "dlse = (dout",
     RANKS + " -k 'results_are or within'"),
    ("minimal_attn/reference/dropout.py", "philox_without_a_round", "for _ in range(ROUNDS):", "for _ in range(ROUNDS - 1):",
     DROPOUT + " -k philox"),
    ("minimal_attn/backends/ops.py", "v_alone_gets_no_gradient", "need_k or need_v, *need_others", "need_k, *need_others",
     BACKWARD + " -k some_inputs"),
    ("minimal_attn/modules.py", "module_forgets_eval", "return module.train(mha.training)", "return module",
     "facade/test_mha.py -k from_torch"),
    ("minimal_attn/flash_attn/functions.py", "out_of_any_dtype",
     "(out.dtype, out.device) == (dtype, device) and", "out.device == device and",
     f"{CACHE_ERRORS} {ERRORS} -k bad_input"),
    ("minimal_attn/flash_attn/kvcache.py", "combine_reads_empty_parts", ".masked_fill(is_empty[..., None], 0)", "",
     CACHE_NAMES + " -k combine"),
    ("minimal_attn/distributed/calls.py", "window_between_ranks_one_short", "min(row_end, key_end + left)",
     "min(row_end, key_end + left - 1)", SHARDS + " -k every_key_once"),
    ("minimal_attn/distributed/attention.py", "ulysses_drops_alike_on_all_ranks",
     "with_origins(seed, heads.start,", "with_origins(seed, 0,", RANKS + " -k 'results_are and ulysses-0.3'"),
    ("minimal_attn/distributed/layout.py", "late_chunks_not_reversed", "torch.cat((early, late.flip(0)))",
     "torch.cat((early, late))", SHARDS + " -k shards_are"),
    ("minimal_attn/distributed/ring.py", "ring_turns_the_other_way", "yield (shards.rank - step)",
     "yield (shards.rank + step)", RANKS + " -k 'results_are and ring'"),
    ("minimal_attn/distributed/ring.py", "ring_gradients_arrive_late", "dkv += arriving.wait()", "arriving.wait()",
     RANKS + " -k 'results_are and ring'"),
    ("minimal_attn/distributed/all_gather.py", "rows_without_document_unwritten", "        out.zero_()  # as",
     "        pass  # as",
     RANKS + " -k 'results_are and all_gather or padding'"),
    ("minimal_attn/distributed/ring.py", "merge_of_empty_rows_is_nan",
     "total.masked_fill(total == -math.inf, 0)  # rows", "total  # rows", RANKS + " -k 'results_are and ring'"),
    ("minimal_attn/distributed/calls.py", "slopes_of_all_heads", "slopes[..., heads].contiguous())", "slopes)",
     RANKS + " -k heads_in_groups"),
    ("minimal_attn/integrations/masks.py", "positions_changed_in_place", "known[:2] == (version, batch_size):",
     "known[1] == batch_size:", OF_TRANSFORMERS + " -k positions"),
    ("minimal_attn/integrations/masks.py", "left_padding_counts_as_right", "if is_last and mask.seqused_k",
     "if mask.seqused_k",
     OF_TRANSFORMERS + " -k masks"),
    ("minimal_attn/integrations/masks.py", "window_one_key_too_wide", "Pattern(False, (value - 1, -1))",
     "Pattern(False, (value, -1))", OF_TRANSFORMERS + " -k masks"),
    ("minimal_attn/integrations/transformers.py", "keys_beyond_static_cache",
     "key[:, :, :mask.num_keys], value[:, :, :mask.num_keys]", "key, value",
     f"{OF_TRANSFORMERS} integrations/test_transformers.py -k 'generat or cache or static'"),
    ("minimal_attn/integrations/vllm.py", "vllm_window_one_key_too_wide", "(sliding_window - 1, 0)",
     "(sliding_window, 0)", OF_VLLM),
    ("minimal_attn/integrations/vllm.py", "vllm_sinks_are_lost", "sinks=sinks,", "sinks=None,", OF_VLLM),
    ("minimal_attn/integrations/transformers.py", "sinks_are_lost", "sinks=s_aux", "sinks=None",
     "integrations/test_transformers_attend.py -k 'arguments'"),
    ("minimal_attn/backends/auto.py", "fp8_goes_to_csrc", 'return "triton"', "return _first_available()",
     "facade/test_backend_choice.py -k fp8"),
    ("minimal_attn/integrations/transformers.py", "bias_hides_nothing",
     "(position_bias.masked_fill(~bias, -torch.inf) if", "(position_bias if",
     "integrations/test_transformers_scores.py -k t5"),
]


def copy_tree():
    """The working tree in TREE, without what git ignores, and its csrc compiled."""
    shutil.rmtree(TREE, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name)
    subprocess.run([sys.executable, "-c", "import minimal_attn; minimal_attn.load()"], cwd=TREE, env=ENV, check=True)


def run_tests(tests, is_csrc):
    """Runs arguments of pytest in the copy. Returns (what has seen a fault, or "", the output)."""
    if is_csrc:
        shutil.rmtree(MADE, ignore_errors=True)
    MADE.mkdir(exist_ok=True)
    is_slow, tests = tests.startswith("slow "), tests.removeprefix("slow ")
    arguments = [f"tests/{word}" if ".py" in word else word for word in shlex.split(tests)]
    command = [sys.executable, "-m", "pytest", "-xq", *arguments, "-m", "slow" if is_slow else "not slow"]
    tested = subprocess.Popen(command, cwd=TREE, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, start_new_session=True)
    try:
        said = tested.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        said = "+ Timeout +"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(tested.pid, signal.SIGKILL)  # and what it started
    if tested.wait() in (4, 5):  # no such test, or none is selected
        sys.exit(f"{tests}\n{said}")
    if "+ Timeout +" in said:  # pytest-timeout's word
        return "time limit", said
    return {0: "", 1: "a test", 2: "an import"}.get(tested.returncode, "a crash"), said


def main(names):
    is_clean = "--clean" in names
    chosen = [mutant for mutant in MUTANTS if is_clean or not names or mutant[1] in names]
    if is_clean:
        chosen = {mutant[-1]: mutant for mutant in chosen}.values()
    copy_tree()
    missed, by_gate, begin = [], 0, time.monotonic()
    for file, _, old, *_ in chosen:
        assert (TREE / file).read_text().count(old) == 1, f"{file} does not have this once: {old}"
    for file, name, old, new, tests in chosen:
        path, start = TREE / file, time.monotonic()
        text = path.read_text()
        if not is_clean:
            path.write_text(text.replace(old, new))
        seen, said = run_tests(tests, file.startswith("csrc/"))
        path.write_text(text)
        first = "".join(line for line in said.splitlines() if line.startswith(("FAILED", "ERROR")))[:120]
        print(f"{seen or 'missed':10} {time.monotonic() - start:4.0f} s  {name}  {first}", flush=True)
        if not seen:
            missed.append(name)
        by_gate += bool(seen) and not tests.startswith("slow ")
    num_caught = len(chosen) - len(missed)
    print(f"{num_caught} of {len(chosen)} caught, {by_gate} of them by `make test`, in "
          f"{(time.monotonic() - begin) / 60:.0f} minutes; missed: {', '.join(missed) or 'none'}")
    return bool(num_caught if is_clean else missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
