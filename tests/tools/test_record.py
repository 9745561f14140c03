"""CI has no GPU: what one proved is in gpu_record/, and counts as long as what runs on a GPU is the same code."""

import json
import shutil
from xml.etree import ElementTree

import pytest

import code_digest
from code_digest import CSRC, RECORD, TRITON_REF

pytestmark = pytest.mark.cpu

FOLDERS = {file.parent.name for file in RECORD.parents[1].rglob("test_*.py")}
# Two GPUs run those of distributed/, and `make campaign` those of emulator/.
PARTS = FOLDERS - {"distributed", "emulator"}


@pytest.fixture(scope="module")
def code():
    return json.loads(RECORD.read_text())


def suites():
    """In the order in which they ran."""
    found = [ElementTree.parse(file).getroot()[0] for file in RECORD.parent.glob("*.xml")]
    return sorted(found, key=lambda suite: suite.get("timestamp"))


def test_record_has_no_failure():
    """The last outcome of a test counts."""
    outcomes = {}
    for suite in suites():
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


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not code_digest.nvcc(), reason="needs nvcc")
def test_two_builds_have_the_same_code():
    sources = [file for file in code_digest.sources() if file.suffix == ".cu"]
    assert code_digest.code_of(sources) == code_digest.code_of(sources)


# Changes that change a digest, and changes that do not.

@pytest.fixture
def csrc(tmp_path):
    return shutil.copytree(CSRC, tmp_path / "csrc")


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_tokens_leave_out_comments_and_folders(csrc):
    source = csrc / "sm80/flash_sm80.cu"
    before = code_digest.tokens(CSRC / "sm80/flash_sm80.cu")
    edit(csrc / "common/mask.cuh", "#pragma once", "// A comment.\n#pragma once\n\n/* one more */")
    (csrc / "common/mask.cuh").rename(csrc / "mods/mask.cuh")
    for file in (file for file in csrc.rglob("*") if file.is_file()):
        file.write_text(file.read_text().replace('"common/mask.cuh"', '"mods/mask.cuh"'))
    edit(csrc / "mods/mask.cuh", '#include "', '#include "../')
    assert code_digest.tokens(source, csrc) == before
    edit(csrc / "mods/mask.cuh", "return ", "return 1 + ")
    assert code_digest.tokens(source, csrc) != before


def test_functions_leave_out_comments_and_folders(tmp_path):
    folder = shutil.copytree(TRITON_REF, tmp_path / "triton_ref")
    (folder / "kernels").mkdir()
    (folder / "mask.py").rename(folder / "kernels/mask.py")
    edit(folder / "kernels/mask.py", '"""Which', '"""More. Which')
    assert code_digest.functions(folder) == code_digest.functions()
    edit(folder / "matmul.py", "import triton.language as tl", "import triton.language.extra as tl")
    assert code_digest.functions(folder) != code_digest.functions()
    edit(folder / "matmul.py", "import triton.language.extra as tl", "import triton.language as tl")
    edit(folder / "kernels/mask.py", "<", "<=")
    assert code_digest.functions(folder) != code_digest.functions()


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.skipif(not code_digest.nvcc(), reason="needs nvcc")
@pytest.mark.parametrize("name, struct, old, new, differs", [
    ("simt/append.cu", "AppendParams", "", "", []),
    ("simt/append.cu", "AppendParams", "+ 1", "+ 2", ["kernels"]),
    ("ops/ops.cpp", "Options", "", "", []),
    ("ops/ops.cpp", "Options", "if (has_sinks)", "if (has_scores)", ["host"]),
    ("ops/ops.cpp", "Options", "sm80::flash_backward(", "sm90::flash_backward(", ["host"]),
])
def test_code_leaves_out_names_and_lines(name, struct, old, new, differs, csrc):
    pytest.importorskip("elftools")
    for file in (file for file in csrc.rglob("*") if file.is_file()):
        file.write_text("// A comment.\n\n" + file.read_text().replace(struct, f"{struct}Renamed"))
    if old:
        edit(csrc / name, old, new)
    before, after = code_digest.code(CSRC / name), code_digest.code(csrc / name, csrc)
    assert [x for x in ("host", "kernels") if before[x] != after[x]] == differs
