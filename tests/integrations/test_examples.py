"""The examples: they run, train alike with every backend, also a split sequence, and generate the same tokens with and
without a cache."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from conftest import HAS_GPU, IMPLEMENTATIONS
from examples import generate, long_context, train_tiny_gpt
from examples.generate import Request
from examples.tiny_lm import TinyLM
from minimal_attn.attention import BACKENDS
from minimal_attn.cli import guarded

SMALL = "--layers 2 --embed-dim 32 --heads 2 --seqlen 24 --batch-size 2 --steps 8 --dtype float32".split()
DEVICE = "cuda" if HAS_GPU else "cpu"
HERE = dict.fromkeys(name for name, device in IMPLEMENTATIONS.values() if device == DEVICE)
EVERY_BACKEND = ["--backend", *HERE, "reference"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("training")
    train_tiny_gpt.main([*EVERY_BACKEND, *SMALL, "--out", str(directory)])
    return directory


@pytest.mark.slow
def test_train_same_losses_with_every_backend(trained):
    result = json.loads((trained / "training.json").read_text())
    assert set(result["losses"]) == set(result["tokens_per_s"]) == {*HERE, "reference"}
    expected = torch.tensor(result["losses"]["reference"])
    assert len(expected) == 8 and expected[-2:].mean() < expected[:2].mean() - 0.05
    for losses in result["losses"].values():
        torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-5, atol=0)
    assert all(speed > 0 for speed in result["tokens_per_s"].values())
    assert result["meta"]["steps"] == 8 and result["meta"]["dtype"] == "float32"
    assert (trained / "training.png").read_bytes().startswith(b"\x89PNG")


def test_train_unavailable_backend(monkeypatch, capsys):
    """With its reason: on stderr, where "all" was asked for; by an error, where it was asked for by name."""
    missing = dataclasses.replace(BACKENDS["triton"], why_not=lambda device: RuntimeError("there is no triton"))
    monkeypatch.setitem(BACKENDS, "triton", missing)
    trained = []
    monkeypatch.setattr(train_tiny_gpt, "train", lambda args, backend, console: trained.append(backend) or ([1.0], 1.0))
    train_tiny_gpt.main(["--backend", "all"])
    assert capsys.readouterr().err == "triton is left out: there is no triton\n" and "triton" not in trained
    assert {"torch", "reference"} <= set(trained)
    trained.clear()
    for asked in (["triton"], ["all", "triton"]):
        with pytest.raises(SystemExit, match="2"):
            train_tiny_gpt.main(["--backend", *asked])
        assert "triton is not available: there is no triton\n" in capsys.readouterr().err and not trained


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_train_same_losses_as_sdpa_backends(tmp_path):
    """In bf16, with a head_dim that all of them serve."""
    small = "--layers 2 --embed-dim 128 --heads 2 --seqlen 256 --batch-size 2 --steps 20".split()
    train_tiny_gpt.main(["--backend", "cuda", *train_tiny_gpt.SDPA_BACKENDS, *small, "--out", str(tmp_path)])
    losses = losses_in(tmp_path)
    torch.testing.assert_close(losses, losses[:1].expand_as(losses), rtol=0.01, atol=0)


def losses_in(directory):
    return torch.tensor(list(json.loads((directory / "training.json").read_text())["losses"].values()))


@pytest.mark.slow
def test_train_dropout_same_with_every_backend(trained, tmp_path):
    train_tiny_gpt.main([*EVERY_BACKEND, *SMALL, "--steps", "3", "--out", str(tmp_path), "--dropout", "0.3"])
    dropped = losses_in(tmp_path)
    torch.testing.assert_close(dropped, dropped[-1:].expand_as(dropped), rtol=1e-5, atol=0)
    assert not dropped[:, 0].allclose(losses_in(trained)[:, 0], rtol=1e-5)  # of the same weights


BAD_OPTIONS = [
    *((train_tiny_gpt, options.split()) for options in (
        "--steps 1", "--seqlen 9999999", "--backend cudnn", "--device toaster", "--dropout nan",
        "--backend torch:cudnn --device cpu", "--backend torch:flash --device cuda --dropout 0.1",
        *["--device cuda"] * (not HAS_GPU))),
    *((generate, options.split()) for options in ("--requests 0", "--pages x", "--dtype int8", "--backend cudnn")),
    *((long_context, options.split()) for options in ("--seqlen 1", "--heads x", "--steps 3"))]  # the last: no torchrun


@pytest.mark.parametrize("example, options", BAD_OPTIONS, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_bad_options(example, options, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        example.main(options)


def test_train_missing_package_one_line(monkeypatch, capsys):
    """Before the training."""
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.delitem(sys.modules, "rich.console", raising=False)
    monkeypatch.setattr(train_tiny_gpt, "train", None)
    assert guarded("train_tiny_gpt", lambda: train_tiny_gpt.main(["--backend", "reference"])) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("train_tiny_gpt: this needs rich") and said.err.count("\n") == 1


# generate.py

LONGEST = 60  # prompt and new tokens of a request, here


def small_server(num_pages=8, chunk=12, max_batch=4, backend="auto", dtype=torch.float32):
    torch.manual_seed(0)
    model = TinyLM(layers=2, embed_dim=32, heads=2, heads_k=1, max_seqlen=LONGEST).to(DEVICE, dtype)
    return generate.Server(model, num_pages, chunk, max_batch, backend)


def drawn(num=9):
    return list(generate.draw_requests(num, LONGEST // 2, LONGEST // 2, seed=0))


def serve(server, requests):
    """All of them, to their ends; how many tokens they were given. Every page is free again."""
    generate.serve(server, requests, Console(quiet=True))
    assert sorted(server.free_pages) == list(range(server.cache.shape[2])) and not (server.running or server.waiting)
    assert all(not request.pages for request in requests)
    return sum(len(request.tokens) - request.num_prompt for request in requests)


def texts(requests):
    return [request.tokens for request in requests]


@pytest.mark.parametrize("backend", [*HERE, "reference"])
def test_generate_same_tokens_as_without_a_cache(backend):
    """Few requests, so that Triton's interpreter takes seconds: chunks, steps of both kinds, one that is cancelled."""
    is_16_bit = HAS_GPU and backend == "cuda"  # which has no cache in fp32 there
    server = small_server(chunk=20, backend=backend, dtype=torch.bfloat16 if is_16_bit else torch.float32)
    prompts = torch.randint(generate.VOCABULARY, (3, 30)).tolist()
    requests = [Request(prompts[0], 3), Request(prompts[1][:1], 7, arrives=1), Request(prompts[2], 9, leaves=4)]
    num_tokens, num_best = serve(server, requests), generate.check(server.model, requests, "reference")
    assert num_tokens >= 10 and (num_best == num_tokens or is_16_bit)
    assert [request.status for request in requests] == ["finished", "finished", "cancelled"]
    assert server.counts["decode"] > 1 and server.counts["mixed"] > 1


@pytest.mark.parametrize("num_pages, chunk, max_batch, give_way", [(5, 100, 3, True), (9, 16, 1, False)])
def test_generate_more_requests_than_pages(num_pages, chunk, max_batch, give_way):
    """All finish, with the tokens that they have where nobody waits; those who gave way computed their keys again."""
    server, requests, wanted = small_server(num_pages, chunk, max_batch), drawn(), drawn()
    for request in (*requests, *wanted):
        request.leaves = None
    serve(small_server(1000, 1000, 64), wanted)
    num_tokens = serve(server, requests)
    assert num_tokens == sum(request.num_new for request in requests) == server.counts["tokens"]
    assert server.counts["finished"] == 9 and texts(requests) == texts(wanted)
    assert (server.counts["waiting"] > 0) == give_way
    assert generate.check(server.model, requests, "reference") == num_tokens


def test_generate_cancelled_request_changes_nobody_else():
    """Whether it waits, is in the midst of its prompt, or generates; it keeps the tokens that it has."""
    wanted, requests = drawn(), drawn()
    for request in (*wanted, *requests):
        request.arrives, request.leaves = 0, None
    for i in range(0, 9, 2):
        requests[i].leaves = 2 + 10 * (i % 4 > 0)
    serve(small_server(), wanted)
    serve(small_server(), requests)
    statuses = {request.status for request in requests[::2]}
    assert "cancelled" in statuses
    for request, other in zip(requests, wanted):
        assert request.tokens == other.tokens[:len(request.tokens)]
        assert (request.status == "finished") == (len(request.tokens) == len(other.tokens))


def test_generate_youngest_gives_way():
    server, old, young = small_server(num_pages=4, chunk=100), Request([1] * 31, 20), Request([2] * 31, 20)
    for request in (old, young):
        server.submit(request)
    for _ in range(2):
        server.step()
    assert len(server.running) == 2 and not server.free_pages
    server.step()
    assert old.status == "running" and young.status == "waiting" and young.pages == [] and len(young.tokens) == 33
    while server.running or server.waiting:
        server.step()
    assert (len(old.tokens), len(young.tokens)) == (51, 51)
    assert generate.check(server.model, [old, young], "reference") == 40


def test_generate_refuses_requests_that_never_fit():
    server = small_server(num_pages=2)
    for prompt, num_new in ([], 3), ([1], 0), ([1] * 30, 3), ([1] * 33, 1):
        with pytest.raises(ValueError, match="no more than 32 in all"):
            server.submit(Request(prompt, num_new))
    server.submit(Request([1] * 30, 2))
    with pytest.raises(ValueError, match=f"no more than {LONGEST} in all"):
        small_server(num_pages=200).submit(Request([1] * LONGEST, 1))


def share_a_page(server, monkeypatch):
    server.free_pages[-3] = server.free_pages[-1]


def forget_a_key(server, monkeypatch):
    attend = generate.attention_with_kvcache
    monkeypatch.setattr(generate, "attention_with_kvcache", lambda q, k_cache, v_cache, seqused_k, **options: attend(
        q, k_cache, v_cache, (seqused_k - 1).clamp(min=0), **options))


def rotate_pairs_of_neighbours(server, monkeypatch):
    attend = generate.attention_with_kvcache
    monkeypatch.setattr(generate, "attention_with_kvcache", lambda *args, **options: attend(
        *args, **options | {"rotary_interleaved": True}))


@pytest.mark.parametrize("do_wrong", [share_a_page, forget_a_key, rotate_pairs_of_neighbours])
def test_generate_check_notices_a_fault(do_wrong, monkeypatch):
    server, requests = small_server(), drawn()
    do_wrong(server, monkeypatch)
    server.graphs = {}  # which were captured before
    generate.serve(server, requests, Console(quiet=True))
    with pytest.raises(RuntimeError, match="without a cache, a logit is"):
        generate.check(server.model, requests, "reference")


@pytest.mark.gpu
def test_generate_graphs_same_tokens():
    server, plain, requests, wanted = small_server(), small_server(), drawn(30), drawn(30)
    assert set(server.graphs) == {1, 2, 4}
    plain.graphs = {}
    assert serve(server, requests) == serve(plain, wanted) and texts(requests) == texts(wanted)


def test_generate_prints_what_it_found(capsys):
    generate.main(["--requests", "3", "--seed", "1"])
    words = capsys.readouterr().out
    assert "tokens are those of a run without a cache" in words and "pages are free.\n" in words


# long_context.py

def run_by_torchrun(num_processes, *words):
    """The process torchrun words, at its end, with one thread a process, and as if this package were installed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    return subprocess.run([*command, *words], cwd=train_tiny_gpt.ROOT, capture_output=True, text=True, timeout=120,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(train_tiny_gpt.ROOT)})


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.skipif(HAS_GPU, reason="its default size there takes minutes")
def test_long_context_same_losses_on_two_ranks():
    """Two ranks get the losses of one process, which sends nothing. The example runs as a file and as a module."""
    printed = []
    for num_processes, how in ((1, ["examples/long_context.py"]), (2, ["-m", "examples.long_context"])):
        run = run_by_torchrun(num_processes, *how)
        assert run.returncode == 0, run.stderr
        tokens, num_ranks, first, last = re.match(
            r"(\d+) tokens on (\d) ranks: loss ([\d.]+) → ([\d.]+), [\d,]+ tokens/s\n$", run.stdout).groups()
        assert (tokens, num_ranks) == ("509", str(num_processes))
        printed.append(torch.tensor([float(first), float(last)]))
    torch.testing.assert_close(*printed, rtol=0, atol=2e-4)
    assert printed[0][1] < printed[0][0] - 1
