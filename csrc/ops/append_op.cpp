// The op minimal_attn::append_kvcache for both bindings: the checks that append.cu's memory safety rests on, and its
// outputs. The checks that speak to users are in Python.
#include "ops/append_op.h"

namespace minimal_attn {

namespace {

void check(bool is_right, const char *text) { if (!is_right) throw_value_error(text); }

// None, or int32, contiguous and with `size` numbers.
void check_int32(std::initializer_list<const OptionalTensor *> tensors, int64_t size, const TorchTensor &like,
                 const char *text) {
    for (const OptionalTensor *x : tensors)
        if (*x && !(is_like(**x, {size}, ScalarType::Int, like) && (*x)->is_contiguous()))
            throw_value_error(text + std::string(", contiguous int32, on the device of k_new"));
}

// Of the new rows, of the caches and of q, and the tables of rotations.
void check_rows(const TorchTensor &k_new, const TorchTensor &v_new, const TorchTensor &k_cache,
                const TorchTensor &v_cache, const TorchTensor &q, const OptionalTensor &cos,
                const OptionalTensor &sin) {
    for (const TorchTensor *x : {&k_new, &v_new, &k_cache, &v_cache, &q}) {
        if (const Reason fault = find_type_fault(*x, k_new, k_new)) throw_type_error(*fault);
        check(x->dim() == 4 && x->device() == k_new.device() && (x->stride(3) == 1 || x->size(3) == 1),
              "k_new, v_new, the caches and q must be 4D, with a contiguous last dimension, on one device");
    }
    const int64_t head_dim = k_new.size(3), head_dim_v = v_new.size(3), nheads_k = k_new.size(1);
    check(k_new.sizes().slice(0, 3).equals(v_new.sizes().slice(0, 3)) && k_cache.size(1) == nheads_k &&
              k_cache.sizes().slice(0, 3).equals(v_cache.sizes().slice(0, 3)) && k_cache.size(3) == head_dim &&
              v_cache.size(3) == head_dim_v && q.size(3) == head_dim && std::min(head_dim, head_dim_v) >= 1,
          "the shapes of k_new, v_new, the caches and q do not match");
    check(std::max({nheads_k * (head_dim + head_dim_v), q.size(1) * head_dim, k_new.size(2), q.size(2),
                    k_cache.size(0), k_cache.size(2)}) <= INT32_MAX - 256,
          "there are over 2^31 - 257 elements in a row of all heads, rows, pages, or rows of a page");
    check(cos.has_value() == sin.has_value(), "rotary_cos and rotary_sin go together");
    for (const OptionalTensor *x : {&cos, &sin})
        check(!*x || ((*x)->dim() == 2 && (*x)->is_contiguous() && (*x)->size(0) >= 1 && (*x)->size(0) <= INT32_MAX &&
                      is_like(**x, cos->sizes(), k_new.scalar_type(), k_new) && (*x)->size(1) >= 1 &&
                      (*x)->size(1) % 8 == 0 && 2 * (*x)->size(1) <= head_dim),
              "rotary_cos and rotary_sin must be contiguous, of one shape, (at least 1, rotary_dim / 2), and of the "
              "dtype and device of k_new; rotary_dim must be a multiple of 16 up to head_dim");
}

}  // namespace

// Writes k_new and v_new (B, Hk, Sn, D), or packed (1, Hk, T, D), into the caches (N, Hk, S, D), see AppendParams.
// Returns q rotated and the new lengths int32 (B); without a rotation of q, or with slot_mapping, an empty tensor.
std::tuple<TorchTensor, TorchTensor> append_kvcache(
    const TorchTensor &k_new, const TorchTensor &v_new, const TorchTensor &k_cache, const TorchTensor &v_cache,
    const OptionalTensor &seqused_k, const OptionalTensor &page_table, const OptionalTensor &cache_batch_idx,
    const OptionalTensor &cu_seqlens_k_new, const OptionalTensor &slot_mapping, const OptionalTensor &q,
    const OptionalTensor &cu_seqlens_q, const OptionalTensor &rotary_cos, const OptionalTensor &rotary_sin,
    const OptionalTensor &rotary_seqlens, bool rotary_interleaved, bool q_advances) {
    check_rows(k_new, v_new, k_cache, v_cache, q ? *q : k_new, rotary_cos, rotary_sin);
    check(seqused_k.has_value() != slot_mapping.has_value(), "either seqused_k or slot_mapping must be given");
    const int64_t batch_size = slot_mapping ? 1 : seqused_k->numel(), num_sequences = k_cache.size(0);
    const int64_t max_pages = page_table && page_table->dim() == 2 ? page_table->size(1) : 1;
    const int64_t capacity = num_sequences ? k_cache.size(2) * max_pages : 0;
    check_int32({&seqused_k, &cache_batch_idx, &rotary_seqlens}, batch_size, k_new,
                "seqused_k, cache_batch_idx and rotary_seqlens must have one value a sample");
    check_int32({&cu_seqlens_k_new, &cu_seqlens_q}, batch_size + 1, k_new,
                "cu_seqlens_k_new and cu_seqlens_q must have one value more than there are samples");
    check((batch_size >= 1 || !(cu_seqlens_k_new || cu_seqlens_q)) &&
              k_new.size(0) == (cu_seqlens_k_new ? 1 : batch_size) &&
              (!q || q->size(0) == (cu_seqlens_q ? 1 : batch_size)),
          "k_new and q must have an element for each sample, or be packed: (1, heads, rows, head_dim)");
    check(!page_table || (is_like(*page_table, {batch_size, max_pages}, ScalarType::Int, k_new) &&
                          (max_pages <= 1 || page_table->stride(1) == 1)),
          "page_table must be int32 (batch_size, max_pages) with a contiguous last dimension on the device of k_new");
    check(slot_mapping || page_table || cache_batch_idx || num_sequences == batch_size,
          "without page_table and cache_batch_idx, the cache must have a sequence for each sample");
    check(std::max(batch_size, k_new.size(2) + capacity) <= INT32_MAX - 256,
          "there are over 2^31 - 257 samples, or new rows and places of a sample together");
    const bool has_samples = page_table || cache_batch_idx || cu_seqlens_k_new || q || rotary_cos || rotary_seqlens;
    check(!slot_mapping || (!has_samples && slot_mapping->is_contiguous() &&
                            is_like(*slot_mapping, {k_new.size(2)}, ScalarType::Long, k_new)),
          "slot_mapping must be contiguous int64 with one value for each row of k_new, (1, heads, rows, head_dim), on "
          "its device, and goes with no tables, lengths, q or rotation");

    const DeviceGuard guard(k_new);
    TorchTensor q_rotated = q && rotary_cos ? new_like(*q) : make_empty({0}, k_new.scalar_type(), k_new);
    TorchTensor lengths = make_empty({slot_mapping ? 0 : batch_size}, ScalarType::Int, k_new);
    auto pointer = [](const OptionalTensor &x) { return x ? static_cast<const int *>(x->const_data_ptr()) : nullptr; };
    AppendParams p{};
    p.k_new = tensor_of(k_new, kBHSD, cu_seqlens_k_new.has_value()), p.k_cache = tensor_of(k_cache, kBHSD);
    p.v_new = tensor_of(v_new, kBHSD, cu_seqlens_k_new.has_value()), p.v_cache = tensor_of(v_cache, kBHSD);
    p.k_cache.data = k_cache.data_ptr(), p.v_cache.data = v_cache.data_ptr();
    p.cu_seqlens_new = pointer(cu_seqlens_k_new), p.seqused_k = pointer(seqused_k);
    p.page_table = pointer(page_table), p.page_table_stride = page_table ? page_table->stride(0) : 0;
    p.cache_batch_idx = pointer(cache_batch_idx), p.rotary_seqlens = pointer(rotary_seqlens);
    if (slot_mapping) p.slot_mapping = static_cast<const int64_t *>(slot_mapping->const_data_ptr());
    else p.lengths = static_cast<int *>(lengths.data_ptr());
    if (q && rotary_cos) {
        p.q = tensor_of(*q, kBHSD, cu_seqlens_q.has_value());
        p.q_rotated = tensor_of(q_rotated, kBHSD, cu_seqlens_q.has_value());
        p.cu_seqlens_q = pointer(cu_seqlens_q), p.nheads = int(q->size(1)), p.seqlen_q = int(q->size(2));
    }
    if (rotary_cos) {
        p.rotary_cos = rotary_cos->const_data_ptr(), p.rotary_sin = rotary_sin->const_data_ptr();
        p.seqlen_rotary = int(rotary_cos->size(0)), p.rotary_dim = int(2 * rotary_cos->size(1));
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
