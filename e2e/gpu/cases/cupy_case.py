"""CuPy in a share: its memory ends where the quota does, and memory that was freed can be had again.
Argument: bytes of the share."""

import json
import sys

import cupy

QUOTA = int(sys.argv[1])
MIB = 1 << 20


def main():
    free, total = cupy.cuda.runtime.memGetInfo()
    figures = {"cupy": cupy.__version__, "free": free, "total": total}
    pool = cupy.get_default_memory_pool()
    rounds = []
    for _ in range(3):
        held = []
        try:
            while True:
                held.append(cupy.empty(64 * MIB, dtype=cupy.uint8))
        except cupy.cuda.memory.OutOfMemoryError:
            pass
        rounds.append(len(held) * 64 * MIB)
        del held
        pool.free_all_blocks()
    figures["got"] = rounds
    total_of_sum = int(cupy.arange(1000).sum())
    good = total == QUOTA and QUOTA // 2 < min(rounds) == max(rounds) <= QUOTA and total_of_sum == 499500
    return {"ok": good, "reason": "memory or a sum came out wrong", **figures}


try:
    said = main()
except Exception as error:  # the run wants a reason in a line
    said = {"ok": False, "reason": f"{type(error).__name__}: {error}", "cupy": cupy.__version__}
print(json.dumps(said))
