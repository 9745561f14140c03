"""vLLM's own engine with our attention, beside the same engine with its own: `make vllm`, which makes the environment.

engine.py has the models and the engines, one process for each kind of model. Both compute in fp32 on the CPU. Their
tokens must be the same, and their log-probabilities close.
"""

import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make vllm", allow_module_level=True)

from engine import BASE, ENGINES, FAULTS, NEW_TOKENS, SIZES, prompts  # noqa: E402

ROOT = Path(__file__).parents[2]
STEPS = ROOT / "tests" / "integrations" / "vllm_steps.json"
NUM_STEPS = 60  # the most that are recorded of an engine
ENV = dict(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR",
           VLLM_PLUGINS="minimal_attn,test_platform", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1",
           TORCHDYNAMO_DISABLE="1")  # vLLM compiles the ranks of log-probabilities
TOLERANCE = 1e-3  # for log-probabilities, whose largest differences are below 3e-5

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
ours = pytest.mark.parametrize("kind, engine", [(kind, name) for kind, engines in ENGINES.items() for name in engines
                                                if name != "own"])


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """ran(kind): (what engine.py has written for this kind of model, {number of a process: its calls})."""
    plugin = tmp_path_factory.mktemp("plugin")
    info = plugin / "test_platform-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test_platform\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\ntest_platform = engine:platform\n")

    @functools.cache
    def run(kind):
        folder = tmp_path_factory.mktemp(kind)
        path = os.pathsep.join([str(plugin), str(Path(__file__).parent)])
        done = subprocess.run([sys.executable, str(Path(__file__).parent / "engine.py"), kind, str(folder)],
                              env={**os.environ, **ENV, "PYTHONPATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads((folder / "results.json").read_text()), {
            file.name: [json.loads(line) for line in file.read_text().splitlines()]
            for file in (folder / "calls").iterdir()}

    return run


@pytest.fixture
def calls(ran):
    """calls(kind, engine): the calls of our attention, in their order."""
    return lambda kind, engine: [call for of_process in ran(kind)[1].values() for call in of_process
                                 if call["engine"] == engine]


def answers(ran, kind, engine):
    return ran(kind)[0][engine]["answers"]


def check(got, want):
    """AssertionError unless tokens are the same and log-probabilities close, of new tokens and of prompts."""
    assert [x[0] for x in got] == [x[0] for x in want]
    for mine, others in zip(got, want):
        for of_tokens, others_of_tokens in zip(mine[1:], others[1:]):
            if of_tokens:  # with a cache of prefixes, prompts have no log-probabilities
                torch.testing.assert_close(of_tokens, others_of_tokens, rtol=0, atol=TOLERANCE)


def samples(call):
    """(rows, keys) of each sample of a call."""
    return list(zip((b - a for a, b in itertools.pairwise(call["query_start_loc"])), call["seq_lens"]))


@ours
def test_tokens_are_those_of_vllm(ran, kind, engine):
    check(answers(ran, kind, engine), answers(ran, "gqa" if kind == "processes" else kind, "own"))


@ours
def test_our_attention_is_called(ran, calls, kind, engine):
    """In each layer, for each token that is computed and not found in a cache of prefixes."""
    layers, of_engine = SIZES["num_hidden_layers"], calls(kind, engine)
    processes = ENGINES[kind][engine].get("tensor_parallel_size", 1)
    tokens = sum(len(x) + NEW_TOKENS - 1 for x in prompts()) - ran(kind)[0][engine]["metrics"]["prefix_cache_hits"]
    assert len({call["layer"] for call in of_engine}) == layers
    assert sum(call["query_start_loc"][-1] for call in of_engine) >= layers * processes * tokens
    assert not calls(kind, "own")


@pytest.mark.parametrize("kind, fault", [(kind, name) for kind, faults in FAULTS.items() for name in faults])
def test_a_fault_fails(ran, kind, fault):
    with pytest.raises(AssertionError):
        check(answers(ran, kind, fault), answers(ran, kind, "own"))


@pytest.mark.parametrize("size", [16, 32, 128])
def test_pages(calls, size):
    """The cache has pages of this size, and the step's longest sample has as many as it needs."""
    for call in calls("gqa", f"pages_{size}"):
        assert call["cache"][2] == size and len(call["block_table"][0]) * size >= BASE["max_model_len"]


def test_chunked_prefill(calls):
    """A part of a prompt beside other samples; without chunks, whole prompts alone."""
    def chunks(engine):
        return [x for call in calls("gqa", engine) for x in samples(call) if 1 < x[0] < x[1]]

    assert len(chunks("pages_32")) >= 4 and not chunks("whole_prompts")


def test_prefix_cache(ran, calls):
    """Two prompts begin with 64 tokens of others: only their last one or two tokens are computed."""
    assert ran("gqa")[0]["prefix_cache"]["metrics"]["prefix_cache_hits"] == 2 * 64
    found = [x for call in calls("gqa", "prefix_cache") for x in samples(call)]
    assert (1, 65) in found and (2, 66) in found


def test_preemption(ran):
    assert ran("gqa")[0]["few_pages"]["metrics"]["num_preemptions"] > 0
    assert ran("gqa")[0]["pages_16"]["metrics"]["num_preemptions"] == 0


def test_drafts(ran, calls):
    """Samples that decode have up to four rows, and some drafts are accepted."""
    assert ran("gqa")[0]["drafts"]["metrics"]["spec_decode_num_accepted_tokens"] > 0
    assert any(1 < rows <= 4 and keys > 70 for call in calls("gqa", "drafts") for rows, keys in samples(call))


def test_several_processes(ran):
    """Two processes of the engine have half of the heads each."""
    found = ran("processes")[1].values()
    assert len(found) == 2 and all(call["num_heads"] == 2 and call["cache"][1] == 1 for x in found for call in x)


def test_entry_point():
    """Engines find our backend by this package's metadata alone."""
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="minimal_attn")
    assert {x.value for x in found} == {"minimal_attn.integrations.vllm:register"}


@pytest.mark.parametrize("changed, reason", [
    ({}, None), (dict(head_size=80), None), (dict(has_sink=True, has_sliding_window=True, block_size=16), None),
    (dict(kv_cache_dtype="bfloat16"), None), (dict(head_size=512), "head_size not supported"),
    (dict(block_size=24), "block_size not supported"), (dict(dtype=torch.float64), "dtype not supported"),
    (dict(kv_cache_dtype="fp8"), "kv_cache_dtype not supported"),
    (dict(kv_cache_dtype="float16"), "the caches must have the dtype of the model"),
    (dict(use_mla=True), "MLA not supported"), (dict(use_sparse=True), "sparse not supported"),
    (dict(use_dcp=True), "DCP not supported"), (dict(use_pcp=True), "PCP not supported"),
    (dict(use_mm_prefix=True), "partial multimodal token full attention not supported"),
    (dict(use_non_causal=True), "non-causal attention not supported"),
    (dict(attn_type="encoder_only"), "attention type encoder_only not supported"),
    (dict(use_batch_invariant=True), "batch invariance not supported"), (dict(use_rswa=True), "R-SWA not supported"),
    (dict(device_capability=(7, 5)), "compute capability not supported")])
def test_refused(changed, reason):
    """vLLM asks this before it takes the backend for a layer."""
    from minimal_attn.integrations.vllm import Backend
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    asked = dict(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None) | changed
    capability = DeviceCapability(*asked.pop("device_capability", (9, 0)))
    reasons = Backend.validate_configuration(device_capability=capability, **AttentionSelectorConfig(**asked)._asdict())
    assert not reasons if reason is None else reason in " ".join(reasons)


def record(of_layer):
    """The calls of a layer as tests/integrations replays them: what they share, and where each has its rows and keys.
    Pages that a sample does not use are left out."""
    first, size = of_layer[0], of_layer[0]["cache"][2]
    return {name: first[name] for name in ("num_heads", "cache", "window", "softcap", "has_sinks", "slopes")} | {
        "steps": [[call["query_start_loc"], call["max_query_len"], call["seq_lens"],
                   [row[:-(-n // size)] for row, n in zip(call["block_table"], call["seq_lens"])], call["slots"]]
                  for call in of_layer[:NUM_STEPS]]}


def test_steps_are_recorded(calls):
    """MINIMAL_ATTN_RECORD=1 make vllm writes the record anew. One layer of a kind stands for all that are alike."""
    found = {}
    for kind, engine in itertools.product(ENGINES, ("ours", *ENGINES["gqa"])):
        of_engine = [] if kind == "processes" else calls(kind, engine)
        layers = [record([call for call in of_engine if call["layer"] == layer])
                  for layer in sorted({call["layer"] for call in of_engine})]
        for i, layer in enumerate(layers):
            if layer["window"] not in [x["window"] for x in layers[:i]]:
                found[f"{kind}-{engine}-{i}"] = layer
    lines = ",\n".join(f"{json.dumps(x)}: {json.dumps(y, separators=(',', ':'))}" for x, y in found.items())
    text = "{\n" + lines + "\n}\n"
    if os.environ.get("MINIMAL_ATTN_RECORD") == "1":
        STEPS.write_text(text)
    assert len(text) < 150_000 and STEPS.read_text() == text
