# `make` alone lists the targets. A fresh clone needs python3 (3.11 or newer), make and a package registry, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# Programs for whoever changes gradbus: they lie with the tests, and no wheel has them.
TOOL := PYTHONPATH="$(CURDIR)/tests/tools" $(PY) -P -m
STAMP := $(VENV)/.set-up
CODE := actors codecs commands experiments models runtime
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
.PHONY: help setup links setup-fuzz setup-integrations setup-flower demo run-controller run-client run-ddp run-aggregator run-parameter-server \
	report simulate doctor test test-deploy nightly check lint docs format typecheck wheel smoke fuzz bench conformance figures soak simulate-faults lock clean distclean

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

# uv that cannot reach its registry leaves the work to pip and pip's configuration.
$(STAMP): pyproject.toml setup.py constraints.txt $(if $(IS_LOCKED),requirements.lock) $(TORCH_CHOICE)
	@$(UV_ENV) PYTHON='$(PYTHON)' VENV='$(VENV)' UV='$(UV)' FETCH_UV='$(FETCH_UV)' LOCKED='$(IS_LOCKED)' TORCH_INDEX='$(TORCH_INDEX)' \
		sh tests/tools/set_up.sh $(TORCH)
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
# Most tests wait for processes rather than compute: so four workers, each with whole files, two of them with quick ones (tests/support/spread.py).
# They get files in the order of tests/conftest.py, not those with the most tests first, which are quick ones.
WORKERS ?= 4
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
SLICE ?= tests/runtime/wire tests/codecs tests/runtime/bus tests/runtime/collectives tests/actors/test_flows.py tests/actors/test_flows_in_process.py \
	tests/test_standard_bases.py
DEBIAN ?= trixie
# Some parts make the environment that they run in.
test: $(if $(filter python oldest debian,$(PART)),,$(STAMP)) $(if $(filter flower,$(PART)),setup-flower)  ## every test but nightly ones, with WORKERS=4; or PART=again (at most three that failed), faults, portable, flower, gpu, slice (SLICE=tests/codecs), python (the slice under PYTHON=3.13), oldest (with the lowest versions), debian, python-3.14, arm64 and arm64-torch (the wheels, over Zenoh)
	@BIN='$(BIN)' PYTHON='$(PYTHON)' SPREAD='$(SPREAD)' SLICE='$(SLICE)' DEBIAN='$(DEBIAN)' bash tests/tools/test_part.sh '$(PART)' $(ARGS)

# What it fetches stays outside the clone (GRADBUS_ROOTS), for the next time. It needs root, and Debian's packages for containers.
test-deploy: $(STAMP)  ## what deploy/ has, run for real where this machine can: make test-deploy PART=containers; an unknown part lists them
	@BIN='$(BIN)' bash tests/tools/test_deploy.sh '$(PART)'

# Results go into docs/nightly.md.
nightly: $(STAMP)  ## what takes longer than .ci/run, part by part: make nightly PART=debian-trixie; docs/nightly.md has the parts
	@$(TOOL) nightly $(PART) $(ARGS)

# Processes die, stand still, are cut off from each other, and lose what they send; then what they have left is checked.
soak: MINUTES ?= 30
soak: $(STAMP)  ## controller, clients and ranks for MINUTES=30, something breaks every few seconds, and the history is checked; over a relay: TRANSPORT=zenoh
	@$(TOOL) soak --minutes $(MINUTES) $(if $(TRANSPORT),--transport $(TRANSPORT)) $(ARGS)

# A seed that fails prints the command that runs it again. Without a git tree that decides the first seed, it is 0.
simulate-faults: SEEDS ?= 300
simulate-faults: FLAVOUR ?= any
simulate-faults: $(STAMP)  ## the shipped actors in virtual time with the faults of SEEDS=300 seeds; one of them again: SEED=7 FLAVOUR=fp32, with fewer faults: SHRINK=1; over a simulated relay: TRANSPORT=zenoh; with a fault in the code, until a seed finds it: PLANT=all
	@PYTHONPATH="$(CURDIR)/tests/simulation" $(PY) -P -m fault_simulation --flavour $(FLAVOUR) $(if $(TRANSPORT),--transport $(TRANSPORT)) $(if $(SIZE),--size $(SIZE)) $(if $(PLANT),--plant "$(PLANT)") \
		$(if $(SEED),--seed $(SEED) $(if $(KEEP),--keep $(KEEP)) $(if $(filter-out 0,$(SHRINK)),--shrink),--seeds $(SEEDS)) $(ARGS)

# Between two edits. The tests are those that tests/pure.txt names by path: to collect all, and choose by marker, takes longer than to run these.
check: $(STAMP)  ## formatting, lint, strict types and the pure tests: those without a process or DDS
	@BIN='$(BIN)' bash tests/tools/check.sh $(ARGS)
	@$(TOOL) nightly --stale

lint: $(STAMP)  ## formatting and lint alone, of scripts, too
	@BIN='$(BIN)' bash tests/tools/lint.sh

docs: $(STAMP)  ## write the pages and tables that are made from the code anew: settings, what works together, benchmarks as stored, public names
	@BIN='$(BIN)' bash tests/tools/docs.sh

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
		--exclude '/_(front|torch)/' -p gradbus -p conformance -p fuzz -p soak -p fault_simulation -m call_profile -m distributions -m golden_runs -m mnist_example -m nightly -m pauses -m platform_checks -m platforms -m public_names -m torch_build -m trap_gains -m walks -m weight

# Stale build/lib and *.egg-info would carry removed files into the wheel. The build tools come from .venv: nothing is fetched here.
wheel: $(STAMP)  ## build the sdists and the wheels of gradbus-core and gradbus into dist/
	@rm -rf build/distributions dist && mkdir -p build
	@for folder in $$($(TOOL) distributions build/distributions); do \
		$(PY) -m build --no-isolation --outdir dist $$folder >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }; done
	@ls -l dist

smoke: wheel  ## install gradbus-core, then gradbus, into a fresh environment, and use each from an empty folder
	@$(UV_ENV) PY='$(PY)' UV='$(UV_NOW)' PINS='$(PINS)' bash tests/tools/smoke.sh $(ARGS)

UV_NOW = $(if $(NO_UV),,$(or $(UV),$(wildcard $(BIN)/uv)))

# Ratios against a reference in the same run. The parts of the suite are ARGS="--part bus"; what PART names holds figures to limits, but for quick
# (the suite with fewer sizes, 3 minutes), scale (cost as work grows), renew (docs/benchmarks.md and the baseline: half an hour, on a quiet machine).
bench: $(STAMP)  ## every benchmark as one suite, or PART=quick, scale, renew, federated, ddp, collectives, compression, local, ...: an unknown one lists them; ratios against a stored baseline: ARGS="--compare"
	@PY='$(PY)' bash tests/tools/bench.sh '$(PART)' $(ARGS)

# The corpus stays in build/fuzz and is where the next run goes on. TARGETS="frame control": only those.
fuzz: SECONDS ?= 300
fuzz: $(STAMP)  ## give every parser millions of inputs: make fuzz SECONDS=300
	@$(TOOL) fuzz --seconds $(SECONDS) $(TARGETS) $(ARGS)

SET_UP = $(UV_ENV) PY='$(PY)' UV='$(UV_NOW)' sh tests/tools/environment.sh
setup-fuzz: $(STAMP)  ## what make fuzz needs besides
	@$(SET_UP) fuzz $(VENV)

# A .venv of its own: what they bring along would change what the tests of everything else see.
INTEGRATIONS := .venv-integrations
setup-integrations: $(INTEGRATIONS)/.set-up  ## Accelerate, Lightning, DeepSpeed, torchft, peft, MLflow, W&B, for their examples and tests
$(INTEGRATIONS)/.set-up: pyproject.toml setup.py constraints.txt | $(STAMP)
	@$(SET_UP) integrations $(INTEGRATIONS)
	@touch $@

# For make test PART=oldest: the second stamp is that of this environment in the place of .venv.
OLDEST := .venv-oldest
$(OLDEST)/.set-up-oldest: pyproject.toml setup.py constraints.txt
	@$(SET_UP) oldest $(OLDEST) '$(OLDEST_PYTHON)'
	@touch $@ $(OLDEST)/.set-up

# A .venv of its own: flwr asks for packages older than the pins. Those that it has no part in keep theirs, the others are what it asks for.
FLOWER_NEWEST := 1.42
FLOWER ?= $(FLOWER_NEWEST)
FLOWER_VENV := .venv-flower
FLOWER_SET_UP := $(FLOWER_VENV)/.set-up-$(FLOWER_NEWEST)
$(FLOWER_SET_UP): pyproject.toml setup.py constraints.txt | $(STAMP)
	@rm -f $(FLOWER_VENV)/.set-up*
	@$(SET_UP) flower $(FLOWER_VENV) 'flwr~=$(FLOWER_NEWEST).0'
	@touch $@

# Others stand upon it, and have torch and the rest from there (a .pth line adds the folder): what is installed is another flwr with what it asks
# for, which comes first, and gradbus, for its command.
$(FLOWER_VENV)-%/.set-up: $(FLOWER_SET_UP)
	@$(SET_UP) flower-other $(FLOWER_VENV)-$* '$(if $(filter simulation,$*),flwr[simulation]~=$(FLOWER_NEWEST).0,flwr~=$*.0)' $(FLOWER_VENV)
	@touch $@

setup-flower: $(if $(filter $(FLOWER_NEWEST),$(FLOWER)),$(FLOWER_SET_UP),$(FLOWER_VENV)-$(FLOWER)/.set-up)  ## Flower and scikit-learn, for gradbus flower and its tests; an older one beside it: FLOWER=1.41; with Ray, for virtual clients: FLOWER=simulation

conformance: $(STAMP)  ## PyTorch's own tests of torch.distributed: dds passes what gloo passes; over a relay: TRANSPORT=zenoh
	@$(TOOL) conformance $(if $(TRANSPORT),--transport $(TRANSPORT)) $(ARGS)

# What has been run before is not run again. QUICK=1: smaller runs, less than 5 minutes; without it 35, on 2 idle cores.
figures: $(STAMP)  ## the figures of docs/figures.md, from runs of their own (QUICK=1: small ones)
	@$(PY) -m gradbus.experiments.figures $(if $(filter-out 0,$(QUICK)),--quick) $(ARGS)

# Needs uv. Pins that still fit are kept; LOCK_ARGS=--upgrade takes the newest of everything.
lock:  ## write constraints.txt and requirements.lock anew from pyproject.toml
	@$(UV_ENV) UV='$(UV_NOW)' bash tests/tools/lock.sh $(LOCK_ARGS)

clean:  ## remove what building and testing left behind
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(CODE) tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## the same, and every environment: .venv, .venv-flower ...
	rm -rf $(VENV) $(INTEGRATIONS) $(FLOWER_VENV) $(FLOWER_VENV)-* $(OLDEST) .venv-python-*

# Names of gradbus 0.1: for one release each prints the new one and runs it.
define renamed
@echo "make $@: the name is now: make $(1)" >&2
@$(MAKE) --no-print-directory $(1)
endef
bench-%:
	$(call renamed,bench PART=$*)
test-%:
	$(call renamed,test PART=$*)
faults setup-oldest setup-flower-simulation:
	$(call renamed,$(if $(filter faults,$@),test PART=faults,$(if $(filter setup-oldest,$@),test PART=oldest,setup-flower FLOWER=simulation)))
