// The derivative of flash_forward without the dispatcher: its backward pass runs no Python. The dispatcher's own, for
// torch.compile and all that watches ops, is in ../minimal_attn/ops.py.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include "binding/direct.h"

namespace minimal_attn {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

OptionalTensor if_defined(const at::Tensor &x) { return x.defined() ? OptionalTensor(x) : std::nullopt; }

// A tangent would be lost. Hessian-vector products, forward mode over a backward pass, have some.
void check_no_tangent(const char *name, const at::Tensor &x) {
    TORCH_CHECK_NOT_IMPLEMENTED(!x.defined() || !x._fw_grad(0).defined(),
                                "the backward pass of backend='cuda' has no forward-mode derivative, but ", name,
                                " has a tangent: use backend='reference'");
}

}  // namespace

// torch shows this name in errors and profiles.
struct FlashAttention : torch::autograd::Function<FlashAttention> {
    static variable_list forward(AutogradContext *ctx, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                                 const OptionalTensor &sinks, const OptionalTensor &attn_bias, const Options &options,
                                 bool deterministic, Reason *slow_because) {
        const auto [out, lse, reason] = flash_forward(q, k, v, options);
        *slow_because = reason;
        variable_list saved{q, k, v, out, lse};
        for (const OptionalTensor *x : {&options.cu_seqlens_q, &options.cu_seqlens_k, &options.seqused_q,
                                        &options.seqused_k, &sinks, &options.alibi_slopes, &attn_bias,
                                        &options.dropout_seed})
            saved.push_back(x->value_or(at::Tensor()));
        ctx->save_for_backward(saved);
        ctx->set_materialize_grads(false);  // an lse that nobody uses has no gradient
        ctx->saved_data["options"] =
            std::make_tuple(options.softmax_scale, options.softcap, options.window_left, options.window_right,
                            options.dropout_p, deterministic);
        return {out, lse};
    }

    static variable_list backward(AutogradContext *ctx, variable_list gradients) {
        const variable_list saved = ctx->get_saved_variables();
        const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &out = saved[3], &lse = saved[4];
        const at::Tensor &dlse = gradients[1];
        const at::Tensor dout = gradients[0].defined() ? gradients[0] : at::zeros_like(out);
        check_no_tangent("dout", dout);
        check_no_tangent("dlse", dlse);
        const auto [softmax_scale, softcap, window_left, window_right, dropout_p, deterministic] =
            ctx->saved_data["options"].to<std::tuple<double, double, int64_t, int64_t, double, bool>>();
        const Options options{if_defined(saved[5]),  if_defined(saved[6]),  if_defined(saved[7]), if_defined(saved[8]),
                              if_defined(saved[9]),  if_defined(saved[10]), if_defined(saved[11]), softmax_scale,
                              softcap, window_left, window_right, dropout_p, if_defined(saved[12])};
        const bool need_dq = ctx->needs_input_grad(0), need_dk = ctx->needs_input_grad(1);
        const bool need_dv = ctx->needs_input_grad(2), need_dsinks = options.sinks && ctx->needs_input_grad(3);
        // Gradients are counted by the tensors among forward's arguments.
        const bool need_dbias = options.attn_bias && ctx->needs_input_grad(options.sinks ? 4 : 3);
        static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("minimal_attn::flash_backward", "")
                                   .typed<decltype(flash_backward_op)>();
        // In grad mode a second derivative may follow, which ops.py refuses.
        const bool is_direct = !at::GradMode::is_enabled() && needs_no_dispatcher({&dout, &dlse, &q, &k, &v});
        const auto [dq, dk, dv, dsinks, dbias] =
            is_direct ? flash_backward(dout, if_defined(dlse), q, k, v, out, lse, options, deterministic, need_dq,
                                       need_dk || need_dv, need_dsinks, need_dbias)
                      : op.call(dout, if_defined(dlse), q, k, v, out, lse, options.cu_seqlens_q, options.cu_seqlens_k,
                                options.seqused_q, options.seqused_k, options.sinks, options.alibi_slopes,
                                options.attn_bias, softmax_scale, softcap, window_left, window_right, dropout_p,
                                options.dropout_seed, deterministic, need_dq, need_dk || need_dv, need_dsinks,
                                need_dbias);
        variable_list result(8);  // one for each argument of forward
        if (need_dq) result[0] = dq;
        if (need_dk) result[1] = dk;
        if (need_dv) result[2] = dv;
        if (need_dsinks) result[3] = dsinks;
        if (need_dbias) result[4] = dbias;
        return result;
    }
};

Output differentiable_forward(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Options &options,
                              bool deterministic) {
    Reason slow_because;
    const variable_list outputs = FlashAttention::apply(q, k, v, options.sinks, options.attn_bias, options,
                                                        deterministic, &slow_because);
    return {outputs[0], outputs[1], slow_because};
}

}  // namespace minimal_attn
