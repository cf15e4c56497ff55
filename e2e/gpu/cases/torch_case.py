"""PyTorch in a share: its memory ends where the quota does, refusals are PyTorch's own, and memory that was
freed can be had again. Arguments: bytes of the share, and native, expandable, async or graphs."""

import json
import sys

import torch

QUOTA = int(sys.argv[1])
HOW = sys.argv[2]
MIB = 1 << 20


def fill(step):
    """Tensors until PyTorch says no."""
    held = []
    while True:
        try:
            held.append(torch.empty(step, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            return held


def main():
    free, total = torch.cuda.mem_get_info()
    figures = {"torch": torch.__version__, "free": free, "total": total}
    if total != QUOTA:
        return {"ok": False, "reason": f"mem_get_info says {total} bytes", **figures}
    if HOW == "graphs":
        static = torch.zeros(1 << 20, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static += 1
        for _ in range(100):
            graph.replay()
        torch.cuda.synchronize()
        value = float(static[0])
        return {"ok": value == 100.0, "reason": f"the graph's result is {value}", **figures}
    rounds = []
    for _ in range(3):
        held = fill(64 * MIB)
        # What was got is memory: the last tensor can be written and read.
        held[-1].fill_(7)
        torch.cuda.synchronize()
        good = int(held[-1][-1]) == 7
        rounds.append(len(held) * 64 * MIB)
        del held
        torch.cuda.empty_cache()
    figures["got"] = rounds
    good = good and max(rounds) <= QUOTA and min(rounds) == max(rounds) and min(rounds) > QUOTA // 2
    result = torch.ones(1000, 1000, device="cuda") @ torch.ones(1000, 1000, device="cuda")
    good = good and float(result[0, 0]) == 1000.0
    return {"ok": good, "reason": "memory, its content or a product came out wrong", **figures}


try:
    said = main()
except Exception as error:  # the run wants a reason in a line
    said = {"ok": False, "reason": f"{type(error).__name__}: {error}", "torch": torch.__version__}
print(json.dumps(said))
