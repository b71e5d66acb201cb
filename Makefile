# Every job sets itself up: the first call makes .venv, later calls install nothing.
#   make run          check and time every nvfp4_gemv variant that this machine can run, then its board
#   make test         the fast tests            make test-nightly  the slow ones (on a GPU: tools/on_gpu.py)
#   make test-system  the tests that need sshd, rsync, chromium or Ray; make setup-system installs these
#   make lint         ruff, types, imports      make board       compile what the records lack; render README's table
#   make size         how many lines each part has, beside its limit
#   make b200         on a B200: bring the kernels for sm100 up, step by step, and judge those that run
#   make bench        like run, on the GPU      make clean       remove .venv, builds and caches; records stay
PYTHON ?= python3
PROBLEM ?= nvfp4_gemv
VENV_PYTHON := .venv/bin/python
workers = $$($(VENV_PYTHON) -c "import xdist" 2>/dev/null && echo "-n 2 --dist $(1)")
# Packages come uncompiled (tools/setup.py): what an import compiles is kept, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup setup-system run test test-nightly test-system lint size bench b200 board clean
setup:
	@$(PYTHON) tools/setup.py

# Without an apt-get, install these programs with the package manager of the system; `make test-system` names them too.
setup-system: setup
	@PATH=$$PATH:/usr/sbin:/sbin; (for name in ssh sshd rsync chromium; do command -v $$name || exit 1; done) > /dev/null || \
	  { apt-get -q update; DEBIAN_FRONTEND=noninteractive apt-get -qy -o DPkg::Lock::Timeout=600 install \
	    --no-install-recommends openssh-client openssh-server rsync chromium; }
	@$(PYTHON) tools/setup.py cluster

# First the winner on one case, a minute's work, so that a result is there soon; then everything.
QUICK_nvfp4_gemv := m=7168 k=2048
QUICK_mhc_site := tokens=1 hidden=4096
QUICK_fmha_decode := batch=1 queries=1 heads=64 window=128 compressed=512
QUICK_fmha_prefill := tokens=512 heads=64
QUICK_indexer := batch=1 queries=1 heads=64 entries=8192 topk=512 kind=mxfp4
run: setup
	$(if $(QUICK_$(PROBLEM)),-$(VENV_PYTHON) harness/run.py $(PROBLEM) --case "$(QUICK_$(PROBLEM))")
	$(VENV_PYTHON) harness/run.py $(PROBLEM) --all || [ $$? = 6 ]  # 6: the machine was busy, and the board says so
	@$(VENV_PYTHON) leaderboard/report.py $(PROBLEM) --here

bench: setup
	$(VENV_PYTHON) harness/run.py $(PROBLEM) --all --mode leaderboard --device cuda
	@$(VENV_PYTHON) leaderboard/report.py $(PROBLEM) --here

b200: setup
	$(VENV_PYTHON) ptx_model/tools/bringup_sm100.py

board: setup
	$(VENV_PYTHON) leaderboard/report.py --readme README.md

# A file's tests all go to one worker: what they share, from a judgement to a model, is made once.
test: setup
	$(VENV_PYTHON) -m pytest -q $(call workers,loadfile --no-loadscope-reorder)

# Single tests take minutes, so they are shared out one by one; the longest are printed at the end.
test-nightly: setup
	$(VENV_PYTHON) -m pytest -q -m "slow and not gpu" --durations=25 $(call workers,worksteal)

# With REQUIRE_SYSTEM=1 a test fails where a program is missing, and is not skipped.
test-system: setup
	$(VENV_PYTHON) -m pytest -q -m "system and not slow" $(call workers,loadfile) tests/system

lint: setup
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m ty check --python $(VENV_PYTHON)
	$(dir $(VENV_PYTHON))lint-imports --no-cache --no-logo
	sh -n .ci/run
	$(PYTHON) tools/size.py

size:
	@$(PYTHON) tools/size.py

clean:
	rm -rf .venv .build .pytest_cache .ruff_cache .hypothesis
	find harness leaderboard problems ptx_model tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
