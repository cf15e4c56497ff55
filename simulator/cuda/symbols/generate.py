#!/usr/bin/env python3
"""Derives symbols.csv, the facts that the resolver of the libcuda stand-in is built from.

Refresh it (network: PyPI only; nothing of the headers themselves is committed):

    dir=$(mktemp -d); cd "$dir"
    pip download --no-deps nvidia-cuda-runtime nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-runtime-cu11==11.8.89
    for w in *.whl; do unzip -qo "$w" -d "${w%%-*}"; done
    python3 <repository>/simulator/cuda/symbols/generate.py $(find . -name include -path '*nvidia*' -type d) \
        > <repository>/simulator/cuda/symbols/symbols.csv

What is read: `PFN_<name>_v<since>[_ptds|_ptsz]` of cudaTypedefs.h (what a caller asks cuGetProcAddress for) and the
prototypes of cuda.h as the compiler sees them under __CUDA_API_VERSION_INTERNAL (the ELF names); likewise for the
graphics interoperability headers, with empty files in place of the graphics headers they include. Both lists have
the same length, and per base name and per stream flavour the ascending `since` belong to the ascending `_vN`; that
pairing is checked against the prototypes' argument lists, and any disagreement between two headers stops the script.
The profiler's prototypes are not in these packages: its three functions have one version each and so no suffix.

Columns: name (base name), since (lowest cudaVersion that is answered with this symbol), flavour (legacy, ptds, ptsz),
elf (exported symbol), header (oldest of the given headers, as CUDA_VERSION, that has it),
part (core for cuda.h, else the header's subject).
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict


PARTS = {"core": "", "gl": "GL", "egl": "EGL", "vdpau": "VDPAU"}


def preprocess(include, header):
    """The header's text after the C preprocessor, as one line."""
    with tempfile.TemporaryDirectory() as empty:
        for name in ("GL/gl.h", "EGL/egl.h", "EGL/eglext.h", "vdpau/vdpau.h"):
            os.makedirs(os.path.dirname(f"{empty}/{name}"), exist_ok=True)
            open(f"{empty}/{name}", "w").close()
        command = ["gcc", "-E", "-P", "-I", include, "-I", empty, "-D__CUDA_API_VERSION_INTERNAL", f"{include}/{header}"]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return re.sub(r"\s+", " ", out)


def arguments(text):
    """Number of arguments and, per argument, whether it is a pointer: enough to tell two ABIs apart."""
    text = text.strip()
    if text in ("", "void"):
        return ()
    return tuple("*" if "*" in part else "v" for part in text.split(","))


def elf_version(elf):
    """`cuMemAlloc_v2_ptds` -> (`cuMemAlloc`, 2, `ptds`)."""
    flavour = "legacy"
    for candidate in ("ptds", "ptsz"):
        if elf.endswith("_" + candidate):
            elf, flavour = elf[: -len(candidate) - 1], candidate
    found = re.fullmatch(r"(.*?)_v(\d+)", elf)
    return (found[1], int(found[2]), flavour) if found else (elf, 1, flavour)


def read(include):
    """CUDA_VERSION and the rows of one set of headers."""
    version = int(re.search(r"#define CUDA_VERSION (\d+)", open(f"{include}/cuda.h").read())[1])
    rows = {}
    for part, name in PARTS.items():
        rows |= {elf: (*row, part) for elf, row in pair(include, name, rows.keys()).items()}
    profiler = open(f"{include}/cudaProfilerTypedefs.h").read()
    for name, since in re.findall(r"\*PFN_(cuProfiler\w*?)_v(\d+)\)", profiler):
        rows[name] = (name, int(since), "legacy", name, "profiler")
    return version, rows


def pair(include, part, known):
    """ELF symbol -> (name, since, flavour, ELF symbol) of `cuda<part>.h`, less the symbols that are known already."""
    text = preprocess(include, f"cuda{part}.h")
    prototypes = {
        m[1]: arguments(m[2]) for m in re.finditer(r"CUresult (?:CUDAAPI )?(cu[A-Z]\w*)\(([^()]*(?:\([^()]*\)[^()]*)*)\);", text)
    }
    prototypes = {elf: found for elf, found in prototypes.items() if elf not in known}
    missing = set(re.findall(r"\b(cu[A-Z]\w*)\(", text)) - prototypes.keys() - known
    if missing:
        sys.exit(f"{include} {part}: no prototype for {sorted(missing)}")

    typedefs = preprocess(include, f"cuda{part}Typedefs.h")
    asked, exported = defaultdict(set), defaultdict(list)
    for m in re.finditer(r"\*PFN_(cu[A-Z]\w*?)_v(\d+)(?:_(ptds|ptsz))?\)\(([^;]*)\);", typedefs):
        asked[m[1], m[3] or "legacy"].add((int(m[2]), arguments(m[4])))
    for elf in prototypes:
        base, generation, flavour = elf_version(elf)
        exported[base, flavour].append((generation, elf))

    if asked.keys() != exported.keys():
        sys.exit(f"{include} {part}: names differ: {sorted(asked.keys() ^ exported.keys())}")
    rows = {}
    for (base, flavour), versions in asked.items():
        versions, symbols = sorted(versions), sorted(exported[base, flavour])
        if len(versions) != len(symbols):
            sys.exit(f"{include} {part}: {base} {flavour}: {versions} against {symbols}")
        for (since, wanted), (_, elf) in zip(versions, symbols):
            if wanted != prototypes[elf]:
                sys.exit(f"{include} {part}: {elf} since {since}: arguments differ: {wanted} {prototypes[elf]}")
            rows[elf] = (base, since, flavour, elf)
    return rows


def main():
    merged = {}
    for version, rows in sorted(read(include) for include in sys.argv[1:]):
        for elf, row in rows.items():
            if elf in merged and merged[elf][:5] != row:
                sys.exit(f"{elf}: {merged[elf]} in an older header, {row} in {version}")
            merged.setdefault(elf, (*row, version))
    print("name,since,flavour,elf,part,header")
    for row in sorted(merged.values()):
        print(",".join(map(str, row)))


main()
