// The op minimal_attn::flash_decode for both bindings: the checks that decode.cu's memory safety rests on, and its
// workspace. The checks that speak to users are in ../minimal_attn/pages.py.
#include "ops/decode_op.h"

#include <vector>

#include "common/counters.h"
#include "ops/cache_launches.h"

namespace minimal_attn {

namespace {

// What is wrong with the shapes of q, of the cache and of its tables: a ValueError.
Reason find_cache_fault(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v, int64_t batch_size,
                        const OptionalTensor &cu_seqlens_q, const OptionalTensor &page_table,
                        std::initializer_list<const OptionalTensor *> of_samples) {
    if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4) return "q, k and v must be 4D";
    if (!k.sizes().slice(0, 3).equals(v.sizes().slice(0, 3)) || k.size(3) != q.size(3))
        return "the shapes of q, k and v do not match";
    if (k.size(1) == 0 || q.size(1) % k.size(1)) return "nheads must be a multiple of nheads_k";
    if (std::min(q.size(3), v.size(3)) < 1 || std::max(q.size(3), v.size(3)) > 256)
        return "Unsupported head_dim: 1 to 256 is supported";
    for (const TorchTensor *x : {&q, &k, &v}) {
        if (x->device() != q.device()) return "q, k and v must be on the same device";
        if (x->stride(3) != 1 && x->size(3) != 1) return "the last dimension must be contiguous";
    }
    if (page_table && !(is_like(*page_table, {batch_size, page_table->dim() == 2 ? page_table->size(1) : 0},
                                ScalarType::Int, q) &&
                        (page_table->stride(1) == 1 || page_table->size(1) <= 1)))
        return "page_table must be int32 (batch_size, max_pages) with a contiguous last dimension on the device of q";
    for (const OptionalTensor *x : of_samples)
        if (*x && !(is_like(**x, {batch_size}, ScalarType::Int, q) && (*x)->is_contiguous()))
            return "lengths, leftpad_k and cache_batch_idx must be contiguous int32 tensors with one value a sample on "
                   "the device of q";
    if (cu_seqlens_q && (q.size(0) != 1 || batch_size < 1 || !(*cu_seqlens_q).is_contiguous() ||
                         !is_like(*cu_seqlens_q, {batch_size + 1}, ScalarType::Int, q)))
        return "cu_seqlens_q must be a contiguous int32 tensor on the device of q, which is packed: (1, H, T, D)";
    const int64_t capacity = page_table ? page_table->size(1) * k.size(2) : k.size(2);
    if (std::max({batch_size, k.size(0), q.size(2) + capacity, q.size(1) * q.size(2)}) > INT32_MAX - 256)
        return "there are over 2^31 - 257 samples, pages, rows and keys together, or rows of all heads";
    return {};
}

#if MINIMAL_ATTN_CUDA
using Decode = void(const DecodeParams &);
using Size = int64_t(const DecodeParams &);

// What the launches of a call need besides its tensors. They may overlap, so it is freed after the last of them.
class Scratch {
    std::vector<TorchTensor> tensors;
    int *counters, *tile_counter = nullptr;

  public:
    // All launches have counters of their own, from one request: a graph that captures them has no use for two. Where
    // torch writes the zeros, its kernel ends before the first launch begins.
    Scratch(const DecodeParams &p, FewestRows fewest, const TorchTensor &q) {
        int64_t count = 0;
        launch_by_rows(
            p, fewest, num_sms(), can_launch_early(), [](const DecodeParams &) {},
            [&](const DecodeParams &p) { count += sm90::num_decode_counters(p); },
            [&](const DecodeParams &p) { count += sm80::num_decode_counters(p); });
        counters = zeroed_counters(count, p.stream);
        if (counters) return;
        counters = static_cast<int *>(tensors.emplace_back(make_zeros({count}, ScalarType::Int, q)).data_ptr());
    }
    void prefill(DecodeParams p, const TorchTensor &q) {
        if (!tile_counter) tile_counter = static_cast<int *>(empty(sizeof(int), q));
        p.tile_counter = tile_counter;
        sm90::flash_prefill(p);
    }
    void decode(DecodeParams p, const TorchTensor &q, Decode flash_decode, Size workspace_bytes, Size num_counters) {
        p.workspace = empty(workspace_bytes(p), q), p.counters = counters, counters += num_counters(p);
        flash_decode(p);
    }

  private:
    void *empty(int64_t bytes, const TorchTensor &q) {
        return tensors.emplace_back(make_empty({bytes}, ScalarType::Byte, q)).data_ptr();
    }
};
#endif

}  // namespace

// q (B, H, Sq, D), or packed (1, H, T, D); k, v (N, Hk, S, D), a cache as DecodeParams has it. Returns out like q, with
// the head_dim of v, and lse (B, H, Sq).
std::tuple<TorchTensor, TorchTensor> flash_decode(
    const TorchTensor &q, const TorchTensor &k, const TorchTensor &v, const OptionalTensor &cu_seqlens_q,
    const OptionalTensor &seqused_q, const OptionalTensor &seqused_k, const OptionalTensor &page_table,
    const OptionalTensor &cache_batch_idx, const OptionalTensor &leftpad_k, const OptionalTensor &tree_mask,
    const OptionalTensor &sinks, const OptionalTensor &alibi_slopes, double softmax_scale, double softcap,
    int64_t window_left, int64_t window_right, int64_t num_splits, int64_t max_seqlen_q) {
    const int64_t batch_size = cu_seqlens_q ? cu_seqlens_q->numel() - 1 : q.size(0);
    if (const Reason fault = find_type_fault(q, k, v)) throw_type_error(*fault);
    if (const Reason fault = find_cache_fault(q, k, v, batch_size, cu_seqlens_q, page_table,
                                              {&seqused_q, &seqused_k, &cache_batch_idx, &leftpad_k}))
        throw_value_error(*fault);
    if (!page_table && !cache_batch_idx && k.size(0) != batch_size)
        throw_value_error("without page_table and cache_batch_idx, the cache must have a sequence for each sample");
    if (!(std::abs(softmax_scale) <= kMaxScale)) throw_value_error("softmax_scale must be in -2.3586e38..2.3586e38");
    if (std::min(window_left, window_right) < -1 || num_splits < 0 || num_splits > 256 || max_seqlen_q < 0)
        throw_value_error("windows must be at least -1, num_splits in 0..256 and max_seqlen_q at least 0");
    if (tree_mask && (!is_like(*tree_mask, {batch_size, q.size(2)}, ScalarType::Long, q) || q.size(2) > 64 ||
                      (tree_mask->stride(1) != 1 && q.size(2) > 1)))
        throw_value_error("tree_mask must be int64 (batch_size, seqlen_q), of up to 64 rows, with a contiguous last "
                          "dimension on the device of q");
    if (tree_mask && (cu_seqlens_q || std::max(window_left, window_right) >= 0))
        throw_value_error("tree_mask goes with a padded q and without a window");
    const Options options{
        .sinks = sinks, .alibi_slopes = alibi_slopes, .softmax_scale = softmax_scale, .softcap = softcap};
    if (const Reason fault = find_mods_fault(q, kBHSD, batch_size, options)) throw_value_error(*fault);
    if (sinks && !(is_like(*sinks, {q.size(1)}, lse_dtype(q), q) && sinks->is_contiguous()))
        throw_value_error("sinks must be contiguous float32 with one value a head on the device of q");

    DecodeParams p{};
    set_inputs(p, q, k, v, softmax_scale, {-1, -1}, kBHSD);
    set_options(p, options);
    auto pointer = [](const OptionalTensor &x) { return x ? static_cast<const int *>(x->const_data_ptr()) : nullptr; };
    p.cu_seqlens_q = pointer(cu_seqlens_q), p.seqused_q = pointer(seqused_q), p.seqused_k = pointer(seqused_k);
    p.page_table = pointer(page_table), p.cache_batch_idx = pointer(cache_batch_idx), p.leftpad_k = pointer(leftpad_k);
    if (tree_mask) {
        p.tree_mask = static_cast<const uint64_t *>(tree_mask->const_data_ptr());
        p.tree_batch_stride = tree_mask->stride(0);
    }
    p.batch_size = batch_size, p.num_sequences = int(k.size(0)), p.page_size = int(k.size(2));
    if (page_table) p.page_table_stride = page_table->stride(0), p.seqlen_k = int(page_table->size(1) * k.size(2));
    if (p.num_sequences == 0) p.seqlen_k = 0;
    p.set_window(window_left, window_right);
    p.num_splits = int(num_splits);
    p.max_seqlen_q = int(cu_seqlens_q && max_seqlen_q ? std::min(max_seqlen_q, q.size(2)) : q.size(2));
    if (cu_seqlens_q) p.q.batch_stride = p.lse_batch_stride = 0;

    const DeviceGuard guard(q);
    TorchTensor out = new_out(q, v), lse = make_empty({q.size(0), p.nheads, p.seqlen_q}, lse_dtype(q), q);
    p.o = tensor_of(out, kBHSD, p.cu_seqlens_q), p.lse = lse.data_ptr();
#if MINIMAL_ATTN_CUDA
    if (q.is_cuda()) {
        const Gpu gpu{compute_capability(), has_fast_fp64()};
        if (const Reason reason = why_not(Kernel::kSm80, p, gpu, false))
            throw_not_implemented("backend='cuda' cannot serve this call: " + *reason + "; use backend='triton'");
        const FewestRows fewest = q.numel() ? fewest_rows(p, gpu) : FewestRows{};
        Scratch scratch(p, fewest, q);
        launch_by_rows(
            p, fewest, num_sms(), can_launch_early(), [&](const DecodeParams &p) { scratch.prefill(p, q); },
            [&](const DecodeParams &p) {
                scratch.decode(p, q, sm90::flash_decode, sm90::decode_workspace, sm90::num_decode_counters);
            },
            [&](const DecodeParams &p) {
                scratch.decode(p, q, sm80::flash_decode, sm80::decode_workspace, sm80::num_decode_counters);
            });
        return {out, lse};
    }
#endif
    throw_not_implemented("minimal_attn::flash_decode needs tensors on a GPU, and a build with kernels for it");
}

}  // namespace minimal_attn
