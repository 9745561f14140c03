"""Engines of vLLM on the CPU, for one tiny model with random weights: python engine.py KIND FOLDER, in a process of its
own, so that nothing of one model is left for the next.

The model is made in FOLDER. Each engine of ENGINES[KIND] answers the same prompts, with faults in our attention too
where the engine has some. FOLDER/results.json gets what they said, and FOLDER/calls/ one file of each process, with a
line for each call of our attention.
"""

import functools
import json
import os
import sys
from pathlib import Path

import torch
import transformers
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability

SIZES = dict(vocab_size=128, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, initializer_range=0.2, max_position_embeddings=256)
WINDOW = 16
# name: (class of transformers, what its config has beside SIZES)
MODELS = {
    "gqa": ("LlamaForCausalLM", {}),
    "window": ("MistralForCausalLM", dict(sliding_window=WINDOW)),
    # Sinks in each layer, and a window in every other one. All experts, or a rounding may change the choice.
    "sinks": ("GptOssForCausalLM", dict(sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=2)),
    # A softcap that bends most scores in each layer, and a window in every other one.
    "softcap": ("Gemma2ForCausalLM", dict(sliding_window=WINDOW, attn_logit_softcapping=1.0, query_pre_attn_scalar=16,
                                          final_logit_softcapping=None)),
    "alibi": ("BloomForCausalLM", dict(n_layer=2, n_head=4)),
    "processes": ("LlamaForCausalLM", {}),
}
DRAFTS = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2)
# kind: {name of an engine: its options beside BASE}. "own" has vLLM's attention for CPUs, all others have ours.
ENGINES = dict.fromkeys(MODELS, {"own": {}, "ours": {}}) | {
    "gqa": {"own": {}, "pages_16": dict(block_size=16), "pages_32": {}, "pages_128": dict(block_size=128),
            "whole_prompts": dict(max_num_batched_tokens=512), "prefix_cache": dict(enable_prefix_caching=True),
            "few_pages": dict(block_size=16, num_gpu_blocks_override=10), "drafts": dict(speculative_config=DRAFTS)},
    "processes": {"ours": dict(tensor_parallel_size=2, distributed_executor_backend="mp")}}
# Prompts of more than 32 tokens are read in chunks.
BASE = dict(skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=128, block_size=32, seed=0,
            max_num_batched_tokens=32, max_num_seqs=4, num_gpu_blocks_override=64, enable_prefix_caching=False,
            disable_log_stats=False)
# kind: {name of a fault: what it changes in the options of a layer}
FAULTS = {
    "window": {"no_window": lambda x: x | dict(window_size=(-1, -1)),
               "longer_window": lambda x: x | dict(window_size=(WINDOW, 0)),
               "shorter_window": lambda x: x | dict(window_size=(WINDOW - 2, 0))},
    "sinks": {"no_sinks": lambda x: x | dict(sinks=None)},
    "softcap": {"no_softcap": lambda x: x | dict(softcap=0)},
    "alibi": {"no_slopes": lambda x: x | dict(alibi_slopes=None)},
}
NEW_TOKENS = 20
METRICS = "num_preemptions", "prefix_cache_hits", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"


def make_model(kind, folder):
    """The model in a folder, as vLLM reads it. Its tokens vary: it does not say the same one again and again."""
    torch.manual_seed(0)
    name, more = MODELS[kind]
    made = getattr(transformers, name)
    model = made(made.config_class(**SIZES | more))
    if kind == "softcap":  # whose tied embeddings would say the last token again
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.001)
        model.model.norm.weight.data.fill_(1000)
    if kind == "alibi":
        model.transformer.word_embeddings_layernorm.weight.data.fill_(0.01)
    model.save_pretrained(folder)


def prompts():
    """More than run at once. The last two begin with the first 64 tokens of another, and some repeat themselves."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(SIZES["vocab_size"], (n,), generator=generator).tolist() for n in (5, 70, 100, 1, 12)]
    return [*made[:4], made[4] * 3, made[1][:64] + [5], made[2][:64] + [7, 8]]


# vLLM loads this in each of its processes, by an entry point that test_vllm.py makes.

def platform():
    return "engine.Cpu"


class Cpu(CpuPlatform):
    """vLLM's platform for CPUs, which takes our attention where an engine asks for it: vLLM's own one never does."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        if selected_backend is None or selected_backend.name != "CUSTOM":
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        backend = selected_backend.get_class()
        reasons = backend.validate_configuration(device_capability=DeviceCapability(9, 0),
                                                 **attn_selector_config._asdict())
        if reasons:  # as on CUDA
            raise ValueError(f"{selected_backend} is not valid for this configuration: {reasons}")
        watch(backend.get_impl_cls())
        return selected_backend.get_path()


@functools.cache
def watch(attend):
    """Let each call of attend.forward write a line to a file of its process: where its rows and keys are."""
    from vllm.forward_context import get_forward_context

    forward = attend.forward

    def watched(self, layer, query, key, value, kv_cache, attn_metadata, output, **others):
        if attn_metadata is not None and os.environ["ENGINE"]:
            with (Path(os.environ["ENGINE_CALLS"]) / str(os.getpid())).open("a") as file:
                found = {name: x.tolist() if hasattr(x, "tolist") else x for name, x in attn_metadata._asdict().items()}
                found |= dict(engine=os.environ["ENGINE"], layer=layer.layer_name, tokens=len(query),
                              slots=get_forward_context().slot_mapping[layer.layer_name].tolist(),
                              num_heads=self.num_heads, cache=list(kv_cache.shape),
                              window=self.options["window_size"][0], softcap=self.options["softcap"],
                              has_sinks=self.options["sinks"] is not None,
                              slopes=None if (x := self.options["alibi_slopes"]) is None else x.tolist())
                file.write(json.dumps(found) + "\n")
        return forward(self, layer, query, key, value, kv_cache, attn_metadata, output, **others)

    attend.forward = watched


def answers(llm):
    """[tokens, their log-probabilities, and those of the prompt's tokens] of each prompt."""
    from vllm import SamplingParams

    with_prompts = not llm.llm_engine.vllm_config.cache_config.enable_prefix_caching  # which they would switch off
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, detokenize=False, logprobs=0,
                              prompt_logprobs=0 if with_prompts else None)
    found = []
    for given, answer in zip(prompts(), llm.generate([{"prompt_token_ids": x} for x in prompts()], sampling,
                                                     use_tqdm=False)):
        out = answer.outputs[0]
        found.append([list(out.token_ids), [x[token].logprob for x, token in zip(out.logprobs, out.token_ids)],
                      [x[token].logprob for x, token in zip((answer.prompt_logprobs or ())[1:], given[1:])]])
    return found


def main(kind, folder):
    folder = Path(folder)
    (folder / "calls").mkdir()
    os.environ["ENGINE_CALLS"] = str(folder / "calls")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(kind == "processes"))
    make_model(kind, folder / "model")
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    results = {}
    for name, options in ENGINES[kind].items():
        os.environ["ENGINE"] = name  # which watch() writes down
        llm = LLM(str(folder / "model"), attention_backend=None if name == "own" else "CUSTOM", **BASE | options)
        found = answers(llm)
        metrics = {x.name.removeprefix("vllm:"): x for x in llm.get_metrics()}
        results[name] = {"answers": found, "metrics": {x: metrics[x].value for x in METRICS if x in metrics}}
        os.environ["ENGINE"] = ""
        for fault, change in FAULTS.get(kind, {}).items() if name == "ours" else ():
            results[fault] = {"answers": with_fault(llm, change)}
        del llm
        cleanup_dist_env_and_memory()
    (folder / "results.json").write_text(json.dumps(results))


def with_fault(llm, change):
    """answers of an engine of this process, with the changed options in each layer that has what the fault is about."""
    layers = [x.impl for x in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
              if hasattr(x, "impl")]  # experts have none
    before = [x.options for x in layers]
    for layer in layers:
        if layer.options["window_size"][0] >= 0 or "window_size" not in change({}):
            layer.options = change(layer.options)
    found = answers(llm)
    for layer, options in zip(layers, before):
        layer.options = options
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
