// The ops flash_forward and flash_backward, and which kernel serves a call.
// No iostreams: they crash where a toolchain links libstdc++ statically (seen with g++ 13).
#include "flash_bwd.h"
#include "ops/ops.h"

namespace minimal_attn {

namespace {

void check_and_set(AttnParams &p, const TorchTensor &q, const TorchTensor &k, const TorchTensor &v,
                   const Options &options) {
    check_types(q, k, v);
    check_value(set_params(p, q, k, v, options, kBHSD));
}

// Sums x [batch_size, nheads, seqlen_q] for each head, without empty and padding rows (lse is -inf).
TorchTensor sum_over_rows(const TorchTensor &x, const TorchTensor &lse) {
    return torch_ops::sum(zero_where(torch_ops::isneginf(lse), x), Sizes({0, 2}));
}

#if MINIMAL_ATTN_CUDA
void launch_backward(AttnBackwardParams &p, const TorchTensor &k, const TorchTensor &v, const TorchTensor &lse,
                     Kernel kernel) {
    // simt::flash_backward makes dbias, and delta for dsinks, if no other gradient is needed.
    const bool is_sm90 = kernel == Kernel::kSm90, has_workspace = is_sm90 || kernel == Kernel::kSm80;
    if (!has_workspace || !(p.dq.data || p.dk.data)) return simt::flash_backward(p);
    const TorchTensor lse_log2 = make_like(lse);
    OptionalTensor unneeded_dk, unneeded_dv;
    p.lse_log2 = static_cast<float *>(lse_log2.data_ptr());
    if (!p.dk.data) {  // one kernel makes all three gradients
        unneeded_dk = new_like(k), unneeded_dv = new_like(v);
        p.dk = tensor_of(*unneeded_dk, kBHSD, p.cu_seqlens_k), p.dv = tensor_of(*unneeded_dv, kBHSD, p.cu_seqlens_k);
    }
    OptionalTensor mask_words;
    if (const int64_t words = is_sm90 ? sm90::num_mask_words(p, true) : 0) {
        mask_words = make_empty({words}, ScalarType::Int, k);
        p.mask_words = static_cast<uint32_t *>(mask_words->data_ptr());
    }
    const int64_t bytes = is_sm90 ? sm90::backward_workspace(p) : sm80::backward_workspace(p);
    const TorchTensor workspace = make_empty({bytes}, ScalarType::Byte, k);
    p.workspace = workspace.data_ptr();
    is_sm90 ? sm90::flash_backward(p) : sm80::flash_backward(p);
}
#endif

}  // namespace

Output flash_forward(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v, const Options &options) {
    AttnParams p{};
    check_and_set(p, q, k, v, options);
    return run_forward(p, q, v, kBHSD);
}

// Unneeded gradients are empty. dout is like out, dlse like lse or none, with any strides.
Gradients flash_backward(const TorchTensor &dout_, const OptionalTensor &dlse, const TorchTensor &q,
                         const TorchTensor &k, const TorchTensor &v, const TorchTensor &out,
                         const TorchTensor &lse OPTIONS(AS_PARAMETER), bool need_dq, bool need_dkv, bool need_dsinks,
                         bool need_dbias) {
    Options options;
    OPTIONS(AS_ASSIGNMENT)
    AttnBackwardParams p{};
    check_and_set(p, q, k, v, options);
    p.return_max_logits = false;  // they have no gradient
    const bool is_packed = p.cu_seqlens_q;
    if (is_packed && p.seqused_k)
        throw_not_implemented("the backward pass of backend='cuda' does not take seqused_k with cu_seqlens_k, since "
                              "the keys of samples may overlap: minimal_attn.flash_attention gives each its own");
    const int64_t shape[] = {q.size(0), q.size(1), q.size(2), v.size(3)};
    const Sizes rows = Sizes(shape).slice(0, 3);
    check_value(find_fault("dout", dout_, shape, q.scalar_type(), q, Strides::kAny));
    check_value(find_fault("out", out, shape, q.scalar_type(), q, Strides::kRows));
    check_value(find_fault("lse", lse, rows, lse_dtype(q), q));
    if (dlse) check_value(find_fault("dlse", *dlse, rows, lse_dtype(q), q, Strides::kAny));
    check_value((options.sinks || !need_dsinks) && (options.attn_bias || !need_dbias),
                "need_dsinks goes with sinks, and need_dbias with attn_bias");
    const DeviceGuard guard(q);
    auto gradient = [](const TorchTensor &x, bool is_needed) {
        return is_needed ? new_like(x) : make_empty({0}, x.scalar_type(), x);
    };
    auto zero_sums = [&](const OptionalTensor &x, bool is_needed) {
        return is_needed ? make_zeros(x->sizes(), lse.scalar_type(), lse) : make_empty({0}, lse.scalar_type(), lse);
    };
    auto dbias_of_sums = [&](const TorchTensor &sums) {
        return need_dbias ? cast(sums, options.attn_bias->scalar_type()) : sums;
    };
    TorchTensor dq = gradient(q, need_dq), dk = gradient(k, need_dkv), dv = gradient(v, need_dkv);
    TorchTensor dsinks = zero_sums(options.sinks, need_dsinks);
    const TorchTensor dbias = zero_sums(options.attn_bias, need_dbias);  // a sum of many, hence in lse's dtype
    if (q.numel() == 0 || k.numel() == 0) {  // lse is the sinks' alone
        if (need_dsinks && dlse) dsinks = sum_over_rows(*dlse, lse);
        for (TorchTensor *x : {&dq, &dk, &dv}) torch_ops::zero_(*x);
        return {dq, dk, dv, dsinks, dbias_of_sums(dbias)};
    }

    const Kernel kernel = choose(p, q, true).kernel;
    const TorchTensor delta = make_like(lse);
    TorchTensor dout = dout_;
    p.dout = tensor_of(dout, kBHSD, is_packed);
    // A sum's dout has strides of 0, others are not 16-byte aligned. A copy costs less than a slower kernel.
    const bool has_tma = kernel == Kernel::kSm90;
    if (dout.stride(3) != 1 || ((has_tma || kernel == Kernel::kSm80) && why_not_16_bytes("dout", p.dout, 8)) ||
        (has_tma && why_not_tma("dout", p.dout, p.seqlen_q, p.head_dim_v))) {
        dout = contiguous_copy(dout);
        p.dout = tensor_of(dout, kBHSD, is_packed);
    }
    p.o = tensor_of(out, kBHSD, is_packed), p.lse = lse.data_ptr(), p.delta = delta.data_ptr();
    if (dlse) p.dlse = tensor_of(*dlse, kBHSD, is_packed);
    if (need_dq) p.dq = tensor_of(dq, kBHSD, is_packed);
    if (need_dkv) p.dk = tensor_of(dk, kBHSD, is_packed), p.dv = tensor_of(dv, kBHSD, is_packed);
    if (need_dbias) p.dbias = bias_of(dbias);
    p.deterministic = options.deterministic || are_algorithms_deterministic();
    OptionalTensor ascending;
    if (is_packed && p.deterministic) {  // blocks of keys wait for one another: none may be missing
        const TorchTensor given = torch_ops::stack({*options.cu_seqlens_q, *options.cu_seqlens_k});
        TorchTensor first = torch_ops::select(given, 1, 0);
        torch_ops::zero_(first);  // as kernels do
        ascending = running_max(given, 1);
        p.cu_seqlens_q = static_cast<const int *>(ascending->const_data_ptr());
        p.cu_seqlens_k = p.cu_seqlens_q + p.batch_size + 1;
    }
    if (kernel == Kernel::kHost) host::flash_backward(p);
#if MINIMAL_ATTN_CUDA
    else launch_backward(p, k, v, lse, kernel);
#endif
    if (need_dsinks) {  // the sum of share · (0 - delta) over a head's rows, in a fixed order
        const TorchTensor share = torch_ops::exp(torch_ops::sub(torch_ops::unsqueeze(*options.sinks, 1), lse));
        dsinks = torch_ops::neg(sum_over_rows(torch_ops::mul(share, delta), lse));
    }
    return {dq, dk, dv, dsinks, dbias_of_sums(dbias)};
}

// (kernel's name, why it is slow or nothing). capability, by default the tensors', and fast_fp64 may be another GPU's.
std::tuple<std::string, Reason> which_kernel(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v,
                                             const Options &options, std::optional<int64_t> capability,
                                             bool fast_fp64) {
    AttnParams p{};
    check_and_set(p, q, k, v, options);
    const DeviceGuard guard(q);
    const auto [kernel, slow_because] =
        capability ? choose_kernel(p, Gpu{int(*capability), fast_fp64}, false) : choose(p, q, false);
    return {kKernelNames[int(kernel)], slow_because};
}

std::optional<std::string> force_kernel(const std::optional<std::string> &name) {  // returns the one before
    std::optional<Kernel> forced;
    for (Kernel kernel : {Kernel::kSimt, Kernel::kSm80, Kernel::kSm90, Kernel::kDmma})
        if (name == kKernelNames[int(kernel)]) forced = kernel;
    if (name && !forced) throw_value_error("there is no kernel '" + *name + "': a GPU has simt, sm80, sm90 and dmma");
    const auto before = forced_kernel.exchange(forced);
    return before ? std::optional<std::string>(kKernelNames[int(*before)]) : std::nullopt;
}

}  // namespace minimal_attn
