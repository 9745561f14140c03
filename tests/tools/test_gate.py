"""`make test` leaves out tests that are slow, but no implementation, no kernel and no test file. Nothing but
`make campaign` runs campaign.py."""

import os
from pathlib import Path

import pytest

import campaign
from cases import Case, serves
from conftest import FORWARD_ONLY, IMPLEMENTATIONS, KERNEL_NEEDS, WITHOUT_DROPOUT
from minimal_attn.attention import BACKENDS
from test_emulator import KERNELS


@pytest.fixture
def gate(request):
    """{test file: its tests} of `make test`."""
    if "MINIMAL_ATTN_GATE" not in os.environ:
        pytest.skip("this run is not that of `make test`")
    files = {}
    for item in request.session.items:
        assert not item.get_closest_marker("slow")
        files.setdefault(item.path.name, []).append(item)
    return files


def values(items, name):
    """The values of a parameter."""
    return {item.callspec.params.get(name) for item in items if hasattr(item, "callspec")}


def test_gate_has_every_file(gate):
    files = {file.name for file in Path(__file__).parents[1].rglob("test_*.py")}
    assert set(gate) == files - {"test_transformers_sweep.py"}  # which takes minutes


def test_gate_has_every_implementation(gate):
    """Kernels of csrc in the emulator; Gluon's, which no interpreter runs, by the compiler."""
    assert set(IMPLEMENTATIONS) <= values(gate["test_forward.py"], "impl")
    assert set(IMPLEMENTATIONS) - set(FORWARD_ONLY) <= values(gate["test_backward.py"], "impl")
    assert set(IMPLEMENTATIONS) - set(WITHOUT_DROPOUT) <= values(gate["test_dropout.py"], "impl")
    assert set(BACKENDS) <= values(gate["test_mha.py"], "backend")
    assert set(KERNELS) <= values(gate["test_emulator.py"], "kernel")
    assert "test_hopper_twin_compiles" in {item.originalname for item in gate["test_compile.py"]}


@pytest.mark.parametrize("name", ["cuda:host", *KERNEL_NEEDS, "triton"])
def test_campaign_draws_what_is_served(name):
    dtypes = campaign.dtypes_served(name)
    assert dtypes and all(serves(name, Case("any", D=D), dtype) for D in campaign.head_dims_of(name) for dtype in dtypes)
