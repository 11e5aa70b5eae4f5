# train_gpt2: GPT-2 training in C and CUDA. `make train` and `make test` need only a compiler.
# Detected settings can be overridden: make CC=clang OMP= MARCH=-march=x86-64
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
unexport CDPATH    # otherwise cd in a script could change to another folder
# --- Detection ------------------------------------------------------------------------------------
# try(compiler and flags, libraries): yes if an empty program links. What few targets need,
# `X = $(eval X := ...)$(X)`, is tried once, at its first use.
on_path = $(shell command -v $(1) 2>/dev/null)
try = $(shell mkdir -p build && echo 'int main(void) { return 0; }' | \
        $(1) - -o build/try.$$$$ $(2) 2>/dev/null && echo yes; rm -f build/try.$$$$)
, := ,
is_default = $(filter default,$(origin $(1)))
CC := $(or $(if $(call is_default,CC),$(if $(call on_path,gcc),,$(call on_path,clang)),$(CC)),gcc)
CXX := $(if $(call is_default,CXX),$(if $(findstring clang,$(CC)),clang++,g++),$(CXX))
building := $(filter-out help clean deps,$(MAKECMDGOALS))
ifneq ($(if $(call on_path,$(firstword $(CC))),,$(building)),)
$(shell dev/deps.sh build >&2)
$(if $(call on_path,$(firstword $(CC))),,$(error $(CC) not found; `make deps` says what to install))
endif
MARCH := $(firstword $(foreach f,-march=native -mcpu=native,$(if $(call try,$(CC) $(f) -xc),$(f))))
OMP := $(if $(call try,$(CC) -fopenmp -include omp.h -x c),-fopenmp)
SAN = $(eval SAN := $(call try,$(CXX) -fsanitize=address -fsanitize=undefined -x c++))$(SAN)
# Adds the headers that Debian's gcc-multilib would link to: that package conflicts with ARM
# cross-compilers; gcc-12-multilib does not.
CC32 = $(CC) -m32 -msse2 -mfpmath=sse -idirafter /usr/include/$(shell $(CC) -print-multiarch)
M32 = $(eval M32 := $(call try,$(CC32) -include errno.h -x c,-lm))$(M32)
FUZZ_CC = $(firstword $(foreach c,clang clang-14,$(call on_path,$(c))) clang)
# If nvcc is a symbolic link, as in /usr/bin, its headers and the programs it calls are next to the
# link's target (unless that is ccache, which has another name). make would split a path
# with a space into two words, so such a toolkit is used through a link in build/. /usr/include is
# left out because the compiler searches it already; naming it again would hide the C library's
# headers from C++'s.
NVCC := $(shell nvcc=$$(command -v nvcc || echo /usr/local/cuda/bin/nvcc); \
          real=$$(readlink -f "$$nvcc"); case $$real in (*/nvcc) nvcc=$$real ;; esac; \
          case $$nvcc in (*' '*) mkdir -p build && ln -sfn "$${nvcc%/bin/nvcc}" build/cuda && \
          nvcc='$(CURDIR)/build/cuda/bin/nvcc' ;; esac; [ ! -x "$$nvcc" ] || echo "$$nvcc")
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(NVCC))
CUDA_INCLUDE := $(patsubst %,-isystem %,$(filter-out /usr/include,$(CUDA_HOME:%=%/include)))
CUDA_LIBRARIES := $(wildcard $(foreach h,$(filter-out /usr,$(CUDA_HOME)),$h/lib64 $h/targets/*/lib))
# Compute capabilities of the installed GPUs, if at least 75, the oldest nvcc 13 supports. 90a is
# sm_90 with its architecture-specific instructions; nvcc supports both since 12.0. nvidia-smi
# takes seconds, so it runs only if something is built.
GPU := $(if $(and $(NVCC),$(building)),$(sort $(shell nvidia-smi --query-gpu=compute_cap \
         --format=csv,noheader 2>/dev/null | grep -x '[0-9]*\.[0-9]' | tr -d . | awk '$$1>74')))
ARCH ?= $(patsubst 90,90a,$(GPU))
headers = $(call try,$(CXX) $(CUDA_INCLUDE) $(1:%=-include %.h) -x c++,$(2))
CUDA_HEADERS = $(eval CUDA_HEADERS := $(call headers,cublasLt cuda_bf16))$(CUDA_HEADERS)
NCCL = $(eval NCCL := $(and $(NVCC),$(call headers,nccl,-lnccl)))$(NCCL)
PROGRAM := $(if $(and $(NVCC),$(GPU),$(wildcard train_gpt2.cu)),train_gpt2cu,train_gpt2)
ifndef REPORTED
export REPORTED := yes
version := $(shell $(CC) -dumpfullversion 2>/dev/null || $(CC) -dumpversion 2>/dev/null)
$(info $(if $(version),✓ $(CC) $(version) $(MARCH)$(OMP:-fopenmp= · OpenMP),✗ $(CC): no compiler))
$(if $(OMP),,$(info ✗ OpenMP: one core only))
nvcc_version = $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
$(info $(if $(NVCC),✓ nvcc $(strip $(nvcc_version) $(ARCH:%=sm_%)),✗ nvcc: CPU only))
$(if $(and $(NVCC),$(building)),$(if $(GPU),,$(info ✗ GPU: none found (sm_75 or newer))))
$(if $(NVCC),$(info $(if $(NCCL),✓ NCCL,✗ NCCL: one GPU only)))
endif
# --- Flags ----------------------------------------------------------------------------------------
# Multiplications and additions are fused only in the matmul, and -Ofast is never used, so the same
# source gives the same bits. Exception: MARCH=-march=x86-64 has no fused multiply-add.
# Warnings stop the build only with WERROR=-Werror, as in `make test`: a warning from an untested
# compiler must not keep a user from building the program.
OPT := -O3 $(MARCH) -ffp-contract=off -fno-math-errno $(or $(OMP),-Wno-unknown-pragmas)
OPT += -pthread -Wall -Wextra -Wundef $(WERROR)
C := $(CC) -std=c11 $(OPT) -Wc++-compat
# AROUND: for programs that include train_gpt2.c. CPP: g++ warns about C's partial initializers.
AROUND := -Wno-unused-function
CPP := $(CXX) -std=c++17 $(OPT) -Wno-missing-field-initializers $(AROUND) -x c++
# Keeping only line tables and dropping checks that duplicate ASan's halves the compile time.
ASAN := -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all \
        -fno-sanitize=null,object-size,vptr
NO_HEADERS = $@ needs CUDA's headers: a toolkit, or the wheels dev/cuda_cpu/cuda_runtime.h names
CUDA_ON_CPU = $(if $(CUDA_HEADERS),,$(error $(NO_HEADERS)))$(CPP) -O2 -Idev/cuda_cpu $(CUDA_INCLUDE)
NV1 := $(NVCC) -std=c++17 -O3 -fmad=false $(if $(filter -Werror,$(WERROR)),-Werror all-warnings)
# If no GPU is found: sm_80, plus PTX, which the driver of a newer GPU compiles at start-up.
NV := $(NV1) -lineinfo $(foreach a,$(or $(ARCH),80),-gencode arch=compute_$(a),code=sm_$(a)) \
      $(if $(ARCH),,-gencode arch=compute_80,code=compute_80) \
      $(CUDA_LIBRARIES:%=-Xlinker -rpath,%) \
      -Xcompiler "$(filter-out -Wundef,$(OPT)) -Wno-missing-field-initializers $(AROUND)"
WITH_NCCL = $(if $(NCCL),-DGPT2_NCCL=1 -lnccl)
# DEPEND: records the headers that a program includes, for the next build.
DEPEND = -MMD -MP -MF build/$(@F).d -MT $@
# VARIANT: flags that follow from the target's name. Test builds put gaps and poison in the arena.
# Two of them compile for longer than they run, so -O1 is faster in all.
VARIANT = $(if $(filter build/test_gpt2%,$@),-DTEST_CUDA=$(if $(findstring cu,$@),1,0)) \
          $(if $(filter build/test_gpt2% build/train_gpt2%,$@),-DGPT2_POISON=1) \
          $(if $(filter %test_gpt2cu_cpu %test_gpt2_double,$@),-O1) \
          $(if $(findstring double,$@),-DGPT2_DOUBLE=1) $(if $(findstring asan,$@),$(ASAN)) \
          $(if $(findstring avx2,$@),-march=x86-64 -mavx2 -mfma)
# --- Targets --------------------------------------------------------------------------------------
# These can also be built without the prefix build/.
PROGRAMS := test_gpt2 test_gpt2_double test_gpt2_asan test_gpt2_avx2 test_cuda_cpu test_gpt2cu_cpu \
            test_gpt2cu_cpu_asan test_cuda_cpu_asan test/data test/data_asan test_gpt2cu \
            train_gpt2_asan
.PHONY: help train test one page fuzz check_torch data style install \
        deps clean FORCE some_data $(PROGRAMS)
help: ## this list
	@awk -F':.*## ' '/^[a-z0-9_\/]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile

# Changing the compiler or a flag rebuilds everything that depends on these two files. WERROR is
# left out because it does not affect the result.
all_flags = $(filter-out -Werror all-warnings $(WERROR),$(C) $(CPP) \
              $(if $(filter %/gpu,$@),$(NV) $(WITH_NCCL),$(NV1)))
build/flags build/gpu: FORCE
	@mkdir -p build; echo '$(all_flags)' | cmp -s - $@ || echo '$(all_flags)' > $@
# Building a program also prepares data if there is none, and says so on one line; a failure adds a
# second line and is ignored. `make train` uses whatever data exists; `make data` tries again.
EMPTY_DATA := $(if $(wildcard data/*.bin)$(filter train data,$(MAKECMDGOALS)),,some_data)
some_data:
	@echo "no data in data/ yet: preparing tinyshakespeare, or stories if there is no network"
	@mkdir -p build; $(MAKE) -s data 2> build/data.log || \
	echo "no data yet ($$(grep -v '^make\|^ ' build/data.log | tail -n 1)): make data tries again"
train_gpt2: train_gpt2.c build/flags | $(EMPTY_DATA) ## the CPU program
	$(C) $(DEPEND) $< -o $@ -lm
data/tokenize: data/tokenize.c build/flags ## text to token shards
data/stories: data/stories.c build/flags
data/tokenize data/stories:
	part=$@.$$$$.part; $(C) $(AROUND) $(DEPEND) $< -o $$part -lm && mv $$part $@
# Test drivers run the programs as child processes, so -O1 is enough for their own code.
build_test = mkdir -p $(@D) && $(CPP) -O1 $(VARIANT) $(DEPEND) $< -o $@ -lm
build/test/%_asan: dev/test/%.cpp build/flags | data/stories data/tokenize ; $(build_test)
build/test/%: dev/test/%.cpp build/flags | data/stories data/tokenize ; $(build_test)
build/train_gpt2_asan build/train_gpt2_double: train_gpt2.c build/flags
FUZZ := fuzz fuzz_tokenize
REPLAY := fuzz_replay fuzz_tokenize_replay
$(addprefix build/,$(FUZZ) $(REPLAY)): FUZZ_PROGRAM = \
    -DFUZZ_PROGRAM=$(if $(findstring tokenize,$@),1,0)
$(REPLAY:%=build/%): VARIANT = -DFUZZ_REPLAY=1 $(if $(SAN),$(ASAN)) $(FUZZ_PROGRAM)
$(addprefix build/,$(FUZZ) $(REPLAY)): dev/test/fuzz.c build/flags
$(addprefix build/,train_gpt2_asan train_gpt2_double fuzz_replay fuzz_tokenize_replay):
	$(C) $(AROUND) $(DEPEND) -pthread $< $(VARIANT) -o $@ -lm
build/fuzz build/fuzz_tokenize: FUZZ_CC += -std=c11
$(FUZZ:%=build/%):
	$(FUZZ_CC) $(filter-out -O3 -fopenmp,$(OPT)) -Wno-unknown-pragmas $(AROUND) \
	    $(FUZZ_PROGRAM) $(subst -O1,-O2,$(ASAN)) -fsanitize=fuzzer $(DEPEND) $< -o $@ -lm
# A 32-bit build, for tests of the plan. x87 arithmetic would round the forecast differently.
build/plan_32: train_gpt2.c build/flags
	$(CC32) $(filter-out $(CC) -O3 $(MARCH) $(OMP),$(C)) -Wno-unknown-pragmas -O1 $(DEPEND) $< \
	-o $@ -lm
$(PROGRAMS): %: build/%
build/test_gpt2 build/test_gpt2_double build/test_gpt2_asan build/test_gpt2_avx2: \
    test_gpt2.cu build/flags
	$(CPP) $(VARIANT) $(DEPEND) $< -o $@ -lm
train_gpt2cu: train_gpt2.cu build/gpu | $(EMPTY_DATA) ## the GPU program (for ARCH="80 90a")
build/test_gpt2cu: test_gpt2.cu build/flags build/gpu
build/bench: dev/check/bench.cu build/gpu
train_gpt2cu build/test_gpt2cu build/bench:
	@NVCC='$(NVCC)' dev/deps.sh cuda
	$(if $(ARCH),,@echo 'No GPU found: $@ is built for sm_80 and newer;' \
	    'ARCH="89 90a" selects other GPUs, ARCH=75 a T4 or RTX 20.')
	$(NV) $(VARIANT) $(DEPEND) $< -o $@ -lcublasLt $(WITH_NCCL)
# The GPU program and its tools, emulated on the CPU. The benchmark only shows that it runs.
train_gpt2cu_cpu: train_gpt2.cu build/flags | $(EMPTY_DATA) ## the GPU program, emulated on the CPU
build/train_gpt2cu_cpu_asan: train_gpt2.cu build/flags
build/test_gpt2cu_cpu build/test_gpt2cu_cpu_asan: test_gpt2.cu build/flags
build/test_cuda_cpu build/test_cuda_cpu_asan: dev/cuda_cpu/test_cuda_cpu.cpp build/flags
build/bench_cuda_cpu: dev/check/bench.cu build/flags
train_gpt2cu_cpu $(addprefix build/,train_gpt2cu_cpu_asan test_gpt2cu_cpu test_gpt2cu_cpu_asan \
test_cuda_cpu test_cuda_cpu_asan bench_cuda_cpu):
	$(CUDA_ON_CPU) $(VARIANT) $(DEPEND) $< -o $@ -lm
BOOK := train_gpt2.c $(addprefix data/,files.c tokens.c weights.c checkpoint.c)
build/sm_%.log: train_gpt2.cu $(BOOK) build/flags
	@[ "$(NVCC)" ] && $(NVCC) --version | tail -n 2 > $@
	$(NV1) -cubin -Xptxas -v -gencode arch=compute_$*,code=sm_$* $< -o $@.cubin 2>> $@ || \
	{ cat $@ >&2; false; }
# Each program as a single file: lines that include the project's files are replaced by these.
one: build/train_gpt2_one.c build/train_gpt2_one.cu ## each program as one file, to copy
build/train_gpt2_one.c build/train_gpt2_one.cu: build/train_gpt2_one.%: train_gpt2.% $(BOOK)
	@mkdir -p build
	awk 'function paste(file,  line, part) { while ((getline line < file) > 0) \
	if (line ~ /^#include "/) { split(line, part, "\""); paste(part[2]) } else print line } \
	BEGIN { paste("$<") }' > $@
# The memory plan as a web page: the CPU program compiled to WebAssembly, pasted into one file that
# needs no server. emcc's own scripts need Debian's copy of acorn, regardless of which node is used.
EMCC := $(call on_path,emcc)
build/page/plan.js: dev/page/plan.c build/flags
	$(if $(EMCC),,$(error make page needs emcc: apt install emscripten))@mkdir -p $(@D)
	NODE_PATH=/usr/share/nodejs $(EMCC) -std=c11 -O2 -ffp-contract=off -Wall -Wextra -Wundef \
	-Wno-unknown-pragmas $(AROUND) $(DEPEND) $< -o $@ -sMODULARIZE -sEXPORT_NAME=train_gpt2 \
	-sENVIRONMENT=worker -sALLOW_MEMORY_GROWTH -sEXIT_RUNTIME=1 -sEXPORTED_RUNTIME_METHODS=FS
build/plan.html: dev/page/plan.html build/page/plan.js
	base64 build/page/plan.wasm > build/page/plan.wasm.txt
	sed -e '/^@@plan.js@@$$/{r build/page/plan.js' -e 'd}' \
	    -e '/^@@plan.wasm@@$$/{r build/page/plan.wasm.txt' -e 'd}' $< > $@
page: build/plan.html ## the memory plan as a web page, build/plan.html
data: data/tokenize data/stories ## tinyshakespeare (or else generated stories) as token shards
	@data/prepare.sh

TRAIN_DATA := $(if $(wildcard data/*_bpe_train.bin),,data)
train: $(PROGRAM) $(TRAIN_DATA) ## build, prepare data, train a small GPT-2, print samples
	@dev/train.sh $(PROGRAM)

FOUND = CC='$(CC)' CXX='$(CXX)' MARCH='$(MARCH)' OMP='$(OMP)' MAKE='$(MAKE)' SAN='$(SAN)' \
        M32='$(M32)' NVCC='$(NVCC)' CUDA_INCLUDE='$(CUDA_INCLUDE)' \
        CUDA_HEADERS='$(CUDA_HEADERS)' GPU='$(GPU)'
# Scripts that themselves run make share this make's job slots; with make -n they are only printed.
SHARED := $(if $(findstring n,$(filter-out -%,$(firstword $(MAKEFLAGS)))),,+)
test: ## build and run the tests; ALL=1 adds sanitizers, other GPUs and compilers
	@dev/deps.sh test $(if $(filter-out 0 main,$(ALL)$(FULL)),lint)
	$(SHARED)@WERROR='$(or $(WERROR),-Werror)' $(FOUND) dev/test.sh
fuzz: $(FUZZ:%=build/%) ## fuzz each reader, FUZZ_SECONDS=60
	@dev/test/fuzz.sh $(or $(FUZZ_SECONDS),60)
check_torch: train_gpt2 ## compare with transformers; the script says what PYTHON needs
	$(or $(PYTHON),python3) dev/check/against_torch.py
style: ## layout, warnings and lint of the sources
	$(SHARED)@$(FOUND) dev/style.sh
PREFIX ?= /usr/local
INSTALL_TO := $(DESTDIR)$(PREFIX)
from_help = @mkdir -p '$(INSTALL_TO)/$(dir $2)' && ./$(PROGRAM) --help all | \
            awk -v to=$1 -v name=$(PROGRAM) -v version="$$(./$(PROGRAM) --version | head -n 1)" \
            -f dev/page/help.awk > '$(INSTALL_TO)/$2'
install: $(PROGRAM) data/tokenize ## programs, manual page and bash completion, in PREFIX=/usr/local
	install -D $(PROGRAM) '$(INSTALL_TO)/bin/$(PROGRAM)'
	install data/tokenize '$(INSTALL_TO)/bin/train_gpt2_tokenize'
	install dev/report.py '$(INSTALL_TO)/bin/train_gpt2_report'
	$(call from_help,man,share/man/man1/$(PROGRAM).1)
	$(call from_help,bash,share/bash-completion/completions/$(PROGRAM))
deps: ## install, or name, the packages that tests need
	@dev/deps.sh build test lint
clean: ## remove everything built; data/*.bin and runs/ stay
	rm -rf build train_gpt2 train_gpt2cu train_gpt2cu_cpu data/tokenize data/stories
-include $(wildcard build/*.d)
