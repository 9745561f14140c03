// The op flash_decode. The checks that speak to users are in minimal_attn/reference/pages.py.
#include <vector>

#include "common/counters.h"
#include "ops/cache_launches.h"
#include "ops/ops.h"

namespace minimal_attn {

namespace {

#if MINIMAL_ATTN_CUDA
using Decode = void(const DecodeParams &);
using SizesOf = DecodeSizes(const DecodeParams &);

// The workspaces of a call's launches, which may overlap: they are freed after the last.
class Workspaces {
    std::vector<TorchTensor> tensors;
    int *counters, *tile_counter = nullptr;

  public:
    // Each launch has its own counters, all from one request: a second one would get the same. Where torch writes the
    // zeros, its kernel ends before the first launch begins.
    Workspaces(const DecodeParams &p, FewestRows fewest, const TorchTensor &q) {
        int64_t count = 0;
        launch_by_rows(
            p, fewest, num_sms(), can_launch_early(), [](const DecodeParams &) {},
            [&](const DecodeParams &p) { count += sm90::decode_sizes(p).num_counters; },
            [&](const DecodeParams &p) { count += sm80::decode_sizes(p).num_counters; });
        counters = zeroed_counters(count, p.stream);
        if (counters) return;
        counters = static_cast<int *>(tensors.emplace_back(make_zeros({count}, ScalarType::Int, q)).data_ptr());
    }
    void prefill(DecodeParams p, const TorchTensor &q) {
        if (!tile_counter) tile_counter = static_cast<int *>(empty(sizeof(int), q));
        p.tile_counter = tile_counter;
        sm90::flash_prefill(p);
    }
    void decode(DecodeParams p, const TorchTensor &q, Decode flash_decode, SizesOf decode_sizes) {
        const auto [workspace_bytes, num_counters] = decode_sizes(p);
        p.workspace = empty(workspace_bytes, q), p.counters = counters, counters += num_counters;
        flash_decode(p);
    }

  private:
    void *empty(int64_t bytes, const TorchTensor &q) {
        return tensors.emplace_back(make_empty({bytes}, ScalarType::Byte, q)).data_ptr();
    }
};
#endif

}  // namespace

// q (B, H, Sq, D), or packed (1, H, T, D); k, v (N, Hk, S, D), see DecodeParams. Returns out and lse.
TwoTensors flash_decode(const TorchTensor &q, const TorchTensor &k,
                        const TorchTensor &v DECODE_OPTIONS(AS_PARAMETER)) {
    check_types(q, k, v);
    check_value(find_fault(q, k, v, kCache));
    const int64_t max_pages = page_table && page_table->dim() == 2 ? page_table->size(1) : 1;
    const int64_t num_sequences = k.size(0), capacity = num_sequences ? k.size(2) * max_pages : 0;
    DecodeParams p{};
    set_inputs(p, q, k, v, kBHSD);
    p.num_sequences = int(num_sequences), p.page_size = int(k.size(2)), p.seqlen_k = int(capacity);
    p.num_splits = int(num_splits);
    p.max_seqlen_q = int(cu_seqlens_q && max_seqlen_q ? std::min(max_seqlen_q, q.size(2)) : q.size(2));

    Options options{.cu_seqlens_q = cu_seqlens_q, .seqused_q = seqused_q, .seqused_k = seqused_k};
    SCORE_TENSORS(AS_ASSIGNMENT) SCORE_NUMBERS(AS_ASSIGNMENT)
    check_value(set_options(p, q, options));
    Checks checks{q};
    checks.set_rows(p.page_table, p.page_table_stride, "page_table", page_table, {p.batch_size, max_pages});
    checks.set(p.cache_batch_idx, "cache_batch_idx", cache_batch_idx, {p.batch_size});
    checks.set(p.leftpad_k, "leftpad_k", leftpad_k, {p.batch_size});
    checks.set_rows(p.tree_mask, p.tree_batch_stride, "tree_mask", tree_mask, {p.batch_size, q.size(2)});
    checks.require(!tree_mask || (q.size(2) <= 64 && !cu_seqlens_q && !p.has_mask()),
                   "tree_mask goes with a padded q of up to 64 rows and without another mask");
    checks.require(page_table || cache_batch_idx || num_sequences == p.batch_size,
                   "without page_table and cache_batch_idx, the cache must have a sequence for each sample");
    checks.require(num_splits >= 0 && num_splits <= 256 && max_seqlen_q >= 0,
                   "num_splits must be in 0..256 and max_seqlen_q at least 0");
    checks.require(std::max({p.batch_size, num_sequences, q.size(2) + capacity, q.size(1) * q.size(2)}) <= kMaxLength,
                   "there are over 2^31 - 257 samples, pages, rows and keys together, or rows of all heads");
    check_value(checks.fault);

    const DeviceGuard guard(q);
    TorchTensor out = new_out(q, v), lse = make_empty({q.size(0), p.nheads, p.seqlen_q}, lse_dtype(q), q);
    p.o = tensor_of(out, kBHSD, p.cu_seqlens_q), p.lse = lse.data_ptr();
#if MINIMAL_ATTN_CUDA
    if (q.is_cuda() && q.numel() == 0) return {out, lse};
    if (q.is_cuda()) {
        const Gpu gpu{compute_capability(), has_fast_fp64()};
        if (const Reason reason = why_not(Kernel::kSm80, p, gpu, false))
            throw_not_implemented("backend='cuda' cannot serve this call: " + *reason + "; use backend='triton'");
        const FewestRows fewest = fewest_rows(p, gpu);
        Workspaces workspaces(p, fewest, q);
        launch_by_rows(
            p, fewest, num_sms(), can_launch_early(), [&](const DecodeParams &p) { workspaces.prefill(p, q); },
            [&](const DecodeParams &p) { workspaces.decode(p, q, sm90::flash_decode, sm90::decode_sizes); },
            [&](const DecodeParams &p) { workspaces.decode(p, q, sm80::flash_decode, sm80::decode_sizes); });
        return {out, lse};
    }
#endif
    throw_not_implemented("minimal_attn::flash_decode needs tensors on a GPU, and a build with kernels for it");
}

}  // namespace minimal_attn
