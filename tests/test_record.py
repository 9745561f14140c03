"""CI has no GPU: what one proved is in gpu_record.json, and counts only for the sources that it ran."""

import json
import warnings
from pathlib import Path

import pytest

from minimal_attn._build import source_digest

RECORD = Path(__file__).parent / "gpu_record.json"
KEYS = {"device", "driver", "torch", "triton", "cuda", "passed", "failed", "skipped", "duration_s", "source_digest"}


@pytest.fixture
def record(request):
    if request.config.getoption("--gpu-record"):
        pytest.skip("this run writes the record anew")
    return json.loads(RECORD.read_text())


def check_sources(record):
    if record["source_digest"] == source_digest():
        return
    stale = f"{RECORD.name} was made from other sources of csrc/ and triton_ref/ than these"
    assert record.get("stale_because") and record.get("stale_for") == source_digest(), stale
    warnings.warn(f"{stale}, and no GPU could be reached: {record['stale_because']}")


def test_the_gpu_run_was_clean(record):
    assert KEYS <= record.keys()
    assert record["failed"] == 0 and record["passed"] > 0
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        assert "SUMMARY: 0 " in record["evidence"][f"compute_sanitizer {tool}"]


def test_the_gpu_run_was_of_these_sources(record):
    check_sources(record)


def test_a_record_of_other_sources_fails_unless_it_says_why():
    with pytest.raises(AssertionError, match="other sources"):
        check_sources({"source_digest": "of others"})
    with pytest.raises(AssertionError, match="other sources"):  # the excuse is for some sources alone
        check_sources({"source_digest": "of others", "stale_because": "moved", "stale_for": "of others still"})
    with pytest.warns(UserWarning, match="no GPU could be reached: moved"):
        check_sources({"source_digest": "of others", "stale_because": "moved", "stale_for": source_digest()})
