// The cases of driver.cpp: shapes and options of one call each, by their kernels. Include it after
// driver_common.h.
#pragma once

#include <optional>

enum Layout {
    kHeads,   // [batch, head, row, head_dim]
    kRows,    // [batch, row, head, head_dim]
    kGaps,    // kHeads with an element after every row that is neither to be read nor written; rows lie unaligned
    kOffset,  // kHeads from the second element of the allocation on: the pointer is unaligned
    kSlices,  // kHeads with 8 elements after every row, as slices have, which leave it aligned
    kExpanded,  // one head of one sample for all, strides of 0; the output is kHeads
};

enum Tiling { kBest, kNarrow, kSm80, kSm80Narrow, kSm90, kDmma };  // the size of tiles, or another kernel

struct Case {
    const char *name;
    DType dtype;
    int batch_size, nheads, nheads_k, seqlen_q, seqlen_k, head_dim;
    bool is_causal;
    Layout layout = kHeads;
    std::vector<int> seq_lens = {};  // of rows, and of keys if they have no other
    Tiling tiling = kBest;  // of the forward pass
    double dropout_p = 0;
    double scale = 1;  // of the scores, beside 1 / sqrt(head_dim)
    int window_left = -1, window_right = -1;  // of a causal case window_right is 0
    int chunk = 0;
    bool has_max = false;  // max_logits
    std::vector<int> cu_seqlens_q = {}, cu_seqlens_k = {};  // of a packed batch, whose batch_size is 1
    std::vector<int> seqused_k = {};
    int head_dim_v = head_dim;
    bool has_sinks = false;
    double softcap = 0;
    bool has_alibi = false;
    std::optional<DType> bias = {};
    bool has_block_mask = false;  // of units that are hidden, seen or neither, in any order
    std::string bias_shape = "BHRK";  // a dimension that is missing is shared
    bool is_part = false;  // of a larger problem, whose dropout it has
    bool in_any_order = false;  // dQ is summed in any order, as it always is with dropout
    std::vector<int> spike = {};  // the keys [begin, end) whose scores are alike and far above those of all others

    int max_head_dim() const { return std::max(head_dim, head_dim_v); }
    bool is_packed() const { return !cu_seqlens_q.empty(); }
    int samples() const { return is_packed() ? int(cu_seqlens_q.size()) - 1 : batch_size; }
};

Case window(Case c, int left, int right) {
    c.window_left = left, c.window_right = right;
    return c;
}
Case chunks(Case c, int chunk) {
    c.chunk = chunk;
    return c;
}
// The tensors have nine rows and nine keys more than the samples, if the case does not say otherwise.
Case packed(Case c, std::vector<int> cu_seqlens_q, std::vector<int> cu_seqlens_k, std::vector<int> seqused_k = {}) {
    c.cu_seqlens_q = cu_seqlens_q, c.cu_seqlens_k = cu_seqlens_k, c.seqused_k = seqused_k;
    if (!c.seqlen_q) c.seqlen_q = cu_seqlens_q.back() + 9;
    if (!c.seqlen_k) c.seqlen_k = cu_seqlens_k.back() + 9;
    return c;
}
template <auto kMember> Case with(Case c, auto value) {
    c.*kMember = value;
    return c;
}
Case head_dim_of_v(Case c, int head_dim_v) { return with<&Case::head_dim_v>(c, head_dim_v); }
Case with_spike(Case c, int begin, int end) { return with<&Case::spike>(c, std::vector{begin, end}); }
Case in_any_order(Case c) { return with<&Case::in_any_order>(c, true); }
Case part_of_more(Case c) { return with<&Case::is_part>(c, true); }
Case with_max(Case c) { return with<&Case::has_max>(c, true); }
Case with_sinks(Case c) { return with<&Case::has_sinks>(c, true); }
Case with_mods(Case c, double softcap, bool has_alibi, std::optional<DType> bias = {}, std::string shape = "BHRK") {
    c.softcap = softcap, c.has_alibi = has_alibi, c.bias = bias, c.bias_shape = shape;
    return c;
}
Case with_block_mask(Case c, std::string shape) {
    c.has_block_mask = true, c.bias_shape = shape;
    return c;
}
Case lengths_of_keys(Case c, std::vector<int> seqused_k) { return with<&Case::seqused_k>(c, seqused_k); }

constexpr DType boolean = DType::kBool, f32 = DType::kFloat32;
const std::vector<Case> cases = {
    // name, dtype, batch_size, nheads, nheads_k, seqlen_q, seqlen_k, head_dim, is_causal, ...
    // Every tile, with at least two blocks of rows and two of keys.
    {"fp32_64",           f32, 1, 1, 1,  70, 130,  64, false},
    {"fp32_128",          f32, 1, 1, 1,  65,  66, 128, true},
    {"fp32_256",          f32, 1, 1, 1,  33,  47, 253, false},
    {"fp32_128_narrow",   f32, 1, 1, 1,  66,  65, 100, true,  kRows,     {}, kNarrow},
    {"fp32_256_narrow",   f32, 1, 1, 1,  33,  18, 132, false, kHeads,    {}, kNarrow, 0.5},
    {"fp16_64",           f16, 1, 2, 1,  66,  65,  36, false, kOffset,   {}, kBest, 0.5},
    {"fp16_128",          f16, 1, 2, 1,  75,  75,  72, false, kRows,     {70}},
    {"fp16_256",          f16, 1, 1, 1,  34,  33, 200, true,  kRows},
    {"fp16_128_narrow",   f16, 1, 1, 1,  65,  40, 128, false, kHeads,    {}, kNarrow},
    {"fp16_256_narrow",   f16, 1, 2, 1,  33,  33, 256, true,  kRows,     {20}, kNarrow},
    {"bf16_64",           b16, 1, 1, 1,  65,  66,  64, true},
    {"bf16_128",          b16, 1, 2, 2,  65, 100, 127, true},
    {"bf16_256",          b16, 1, 1, 1,  33,  40, 256, false, kGaps},
    {"bf16_256_narrow",   b16, 1, 1, 1,  33,  17, 160, true,  kHeads,    {}, kNarrow},
    {"fp32_64_long",      f32, 1, 1, 1, 520,  70,  64, false, kRows},
    {"fp32_256_long",     f32, 1, 1, 1, 513,  20, 136, false, kGaps},
    {"sm80_fp16_64",      f16, 1, 2, 1, 130, 150,  64, true,  kHeads,    {},   kSm80, 0.25},
    {"sm80_fp16_128",     f16, 1, 2, 2, 140, 140, 128, true,  kRows,     {133}, kSm80},
    {"sm80_fp16_192",     f16, 1, 1, 1,  66,  90, 160, true,  kHeads,    {},   kSm80},
    {"sm80_bf16_96",      b16, 1, 1, 1, 130, 130,  96, true,  kHeads,    {},   kSm80},
    {"sm80_bf16_192",     b16, 1, 2, 1,  65,  65, 192, false, kRows,     {64}, kSm80},
    {"sm80_bf16_256",     b16, 1, 1, 1,  66, 100, 200, true,  kHeads,    {},   kSm80},
    // 20 heads that share keys: the tile of the first sample is split in two, that of the second is not.
    {"sm80_splits",       b16, 2, 20, 1, 110, 110, 64, true,  kRows,     {110, 40}, kSm80},
    part_of_more({"sm80_splits_drop", f16, 1, 20, 1, 105, 70, 104, false, kHeads, {}, kSm80, 0.25}),
    {"sm80_128_narrow",   f16, 1, 2, 1,  70, 130, 120, true,  kHeads,    {},   kSm80Narrow, 0.25},
    {"sm80_256_narrow",   b16, 1, 2, 1,  70,  70, 200, true,  kRows,     {65}, kSm80Narrow},
    {"sm80_one",          b16, 1, 1, 1,   1,   1,   8, true,  kHeads,    {},   kSm80},
    {"dmma_64",           f32, 2, 4, 2, 140, 140,  40, false, kRows,     {3, 129}, kDmma},
    {"dmma_64_causal",    f32, 1, 1, 1,  66, 130,  64, true,  kHeads,    {},   kDmma},
    {"dmma_128",          f32, 1, 2, 1,  70,  70, 100, false, kRows,     {65}, kDmma},
    {"dmma_128_causal",   f32, 1, 2, 1, 129,  65, 128, true,  kRows,     {},   kDmma},
    // Three blocks of keys or more, whose order shows in the bits of dq.
    {"sm80_order",        b16, 1, 2, 1,  70, 200,  96, false, kHeads,    {},   kSm80},
    {"sm80_order_narrow", f16, 1, 1, 1,  40, 130, 136, true,  kRows,     {},   kSm80Narrow},
    // What else the interface allows.
    {"gqa",               f32, 2, 6, 2,   3,  70,  16, true,  kRows},
    {"dropout",           f32, 2, 4, 2,  83,  70,  20, true,  kRows,     {}, kBest, 0.1},
    part_of_more({"dropout_part", f32, 2, 4, 2, 83, 70, 20, true, kRows, {}, kBest, 0.1}),
    {"dropout_all",       f32, 1, 1, 1,   5,   5,   8, false, kGaps,     {}, kBest, 1},
    {"seq_lens_clamped",  f32, 4, 1, 1,  67,  67,  20, false, kHeads,    {1 << 30, 66, 0, -5}},
    {"rows_without_keys", f32, 1, 1, 1, 130,  60,  16, true},
    {"one",               f32, 1, 1, 1,   1,   1,   1, true},
    // Every tile; lengths about those of the blocks, several blocks of rows and of keys.
    {"sm90_64",           f16, 1, 2, 1, 193, 257,  64, false, kHeads,    {},   kSm90},
    {"sm90_64_causal",    b16, 1, 1, 1, 385, 384,  64, true,  kRows,     {},   kSm90},
    {"sm90_77",           b16, 3, 2, 1,  77,  77,  64, true,  kRows,     {},   kSm90},
    {"sm90_40",           b16, 1, 1, 1, 191, 127,  40, false, kSlices,   {},   kSm90},
    {"sm90_80_causal",    f16, 1, 2, 2, 192, 193,  80, true,  kSlices,   {},   kSm90},
    {"sm90_128_causal",   b16, 1, 2, 1, 257, 513, 128, true,  kRows,     {},   kSm90},
    {"sm90_104",          b16, 1, 1, 1, 191, 127, 104, false, kSlices,   {},   kSm90},
    {"sm90_128_long_causal", b16, 2, 1, 1, 70, 2060, 128, true, kHeads,  {},   kSm90},
    {"sm90_136_causal",   f16, 1, 1, 1, 128,  81, 136, true,  kSlices,   {},   kSm90},
    {"sm90_256",          f16, 1, 1, 1, 129, 193, 256, false, kRows,     {},   kSm90},
    {"sm90_256_one_block", b16, 4, 4, 1, 200, 60, 256, false, kRows,     {},   kSm90},
    {"sm90_256_no_keys",  b16, 2, 4, 1, 700,  60, 256, true,  kRows,     {},   kSm90},
    {"sm90_200_causal",   b16, 1, 1, 1, 127, 257, 200, true,  kHeads,    {},   kSm90},
    // The backward pass: dropout, heads that share keys and are split, many blocks of keys that take turns.
    {"sm90_drop_64",      b16, 1, 2, 1, 200, 260,  64, true,  kRows,     {},   kSm90, 0.25},
    part_of_more({"sm90_drop_128", f16, 1, 2, 1, 130, 140, 104, false, kHeads, {}, kSm90, 0.25}),
    {"sm90_splits",       b16, 5, 20, 1, 110, 110, 64, true,  kRows,     {110, 40, 30, 110, 20}, kSm90},
    lengths_of_keys({"sm90_splits_turns", b16, 2, 20, 1, 110, 150, 64, false, kRows, {110, 40}, kSm90}, {150, 150}),
    window({"sm90_unseen", b16, 1, 20, 1, 110, 500, 64, false, kRows, {}, kSm90}, 100, 64),
    {"sm90_splits_drop",  f16, 1, 20, 1, 105,  70, 104, false, kHeads,   {},   kSm90, 0.25},
    part_of_more({"sm90_drop_192", b16, 2, 2, 1, 130, 200, 192, true, kHeads, {130, 77}, kSm90, 0.25}),
    {"sm90_drop_256",     f16, 1, 2, 1,  75, 140, 200, false, kSlices,   {},   kSm90, 0.25},
    {"sm90_turns",        b16, 1, 2, 1, 200, 700,  64, false, kRows,     {},   kSm90},
    // Pairs of blocks.
    in_any_order({"sm90_pair",        f16, 1, 1, 1, 129, 193, 256, false, kRows,   {},   kSm90}),
    in_any_order({"sm90_pair_causal", b16, 2, 4, 2, 200, 300, 200, true,  kHeads,  {},   kSm90}),
    in_any_order({"sm90_pair_192",    b16, 1, 2, 1, 150, 270, 192, true,  kSlices, {},   kSm90}),
    in_any_order({"sm90_pair_lens",   b16, 3, 1, 1, 170, 170, 256, true,  kSlices, {64, 129, 128}, kSm90}),
    in_any_order(packed({"sm90_pair_packed", f16, 1, 2, 1, 0, 0, 256, true, kRows, {}, kSm90}, {0, 1, 130, 131, 200},
                        {0, 90, 90, 193, 330})),
    in_any_order(window({"sm90_pair_window", b16, 1, 1, 1, 70, 400, 256, false, kHeads, {}, kSm90}, 100, 64)),
    {"sm90_turns_causal", f16, 1, 1, 1, 200, 700, 128, true,  kRows,     {},   kSm90},
    {"sm90_many_192",     b16, 2, 4, 2, 200, 140, 192, true,  kHeads,    {},   kSm90},
    {"sm90_256_rows",     f16, 1, 1, 1, 330,  70, 256, false, kRows,     {},   kSm90},
    {"sm90_long",         b16, 1, 2, 2, 2090, 200, 128, true,  kRows,     {},   kSm90},
    in_any_order({"sm90_long_late", f16, 1, 2, 2, 2090, 200, 120, false, kHeads, {},  kSm90}),
    in_any_order({"sm90_long_few", f16, 1, 2, 2, 2050,  70, 120, false, kHeads,  {},  kSm90}),
    in_any_order({"sm90_many_late", b16, 1, 4, 2, 385, 130,  64, true,  kHeads,  {},   kSm90}),
    // Samples that end where a block does, a row later, in the first row or before it, or only say so.
    {"sm90_lens_64",      f16, 6, 1, 1, 260, 260,  64, false, kHeads,    {1, 128, 129, 0, 256, 1 << 30}, kSm90},
    {"sm90_lens_128",     b16, 4, 1, 1, 360, 360, 128, false, kRows,     {1, 192, 193, 321}, kSm90},
    {"sm90_lens_192",     f16, 3, 1, 1, 230, 230, 192, false, kHeads,    {80, 161, 64}, kSm90},
    {"sm90_lens_256",     b16, 3, 1, 1, 170, 170, 256, true,  kSlices,   {64, 129, 128}, kSm90},
    // Persistent blocks, which take tiles in turn, or by a counter those of several heads at a time.
    {"sm90_many_causal",  b16, 1, 8, 4, 385, 130,  64, true,  kHeads,    {},   kSm90},
    in_any_order({"sm90_waves",       b16, 1, 130, 65, 200, 200, 64, true, kRows,  {},   kSm90}),
    {"sm90_many_pairs",   f16, 1, 12, 1, 150, 180, 128, true,  kRows,    {},   kSm90},
    {"sm90_many_lens",    b16, 5, 4, 1, 200, 200,  48, true,  kRows,     {0, 200, 5, 129, 0}, kSm90},
    // What else the interface allows.
    {"sm90_one",          b16, 1, 1, 1,   1,   1,   8, true,  kHeads,    {},   kSm90},
    {"sm90_one_row",      f16, 2, 4, 1,   1, 400, 128, true,  kRows,     {},   kSm90},
    {"sm90_no_keys_yet",  b16, 1, 2, 1, 300,  60, 128, true,  kHeads,    {},   kSm90},
    {"sm90_expanded",     f16, 2, 4, 2, 130, 200,  64, false, kExpanded, {},   kSm90},
    {"sm90_scale_0",      f16, 1, 1, 1,  70, 200,  64, true,  kHeads,    {},   kSm90, 0, 0},
    {"sm90_scale_below_0", b16, 2, 1, 1, 200, 200, 128, false, kRows,    {190, 177}, kSm90, 0, -1},
    // Scores that grow by more than 15 binary orders from one block without a mask to the next.
    {"sm90_scale_30",     f16, 1, 2, 1, 150, 400,  64, false, kHeads,    {},   kSm90, 0, 30},
    {"sm90_scale_30_96",  f16, 1, 1, 1,  70, 289,  88, false, kSlices,   {},   kSm90, 0, 30},
    {"sm90_scale_30_256", f16, 1, 1, 1,  70, 193, 256, false, kRows,     {},   kSm90, 0, 30},
    // Windows: wider than a block of keys, narrower, and of one key. Blocks may be cut at both ends.
    window({"simt_window",      f32, 1, 2, 1, 150, 170,  36, false, kGaps}, 30, 20),
    window({"dmma_window",      f32, 1, 1, 1, 130, 200,  64, false, kHeads,  {}, kDmma}, 40, 0),
    window({"sm80_window",      f16, 1, 2, 1, 200, 300,  64, false, kHeads,  {}, kSm80}, 150, 0),
    window({"sm80_window_both", b16, 2, 2, 2, 150, 150, 128, false, kRows,   {}, kSm80, 0.25}, 20, 33),
    window({"sm80_window_left", f16, 1, 1, 1, 300, 100,  96, false, kHeads,  {}, kSm80}, 10, -1),
    window({"sm80_window_below_0", f16, 1, 1, 1, 300, 300, 64, false, kHeads, {}, kSm80, 0, -1}, 280, 0),
    window({"sm90_window",      f16, 1, 2, 1, 400, 500,  64, false, kHeads,  {}, kSm90}, 200, 0),
    window({"sm90_window_both", b16, 2, 2, 2, 250, 250, 128, false, kRows,   {}, kSm90}, 20, 33),
    window({"sm90_window_one",  b16, 1, 4, 1, 200, 300, 192, false, kRows,   {}, kSm90}, 0, 0),
    window({"sm90_window_left", f16, 1, 1, 1, 400, 150,  96, false, kSlices, {}, kSm90}, 70, -1),
    window({"sm90_window_256",  b16, 1, 1, 1,  70, 400, 256, false, kHeads,  {}, kSm90}, 100, 64),
    window({"sm90_window_long", f16, 1, 1, 1,  70, 2100, 128, false, kRows,  {}, kSm90}, 2060, 0),
    // A block that is cut on the left has the largest scores, also of keys that are hidden.
    window(with_spike({"sm90_window_spike", f16, 1, 1, 1, 400, 400, 64, false, kHeads, {}, kSm90, 0, 30}, 128, 256),
           200, 0),
    window({"sm90_window_below_0", f16, 1, 1, 1, 70, 300, 64, false, kHeads, {}, kSm90, 0, -1}, 150, 0),
    // Chunks that end within a block of rows or of keys, have a block whole, or hide the first rows.
    chunks({"simt_chunks",      f32, 1, 2, 1, 150, 170,  36, false, kGaps}, 40),
    chunks(window({"sm80_chunks_window", b16, 1, 4, 2, 150, 150, 128, false, kRows, {}, kSm80}, 20, 33), 64),
    chunks({"sm90_chunks",      f16, 1, 2, 1, 400, 500,  64, true,  kHeads,  {}, kSm90}, 200),
    chunks({"sm90_chunks_more_rows", b16, 2, 2, 2, 250, 200, 128, false, kRows, {250, 30}, kSm90}, 70),
    chunks(in_any_order({"sm90_chunks_pair", b16, 1, 1, 1, 200, 400, 256, true, kHeads, {}, kSm90}), 100),
    chunks({"sm90_chunks_dropout", f16, 1, 2, 1, 200, 300, 64, true, kHeads, {}, kSm90, 0.1}, 150),
    chunks(with_mods({"sm90_chunks_mods", b16, 1, 2, 1, 150, 300, 128, false, kHeads, {}, kSm90, 0.1, -0.2}, 2, true), 70),
    with_max({"simt_max",       f32, 1, 2, 1,  70, 130,  36, true,  kRows}),
    with_max(with_mods({"sm80_max", f16, 1, 2, 1, 130, 150, 64, true, kHeads, {}, kSm80, 0.25}, 2, true)),
    with_max(with_sinks({"sm90_max", f16, 2, 4, 2, 200, 330, 64, true, kRows, {200, 165}, kSm90})),
    with_max({"sm90_max_scale_30", b16, 1, 1, 1, 70, 401, 128, false, kHeads, {}, kSm90, 0, 30}),
    with_max(packed({"sm90_max_packed", b16, 1, 2, 1, 0, 0, 192, true, kRows, {}, kSm90}, {0, 70, 70, 200},
                    {0, 30, 50, 300})),
    with_block_mask({"sm90_units",   f16, 1, 2, 1, 400, 500,  64, false, kHeads,  {}, kSm90}, "HRK"),
    with_block_mask({"sm90_units_causal", b16, 2, 2, 1, 450, 450, 128, true, kRows, {450, 321}, kSm90}, "RK"),
    with_block_mask({"sm90_units_splits", b16, 2, 20, 1, 110, 110, 64, false, kRows, {110, 40}, kSm90}, "HRK"),
    in_any_order(with_block_mask({"sm90_units_pair", f16, 1, 4, 2, 200, 400, 256, true, kRows, {}, kSm90}, "HRK")),
    with_block_mask({"simt_units",   f32, 1, 2, 1, 150, 170,  36, true,  kGaps}, "HRK"),
    with_block_mask(with_mods({"simt_units_bias", f16, 2, 2, 1, 70, 130, 100, false, kRows, {}, kBest, 0.25}, 2, true), "BHRK"),
    with_block_mask({"sm80_units",   f16, 2, 4, 1, 300, 450,  64, false, kHeads,  {}, kSm80}, "RK"),
    in_any_order(with_block_mask(with_max({"sm80_units_max", b16, 1, 2, 1, 200, 450, 128, true, kRows, {}, kSm80}), "HRK")),
    in_any_order(with_block_mask({"sm80_units_256", f16, 1, 1, 1, 200, 300, 200, false, kHeads, {}, kSm80, 0.25}, "RK")),
    with_block_mask(with_sinks({"sm90_units_96", b16, 1, 1, 1, 70, 2300, 88, false, kSlices, {}, kSm90}), "BHRK"),
    with_block_mask({"sm90_units_256", b16, 2, 1, 1, 2200, 130, 256, false, kHeads, {}, kSm90, 0, -1}, "BRK"),
    with_block_mask({"sm90_units_scale_30", f16, 1, 2, 1, 200, 700, 128, false, kHeads, {}, kSm90, 0, 30}, "HRK"),
    // Packed batches: samples of no rows, of no keys, of one row, and longer than a tile.
    packed({"simt_packed_causal", f32, 1, 2, 2, 0, 0,  72, true,  kHeads}, {0, 3, 90, 130}, {0, 60, 61, 140}),
    packed({"simt_packed_drop",   f16, 1, 2, 1, 0, 0,  40, false, kRows, {}, kBest, 0.25}, {0, 40, 61}, {0, 20, 90}),
    packed({"dmma_packed",        f32, 1, 2, 1, 0, 0,  64, true,  kRows,  {}, kDmma}, {0, 70, 70, 71, 150},
           {0, 5, 70, 71, 230}),
    packed({"sm80_packed_causal", b16, 1, 4, 2, 0, 0, 128, true,  kRows,  {}, kSm80}, {0, 70, 199, 200, 330},
           {0, 70, 199, 200, 430}),
    part_of_more(packed({"sm80_packed_drop", b16, 1, 2, 2, 0, 0, 200, true, kHeads, {}, kSm80, 0.25}, {0, 33, 70, 140},
                        {0, 33, 70, 140})),
    packed({"sm90_packed",        f16, 1, 2, 1, 0, 0,  64, false, kRows,  {}, kSm90}, {0, 250, 250, 251, 300, 530},
           {0, 5, 70, 71, 71, 300}),
    packed({"sm90_packed_turns",  b16, 1, 2, 2, 0, 0, 128, false, kRows,  {}, kSm90}, {0, 70, 400}, {0, 70, 600}),
    packed({"sm90_packed_causal", b16, 1, 4, 2, 0, 0, 128, true,  kRows,  {}, kSm90}, {0, 70, 199, 200, 430},
           {0, 70, 199, 200, 630}),
    part_of_more(packed({"sm90_packed_drop", b16, 1, 4, 2, 0, 0, 256, true, kHeads, {}, kSm90, 0.25}, {0, 33, 33, 170},
                        {0, 33, 50, 190})),
    // Rows and keys with lengths of their own, in both layouts. The keys of packed samples may then overlap.
    lengths_of_keys({"simt_lengths", f32, 3, 2, 1,  70, 130,  40, true, kRows,  {70, 33, 0}}, {130, 5, 60}),
    packed({"simt_overlap",       f32, 1, 2, 1, 0, 0,  40, true,  kRows,  {33, 50, 10}}, {0, 40, 90, 100},
           {0, 0, 30, 130}, {60, 130, 9}),
    lengths_of_keys({"sm80_lengths", f16, 3, 4, 1, 150, 300,  64, true, kRows,  {150, 65, 0}, kSm80}, {300, 5, 60}),
    // The first sample has the most splits, more than the padded lengths would give it without a limit.
    lengths_of_keys({"sm90_lengths", b16, 3, 4, 1, 250, 400, 128, true, kRows,  {250, 65, 0}, kSm90}, {400, 5, 60}),
    packed({"sm90_overlap",       f16, 1, 2, 1, 0, 0, 104, false, kSlices, {190, 66, 1}, kSm90}, {0, 200, 290, 300},
           {0, 0, 30, 330}, {160, 330, 9}),
    // What cu_seqlens holds beyond the tensors is clamped.
    packed({"sm80_clamped",       f16, 1, 1, 1, 99, 139, 64, true, kHeads, {}, kSm80}, {-7, 50, 60, 1 << 30},
           {3, 50, 139, 1 << 30}),
    packed({"sm90_clamped",       f16, 1, 1, 1, 99, 139, 64, true, kHeads, {}, kSm90}, {-7, 50, 60, 1 << 30},
           {3, 90, 140, 1 << 30}),
    // V, and out, of another head_dim; sinks, also of rows without keys and of rows beyond the end of a sample.
    head_dim_of_v({"simt_wide_v",  f32, 1, 2, 1,  70,  70,  20, true,  kRows,  {65}}, 72),
    head_dim_of_v({"simt_narrow_v", f16, 1, 1, 1, 66,  65,  72, false, kGaps,  {}, kBest, 0.25}, 5),
    with_sinks({"simt_sinks",      f32, 2, 2, 1,  70,  40,  20, true,  kRows,  {70, 33}}),
    head_dim_of_v({"dmma_wide_v",   f32, 1, 1, 1,  66, 130,  40, true,  kHeads, {}, kDmma}, 100),
    head_dim_of_v({"sm80_wide_v",   b16, 2, 4, 2, 140, 140,  40, true,  kRows,  {3, 129}, kSm80, 0.25}, 104),
    head_dim_of_v({"sm80_narrow_v", f16, 1, 2, 1,  70, 130, 192, false, kSlices, {}, kSm80}, 128),
    with_sinks({"sm80_sinks",       f16, 2, 4, 2, 140, 100,  64, true,  kRows,  {140, 65}, kSm80}),
    head_dim_of_v({"sm90_wide_v",   b16, 2, 4, 2, 250, 250,  40, true,  kRows,  {3, 229}, kSm90}, 104),
    head_dim_of_v({"sm90_narrow_v", f16, 1, 2, 1, 150, 260, 192, true,  kSlices, {}, kSm90}, 128),
    head_dim_of_v(in_any_order({"sm90_narrow_v_late", b16, 1, 4, 2, 250, 150, 192, false, kHeads, {}, kSm90}), 128),
    head_dim_of_v({"sm90_narrow_v_lens", b16, 4, 1, 1, 200, 200, 176, true, kRows, {48, 129, 145, 0}, kSm90}, 104),
    head_dim_of_v({"sm90_narrow_v_splits", f16, 2, 20, 1, 110, 110, 192, true, kRows, {110, 40}, kSm90}, 128),
    head_dim_of_v(window({"sm90_narrow_v_window", f16, 1, 2, 1, 200, 400, 136, false, kHeads, {}, kSm90}, 100, 33), 16),
    head_dim_of_v({"sm90_narrow_v_drop", b16, 1, 2, 1, 130, 140, 192, true, kRows, {}, kSm90, 0.25}, 128),
    packed(with_sinks(head_dim_of_v({"sm90_narrow_v_packed", b16, 1, 2, 1, 0, 0, 192, true, kRows, {}, kSm90}, 128)),
           {0, 70, 199, 200, 330}, {0, 70, 199, 200, 430}),
    packed(head_dim_of_v({"sm90_packed_v", b16, 1, 2, 1, 0, 0, 96, true, kRows, {}, kSm90}, 40), {0, 70, 199, 200},
           {0, 70, 199, 200}),
    with_sinks({"sm90_sinks",       f16, 2, 4, 2, 200, 130,  64, true,  kRows,  {200, 165}, kSm90}),
    // Softcap, ALiBi, biases of several dtypes and shapes, masks.
    with_mods({"simt_softcap",      f32, 1, 2, 1,  70, 130,  40, true,  kGaps}, 2, false),
    with_mods({"simt_alibi",        f16, 2, 2, 1, 140,  70,  72, false, kRows, {}, kBest, 0.25}, 0, true),
    with_mods({"simt_bias",         f32, 2, 2, 2,  66,  65, 130, false, kRows, {66, 33}}, 3, true, f32, "HRK"),
    part_of_more(with_mods({"simt_bias_of_keys", b16, 2, 2, 1, 66, 70, 40, true, kHeads, {}, kBest, 0.25}, 0, false,
                           b16, "BK")),
    with_mods({"simt_mask",         f32, 2, 4, 2,  70,  66,  20, false, kRows}, 0, false, boolean, "BRK"),
    packed(with_mods({"simt_packed_mods", f32, 1, 2, 1, 0, 0, 40, true, kRows}, 4, true), {0, 40, 40, 61},
           {0, 20, 30, 90}),
    part_of_more(with_mods({"sm80_softcap_drop", b16, 1, 4, 1, 130, 100, 128, false, kRows, {}, kSm80, 0.25}, 2,
                           false)),
    with_mods({"sm80_alibi",        b16, 2, 4, 2, 140, 140, 128, true,  kRows,  {3, 129}, kSm80}, 0, true),
    with_mods({"sm80_bias",         f16, 2, 2, 1, 140, 200,  96, false, kRows,  {}, kSm80, 0.25}, 3, true, f16, "HRK"),
    with_mods({"sm80_bias_fp32",    b16, 1, 2, 1,  70,  70, 192, true,  kRows,  {}, kSm80}, 0, false, f32, "BHRK"),
    with_mods({"sm80_mask",         f16, 2, 4, 2, 130, 140, 256, false, kHeads, {}, kSm80}, 0, false, boolean, "BK"),
    packed(with_mods({"sm80_packed_mods", f16, 1, 2, 1, 0, 0, 64, true, kRows, {}, kSm80}, 4, true), {0, 70, 70, 199},
           {0, 70, 99, 200}),
    with_mods({"sm90_mods_drop",    b16, 1, 2, 1, 150, 150,  64, true,  kRows,  {}, kSm90, 0.25}, 2, true),
    with_mods({"sm90_mods_drop_128", f16, 1, 2, 1, 100, 150, 128, false, kHeads, {}, kSm90, 0.25}, 3, false),
    // All scores are far below 0, and the last tile of keys is padded.
    with_spike({"sm90_low_128",     f16, 1, 1, 1,  65, 192, 128, true,  kHeads, {}, kSm90, 0, -400}, 0, 192),
    with_spike({"sm90_low_256",     b16, 1, 1, 1,  65, 100, 256, false, kHeads, {}, kSm90, 0, -600}, 0, 100),
    with_mods({"sm90_softcap",      f16, 1, 2, 1, 250, 300,  64, true,  kHeads, {}, kSm90}, 2, false),
    with_mods({"sm90_bias",         f16, 2, 2, 1, 200, 304,  96, false, kRows,  {}, kSm90}, 3, true, f16, "HRK"),
    with_mods({"sm90_bias_of_keys", b16, 1, 2, 1, 150, 176, 192, true,  kRows,  {}, kSm90}, 0, false, b16, "BHK"),
    with_mods({"sm90_mask",         f16, 2, 4, 2, 130, 241, 256, false, kHeads, {}, kSm90}, 0, false, boolean, "BK"),
    with_mods({"sm90_mask_rows",    b16, 2, 2, 1, 270, 208, 128, true,  kSlices, {265, 208}, kSm90}, 0, true, boolean,
              "BRK"),
    with_mods({"sm90_mods_scale_30", b16, 1, 2, 1, 150, 400, 128, false, kHeads, {}, kSm90, 0, 30}, 0, true, b16, "HRK"),
    with_mods({"sm90_mask_scale_30", f16, 1, 2, 1, 200, 477, 64, true, kHeads, {}, kSm90, 0, 30}, 9, false, boolean, "RK"),
    // With ALiBi the walk along the keys begins in the middle; samples that share a bias take turns.
    with_mods({"sm90_mask_alibi",   b16, 2, 2, 1, 300, 500, 128, false, kHeads, {}, kSm90}, 0, true, boolean, "HRK"),
    lengths_of_keys(with_mods({"sm90_alibi_no_keys", b16, 3, 1, 1, 200, 200, 128, false, kRows, {}, kSm90}, 0, true),
                    {200, 0, 90}),
    with_mods({"sm90_mask_all",     f16, 2, 2, 1, 200, 300,  96, false, kRows,  {}, kSm90}, 0, false, boolean),
    with_mods({"sm90_bias_samples", b16, 3, 4, 2, 200, 208,  64, true,  kRows,  {}, kSm90}, 0, false, b16, "HRK"),
    packed(with_mods({"sm90_packed_mods", f16, 1, 2, 1, 0, 0, 64, true, kRows, {}, kSm90}, 4, true), {0, 70, 70, 299},
           {0, 70, 99, 400}),
    window(with_mods({"sm90_window_mods", b16, 1, 4, 1, 210, 312, 40, false, kRows, {}, kSm90}, 3, false, b16, "RK"), 20,
           33),
#if MINIMAL_ATTN_EMULATED  // a backward pass is not asked for it
    {"sm90_no_rows",      f16, 1, 2, 1,   0, 200,  64, false, kHeads,    {},   kSm90},
#endif
};

bool is_sm90_backward(const Case &c) {
    const bool has_mask_alone = c.bias == boolean && c.softcap == 0 && !c.has_alibi && c.dropout_p == 0 && !c.chunk;
    if (c.tiling != kSm90 || (c.bias && !has_mask_alone) || (c.seqlen_q == 0 && !c.is_packed())) return false;
    return c.max_head_dim() <= 128 || (c.softcap == 0 && !c.has_alibi);
}
bool is_sm80(const Case &c) { return c.tiling == kSm80 || c.tiling == kSm80Narrow; }
bool is_narrow(const Case &c) { return c.tiling == kNarrow || c.tiling == kSm80Narrow; }
bool needs_hopper(const Case &c) { return c.tiling == kSm90 || c.tiling == kDmma; }
