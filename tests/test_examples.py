"""The examples: they run, and train alike with every backend."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch

from conftest import HAS_GPU, IMPLEMENTATIONS
from examples import train_tiny_gpt
from minimal_attn._build import source_digest
from minimal_attn.interface import BACKENDS

SMALL = "--layers 2 --embed-dim 32 --heads 2 --seqlen 24 --batch-size 2 --steps 20 --dtype float32".split()
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
    assert len(expected) == 20 and expected[-5:].mean() < expected[:5].mean() - 0.1
    for losses in result["losses"].values():
        torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-5, atol=0)
    assert all(speed > 0 for speed in result["tokens_per_s"].values())
    assert result["meta"]["steps"] == 20 and result["meta"]["dtype"] == "float32"


def test_train_names_files_written(tmp_path, capsys):
    train_tiny_gpt.main(["--backend", "reference", *SMALL, "--steps", "2", "--out", str(tmp_path / "new")])
    assert capsys.readouterr().out.endswith(f"wrote {tmp_path}/new/training.json, {tmp_path}/new/training.png\n")


@pytest.mark.slow
def test_train_draws_curves(trained):
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
    train_tiny_gpt.main(["--backend", "torch"])
    assert trained[-1] == "torch" and not capsys.readouterr().err
    trained.clear()
    for asked in (["triton"], ["torch", "triton"], ["all", "triton"]):
        with pytest.raises(SystemExit, match="2"):
            train_tiny_gpt.main(["--backend", *asked])
        assert "argument --backend: triton is not available: there is no triton\n" in capsys.readouterr().err
    assert not trained


def losses_in(directory):
    return torch.tensor(list(json.loads((directory / "training.json").read_text())["losses"].values()))


@pytest.mark.slow
def test_train_dropout_same_with_every_backend(trained, tmp_path):
    train_tiny_gpt.main([*EVERY_BACKEND, *SMALL, "--steps", "6", "--out", str(tmp_path), "--dropout", "0.3"])
    dropped = losses_in(tmp_path)
    torch.testing.assert_close(dropped, dropped[-1:].expand_as(dropped), rtol=1e-5, atol=0)
    assert not dropped[:, 0].allclose(losses_in(trained)[:, 0], rtol=1e-5)  # of the same weights


@pytest.mark.parametrize("file", sorted(train_tiny_gpt.ROOT.glob("benchmarks/*/training.json")), ids=str)
def test_train_recorded_curves(file):
    """In bf16, where rounding differs from the first step on: at every step within half a percent of torch."""
    result = json.loads(file.read_text())
    assert set(result["losses"]) == set(result["tokens_per_s"]) == {"cuda", "triton", "torch"}
    assert result["meta"]["device"].startswith("NVIDIA") and result["meta"]["dtype"] == "bfloat16"
    losses = torch.tensor(list(result["losses"].values()))
    assert losses.shape == (3, 300) and losses[:, -30:].mean() < 3
    torch.testing.assert_close(losses, losses[-1:].expand_as(losses), rtol=0.005, atol=0)
    if result["meta"]["source_digest"] == source_digest():
        assert result["meta"]["text_digest"] == hashlib.sha256(train_tiny_gpt.text()).hexdigest()


def test_train_bad_options():
    for options in (["--steps", "1"], ["--seqlen", "0"], ["--seqlen", "9999999"], ["--layers", "-1"],
                    ["--backend", "cudnn"], ["--device", "toaster"], ["--dropout", "2"], ["--dropout", "nan"],
                    ["--dropout", "x"], *([] if HAS_GPU else [["--device", "cuda"]])):
        with pytest.raises(SystemExit, match="2"):
            train_tiny_gpt.main(options)


def ended(*options, **env):
    """The process train_tiny_gpt.py with options, at its end."""
    return subprocess.run([sys.executable, "-m", "examples.train_tiny_gpt", "--backend", "reference", *options],
                          cwd=train_tiny_gpt.ROOT, env=os.environ | env, capture_output=True, text=True)


def test_train_bad_option_one_line():
    run = ended("--heads", "3", "--embed-dim", "32")
    assert run.returncode == 1 and run.stderr.startswith("train_tiny_gpt: ") and "num_heads" in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("package, options", [("rich", []), ("matplotlib", ["--out", "nowhere"])])
def test_train_missing_package_one_line(package, options, tmp_path):
    """Before the training."""
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}', name='{package}')")
    run = ended(*options, PYTHONPATH=str(tmp_path))
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr == (f"train_tiny_gpt: this needs {package}, of the extra \"bench\": pip install "
                          "'minimal_attn[bench]'\n")
