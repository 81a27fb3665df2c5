# Each target sets up what it needs; the environment in .venv is made once and reused.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
BENCHMARKS := tiling planning reshard create random_fill ops train checkpoint_planning checkpoint

# Tests start many processes, each of which would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo tour test test-long lint docs package bench op-table clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once, a few minutes) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "shardwise needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY) ## shard, train, reshard, save, resume and convert a small GPT on four local ranks
	@$(BIN)/python -m shardwise.demo --folder $(VENV)/demo

tour: $(READY) ## draw layouts of every kind, a plan, and a tensor that goes that way
	@$(BIN)/python examples/tour.py

test: $(READY) ## everything CI checks: lint, types, layers, docs, tests
	@$(MAKE) --no-print-directory -j2 lint docs
	$(BIN)/python -m pytest -n 2

test-long: lint docs package ## all tests, with a thousand random cases a property
	$(BIN)/python -m pytest -n 2 -m "long or not long" --hypothesis-profile=long

lint: $(READY) ## ruff, mypy (strict), import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY) ## the documents as a site in site/, where every warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

package: $(READY) ## wheel and sdist in dist/, installed into a fresh environment and tried there
	$(BIN)/python tests/packaging/try_package.py

bench: $(READY) ## every benchmark, with ratios to the peers
	@for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py || exit 1; done

op-table: $(READY) ## docs/op-table.md anew: torch's own op samples on sharded tensors (minutes)
	$(BIN)/python -m tests.ops.op_table > docs/op-table.md.new
	mv docs/op-table.md.new docs/op-table.md

clean: ## remove the environment and caches
	rm -rf $(VENV) dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
