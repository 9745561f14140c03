# make demo: build csrc, then check and profile every implementation on this machine
# make test: run the tests
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

demo: $(VENV)
	@$(PY) -c 'import minimal_attn; minimal_attn.load()'
	@$(TWIN) $(PY) bench.py

test: $(VENV)
	@$(TWIN) $(PY) -m pytest tests

.venv/stamp: tests/constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -r $<
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis minimal_attn/_C*.so
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help demo test clean
