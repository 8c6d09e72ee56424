# Two commands for a fresh clone, with only Python 3.11+, pip and make:
#   make quickstart   the main job, end to end, on the text in data_prep/sample
#   make test         the default tests
# VENV and PYTHON may be given: make test PYTHON=python3.12 VENV=.venv312, and options of pytest: PYTEST="-x -k mask"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
ENGINES ?= .venv-engines
COMPILERS ?= .venv-compilers
STORES ?= .venv-stores
DOCS ?= .venv-docs
ONNX ?= .venv-onnx
PEERS ?= .venv-peers
TENSORFLOW ?= .venv-tensorflow
BIN := $(VENV)/bin
WORKERS ?= 2
QUICKSTART ?= runs/quickstart
RUN_TESTS = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -q
UNCHECKED := --jaxtyping-packages=

.PHONY: quickstart test types lint slow accelerator engines compilers stores docs notebooks onnx peers tensorflow clean

# Compiled programs are kept, so that a command that runs again starts sooner.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax

quickstart: $(VENV)/installed
	$(BIN)/python -m bert_jax quickstart --output $(QUICKSTART)

test: $(VENV)/installed-dev
	$(RUN_TESTS) --durations=15 $(UNCHECKED) $(PYTEST)

# The default tests with the types of all calls checked, as a plain `pytest` checks them too: a third of the time.
types: $(VENV)/installed-dev
	$(RUN_TESTS) --durations=15 $(PYTEST)

slow: $(VENV)/installed-dev
	$(RUN_TESTS) -m slow --durations=10 $(UNCHECKED) $(PYTEST)

# On a machine with a GPU or TPU, and jax's plugin for it: what it computes, and that runs resume bit for bit.
accelerator: $(VENV)/installed-dev
	JAX_PLATFORMS= XLA_PYTHON_CLIENT_PREALLOCATE=false $(RUN_TESTS) -m accelerator $(UNCHECKED)
	JAX_PLATFORMS= XLA_PYTHON_CLIENT_PREALLOCATE=false $(RUN_TESTS) -m "slow or not slow" $(UNCHECKED) tests/train/test_loop.py \
		-k "killed_run_resumes_exactly or sigterm_saves_and_the_run_resumes or moments_are_restored"

# Beam and Ray, which have half a hundred needs of their own, in an environment of their own.
engines: $(ENGINES)/installed
	$(ENGINES)/bin/python -m pytest -m slow -q --durations=5 tests/data_prep/test_beam_and_ray.py

# The compilers of TPUs and NVIDIA GPUs, which need no device, in an environment of their own: several gigabytes.
compilers: $(COMPILERS)/installed
	$(COMPILERS)/bin/python -m pytest -m slow -q --durations=5 tests/planning/test_planning.py tests/train/test_compiled_steps.py

# Object stores, on emulators: workdirs, text and shards in Google Cloud Storage and in S3.
stores: $(STORES)/installed
	$(STORES)/bin/python -m pytest -m "not accelerator" -q --durations=5 tests/storage/test_stores.py tests/storage/test_stored_hold.py tests/storage/test_remote.py

# The documentation site, in build/site. The reference pages are made by the program; MkDocs is in an environment of its own.
docs: $(VENV)/installed $(DOCS)/installed
	$(BIN)/python -m website.reference --output build/docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict
	@echo "The site is in build/site. To read it: $(DOCS)/bin/python -m http.server --directory build/site"

# Runs the notebooks, and saves them with what they print.
notebooks: $(VENV)/installed-dev
	$(BIN)/python docs/notebooks/run.py

# Exports to ONNX: the converter, onnxruntime, and transformers' tokenizers for the README of an export.
onnx: $(ONNX)/installed
	$(ONNX)/bin/python -m pytest -q --durations=5 tests/interop/test_onnx.py

# Exports as the programs that people use open them: transformers, sentence-transformers, peft, fastembed, minicons.
peers: $(PEERS)/installed
	$(PEERS)/bin/python -m pytest -m "not accelerator" -q --durations=5 tests/interop/test_peers.py \
		tests/interop/test_huggingface.py tests/interop/test_huggingface_families.py tests/interop/test_peft.py \
		-k "transformers_loads or peft_computes or test_peers"

# Google's checkpoints, and TFDS shards as TensorFlow decodes them.
tensorflow: $(TENSORFLOW)/installed
	$(TENSORFLOW)/bin/python -m pytest -m "not accelerator" -q --durations=5 tests/interop/test_original_bert.py \
		tests/data_prep/test_output_files.py::test_tensorflow_decodes_a_record_of_tfds

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-newer .venv-engines .venv-compilers .venv-stores .venv-docs .venv-onnx .venv-peers .venv-tensorflow build .cache .mypy_cache .ruff_cache .pytest_cache *.egg-info

$(VENV)/installed: requirements.txt setup.cfg setup.py pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "bert_jax needs Python 3.11 or newer; give one: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

$(ENGINES)/installed: requirements.txt setup.cfg setup.py pyproject.toml
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,beam,ray]'
	touch $@

$(STORES)/installed: requirements.txt setup.cfg setup.py pyproject.toml
	test -x $(STORES)/bin/python || $(PYTHON) -m venv $(STORES)
	$(STORES)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(STORES)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,stores]'
	touch $@

$(DOCS)/installed: website/requirements.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement website/requirements.txt
	touch $@

$(ONNX)/installed: requirements.txt setup.cfg setup.py pyproject.toml
	test -x $(ONNX)/bin/python || $(PYTHON) -m venv $(ONNX)
	$(ONNX)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(ONNX)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,onnx]' transformers
	touch $@

# Where an index has 2.13.0+cpu, pip prefers it to 2.13.0, which brings 5 GB of CUDA.
$(PEERS)/installed: requirements.txt setup.cfg setup.py pyproject.toml
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,onnx]' \
		'torch==2.13.*' transformers sentence-transformers peft fastembed minicons
	touch $@

$(TENSORFLOW)/installed: requirements.txt setup.cfg setup.py pyproject.toml
	test -x $(TENSORFLOW)/bin/python || $(PYTHON) -m venv $(TENSORFLOW)
	$(TENSORFLOW)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(TENSORFLOW)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,tensorflow]'
	touch $@

$(COMPILERS)/installed: requirements.txt setup.cfg setup.py pyproject.toml
	test -x $(COMPILERS)/bin/python || $(PYTHON) -m venv $(COMPILERS)
	$(COMPILERS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(COMPILERS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,tpu,gpu12]'
	touch $@
