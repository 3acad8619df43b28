# make demo    train, decode, score and look: about 10 minutes on two cores    (SMOKE=1: a few updates of everything)
# make test    the tests
# make lint    ruff
# make bench   speed, against stock fairseq
# make install the environment alone
# Each makes .venv if there is none. PYTHON names the interpreter to make it with: 3.11 or 3.12.

VENV := .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint install bench
install: $(INSTALLED)

# The third-party build of fairseq is checked by its SHA-256 before anything else may pull it in.
$(INSTALLED): setup.py requirements/fairseq.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v in ((3, 11), (3, 12)) or sys.exit(f"error: $(PYTHON) is Python {v[0]}.{v[1]}; fairseq has builds for 3.11 and 3.12: make PYTHON=python3.11")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --require-hashes --no-deps -r requirements/fairseq.txt
	$(VENV)/bin/pip install --quiet -e '.[demo,dev]'
	$(VENV)/bin/python -c 'from speech_mt.compat import check_environment; check_environment()'
	touch $@

demo: $(INSTALLED)
	$(VENV)/bin/python examples/numbers/demo.py $(if $(SMOKE),--smoke --out runs/smoke)

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest -q tests

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .

# Ratios of interleaved runs on a machine with nothing else to do; about 25 minutes on two cores.
bench: $(INSTALLED)
	$(VENV)/bin/python benchmarks/aten_calls.py
	$(VENV)/bin/python benchmarks/training_step.py
	$(VENV)/bin/python benchmarks/training_step.py --depths --contestants stock ours "ours + sigmaReparam"
	$(VENV)/bin/python benchmarks/decoding.py
	$(VENV)/bin/python benchmarks/bench_entropy.py
	$(VENV)/bin/python benchmarks/oversmoothing_cost.py

# study-stability, study-oversmoothing, study-digits, study-robustness: the study, and its report.
# BUDGET=60: start no run after 60 minutes; the same command goes on from there.
study-%: $(INSTALLED)
	$(VENV)/bin/python $(wildcard examples/$*/study.py examples/$*/$*.py) $(if $(BUDGET),--budget $(BUDGET))
	$(VENV)/bin/python $(wildcard examples/$*/study.py examples/$*/$*.py) --report
