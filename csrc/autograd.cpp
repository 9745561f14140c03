// The derivative of flash_forward without the dispatcher: its backward pass runs no Python. The dispatcher's own, for
// torch.compile and all that watches ops, is in ../minimal_attn/ops.py.
//
// Read next: fast_path.cpp, which goes past the checks in Python as well.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops.h"

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
                                 const OptionalTensor &seq_lens, double softmax_scale, bool causal, double dropout_p,
                                 const OptionalTensor &dropout_seed, bool deterministic, Reason *slow_because) {
        const auto [out, lse, reason] = flash_forward(q, k, v, seq_lens, softmax_scale, causal, dropout_p,
                                                      dropout_seed, deterministic);
        *slow_because = reason;
        ctx->save_for_backward({q, k, v, out, lse, seq_lens.value_or(at::Tensor()),
                                dropout_seed.value_or(at::Tensor())});
        ctx->set_materialize_grads(false);  // an lse that nobody uses has no gradient
        ctx->saved_data["options"] = std::make_tuple(softmax_scale, causal, dropout_p, deterministic);
        return {out, lse};
    }

    static variable_list backward(AutogradContext *ctx, variable_list gradients) {
        const variable_list saved = ctx->get_saved_variables();
        const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &out = saved[3], &lse = saved[4];
        const at::Tensor &seq_lens = saved[5], &dropout_seed = saved[6], &dlse = gradients[1];
        const at::Tensor dout = gradients[0].defined() ? gradients[0] : at::zeros_like(out);
        check_no_tangent("dout", dout);
        check_no_tangent("dlse", dlse);
        const auto [softmax_scale, causal, dropout_p, deterministic] =
            ctx->saved_data["options"].to<std::tuple<double, bool, double, bool>>();
        const bool need_dq = ctx->needs_input_grad(0), need_dk = ctx->needs_input_grad(1);
        const bool need_dv = ctx->needs_input_grad(2);
        static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("minimal_attn::flash_backward", "")
                                   .typed<decltype(flash_backward)>();
        // In grad mode a second derivative may follow, which ops.py refuses.
        const bool is_direct = !at::GradMode::is_enabled() && needs_no_dispatcher({&dout, &dlse, &q, &k, &v});
        auto run = [&](auto &&function) {
            return function(dout, if_defined(dlse), q, k, v, out, lse, if_defined(seq_lens), softmax_scale, causal,
                            dropout_p, if_defined(dropout_seed), deterministic, need_dq, need_dk || need_dv);
        };
        const auto [dq, dk, dv] = is_direct ? run(flash_backward) : run([](auto &&...x) { return op.call(x...); });
        variable_list result(10);  // one for each argument of forward
        if (need_dq) result[0] = dq;
        if (need_dk) result[1] = dk;
        if (need_dv) result[2] = dv;
        return result;
    }
};

Output differentiable_forward(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                              const OptionalTensor &seq_lens, double softmax_scale, bool causal, double dropout_p,
                              const OptionalTensor &dropout_seed, bool deterministic) {
    Reason slow_because;
    const variable_list outputs = FlashAttention::apply(q, k, v, seq_lens, softmax_scale, causal, dropout_p,
                                                        dropout_seed, deterministic, &slow_because);
    return {outputs[0], outputs[1], slow_because};
}

}  // namespace minimal_attn
