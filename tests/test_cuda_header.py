#!/usr/bin/env python3
"""What plugins/cuda/driver.h declares anew is what the toolkit's cuda.h says: values, sizes, places of members, parameters.
And what the toolkit has compiled is there for each architecture that the Makefile names."""
import pathlib
import re
import shutil
import struct

from harness import BUILD, ROOT, check, good, main, scratch, skip, test

DRIVER = (ROOT / "plugins/cuda/driver.h").read_text()
MEMBERS = ["CUmemAllocationProp, type", "CUmemAllocationProp, requestedHandleTypes", "CUmemAllocationProp, location",
           "CUmemAllocationProp, win32HandleMetaData", "CUmemAllocationProp, allocFlags", "CUmemAccessDesc, location",
           "CUmemAccessDesc, flags", "CUmemLocation, type", "CUmemLocation, id"]


NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"


def toolkit():
    folder = pathlib.Path(NVCC).resolve().parent.parent / "include"
    if not (folder / "cuda.h").exists():
        skip("no CUDA toolkit is installed: cuda.h is not here")
    return folder


def printed(header, folders):
    """All constants and sizes, as a program that includes this header prints them."""
    constants = sorted(set(re.findall(r"\b(CU(?:DA_(?:SUCCESS|ERROR)|_)\w+) = ", DRIVER)) | {"CUDA_SUCCESS"})
    types = sorted(set(re.findall(r"^(?:typedef .*\b|\} )(CU\w+);", DRIVER, re.M)))
    check(len(constants) > 50 and len(types) > 10, f"driver.h is not read right: {constants} {types}")
    lines = [f'printf("{c} %lld\\n", (long long){c});' for c in constants]
    lines += [f'printf("{t} %zu\\n", sizeof({t}));' for t in types]
    lines += [f'printf("{m} %zu\\n", offsetof({m}));' for m in MEMBERS]
    with scratch() as folder:
        source = pathlib.Path(folder, "print.c")
        source.write_text(f"#include <stddef.h>\n#include <stdio.h>\n#include {header}\nint main(void) {{\n" + "\n".join(lines) + "\nreturn 0;\n}\n")
        good("gcc -std=c11 -w -o", f"{folder}/print", source, *(f"-I{f}" for f in folders), "-ldl")
        return good(f"{folder}/print").splitlines()


@test
def constants_and_sizes_agree():
    here, there = printed(f'"{ROOT}/plugins/cuda/driver.h"', []), printed("<cuda.h>", [toolkit()])
    differ = [f"{a} here, {b} there" for a, b in zip(here, there) if a != b]
    check(not differ and len(here) == len(there), "\n".join(differ))


def parameter_sizes(text):
    """Of each function: how many parameters, and which are pointers."""
    return [("*" in p or p.strip().endswith("]")) for p in text.split(",")] if text.strip() not in ("", "void") else []


@test
def functions_have_the_toolkits_parameters():
    header = (toolkit() / "cuda.h").read_text(errors="replace")
    names = dict(re.findall(r"^\s*#define\s+(cu\w+)\s+(cu\w+_v\d)\s*$", header, re.M))
    names.update(re.findall(r"^\s*#define\s+(cu\w+)\s+__CUDA_API_PT[DS][SZ]\((cu\w+)\)\s*$", header, re.M))
    declared = re.findall(r"F\((cu\w+), (cu\w+),\s*\((.*?)\)\)", re.sub(r"\\\n", " ", DRIVER), re.S)
    check(len(declared) > 50, f"driver.h is not read right: {len(declared)} functions")
    for member, symbol, parameters in declared:
        check(symbol == member or re.fullmatch(member + r"_v\d", symbol), f"{member} is looked up as {symbol}")
        found = re.search(rf"^CUresult CUDAAPI {member}\((.*?)\);", header, re.M | re.S)
        check(found, f"cuda.h has no {member}")
        check(names.get(member, member) == symbol or member == "cuDeviceGetUuid", f"cuda.h says {names.get(member, member)}, driver.h {symbol}")
        theirs = re.sub(r"CUhostFn|CUdevice_attribute|CUpointer_attribute", "int", found[1])
        check(parameter_sizes(parameters) == parameter_sizes(theirs), f"{member}: ({parameters}) here, ({found[1]}) there")


def images(fatbin):
    """Of a file that nvcc -fatbin wrote, [(1: PTX or 2: machine code, architecture)]: a head of magic number, version, its own
    size and that of what follows; then images, each after a head of kind, version, sizes of head and image, and more."""
    data = fatbin.read_bytes()
    magic, _, at, size = struct.unpack_from("<IHHQ", data)
    check(magic == 0xBA55ED50 and at + size == len(data), f"{fatbin} is no fatbin: {data[:16].hex()}")
    found = []
    while at < len(data):
        kind, _, head, size = struct.unpack_from("<HHIQ", data, at)
        found.append((kind, struct.unpack_from("<I", data, at + 28)[0]))
        at += head + size
    return found


@test
def the_kernels_are_there_for_every_architecture():
    if not pathlib.Path(NVCC).exists():
        skip("nvcc is not installed")
    wanted = [int(a) for a in re.search(r"^CUDA_ARCHS \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()]
    known = [int(a) for a in re.findall(r"compute_(\d+)\b", good([NVCC, "--list-gpu-arch"]))]
    built = [a for a in wanted if a in known]
    found = images(BUILD / "cuda.fatbin")
    check(len(built) > 1 and found == [(1, built[0])] + [(2, a) for a in built], f"{found} of {wanted}; nvcc knows {known}")


def kernels_of(text, begin):
    """What belongs to each kernel: {name: the text from its beginning to that of the next}."""
    parts = re.split(begin + r"ddl_k_(\w+)", text)
    return dict(zip(parts[1::2], parts[2::2]))


@test
def hot_kernels_move_16_bytes_at_once_and_keep_values_in_registers():
    """In PTX, which is the same for all architectures: two sources of four words each, at once, and no load that may be older
    than a store (.nc), as a destination may be a source. In machine code for 9.0: nothing spills."""
    if not pathlib.Path(NVCC).exists():
        skip("nvcc is not installed")
    listed = (ROOT / "plugins/cuda/kernels.h").read_text()
    types = re.findall(r"CUDA_(?:FLOAT|PAIR)_KERNELS\(X, (\w+)\)", listed) + ["u8", "u32", "u64"]
    with scratch() as folder:
        good([NVCC, "-std=c++17", "-O3", "-ptx", "-arch=compute_75", "-o", f"{folder}/k.ptx", "plugins/cuda/kernels.cu"], timeout=300)
        text = pathlib.Path(folder, "k.ptx").read_text()
        told = good([pathlib.Path(NVCC).with_name("ptxas"), "-O3", "-v", "-arch=sm_90", "-o", f"{folder}/k.cubin", f"{folder}/k.ptx"],
                    timeout=300)
    ptx, used = kernels_of(text, r"\.entry "), kernels_of(told, "Function properties for ")
    reductions = [k for k in ptx if re.fullmatch("(" + "|".join(types) + r")_(sum|prod|min|max|land|lor|lxor|min_index|max_index)", k)]
    reductions += ["bits_band", "bits_bor", "bits_bxor"]
    check(len(ptx) > 120 and len(reductions) > 50, f"not read right: {sorted(ptx)}")
    for name in reductions:
        loads, stores = (len(re.findall(rf"\b{what}\.global\.v4\.", ptx[name])) for what in ("ld", "st"))
        check(loads >= 8 and stores >= 4, f"{name}: {loads} loads and {stores} stores of 16 bytes")
    for name, loads, stores in (("sgd", 2, 1), ("momentum", 3, 2), ("adam", 4, 3), ("lars", 3, 2), ("lamb", 3, 1)):
        found = [len(re.findall(rf"\b{what}\.global\.v4\.", ptx[name])) for what in ("ld", "st")]
        check(found[0] >= loads and found[1] >= stores, f"{name}: {found}")
    check(".global.nc" not in text and "ld.volatile" not in text, "a load that the kernels do not ask for")
    check(".local" not in text, "an array is in local memory")
    hot = reductions + ["sgd", "momentum", "nesterov", "adam", "lars", "lamb", "lamb_moments", "squares", "squares_total", "exchange"]
    hot += [f"{way}_{code}" for way in ("encode", "decode") for code in ("f16", "bf16", "bits8", "bits4", "bits1")]
    for name in hot + [k for k in ptx if k.startswith("top_") or k.endswith("_scaled")]:
        check(" 0 bytes spill stores, 0 bytes spill loads" in used[name], f"{name}: {used[name][:200]}")


main()
