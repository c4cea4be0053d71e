#!/usr/bin/env python3
"""The source of the CUDA kernels, compiled for the CPU, gives the bits of the host's kernels (cuda_kernels.c), and native
collectives over them are right in any order of events (cuda_native.c)."""
import functools
import re

from harness import BUILD, ROOT, check, good, main, test

FOLDER = BUILD / "tests" / "cuda"
# Fused products would be rounded once instead of twice; kernels read their arrays as words of several types.
CPU_FLAGS = "-std=c++17 -O1 -g -Wall -Wextra -Werror -Wno-unknown-pragmas -fno-strict-aliasing -ffp-contract=off"
C_FLAGS = "-std=c11 -g -Wall -Wextra -Werror -Wno-unused-function -Wno-unused-const-variable -I. -Itests"


@functools.cache
def kernels():
    """The kernels as an object for the CPU, compiled once for all tests."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    good("g++", CPU_FLAGS, "-c tests/cuda_cpu.cc -o", FOLDER / "cuda_cpu.o", timeout=300)
    return FOLDER / "cuda_cpu.o"


def run(name):
    program = FOLDER / name
    good("gcc", C_FLAGS, f"tests/{name}.c", kernels(), "-o", program, "-lpthread -ldl -lm -lstdc++", timeout=300)
    check(", 0 failed" in good(program, timeout=300))


@test
def kernels_on_a_cpu_have_the_bits_of_the_host():
    run("cuda_kernels")


@test
def native_collectives_are_right_whatever_comes_first():
    run("cuda_native")


@test
def every_kernel_is_in_the_list():
    """A kernel that kernels.h does not name could neither be launched nor tested."""
    source = (ROOT / "plugins/cuda/kernels.cu").read_text()
    named = set(re.findall(r"\bX\((\w+), cuda_\w+_args\)", (ROOT / "plugins/cuda/kernels.h").read_text()))
    steps = set(re.findall(r"^CUDA_OPTIM\((\w+)\)", source, re.M))
    written = set(re.findall(r"CUDA_KERNEL ddl_k_(\w+)\(", source)) | steps | {s + "_f64" for s in steps}
    check({"exchange", "sgd", "top_write"} <= written, f"the source is not read right: {sorted(written)}")
    check(written <= named, f"not in kernels.h: {sorted(written - named)}")


main()
