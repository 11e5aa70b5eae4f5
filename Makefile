# train_gpt2: GPT-2 training in C and CUDA. `make train` and `make test` need only a compiler.
# What is found out about the machine can be overruled: make CC=clang OMP= MARCH=-march=x86-64
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
# --- What this machine has. try(compiler and flags, libraries): does an empty program link? -------
on_path = $(shell command -v $(1) 2>/dev/null)
try = $(shell mkdir -p build && echo 'int main(void) { return 0; }' | \
        $(1) - -o build/try.$$$$ $(2) 2>/dev/null && echo yes; rm -f build/try.$$$$)
is_default = $(filter default,$(origin $(1)))
CC := $(if $(call is_default,CC),$(if $(call on_path,gcc),,$(call on_path,clang)),$(CC))
CC := $(or $(CC),gcc)
CXX := $(if $(call is_default,CXX),$(if $(findstring clang,$(CC)),clang++,g++),$(CXX))
ifneq ($(if $(call on_path,$(firstword $(CC))),,$(filter-out help clean deps,$(MAKECMDGOALS))),)
$(shell dev/deps.sh build >&2)
$(if $(call on_path,$(firstword $(CC))),,$(error $(CC) is not there; `make deps` says what is))
endif
MARCH := $(firstword $(foreach f,-march=native -mcpu=native,$(if $(call try,$(CC) $(f) -xc),$(f))))
OMP := $(if $(call try,$(CC) -fopenmp -include omp.h -x c),-fopenmp)
SAN = $(call try,$(CXX) -fsanitize=address -fsanitize=undefined -x c++)
DNNL = $(if $(call try,$(CC) -include dnnl.h -x c,-ldnnl),-ldnnl)
FUZZ_CC = $(firstword $(foreach c,clang clang-14,$(call on_path,$(c))) clang)
NVCC := $(or $(call on_path,nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(NVCC))
# Compute capabilities of the GPUs here, without the dot; 90a is sm_90 with its own instructions.
GPU := $(sort $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
         grep -x '[0-9]*\.[0-9]' | tr -d .))
ARCH ?= $(patsubst 90,90a,$(GPU))
CUDA_INCLUDE := $(if $(NVCC),-isystem $(CUDA_HOME)/include)
CUDA_HEADERS = $(call try,$(CXX) $(CUDA_INCLUDE) -include cublasLt.h -include cuda_bf16.h -x c++)
NCCL := $(and $(NVCC),$(call try,$(CXX) -I$(CUDA_HOME)/include -include nccl.h -x c++,-lnccl))
PROGRAM := $(if $(and $(NVCC),$(GPU),$(wildcard train_gpt2.cu)),train_gpt2cu,train_gpt2)
ifndef REPORTED
export REPORTED := yes
version := $(shell $(CC) -dumpfullversion 2>/dev/null || $(CC) -dumpversion 2>/dev/null)
$(info $(if $(version),✓ $(CC) $(version) $(MARCH)$(OMP:-fopenmp= · OpenMP),✗ $(CC): no compiler))
$(if $(OMP),,$(info ✗ OpenMP: one core only))
nvcc_version = $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
$(info $(if $(NVCC),✓ nvcc $(strip $(nvcc_version) $(ARCH:%=sm_%)),✗ nvcc: CPU only))
$(if $(NVCC),$(if $(GPU),,$(info ✗ GPU: none seen)))
$(if $(NVCC),$(info $(if $(NCCL),✓ NCCL,✗ NCCL: one GPU only)))
endif
# --- Flags. No contraction outside the matmul, never -Ofast: one source, one set of bits ----------
OPT := -O3 $(MARCH) -ffp-contract=off -fno-math-errno $(or $(OMP),-Wno-unknown-pragmas)
OPT += -Wall -Wextra -Wundef $(or $(WERROR),-Werror)
C := $(CC) -std=c11 $(OPT) -Wc++-compat
# No file around Volume I uses all its functions; C++ rejects partial designated initialisers.
AROUND := -Wno-unused-function
CPP := $(CXX) -std=c++17 $(OPT) -Wno-missing-field-initializers $(AROUND) -x c++
ASAN := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
NO_HEADERS = $@ needs CUDA's headers: a toolkit, or the wheels dev/cuda_cpu/cuda_runtime.h names
CUDA_ON_CPU = $(if $(CUDA_HEADERS),,$(error $(NO_HEADERS)))$(CPP) -O2 -Idev/cuda_cpu $(CUDA_INCLUDE)
NV1 := $(NVCC) -std=c++17 -O3 -fmad=false -Werror all-warnings
NV := $(NV1) $(foreach a,$(ARCH),-gencode arch=compute_$(a),code=sm_$(a)) \
      -Xcompiler "$(filter-out -Wundef,$(OPT)) -Wno-missing-field-initializers $(AROUND)"
DEPEND = -MMD -MP -MF build/$(@F).d -MT $@
# --- Targets --------------------------------------------------------------------------------------
PROGRAMS := test_gpt2 test_gpt2_double test_gpt2_asan train_gpt2_asan bench_cpu test_cuda_cpu \
            test_gpt2cu_cpu test_gpt2cu_cpu_asan test_gpt2cu
PROGRAMS += test_cuda_cpu_asan cuda_example
.PHONY: help train test one fuzz bench bench_packages check_torch data style deps clean FORCE \
        $(PROGRAMS)
help: ## this list
	@sed -n 's/^\([a-z0-9_/]*\):.*## */\1|/p' Makefile | \
	awk -F'|' '{ printf "  make %-17s %s\n", $$1, $$2 }'

# A changed compiler or flag builds again whatever depends on this file.
all_flags = $(C) $(CPP) $(if $(filter %/gpu,$@),$(NV),$(NV1))
build/flags build/gpu: FORCE
	@mkdir -p build; echo '$(all_flags)' | cmp -s - $@ || echo '$(all_flags)' > $@
EMPTY_DATA := $(if $(wildcard data/*.bin),,data)
train_gpt2: train_gpt2.c build/flags | $(EMPTY_DATA) ## the CPU program
	$(C) $(DEPEND) $< -o $@ -lm
data/tokenize: data/tokenize.c build/flags ## text to token shards
	$(filter-out $(OMP),$(C)) -Wno-unknown-pragmas $(AROUND) $(DEPEND) -pthread $< -o $@ -lm
build/dump: dev/dump.c build/flags
build/bench_files: dev/bench_files.c build/flags
build/dump build/bench_files:
	$(C) $(AROUND) $(DEPEND) -pthread $< -o $@ -lm
# What tests build has gaps and poison in its arena.
build/test_gpt2_double build/train_gpt2_double: VARIANT := -DGPT2_DOUBLE=1
build/test_gpt2_asan build/train_gpt2_asan: VARIANT := $(ASAN)
build/train_gpt2_asan build/train_gpt2_double: train_gpt2.c build/flags
	$(C) -DGPT2_POISON=1 $(VARIANT) $(DEPEND) $< -o $@ -lm
build/test_gpt2 build/test_gpt2_double build/test_gpt2_asan: test_gpt2.cu build/flags
	$(CPP) -DTEST_CUDA=0 -DGPT2_POISON=1 $(VARIANT) $(DEPEND) $< -o $@ -lm
# What drives the programs from outside, and formats: it takes no time of its own.
build/test/%_asan: VARIANT := $(ASAN)
build_test = mkdir -p $(@D) && $(CPP) -O1 $(VARIANT) $(DEPEND) $< -o $@ -lm
build/test/%_asan: dev/test/%.cpp build/flags ; $(build_test)
build/test/%: dev/test/%.cpp build/flags ; $(build_test)
build/fuzz: dev/fuzz/fuzz.c build/flags
	$(FUZZ_CC) -std=c11 $(filter-out -O3 -fopenmp,$(OPT)) -Wno-unknown-pragmas $(AROUND) \
	    $(subst -O1,-O2,$(ASAN)) -fsanitize=fuzzer $(DEPEND) $< -o $@ -lm
build/fuzz_replay: dev/fuzz/fuzz.c build/flags
	$(C) $(AROUND) $(if $(SAN),$(ASAN)) -DFUZZ_REPLAY=1 $(DEPEND) $< -o $@ -lm
bench_packages: ; @dev/deps.sh bench
build/bench_cpu: dev/bench_cpu.c build/flags | bench_packages
	$(C) $(AROUND) -DBENCH_DNNL=$(if $(DNNL),1,0) $(DEPEND) $< -o $@ $(DNNL) -lm
$(PROGRAMS): %: build/%
CUDA_TESTS := build/test_gpt2cu build/test_gpt2cu_cpu build/test_gpt2cu_cpu_asan
$(CUDA_TESTS): VARIANT = -DTEST_CUDA=1 -DGPT2_POISON=1 $(if $(findstring asan,$@),$(ASAN))
$(CUDA_TESTS): test_gpt2.cu build/flags
build/test_cuda_cpu: dev/cuda_cpu/test_cuda_cpu.cpp build/flags
build/test_gpt2cu: build/gpu
train_gpt2cu: train_gpt2.cu build/gpu | $(EMPTY_DATA) ## the GPU program (for ARCH="80 90a")
train_gpt2cu build/test_gpt2cu:
	@dev/deps.sh cuda
	$(if $(ARCH),,$(error nvidia-smi shows no GPU: name one, as in make $@ ARCH=80))
	$(NV) $(VARIANT) $(DEPEND) $< -o $@ -lcublas -lcublasLt $(NCCL:yes=-lnccl)
train_gpt2cu_cpu: train_gpt2.cu build/flags | $(EMPTY_DATA) ## the same without a GPU
build/train_gpt2cu_cpu_asan: VARIANT := -DGPT2_POISON=1 $(ASAN)
build/train_gpt2cu_cpu_asan: train_gpt2.cu build/flags
train_gpt2cu_cpu build/train_gpt2cu_cpu_asan $(filter-out %cu,$(CUDA_TESTS)) build/test_cuda_cpu:
	$(CUDA_ON_CPU) $(VARIANT) $(DEPEND) $< -o $@ -lm
# The CPU layer's own test where a sanitizer sees the planted bugs first, and its example.
build/test_cuda_cpu_asan: VARIANT := $(ASAN)
build/test_cuda_cpu_asan: dev/cuda_cpu/test_cuda_cpu.cpp build/flags
build/cuda_example: dev/cuda_cpu/example.cu build/flags
build/test_cuda_cpu_asan build/cuda_example:
	$(CUDA_ON_CPU) $(VARIANT) $(DEPEND) $< -o $@ -lm
# One GPU's kernels alone, and what ptxas says of each: registers, spills.
build/sm_%.log: train_gpt2.cu train_gpt2.c data/formats.c build/flags
	$(NV1) -cubin -Xptxas -v -gencode arch=compute_$*,code=sm_$* $< -o $@.cubin 2> $@ || \
	{ cat $@ >&2; false; }
# Each program as a single file: the line that includes the file before it is replaced by that file.
one: build/train_gpt2_one.c build/train_gpt2_one.cu ## each program as one file, to copy
build/train_gpt2_one.c: train_gpt2.c data/formats.c
build/train_gpt2_one.cu: train_gpt2.cu build/train_gpt2_one.c
build/train_gpt2_one.c build/train_gpt2_one.cu:
	@mkdir -p build
	sed -e '/^#include "/{r $(word 2,$^)' -e 'd}' $< > $@
data: data/tokenize ## tinyshakespeare as tokens
	@data/prepare.sh

# The small model of `make train`: these settings reach the validation loss stated below.
RECIPE := -e l4h4c128t64 -b 12 -x 2000 -l 3e-3 -u 100 --beta2 0.99 -v 500 -m 0 -s 500
train: $(PROGRAM) data ## build for this machine, prepare data, train a small GPT-2, print samples
	@set -e; text=tinyshakespeare_bytes; [ -f data/$${text}_train.bin ] || text=sources_bytes; \
	set -- ./$(PROGRAM) -i data/$${text}_train.bin -j data/$${text}_val.bin $(RECIPE); \
	printf '\n$$ %s\n' "$$*"; "$$@"; echo; \
	[ $$text = sources_bytes ] || echo 'Expected: a validation loss of 1.88 or less.'; \
	echo 'Next: ./$(PROGRAM) --help lists the options; -x 5000 trains longer; -o runs/one keeps it;'; \
	echo '      -e d12 --plan shows what GPT-2 needs; data/tokenize --help: a text of yours.'

test: ## check the style, build and run every test that this machine can run
	@MAKE='$(MAKE)' CC='$(CC)' CXX='$(CXX)' SAN='$(SAN)' NVCC='$(NVCC)' \
	CUDA_INCLUDE='$(CUDA_INCLUDE)' CUDA_HEADERS='$(CUDA_HEADERS)' GPU='$(GPU)' dev/test.sh
fuzz: build/fuzz build/fuzz_replay train_gpt2 data/tokenize ## readers, FUZZ_SECONDS=60 each
	@dev/fuzz/run.sh $(or $(FUZZ_SECONDS),60)
bench: build/bench_cpu build/bench_files ## matmul and step against oneDNN, files against dd
	./build/bench_cpu
	./build/bench_files
check_torch: build/dump train_gpt2 ## against transformers; the script says what PYTHON needs
	$(or $(PYTHON),python3) dev/check_torch.py
style: ## layout, warnings and lint of the sources
	@CC='$(CC)' CXX='$(CXX)' MARCH='$(MARCH)' OMP='$(OMP)' MAKE='$(MAKE)' \
	CUDA_INCLUDE='$(CUDA_INCLUDE)' CUDA_HEADERS='$(CUDA_HEADERS)' dev/style.sh
deps: ## install, or name, what tests and benchmarks need
	@dev/deps.sh build test bench
clean: ## remove what was built; data/*.bin and runs/ stay
	rm -rf build train_gpt2 train_gpt2cu train_gpt2cu_cpu data/tokenize
-include $(wildcard build/*.d)
