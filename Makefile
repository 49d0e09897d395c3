# make demo    one chat answer from the default model, through the server and the openai client
# make serve   the server on 127.0.0.1:8000 until Ctrl-C, with the playground
# make test    every test
# make nightly every test, with those that take too long for every run
# make check   the tests near to what you changed, in three minutes; BASE=COMMIT: since that commit
# make compare VLLM=PYTHON VLLM_MODEL=DIRECTORY   the same requests to vllm serve and to Pegboard
# make bench   speed here and now, side by side with whichever peers are installed
# make lint    ruff, mypy and the import contracts
# make release wheels and sdists of everything in dist/, with an index for pip, checksums and notes
# make version VERSION=0.2.0   the version of the next release, in the sources and the changelog
# make site    the documentation as a site, in build/site
# make docs    regenerate the generated files (catalogue, docs/kinds.md, docs/configuration.md, docs/formats.md, docs/models.md)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PYPROJECTS := $(sort $(wildcard core/*/pyproject.toml)) $(sort $(wildcard plugins/*/*/pyproject.toml kernels/*/pyproject.toml contrib/*/*/pyproject.toml))
MEMBERS    := $(patsubst %/pyproject.toml,%,$(PYPROJECTS))
# In a terminal, pip shows how far the downloads are.
QUIET      := $(shell test -t 2 || echo --quiet)
EDITABLE   := $(foreach member,$(MEMBERS),--editable ./$(member))

.PHONY: demo serve test nightly check compare bench lint docs site release version setup model clean

setup: $(VENV)/.members

$(VENV)/.third-party: requirements-dev.txt constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check --requirement requirements-dev.txt --constraint constraints.txt
	touch $@

$(VENV)/.members: $(VENV)/.third-party $(PYPROJECTS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps $(EDITABLE)
	-$(BIN)/python -m pegboard_kernel_cpu.build
	touch $@

model: setup
	$(BIN)/python examples/fetch_default_model.py

demo: model
	$(BIN)/python examples/demo.py

serve: setup
	$(BIN)/pegboard serve --playground

test: model
	$(BIN)/python tests/run.py $(ARGS)

nightly: model
	$(BIN)/python tests/run.py --nightly

check: model
	$(BIN)/python tests/run.py --changed $(BASE)

compare: setup
	PEGBOARD_TEST_VLLM=$(VLLM) PEGBOARD_TEST_VLLM_MODEL=$(VLLM_MODEL) \
		$(BIN)/python -m pytest -q tests/server/test_vllm_differential.py $(ARGS)

bench: model
	$(BIN)/python tests/bench/bench.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy -p pegboard
	$(BIN)/lint-imports

docs: setup
	$(BIN)/python -m pegboard_testing.authoring.generate --write

site: setup
	$(BIN)/python -m pegboard_testing.authoring.site build/site

release: setup
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m pegboard_testing.authoring.release dist

version: setup
	$(BIN)/python -m pegboard_testing.authoring.release --set-version $(VERSION)

clean:
	rm -rf $(VENV)
