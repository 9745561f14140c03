"""CI has no GPU: what one proved is in gpu_record/, and counts as long as what runs on a GPU is the same code."""

import json
from xml.etree import ElementTree

import pytest

import code_digest
from code_digest import RECORD

pytestmark = pytest.mark.cpu

FOLDERS = {file.parent.name for file in RECORD.parents[1].rglob("test_*.py")}
# Two GPUs run those of distributed/, `make campaign` those of emulator/, and `make vllm` those of engines/, on a CPU.
PARTS = FOLDERS - {"distributed", "emulator", "engines"}


@pytest.fixture(scope="module")
def code():
    return json.loads(RECORD.read_text())


def test_record_has_no_failure():
    """The last outcome of a test counts."""
    outcomes = {}
    suites = [ElementTree.parse(file).getroot()[0] for file in RECORD.parent.glob("*.xml")]
    for suite in sorted(suites, key=lambda suite: suite.get("timestamp")):
        for case in suite.iter("testcase"):
            outcomes[case.get("classname"), case.get("name")] = {x.tag for x in case} - {"properties"}
    assert not [test for test, tags in outcomes.items() if tags & {"failure", "error"}]
    assert {name.split(".")[1] for (name, _), tags in outcomes.items() if "skipped" not in tags} >= PARTS


@pytest.mark.parametrize("part", sorted(file.stem for file in RECORD.parent.glob("*.xml")))
def test_record_is_of_this_library(code, part):
    """attention/ and caches/ run every kernel. The other parts test what surrounds them: they may have run with the
    library of the record before."""
    suite = ElementTree.parse(RECORD.parent / f"{part}.xml").getroot()[0]
    ran = {x.get("name"): x.get("value") for x in suite.find("properties")}
    now = ran["tokens"] in code["tokens"] and ran["kernels"] == code_digest.recorded_kernels(code)
    before = ran["tokens"] in code["before"]["tokens"] and ran["kernels"] == code["before"]["kernels"]
    assert now or (before and part not in ("attention", "caches")), "run `make gpu-record` on a GPU"


def test_record_is_of_these_functions(code):
    assert not code_digest.changed(code)[1], "run `make gpu-record` on a GPU"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_record_is_of_this_code(code):
    """Compiles what has changed by more than comments and names of files."""
    assert not code_digest.differences(code), "run `make gpu-record` on a GPU"
