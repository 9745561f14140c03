"""The examples: they run, and train alike with every backend."""

import json

import pytest
import torch

from conftest import HAS_GPU, IMPLEMENTATIONS
from examples import train_tiny_gpt
from minimal_attn.interface import BACKENDS

SMALL = "--layers 2 --embed-dim 32 --heads 2 --seqlen 24 --batch-size 2 --steps 20 --dtype float32".split()
DEVICE = "cuda" if HAS_GPU else "cpu"
TRAINABLE = [name for name, device in IMPLEMENTATIONS.values() if device == DEVICE and BACKENDS[name].has_backward]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("training")
    train_tiny_gpt.main(["--backend", *dict.fromkeys(TRAINABLE), "reference", *SMALL, "--out", str(directory)])
    return directory


def test_every_backend_trains_alike(trained):
    result = json.loads((trained / "training.json").read_text())
    assert set(result["losses"]) == set(result["tokens_per_s"]) == {*TRAINABLE, "reference"}
    expected = torch.tensor(result["losses"]["reference"])
    assert len(expected) == 20 and expected[-5:].mean() < expected[:5].mean() - 0.1
    for losses in result["losses"].values():
        torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-5, atol=0)
    assert all(speed > 0 for speed in result["tokens_per_s"].values())
    assert result["meta"]["steps"] == 20 and result["meta"]["dtype"] == "float32"


def test_the_curves_are_drawn(trained):
    assert (trained / "training.png").read_bytes().startswith(b"\x89PNG")


def test_dropout_drops_the_same_with_every_backend(tmp_path):
    def losses(*options):
        train_tiny_gpt.main(["--backend", "torch", "reference", *SMALL, "--out", str(tmp_path), *options])
        return torch.tensor(list(json.loads((tmp_path / "training.json").read_text())["losses"].values()))

    by_torch, by_reference = dropped = losses("--dropout", "0.3")
    torch.testing.assert_close(by_torch, by_reference, rtol=1e-5, atol=0)
    assert not dropped.allclose(losses(), rtol=1e-4)


@pytest.mark.parametrize("file", sorted(train_tiny_gpt.ROOT.glob("benchmarks/*/training.json")), ids=str)
def test_recorded_curves_lie_on_each_other(file):
    """In bf16, where rounding differs from the first step on: within 2 % where the curves end."""
    result = json.loads(file.read_text())
    ends = torch.tensor(list(result["losses"].values()))[:, -30:].mean(1)
    assert set(result["losses"]) >= {"triton", "torch"} and result["meta"]["device"].startswith("NVIDIA")
    torch.testing.assert_close(ends, ends.mean().expand(len(ends)), rtol=0.02, atol=0)
    assert ends.max() < 3 and all(speed > 0 for speed in result["tokens_per_s"].values())


def test_bad_options():
    for options in (["--steps", "1"], ["--backend", "cudnn"]):
        with pytest.raises(SystemExit, match="2"):
            train_tiny_gpt.main(options)
