# make demo: build csrc, check every implementation on this machine and, on a GPU, time them; PROFILE=1: profiles too
# make test: run the tests, on all cores (WORKERS=... processes)
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

# With no GPU the Triton twin runs in Triton's interpreter.
TWIN = if ! $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
       then export TRITON_INTERPRET=1; fi;

help:
	@sed -n 's/^# make/make/p' Makefile

demo: NEEDS = filelock ninja rich
demo: packages
	@$(TWIN) $(PY) -m minimal_attn demo $(if $(PROFILE),--profile)

test: NEEDS = filelock hypothesis matplotlib ninja numpy pytest pytest-timeout pytest-xdist rich
test: WORKERS ?= auto
test: packages
	@$(TWIN) $(PY) -m pytest tests -n $(WORKERS) --dist worksteal

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
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis minimal_attn/_C*.so
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help demo test packages clean
