# make demo and make test set everything up themselves, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
FRAMEWORKS := $(VENV)/.frameworks

.DEFAULT_GOAL := help
.PHONY: help install demo test lint check format docs slow-test property-test docker-test memory-test replicas-test s3-test soak lock sbom audit trl-test trainers-test bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

install: $(INSTALLED)  ## make .venv with the package, editable, and its console script

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "penstock needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
	@echo "installed into $(VENV); to have the command penstock: . $(BIN)/activate"

$(FRAMEWORKS): $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,frameworks]'
	@touch $@

demo: install  ## train a tiny GPT on a generated corpus, kill the server and the trainer in mid-run (two minutes)
	$(BIN)/python examples/demo.py

# In the order of the folders, the slow ones first: by default the files of few tests come last, though they take longest, and a
# worker is left alone with them. Three workers for two cores, as some tests wait for a server that does not answer: each more
# imports torch and the frameworks once more.
# Bytecode is kept, or else each of some hundred processes would compile anew what it imports.
test: $(FRAMEWORKS)  ## the test suite without the slow tests, training frameworks included; needs no Docker engine
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not slow and not docker" --numprocesses 3 --dist loadfile --no-loadscope-reorder

slow-test: $(FRAMEWORKS)  ## the slow tests: several ranks, many kills, the tests of random examples with a hundred each
	PYTHONDONTWRITEBYTECODE= PENSTOCK_TEST_EXAMPLES=100 $(BIN)/python -m pytest -m "slow or hypothesis" --numprocesses 3

property-test: $(FRAMEWORKS)  ## the tests of random examples with a thousand each, but for the costliest; fifteen minutes
	PENSTOCK_TEST_EXAMPLES=1000 $(BIN)/python -m pytest tests -m hypothesis --numprocesses 2

soak: $(FRAMEWORKS)  ## four ranks through kills, damage, full disks and new tokens and certificates for half an hour
	PENSTOCK_TEST_SOAK_SECONDS=1800 $(BIN)/python -m pytest tests/integration/test_soak.py -s

STORED := exactly_once kill resume mixture new_data recipes chaos epochs concat
s3-test: $(FRAMEWORKS)  ## tests of order, resume, new data and faults with an object store in place of the data folder
	PENSTOCK_TEST_SOURCE=s3 $(BIN)/python -m pytest $(STORED:%=tests/integration/test_%.py) -m "not slow" -k "not symlink"

trl-test: $(FRAMEWORKS)  ## TRL's SFT, DPO and GRPO trainers; installs trl and peft, which bring pandas and more
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,trl]' || \
		echo "trl cannot be installed; its test is skipped" >&2
	$(BIN)/python -m pytest tests/frameworks/test_trl.py -rs

# Each trainer has a separate environment in .venv/trainers: they need different versions of the same libraries. So do the
# libraries whose files penstock import reads.
TRAINERS := torchtitan olmo-core composer litgpt torchtune verl litdata mosaicml-streaming
trainers-test: $(TRAINERS:%=trainer-test-%)  ## the adapters with the real trainers; installs each trainer, some gigabytes

trainer-test-%: $(VENV)/trainers/%/.installed
	[ ! -e $< ] || $(VENV)/trainers/$*/bin/python -m pytest tests/frameworks/test_$(subst -,_,$*).py -rs

.PRECIOUS: $(VENV)/trainers/%/.installed
$(VENV)/trainers/%/.installed: tests/frameworks/requirements/%.txt pyproject.toml $(INSTALLED)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement $< --editable '.[server,torch]' hypothesis httpx2 pytest && touch $@ || \
		echo "$* cannot be installed; its tests are skipped" >&2

lint: install  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

check: lint test  ## lint and test

format: install  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install  ## the documentation as a site, in site/; a broken link is an error
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docker-test: install  ## build the images and run docker compose for real; needs a Docker engine
	$(BIN)/python -m pytest tests/docker -rs

memory-test: install  ## serve 10 GB from a container of 512 MB, every block of it; about ten minutes, needs a Docker engine
	PENSTOCK_TEST_GIGABYTES=10 $(BIN)/python -m pytest tests/docker/test_memory_limit.py -rs -s

LOCKING := $(VENV)/locking
$(LOCKING)/.installed:
	$(PYTHON) -m venv $(LOCKING)
	$(LOCKING)/bin/pip install --quiet cyclonedx-bom pip-audit pip-tools && touch $@

replicas-test: install  ## kill and restart three servers for five minutes while four ranks read from them; needs a Docker engine
	PENSTOCK_TEST_REPLICAS_SECONDS=300 $(BIN)/python -m pytest tests/docker/test_compose.py -k replicas -rs -s

lock: $(LOCKING)/.installed  ## pin the packages of the server image, with the hashes of their files
	$(LOCKING)/bin/pip-compile --quiet --generate-hashes --extra server --build-deps-for wheel --constraint constraints.txt \
		--strip-extras --no-annotate --no-header --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
		--output-file docker/requirements.txt pyproject.toml
	sed -i '1i # The packages of the server image, with the hashes of their files. Made by make lock.' docker/requirements.txt

sbom: $(LOCKING)/.installed  ## list the packages of the server image in sbom.json, in the format of CycloneDX
	$(LOCKING)/bin/cyclonedx-py requirements docker/requirements.txt --output-reproducible --output-file sbom.json

audit: $(LOCKING)/.installed  ## look for known vulnerabilities of the server image's packages; asks pypi.org
	$(LOCKING)/bin/pip-audit --requirement docker/requirements.txt --require-hashes --disable-pip

# The peers have environments of their own, so that the product's stays clean. One that cannot be installed leaves the others be:
# the table says that it is missing, and why.
BENCH_VENVS := benchmarks/.venv benchmarks/.venv-mosaicml
define install_peers
$(PYTHON) -m venv $(@D)
if $(@D)/bin/pip install --quiet --requirement $<; then touch $@; else \
	sed 's/\[[^]]*\]//' $< >$(@D)/constraints.txt; \
	grep -v '^#' $< | while read -r peer; do \
		$(@D)/bin/pip install --quiet --constraint $(@D)/constraints.txt "$$peer" || true; \
	done; fi
endef

benchmarks/.venv/.installed: benchmarks/requirements.txt
	$(install_peers)

benchmarks/.venv-mosaicml/.installed: benchmarks/requirements-mosaicml.txt
	$(install_peers)

bench: install $(if $(QUICK),,$(BENCH_VENVS:=/.installed))  ## compare with other loaders; QUICK=1 for an impression in three minutes
	$(BIN)/python benchmarks/run.py $(if $(QUICK),--quick) $(FLAGS)

clean:  ## remove what make made
	rm -rf $(VENV) $(BENCH_VENVS) site benchmarks/work demo-out sample-data .pytest_cache .mypy_cache .ruff_cache .hypothesis
