// The op append_kvcache. The checks that speak to users are in minimal_attn/reference/append.py.
#include "flash_cache.h"
#include "ops/ops.h"

namespace minimal_attn {

// k_new, v_new (B, Hk, Sn, D), or packed (1, Hk, T, D); caches (N, Hk, S, D), see AppendParams. Returns the rotated q
// and the new lengths, or empty tensors where there are none.
TwoTensors append_kvcache(const TorchTensor &k_new, const TorchTensor &v_new, const TorchTensor &k_cache,
                          const TorchTensor &v_cache APPEND_OPTIONS(AS_PARAMETER)) {
    const TorchTensor &q_or_k = q ? *q : k_new;
    for (const TorchTensor *x : {&k_new, &v_new, &k_cache, &v_cache, &q_or_k}) {
        check_types(*x, k_new, k_new);
        check_value(x->dim() == 4 && x->device() == k_new.device() && has_contiguous_rows(*x),
                    "k_new, v_new, the caches and q must be 4D, with a contiguous last dimension, on one device");
    }
    const int64_t head_dim = k_new.size(3), head_dim_v = v_new.size(3), nheads_k = k_new.size(1);
    check_value(k_new.sizes().slice(0, 3).equals(v_new.sizes().slice(0, 3)) && k_cache.size(1) == nheads_k &&
                    k_cache.sizes().slice(0, 3).equals(v_cache.sizes().slice(0, 3)) && k_cache.size(3) == head_dim &&
                    v_cache.size(3) == head_dim_v && q_or_k.size(3) == head_dim && std::min(head_dim, head_dim_v) >= 1,
                "the shapes of k_new, v_new, the caches and q do not match");
    check_value(std::max({nheads_k * (head_dim + head_dim_v), q_or_k.size(1) * head_dim, k_new.size(2), q_or_k.size(2),
                          k_cache.size(0), k_cache.size(2)}) <= kMaxLength,
                "there are over 2^31 - 257 elements in a row of all heads, rows, pages, or rows of a page");
    check_value(seqused_k.has_value() != slot_mapping.has_value(), "either seqused_k or slot_mapping must be given");
    const int64_t batch_size = slot_mapping ? 1 : seqused_k->numel(), num_sequences = k_cache.size(0);
    const int64_t max_pages = page_table && page_table->dim() == 2 ? page_table->size(1) : 1;
    const int64_t capacity = num_sequences ? k_cache.size(2) * max_pages : 0;
    AppendParams p{};
    Checks checks{k_new};
    checks.set(p.seqused_k, "seqused_k", seqused_k, {batch_size});
    checks.set(p.cache_batch_idx, "cache_batch_idx", cache_batch_idx, {batch_size});
    checks.set(p.rotary_seqlens, "rotary_seqlens", rotary_seqlens, {batch_size});
    checks.set(p.cu_seqlens_new, "cu_seqlens_k_new", cu_seqlens_k_new, {batch_size + 1});
    checks.set(p.cu_seqlens_q, "cu_seqlens_q", cu_seqlens_q, {batch_size + 1});
    checks.set(p.slot_mapping, "slot_mapping", slot_mapping, {k_new.size(2)});
    checks.set_rows(p.page_table, p.page_table_stride, "page_table", page_table, {batch_size, max_pages});
    checks.require((batch_size >= 1 || !(cu_seqlens_k_new || cu_seqlens_q)) &&
                       k_new.size(0) == (cu_seqlens_k_new ? 1 : batch_size) &&
                       (!q || q->size(0) == (cu_seqlens_q ? 1 : batch_size)),
                   "k_new and q must have an element for each sample, or be packed: (1, heads, rows, head_dim)");
    checks.require(slot_mapping || page_table || cache_batch_idx || num_sequences == batch_size,
                   "without page_table and cache_batch_idx, the cache must have a sequence for each sample");
    checks.require(std::max(batch_size, k_new.size(2) + capacity) <= kMaxLength,
                   "there are over 2^31 - 257 samples, or new rows and places of a sample together");
    checks.require(!slot_mapping || !(page_table || cache_batch_idx || cu_seqlens_k_new || q || rotary_cos ||
                                      rotary_seqlens),
                   "slot_mapping goes with no tables, lengths, q or rotation");
    checks.require(rotary_cos.has_value() == rotary_sin.has_value(), "rotary_cos and rotary_sin go together");
    if (rotary_cos) {
        const bool is_table = rotary_cos->dim() == 2;
        const int64_t rows = is_table ? rotary_cos->size(0) : 0, columns = is_table ? rotary_cos->size(1) : 0;
        checks.require(rows >= 1 && rows <= INT32_MAX && columns >= 8 && columns % 8 == 0 &&
                           2 * columns <= k_new.size(3),
                       "rotary_cos must be (at least 1, rotary_dim / 2), rotary_dim a multiple of 16 up to head_dim");
        checks.set(p.rotary_cos, "rotary_cos", rotary_cos, {rows, columns}, k_new.scalar_type());
        checks.set(p.rotary_sin, "rotary_sin", rotary_sin, {rows, columns}, k_new.scalar_type());
        p.seqlen_rotary = int(rows), p.rotary_dim = int(2 * columns);
    }
    check_value(checks.fault);

    const DeviceGuard guard(k_new);
    TorchTensor q_rotated = q && rotary_cos ? new_like(*q) : make_empty({0}, k_new.scalar_type(), k_new);
    TorchTensor lengths = make_empty({slot_mapping ? 0 : batch_size}, ScalarType::Int, k_new);
    p.k_new = tensor_of(k_new, kBHSD, cu_seqlens_k_new.has_value()), p.k_cache = tensor_of(k_cache, kBHSD);
    p.v_new = tensor_of(v_new, kBHSD, cu_seqlens_k_new.has_value()), p.v_cache = tensor_of(v_cache, kBHSD);
    p.k_cache.data = k_cache.data_ptr(), p.v_cache.data = v_cache.data_ptr();
    if (!slot_mapping) p.lengths = static_cast<int *>(lengths.data_ptr());
    if (q && rotary_cos) {
        p.q = tensor_of(*q, kBHSD, cu_seqlens_q.has_value());
        p.q_rotated = tensor_of(q_rotated, kBHSD, cu_seqlens_q.has_value());
        p.nheads = int(q->size(1)), p.seqlen_q = int(q->size(2));
    }
    p.rotary_interleaved = rotary_interleaved, p.q_advances = q_advances, p.dtype = *dtype_of(k_new);
    p.batch_size = int(batch_size), p.nheads_k = int(k_new.size(1)), p.seqlen_new = int(k_new.size(2));
    p.head_dim = int(k_new.size(3)), p.head_dim_v = int(v_new.size(3)), p.capacity = int(capacity);
    p.num_sequences = int(num_sequences), p.page_size = int(k_cache.size(2));
    if (k_new.is_cpu()) host::append_kvcache(p);
#if MINIMAL_ATTN_CUDA
    else if (k_new.is_cuda()) p.stream = current_stream(k_new), simt::append_kvcache(p);
#endif
    else throw std::runtime_error("minimal_attn: this build has no kernel for the device of k_new");
    return {q_rotated, lengths};
}

}  // namespace minimal_attn
