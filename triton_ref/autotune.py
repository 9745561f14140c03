"""The fastest of a few launch configurations, measured once a GPU and kept on disk for the processes that follow.
Triton's own autotuner keeps nothing on disk for kernels with tensor descriptors and does not say that it is at work."""

import functools
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from minimal_attn._build import TRITON_REF, source_digest
from minimal_attn.toolkit.benchmark import benchmark_fn

ROUNDS = 3

_chosen = {}  # {(kernel, key, device): config}, of this process


def cache_dir() -> Path:
    """Where choices are kept: beside Triton's own cache (TRITON_CACHE_DIR), a JSON file a kernel and GPU."""
    return Path(triton.knobs.cache.dir) / "minimal_attn"


def fastest(kernel: str, key: tuple, configs: list[dict], run: Callable[[dict], object], device: torch.device) -> dict:
    """One of configs, the fastest for inputs of a kind, by run(config). One that is too large for the GPU is no choice;
    if all are, the error of one of them is raised.

    Args:
        key: what the choice, and the list of configs, depends on, as plain values. The choice of the first call serves
            all others of its key, in later processes as well.
        configs: the first is the choice where nothing can be measured: under graph capture, in Triton's interpreter, on
            a GPU that is not torch.cuda's, or with the environment variable MINIMAL_ATTN_AUTOTUNE=0.
    """
    if len(configs) == 1 or device.type != "cuda" or not is_on():
        return configs[0]
    chosen = _chosen.get((kernel, key, device))
    if chosen is None:
        file = _file(kernel, configs, device)
        index = _read(file).get(repr(key))
        if type(index) is not int or not 0 <= index < len(configs):
            if torch.cuda.is_current_stream_capturing():
                return configs[0]
            try:
                index = _measure(f"{kernel} {key}", configs, run)
            except torch.OutOfMemoryError:  # for what measuring takes: the call itself may well fit
                return configs[0]
            _write(file, {**_read(file), repr(key): index})
        chosen = _chosen[kernel, key, device] = configs[index]
    return chosen


def fastest_launch(kernel, key, configs, launch, arguments, autotune):
    """The Launch, made by launch(config), of the fastest of configs for these arguments, whose first is a tensor.
    Without autotune it is that of the first config."""
    if not autotune:
        return launch(configs[0])
    launch_of = functools.cache(lambda i: launch(configs[i]))  # compiled once, for all rounds
    chosen = fastest(kernel, key, configs, lambda config: launch_of(configs.index(config))(*arguments),
                     arguments[0].device)
    return launch_of(configs.index(chosen))


def is_on():
    """Whether anything is measured at all: not in Triton's interpreter, nor with MINIMAL_ATTN_AUTOTUNE=0."""
    return not triton.knobs.runtime.interpret and os.environ.get("MINIMAL_ATTN_AUTOTUNE") != "0"


def device_name(device):
    return torch.get_device_module(device).get_device_name(device)


_sources = functools.cache(lambda: source_digest(TRITON_REF))


def _file(kernel, configs, device):
    """The file of choices of a kernel, for this GPU, Triton, package and list of configs."""
    digest = hashlib.sha256(repr((triton.__version__, _sources(), configs)).encode()).hexdigest()[:12]
    return cache_dir() / f"{kernel}-{re.sub('[^A-Za-z0-9]+', '-', device_name(device))}-{digest}.json"


def _measure(what, configs, run):
    """The index of the fastest, with a line on stderr that says what takes so long."""
    times, fitting, error = {}, range(len(configs)), None
    print(f"minimal_attn: tuning {what}, {len(configs)} ways: once, then never again", file=sys.stderr)
    for _ in range(ROUNDS):  # by turns: the first of them meets a GPU that is still waking up
        for i in fitting:
            try:
                ms = benchmark_fn(run, configs[i], warmup=2, rep=10)[0]
            except (OutOfResources, PTXASError) as too_large:  # for this GPU
                error = too_large
            else:
                times[i] = min(ms, times.get(i, ms))
        fitting = list(times)
    if not times:
        raise error
    return min(times, key=lambda i: times[i] * (0.97 if i == 0 else 1))  # what is 3 % faster may be noise


def _read(file):
    try:
        stored = json.loads(file.read_text())
    except (OSError, ValueError):  # none yet, or one that was cut short
        stored = None
    return stored if isinstance(stored, dict) else {}


def _write(file, stored):
    """Writes the file as a whole or not at all. Of two processes that tune at once, one may lose its choice."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        part.write_text(json.dumps(stored, indent=1))
        part.replace(file)
    except OSError as error:
        print(f"minimal_attn: the choice is not kept for later processes: {error}", file=sys.stderr)
