"""The fastest of a few launch configurations, measured once a GPU and kept on disk for the processes that follow.

Triton's own autotuner keeps nothing on disk for kernels with tensor descriptors and does not say that it is at work.
Read next: attention.py and matmul.py, which tune.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton.testing import do_bench

_chosen = {}  # {(kernel, key, device): config}, of this process


def cache_dir() -> Path:
    """Where choices are kept: beside Triton's own cache (TRITON_CACHE_DIR), a JSON file a kernel and GPU."""
    return Path(triton.knobs.cache.dir) / "minimal_attn"


def fastest(kernel: str, key: tuple, configs: list[dict], run: Callable[[dict], object], device: torch.device) -> dict:
    """The fastest of configs for inputs of a kind.

    Args:
        kernel: its name.
        key: what the choice, and the list of configs, depends on, as plain values. The choice of the first call serves
            all others of its key, in later processes as well.
        configs: what to choose from; the first is the choice where nothing can be measured: under graph capture, in
            Triton's interpreter, or with the environment variable MINIMAL_ATTN_AUTOTUNE=0.
        run: launches a config; one that raises is no choice.
        device: the GPU.

    Returns:
        One of configs.

    Raises:
        What the first config raises, if none runs.
    """
    if len(configs) == 1 or triton.knobs.runtime.interpret or os.environ.get("MINIMAL_ATTN_AUTOTUNE") == "0":
        return configs[0]
    chosen = _chosen.get((kernel, key, device))
    if chosen is None:
        file = _file(kernel, configs, device)
        stored = _read(file)
        index = stored.get(repr(key))
        if index is None:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return configs[0]
            index = _measure(f"{kernel} {key}", configs, run)
            _write(file, {**_read(file), repr(key): index})
        chosen = _chosen[kernel, key, device] = configs[index]
    return chosen


def device_name(device):
    return torch.get_device_module(device).get_device_name(device)


def _file(kernel, configs, device):
    """Another GPU, another Triton or another list of configs is another file."""
    digest = hashlib.sha256(repr((triton.__version__, configs)).encode()).hexdigest()[:12]
    return cache_dir() / f"{kernel}-{re.sub('[^A-Za-z0-9]+', '-', device_name(device))}-{digest}.json"


def _measure(what, configs, run):
    """The index of the fastest, with a line on stderr that says what takes so long."""
    times, first_error = {}, None
    for i, config in enumerate(configs):
        _progress(f"minimal_attn: tuning {what}: {i + 1} of {len(configs)}")
        try:
            times[i] = do_bench(lambda: run(config), warmup=10, rep=40, return_mode="median")
        except Exception as error:  # out of shared memory or registers
            first_error = first_error or error
    _progress("")
    if not times:
        raise first_error
    return min(times, key=lambda i: times[i] * (0.97 if i == 0 else 1))  # what is 3 % faster may be noise


def _progress(line):
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr)


def _read(file):
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):  # none yet, or one that was cut short
        return {}


def _write(file, stored):
    """Whole or not at all. Two processes that tune at once may lose a choice, which is then made again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(stored, indent=1))
        part.replace(file)
    except OSError as error:
        print(f"minimal_attn: the choice is not kept for later processes: {error}", file=sys.stderr)
