#!/usr/bin/env python3
"""PyTorch's own kernels as a table, beside those of gpu_kernels: a copy, a sum of two arrays, one step of fused optimizers.
The same sizes (256 MiB of each array, or MiB as the argument), best of 7 blocks of 10 launches, and each byte counted that
has to be read or written once. It ends with 2 where there is no PyTorch with a GPU."""
import sys

try:
    import torch
except ImportError:
    sys.exit(2)
if not torch.cuda.is_available():
    sys.exit(2)

MIB = int(sys.argv[1]) if len(sys.argv) > 1 else 256
BYTES = MIB << 20


def best_s(launch):
    best = float("inf")
    for block in range(8):  # the first one loads the kernel
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(10):
            launch()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e-4) if block else best
    return best


def row(name, arrays, launch):
    s = best_s(launch)
    print(f"| {name} | {s * 1e6:.1f} | {arrays * BYTES / s * 1e-9:.0f} |", flush=True)


print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, arrays of {MIB} MiB\n")
print("| kernel | us | GB/s |\n|---|---|---|")
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    count = BYTES // torch.tensor([], dtype=dtype).element_size()
    a, b, c = (torch.randn(count, device="cuda").to(dtype) for _ in range(3))
    name = str(dtype).removeprefix("torch.")
    row(f"{name} copy", 2, lambda: a.copy_(b))
    row(f"{name} sum", 3, lambda: torch.add(b, c, out=a))
del a, b, c
w = torch.randn(BYTES // 4, device="cuda", requires_grad=True)
w.grad = torch.randn_like(w)
row("momentum step, fused", 5, torch.optim.SGD([w], lr=1e-3, momentum=0.9, fused=True).step)
row("AdamW step, fused", 7, torch.optim.AdamW([w], lr=1e-3, fused=True).step)
row("norm, whose square is the sum of squares", 1, lambda: torch.linalg.vector_norm(w))
