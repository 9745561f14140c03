"""Models of transformers with our attention, beside their own eager attention.

Our attention gets in by two routes. "kernel": transformers gets the folder that integrations/kernels.py writes as a
kernel of its hub. All else it does by itself: it reads the signatures of our functions, packs padded batches, finds
packed ones by their position_ids, and cuts static caches. "interface": integrations/transformers.py does all of that.
"""

import functools
import importlib.util

import pytest
import torch

from cases import slow_unless
from conftest import HAS_GPU, IMPLEMENTATIONS, OF_16_BITS
from minimal_attn.integrations import kernels

transformers = pytest.importorskip("transformers")

NAME = "minimal_attn"
IMPLS = {impl: where for impl, where in IMPLEMENTATIONS.items() if impl != "cuda:dmma"}  # head_dim is 16
VOCAB, WINDOW, LENGTH = 128, 4, 11
SIZES = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, initializer_range=0.2, max_position_embeddings=64)
MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", dict(sliding_window=WINDOW)),
    # A softcap that bends most scores in each layer, and a window in every other one.
    "gemma2": ("Gemma2ForCausalLM", dict(sliding_window=WINDOW, attn_logit_softcapping=1.0, query_pre_attn_scalar=16)),
    # Attention sinks in each layer, and a window in every other one. All experts, or a rounding may change the choice.
    "gpt_oss": ("GptOssForCausalLM", dict(sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=2)),
}


def each_model(is_short):
    """Parameters impl and kind. Triton's interpreter, which is slow, has one model of the short tests, and csrc on the
    CPU has two in the gate."""
    return pytest.mark.parametrize("impl, kind", [
        pytest.param(impl, kind, marks=slow_unless(impl != "cuda:host" or kind in ("mistral", "gpt_oss"),
                                                   kind == "gemma2"))
        for impl in IMPLS for kind in MODELS if HAS_GPU or impl != "triton" or is_short and kind == "mistral"])


@pytest.fixture(params=["kernel", "interface"])
def attention(request, impl, kind, monkeypatch, tmp_path):
    """The name of our attention for transformers, by a route, with one implementation."""
    if request.param == "interface":
        if impl in ("triton", "cuda:host", "cuda:simt", "cuda:sm80") and kind != "mistral" or (
                impl == "triton" and not HAS_GPU):
            pytest.skip("the other route runs it")
        return registered(impl, monkeypatch)
    from transformers import modeling_flash_attention_utils as utils
    from transformers.integrations import hub_kernels

    kernel = loaded_kernel(tmp_path)
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        function = getattr(kernel, name)
        setattr(kernel, name, functools.partial(in_16_bits(function) if impl in OF_16_BITS else function,
                                                backend=IMPLS[impl][0]))
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **options: {kernels.NAME: kernel}[name])
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    # The kernels that this model takes are listed by name.
    monkeypatch.setattr(transformers.GptOssPreTrainedModel, "_compatible_flash_implementations", [kernels.NAME])
    return kernels.NAME


def loaded_kernel(folder):
    """The module of a kernel in this folder, as the package `kernels` loads it."""
    kernels.write(folder)
    file = folder / "build" / "torch-cpu" / "__init__.py"
    spec = importlib.util.spec_from_file_location("_minimal_flash_attn3_of_a_test", file)
    kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    return kernel


def registered(impl, monkeypatch):
    """NAME, registered with transformers for one implementation, until the test is over."""
    from minimal_attn.integrations import transformers as integration

    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))  # register changes it
    integration.register(NAME, backend=IMPLS[impl][0])
    if impl in OF_16_BITS:
        attend = transformers.AttentionInterface._global_mapping[NAME]

        def rounding(module, query, key, value, *args, **options):
            out, _ = attend(module, *(x.bfloat16() for x in (query, key, value)), *args, **options)
            return out.float(), None

        transformers.AttentionInterface.register(NAME, rounding)
    return NAME


def models(kind, impl, attention):
    name, options = MODELS[kind]
    return two_models(name, SIZES | options, attention, IMPLS[impl][1])


def two_models(name, options, attention, device):
    """Models of this class with equal weights, in fp32: with our attention and with eager attention."""
    made = getattr(transformers, name)
    torch.manual_seed(0)
    weights = made(made.config_class(**options)).state_dict()
    weights |= {key: 2 * torch.randn_like(x) for key, x in weights.items() if "relative_attention_bias" in key}
    found = []
    for name in (attention, "eager"):
        model = made(made.config_class(**options, attn_implementation=name)).to(device).eval()
        assert model.config._attn_implementation == name
        model.load_state_dict(weights)
        found.append(model)
    return found


def in_16_bits(function):
    """This function for q, k and v in fp32, rounded to bf16 as its kernels want them."""
    @functools.wraps(function)  # transformers looks at the signature
    def rounding(*args, **options):
        options |= {name: x.bfloat16() for name, x in options.items() if name in ("q", "k", "v")}
        return function(*(x.bfloat16() for x in args[:3]), *args[3:], **options).float()

    return rounding


def check(got, want, impl):
    """Some roundings of the attention. What is wrong is wrong by more."""
    assert got.isfinite().all() and (got - want).norm() <= (2**-3 if impl in OF_16_BITS else 2**-14) * want.norm()


def check_training(of_models, impl, **inputs):
    """Checks the loss and all gradients of two models; {name: gradient} of the first."""
    gradients, losses = [], []
    for model in of_models:
        losses.append(model.train()(**inputs).loss)
        losses[-1].backward()
        gradients.append({name: x.grad for name, x in model.named_parameters()})
    check(*losses, impl)
    for name in gradients[0]:
        check(*(x[name] for x in gradients), impl)
    return gradients[0]


def tokens(*shape, device):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1)).to(device)


def padding_mask(side, device):
    """int64 (3, LENGTH): samples of 11, 4 and 7 tokens; None without padding."""
    if side is None:
        return None
    position, lengths = torch.arange(LENGTH), torch.tensor([LENGTH, 4, 7])[:, None]
    is_valid = position < lengths if side == "right" else position >= LENGTH - lengths
    return is_valid.long().to(device)


@torch.no_grad()
def check_logits(kind, impl, side, attention):
    """Logits at valid positions, whatever the tokens in padding are. side: of the padding."""
    device = IMPLS[impl][1]
    mask, ids = padding_mask(side, device), tokens(3, LENGTH, device=device)
    valid = torch.ones_like(ids).bool() if mask is None else mask.bool()
    ours, eager = models(kind, impl, attention)
    logits = [model(ids, attention_mask=mask).logits[valid] for model in (ours, eager)]
    check(*logits, impl)
    if side is not None:
        assert ours(torch.where(valid, ids, 5), attention_mask=mask).logits[valid].equal(logits[0])


def check_llama(name, side):
    """A tiny Llama whose attention has this name."""
    check_logits("llama", "torch", side, name)


@each_model(is_short=True)
@pytest.mark.parametrize("side", [None, "left", pytest.param("right", marks=pytest.mark.slow)])
def test_padding(kind, impl, side, attention):
    """The route "kernel" packs it away."""
    check_logits(kind, impl, side, attention)


@each_model(is_short=True)
@torch.no_grad()
def test_packing(kind, impl, attention):
    """Samples of 5, 1 and 8 tokens in one row, by their positions alone and by cu_seq_lens as a collator gives them."""
    device = IMPLS[impl][1]
    lengths = (5, 1, 8)
    ids = tokens(1, sum(lengths), device=device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    ours, eager = models(kind, impl, attention)
    got = ours(ids, position_ids=positions).logits
    check(got, torch.cat([eager(x).logits for x in ids.split(lengths, 1)], 1), impl)
    cu_seqlens = torch.tensor([0, 5, 6, 14], dtype=torch.int32, device=device)
    again = ours(ids, position_ids=positions, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=8,
                 max_length_k=8).logits
    assert again.equal(got)


@each_model(is_short=False)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_cache(kind, impl, cache, attention):
    """A prompt, three tokens at once and single tokens, with left padding, beside all tokens at once."""
    device = IMPLS[impl][1]
    mask, ids = padding_mask("left", device), tokens(3, LENGTH, device=device)
    ours, eager = models(kind, impl, attention)
    config = ours.config
    past = transformers.DynamicCache(config=config) if cache == "dynamic" else transformers.StaticCache(
        config=config, max_cache_len=LENGTH + 6)
    got, ends = [], (6, 9, 10, 11)
    for begin, end in zip((0, *ends), ends):
        found = ours(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=past)
        got.append(found.logits)
    want = eager(ids, attention_mask=mask, use_cache=False).logits
    check(torch.cat(got, 1)[mask.bool()], want[mask.bool()], impl)


@pytest.mark.parametrize("impl, kind", [
    pytest.param("torch", kind, marks=slow_unless(kind in ("mistral", "gpt_oss"))) for kind in MODELS])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(kind, impl, cache, attention):
    """Greedy tokens of left-padded prompts are those of eager attention."""
    device = IMPLS[impl][1]
    ids, mask = tokens(3, LENGTH, device=device), padding_mask("left", device)
    got, want = (model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0,
                                cache_implementation=cache, disable_compile=True)
                 for model in models(kind, impl, attention))
    assert got.shape == (3, LENGTH + 4) and got.equal(want)


@each_model(is_short=True)
def test_training_step_with_padding(kind, impl, attention):
    """The loss and the gradients of all parameters, sinks among them."""
    device = IMPLS[impl][1]
    mask, ids = padding_mask("right" if kind == "mistral" else "left", device), tokens(3, LENGTH, device=device)
    # The token before a label must be valid too: its logits are in the loss.
    labels = ids.masked_fill((mask * mask.roll(1, 1)) == 0, -100)
    gradients = check_training(models(kind, impl, attention), impl, input_ids=ids, attention_mask=mask, labels=labels)
    assert any("sinks" in name for name in gradients) == (kind == "gpt_oss")
