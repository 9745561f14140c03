// The two ops, and which kernel serves a call: the one source of both bindings, main.cpp's and stable.cpp's.
//
// Messages here are put together without iostreams, which crash where a toolchain links libstdc++ statically (seen with
// g++ 13).
#include "ops/ops.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace minimal_attn {

namespace {

void check_value(bool is_right, const char *fault) { if (!is_right) throw_value_error(fault); }

// What the forward and the backward pass have in common, checked. q [batch_size, nheads, seqlen_q, head_dim], k and v
// [batch_size, nheads_k, seqlen_k, head_dim], v's head_dim may differ; head_dim contiguous, dropout_seed one int64, or
// that and four a sample.
void set_params(AttnParams &p, const TorchTensor &q, const TorchTensor &k, const TorchTensor &v,
                const Options &options) {
    const Reason type_fault = find_type_fault(q, k, v);
    const Reason fault = find_fault(q, k, v, options.softmax_scale, kBHSD);
    if (type_fault) throw_type_error(*type_fault);
    if (fault) throw_value_error(*fault);
    check_value(options.window_left >= -1 && options.window_right >= -1,
                "window_left and window_right must be at least 0, or -1 for no bound");
    const Reason options_fault = find_fault(q, kBHSD, options);
    if (options_fault) throw_value_error(*options_fault);
    if (options.attn_bias) {
        const std::array<int64_t, 4> sizes{q.size(0), q.size(1), q.size(2), k.size(2)};
        for (int i = 0; i < 4; i++)
            check_value(options.attn_bias->size(i) == 1 || options.attn_bias->size(i) == sizes[i],
                        "attn_bias must broadcast to (batch_size, nheads, seqlen_q, seqlen_k)");
    }
    set_inputs(p, q, k, v, options.softmax_scale, {options.window_left, options.window_right}, kBHSD);
    set_options(p, options);
    const auto &[dropout_p, dropout_seed] = std::tie(options.dropout_p, options.dropout_seed);
    check_value(dropout_p >= 0 && dropout_p <= 1, "dropout_p must be in [0, 1]");
    if (dropout_p == 0) return;
    check_value(dropout_seed && dropout_seed->is_contiguous() &&
                    (dropout_seed->numel() == 1 || dropout_seed->numel() == 1 + 4 * p.batch_size) &&
                    is_like(*dropout_seed, dropout_seed->sizes(), ScalarType::Long, q),
                "dropout_seed must be one int64, or that and four a sample, in a contiguous tensor on the device of q");
    p.dropout_seed = static_cast<const int64_t *>(dropout_seed->const_data_ptr());
    p.has_dropout_origins = dropout_seed->numel() > 1;
    p.keep_count = uint32_t(0x1p15 - std::nearbyint(dropout_p * 0x1p15));  // as in dropout.py
    p.keep_scale = p.keep_count ? 0x1p15 / p.keep_count : 0;
}

// Checks what the backward pass takes beside checked q, k and v.
void check_backward(const TorchTensor &dout, const OptionalTensor &dlse, const TorchTensor &q, const TorchTensor &v,
                    const TorchTensor &out, const TorchTensor &lse) {
    const Sizes rows = q.sizes().slice(0, 3);
    auto is_like_out = [&](const TorchTensor &x) {
        return x.dim() == 4 && x.sizes().slice(0, 3).equals(rows) && is_like(x, x.sizes(), q.scalar_type(), q) &&
               x.size(3) == v.size(3);
    };
    auto is_of_rows = [&](const TorchTensor &x) { return is_like(x, rows, lse_dtype(q), q); };
    check_value(is_like_out(dout) && is_like_out(out), "dout and out must be like q, with the head_dim of v");
    check_value(out.stride(3) == 1 || out.size(3) == 1, "out must have a contiguous last dimension");
    check_value(is_of_rows(lse) && (!dlse || is_of_rows(*dlse)),
                "lse and dlse must be (batch_size, nheads, seqlen_q), float32, or float64 for float64");
    check_value(lse.is_contiguous(), "lse must be contiguous");
}

// The sums over samples and rows of x [batch_size, nheads, seqlen_q], without the rows that see nothing.
TorchTensor sum_over_rows(const TorchTensor &x, const TorchTensor &lse) {
    return torch_ops::sum(zero_where(torch_ops::isneginf(lse), x), Sizes({0, 2}));
}

// With P = exp(sink - lse), the share of the sink in a row's softmax, its gradient is the sum of P · (0 - delta) over
// the head's rows. A row beyond the end of its sample has lse -inf. The sum is in a fixed order.
TorchTensor gradient_of_sinks(const TorchTensor &sinks, const TorchTensor &lse, const TorchTensor &delta) {
    const TorchTensor share = torch_ops::exp(torch_ops::sub(torch_ops::unsqueeze(sinks, 1), lse));
    return torch_ops::neg(sum_over_rows(torch_ops::mul(share, delta), lse));
}

#if MINIMAL_ATTN_CUDA
void launch_backward(AttnBackwardParams &p, const TorchTensor &k, const TorchTensor &v, const TorchTensor &lse,
                     Kernel kernel) {
    // Where neither dq nor dk and dv are needed, simt::flash_backward forms delta, for dsinks, and dbias.
    const bool is_sm90 = kernel == Kernel::kSm90, has_workspace = is_sm90 || kernel == Kernel::kSm80;
    if (!has_workspace || !(p.dq.data || p.dk.data)) return simt::flash_backward(p);
    const TorchTensor lse_log2 = make_like(lse);
    OptionalTensor unneeded_dk, unneeded_dv, workspace;
    p.lse_log2 = static_cast<float *>(lse_log2.data_ptr());
    if (!p.dk.data) {  // one kernel makes all three gradients
        unneeded_dk = new_like(k), unneeded_dv = new_like(v);
        p.dk = tensor_of(*unneeded_dk, kBHSD, p.cu_seqlens_k), p.dv = tensor_of(*unneeded_dv, kBHSD, p.cu_seqlens_k);
    }
    if (const int64_t bytes = is_sm90 ? sm90::backward_workspace(p) : sm80::backward_workspace(p)) {
        workspace = make_empty({bytes}, ScalarType::Byte, k);
        p.workspace = workspace->data_ptr();
    }
    is_sm90 ? sm90::flash_backward(p) : sm80::flash_backward(p);
}
#endif

}  // namespace

// The op and the reason beside it.
Output flash_forward(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v, const Options &options) {
    AttnParams p{};
    set_params(p, q, k, v, options);
    return run_forward(p, q, v, kBHSD);
}

// The op: dq, dk, dv, dsinks and dbias, which have no elements where they are not needed. dout is like out, dlse like
// lse or none; both may have any strides.
Gradients flash_backward(const TorchTensor &dout_, const OptionalTensor &dlse, const TorchTensor &q,
                         const TorchTensor &k, const TorchTensor &v, const TorchTensor &out, const TorchTensor &lse,
                         const Options &options, bool deterministic, bool need_dq, bool need_dkv, bool need_dsinks,
                         bool need_dbias) {
    AttnBackwardParams p{};
    set_params(p, q, k, v, options);
    const bool is_packed = p.cu_seqlens_q;
    if (is_packed && p.seqused_k)
        throw_not_implemented("the backward pass of backend='cuda' does not take seqused_k with cu_seqlens_k, since "
                              "the keys of samples may overlap: minimal_attn.flash_attention gives each its own");
    check_backward(dout_, dlse, q, v, out, lse);
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
    const TorchTensor dbias = zero_sums(options.attn_bias, need_dbias);  // of many, so in the dtype of sums
    if (q.numel() == 0 || k.numel() == 0) {  // lse is that of the sinks alone
        if (need_dsinks && dlse) dsinks = sum_over_rows(*dlse, lse);
        for (TorchTensor *x : {&dq, &dk, &dv}) torch_ops::zero_(*x);
        return {dq, dk, dv, dsinks, dbias_of_sums(dbias)};
    }

    const Kernel kernel = choose(p, q, true).kernel;
    const TorchTensor delta = make_like(lse);
    TorchTensor dout = dout_;
    p.dout = tensor_of(dout, kBHSD, is_packed);
    // Some dout cannot be loaded as it is: that of a sum has strides of 0, others are not 16-byte aligned. A copy costs
    // less than a slower kernel.
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
    p.deterministic = deterministic || are_algorithms_deterministic();
    OptionalTensor ascending;
    if (is_packed && p.deterministic) {  // blocks of keys wait for one another: none may be missing, whatever is given
        const TorchTensor given = torch_ops::stack({*options.cu_seqlens_q, *options.cu_seqlens_k});
        TorchTensor first = torch_ops::select(given, 1, 0);
        torch_ops::zero_(first);  // as kernels take it
        ascending = running_max(given, 1);
        p.cu_seqlens_q = static_cast<const int *>(ascending->const_data_ptr());
        p.cu_seqlens_k = p.cu_seqlens_q + p.batch_size + 1;
    }
    if (kernel == Kernel::kHost) host::flash_backward(p);
#if MINIMAL_ATTN_CUDA
    else launch_backward(p, k, v, lse, kernel);
#endif
    if (need_dsinks) dsinks = gradient_of_sinks(*options.sinks, lse, delta);
    return {dq, dk, dv, dsinks, dbias_of_sums(dbias)};
}

Gradients flash_backward_op(const TorchTensor &dout, const OptionalTensor &dlse, const TorchTensor &q,
                            const TorchTensor &k, const TorchTensor &v, const TorchTensor &out, const TorchTensor &lse,
                            const OptionalTensor &cu_seqlens_q, const OptionalTensor &cu_seqlens_k,
                            const OptionalTensor &seqused_q, const OptionalTensor &seqused_k,
                            const OptionalTensor &sinks, const OptionalTensor &alibi_slopes,
                            const OptionalTensor &attn_bias, double softmax_scale, double softcap, int64_t window_left,
                            int64_t window_right, double dropout_p, const OptionalTensor &dropout_seed,
                            bool deterministic, bool need_dq, bool need_dkv, bool need_dsinks, bool need_dbias) {
    return flash_backward(dout, dlse, q, k, v, out, lse,
                          {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes, attn_bias,
                           softmax_scale, softcap, window_left, window_right, dropout_p, dropout_seed},
                          deterministic, need_dq, need_dkv, need_dsinks, need_dbias);
}

// (name of the kernel that serves the tensors, why it is not the fast one or nothing). capability and fast_fp64: of a
// GPU that need not be here, as in kernels.h; without a capability, of the tensors' device. has_dropout, has_sinks,
// has_scores: of a call with dropout, with sinks, with softcap or ALiBi. attn_bias: one that Python has checked, 4D.
std::tuple<std::string, Reason> which_kernel(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v,
                                             bool has_dropout, std::optional<int64_t> capability, bool fast_fp64,
                                             bool has_sinks, bool has_scores, const OptionalTensor &attn_bias) {
    AttnParams p{};
    set_params(p, q, k, v, {.softmax_scale = 1, .window_left = -1, .window_right = -1});
    const int64_t seed = 0;
    if (has_dropout) p.dropout_seed = &seed;
    if (has_sinks) p.sinks = &seed;
    if (has_scores) p.softcap = 1;
    if (attn_bias) p.bias = bias_of(*attn_bias);
    const DeviceGuard guard(q);
    const auto [kernel, slow_because] =
        capability ? choose_kernel(p, Gpu{int(*capability), fast_fp64}, false) : choose(p, q, false);
    return {kKernelNames[int(kernel)], slow_because};
}

// Forces a kernel for GPUs by its name, or none, and returns which one was forced before.
std::optional<std::string> force_kernel(const std::optional<std::string> &name) {
    std::optional<Kernel> forced;
    for (Kernel kernel : {Kernel::kSimt, Kernel::kSm80, Kernel::kSm90, Kernel::kDmma})
        if (name == kKernelNames[int(kernel)]) forced = kernel;
    if (name && !forced) throw_value_error("there is no kernel '" + *name + "': a GPU has simt, sm80, sm90 and dmma");
    const auto before = forced_kernel.exchange(forced);
    return before ? std::optional<std::string>(kKernelNames[int(*before)]) : std::nullopt;
}

}  // namespace minimal_attn
