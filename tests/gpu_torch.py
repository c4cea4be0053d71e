#!/usr/bin/env python3
"""One rank of a job whose tensors are PyTorch's, on the GPU: memory of its allocator, a part of an allocation, a stream of
its own, a graph that it captures. tests/gpu runs it: ddlrun -n 2 python3 tests/gpu_torch.py, with examples/python in
PYTHONPATH and libddl.so in DDL_PYTHON_LIBRARY. The last line of each rank says that all was right."""
import ctypes

import ddl
import torch

job = ddl.Context()
library, world = job._lib, ctypes.c_void_p(job._world)
library.ddl_group_stream.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]
everybody = job.size * (job.size + 1) / 2


def require(right, what):
    if not right:
        raise SystemExit(f"rank {job.rank}: {what}; ddl says: {library.ddl_error(job._context).decode()}")


def view(x):
    """The ddl_tensor of a contiguous tensor of f32 on GPU 0, which is ddl's device 1."""
    t = ddl.Tensor(x.data_ptr(), 3, 1, 1)
    t.shape[0], t.strides[0] = x.numel(), 1
    return t


def all_reduce(x):
    require(library.ddl_all_reduce(world, view(x), view(x), 1) == 0, "all_reduce failed")


def memory():
    whole = torch.full((1 << 20,), float(job.rank + 1), device="cuda")
    around = torch.full((1 << 24,), 7.0, device="cuda")
    part = around[12345:12345 + 1000003]
    part.fill_(job.rank + 1)
    torch.cuda.synchronize()
    all_reduce(whole)
    all_reduce(part)
    torch.cuda.synchronize()
    require((whole == everybody).all() and (part == everybody).all(), "a sum is wrong")
    require((around[:12345] == 7).all() and (around[12345 + 1000003:] == 7).all(), "what is beside a part was written")


def streams():
    stream = torch.cuda.Stream()
    require(library.ddl_group_stream(world, 1, stream.cuda_stream) == 0, "a stream was refused")
    with torch.cuda.stream(stream):
        x = torch.ones(3000001, device="cuda") * (job.rank + 1)
        for turn in range(20):  # after the first all ranks have the sum: divided and added again it stays
            x = x / job.size if turn else x
            all_reduce(x)
        wrong = (x - everybody).abs().max()
    stream.synchronize()
    require(wrong.item() <= 1e-3, f"off by {wrong.item()} on a stream")
    return stream


def graphs(stream):
    graph, x = torch.cuda.CUDAGraph(), torch.ones(100003, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        x.mul_(0.5)
        all_reduce(x)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    require((x == (0.5 * job.size) ** 10).all(), f"{x[0].item()} after ten replays")


torch.cuda.set_device(0)
memory()
graphs(streams())
library.ddl_group_stream(world, 1, None)
job.close()
print(f"rank {job.rank}: PyTorch's memory, streams and graphs are good", flush=True)
