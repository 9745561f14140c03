# make demo: build csrc, check and time every implementation on this machine; PROFILE=1: profiles too
# make test: run the tests that take seconds, on all cores (WORKERS=... processes): about 12 minutes on two cores
# make test-all: run all tests
# make gpu-record: run all tests that one GPU has a part in, and write tests/gpu_record/; some of them: PARTS="caches tools"
# make campaign: run long draws of shapes, every fault that the emulator can see, and what CI leaves out of long grids
# make vllm: run vLLM's own engine with our attention, on the CPU, in an environment of its own: about 8 minutes
# make wheel: build dist/*.whl for every torch from 2.11 on, with nvcc of CUDA 13: about an hour of one core
# make docs: write the tables, pictures and pages of README.md and docs/ from benchmarks/h200/*.json
# make report: print every recorded ratio of speeds beside its goal
# make clean: remove what make and the builds left here
#
# A Python that has torch is used as it is (PYTHON=... names another one); for one that has not, .venv is made.

PYTHON ?= python3
ifneq ($(shell $(PYTHON) -c 'import importlib.util as u; print(bool(u.find_spec("torch")))'),True)
VENV := .venv/stamp
PY := .venv/bin/python
else
PY := $(PYTHON)
endif

# Without a GPU, the Triton kernels run in Triton's interpreter.
TWIN = if ! $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
       then export TRITON_INTERPRET=1; fi;

help:
	@sed -n 's/^# make/make/p' Makefile

demo: NEEDS = filelock ninja rich
demo: packages
	@$(TWIN) $(PY) -m minimal_attn demo $(if $(PROFILE),--profile)

# Slow tests carry the marker `slow`. `make test` fails a test that has no time limit of its own after 60 s, and the whole
# run after 1800 s, which leaves room for a slower machine.
test: SELECT = -m "not slow" --timeout 60 --session-timeout 1800
campaign: SELECT = -m campaign

TESTS = tests
SELECT =
WORKERS ?= auto
test test-all campaign gpu-record: NEEDS = filelock hypothesis matplotlib ninja numpy pyelftools pytest \
                                           pytest-timeout pytest-xdist rich transformers
test test-all campaign: packages
	@$(PY) -c 'import minimal_attn; minimal_attn.load()'
	@$(TWIN) $(PY) -m pytest $(TESTS) -n $(WORKERS) --dist worksteal $(SELECT)

# One file of JUnit for each folder of tests, and for test_jit.py, which measures how long a build takes while nothing
# else runs. The last outcome of a test counts: PARTS="attention/test_lengths.py" runs some again. Then, where CI's
# compilers are: python tests/code_digest.py --write.
PARTS = tools/test_jit.py attention caches facade integrations tools
gpu-record: packages
	@status=0; for part in $(PARTS); do \
	    options="--ignore tests/tools/test_jit.py -n $(WORKERS) --dist worksteal"; \
	    [ $$part != tools/test_jit.py ] || options=; \
	    $(PY) -m pytest tests/$$part $$options -m "not cpu and not campaign" --durations 10 \
	        --junitxml tests/gpu_record/$$(echo $$part | tr / .).xml || status=1; \
	done; sed -i 's|$(CURDIR)/||g' tests/gpu_record/*.xml; exit $$status

# vLLM pins a torch and a transformers of its own. Its tests are no part of make test, which skips them.
vllm: .venv-vllm/stamp
	@.venv-vllm/bin/python -m pytest tests/engines

.venv-vllm/stamp: tests/engines/constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q --no-deps -r $<
	MINIMAL_ATTN_SOURCES_ONLY=1 .venv-vllm/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

docs report: NEEDS = filelock matplotlib ninja rich
docs: packages
	@$(PY) benchmarks/write_docs.py

report: packages
	@$(PY) benchmarks/report.py

wheel: NEEDS = auditwheel filelock ninja setuptools
wheel: packages
	@$(PY) tools/build_wheel.py

packages: $(VENV)
	@$(PY) -c 'import sys, importlib.metadata as m; \
	    lacks = [x for x in sys.argv[1:] if not any(m.distributions(name=x))]; \
	    lacks and sys.exit(f"{sys.executable} lacks packages: {sys.executable} -m pip install " + " ".join(lacks))' \
	    $(NEEDS)

.venv/stamp: tests/constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -r $<
	@touch $@

clean:
	rm -rf .venv .venv-vllm build dist *.egg-info .pytest_cache .hypothesis minimal_attn/_C*.so
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help demo test test-all gpu-record campaign vllm docs report wheel packages clean
