"""The twin as ops of torch with a derivative, and as a backend of minimal_attn, which imports this file.
Read next: attention.py; ../minimal_attn/backends/ops.py, the derivative."""

import torch

from minimal_attn.backends import ops
from minimal_attn.backends.flops import decode_flops, register_flops
from minimal_attn.checks import FP8_DTYPES, check_fp8, empty_outputs, is_eager, wants_gradient
from minimal_attn.options import DECODE_FIELDS, OF_OP, Append, Cache, Options, schema_of

from . import append, attention, attention_bwd, decode, score_function
from .launching import INTERPRETING  # noqa: F401: minimal_attn asks for it, and calls triton_matmul
from .matmul import triton_matmul  # noqa: F401

FORWARD_FIELDS = (*Options._fields[:OF_OP], "autotune", "q_descale", "k_descale", "v_descale")
BACKWARD_FIELDS = FORWARD_FIELDS[:OF_OP + 1]


def _options(of_op):
    """The Options of an op's arguments after its tensors. The dispatcher drops the last ones that are defaults."""
    return Options(**dict(zip(FORWARD_FIELDS, of_op)))


def _run(q, k, v, options, *config):
    """Results of attention.run as an op returns them: max_logits is empty if it is not asked for."""
    out, lse, max_logits = attention.run(q, k, v, options, *config)
    return out, lse, lse.new_empty(0) if max_logits is None else max_logits


@torch.library.custom_op("minimal_attn::triton_forward", mutates_args=(), schema=(
    f"(Tensor q, Tensor k, Tensor v, {schema_of(Options, fields=FORWARD_FIELDS)}) -> (Tensor, Tensor, Tensor)"))
def triton_forward(q, k, v, *of_op):
    """out like q, bf16 if q is fp8 and with v's head_dim; lse and, if asked for, max_logits fp32 (B, H, Sq), of checked
    inputs: q (B, H, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv), all with a contiguous last dimension.
    minimal_attn.options.Options says what the other arguments are. With cu_seqlens_q and cu_seqlens_k, q, k and v are a
    packed batch: (1, H, Tq, D), (1, Hk, Tk, D) and (1, Hk, Tk, Dv)."""
    return _run(q, k, v, _options(of_op))


@torch.library.custom_op("minimal_attn::triton_backward", mutates_args=(), schema=(
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{schema_of(Options, fields=BACKWARD_FIELDS)}, bool need_dq=True, bool need_dkv=True, bool need_dsinks=False, "
    "bool need_dbias=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"))
def triton_backward(dout, dlse, q, k, v, out, lse, *given):
    """The gradients (dq, dk, dv, dsinks, dbias) of triton_forward's inputs by dout (B, H, Sq, Dv) and dlse (B, H, Sq)
    or None. Those that are not needed have no elements."""
    options, needed = _options(given[:OF_OP + 1]), given[OF_OP + 1:]
    gradients = attention_bwd.run(dout, dlse, q, k, v, out, lse, options, *needed, *ops.NEEDED[len(needed):])
    return tuple(like.new_empty(0) if x is None else x for x, like in zip(gradients, (q, q, q, lse, lse)))


def _backward(*inputs):
    """triton_backward, without the dispatcher where no one wants a second derivative."""
    tensors = (x for x in inputs if isinstance(x, torch.Tensor))
    if not is_eager(*tensors) or torch.is_grad_enabled():
        return triton_backward(*inputs)
    return attention_bwd.run(*inputs[:7], _options(inputs[7:-4]), *inputs[-4:])


class Attention(torch.autograd.Function):
    """triton_forward with its derivative, without the dispatcher; apply takes all arguments of the op, and after them
    the config of attention.run, if there is one."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _run(*inputs[:3], _options(inputs[3:]), *inputs[3 + len(FORWARD_FIELDS):])
        ops.save(ctx, inputs, output)
        return output

    backward = staticmethod(ops.backward_of(_backward, "triton"))


class ScoredAttention(torch.autograd.Function):
    """attention.run with a score_mod, and its derivative: (q, k, v, sinks, options, *captured), of which options has
    the sinks and a Compiled with the captured tensors, too."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, options, *captured):
        output = _run(q, k, v, options)
        ctx.save_for_backward(q, k, v, sinks, *output[:2], *captured)
        ctx.is_fixed = options.deterministic or torch.are_deterministic_algorithms_enabled()
        ctx.options = options._replace(sinks=None, score_mod=options.score_mod._replace(captured=()))
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx, dout, dlse, _):
        if torch.is_grad_enabled():  # create_graph=True
            raise NotImplementedError("backend='triton' has no second derivative with score_mod: use backend='torch' "
                                      "or backend='reference'")
        q, k, v, sinks, out, lse, *captured = ctx.saved_tensors
        if q.dtype in FP8_DTYPES:
            raise NotImplementedError(f"backend='triton' has no backward pass in {q.dtype}")
        need_q, need_k, need_v, need_sinks, _, *needed = ctx.needs_input_grad
        dout = torch.zeros_like(out) if dout is None else dout

        def run(gradients, *need_others):
            mod = ctx.options.score_mod._replace(captured=tuple(captured), gradients=gradients)
            return attention_bwd.run(dout, dlse, q, k, v, out, lse, ctx.options._replace(sinks=sinks, score_mod=mod),
                                     *need_others)[:4]

        def of_needed(make, *others):
            return tuple(make(*x) if need else None for need, *x in zip(needed, *others, captured))

        needs = need_q, need_k or need_v, need_sinks
        if not any(needed):
            return *run(None, *needs), None, *(None for _ in needed)
        if ctx.is_fixed:  # once for the largest term, then in whole numbers
            largest = of_needed(lambda x: lse.new_zeros(1, dtype=torch.int32))
            run(largest, False, False, False)
            num_terms = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
            sums = of_needed(lambda m, x: score_function.fixed_point(m, x, num_terms), largest)
            return *run(sums, *needs), None, *of_needed(score_function.floating, sums, largest)
        sums = of_needed(lambda x: torch.zeros_like(x, dtype=torch.float32))
        return *run(sums, *needs), None, *of_needed(lambda dx, x: dx.to(x.dtype), sums)


def forward_scored(q, k, v, options):
    """forward with a score_mod."""
    if not is_eager(q, k, v, *options.tensors):
        raise NotImplementedError("backend='triton' does not serve score_mod while something traces or transforms: use "
                                  "backend='torch' under torch.compile and torch.func")
    mod = score_function.compiled(options.score_mod, q)
    if not is_eager(*mod.captured):
        raise NotImplementedError("backend='triton' reads what score_mod captures as plain tensors: use "
                                  "backend='torch' under torch.func")
    options = options._replace(score_mod=mod)
    if any(map(wants_gradient, (q, k, v, options.sinks, *mod.captured))):
        return ScoredAttention.apply(q, k, v, options.sinks, options, *mod.captured)
    return _run(q, k, v, options)


def forward(q, k, v, options):
    """The forward of minimal_attn's backend "triton"."""
    check_fp8(q)
    # Tiles that are timed may be others in the next run.
    is_fixed = options.deterministic or torch.are_deterministic_algorithms_enabled()
    options = options._replace(autotune=options.autotune and not is_fixed)
    if options.score_mod is not None:
        output = forward_scored(q, k, v, options)
        return output if options.return_max_logits else output[:2]
    inputs = q, k, v, *options.tensors
    if is_eager(*inputs) and not any(map(wants_gradient, inputs)):
        output = attention.run(q, k, v, options)
    else:
        op = Attention.apply if is_eager(*inputs) else torch.ops.minimal_attn.triton_forward
        output = op(q, k, v, *options.of_op(), options.autotune, *options.descales)
    return output if options.return_max_logits else output[:2]


@torch.library.custom_op("minimal_attn::triton_decode", mutates_args=(), schema=(
    "(Tensor q, Tensor k_cache, Tensor v_cache, "
    f"{schema_of(Options, Cache, fields=DECODE_FIELDS)}) -> (Tensor, Tensor)"))
def triton_decode(q, k_cache, v_cache, *of_decode):
    """out like q with v_cache's head_dim, and lse fp32 (B, H, Sq), of checked inputs: q as of triton_forward, or packed
    by cu_seqlens_q alone, k_cache (N, Hk, S, D) and v_cache (N, Hk, S, Dv). minimal_attn.options.Cache says what the
    other arguments are, and minimal_attn.attention_with_kvcache checks them."""
    given = dict(zip(DECODE_FIELDS, of_decode))
    cache = Cache(**{name: given.pop(name) for name in Cache._fields if name in given})
    return decode.run(q, k_cache, v_cache, Options(**given), cache)


@triton_decode.register_fake
def _(q, k_cache, v_cache, *others):
    return empty_outputs(q, v_cache)


def forward_cached(q, k, v, options, cache):
    """The forward_cached of minimal_attn's backend "triton"."""
    if q.dtype in FP8_DTYPES:
        raise TypeError(f"Unsupported dtype: q is {q.dtype}, and attention to a cache takes float32, float16 and "
                        "bfloat16")
    if is_eager(q, k, v, *options.tensors, *cache[:4]):
        return decode.run(q, k, v, options, cache)
    return triton_decode(q, k, v, *options.of_decode(cache))


@torch.library.custom_op("minimal_attn::triton_append", mutates_args=("k_cache", "v_cache"), schema=(
    f"(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, {schema_of(Append)}) -> (Tensor, Tensor)"))
def triton_append(k_new, v_new, k_cache, v_cache, *of_append):
    """(q_rotated like q, lengths int32 (B,)) of checked inputs. The new row t of sample b, of k_new (B, Hk, Sn, D) and
    v_new (B, Hk, Sn, Dv) or packed by cu_seqlens_k_new, goes to place seqused_k[b] + t of the caches that
    triton_decode reads; a place, page or sequence that they do not have is not written. lengths is what seqused_k then
    is. With slot_mapping, int64 (T,), rows of (1, Hk, T, D) go to row s % S of sequence s // S, and seqused_k is None.

    With rotary_cos and rotary_sin (S_ro, rotary_dim / 2), new keys are rotated at position rotary_seqlens[b] + t, by
    default seqused_k[b] + t, and so is q, with q_advances=False all rows at the first position. An output that is not
    asked for has no elements."""
    return append.run(k_new, v_new, k_cache, v_cache, Append(*of_append))


triton_append.register_fake(ops.append_shapes)
ops.register("minimal_attn::triton_forward", "minimal_attn::triton_backward", _backward, "triton")
register_flops("triton_decode", decode_flops)
