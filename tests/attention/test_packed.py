"""Packed batches: what the lengths of their samples may be, and how a batch becomes one and is undone."""

import dataclasses

import pytest
import torch

import minimal_attn
from conftest import captured
from minimal_attn import FlashMHA, flash_attention, reference_attention, unpad_input, which_kernel
from test_lengths import (BATCHES, DEVICE, DTYPES, IMPLS, KERNELS, TOLERANCE, Batch, by_loop, close, ints, make,
                          make_sinks, run)

SHARED_KEYS = next(x for x in BATCHES if x.name == "shared_keys")


@pytest.mark.parametrize("impl", KERNELS)
def test_max_seqlen_k_that_is_too_small_gives_nan_where_lengths_are_not_read(impl):
    """In the sample that is longer, in its gradients too, and in none of the others."""
    device = IMPLS[impl][1]
    q, k, v, dout, _ = make(SHARED_KEYS, DTYPES[impl], device)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def attend(*inputs):
        return run(impl, SHARED_KEYS, *inputs, max_seqlen_k=45)[0]

    if device == "cpu":
        with pytest.raises(ValueError, match="max_seqlen_k must be at least the largest of seqused_k, 60, got 45"):
            attend(*inputs)
    torch._dynamo.reset()
    for call in [torch.compile(attend, fullgraph=True, backend="aot_eager"), *[attend] * (device == "cuda")]:
        out = call(*inputs)
        dq, dk, dv = torch.autograd.grad(out, inputs, dout)
        for (_, rows, keys), seqlen in zip(SHARED_KEYS.samples(), SHARED_KEYS.seqused_k):
            assert (out[:, :, rows].isnan().all() and dq[:, :, rows].isnan().all()) == (seqlen > 45)
            assert out[:, :, rows].isnan().any() == dq[:, :, rows].isnan().any() == (seqlen > 45)
        assert dk[:, :, :45].isnan().all() and dv[:, :, :45].isnan().all()  # of the keys that it still has


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_max_seqlen_is_no_negative_number_and_no_bool(name):
    q, cu_seqlens = torch.randn(1, 2, 10, 16), ints(0, 4, 10)
    for error, match, value in [(ValueError, "must not be negative, got -1", -1),
                                (TypeError, "must be None, an int or a tensor of one element, got True", True)]:
        with pytest.raises(error, match=f"{name} {match}"):
            flash_attention(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **{name: value})


@pytest.mark.parametrize("impl", KERNELS)
def test_second_derivative_of_shared_keys_is_refused_by_name(impl):
    q, k, v, dout, _ = make(SHARED_KEYS, DTYPES[impl], IMPLS[impl][1])
    inputs = [x.nan_to_num().requires_grad_() for x in (q, k, v)]
    out, _ = run(impl, SHARED_KEYS, *inputs)
    dk, = torch.autograd.grad(out.square().sum(), inputs[1], create_graph=True)
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        torch.autograd.grad(dk.sum(), inputs)


def test_opcheck_of_the_copies():
    x, parts, rows = torch.randn(1, 2, 9, 4), torch.randn(5, 2, 4), torch.tensor([3, 3, 0, 8, 3])
    torch.library.opcheck(minimal_attn.packed._take_rows, (x.requires_grad_(), rows))
    torch.library.opcheck(minimal_attn.packed._add_rows, (parts.requires_grad_(), rows, 9))


# On a GPU.

@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["cuda:sm90"])
@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])  # of each tile
@pytest.mark.parametrize("causal", [False, True])
def test_bits_of_samples_of_a_large_batch(impl, D, causal):
    """More tiles than the GPU has SMs, of samples that are empty, of one row, or end beside a tile."""
    sizes = (0, 1, 63, 64, 65, 127, 129, 191, 193, 300) * 4
    batch = Batch("large", sizes, sizes[13:] + sizes[:13], causal=causal, H=16, Hk=4, D=D)
    q, k, v, _, _ = make(batch, DTYPES[impl], "cuda")
    out, lse = run(impl, batch, q, k, v)
    want, want_lse = run("reference", batch, *(x.double() for x in (q, k, v)))
    close(out, want, TOLERANCE[out.dtype])
    close(lse, want_lse, 1e-5)
    for b, (_, rows, keys) in list(enumerate(batch.samples()))[::7]:
        alone = dataclasses.replace(batch, rows=batch.rows[b:b + 1], keys=batch.keys[b:b + 1])
        got, got_lse = run(impl, alone, *(x[:, :, part].clone() for x, part in ((q, rows), (k, keys), (v, keys))))
        assert got.equal(out[:, :, rows]) and got_lse.equal(lse[:, :, rows])


@pytest.mark.gpu
@pytest.mark.parametrize("impl", [x for x in KERNELS if IMPLS[x][1] == "cuda"])
def test_cuda_graph_of_the_backward_pass_with_other_lengths_in_each_replay(impl, monkeypatch):
    if impl == "triton":
        monkeypatch.setattr("triton_ref.attention_bwd.MIN_WORK_FOR_A_STREAM", 0)
    batch = Batch("graph", (50, 150), (60, 140), window=(70, -1), causal=True, has_sinks=True, head_dim_v=64)
    q, k, v, dout, _ = make(batch, DTYPES[impl], "cuda")
    inputs = [x.requires_grad_() for x in (q, k, v, *make_sinks(batch, DTYPES[impl], "cuda"))]
    lengths = batch.lengths("cuda")

    def train():
        q, k, v, sinks = inputs
        out = flash_attention(q, k, v, True, window_size=(70, 0), **lengths, sinks=sinks, backend=IMPLS[impl][0])
        return torch.autograd.grad(out, inputs, dout)

    graph, gradients = captured(train)
    for rows, keys in ((50, 150), (60, 140)), ((0, 200), (199, 1)), ((123, 77), (1, 199)):
        other = dataclasses.replace(batch, rows=rows, keys=keys)
        for name, x in other.lengths("cuda").items():
            if x is not None:
                lengths[name].copy_(x)
        doubles = [x.detach().double().requires_grad_() for x in inputs]
        want = torch.autograd.grad(by_loop(other, *doubles)[0], doubles, dout.double())
        for _ in range(2):  # twice, for what a replay leaves behind in its workspace
            graph.replay()
            for got, ref in zip(gradients, want):
                close(got, ref, 3 * TOLERANCE[got.dtype])


# The functions of packed qkv and kv.

@pytest.mark.parametrize("name", ["qkvpacked", "kvpacked", "varlen_qkvpacked", "varlen_kvpacked"])
def test_keywords_of_functions_of_packed_tensors(name):
    """They reach the function of q, k and v, and errors speak of the one that was called, and of its arguments."""
    name = f"flash_attn_{name}_func"
    call, is_varlen = getattr(minimal_attn, name), "varlen" in name
    whole = minimal_attn.flash_attn_varlen_func if is_varlen else minimal_attn.flash_attn_func
    q, k, v = torch.randn(3, 10, 4, 16) if is_varlen else torch.randn(3, 2, 10, 4, 16)
    lengths = [ints(0, 4, 10)] * 2 if is_varlen else []
    given = (torch.stack([q, k, v], -3), *lengths[:1]) if "qkv" in name else (q, torch.stack([k, v], -3), *lengths)
    sinks, place = torch.randn(4), torch.empty_like(q)
    want = whole(q, k, v, *lengths, sinks=sinks, return_lse=True)
    got = call(*given, s_aux=sinks, out=place, return_softmax_lse=True, num_splits=2, pack_gqa=True, sm_margin=1,
               fa_version=3)
    assert got[0] is place and got[0].equal(want[0]) and got[1].equal(want[1])
    if is_varlen:
        used = dict(seqused_q=ints(2, 6), seqused_k=ints(4, 3))
        assert call(*given, **used, scheduler_metadata=ints(0)).equal(whole(q, k, v, *lengths, **used))
    for error, match, bad in [
            (NotImplementedError, f"^{name}: attention_chunk is not supported yet", dict(attention_chunk=3)),
            (NotImplementedError, f"^{name}: mask_mod is not supported yet", dict(mask_mod=len)),
            (TypeError, rf"^{name}\(\) got an unexpected keyword argument 'scale'", dict(scale=1.0)),
            (TypeError, f"^{name}: s_aux and sinks are names of the same", dict(s_aux=sinks, sinks=sinks))]:
        with pytest.raises(error, match=match):
            call(*given, **bad)
    if is_varlen and "qkv" in name:
        for error, match, bad in [(TypeError, "^cu_seqlens must be int32, got torch.int64", lengths[0].long()),
                                  (ValueError, "^cu_seqlens must ascend", ints(0, 8, 4)),
                                  (ValueError, f"^{name}: cu_seqlens must be given", None),
                                  (ValueError, r"^cu_seqlens must have one shape \(B \+ 1,\)", ints(0))]:
            with pytest.raises(error, match=match):
                call(given[0], bad)
        with pytest.raises(TypeError, match="^max_seqlen must be None, an int"):
            call(*given, 3.0)


@pytest.mark.parametrize("name", ["score_mod", "mask_mod", "aux_tensors", "dynamic_causal", "min_seqlen_k",
                                  "gather_kv_indices"])
def test_keywords_of_other_libraries_are_refused_by_name(name):
    q, cu_seqlens = torch.randn(10, 4, 16), ints(0, 4, 10)
    calls = {"flash_attn_varlen_func": lambda **given: minimal_attn.flash_attn_varlen_func(
        q, q, q, cu_seqlens, cu_seqlens, **given)}
    if name in ("score_mod", "mask_mod", "aux_tensors"):
        calls["flash_attn_func"] = lambda **given: minimal_attn.flash_attn_func(q[None], q[None], q[None], **given)
    for function, call in calls.items():
        assert call(**{name: None}).equal(call())
        with pytest.raises(NotImplementedError, match=f"^{function}: {name} is not supported yet"):
            call(**{name: [q]})


@pytest.mark.parametrize("name", ["leftpad_k", "cache_leftpad", "cache_seqlens", "cache_batch_idx", "page_table"])
def test_names_of_flash_attn_with_kvcache_are_explained(name):
    q = torch.randn(1, 2, 10, 16)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; .*attention_with_kvcache"):
        flash_attention(q, q, q, **{name: ints(3)})


def test_packed_funcs_compile_fullgraph():
    qkv, cu_seqlens = torch.randn(10, 3, 4, 16), ints(0, 4, 10)

    def attend(qkv, cu_seqlens):
        return minimal_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 6, causal=True, num_splits=1)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="aot_eager")(qkv, cu_seqlens),
                               attend(qkv, cu_seqlens))


# The other entry points.

def test_max_seqlen_changes_nothing_in_reference_attention_and_which_kernel():
    q, cu_seqlens = torch.randn(1, 2, 10, 16), ints(0, 4, 10)
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    given = dict(max_seqlen_q=1, max_seqlen_k=torch.tensor(6))
    assert reference_attention(q, q, q, **lengths, **given).equal(reference_attention(q, q, q, **lengths))
    assert which_kernel(q, q, q, **lengths, **given) == "host"


def mha(**options):
    return FlashMHA(32, 4, 2, causal=True, device=DEVICE, **options)


def test_flash_mha_of_no_samples():
    module, x = mha(backend="torch"), torch.empty(0, 12, 32, device=DEVICE)
    want = module(x)
    assert module(x, key_padding_mask=torch.ones(0, 12, dtype=torch.bool, device=DEVICE)).shape == want.shape
    x = torch.empty(0, 32, device=DEVICE)
    for values in ((0,), (0, 0), (0, 0, 0)):
        out = module(x, cu_seqlens=ints(*values, device=DEVICE))
        assert out.shape == x.shape and out.requires_grad
    x = torch.empty(3, 0, 32, device=DEVICE)
    assert module(x, key_padding_mask=torch.ones(3, 0, dtype=torch.bool, device=DEVICE)).shape == x.shape


def test_flash_mha_speaks_of_its_own_arguments():
    x = torch.randn(10, 32, device=DEVICE)
    for error, match, arguments in [
            (TypeError, "^cu_seqlens must be int32", dict(cu_seqlens=torch.arange(2, device=DEVICE))),
            (TypeError, "^cu_seqlens must be a torch.Tensor", dict(cu_seqlens=[0, 3])),
            (ValueError, r"^cu_seqlens must have one shape \(B \+ 1,\)", dict(cu_seqlens=ints(0, device=DEVICE))),
            (TypeError, "^max_seqlen must be None", dict(cu_seqlens=ints(0, 3, device=DEVICE), max_seqlen=3.0))]:
        with pytest.raises(error, match=match):
            mha()(x, **arguments)


@pytest.mark.parametrize("backend", minimal_attn.interface.BACKENDS)
def test_flash_mha_of_a_packed_batch_compiles_fullgraph(backend):
    """One graph for all values of cu_seqlens."""
    module, x = mha(backend=backend), torch.randn(20, 32, device=DEVICE)
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(lambda x, cu_seqlens: module(x, cu_seqlens=cu_seqlens, max_seqlen=20), fullgraph=True,
                             backend=lambda graph, inputs: graphs.append(graph) or graph)
    for values in ((0, 13, 20), (0, 0, 20)):
        cu_seqlens = ints(*values, device=DEVICE)
        torch.testing.assert_close(compiled(x, cu_seqlens), module(x, cu_seqlens=cu_seqlens))
    assert len(graphs) == 1


# Packing.

@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_masks_of_integers(dtype):
    mask, x = torch.tensor([[0, 1, 1], [1, 0, 0]], dtype=dtype, device=DEVICE), torch.randn(2, 3, 32, device=DEVICE)
    for got, want in zip(unpad_input(hidden_states=x, attention_mask=mask), unpad_input(x, mask.bool())):
        assert got == want if isinstance(got, int) else got.equal(want)
    module = mha(backend="torch")
    assert module(x, key_padding_mask=mask).equal(module(x, key_padding_mask=mask.bool()))
    with pytest.raises(TypeError, match="attention_mask must be bool, int64, int32 or uint8, .* got torch.float32"):
        unpad_input(x, mask.float())
