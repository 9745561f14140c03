"""transformers' continuous batching with our functions: the tokens of eager attention, in fp32.

transformers takes the folder of integrations/kernels.py as a kernel of its hub. A step in which some prompt is read
calls flash_attn_varlen_func on copies of the cached keys. A step that only decodes calls flash_attn_with_kvcache on the
pages. This needs a model without windows, a kernel with "flash" and then 2 or 3 in its name, and a GPU. In the code of
transformers, the GPU is a condition and nothing more. So on the CPU it is told that there is one where it asks for it.
"""

import functools

import pytest
import torch

import minimal_attn
from cases import slow_unless
from conftest import HAS_GPU
from minimal_attn.flash_attn import flash_attn_interface
from minimal_attn.integrations import kernels
from test_flash_attn_names import availability  # noqa: F401: a fixture
from test_transformers import MODELS, SIZES, VOCAB, loaded_kernel

transformers = pytest.importorskip("transformers", minversion="5.23")  # earlier releases configure batches otherwise
initialization = pytest.importorskip("transformers.generation.continuous_batching.initialization")

DEVICE = "cuda" if HAS_GPU else "cpu"
SINKS = "gpt_oss_without_windows"
KINDS = MODELS | {SINKS: ("GptOssForCausalLM", dict(layer_types=["full_attention"] * 2, num_local_experts=2,
                                                    num_experts_per_tok=2))}
WITHOUT_WINDOWS = "llama", SINKS  # transformers has no pages for the others
NEW_TOKENS = 6
# More requests than run at once, one prompt of several chunks, and two that begin with the same page.
BATCHING = dict(page_size=16, num_blocks=40, max_batch_tokens=24, max_requests_per_batch=3, max_memory_percent=0.1)


def prompts():
    generator = torch.Generator().manual_seed(0)
    found = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (3, 40, 1, 20)]
    return [*found, found[-1][:17] + [5]]


@pytest.fixture
def pages(monkeypatch):
    """transformers, which may take the pages."""
    from transformers import modeling_flash_attention_utils as utils

    ensure = initialization.ensure_decode_fast_path_is_available

    def ensure_as_on_a_gpu(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            ensure(*args)

    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", ensure_as_on_a_gpu)
    monkeypatch.setattr(utils, "_loaded_implementation", None)


def counted(module, monkeypatch):
    """{name of a function of this module: how often it has been called}"""
    count = dict.fromkeys(("flash_attn_varlen_func", "flash_attn_with_kvcache"), 0)

    def counting(name, function):
        @functools.wraps(function)  # transformers looks at the signature
        def call(*args, **options):
            count[name] += 1
            return function(*args, **options)

        return call

    for name in count:
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return count


@pytest.fixture
def calls(pages, monkeypatch, tmp_path):
    """counted() of our kernel, which is in the hub's place."""
    from transformers.integrations import hub_kernels

    kernel = loaded_kernel(tmp_path)
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **options: {kernels.NAME: kernel}[name])
    monkeypatch.setattr(transformers.GptOssPreTrainedModel, "_compatible_flash_implementations", [kernels.NAME])
    return counted(kernel, monkeypatch)


def generated(kind, name, **options):
    """The tokens of all requests, in their order."""
    made, more = KINDS[kind]
    made = getattr(transformers, made)
    torch.manual_seed(0)
    model = made(made.config_class(**SIZES, **more, attn_implementation=name)).to(DEVICE).eval()
    out = model.generate_batch(
        prompts(), progress_bar=False,
        generation_config=transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1,
                                                        pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**BATCHING, **options))
    return [request.generated_tokens for request in out.values()]


def check_calls(calls, kind):
    assert calls["flash_attn_varlen_func"] and bool(calls["flash_attn_with_kvcache"]) == (kind in WITHOUT_WINDOWS)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=slow_unless(HAS_GPU or kind in (SINKS, "gemma2")))
                                  for kind in KINDS])
def test_tokens_are_those_of_eager(kind, calls):
    options = dict(use_cuda_graph=False, use_async_batching=False)
    got = generated(kind, kernels.NAME, **options)
    check_calls(calls, kind)
    assert got == generated(kind, "eager", **options)
    assert len(got) == len(prompts()) and all(len(tokens) == NEW_TOKENS for tokens in got)


def test_tokens_by_the_names_of_flash_attn(availability, pages, monkeypatch):
    calls, options = counted(flash_attn_interface, monkeypatch), dict(use_cuda_graph=False, use_async_batching=False)
    minimal_attn.install_as_flash_attn()
    try:
        got = generated("llama", "flash_attention_2", **options)
    finally:
        minimal_attn.uninstall_as_flash_attn()
    check_calls(calls, "llama")
    assert got == generated("llama", "eager", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", WITHOUT_WINDOWS)
def test_tokens_in_cuda_graphs_are_those_of_eager(kind, calls):
    got = generated(kind, kernels.NAME, use_cuda_graph=True, use_async_batching=True)
    check_calls(calls, kind)
    assert got == generated(kind, "eager", use_cuda_graph=False, use_async_batching=False)
