"""Every class of transformers' auto models, small and with random weights: our attention beside eager attention.

The classes come from the mappings of the installed transformers, and each config is made small by the names of what it
has. Logits or hidden states must agree, without padding and with padding on either side. Where eager attention is
causal, a later token must not change earlier rows with ours either. A part prints its table, which pytest -rP shows.
"""

import collections
import contextlib
import copy
import inspect
import logging
import resource
import warnings

import pytest
import torch

from test_transformers import NAME, registered

transformers = pytest.importorskip("transformers")

from transformers.models.auto import modeling_auto  # noqa: E402

MAPPINGS = ("MODEL", "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_MASKED_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
            "MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_IMAGE_TEXT_TO_TEXT")
PARTS, LEAST_EQUAL, MOST_PARAMETERS, MOST_MEMORY = 16, 200, 20_000_000, 10 << 30
BATCH, LENGTH, VOCAB = 2, 9, 128
# Numbers that a config gets for the names that it has.
SMALL = {
    32: """hidden_size d_model n_embd embed_dim embedding_size emb_dim dim model_dim n_embed hidden_dim d_embed
        word_embed_proj_dim encoder_hidden_size decoder_hidden_size cross_attention_hidden_size attention_hidden_size
        projection_dim lru_width text_embed_dim out_hidden_size audio_embed_dim""",
    64: """intermediate_size d_ff ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim moe_intermediate_size ffn_hidden_size
        shared_expert_intermediate_size max_position_embeddings n_positions n_ctx d_inner mlp_dim intermediate_dim
        max_source_positions max_target_positions dense_intermediate_size expert_ffn_hidden_size""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts
        n_routed_experts num_local_experts attention_heads num_encoder_attention_heads num_decoder_attention_heads
        moe_num_experts""",
    2: """num_key_value_heads num_kv_heads num_global_key_value_heads num_hidden_layers n_layer n_layers num_layers
        encoder_layers decoder_layers num_encoder_layers num_decoder_layers encoder_num_hidden_layers depth
        decoder_num_hidden_layers num_experts_per_tok moe_topk moe_k moe_top_k top_k_experts""",
    8: """head_dim global_head_dim d_kv attention_head_size qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim
        patch_size rotary_dim""",
    16: "q_lora_rank kv_lora_rank image_size mamba_chunk_size chunk_size",
    1: "n_group topk_group",
    VOCAB: "vocab_size decoder_vocab_size encoder_vocab_size vocab_size_per_layer_input",
}
SMALL = {name: value for value, names in SMALL.items() for name in names.split()}
# Errors where transformers serves sdpa and we do not serve. Some modules have tables of attention of their own.
REASONS = (f"{NAME} does not serve sparse attention", "Unsupported head_dim", f"KeyError: '{NAME}'",
           f"a mask of {NAME} has no dtype")
# Changes to the config, tried where the ones before build no model: as many key heads as heads; layers of more kinds;
# wider layers.
CHANGES = ({}, {"num_key_value_heads": 4}, {name: 4 for name in SMALL if "layer" in name and SMALL[name] == 2},
           {"hidden_size": 512, "head_dim": 128}, {"num_hidden_layers": 6, "hidden_size": 128, "head_dim": 32})


def classes():
    """[(class of models, class of its config)]."""
    found = {}
    for name in MAPPINGS:
        mapping = getattr(modeling_auto, name + "_MAPPING")
        for config_class in mapping.keys():
            with contextlib.suppress(Exception):  # some names belong to no class, and some need other packages
                models = mapping[config_class]
                for model in models if isinstance(models, tuple) else (models,):
                    found.setdefault(model, model.config_class or config_class)
    return sorted(found.items(), key=lambda item: f"{item[0].__module__}.{item[0].__name__}")


def small(config_class, change):
    default = config_class()
    numbers = {**{name: getattr(default, name, None) for name in default.attribute_map}, **default.to_dict()}
    options = {name: value for name, value in {**SMALL, **change, "initializer_range": 0.2}.items()
               if isinstance(numbers.get(name), (int, float))}
    options |= {name: min(value, 3) for name, value in numbers.items()
                if name.endswith("_token_id") and isinstance(value, int)}
    for name in default.sub_configs:
        if (part := getattr(default, name, None)) is not None:
            options[name] = small(type(part), change).to_dict()
    return config_class(**options)


def built(made, config, attention):
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    return made(config).eval()


def inputs_of(model):
    """Yields inputs that a model may read: tokens if it takes them, else pixels and sound, to be tried in turn."""
    names, config = inspect.signature(model.forward).parameters, model.config
    torch.manual_seed(1)
    tokens = {name: torch.randint(5, VOCAB, (BATCH, LENGTH)) for name in ("input_ids", "decoder_input_ids")
              if name in names}
    if "input_ids" in tokens:
        yield tokens
        return
    size, bins = getattr(config, "image_size", 16), getattr(config, "num_mel_bins", 80)
    size = size if isinstance(size, (tuple, list)) else (size, size)
    for shape in ((3, *size), (4000,), (bins, 2 * getattr(config, "max_source_positions", 32)), (64, bins)):
        yield tokens | {model.main_input_name: torch.randn(BATCH, *shape)}


def output_of(model, inputs):
    torch.manual_seed(2)
    with torch.no_grad():
        out = model(**inputs)
    return next(x for x in (out if isinstance(out, tuple) else out.to_tuple())
                if isinstance(x, torch.Tensor) and x.is_floating_point())


def outputs_of(model, inputs):
    """{padding: logits or hidden states, of the valid tokens}; and {} or the rows before a last token that changes."""
    found = {"none": output_of(model, inputs)}
    if "input_ids" in inputs and "attention_mask" in inspect.signature(model.forward).parameters:
        for side, valid in dict(right=slice(0, 5), left=slice(4, None)).items():
            mask = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
            mask[0], mask[1, valid] = 1, 1
            out = output_of(model, inputs | {"attention_mask": mask})
            is_of_tokens = "decoder_input_ids" not in inputs and out.shape[:2] == mask.shape
            found[side] = out[mask.bool()] if is_of_tokens else out
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    if name not in inputs or found["none"].shape[1:2] != (LENGTH,):
        return found, None
    tokens = inputs[name].clone()
    tokens[:, -1] -= 1
    return found, (found["none"][:, :-1], output_of(model, inputs | {name: tokens})[:, :-1])


def is_near(got, want):
    return got.shape == want.shape and bool((got - want).norm() <= 2**-9 * want.norm())


def tiny(made, config_class):
    """(model with eager attention, its inputs, what outputs_of finds) of the first of CHANGES that gives numbers."""
    errors = []
    for change in CHANGES:
        try:
            config = small(config_class, change)
            with torch.device("meta"):
                count = sum(x.numel() for x in built(made, config, "eager").parameters())
            assert count <= MOST_PARAMETERS, "it has too many parameters"
            torch.manual_seed(0)
            model = built(made, config, "eager")
            for x in model.parameters():
                if x.ndim > 1:
                    torch.nn.init.normal_(x, std=x.shape[-1] ** -0.5)
        except Exception as error:
            errors.append(error)
            continue
        for inputs in inputs_of(model):
            try:
                found = outputs_of(model, inputs)
                assert all(x.isfinite().all() for x in found[0].values()), "numbers are not finite"
                return model, inputs, found
            except Exception as error:
                errors.append(error)
    raise errors[0]


def copied(eager, attention):
    model = built(type(eager), eager.config, attention)
    model.load_state_dict(eager.state_dict())
    return model


def is_refused_for_sdpa(eager):
    try:
        copied(eager, "sdpa")
    except ValueError:
        return True
    return False


def compared(made, config_class, calls):
    """(result, why) of one class."""
    try:
        eager, inputs, (want, rows) = tiny(made, config_class)
    except Exception as error:
        return "not built small", f"{type(error).__name__}: {error}"
    calls.clear()
    try:
        got, our_rows = outputs_of(copied(eager, NAME), inputs)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if NAME in why and is_refused_for_sdpa(eager):
            return "refused", "as sdpa by transformers"
        return ("refused" if any(reason in why for reason in REASONS) else "wrong"), why
    wrong = [padding for padding, x in want.items() if not is_near(got[padding], x)]
    if wrong:  # sdpa too may differ from eager: recurrent layers carry rows of padding into valid tokens
        of_sdpa, _ = outputs_of(copied(eager, "sdpa"), inputs)
        result = "as sdpa" if all(is_near(got[padding], of_sdpa[padding]) for padding in wrong) else "wrong"
        return result, f"unlike eager, padding: {', '.join(wrong)}"
    is_causal = rows is not None and is_near(*rows)
    if is_causal and not is_near(*our_rows):
        return "wrong", "a later token changes earlier rows"
    return ("equal" if calls else "without our attention"), "causal" * is_causal


@pytest.fixture
def little_memory():
    """Some classes ask for more than a machine has, whatever their config says: they are then not built small."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("part", range(PARTS))
def test_all_classes(part, monkeypatch):
    registered("torch", monkeypatch)
    attend, calls = transformers.AttentionInterface._global_mapping[NAME], []
    transformers.AttentionInterface.register(NAME, lambda *args, **options: calls.append(1) or attend(*args, **options))
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    table = collections.defaultdict(list)
    for made, config_class in classes()[part::PARTS]:
        result, why = compared(made, config_class, calls)
        table[result].append(f"{made.__name__} ({why})" if why else made.__name__)
    for result, names in table.items():
        print(f"{len(names)} {result}:", *names, sep="\n    ")
    assert not table["wrong"]
    assert len(table["equal"]) >= LEAST_EQUAL / PARTS
    assert len(table["refused"]) < len(table["equal"]) / 2
    assert sum("(causal)" in name for name in table["equal"]) >= LEAST_EQUAL / PARTS / 2
