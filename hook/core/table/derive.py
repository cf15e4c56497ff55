#!/usr/bin/env python3
"""Prints the CUDA rows of hook/core/src/table.rs for the symbols in symbols.txt, from NVIDIA's headers.

    pip download --no-deps nvidia-cuda-runtime && unzip -q nvidia_cuda_runtime-*.whl -d headers
    hook/core/table/derive.py headers/nvidia/cu13/include

A caller of cuGetProcAddress names a function, a CUDA version and stream flags; cudaTypedefs.h has one
PFN_<name>_v<since>[_ptds|_ptsz] for every answer there is, and cuda.h one prototype for every exported
symbol. Symbols of one function are ordered by their _vN suffix, answers by since: the n-th belongs to the
n-th. Only these facts are taken; the run stops where the counts differ.
"""
import pathlib
import re
import sys

include = pathlib.Path(sys.argv[1])
wanted = (pathlib.Path(__file__).parent / "symbols.txt").read_text().split()

answers = {}
for base, since, stream in re.findall(
    r"\bPFN_(cu\w+?)_v(\d{4,5})(?:_(ptsz|ptds))?\)", (include / "cudaTypedefs.h").read_text()
):
    answers.setdefault((base, bool(stream)), set()).add(int(since))

header = (include / "cuda.h").read_text()
exported = set(re.findall(r"\bCUDAAPI\s+(cu\w+)\s*\(", header))
# The unsuffixed prototypes stand for the newest symbol, and for the per-thread one where a macro says so.
for macro, body in re.findall(r"#\s*define\s+(cu\w+)\s+([^\n]+)", header):
    exported.update(re.findall(r"\bcu\w+", body) if "__CUDA_API" not in body else [])
    for kind, inner in re.findall(r"__CUDA_API_(PTDS|PTSZ)\((cu\w+)\)", body):
        exported.update({inner, inner + "_" + kind.lower()})


def version(symbol, base):
    suffix = re.fullmatch(re.escape(base) + r"(?:_v(\d))?(?:_pt[ds][sz])?", symbol)
    return int(suffix.group(1) or 1)


for symbol in wanted:
    base = re.sub(r"(_v\d)?(_ptds|_ptsz)?$", "", symbol)
    thread = symbol.endswith(("_ptds", "_ptsz"))
    family = sorted(
        (
            s
            for s in exported
            if re.fullmatch(re.escape(base) + r"(_v\d)?(_ptds|_ptsz)?", s) and s.endswith(("_ptds", "_ptsz")) == thread
        ),
        key=lambda s: version(s, base),
    )
    since = sorted(answers.get((base, thread), []))
    if symbol not in family or len(family) != len(since):
        sys.exit(f"{symbol}: exported {family}, answered since {since}")
    kind = "thread" if thread else "legacy"
    print(f'            {symbol}, "{base}", {since[family.index(symbol)]}, {kind};')
