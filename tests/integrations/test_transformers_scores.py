"""BERT's padding masks and T5's relative position biases, with our attention in transformers, beside eager attention.

Our attention gets in by two routes. "sdpa": our scaled_dot_product_attention in the place of torch's, which
transformers calls. "interface": integrations/transformers.py, registered with transformers by a name. Gemma 2, with a
softcap, is in test_transformers.py.
"""

import pytest
import torch

import minimal_attn
from conftest import HAS_GPU, OF_16_BITS
from test_transformers import (IMPLS as ALL, NAME, VOCAB, check, check_training, padding_mask, registered, tokens,
                               two_models)

transformers = pytest.importorskip("transformers")

IMPLS = {impl: where for impl, where in ALL.items() if impl != "cuda:sm90"}  # TMA takes no masks of so few tokens
MODELS = {
    "bert": ("BertForMaskedLM", dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.2, max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
    # A few tokens apart are in different buckets.
    "t5": ("T5ForConditionalGeneration", dict(
        vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
        relative_attention_max_distance=16, dropout_rate=0.0, decoder_start_token_id=0, eos_token_id=None)),
}
each_route = pytest.mark.parametrize("route", ["sdpa", "interface"])
TRAINING = [impl for impl in IMPLS if HAS_GPU or impl != "triton"]  # slow in Triton's interpreter


@pytest.fixture
def calls(impl, route, monkeypatch):
    """The masks of all calls of our attention, while transformers calls it by this route."""
    backend, seen = IMPLS[impl][0], []
    dtype = torch.bfloat16 if impl in OF_16_BITS else torch.float32  # models are in fp32

    def sdpa(query, key, value, attn_mask=None, **options):
        seen.append(attn_mask)
        qkv = (x.to(dtype) for x in (query, key, value))
        return minimal_attn.scaled_dot_product_attention(*qkv, attn_mask, backend=backend, **options).float()

    def attend(module, query, key, value, attention_mask, position_bias=None, **options):
        seen.append(attention_mask if position_bias is None else position_bias)
        return of_impl(module, query, key, value, attention_mask, position_bias=position_bias, **options)

    if route == "sdpa":
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    else:
        registered(impl, monkeypatch)
        of_impl = transformers.AttentionInterface._global_mapping[NAME]
        transformers.AttentionInterface.register(NAME, attend)
    return seen


def models(kind, route, device):
    return two_models(*MODELS[kind], NAME if route == "interface" else "sdpa", device)


def t5_inputs(device, side):
    """Padding on one side of what the encoder reads, none in what the decoder reads."""
    return dict(input_ids=tokens(3, 11, device=device), attention_mask=padding_mask(side, device),
                decoder_input_ids=tokens(3, 6, device=device))


@each_route
@pytest.mark.parametrize("impl", TRAINING)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_bert_with_padding(side, impl, route, calls):
    """Logits at valid positions, whatever the tokens in padding are."""
    device = IMPLS[impl][1]
    mask, ids = padding_mask(side, device), tokens(3, 11, device=device)
    ours, eager = models("bert", route, device)
    logits = [model(ids, attention_mask=mask).logits[mask.bool()] for model in (ours, eager)]
    check(*logits, impl)
    assert len(calls) == 2
    if route == "sdpa":
        assert all(x.dtype == torch.bool and not x.all() for x in calls)
    elif side == "left":
        assert all(x.keys.dtype == torch.bool and x.keys.equal(mask.bool()) for x in calls)
    else:
        assert all(x.keys is None and x.seqused_k.equal(mask.sum(1, dtype=torch.int32)) for x in calls)
    other = torch.where(mask.bool(), ids, 5)
    assert ours(other, attention_mask=mask).logits[mask.bool()].equal(logits[0])


@pytest.mark.parametrize("impl, route", [("triton", "sdpa")])
@torch.no_grad()
def test_t5_in_the_interpreter(impl, route, calls):
    """The encoder alone: a bias and padding."""
    device = IMPLS[impl][1]
    ids, mask = tokens(2, 5, device=device), padding_mask("right", device)[1:, :5]
    check(*(model.encoder(ids, attention_mask=mask).last_hidden_state[mask.bool()]
            for model in models("t5", route, device)), impl)
    assert len(calls) == 2


@each_route
@pytest.mark.parametrize("impl", TRAINING)
def test_t5(impl, route, calls):
    """An encoder with padding and a causal decoder, whose layers share a bias of relative positions: logits, the loss,
    and the gradients of all parameters, those of the relative positions among them."""
    device = IMPLS[impl][1]
    both = models("t5", route, device)
    with torch.no_grad():
        check(*(model(**t5_inputs(device, "left")).logits for model in both), impl)
    assert len(calls) == 6 and all(x.dtype == torch.float32 for x in calls)
    gradients = check_training(both, impl, **t5_inputs(device, "right"), labels=tokens(3, 6, device=device))
    assert sum("relative_attention_bias" in name and bool(x.any()) for name, x in gradients.items()) == 2
