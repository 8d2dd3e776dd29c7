# Every target sets up what it needs. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo serve browser test test-transformers test-hf-suite test-ray test-gpu sanitize bench-cpu bench-gpu bench-servers ladder-gpu tune-gpu profile-cpu profile-gpu \
	mutants check docker format readme docs clean

help:
	@echo "make demo     write a short story (creates $(VENV) on first use)"
	@echo "make serve    serve the embedded model at http://127.0.0.1:8000: a page, and OpenAI's API"
	@echo "make test     run the tests (no GPU needed)"
	@echo "make test-transformers  run the patch's tests with older versions of transformers, in .venvs/"
	@echo "make test-hf-suite  run transformers' own model tests on plain and patched models, in .venvs/ (ten minutes)"
	@echo "make test-ray run the tests on a local Ray, which it installs into $(VENV) (three minutes)"
	@echo "make test-gpu run the tests that need a CUDA GPU, with the python3 that has a CUDA torch"
	@echo "make sanitize run the kernels' small shapes, and a small model, under compute-sanitizer, on a CUDA GPU"
	@echo "make bench-cpu  every workload, with every CPU method or the fastest ones, into results/ (ten minutes)"
	@echo "make bench-gpu  every workload, with every GPU method or the strongest ones, into results/ (half an hour)"
	@echo "make bench-servers  our server beside llama-cpp-python's and transformers', into results/ (half an hour the first time)"
	@echo "make ladder-gpu every rung of every ladder, into results/ (a few minutes)"
	@echo "make tune-gpu   sweep every kernel's tunables on this GPU, into results/ (eight minutes)"
	@echo "make profile-cpu where the time of the CPU methods goes, sessions into results/ (two minutes)"
	@echo "make profile-gpu where the time of the GPU methods goes, sessions into results/ (a few minutes)"
	@echo "make mutants  swap operators and see whether a test notices (hours)"
	@echo "make check    ruff (lint and format), strict mypy, hadolint"
	@echo "make docker   build an image that serves, with docker"
	@echo "make format   let ruff rewrite what it can"
	@echo "make readme   regenerate tables, reference pages and drawings in docs/ from results/ and the code"
	@echo "make docs     build the documentation site into site/"
	@echo "make clean    remove $(VENV) and caches"

demo: $(VENV)/.core
	@$(BIN)/warpline generate "Once upon a time, a little robot" --seed 3

serve: $(VENV)/.serve
	@$(BIN)/warpline serve

# The page is tested in a browser. Where there is none, CI installs Debian's; elsewhere these tests say why they skip.
browser:
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null || test -z "$(CI)" || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }

# A worker to a core (each takes half a gigabyte) with one thread of torch's; what measures time has the machine to itself.
test: $(VENV)/.dev browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 300 -m "not alone" -n logical --maxprocesses 8 --dist worksteal
	$(BIN)/python -m pytest --timeout 300 -m alone

# The patch meets transformers' internals, which move: these versions and the one of `make test`. Each has an environment
# of its own, which takes everything else, torch above all, from .venv.
TRANSFORMERS = 4.57 5.0 5.5
ENVIRONMENTS = $(TRANSFORMERS:%=.venvs/transformers-%)
test-transformers: $(ENVIRONMENTS:%=%/.ready)
	set -e; for env in $(ENVIRONMENTS); do \
		$$env/bin/python -c 'import transformers; print("transformers", transformers.__version__)'; \
		PYTHONPATH=src:. $$env/bin/python -m pytest tests/hf tests/cli/test_hf.py --timeout 300 -p no:cacheprovider; \
	done

.venvs/transformers-%/.ready: | $(VENV)/.dev
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/warpline.pth
	$(@D)/bin/python -m pip --disable-pip-version-check install "transformers==$*.*"
	touch $@

# Only the source distribution has tests, and of these only some: tools/hf_suite says what it lacks. SUITES chooses the
# environments.
SUITES = $(VENV) $(ENVIRONMENTS)
test-hf-suite: .venvs/suite/.ready $(ENVIRONMENTS:%=%/.ready)
	status=0; for env in $(SUITES); do \
		source=transformers-$$($$env/bin/python -c 'import transformers; print(transformers.__version__)'); \
		if [ ! -d .venvs/suite/$$source ]; then \
			$$env/bin/python -m pip --disable-pip-version-check download --quiet --no-deps --no-binary transformers \
				-d .venvs/suite "$$(echo $$source | sed s/-/==/)" && \
			tar -xzf .venvs/suite/$$source.tar.gz -C .venvs/suite || { status=1; continue; }; \
		fi; \
		echo "$$source"; \
		PYTHONPATH=src:.:.venvs/suite/packages $$env/bin/python -m tools.hf_suite .venvs/suite/$$source/tests || status=1; \
	done; exit $$status

.venvs/suite/.ready: | $(VENV)/.dev
	$(PIP) install --target $(@D)/packages parameterized psutil
	touch $@

# Ray is large (240 MB), so `make test` does without it. Replicas have processes of their own, which take the cores.
test-ray: $(VENV)/.ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ray --timeout 300

# A GPU machine often has a torch of its own and no network: the tests run there from source, uninstalled, and side by
# side if pytest-xdist is there (GPU_WORKERS processes; half an hour one by one). What measures time has the GPU to itself.
# Where time is short, TESTS names some of the files.
GPU_WORKERS = 8
TESTS = tests/gpu
PLUGINS = -p no:cacheprovider -p no:benchmark
test-gpu:
	PYTHONPATH=src:. OMP_NUM_THREADS=2 $(PYTHON) -m pytest $(TESTS) $(PLUGINS) -m "not alone" \
		$$($(PYTHON) -c 'import xdist; print("-n $(GPU_WORKERS) --dist worksteal")' 2> /dev/null)
	PYTHONPATH=src:. $(PYTHON) -m pytest $(TESTS) $(PLUGINS) -m alone || test $$? = 5  # there may be none

# The bindings ask the driver for functions it may not have; such refusals are no errors of ours.
sanitize:
	set -e; for tool in memcheck racecheck synccheck; do \
		PYTHONPATH=src:. compute-sanitizer --tool $$tool --report-api-errors no --kernel-regex kns=warpline \
			--error-exitcode 1 $(PYTHON) -m pytest tests/gpu/test_kernels.py tests/gpu/test_ladder.py --small -q -p no:cacheprovider; done
# initcheck has to see who wrote what: all kernels, a library's as well.
	PYTHONPATH=src:. compute-sanitizer --tool initcheck --report-api-errors no --error-exitcode 1 $(PYTHON) -m pytest \
		tests/gpu/test_persistent.py -k "(turing_path and fp16) or (test_window and 40) or (draws_what and params0)" -q -p no:cacheprovider
	PYTHONPATH=src:. compute-sanitizer --tool memcheck --report-api-errors no --kernel-regex kns=warpline --error-exitcode 1 \
		$(PYTHON) -m pytest tests/gpu/test_executors.py tests/gpu/test_persistent.py -k "test_window or draws_what or turing_path or (judged_right and n_layer)" -q -p no:cacheprovider

# On a machine without a GPU, in less than ten minutes: all methods at the reference workload, the fastest of each kind
# at the others. What there is no time for is named in the rows.
FASTEST_ON_CPU = warpline,warpline-int8,cpu,cpu-int8,hf-sdpa,ctranslate2-int8,ctranslate2,onnxruntime
bench-cpu: $(VENV)/.dev
	$(BIN)/warpline bench reference -m stories -m random:gpt2 --device cpu --repetitions 3 --minutes 2.2 --save results \
		--method $(FASTEST_ON_CPU),torch,hf-eager,static-kv,naive,static-kv-compile
	$(BIN)/warpline bench prefill decode batch throughput long coldstart memory -m stories --device cpu --repetitions 3 \
		--minutes 1.3 --save results --method $(FASTEST_ON_CPU)
	$(BIN)/warpline bench prefill decode batch throughput long coldstart memory -m random:gpt2 --device cpu --repetitions 3 \
		--minutes 4.8 --patience 120 --save results --method $(FASTEST_ON_CPU)

# On a GPU, with the python3 that has a CUDA torch, in half an hour, most of it torch.compile's: all methods at the
# reference workload, the strongest of each kind at the others.
STRONGEST_ON_GPU = warpline,static-kv-compile,static-kv-graph,graph,persistent,torch,hf-sdpa,hf-static-compile
bench-gpu:
	PYTHONPATH=src $(PYTHON) -m warpline bench reference --dtype fp16,fp32 --device cuda --save results
	PYTHONPATH=src $(PYTHON) -m warpline bench prefill decode batch throughput long coldstart memory --device cuda --save results \
		--method $(STRONGEST_ON_GPU)

# Other servers with OpenAI's API beside ours, on the same machine and with the same weights, in turns. llama-cpp-python is
# built from source (ten minutes on two cores); its source distribution has the script that converts the weights.
LLAMA = .venvs/servers/llama
bench-servers: .venvs/servers/.ready
	PYTHONPATH=src:. $(BIN)/python -m tools.servers .venvs/servers --save results

.venvs/servers/.ready: | $(VENV)/.dev
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install "transformers[serving]" torch gguf sentencepiece
	$(@D)/bin/python -m pip download --no-deps --no-binary llama-cpp-python -d $(@D) llama-cpp-python
	$(@D)/bin/python -m pip install "$$(echo $(@D)/llama_cpp_python-*.tar.gz)[server]"
	mkdir -p $(LLAMA) && tar -xzf $(@D)/llama_cpp_python-*.tar.gz -C $(LLAMA) --strip-components 1
	$(BIN)/warpline export random:gpt2 $(@D)/gpt2
	touch $@

# What each optimisation of a kernel buys, from naive to production.
ladder-gpu:
	PYTHONPATH=src $(PYTHON) -m warpline ladder all --save results

# On a GPU; `make readme` then makes the package's choices, the table and the picture of the new rows.
tune-gpu:
	PYTHONPATH=src $(PYTHON) -m warpline tune --save results

# Sessions for docs/profiling.md, from the naive model to the fastest; `make readme` then makes its tables. Methods share a
# process, because importing takes longer than recording; one that fails does not stop the others.
ON_CPU = naive torch hf-sdpa static-kv-compile cpu:fp32 cpu:int8
profile-cpu: $(VENV)/.dev
	status=0; for model in stories random:gpt2; do \
		$(BIN)/warpline profile $(ON_CPU) -m $$model --device cpu --context 64 --save results > /dev/null || status=1; done; \
		exit $$status

# Ours have a process of their own: what breaks a CUDA context takes no other's session with it.
OTHERS_ON_GPU = naive:fp32 hf-eager:fp32 naive torch hf-sdpa static-kv static-kv-graph static-kv-compile
OURS_ON_GPU = kernels graph persistent
profile-gpu:
	status=0; for methods in "$(OURS_ON_GPU)" "$(OTHERS_ON_GPU)"; do \
		PYTHONPATH=src $(PYTHON) -m warpline profile $$methods --device cuda --save results > /dev/null || status=1; done; \
		exit $$status

# Operators swapped, sixty of them: does a test notice? Hours on two cores; SEED=2 draws others.
SEED = 1
mutants: $(VENV)/.dev
	PYTHONPATH=src:. $(BIN)/python -m tools.mutants --seed $(SEED)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; else echo "hadolint is not here: Dockerfile unchecked"; fi

# Needs docker, and the network.
docker:
	docker build -t warpline .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: $(VENV)/.dev
	$(BIN)/python -m tools.readme

# A warning, such as a link to nowhere, is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "The site is in site/: open site/index.html, or call $(BIN)/python -m mkdocs serve"

clean:
	rm -rf $(VENV) .venvs site .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The stamps depend on pyproject.toml alone: an editable install needs no repetition when code changes.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "warpline needs Python 3.11 or newer: call make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "could not create $(VENV): install the venv module (Debian: apt install python3-venv)"; exit 1; }

$(VENV)/.core: pyproject.toml | $(BIN)/python
	@echo "Installing warpline into $(VENV) (once; torch is large)"
	$(PIP) install --progress-bar on -e .
	@touch $@

$(VENV)/.serve: pyproject.toml | $(BIN)/python
	@echo "Installing warpline and its server into $(VENV) (once; torch is large)"
	$(PIP) install --progress-bar on -e ".[serve]"
	@touch $@ $(VENV)/.core

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "Installing warpline and its development tools into $(VENV) (once)"
	$(PIP) install --progress-bar on -e ".[dev]"
	@touch $@ $(VENV)/.core $(VENV)/.serve $(VENV)/.docs

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	@echo "Installing warpline and what builds its documentation into $(VENV) (once)"
	$(PIP) install --progress-bar on -e ".[docs]"
	@touch $@ $(VENV)/.core

$(VENV)/.ray: $(VENV)/.dev
	@echo "Installing Ray into $(VENV) (once)"
	$(PIP) install --progress-bar on -e ".[dev,ray]"
	@touch $@
