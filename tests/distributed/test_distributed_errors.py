"""Context parallelism that fails: bad input, which is refused before anything is sent, ranks that end, and leaks."""

import datetime
import gc
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

import ranks
from minimal_attn import FlashMHA
from minimal_attn.distributed import context_parallel_attention, unshard
from test_distributed import METHODS

pytestmark = pytest.mark.cpu

Q, K = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
REFUSED = [
    ("TypeError: dropout_seed must be a torch.Tensor", dict(dropout_p=0.1, dropout_seed=5)),
    ("ValueError: dropout_p", dict(dropout_p=2)),
    ("ValueError: unknown layout 'striped'", dict(layout="striped")),
    ("ValueError: unknown method 'p2p'", dict(method="p2p")),
    ("TypeError: group must be", dict(of_group="nccl")),
    ("ValueError: method='ulysses' divides the heads", dict(method="ulysses", k=K[:, :1])),
    ("ValueError: q, k and v must be 4D", dict(q=Q[0, :2], k=K[0])),
    ("ValueError: q, k and v must have the same number of rows", dict(k=K[:, :, :4])),
    ("ValueError: q, k and v must have the same number of rows", dict(q=Q[:, :, :0], k=K[:, :, :0])),
    ("ValueError: the zigzag layout has two chunks", dict(q=Q[:, :, :5], k=K[:, :, :5])),
    ("TypeError: dtypes must match", dict(q=Q.half())),
    ("TypeError: Unsupported dtype: q is torch.float8_e4m3fn",
     dict(q=Q.to(torch.float8_e4m3fn), k=K.to(torch.float8_e4m3fn), backend="reference")),
    ("ValueError: unknown backend 'cudnn'", dict(backend="cudnn")),
    ("TypeError: causal must be a bool", dict(causal=1)),
    *(("ValueError: seqlen must be in 1..12", dict(seqlen=n)) for n in (0, 13)),
    ("TypeError: seqlen must be None or an int", dict(seqlen=2.0)),
    ("ValueError: seqlen cannot be given together", dict(seqlen=3, cu_seqlens=[0, 3])),
    ("TypeError: cu_seqlens must be int32", dict(cu_seqlens=torch.tensor([0, 12]))),
    *(("ValueError: cu_seqlens must start at 0 and ascend up to at most 12", dict(cu_seqlens=x))
      for x in ([0, 5, 3], [0, 13], [0])),
    ("ValueError: with cu_seqlens, q, k and v must be packed",
     dict(q=Q.expand(2, -1, -1, -1), k=K.expand(2, -1, -1, -1), cu_seqlens=[0, 12])),
    ("NotImplementedError: method='ring' has no alibi_slopes",
     dict(method="ring", alibi_slopes=torch.ones(4), causal=True)),
    ("NotImplementedError: method='all_gather' has alibi_slopes under a causal mask alone",
     dict(method="all_gather", alibi_slopes=torch.ones(4))),
    ("ValueError: sinks must be float32, float16 or bfloat16 of shape (H,) = (4,)", dict(sinks=torch.ones(3))),
]


def error_of(group, q=Q, k=K, of_group=None, **options):
    if isinstance(options.get("cu_seqlens"), list):
        options["cu_seqlens"] = torch.tensor(options["cu_seqlens"], dtype=torch.int32)
    try:
        context_parallel_attention(q, k, k, of_group or group, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def errors_in_rank():
    """An error of the last rank, while the others do nothing; the first one is in no group of two."""
    rank, group = torch.distributed.get_rank(), ranks.GROUPS[2]
    if rank == 0:
        return error_of(ranks.GROUPS[1])
    if rank < 3:
        return None
    errors = [error_of(group, **options) for _, options in REFUSED]
    with pytest.raises(NotImplementedError, match="unshard has no gradient"):
        unshard(Q.clone().requires_grad_(), group, 2)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: context_parallel_attention(q, K, K, group), (Q,), (Q,))
    with pytest.raises(NotImplementedError, match="transforms"):
        torch.func.vmap(lambda q: context_parallel_attention(q, K, K, group))(Q[None])
    return errors


def test_bad_input_is_refused_before_anything_is_sent(four):
    outside, *_, errors = four.run(errors_in_rank)
    assert outside == "ValueError: this process is not a member of the group"
    assert [(error, wanted) for error, (wanted, _) in zip(errors, REFUSED, strict=True)
            if not error.startswith(wanted)] == []


def test_without_a_process_group():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="init_process_group first"):
        context_parallel_attention(q, q, q)
    with pytest.raises(RuntimeError, match="init_process_group first"):
        FlashMHA(16, 2, context_parallel_group="cp")


@ranks.in_group()
def steps_in_rank(group, num_steps):
    """How many tensors there are after a few steps, and after many more."""
    found = []
    for step in range(num_steps):
        if step in (num_steps // 4, num_steps - 1):
            gc.collect()
            found.append(sum(isinstance(x, torch.Tensor) for x in gc.get_objects()))
        q, k, v = (torch.randn(1, 4, 64, 32, requires_grad=True) for _ in "qkv")
        context_parallel_attention(q, k, v, group, method=METHODS[step % 3], causal=True).sum().backward()
    return found


def test_steps_leave_no_tensors_behind(four):
    """But for a few of the last step, which its threads have not freed yet."""
    for few, many in four.run(steps_in_rank, 40)[2:]:
        assert many - few < 8


def fail_in_rank(method, how, rank, store, pipe, on_gpus):
    """A group of two, in which rank 1 ends before the second call, or does not come to it."""
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if on_gpus else "gloo", init_method=store, rank=rank, world_size=2,
        device_id=device if on_gpus else None, timeout=datetime.timedelta(seconds=6))
    q = torch.randn(1, 4, 256, 64, device=device, dtype=torch.bfloat16)
    try:
        for call in range(2):  # of which the first is right, so that both are connected
            start = time.monotonic()
            if (rank, call) == (1, 1):
                time.sleep(30 if how == "waits" else 0)
                os._exit(0)
            context_parallel_attention(q, q, q, method=method)
            if on_gpus:
                torch.cuda.synchronize()
        pipe.send(("none", 0))
    except Exception as error:
        pipe.send((type(error).__name__, time.monotonic() - start))
    os._exit(0)  # the group cannot be ended any more


def error_of_first_rank(folder, method, how, on_gpus=False):
    """(the error of rank 0, seconds until it is raised)."""
    context = multiprocessing.get_context("spawn") if on_gpus else ranks.FORKS
    pipes, store = [context.Pipe() for _ in range(2)], f"file://{folder}/store"
    processes = [context.Process(target=fail_in_rank, args=(method, how, rank, store, theirs, on_gpus))
                 for rank, (_, theirs) in enumerate(pipes)]
    for process in processes:
        process.start()
    try:
        assert pipes[0][0].poll(60), "rank 0 waits for ever"
        return pipes[0][0].recv()
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.slow
@pytest.mark.parametrize("method, how", [("all_gather", "waits"), ("ring", "ends")])
def test_failing_rank_ends_the_others(tmp_path, method, how):
    """By the time-out of the group, or as soon as a connection is lost."""
    error, seconds = error_of_first_rank(tmp_path, method, how)
    assert error in ("RuntimeError", "DistBackendError", "DistNetworkError") and seconds < 15


def begin_and_end(store):
    """A group of one, and the threads that it leaves behind."""
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    context_parallel_attention(*torch.randn(3, 1, 2, 8, 16))
    torch.distributed.destroy_process_group()
    names = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
    os._exit(any("gloo" in name for name in names))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_group_ends_with_destroy_process_group(tmp_path):
    """Gloo's threads that outlive it abort the process at its end, now and then."""
    process = ranks.FORKS.Process(target=begin_and_end, args=(f"file://{tmp_path}/store",))
    process.start()
    process.join(60)
    assert process.exitcode == 0
