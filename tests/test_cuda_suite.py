#!/usr/bin/env python3
"""Whole jobs on "GPUs": what `make test-gpu` and `make bench-gpu` run on a GPU, over the stand-in for the driver (cuda_driver.c), with
the plugin's kernels compiled for a CPU. And what they say where there is no GPU."""
import csv
import ctypes
import os
import pathlib
import shutil

from harness import BUILD, ROOT, check, good, main, scratch, sh, skip, test

FOLDER = BUILD / "tests" / "cuda_suite"


def built():
    FOLDER.mkdir(parents=True, exist_ok=True)
    kernels, driver = FOLDER / "kernels.o", FOLDER / "driver.o"
    good("g++ -std=c++17 -O1 -w -fPIC -fno-strict-aliasing -ffp-contract=off -c -o", kernels, "tests/cuda_cpu.cc", timeout=300)
    good("gcc -std=c11 -g -w -fPIC -c -o", driver, "tests/cuda_driver.c")
    good("gcc -shared -Wl,-soname,libcuda.so.1 -o", FOLDER / "libcuda.so.1", kernels, driver, "-lstdc++ -lpthread -lm")
    good(["gcc", "-std=c11", "-g", "-O1", "-w", "-fPIC", "-shared", "-fvisibility=hidden", '-DCUDA_IMAGE="a stand-in"', "-o",
          FOLDER / "libddl-cuda.so", "plugins/cuda/cuda.c", "-lpthread", "-ldl"])
    good("gcc -std=c11 -O2 -D_GNU_SOURCE -DDDL__IMPLEMENTED -ffp-contract=off -I. -o", FOLDER / "halo", "examples/halo.c",
         BUILD / "libddl.a", "-lpthread -ldl", timeout=300)
    shutil.copy(BUILD / "train_gpt", FOLDER)
    shutil.copy(BUILD / "libddl-shm.so", FOLDER)
    for image in ("halo.ptx", "train_gpt.ptx", "cuda.fatbin"):
        (FOLDER / image).write_text("the stand-in takes any image")
    for program in ("cuda_faults", "cuda_messages", "cuda_ring", "cuda_fabric"):
        good("gcc -std=c11 -g -O1 -Wall -Wextra -Werror -Wno-unused-function -I. -Itests -o", FOLDER / program,
             f"tests/{program}.c", BUILD / "libddl.a", "-lpthread -ldl -lm", timeout=300)


def environment(**more):
    ours = {"LD_LIBRARY_PATH": str(FOLDER), "DDL_PLUGIN_PATH": str(FOLDER), "DDL_PLUGINS": "cuda", "GPU_SUITE_CASES": "3"}
    return {**os.environ, **ours, **more}


def run(program, folder=FOLDER, **more):
    return good(folder / program, env=environment(**more), timeout=400)


def gpu(*words, **more):
    """What `make test-gpu` and `make bench-gpu` run, with the stand-in, its plugin and images that it takes."""
    out = good("tests/gpu", *words, env=environment(GPU_FOLDER=str(FOLDER), GPU_SANITIZER="", **more), timeout=600)
    check("warning:" not in out, out)
    return out


@test
def test_gpu_over_the_stand_in():
    """The suite, the trainer against the bits of the host, the examples."""
    built()
    out = gpu("test")
    check("19 passed, 0 failed" in out and "16 passed, 0 failed, 0 skipped" in out, out)
    check("device 2: plugin cuda, GPU 1" in out and out.endswith("37 passed, 0 failed, 4 skipped\n"), out)


@test
def bench_gpu_over_the_stand_in():
    """Its figures mean nothing; each is there."""
    with scratch() as folder:
        gpu("bench", f"{folder}/gpu.md", GPU_BENCH_BYTES="4096", GPU_BENCH_KERNELS="1 1 1")
        text = pathlib.Path(folder, "gpu.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    for begin, count in (("| 8 |", 4), ("| 4096 |", 4), ("| 4096, call on a stream |", 4), ("| backward", 2), ("| all_to_all |", 6), ("| message |", 6), ("| f32 sum |", 1),
                         ("| Adam step", 2), ("| int8 encoder |", 1), ("| f32 transposed |", 1)):
        check(sum(row.startswith(begin) for row in rows) == count, f"not {count} of {begin}:\n{text}")
    check(" of 8 are reached" in text and "None" not in text, text)


@test
def streams_captures_and_gpus_apart():
    out = run("cuda_faults")
    check(" passed, 0 failed, 0 skipped" in out, out)


@test
def gpus_in_a_ring():
    """Four GPUs of which each reaches two others, and eight ranks of which two share one."""
    out = run("cuda_ring", STANDIN_GPUS="4", STANDIN_RING="1")
    check(" passed, 0 failed" in out, out)


@test
def messages_between_gpus():
    out = run("cuda_messages")
    check(" passed, 0 failed" in out, out)


@test
def gpus_inside_hosts_and_adapters_between():
    """CUDA IPC and FI_HMEM, each by its stand-in, in one job."""
    if sh(["sh", "-c", "echo '#include <rdma/fabric.h>' | gcc -E -o /dev/null -"]).returncode != 0:
        skip("libfabric's headers are not here")
    good("gcc -std=c11 -D_GNU_SOURCE -g -O1 -w -shared -fPIC -fvisibility=hidden -include tests/fabric_hmem.h -o",
         FOLDER / "libddl-fabric.so", "plugins/fabric/fabric.c -ldl")
    out = run("cuda_fabric", DDL_PLUGINS="cuda,fabric", DDL_TRANSPORTS="cuda,fabric:tcp", DDL_FABRIC_FORCE_MR="local")
    check(" passed, 0 failed" in out, out)


@test
def rows_of_a_grid_on_gpus():
    """examples/halo.c on the stand-in, whose kernels need no image but take one; and its sentence where there is no GPU."""
    env = environment()
    for ranks in (1, 2, 3):
        out = good(BUILD / "ddlrun", "-n", ranks, FOLDER / "halo", "--device cuda", env=env, timeout=120)
        check(f"{ranks} strips, 50 steps on GPUs: every cell is that of one process" in out, out)
    result = sh(FOLDER / "halo", "--device cuda")
    check(result.returncode == 1 and "halo: --device cuda cannot be used on rank 0: " in result.stdout, result.stdout)


def curve(folder):
    """Of each step the loss, the norm of the gradient, and the held-out loss where there is one."""
    with open(folder / "loss.csv") as file:
        return [float(r[k]) for r in csv.DictReader(file) for k in ("loss", "gradient_norm", "held_out_loss") if r[k]]


def alike(one, two):
    return len(one) == len(two) and all(abs(x - y) <= 1e-4 * abs(x) for x, y in zip(one, two))


@test
def a_gpt_on_gpus():
    """train_gpt on the stand-in: the losses and norms of gradients are those of the host, also after a checkpoint of a GPU."""
    program = FOLDER / "train_gpt"
    text = FOLDER / "text"
    text.write_bytes((ROOT / "src" / "api.h").read_bytes()[:3000])
    words = ["--data", text, *"--layers 1 --dim 48 --heads 3 --context 16 --steps 4 --warmup 1 --save 3 --eval 0".split(),
             *"--lr 0.03 --sample 5 --temperature 0".split()]
    env = environment()
    on_gpus = [program, *words, "--device", "cuda", "--fresh", "--out", FOLDER / "gpt-none"]
    (FOLDER / "train_gpt.ptx").unlink()
    result = sh(on_gpus, env=env)
    check(result.returncode == 1 and "rank 0: its kernels were not built: nvcc is needed" in result.stdout, result.stdout)
    (FOLDER / "train_gpt.ptx").write_text("the stand-in takes any image")
    local = "--batch 1 --strategy local-SGD --local 2"
    for name, ranks, on_host, on_gpu in (("one", 1, "--batch 4", "--batch 4"), ("local", 2, local, local),
                                         ("two", 2, "--batch 2", "--batch 1 --accumulate 2 --strategy WFBP-A2A")):
        folder, launched = FOLDER / f"gpt-{name}", [BUILD / "ddlrun", "-n", str(ranks), "--no-prefix"]
        told = good(launched, [program, *words], "--fresh", on_host, "--out", FOLDER / "gpt-host")
        out = good(launched, on_gpus, on_gpu, "--out", folder, env=env, timeout=200)
        host, gpu = curve(FOLDER / "gpt-host"), curve(folder)
        check("CUDA kernels" in out and len(host) == 9 and alike(host, gpu), f"{name}: {host} is not {gpu}\n{out}")
        check(told.splitlines()[-1] == out.splitlines()[-1], f"another sample: {told[-100:]} {out[-100:]}")
    (FOLDER / "gpt-one" / "checkpoint-00000004.gpt").unlink()
    good([program], words, "--resume --batch 4 --out", FOLDER / "gpt-one")
    check(alike(host, curve(FOLDER / "gpt-one")), f"resumed: {host} is not {curve(FOLDER / 'gpt-one')}")
    result = sh(on_gpus)
    check(result.returncode == 1 and "train_gpt: --device cuda cannot be used on rank 0: ddl finds no GPU" in result.stdout,
          result.stdout)


@test
def several_ranks_on_one():
    out = run("gpu_suite", BUILD / "tests", STANDIN_GPUS="1")
    check("19 passed, 0 failed" in out and "device 2:" not in out, out)


@test
def without_a_gpu_it_says_so():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        skip("this machine has an NVIDIA driver")
    for what in ("test", "bench"):
        result = sh("tests/gpu", what)
        check(result.returncode == 1, f"status {result.returncode}")
        check("There is no GPU that could be used here: " in result.stdout, result.stdout)
        check("1 skipped" in result.stdout or what == "bench", result.stdout)


main()
