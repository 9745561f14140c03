"""flex_attention beside torch.nn.attention.flex_attention's, on the CPU, where torch's has no gradients."""

import inspect
import math

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.testing import assert_close

import minimal_attn
from cases import in_a_new_process
from minimal_attn import flash_attention, flex_attention

pytestmark = pytest.mark.cpu
B, H, SQ, SK, D, DV = 2, 4, 100, 150, 16, 24
SIZES = B, None, SQ, SK, "cpu"


def mask_mod(b, h, q_idx, kv_idx):
    """The last rows of the second sample see no key."""
    return (q_idx + 30 >= kv_idx) & (q_idx < 100 - 20 * b)


MASKS = {"ours": minimal_attn.create_block_mask(mask_mod, *SIZES),
         "torch's": torch_flex.create_block_mask(mask_mod, *SIZES), "none": None}


def inputs(heads_k=H, samples_k=B):
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed, shape in
            enumerate([(B, H, SQ, D), (samples_k, heads_k, SK, D), (samples_k, heads_k, SK, DV)])]


def test_signature():
    """As torch's, and backend behind it."""
    ours, theirs = (inspect.signature(x).parameters for x in (flex_attention, torch_flex.flex_attention))
    assert list(ours) == [*theirs, "backend"]
    assert all((ours[name].default, ours[name].kind) == (x.default, x.kind) for name, x in theirs.items())


@pytest.mark.parametrize("options", [
    {}, dict(scale=0.4, heads_k=2, enable_gqa=True), dict(heads_k=1, enable_gqa=True, kernel_options={"BLOCK_M": 64})],
    ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_like_torch(kind, options):
    options = dict(options)
    q, k, v = inputs(options.pop("heads_k", H))
    theirs = torch_flex.flex_attention(q, k, v, block_mask=MASKS[kind] and MASKS["torch's"], **options,
                                       return_aux=torch_flex.AuxRequest(lse=True))
    out, lse = flex_attention(q, k, v, None, MASKS[kind], **options, return_lse=True)
    assert_close(out, theirs[0])
    assert_close(lse, theirs[1].lse)
    assert kind == "none" or (lse[1, :, 80:] == -math.inf).all() and (out[1, :, 80:] == 0).all()
    assert flex_attention(q, k, v, block_mask=MASKS[kind], **options, backend="reference").allclose(out, atol=1e-5)


def test_return_aux():
    q, k, v = inputs()
    want = flash_attention(q, k, v, block_mask=MASKS["ours"], return_lse=True, return_max_logits=True)
    for lse, max_scores in ((True, True), (True, False), (False, True), (False, False)):
        request = torch_flex.AuxRequest(lse=lse, max_scores=max_scores)
        out, aux = flex_attention(q, k, v, block_mask=MASKS["ours"], return_aux=request)
        assert isinstance(aux, torch_flex.AuxOutput)
        assert_close(out, want[0])
        for x, is_given, y in zip(aux, (lse, max_scores), want[1:]):
            assert (x is not None) == is_given
            assert x is None or x.isfinite().equal(y.isfinite()) and x.nan_to_num().allclose(y.nan_to_num(), atol=1e-5)


def test_gradients():
    """Gradients of keys that samples share are summed."""
    q, k, v = (x.requires_grad_() for x in inputs(heads_k=2, samples_k=1))
    out, lse = flex_attention(q, k, v, block_mask=MASKS["torch's"], enable_gqa=True, return_lse=True)
    scores = q @ k.repeat_interleave(2, 1).mT / 4
    scores = scores.masked_fill(~MASKS["ours"].to_dense(), -1e30)
    sees = (scores > -1e30).any(-1)
    want_lse, want = scores.logsumexp(-1), scores.softmax(-1) @ v.repeat_interleave(2, 1)
    for x, y in zip(*(torch.autograd.grad([out[sees].sum(), lse[sees].square().sum()], (q, k, v))
                      for out, lse in ((out, lse), (want, want_lse)))):
        assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_flex_attention_of_torch_is_not_imported():
    """It takes a second or two."""
    done = in_a_new_process("""
import sys, torch, minimal_attn
q = torch.randn(1, 2, 70, 16)
mask = minimal_attn.create_block_mask(lambda b, h, q, k: q >= k, None, None, 70, 70, "cpu")
for block_mask in (None, mask):
    minimal_attn.flex_attention(q, q, q, block_mask=block_mask)
assert "torch.nn.attention.flex_attention" not in sys.modules
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("error, text, changes", [
    (TypeError, "score_mod must be a function of score, b, h, q_idx and kv_idx, or None, got 3", dict(score_mod=3)),
    (ValueError, r"same number of heads, unless enable_gqa=True: .* key is \(2, 2, 150, 16\)", dict(heads_k=2)),
    (ValueError, "the number of query heads must be a multiple", dict(heads_k=3, enable_gqa=True)),
    (ValueError, "cannot be given with return_lse", dict(return_lse=True, return_aux=torch_flex.AuxRequest())),
    (TypeError, "return_aux must be None or torch's AuxRequest, got True", dict(return_aux=True)),
    (ValueError, "block_mask must .* broadcasts to .* rows, keys", dict(
        block_mask=torch_flex.create_block_mask(mask_mod, B, None, SQ, SK + 1, "cpu"))),
    (ValueError, "must have the same batch size: query is", dict(samples_k=1)),
    (TypeError, "enable_gqa must be a bool, got 1", dict(enable_gqa=1)),
    (TypeError, "scale must be None or one real number, got '1'", dict(scale="1")),
    (ValueError, r"query must be \(B, H, S, D\), got .*16", dict(q=torch.randn(4, SQ, D))),
    (TypeError, "query must be a torch.Tensor, got list", dict(q=[1.0])),
])
def test_errors(error, text, changes):
    changes = dict(changes)
    sizes = {name: changes.pop(name) for name in ("heads_k", "samples_k") if name in changes}
    q, k, v = inputs(**sizes)
    with pytest.raises(error, match=text):
        flex_attention(changes.pop("q", q), k, v, **changes)
