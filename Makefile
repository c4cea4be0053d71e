# ddl needs no build system: copy ddl.h. This file makes what stands around it.
CC ?= cc
CFLAGS ?= -O2 -g
PREFIX ?= /usr/local
DESTDIR ?=
LIBDIR = $(PREFIX)/lib
PLUGINDIR = $(LIBDIR)/ddl
MANDIR = $(PREFIX)/share/man/man1
CMAKEDIR = $(LIBDIR)/cmake/ddl
B = build

WARN = -Wall -Wextra -Wpedantic -Wconversion -Wshadow
BASE = -std=c11 $(WARN) -I. $(CFLAGS) $(CPPFLAGS)
LIBS = -lpthread -ldl -lm

# What the tests and benchmarks use, all from Debian or Ubuntu.
DEPS = gcc g++ clang libc6-dev make cmake binutils python3 pkg-config valgrind strace procps iproute2 nftables spin \
       openmpi-bin libopenmpi-dev mpich libmpich-dev libgloo-dev libfabric-dev \
       qemu-system-x86 busybox-static rdma-core ibverbs-providers libfabric1 libfabric-bin cpio kmod util-linux xz-utils \
       python3-matplotlib python3-torch python3-yaml python3-jsonschema python3-numpy python3-pip libpmix-dev munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins

# For the part of the tests that runs on an emulated 64-bit Arm; where they cannot be had, it skips.
DEPS_ARM64 = gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user

ROOMS = $(wildcard src/*.h src/*/*.h)
TOOLS = $(patsubst tools/%.c,$B/%,$(wildcard tools/*.c))
SCRIPTS = $(filter-out %.c %.h %.md tools/install,$(wildcard tools/*))
EXAMPLES = $(patsubst examples/%.c,$B/%,$(wildcard examples/*.c))
# An example that is a folder: all its .c files make one program, named like the folder.
EXAMPLE_FOLDERS = $(addprefix $B/,$(sort $(foreach f,$(wildcard examples/*/*.c),$(word 2,$(subst /, ,$f)))))
PLUGINS = $(sort $(foreach f,$(wildcard plugins/*/*.c),$(word 2,$(subst /, ,$f))))
VERSION = $(shell sed -n 's/^\#define DDL_VERSION_[A-Z]* *//p' src/api.h | paste -sd.)

.PHONY: all help header tools plugins examples demo test test-arm64 test-gpu torture bench bench-gpu trace-cost plots timeline check deps install uninstall clean format
.DELETE_ON_ERROR:

all: header tools plugins examples

help:
	@echo 'make            ddl.h, tools, plugins and examples, into build/'
	@echo 'make demo       train a small GPT on two ranks; some minutes'
	@echo 'make deps       install what the tests need (Debian, Ubuntu)'
	@echo 'make test       all tests; make test T=ring for some'
	@echo 'make torture    the same, with the long runs'
	@echo 'make test-arm64 the part of them that runs on an emulated 64-bit Arm'
	@echo 'make test-gpu   the suite for GPUs, on the GPUs of this machine (docs/cuda.md)'
	@echo 'make bench-gpu  figures on GPUs, into bench/results/'
	@echo 'make bench      measure against other libraries, and draw it'
	@echo 'make plots      draw the figures of bench/results anew; make timeline: the one of docs/operations.md'
	@echo 'make check      the rules of the house: is ddl.h fresh, names, layers, docs'
	@echo 'make install    header, tools, plugins, man pages, ddl.pc, CMake package; PREFIX=/usr/local DESTDIR='
	@echo 'make uninstall  take them away again'
	@echo 'make clean      remove build/'

header: ddl.h
ddl.h: amalgamate.py LICENSE $(ROOMS)
	@if command -v python3 >/dev/null; then ./amalgamate.py; \
	else echo 'ddl.h is taken as it was committed: python3, which writes it anew, is not here'; fi

# Where plugins are installed is compiled in: the name of this file says for where build/ was made, and another PREFIX
# makes anew what depends on it.
PLACE = $B/place$(subst /,-,$(PLUGINDIR))
$(PLACE):
	@mkdir -p $B
	@rm -f $B/place-* && touch $@

# The implementation as an archive: the linker takes it for those programs that do not bring it themselves.
$B/ddl.o: ddl.h Makefile $(PLACE)
	@mkdir -p $B
	printf '#define DDL_IMPLEMENTATION\n#include "ddl.h"\n' > $B/ddl.c
	$(CC) $(BASE) -DDDL_PLUGIN_DIR='"$(PLUGINDIR)"' -c -o $@ $B/ddl.c
$B/libddl.a: $B/ddl.o
	rm -f $@.tmp && ar rcs $@.tmp $B/ddl.o && mv $@.tmp $@

tools: $(TOOLS) $(addprefix $B/,$(notdir $(SCRIPTS)))
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
# Kernels of examples are built where nvcc is, as PTX that the driver compiles; without FMA they have the host's bits.
EXAMPLE_KERNELS = $(if $(NVCC),$(patsubst examples/%.cu,$B/%.ptx,$(wildcard examples/*.cu)) \
    $(foreach f,$(EXAMPLE_FOLDERS),$(if $(wildcard examples/$(notdir $f)/*.cu),$f.ptx)))
examples: $(EXAMPLES) $(EXAMPLE_FOLDERS) $(EXAMPLE_KERNELS)
# Tools are installed, so they look for plugins where those are installed. ddl-info brings the whole implementation, whose
# private parts it uses: it needs no archive, and is compiled beside it.
TOOL_ARCHIVE = $(if $(filter-out $B/ddl-info,$@),$B/libddl.a)
$(filter-out $B/ddl-info,$(TOOLS)): $B/libddl.a
$(TOOLS): $B/%: tools/%.c ddl.h Makefile $(PLACE) $(wildcard tools/*.h)
	@mkdir -p $B
	$(CC) $(BASE) -DDDL_PLUGIN_DIR='"$(PLUGINDIR)"' -o $@ $< $(TOOL_ARCHIVE) $(LIBS)
$(addprefix $B/,$(notdir $(SCRIPTS))): $B/%: tools/%
	@mkdir -p $B
	install -m 755 $< $@
# Each example brings the whole implementation, for a reader's one line of cc. Here it is already there: it is said to be
# done, and the archive has it, which saves twenty seconds a program.
$(EXAMPLES): $B/%: examples/%.c $(wildcard examples/*.h) ddl.h $B/libddl.a
	$(CC) $(BASE) -DDDL__IMPLEMENTED -o $@ $< $B/libddl.a $(LIBS)
.SECONDEXPANSION:
$B/%.ptx: $$(wildcard examples/$$*.cu examples/$$*/*.cu) $$(wildcard examples/*.h examples/$$*/*.h)
	@mkdir -p $B
	$(NVCC) -std=c++17 -O3 -fmad=false -ptx -arch=compute_75 -o $@ $<
$(EXAMPLE_FOLDERS): $B/%: $$(wildcard examples/$$*/*.[ch]) $(wildcard examples/*.h) ddl.h $B/libddl.a
	$(CC) $(BASE) -DDDL__IMPLEMENTED -o $@ $(filter %.c,$^) $B/libddl.a $(LIBS)

# plugins/NAME/*.c -> build/libddl-NAME.so. plugins/NAME/flags holds extra words for the compiler ("-lfabric").
# A plugin whose libraries are not on this machine is left out, and said so. Its kernels for GPUs, plugins/NAME/*.cu, become
# a part of it: build/NAME.fatbin has machine code for each of CUDA_ARCHS that this nvcc knows, all made
# from the PTX of the first one, which is in it too: nothing here is for one architecture alone. Machine code for 8.0 is good
# for 8.6 and 8.9 as well, and so within each generation; PTX alone would not do for drivers older than the toolkit.
CUDA_ARCHS ?= 75 80 90 100
# The name of this file says for which of them build/ was made: others make the kernels anew, and what they are part of.
ARCHS = $B/archs$(subst $() $(),,$(CUDA_ARCHS:%=-%))
$(ARCHS):
	@mkdir -p $B
	@rm -f $B/archs-* && touch $@
CUDA_TOOLKIT = $(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1 \2/p' | awk '{print 1000 * $$1 + 10 * $$2}')
KERNELS = $(wildcard plugins/$*/*.cu)
# all_reduce of 8 B through shm takes 0.20 us so and 0.23 with -O2. Who gives CFLAGS says how to optimize.
OPTIMIZE_shm = -O3
PLUGIN_OPTIMIZE = $(if $(filter file,$(origin CFLAGS)),$(OPTIMIZE_$*))
plugins: $(patsubst %,$B/libddl-%.so,$(PLUGINS))
$B/libddl-%.so: $$(wildcard plugins/$$*/*) ddl.h $$(if $$(and $(NVCC),$$(KERNELS)),$B/$$*.fatbin)
	@mkdir -p $B
	@rm -f $@
	@flags="$(PLUGIN_OPTIMIZE) $$(cat plugins/$*/flags 2>/dev/null)$(if $(and $(NVCC),$(KERNELS)), -DCUDA_FATBIN=\"$B/$*.fatbin\" \
	    -DCUDA_TOOLKIT=$(CUDA_TOOLKIT))"; \
	if [ -n "$(KERNELS)" ] && [ -z "$(NVCC)" ]; then echo "plugin $* is left out: nvcc is not here" | tee $B/$*.missing; \
	elif $(CC) $(BASE) $$flags -E plugins/$*/*.c >/dev/null 2>$B/$*.missing; then \
	    set -x; $(CC) $(BASE) -fPIC -shared -fvisibility=hidden -o $@ plugins/$*/*.c $$flags $(LIBS); \
	else echo "plugin $* is left out: $$(grep -m1 error: $B/$*.missing)"; fi
$B/%.fatbin: plugins/%/*.cu $(ARCHS)
	@mkdir -p $B
	known="$$($(NVCC) --list-gpu-arch)"; for a in $(CUDA_ARCHS); do case "$$known" in *compute_$$a*) \
	    first=$${first:-$$a}; codes="$$codes,sm_$$a";; esac; done; \
	$(NVCC) -std=c++17 -fatbin -O3 --threads 0 -gencode "arch=compute_$$first,code=[compute_$$first$$codes]" \
	    -MD -MP -MF $@.d -o $@ $<
.SECONDARY: $(addsuffix .fatbin,$(addprefix $B/,$(PLUGINS)))
-include $(wildcard $B/*.fatbin.d)

demo: $B/ddlrun $B/train_gpt $B/libddl-shm.so
	$B/ddlrun -n 2 --no-prefix $B/train_gpt --fresh

test:
	tests/run $(T)

torture:
	tests/run --torture $(T)

# Its own programs, then the jobs of both processors; none is an error where the cross compiler or qemu is missing.
test-arm64:
	tests/run --variant arm64 $(T)
	tests/run test_arm64

test-gpu: all
	tests/gpu test

bench-gpu: all
	tests/gpu bench

# The exit status is that of compare: whether all floors are reached.
trace-cost: all
	$(CC) -std=c11 -O2 -I. -o $(B)/bench-trace bench/trace.c -lpthread -ldl
	for t in tcp shm; do echo "$$t"; DDL_TRANSPORTS=$$t $(B)/ddlrun -n 2 --no-prefix $(B)/bench-trace || exit 1; done

bench: all trace-cost
	bench/compare; reached=$$?; $(PLOT) && exit $$reached

# The Python that has matplotlib: the first in PATH, or Debian's. (No $(MAKE) plots above: make -n would run it all.)
PLOT = if python3 -c 'import matplotlib' 2>/dev/null; then bench/plot; else /usr/bin/python3 bench/plot; fi
plots:
	$(PLOT)

# The picture of docs/operations.md: the third step of four ranks.
timeline: $B/ddlrun $B/train_gpt $B/libddl-shm.so
	DDL_TRACE=$B/timeline.json $B/ddlrun -n 4 --no-prefix $B/train_gpt --fresh --steps 4 --batch 4 --sample 0 --eval 0 \
	    --save 0 --strategy DistributedDataParallel --bucket 256 --out $B/gpt-timeline
	tools/ddl-timeline $B/timeline.json --from forward:3 --to step:3 --show program,buckets,waits > $B/timeline.svg
	mv $B/timeline.svg docs/

check:
	./amalgamate.py --check

deps:
	@if [ "$$(id -u)" = 0 ]; then S=; else S=sudo; fi; export DEBIAN_FRONTEND=noninteractive; set -ex; \
	$$S apt-get update; \
	$$S apt-get install -y --no-install-recommends $(DEPS); \
	$$S apt-get install -y --no-install-recommends $(DEPS_ARM64) || echo 'tests on Arm will skip'; \
	python3 -m pip install --quiet --target $B/python kubernetes-validate || echo 'a test of manifests will skip'; \
	$$S apt-get install -y --no-install-recommends libclang-rt-$$(clang -dumpversion | cut -d. -f1)-dev

install: header tools plugins
	install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PLUGINDIR) $(DESTDIR)$(LIBDIR)/pkgconfig
	install -m 644 ddl.h $(DESTDIR)$(PREFIX)/include/
	for f in $(TOOLS) $(addprefix $B/,$(notdir $(SCRIPTS))); do install -m 755 $$f $(DESTDIR)$(PREFIX)/bin/; done
	for f in $(filter-out template,$(PLUGINS)); do \
	    if [ -e $B/libddl-$$f.so ]; then install -m 644 $B/libddl-$$f.so $(DESTDIR)$(PLUGINDIR)/; fi; done
	install -d $(DESTDIR)$(CMAKEDIR) $(DESTDIR)$(MANDIR)
	install -m 644 docs/man/*.1 $(DESTDIR)$(MANDIR)/
	for f in pkgconfig/ddl.pc cmake/ddl/ddl-config.cmake cmake/ddl/ddl-config-version.cmake; do \
	    sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|' tools/install/$${f##*/}.in > $(DESTDIR)$(LIBDIR)/$$f; done

uninstall:
	rm -f $(addprefix $(DESTDIR)$(MANDIR)/,$(notdir $(wildcard docs/man/*.1)))
	rm -f $(DESTDIR)$(PREFIX)/include/ddl.h $(DESTDIR)$(LIBDIR)/pkgconfig/ddl.pc
	rm -f $(DESTDIR)$(CMAKEDIR)/ddl-config.cmake $(DESTDIR)$(CMAKEDIR)/ddl-config-version.cmake
	-rmdir $(DESTDIR)$(CMAKEDIR) 2>/dev/null
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/bin/,$(notdir $(TOOLS) $(SCRIPTS)))
	rm -f $(patsubst %,$(DESTDIR)$(PLUGINDIR)/libddl-%.so,$(PLUGINS))
	-rmdir $(DESTDIR)$(PLUGINDIR) 2>/dev/null

clean:
	rm -rf $B

format:
	clang-format -i $(ROOMS) $(wildcard plugins/*/*.[ch] tools/*.[ch] examples/*.c examples/*/*.[ch] tests/*.[ch])
