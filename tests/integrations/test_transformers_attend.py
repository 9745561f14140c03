"""integrations/transformers.py: what attend makes of its arguments, what it refuses, and the names to register."""

import pytest
import torch

from test_transformers import IMPLS, NAME, models, registered, tokens

transformers = pytest.importorskip("transformers")

import minimal_attn  # noqa: E402
from minimal_attn.integrations import transformers as integration  # noqa: E402
from minimal_attn.integrations.masks import Mask, make_mask  # noqa: E402
from transformers import masking_utils  # noqa: E402

pytestmark = pytest.mark.cpu
DEVICE = IMPLS["torch"][1]
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 0], [4, 0, 1, 2, 3, 4, 5]])


@pytest.fixture
def attention(monkeypatch):
    """The name of our attention, with backend="auto"."""
    registered("torch", monkeypatch)
    integration.register(NAME)
    return NAME


def qkv(rows=3, keys=3):
    torch.manual_seed(0)
    return torch.randn(2, 4, rows, 16), *torch.randn(2, 2, 2, keys, 16)


MODULE = torch.nn.Module()
MODULE.is_causal = True


def test_arguments_reach_the_kernel():
    """Dropout, scaling, softcap, sinks, V of another head_dim."""
    q, k, v = qkv()
    v, s_aux = v[..., :8], torch.randn(4)
    torch.manual_seed(1)
    out, weights = integration.attend(MODULE, q, k, v, None, dropout=0.5, scaling=0.3, softcap=2.0, s_aux=s_aux,
                                      sliding_window=1)
    torch.manual_seed(1)
    want = minimal_attn.flash_attention(q, k, v, True, 0.3, dropout_p=0.5, softcap=2.0, sinks=s_aux)
    assert weights is None and out.shape == (2, 3, 4, 8) and out.equal(want.transpose(1, 2))
    assert integration.attend(MODULE, q, k, v, None, dropout=1.0)[0].eq(0).all()


@pytest.mark.parametrize("position_ids", [None, POSITIONS])
@pytest.mark.parametrize("is_row_first", [False, True])
def test_result_is_contiguous(is_row_first, position_ids):
    """Models take views of it."""
    q, k, v = qkv(7, 7)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)) if is_row_first else (q, k, v)
    out, _ = integration.attend(MODULE, q, k, v, None, position_ids=position_ids)
    assert out.is_contiguous() and out.view(2, 7, -1).shape == (2, 7, 64)


@torch.compiler.set_stance("force_eager")  # transformers would compile what makes theirs
def test_block_masks():
    """transformers' own function makes torch's. A flattened batch has none."""
    q, k, v = qkv(70, 90)
    arguments = 2, 70, 90, 20, 0, masking_utils.causal_mask_function
    theirs = masking_utils.flex_attention_mask(*arguments)
    want, _ = integration.attend(MODULE, q, k, v, masking_utils.sdpa_mask(*arguments, allow_is_causal_skip=False))
    for mask in (theirs, minimal_attn.BlockMask.from_torch(theirs)):
        torch.testing.assert_close(integration.attend(MODULE, q, k, v, mask)[0], want)
    bounds = torch.tensor([0, 70, 140])
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k cannot be given together with"):
        integration.attend(MODULE, q, q, q, masking_utils.flex_attention_mask(2, 70, 70), cu_seq_lens_q=bounds,
                           cu_seq_lens_k=bounds)


def test_positions_that_cannot_be_read_become_a_dense_mask(monkeypatch):
    """They cannot be read while a CUDA graph is captured, for example."""
    q, k, v = qkv(7, 7)
    apart, together = (integration.attend(MODULE, q, k, v, None, position_ids=x)[0] for x in (POSITIONS, None))
    monkeypatch.setattr(integration, "can_read", lambda x: False)
    got = integration.attend(MODULE, q, k, v, None, position_ids=POSITIONS)[0]
    assert got.allclose(apart, atol=1e-6) and not got.allclose(together, atol=1e-2)


def test_a_mask_that_hides_nothing_fits_any_keys():
    q, k, v = qkv(3, 5)
    full = minimal_attn.flash_attention(q, k, v).transpose(1, 2)
    mask = make_mask(2, 3, 3, mask_function=masking_utils.bidirectional_mask_function)
    assert integration.attend(MODULE, q, k, v, mask)[0].equal(full)
    with pytest.raises(ValueError, match="is for 1 rows and 7 keys"):  # a causal step: of a cache of other length
        integration.attend(MODULE, q[:, :, :1], k, v, make_mask(2, 1, 7, 6))


def test_is_causal_counts_without_a_mask():
    q, k, v = qkv()
    causal, full = (minimal_attn.flash_attention(q, k, v, x).transpose(1, 2) for x in (True, False))
    assert integration.attend(MODULE, q, k, v, None)[0].equal(causal)
    assert integration.attend(MODULE, q, k, v, None, is_causal=False)[0].equal(full)
    assert integration.attend(MODULE, q, k, v, Mask(3, 3, False, (-1, -1), 3))[0].equal(full)
    assert integration.attend(MODULE, q, k, v, torch.ones(1, 1, 3, 3, dtype=torch.bool))[0].allclose(full)
    step = integration.attend(MODULE, q[:, :, :1], k, v, None)[0]
    assert step.allclose(full[:, :1])
    bias = torch.randn(1, 4, 3, 3)
    want = minimal_attn.flash_attention(q, k, v, True, attn_bias=bias).transpose(1, 2)
    assert integration.attend(MODULE, q, k, v, None, position_bias=bias)[0].equal(want)


@pytest.mark.parametrize("options, error, message", [
    (dict(cache=object()), NotImplementedError, "paged caches.*cache is given"),
    (dict(block_table=torch.zeros(1)), NotImplementedError, "paged caches.*block_table"),
    *((dict(((name, torch.zeros(1)),)), NotImplementedError, f"{name} is given")
      for name in ("indices", "block_indices", "sinks")),
    (dict(output_attentions=True), NotImplementedError, 'attn_implementation="eager".*output_attentions'),
    (dict(attention_mask=torch.ones(2, 3)), ValueError, "attention_mask must.*4 dimensions"),
    (dict(attention_mask=torch.ones(2, 1, 3, 4, dtype=torch.bool)), ValueError, "broadcast"),
    (dict(attention_mask="causal"), TypeError, "attention_mask must be None, a tensor or a mask"),
    (dict(cu_seq_lens_q=torch.tensor([0, 6])), ValueError, "cu_seqlens_q and cu_seqlens_k"),
    (dict(attention_mask=Mask(3, 3, True, (-1, -1), 3, keys=torch.ones(2, 3, dtype=torch.bool)),
          cu_seq_lens_q=torch.tensor([0, 6]), cu_seq_lens_k=torch.tensor([0, 6])), ValueError,
     "together with padding.*torch.compile.*position_ids"),
    (dict(softcap=-1.0), ValueError, "softcap"),
    (dict(zip(("query", "key", "value"), qkv(3, 5))), ValueError, "must be given where 3 rows .* meet 5 keys"),
    (dict.fromkeys(("query", "key", "value"), torch.randn(1, 1, 3, 264)), ValueError, "256"),
])
def test_what_cannot_be_served_is_refused(options, error, message):
    inputs = dict(zip(("query", "key", "value"), qkv()), attention_mask=None)
    with pytest.raises(error, match=message):
        integration.attend(MODULE, **inputs | options)


@pytest.mark.parametrize("rows, keys", [(3, 13), (3, 11), (4, 12), (2, 12), (1, 12), (3, 7)])
def test_a_mask_of_other_sizes_is_refused(rows, keys):
    """Also where a static cache has room for 12 keys of which 7 count."""
    mask = make_mask(2, 3, 12, torch.tensor(4))
    q, k, v = qkv(3, 12)
    want = minimal_attn.flash_attention(q, k[:, :, :7], v[:, :, :7], True).transpose(1, 2)
    assert integration.attend(MODULE, q, k, v, mask)[0].equal(want)
    with pytest.raises(ValueError, match=f"is for 3 rows and 12 keys, but the layer has {rows} rows and {keys} keys"):
        integration.attend(MODULE, *qkv(rows, keys), mask)


def test_continuous_batching_and_attention_weights_are_refused(attention):
    ours, _ = models("llama", "torch", attention)
    with pytest.raises(ValueError, match=f"{NAME}.* is not supported"):
        ours.generate_batch([[1, 2, 3]], generation_config=transformers.GenerationConfig(max_new_tokens=2))
    with pytest.raises((ValueError, NotImplementedError), match="output_attentions"):
        ours(tokens(1, 3, device=DEVICE), output_attentions=True)


# register.

@pytest.mark.parametrize("name", ["", "flash_mine", "my/kernel", "sdpa", "eager", "flex_attention", "paged|mine"])
def test_reserved_names_are_refused(name):
    with pytest.raises(ValueError, match="name must not be empty nor contain"):
        integration.register(name)


def test_register_again(attention):
    """A name that is known gets the new backend; a name of somebody else is refused."""
    interface = transformers.AttentionInterface._global_mapping
    integration.register(NAME, backend="reference")
    assert interface[NAME].keywords == {"backend": "reference"}
    integration.register(NAME, block_masks=True)
    integration.register(NAME)
    assert interface[NAME].keywords == {"backend": "auto"}
    assert transformers.AttentionMaskInterface._global_mapping[NAME] is make_mask
    transformers.AttentionInterface.register("somebody", print)
    transformers.AttentionMaskInterface.register("somebody's mask", masking_utils.sdpa_mask)
    for name in ("somebody", "somebody's mask"):
        with pytest.raises(ValueError, match=f"{name}. is registered with transformers already"):
            integration.register(name)
    with pytest.raises(TypeError, match="name must be a string"):
        integration.register(3)
    with pytest.raises(ValueError, match="unknown backend .* one of 'auto', 'cuda'"):
        integration.register(NAME, backend="cudnn")


