"""integrations/transformers.py: masks beside those of transformers, generation, and models that are refused by name.

Whole models beside eager attention, forward and backward, are in test_transformers.py and test_transformers_scores.py,
and what attend makes of its arguments in test_transformers_attend.py.
"""

import dataclasses
import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from test_transformers import (IMPLS, MODELS as DECODERS, NAME, VOCAB, check, models, padding_mask, registered,
                               tokens)
from test_transformers_scores import models as encoders

transformers = pytest.importorskip("transformers")

from minimal_attn.integrations import masks, transformers as integration  # noqa: E402
from minimal_attn.integrations.masks import Mask, make_mask, pattern_of  # noqa: E402
from transformers import masking_utils  # noqa: E402

cpu = pytest.mark.cpu
DEVICE = IMPLS["torch"][1]


@pytest.fixture
def attention(monkeypatch):
    """The name of our attention, with backend="torch" on the CPU and the kernels that "auto" takes on a GPU."""
    registered("torch", monkeypatch)
    integration.register(NAME)
    return NAME


# Masks.

WINDOW = 3
SEQUENCES = torch.tensor([[0, 0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1]])  # of 7 tokens each
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 0], [4, 0, 1, 2, 3, 4, 5]])
causal, bidirectional = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
windowed = masking_utils.sliding_window_causal_mask_function(WINDOW)


def packed(base):
    """The mask function that create_causal_mask makes from position_ids."""
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        return masking_utils.packed_sequence_compatibility_function(base, POSITIONS, SEQUENCES)
    return masking_utils.and_masks(base, masking_utils.packed_sequence_mask_function(SEQUENCES))  # transformers 5.17


PATTERNS = {"causal": causal, "window": windowed, "bidirectional": bidirectional,
            "window of both sides": masking_utils.sliding_window_bidirectional_mask_function(WINDOW),
            "two windows": masking_utils.and_masks(windowed, masking_utils.sliding_window_overlay(2), causal)}
PADDING = {
    "none": None,
    "all valid": torch.ones(2, 7, dtype=torch.bool),
    "left": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]]).bool(),
    "right": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]]).bool(),
    "everywhere": torch.tensor([[0, 1, 1, 0, 1, 1, 0], [1, 0, 0, 1, 1, 1, 1]]).bool(),
    "one sample": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]]).bool(),
}
# (rows, keys, index of the first row, index of the first key), after which 7 tokens are known.
CACHES = {"no cache": (7, 7, 0, 0), "chunk": (3, 7, 4, 0), "step": (1, 7, 6, 0),
          "step of a sliding cache": (1, 4, 6, 3), "chunk of a sliding cache": (3, 5, 4, 2),
          "static": (3, 12, 4, 0), "step of a static cache": (1, 12, 6, 0)}


def shown(mask, rows, keys):
    """bool (2, 1, rows, keys): what a Mask or a tensor shows, by what masks.py says of a Mask."""
    if isinstance(mask, torch.Tensor):
        return mask
    assert (mask.q_length, mask.kv_length) == (rows, keys)
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    seqlen_k = torch.full((2,), mask.num_keys) if mask.seqused_k is None else mask.seqused_k
    seqlen_q = torch.full((2,), rows) if mask.seqused_q is None else mask.seqused_q
    seqlen_q, seqlen_k = seqlen_q[:, None, None], seqlen_k[:, None, None]
    seen = (i < seqlen_q) & (j < seqlen_k) & (j < mask.num_keys)
    own = i + seqlen_k - seqlen_q
    if mask.causal:
        seen = seen & (j <= own)
    left, right = mask.window
    if left >= 0:
        seen = seen & (j >= own - left)
    if right >= 0:
        seen = seen & (j <= own + right)
    if mask.keys is not None:
        seen = seen & torch.nn.functional.pad(mask.keys, (0, keys - mask.num_keys))[:, None]
    return seen[:, None]


@cpu
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("padding", PADDING)
def test_masks_show_what_those_of_transformers_do(pattern, padding):
    """Also of a step of generation with a static cache, which wants tensors of fixed sizes."""
    for (rows, keys, q_offset, kv_offset), offset, is_compiled in itertools.product(
            CACHES.values(), (int, torch.tensor), (False, True)):
        if is_compiled and rows > 1:
            continue
        arguments = dict(batch_size=2, q_length=rows, kv_length=keys, q_offset=offset(q_offset), kv_offset=kv_offset,
                         mask_function=PATTERNS[pattern], attention_mask=PADDING[padding])
        got = make_mask(**arguments, allow_is_causal_skip=not is_compiled)
        want = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
        if isinstance(got, Mask) and got.seqused_q is not None:  # rows in the padding see nothing
            want = want & PADDING[padding][:, None, :, None]
        assert shown(got, rows, keys).expand_as(want).equal(want)
        is_fixed = is_compiled and offset is not int
        if is_fixed and pattern in ("causal", "window", "two windows"):
            assert got.num_keys == keys and got.seqused_k.dtype == torch.int32
            assert (got.keys is None) == (padding == "none")
        aligned = q_offset + rows - kv_offset == keys and offset is int if pattern == "window of both sides" else (
            is_compiled == is_fixed or pattern == "bidirectional")
        assert not isinstance(got, torch.Tensor) or not aligned


@cpu
def test_masks_without_padding_need_no_tensors():
    """So that no test passes by dense masks, and that kernels skip what windows and right padding hide."""
    sizes = dict(batch_size=2, q_length=7, kv_length=7)
    assert make_mask(**sizes) == Mask(7, 7, True, (-1, -1), 7)
    assert make_mask(**sizes, attention_mask=PADDING["all valid"]) == Mask(7, 7, True, (-1, -1), 7, is_padded=True)
    assert make_mask(2, 1, 7, 6) == Mask(1, 7, True, (-1, -1), 7)
    assert make_mask(2, 3, 7, 4) == Mask(3, 7, True, (-1, -1), 7)
    assert make_mask(**sizes, mask_function=windowed) == Mask(7, 7, True, (WINDOW - 1, -1), 7)
    assert make_mask(**sizes, mask_function=bidirectional) == Mask(7, 7, False, (-1, -1), 7)
    right = make_mask(**sizes, attention_mask=PADDING["right"])
    assert right.keys is None and right.seqused_q.tolist() == right.seqused_k.tolist() == [7, 2]
    # The rows of a cross-attention have other padding than its keys, even if there are as many.
    right = make_mask(**sizes, mask_function=bidirectional, attention_mask=PADDING["right"])
    assert right.keys is right.seqused_q is None and right.seqused_k.tolist() == [7, 2]
    assert make_mask(2, 3, 12, torch.tensor(4)) == Mask(3, 12, True, (-1, -1), 7)


@cpu
@pytest.mark.parametrize("base, window", [(causal, (-1, -1)), (windowed, (WINDOW - 1, -1))])
def test_packed_sequences(base, window):
    mask = make_mask(2, 7, 7, mask_function=packed(base), allow_is_causal_skip=False)
    assert (mask.causal, mask.window, mask.keys, mask.seqused_k) == (True, window, None, None)
    assert mask.cu_seqlens.dtype == torch.int32 and mask.cu_seqlens.tolist() == [0, 4, 6, 7, 8, 14]


@cpu
@pytest.mark.parametrize("change", [dict(attention_mask=PADDING["left"]), dict(q_offset=torch.tensor(0)),
                                    dict(q_length=3, q_offset=4), dict(q_length=5, kv_length=5, q_offset=2)])
def test_packed_sequences_with_padding_or_a_cache_become_dense(change):
    arguments = dict(batch_size=2, q_length=7, kv_length=7, mask_function=packed(causal)) | change
    got = make_mask(**arguments)
    assert got.equal(masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False))


@cpu
@pytest.mark.parametrize("name, mask_function", [
    ("sliding_window_overlay", windowed), ("packed_sequence_mask_function", packed(causal)), ("and_masks", windowed)])
def test_functions_with_another_meaning_are_not_recognized(name, mask_function, monkeypatch):
    """Another release of transformers could have such functions."""
    known = len(masks._CODES)
    assert known == 4 + hasattr(masking_utils, "remap_positions_for_packed_sequence")
    assert pattern_of(mask_function) is not None
    made = getattr(masking_utils, name)

    def changed(*args):
        return lambda b, h, i, j: made(*args)(b, h, i, j + 1 - j // 5)

    monkeypatch.setattr(masking_utils, name, changed)
    codes = masks._recognized()
    assert len(codes) == known - 1
    monkeypatch.setattr(masks, "_CODES", codes)
    assert pattern_of(mask_function) is None and pattern_of(causal) == masks.Pattern(True)


@cpu
@pytest.mark.parametrize("function", [
    masking_utils.chunked_causal_mask_function(2, torch.zeros(2, dtype=torch.int64)),
    masking_utils.or_masks(causal, masking_utils.blockwise_overlay(SEQUENCES)),
    masking_utils.and_masks(packed(causal), packed(causal)), lambda b, h, q, kv: kv != q])
def test_other_mask_functions_become_dense_or_block_masks(function):
    assert pattern_of(function) is None
    for padding, cache in itertools.product(("none", "left"), ("no cache", "chunk of a sliding cache")):
        rows, keys, q_offset, kv_offset = CACHES[cache]
        arguments = dict(batch_size=2, q_length=rows, kv_length=keys, q_offset=torch.tensor(q_offset),
                         kv_offset=kv_offset, mask_function=function, attention_mask=PADDING[padding])
        got, blocks = (make_mask(**arguments, block_masks=x) for x in (False, True))
        assert got.dtype == torch.bool and got.equal(masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False))
        assert blocks == Mask(rows, keys, False, (-1, -1), keys, block_mask=blocks.block_mask)
        assert blocks.block_mask.to_dense().equal(got) and not blocks.hides_nothing
        assert blocks.to("cpu").block_mask.to_dense().equal(got)
    step = make_mask(2, 1, 7, 6, mask_function=function, block_masks=True)
    assert step.dtype == torch.bool and step.shape == (2, 1, 1, 7)


@torch.no_grad()
def test_a_model_with_block_masks(attention, monkeypatch):
    """Llama 4, whose chunks come as a function. Decoding steps have dense masks."""
    config = transformers.Llama4TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2, attention_chunk_size=16)
    model = transformers.Llama4ForCausalLM(config).eval().to(DEVICE)
    ids, valid = tokens(2, 70, device=DEVICE), torch.ones(2, 70, dtype=torch.int64, device=DEVICE)
    valid[0, :20] = 0
    made, make = [], masks._block_mask
    monkeypatch.setattr(masks, "_block_mask", lambda *args: made.append(make(*args)) or made[-1])
    results = []
    for name in ("eager", NAME):
        integration.register(NAME, block_masks=True)
        model.set_attn_implementation(name)
        new = model.generate(ids, attention_mask=valid, max_new_tokens=4, do_sample=False, pad_token_id=0)
        results.append((model(ids, attention_mask=valid).logits[valid.bool()], new))
    check(results[1][0], results[0][0], "torch")
    assert results[1][1].equal(results[0][1])
    assert [mask.shape for mask in made] == [(2, 1, 70, 70)] * 2 and made[0].sparsity() > 0


@cpu
def test_a_model_that_wants_a_tensor_gets_one():
    assert make_mask(2, 7, 7, allow_is_causal_skip=False).shape == (2, 1, 7, 7)
    assert make_mask(2, 1, 7, 6, allow_is_causal_skip=False).shape == (2, 1, 1, 7)
    assert make_mask(2, 1, 1, allow_is_causal_skip=False).shape == (2, 1, 1, 1)
    dense = make_mask(2, 7, 7, mask_function=bidirectional, allow_is_bidirectional_skip=False)
    assert dense.shape == (2, 1, 7, 7) and dense.all()


@cpu
@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_model_that_changes_its_mask_gets_an_error(padding):
    mask = make_mask(2, 7, 7, attention_mask=PADDING[padding])
    for change in (lambda: mask[:, :, :, :4], lambda: torch.ones(1) + mask, lambda: torch.cat([mask, mask]),
                   lambda: torch.where(mask, 0.0, 1.0), lambda: mask == 0, lambda: mask != torch.ones(1),
                   lambda: mask.size(), lambda: mask.float(), lambda: 1.0 - mask, lambda: ~mask,
                   lambda: mask.to(torch.float32), lambda: mask.to(dtype=torch.float32)):
        with pytest.raises((NotImplementedError, AttributeError, TypeError)):
            change()
    assert mask.contiguous() is mask and mask == dataclasses.replace(mask) and mask != None  # noqa: E711
    if mask.keys is not None:
        assert mask != dataclasses.replace(mask, keys=mask.keys.clone())
        assert mask.to("cpu").keys.equal(mask.keys) and mask.to("meta").keys.is_meta


TINY = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            initializer_range=0.2, max_position_embeddings=64)
ALONE = {
    "bloom": ("BloomForCausalLM", dict(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)),
    "xglm": ("XGLMForCausalLM", dict(vocab_size=VOCAB, d_model=32, num_layers=1, attention_heads=4, ffn_dim=32)),
    "longformer": ("LongformerModel", TINY | dict(attention_window=4)),
}


@cpu
@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize("is_chosen_late", [False, True])
def test_models_that_attend_themselves_are_refused(kind, is_chosen_late, attention):
    """They would add our masks to their scores, where None and bool mean something else."""
    name, options = ALONE[kind]
    made = getattr(transformers, name)
    model = made(made.config_class(**options, attn_implementation="eager" if is_chosen_late else attention))
    model.config._attn_implementation = attention
    with pytest.raises(NotImplementedError, match=f'{made.config_class.__name__}.*attn_implementation="eager"'):
        model(tokens(3, 11, device="cpu"))


@cpu
def test_a_part_that_attends_itself_is_refused(attention):
    parts = transformers.BertConfig(**TINY), transformers.MegatronBertConfig(**TINY, is_decoder=True,
                                                                             add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config._attn_implementation = attention
    model, ids = transformers.EncoderDecoderModel(config), tokens(1, 5, device="cpu")
    assert model.encoder(ids).last_hidden_state.shape == (1, 5, 32)
    with pytest.raises(NotImplementedError, match="MegatronBertConfig"):
        model(input_ids=ids, decoder_input_ids=ids)


@cpu
def test_configs_and_models_from_elsewhere(attention, monkeypatch):
    """A config counts as the one of transformers that it extends. A model that transformers cannot judge is served."""
    class Config(transformers.BloomConfig):
        pass

    class OwnConfig(transformers.LlamaConfig):
        pass

    class Model(transformers.LlamaModel):
        config_class = OwnConfig

    monkeypatch.setattr(Model, "_can_set_attn_implementation", classmethod(lambda cls: False))
    ids = tokens(1, 5, device="cpu")
    with pytest.raises(NotImplementedError, match="models of Config .*eager"):
        transformers.BloomModel(Config(**ALONE["bloom"][1], attn_implementation=attention))(ids)
    assert Model(OwnConfig(**TINY, attn_implementation=attention))(ids).last_hidden_state.shape == (1, 5, 32)


# Models.

@pytest.mark.parametrize("kind", ["mistral", "gpt_oss"])
@torch.no_grad()
def test_packing_of_several_rows(kind, attention):
    """Each row of the batch has sequences of its own, with a cache and without."""
    ids, lengths = tokens(2, 11, device=DEVICE), ((5, 6), (3, 1, 7))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]).to(DEVICE)
    ours, eager = models(kind, "torch", attention)
    want = torch.stack([torch.cat([eager(part[None]).logits[0] for part in row.split(ends)])
                        for row, ends in zip(ids, map(list, lengths))])
    check(ours(ids, position_ids=positions, use_cache=False).logits, want, "torch")
    check(ours(ids, position_ids=positions, use_cache=True).logits, want, "torch")


@cpu
@torch.no_grad()
def test_packing_as_for_eager(attention):
    """An attention_mask forbids it, even of ones. With a cache, positions with gaps are one sequence: some tokens of a
    prompt may have been left out."""
    ids, both = tokens(2, 7, device=DEVICE), models("mistral", "torch", attention)
    gaps = torch.tensor([[0, 1, 2, 7, 8, 9, 10]], device=DEVICE)
    for inputs in (*(dict(attention_mask=torch.ones_like(ids), position_ids=POSITIONS.to(DEVICE), use_cache=use_cache)
                     for use_cache in (False, True)), dict(position_ids=gaps, use_cache=True)):
        check(*(model(ids, **inputs).logits for model in both), "torch")


WATCHERS = (lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
            lambda: torch.device("cpu"), lambda: FlopCounterMode(display=False), torch.inference_mode)


@cpu
@torch.no_grad()
def test_who_watches_does_not_change_packing(attention):
    ours, _ = models("llama", "torch", attention)
    ids, positions = tokens(1, 7, device=DEVICE), POSITIONS[:1].to(DEVICE)
    want = torch.cat([ours(part).logits for part in ids.split((4, 2, 1), dim=1)], 1)
    for watcher, use_cache in itertools.product(WATCHERS, (False, True)):
        with watcher():
            got = ours(ids, position_ids=positions, use_cache=use_cache).logits
        check(got, want, "torch")


@cpu
def test_positions_are_read_once(monkeypatch):
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert masks.cu_seqlens_of(positions, 1).tolist() == [0, 3, 5]
    known = masks.cu_seqlens_of(positions, 1)
    monkeypatch.setattr(masks, "_cu_seqlens", None)
    assert masks.cu_seqlens_of(positions, 1) is known
    monkeypatch.undo()
    positions += torch.tensor([[0, 0, 0, 3, 3]])
    assert masks.cu_seqlens_of(positions, 1) is None
    assert masks.cu_seqlens_of(torch.tensor([[0, 1, 0]]), 2).tolist() == [0, 2, 3, 5, 6]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@torch.no_grad()
def test_masks_of_the_caller(dtype, attention):
    """A mask with four dimensions is taken as it is, for eager attention too."""
    ours, eager = models("mistral", "torch", attention)
    ids, generator = tokens(2, 6, device=DEVICE), torch.Generator().manual_seed(0)
    visible = torch.rand(2, 1, 6, 6, generator=generator).lt(0.5).tril() | torch.eye(6, dtype=torch.bool)
    as_numbers = torch.where(visible, 0.0, torch.finfo(torch.float32).min).to(DEVICE)
    mask = visible.to(DEVICE) if dtype == torch.bool else as_numbers
    check(ours(ids, attention_mask=mask).logits, eager(ids, attention_mask=as_numbers).logits, "torch")


@pytest.mark.parametrize("side", [None, "left", "right"])
@torch.no_grad()
def test_a_mask_that_a_model_hands_to_its_part(side, attention):
    """PaliGemma makes a causal mask for a text model that would itself make one of both directions."""
    def made(implementation):
        config = transformers.PaliGemmaConfig(
            text_config=dict(model_type="gemma", **TINY, num_key_value_heads=2, head_dim=8),
            vision_config=dict(model_type="siglip_vision_model", hidden_size=32, intermediate_size=32,
                               num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=8),
            projection_dim=32, hidden_size=32, image_token_id=1, attn_implementation=implementation)
        torch.manual_seed(0)
        return transformers.PaliGemmaForConditionalGeneration(config).to(DEVICE).eval()

    ids = tokens(3, 11, device=DEVICE).clamp(min=3)
    mask = padding_mask(side, DEVICE)
    valid = torch.ones_like(ids).bool() if mask is None else mask.bool()
    check(*(made(name)(ids, attention_mask=mask).logits[valid] for name in (attention, "eager")), "torch")


@pytest.mark.parametrize("padding", ["none", "all valid", "everywhere"])
@torch.no_grad()
def test_an_encoder_with_a_prefix_in_its_cache(padding, attention):
    """Without a mask, transformers does not count the keys of the prefix."""
    mask = PADDING[padding]
    found = []
    for name in (attention, "eager"):
        torch.manual_seed(0)
        model = transformers.BertModel(transformers.BertConfig(**TINY, attn_implementation=name)).to(DEVICE).eval()
        cache = transformers.DynamicCache()
        for layer in range(2):
            cache.update(*torch.randn(2, 2, 4, 4, 8).to(DEVICE), layer)  # 4 keys of 4 heads
        found.append(model(tokens(2, 3, device=DEVICE), past_key_values=cache,
                           attention_mask=None if mask is None else mask.to(DEVICE)).last_hidden_state)
    check(*found, "torch")


@pytest.mark.parametrize("cache, side", [("dynamic", "left"), ("static", "right")])
def test_generate_with_t5(cache, side, attention):
    """Greedy tokens of prompts with padding: a bias of positions, cross-attention and caches of both."""
    ids, mask = tokens(3, 11, device=DEVICE), padding_mask(side, DEVICE)
    got, want = (model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0,
                                cache_implementation=cache, disable_compile=True)
                 for model in encoders("t5", "interface", DEVICE))
    assert got.shape == (3, 4) and got.equal(want)


@torch.no_grad()
def test_cross_attention_to_as_many_keys_as_rows(attention):
    """The padding of the encoder's tokens says nothing of the decoder's."""
    inputs = dict(input_ids=tokens(3, 11, device=DEVICE), attention_mask=padding_mask("right", DEVICE),
                  decoder_input_ids=tokens(3, 11, device=DEVICE))
    check(*(model(**inputs).logits for model in encoders("t5", "interface", DEVICE)), "torch")


@cpu
@pytest.mark.slow
@torch.no_grad()
def test_compiled_forward(attention):
    """Without a graph break, with padding and of packed sequences. Dynamo sees every window and every packed batch as a
    dense mask."""
    ours, eager = models("mistral", "torch", attention)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    ids, mask = tokens(3, 11, device=DEVICE), padding_mask("right", DEVICE)
    check(*(model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()] for model in (compiled, eager)),
          "torch")
    ids = ids[:1, :7]
    want = torch.cat([ours(part).logits for part in ids.split((4, 2, 1), dim=1)], 1)
    check(compiled(ids, position_ids=POSITIONS[:1].to(DEVICE), use_cache=False).logits, want, "torch")


@cpu
@pytest.mark.slow
@pytest.mark.parametrize("kind, most", [("llama", 1), pytest.param("gemma2", 2, marks=pytest.mark.campaign)])
def test_compiled_generation(kind, most, attention):
    """With a static cache, transformers makes masks outside of the compiled step, which then has one graph. Caches of
    windows count in ints, for which Dynamo compiles a second one."""
    ids, mask = tokens(3, 11, device=DEVICE), padding_mask("left", DEVICE)
    options = dict(attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0,
                   cache_implementation="static")
    ours, eager = models(kind, "torch", attention)
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    config = transformers.CompileConfig(fullgraph=True, backend=counted, mode=None)
    config._compile_all_devices = True
    got = ours.generate(ids, compile_config=config, **options)
    assert got.equal(eager.generate(ids, disable_compile=True, **options))
    assert 1 <= len(graphs) <= most, "steps were compiled again"


@pytest.mark.gpu
def test_compiled_generation_on_a_gpu(attention):
    """bf16, by CUDA graphs: the logits of the same model without torch.compile."""
    ids, mask = tokens(3, 11, device="cuda"), padding_mask("left", "cuda")
    model = models("llama", "torch", attention)[0].to("cuda", torch.bfloat16)
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0,
                   cache_implementation="static")
    # The first step after the prompt, which is not compiled.
    want, got = (model.generate(ids, disable_compile=disable, return_dict_in_generate=True, output_logits=True,
                                **options).logits[1] for disable in (True, False))
    assert (got - want).norm() <= 2**-6 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DECODERS)
@torch.no_grad()
def test_greedy_tokens_in_bf16(kind, attention):
    """Token by token beside eager attention in bf16, wherever its two best logits differ by more than the error."""
    ours, eager = (model.to("cuda", torch.bfloat16) for model in models(kind, "torch", attention))
    exact = models(kind, "torch", attention)[1].to("cuda")  # in fp32, as the experts of gpt-oss have no fp64
    ids, mask = tokens(3, 11, device="cuda"), padding_mask("left", "cuda")
    ids = exact.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0,
                         disable_compile=True)
    mask = torch.nn.functional.pad(mask, (0, 5), value=1)
    got, peer, truth = (model(ids, attention_mask=mask).logits[mask.bool()].double() for model in (ours, eager, exact))
    assert (got - truth).norm() <= 2 * (peer - truth).norm() + 2**-9 * truth.norm()
    errors = (got - truth).abs().amax(1) + (peer - truth).abs().amax(1)
    best = peer.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 2 * errors
    assert is_clear.any() and got.argmax(1)[is_clear].equal(peer.argmax(1)[is_clear])
