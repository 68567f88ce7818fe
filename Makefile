# `make` alone lists the targets. A fresh clone needs python3 (3.11 or newer), make and a package registry, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# Programs for whoever changes gradbus: they lie with the tests, and no wheel has them.
TOOL := PYTHONPATH="$(CURDIR)/tests/tools" $(PY) -P -m
STAMP := $(VENV)/.set-up
CODE := actors codecs experiments models runtime
ID ?= 0
ARGS ?=

# LOCKED=1, which `.ci/run` says and a release should: nothing is installed that requirements.lock has no hash of. Without it a set-up
# takes the same versions, and whatever files the registry has for them.
IS_LOCKED := $(filter-out 0,$(LOCKED))
PINS := $(if $(IS_LOCKED),requirements.lock,constraints.txt)

# Containers often forbid it, and then every process compiles all of torch at its start, for 2 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.SUFFIXES:
.PHONY: help setup links demo run-controller run-client run-ddp run-aggregator run-parameter-server report simulate doctor test test-again test-portable test-slice test-python test-oldest test-debian test-gpu setup-oldest nightly check lint docs format typecheck wheel smoke \
	fuzz setup-fuzz setup-integrations setup-flower setup-flower-simulation test-flower bench bench-quick bench-renew bench-scale bench-federated bench-ddp bench-collectives bench-codecs bench-parameter-server bench-privacy bench-sealing bench-profile bench-pauses \
	bench-aggregation bench-attacks bench-compression bench-ladder bench-local bench-loop bench-elastic bench-flower conformance figures faults soak simulate-faults lock clean distclean

# uv installs in seconds what takes pip minutes. It is taken from PATH, else fetched into .venv; NO_UV=1 (or UV=) keeps to pip.
FETCH_UV :=
ifneq ($(NO_UV),)
override UV :=
else ifeq ($(origin UV),undefined)
UV := $(shell uv --version >/dev/null 2>&1 && echo uv || ls $(BIN)/uv 2>/dev/null)
FETCH_UV := $(if $(UV)$(IS_LOCKED),,yes)
endif

# uv does not read pip's configuration, and trusts the system's certificates only when it is told where they are.
CERTS := /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/ca-bundle.pem /etc/ssl/cert.pem
UV_ENV := UV_HTTP_TIMEOUT=$${UV_HTTP_TIMEOUT:-300}
ifeq ($(SSL_CERT_FILE),)
UV_ENV += $(addprefix SSL_CERT_FILE=,$(firstword $(wildcard $(CERTS))))
endif

NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'

# PyTorch without 4.5 GB of CUDA where there is no NVIDIA driver, if PyTorch's own index answers within 3 s; else the registry's build.
# TORCH=cpu, cuda or default (the registry's) decides otherwise. Another choice than before sets up again: its file is newer than the stamp.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ifneq ($(filter-out cpu cuda default auto,$(TORCH)),)
$(error TORCH is cpu, cuda, default, or auto, got '$(TORCH)')
endif
ifneq ($(and $(IS_LOCKED),$(TORCH)),)
$(error LOCKED=1 takes the registry's build of PyTorch, whose hash is known. Leave TORCH=$(TORCH) out)
endif
TORCH_CHOICE := $(addprefix $(VENV)/.torch-,$(if $(IS_LOCKED),,$(filter cpu cuda default auto,$(TORCH))))

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do printf '  make %-17s %s\n' "$$name" "$$text"; done
	@echo "  Set ARGS='...' to pass flags on, as in: make demo ARGS='--rounds 3'"

setup: $(STAMP) links  ## make .venv and install everything into it, again when the lists of packages have changed: TORCH=cpu or cuda chooses the build of PyTorch, LOCKED=1 takes known files alone

# A failing step ends in one line that says what to do. uv that cannot reach its registry leaves the work to pip and pip's configuration.
$(STAMP): pyproject.toml constraints.txt $(if $(IS_LOCKED),requirements.lock) $(TORCH_CHOICE)
	@$(PYTHON) $(NEW_ENOUGH) 2>/dev/null || { \
		echo "make setup: needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)." \
			"Install one, then: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PY) $(NEW_ENOUGH) 2>/dev/null || rm -rf $(VENV)
	@if [ -n "$(UV)" ]; then $(UV_ENV) $(UV) venv -q --allow-existing --python "$$(command -v $(PYTHON))" $(VENV); \
	elif [ ! -x $(PY) ]; then $(PYTHON) -m venv $(VENV); fi || { \
		echo "make setup: $(VENV) could not be made. Install Python's venv module (Debian: python3-venv), then: make setup" >&2; exit 1; }
	@uv='$(UV)'; \
	if [ -n "$(FETCH_UV)" ]; then \
		echo "fetching uv into $(VENV)"; \
		if $(PY) -m pip install -q --disable-pip-version-check uv && $(BIN)/uv --version; then uv=$(BIN)/uv; \
		else echo "uv could not be fetched: going on with pip, which takes minutes"; fi; \
	fi; \
	$(if $(IS_LOCKED),,$(UV_ENV) $(PY) -I tests/tools/torch_build.py --index '$(TORCH_INDEX)' --uv "$$uv" $(TORCH) || exit 1;) \
	if [ -n "$$uv" ]; then \
		$(if $(IS_LOCKED),$(UV_ENV) $$uv pip install --python $(PY) --require-hashes -r requirements.lock && \
			$(UV_ENV) $$uv pip install --python $(PY) --no-deps --no-build-isolation -e .,\
		$(UV_ENV) $$uv pip install --python $(PY) -c constraints.txt -e '.[dev]') && exit 0; \
		echo "uv could not install the packages: going on with pip, which takes minutes"; \
	fi; \
	$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null; \
	$(if $(IS_LOCKED),{ $(PY) -m pip install --disable-pip-version-check --require-hashes -r requirements.lock && \
		$(PY) -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .; },\
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]') || { \
		echo "make setup: the packages could not be installed. Check that the package registry can be reached" \
			"(PIP_INDEX_URL and UV_DEFAULT_INDEX name another one) and that 6 GB of disk are free, then: make setup" >&2; exit 1; }
	@touch $(TORCH_CHOICE) $@
	@echo "ready: $(BIN)/gradbus --help, or make demo"

ifneq ($(TORCH_CHOICE),)
$(TORCH_CHOICE):
	@mkdir -p $(VENV) && rm -f $(VENV)/.torch-* && touch $@
endif

demo: $(STAMP)  ## a controller and its clients train one model on this machine, over DDS
	@$(BIN)/gradbus demo $(ARGS)

run-controller: CONFIG ?= experiments/configs/controller.conf.json
run-controller: $(STAMP)  ## start one controller: make run-controller CONFIG=my.json
	@$(BIN)/gradbus controller $(CONFIG) $(ARGS)

run-client: CONFIG ?= experiments/configs/client.conf.json
run-client: $(STAMP)  ## start one client: make run-client ID=0 CONFIG=my.json
	@$(BIN)/gradbus client $(CONFIG) --id $(ID) $(ARGS)

# Without RANK all ranks run on this machine; with it, this is one of them. Both may come from the environment. Without WORLD: 2, or
# what a CONFIG of one's own says.
run-ddp: DDP := experiments/configs/ddp.conf.json
run-ddp: CONFIG ?= $(DDP)
run-ddp: WORLD ?= $(or $(WORLD_SIZE),$(if $(filter $(DDP),$(CONFIG)),2))
run-ddp: BOUNDS = $(if $(findstring :,$(ELASTIC)),$(ELASTIC),1:$(or $(WORLD),2))
run-ddp: $(STAMP)  ## data-parallel training: all ranks with WORLD=2, or one process per rank: make run-ddp WORLD=2 RANK=0; ranks come and go: ELASTIC=1
	@$(BIN)/gradbus $(if $(RANK),worker --rank $(RANK) $(WORLD:%=--world %),run $(WORLD:%=-n %) $(if $(ELASTIC),--elastic $(BOUNDS)) --) $(CONFIG) $(ARGS)

run-aggregator: CONFIG ?= experiments/configs/aggregator.conf.json
run-aggregator: $(STAMP)  ## add the gradients of data-parallel jobs, as one of several with NODE=0: then make run-ddp CONFIG=experiments/configs/ddp-aggregator.conf.json
	@$(BIN)/gradbus aggregator $(CONFIG) $(if $(NODE),--set aggregator.node=$(NODE)) $(ARGS)

run-parameter-server: CONFIG ?= experiments/configs/parameter-server.conf.json
run-parameter-server: $(STAMP)  ## hold a part of the weights: make run-parameter-server INDEX=0; the workers: make run-ddp RANK=0 with that CONFIG
	@$(BIN)/gradbus parameter-server $(CONFIG) $(if $(INDEX),--index $(INDEX)) $(ARGS)

report: $(STAMP)  ## one HTML file of what a run has left: make report RUN=runs/...
	@test -n "$(RUN)$(ARGS)" || { echo "make report: which run? make report RUN=runs/<job>-<time>" >&2; exit 2; }
	@$(BIN)/gradbus report $(RUN) $(ARGS)

simulate: CONFIG ?= experiments/configs/simulate.conf.json
simulate: $(STAMP)  ## steps of training on a model of a network: make simulate CONFIG=my.json
	@$(BIN)/gradbus simulate $(CONFIG) $(ARGS)

doctor: $(STAMP)  ## check this machine: versions, network, DDS, data
	@$(BIN)/gradbus doctor $(ARGS)

# `pytest`, not `python -m pytest`: the latter puts the root, and with it a second copy of every package, on sys.path.
# Most tests wait for processes rather than compute: so three workers, each with whole files, the third with quick ones (tests/support/spread.py). Those marked `alone` have the
# machine.
# They get files in the order of tests/conftest.py, not those with the most tests first, which are quick ones.
test test-portable check faults: WORKERS ?= 3
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(STAMP)  ## run every test, with WORKERS=3
	@mkdir -p build && rm -f .pytest_cache/v/cache/lastfailed build/tests-ended
	$(BIN)/pytest $(SPREAD) $(ARGS); code=$$?; echo $$code > build/tests-ended; exit $$code

# A test of deadlines may fail where other work has the machine for seconds. It passes by itself, or it has failed; more than three are no accident,
# nor is a run that did not come to its end, or in which a worker has crashed (pytest's exit code 1: tests have failed, and nothing else).
test-again: $(STAMP)  ## after `make test`: the tests that failed, three at most, by themselves
	@test "$$(cat build/tests-ended 2>/dev/null)" = 1 || { echo "make test-again: make test has not come to its end" >&2; exit 1; }
	@$(BIN)/python -c 'import json, sys; failed = list(json.load(open(".pytest_cache/v/cache/lastfailed"))); \
		print(*(f"once more, by itself: {name}" for name in failed), sep="\n"); sys.exit(not 0 < len(failed) <= 3)'
	$(BIN)/pytest --last-failed --last-failed-no-failures none

# What shows that an environment works: both paradigms, then the parts that everything else stands on.
SLICE ?= tests/runtime/wire tests/codecs tests/runtime/bus tests/runtime/collectives tests/actors/test_flows.py tests/actors/test_flows_in_process.py \
	tests/test_standard_bases.py
test-slice: $(STAMP)  ## demo, run-ddp and the tests of what everything else stands on: make test-slice SLICE="tests/codecs"
	$(BIN)/gradbus demo --rounds 2 --data glyphs --no-live
	$(BIN)/gradbus run -n 2 -- experiments/configs/ddp.conf.json --set task.data=glyphs --set parallel.epochs=1 --no-live
	@$(MAKE) --no-print-directory test ARGS='$(SLICE)' || $(MAKE) --no-print-directory test-again

# Both ends of what pyproject.toml allows. Each in an environment of its own, of 6 GB.
DISK_GB := 20
HAS_DISK = test "$$(df -Pk . | awk 'NR == 2 {print $$4}')" -ge $$(($(DISK_GB) * 1024 * 1024))
NO_DISK = echo "NOT RUN: $@, less than $(DISK_GB) GB of disk are free"
# A number, such as 3.13, is looked for on PATH, then among pyenv's versions. A program that does not start is none: pyenv puts such ones on PATH.
find_python = $(if $(filter 3.%,$(1)),$(shell for python in python$(1) $$(ls -d "$$HOME"/.pyenv/versions/$(1).*/bin/python$(1) 2>/dev/null | sort -V); do \
	"$$python" -c '' 2>/dev/null && command -v "$$python" && break; done),$(1))

test-python: FOUND = $(call find_python,$(PYTHON))
test-python:  ## a slice of the tests, demo and run-ddp under another Python: make test-python PYTHON=3.13
	@if ! $(HAS_DISK); then $(NO_DISK); \
	elif [ -z "$(FOUND)" ]; then echo "NOT RUN: $@ $(PYTHON), there is no python$(PYTHON) on PATH, nor among pyenv's versions"; \
	else $(MAKE) --no-print-directory setup test-slice PYTHON=$(FOUND) VENV=.venv-python-$(notdir $(PYTHON)); fi

# The lowest versions that pyproject.toml names, which only uv can choose. What these need in turn is the newest.
OLDEST := .venv-oldest
OLDEST_STAMP := $(OLDEST)/.set-up-oldest
setup-oldest: $(OLDEST_STAMP)  ## the environment of make test-oldest
$(OLDEST_STAMP): FOUND = $(call find_python,3.11)
$(OLDEST_STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(OLDEST)/bin/python ]; then "$(FOUND)" -m venv $(OLDEST); fi
	@uv="$(or $(UV_NOW),$(OLDEST)/bin/uv)"; \
	if ! $$uv --version >/dev/null 2>&1; then $(OLDEST)/bin/python -m pip install -q --disable-pip-version-check uv; fi && \
	$(UV_ENV) $$uv pip install -q --python $(OLDEST)/bin/python --resolution lowest-direct -e '.[dev]' || { \
		echo "make $@: the packages could not be installed. Check that the package registry can be reached" >&2; exit 1; }
	@touch $@ $(OLDEST)/.set-up

test-oldest:  ## the slice of make test-python with the lowest versions that pyproject.toml allows, under Python 3.11
	@if ! $(HAS_DISK); then $(NO_DISK); \
	elif [ -z "$(call find_python,3.11)" ]; then echo "NOT RUN: $@, there is no python3.11 on PATH, nor among pyenv's versions"; \
	else $(MAKE) --no-print-directory setup-oldest && $(MAKE) --no-print-directory test-slice VENV=$(OLDEST) LOCKED= TORCH=; fi

DEBIAN ?= trixie
test-debian:  ## the slice and what depends on libc, in a root of Debian: make test-debian DEBIAN=trixie
	@bash tests/tools/debian.sh $(DEBIAN) make setup test-slice LOCKED=1 SLICE='$(SLICE) tests/runtime/test_keep_memory.py tests/runtime/shm'

test-gpu: $(STAMP)  ## the tests that need a CUDA device
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(BIN)/pytest -m gpu $(ARGS); \
	else echo "NOT RUN: $@, torch sees no CUDA device"; fi

# Results go into docs/nightly.md.
nightly: $(STAMP)  ## what takes longer than .ci/run, part by part: make nightly PART=debian-trixie; docs/nightly.md has the parts
	@$(TOOL) nightly $(PART) $(ARGS)

# Not those that need a process's end noticed sooner than its lease ends.
test-portable: $(STAMP)  ## both paradigms and torch.distributed without what only Linux or x86-64 has
	GRADBUS_PORTABLE=1 $(BIN)/pytest $(SPREAD) -k "not killed and not dies and not dead" $(ARGS) \
		tests/actors/test_flows.py tests/actors/test_flows_in_process.py tests/actors/data_parallel \
		tests/torch_backend/test_ddp.py tests/torch_backend/test_collectives.py tests/torch_backend/test_wrappers.py \
		tests/runtime/collectives/test_group_processes.py tests/experiments/test_portable.py

faults: $(STAMP)  ## the tests in which something fails on purpose
	$(BIN)/pytest $(SPREAD) -m faults $(ARGS)

# Processes die, stand still, are cut off from each other, and lose what they send; then what they have left is checked.
soak: MINUTES ?= 30
soak: $(STAMP)  ## controller, clients and ranks for MINUTES=30, something breaks every few seconds, and the history is checked
	@$(TOOL) soak --minutes $(MINUTES) $(ARGS)

# A seed that fails prints the command that runs it again. Without a git tree that decides the first seed, it is 0.
simulate-faults: SEEDS ?= 300
simulate-faults: FLAVOUR ?= any
simulate-faults: $(STAMP)  ## the shipped actors in virtual time with the faults of SEEDS=300 seeds; one of them again: SEED=7 FLAVOUR=fp32, with fewer faults: SHRINK=1; with a fault in the code, until a seed finds it: PLANT=all
	@PYTHONPATH="$(CURDIR)/tests/simulation" $(PY) -P -m fault_simulation --flavour $(FLAVOUR) $(if $(SIZE),--size $(SIZE)) $(if $(PLANT),--plant "$(PLANT)") \
		$(if $(SEED),--seed $(SEED) $(if $(KEEP),--keep $(KEEP)) $(if $(filter-out 0,$(SHRINK)),--shrink),--seeds $(SEEDS)) $(ARGS)

check: lint typecheck  ## formatting, lint, strict types and the fast tests
	$(BIN)/pytest $(SPREAD) -m "not slow" $(ARGS)
	@$(TOOL) nightly --stale

lint: $(STAMP)  ## formatting and lint alone
	$(BIN)/ruff format --check
	$(BIN)/ruff check

docs: $(STAMP)  ## write the pages that are made from the code anew: settings, what works together, public names
	@$(BIN)/gradbus config reference --markdown >build/settings.md && mv build/settings.md docs/settings.md
	@$(BIN)/gradbus matrix --markdown >build/matrix.md && mv build/matrix.md docs/matrix.md
	@$(TOOL) public_names --write

format: $(STAMP)  ## format the code, mend what lint can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# Tools cannot follow the editable install's mapping, and from the root they would read ./codecs as the standard library's module. So
# they see the packages through links laid out as they are installed: `runtime/_front` is `gradbus` itself, `runtime/_torch` is
# `gradbus.torch`, and neither is part of `gradbus.runtime`. The programs in tests/tools stand beside it. mypy reads them, and editors
# (pyproject.toml, [tool.pyright]; in PyCharm, mark build/tree as a sources root).
links:  ## lay out the packages in build/tree as they are installed, for mypy and editors: make setup and make typecheck do it
	@rm -rf build/tree && mkdir -p build/tree/gradbus && cd build/tree/gradbus && \
		ln -s ../../../runtime/_front/* . && for name in $(CODE); do ln -s ../../../$$name $$name; done && \
		ln -s ../../../runtime/_torch torch && cd .. && ln -s ../../tests/tools/* ../../tests/simulation/fault_simulation .

typecheck: $(STAMP) links  ## strict types
	cd build/tree && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy --python-executable ../../$(PY) \
		--exclude '/_(front|torch)/' -p gradbus -p conformance -p fuzz -p soak -p fault_simulation -m call_profile -m golden_runs -m mnist_example -m nightly -m pauses -m public_names -m torch_build -m walks

# Stale build/lib and *.egg-info would carry removed files into the wheel. The build tools come from .venv: nothing is fetched here.
wheel: $(STAMP)  ## build the sdist and the wheel into dist/
	@rm -rf build/lib build/bdist.* dist *.egg-info && mkdir -p build
	@$(PY) -m build --no-isolation >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	@rm -rf *.egg-info
	@ls -l dist

smoke: wheel  ## install the wheel into a fresh environment and use it from an empty folder
	@rm -rf build/smoke && mkdir -p build/smoke/empty
	@if [ -n "$(UV_NOW)" ]; then \
		$(UV_ENV) $(UV_NOW) venv -q --python $(PY) build/smoke/venv && \
		$(UV_ENV) $(UV_NOW) pip install -q --python build/smoke/venv/bin/python -c $(PINS) dist/*.whl; \
	else \
		$(PY) -m venv build/smoke/venv && \
		build/smoke/venv/bin/python -m pip install -q --disable-pip-version-check --no-deps dist/*.whl && \
		$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
			"$$(build/smoke/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"; \
	fi
	cd build/smoke/empty && ../venv/bin/python -I ../../../tests/wheel_smoke.py $(ARGS)
	@rm -rf build/smoke

# With pip alone the wheel's dependencies are borrowed from .venv (a .pth line adds the folder, not the editable install in it).
UV_NOW = $(if $(NO_UV),,$(or $(UV),$(wildcard $(BIN)/uv)))

# Ratios against a reference in the same run. The ones below, bench-federated and so on, hold figures to limits.
bench: $(STAMP)  ## every benchmark as one suite, and ratios against a stored baseline: ARGS="--compare"
	@$(PY) -m gradbus.experiments.bench $(ARGS)

bench-quick: $(STAMP)  ## the same with fewer sizes, in less than 3 minutes
	@$(PY) -m gradbus.experiments.bench --quick $(ARGS)

# Tables and plot of docs/benchmarks.md from a full run, the baseline from a quick one, as it is compared with quick ones.
bench-renew: $(STAMP)  ## measure anew what docs/benchmarks.md and the baseline hold: half an hour, on a quiet machine
	@$(PY) -m gradbus.experiments.bench --write-docs $(ARGS)
	@$(PY) -m gradbus.experiments.bench --scale --write-docs $(ARGS)
	@$(PY) -m gradbus.experiments.bench --quick --write-baseline $(ARGS)

bench-scale: $(STAMP)  ## cost as work grows: clients, ranks, payloads, with the exponent and a plot of each
	@$(PY) -m gradbus.experiments.bench --scale $(ARGS)

bench-federated: $(STAMP)  ## bytes, time and accuracy of a federated run, codec by codec
	@$(PY) -m gradbus.experiments.bench federated $(ARGS)

bench-ddp: $(STAMP)  ## data-parallel training: accuracy, bytes, waiting
	@$(PY) -m gradbus.experiments.bench ddp $(ARGS)

bench-collectives: $(STAMP)  ## torch.distributed over DDS and shared memory against gloo
	@$(PY) -m gradbus.experiments.bench collectives $(ARGS)

# Trainings that were run before are kept in runs/ and not run again: it may be stopped, and goes on where it was.
bench-compression: $(STAMP)  ## accuracy, bytes and time of every algorithm of data-parallel training
	@$(PY) -m gradbus.experiments.bench compression $(ARGS)

bench-attacks: $(STAMP)  ## hostile clients: the accuracy that each defence saves
	@$(PY) -m gradbus.experiments.bench attacks $(ARGS)

bench-aggregation: $(STAMP)  ## sums through aggregators against direct ones, by topology and loss
	@$(PY) -m gradbus.experiments.bench aggregation $(ARGS)

bench-codecs: $(STAMP)  ## speed, size and error of every codec
	@$(PY) -m gradbus.experiments.bench codecs $(ARGS)

bench-sealing: $(STAMP)  ## rounds and collectives with and without a key
	@$(PY) -m gradbus.experiments.bench sealing $(ARGS)

# dp-accounting asks for older packages than the pins: ARGS="--other PYTHON" names an environment that has it.
bench-privacy: $(STAMP)  ## differential privacy: epsilon beside other accountants, the noise, accuracy, time of a round
	@$(PY) -m gradbus.experiments.bench privacy $(ARGS)

bench-parameter-server: $(STAMP)  ## parameter servers: bytes, steps, accuracy with a slow worker
	@$(PY) -m gradbus.experiments.bench parameter-server $(ARGS)

bench-ladder: $(STAMP)  ## what star, ring, compression and overlap make of a slow link, in namespaces and simulated
	@$(PY) -m gradbus.experiments.bench ladder $(ARGS)

bench-flower: $(STAMP)  ## rounds of Flower apps over the bus and with Flower's SuperLink; make setup-flower first
	@$(PY) -m gradbus.experiments.bench flower $(ARGS)

# As of bench-compression: what was trained before is kept in runs/.
bench-local: $(STAMP)  ## local steps: accuracy, loss and bytes beside synchronous training; utilisation of slow links
	@$(PY) -m gradbus.experiments.bench local $(ARGS)

bench-loop: $(STAMP)  ## how long a host's event loop stands while gradbus starts and trains, and a control loop beside training
	@$(PY) -m gradbus.experiments.bench loop $(ARGS)

bench-elastic: $(STAMP)  ## elastic runs under faults: deaths known, a storm, false deaths, what a commit costs
	@$(PY) -m gradbus.experiments.bench elastic $(ARGS)

bench-profile: $(STAMP)  ## where the time of a collective goes, thread by thread, beside gloo
	@$(TOOL) call_profile $(ARGS)

bench-pauses: $(STAMP)  ## ranks that are stopped, starved or killed: is one that lives taken for dead?
	@$(TOOL) pauses $(ARGS)

# The corpus stays in build/fuzz and is where the next run goes on. TARGETS="frame control": only those.
fuzz: SECONDS ?= 300
fuzz: $(STAMP)  ## give every parser millions of inputs: make fuzz SECONDS=300
	@$(TOOL) fuzz --seconds $(SECONDS) $(TARGETS) $(ARGS)

setup-fuzz: $(STAMP)  ## what make fuzz needs besides
	@if [ -n "$(UV_NOW)" ]; then $(UV_ENV) $(UV_NOW) pip install -q --python $(PY) -c constraints.txt atheris; \
	else $(PY) -m pip install -q --disable-pip-version-check -c constraints.txt atheris; fi

# A .venv of its own: what they bring along would change what the tests of everything else see. DeepSpeed's build asks the torch that is
# installed for its version, and needs setuptools and wheel beside it.
INTEGRATIONS := .venv-integrations
setup-integrations: $(INTEGRATIONS)/.set-up  ## Accelerate, Lightning, DeepSpeed, torchft, peft, MLflow, W&B, for their examples and tests
$(INTEGRATIONS)/.set-up: pyproject.toml constraints.txt | $(STAMP)
	@if [ -n "$(UV_NOW)" ]; then \
		$(UV_ENV) $(UV_NOW) venv -q --allow-existing --python $(PY) $(INTEGRATIONS) && \
		install="$(UV_ENV) $(UV_NOW) pip install -q --python $(INTEGRATIONS)/bin/python -c constraints.txt"; \
	else \
		$(PY) -m venv $(INTEGRATIONS) && \
		install="$(INTEGRATIONS)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt"; \
	fi && eval "$$install -e . setuptools wheel" && eval "$$install --no-build-isolation -e '.[integrations]'" || { \
		echo "make setup-integrations: the packages could not be installed. Check that the package registry can be reached" >&2; exit 1; }
	@touch $@

# A .venv of its own: flwr asks for packages older than the pins. Those that it has no part in keep theirs, the others are what it asks for.
FLOWER_NEWEST := 1.42
FLOWER ?= $(FLOWER_NEWEST)
FLOWER_VENV := .venv-flower
FLOWER_SET_UP := $(FLOWER_VENV)/.set-up-$(FLOWER_NEWEST)
FLOWER_PINS := cyclonedds|msgpack|numpy|pillow|safetensors|scipy|structlog|torch|torchvision|zstandard
FLOWER_FAILED = { echo "make $@: the packages could not be installed. Check that the package registry can be reached" >&2; exit 1; }
$(FLOWER_SET_UP): pyproject.toml constraints.txt | $(STAMP)
	@rm -f $(FLOWER_VENV)/.set-up*; \
	if [ -n "$(UV_NOW)" ]; then \
		$(UV_ENV) $(UV_NOW) venv -q --allow-existing --python $(PY) $(FLOWER_VENV) && \
		install="$(UV_ENV) $(UV_NOW) pip install -q --python $(FLOWER_VENV)/bin/python"; \
	else \
		$(PY) -m venv $(FLOWER_VENV) && install="$(FLOWER_VENV)/bin/python -m pip install -q --disable-pip-version-check"; \
	fi && grep -E '^($(FLOWER_PINS))==' constraints.txt >$(FLOWER_VENV)/constraints.txt && \
	eval "$$install -c $(FLOWER_VENV)/constraints.txt -e '.[flower]' 'flwr~=$(FLOWER_NEWEST).0' scikit-learn" || $(FLOWER_FAILED)
	@touch $@

# Others stand upon it, and have torch and the rest from there (a .pth line adds the folder): what is installed is another flwr with what it asks
# for, which comes first, and gradbus, for its command.
FLOWER_OTHER = $(FLOWER_VENV)-$*
$(FLOWER_VENV)-%/.set-up: $(FLOWER_SET_UP)
	@if [ -n "$(UV_NOW)" ]; then \
		$(UV_ENV) $(UV_NOW) venv -q --clear --python $(PY) $(FLOWER_OTHER) && \
		install="$(UV_ENV) $(UV_NOW) pip install -q --python $(FLOWER_OTHER)/bin/python"; \
	else \
		$(PY) -m venv --clear $(FLOWER_OTHER) && install="$(FLOWER_OTHER)/bin/python -m pip install -q --disable-pip-version-check"; \
	fi && eval "$$install -c $(FLOWER_VENV)/constraints.txt '$(if $(filter simulation,$*),flwr[simulation]~=$(FLOWER_NEWEST).0,flwr~=$*.0)'" && \
	eval "$$install --no-deps -e ." && \
	where='import sysconfig; print(sysconfig.get_path("purelib"))' && \
	$(FLOWER_VENV)/bin/python -c "$$where" >"$$($(FLOWER_OTHER)/bin/python -c "$$where")/dependencies.pth" || $(FLOWER_FAILED)
	@touch $@

setup-flower: $(if $(filter $(FLOWER_NEWEST),$(FLOWER)),$(FLOWER_SET_UP),$(FLOWER_VENV)-$(FLOWER)/.set-up)  ## Flower and scikit-learn, for gradbus flower and its tests; an older one beside it: FLOWER=1.41

setup-flower-simulation: $(FLOWER_VENV)-simulation/.set-up  ## Flower's simulation with Ray, to which bench-federated compares virtual clients

test-flower: setup-flower  ## Flower's apps over the bus, in the environments of make setup-flower, all that there are
	$(BIN)/pytest $(ARGS) tests/actors/flower tests/experiments/run/test_flower.py

conformance: $(STAMP)  ## PyTorch's own tests of torch.distributed: dds passes what gloo passes
	@$(TOOL) conformance $(ARGS)

# What has been run before is not run again. QUICK=1: smaller runs, less than 5 minutes; without it 35, on 2 idle cores.
figures: $(STAMP)  ## the figures of docs/figures.md, from runs of their own (QUICK=1: small ones)
	@$(PY) -m gradbus.experiments.figures $(if $(filter-out 0,$(QUICK)),--quick) $(ARGS)

# Needs uv. Pins that still fit are kept; LOCK_ARGS=--upgrade takes the newest of everything.
lock:  ## write constraints.txt and requirements.lock anew from pyproject.toml
	@test -n "$(UV_NOW)" || { echo "make lock: needs uv. Install it (pip install uv), then: make lock" >&2; exit 1; }
	@mkdir -p build && cp constraints.txt build/constraints.txt
	$(UV_ENV) $(UV_NOW) pip compile -q --universal --python-version 3.11 --extra dev --extra fuzz --extra integrations --no-header --no-annotate \
		$(LOCK_ARGS) pyproject.toml -o build/constraints.txt
	@{ echo "# Made by make lock: the versions that a set-up takes and the tests have seen."; cat build/constraints.txt; } >constraints.txt
	$(UV_ENV) $(UV_NOW) pip compile -q --universal --python-version 3.11 --extra dev --no-header --no-annotate --no-emit-index-url \
		--no-emit-find-links --generate-hashes -c constraints.txt pyproject.toml -o build/requirements.lock
	@{ echo "# Made by make lock: what make setup LOCKED=1 installs, file by file."; cat build/requirements.lock; } >requirements.lock

clean:  ## remove what building and testing left behind
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(CODE) tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## the same, and every environment: .venv, .venv-flower ...
	rm -rf $(VENV) $(INTEGRATIONS) $(FLOWER_VENV) $(FLOWER_VENV)-* $(OLDEST) .venv-python-*
