"""Resources that the attention kernels need of a GPU: registers, spills, shared memory. Runs without a GPU.

Triton compiles them for a compute capability (80: A100, 90: H100, 100: B200) with the settings of
`motet.attention.kernels.flash`;
NVIDIA's `cuobjdump`, which comes with Triton, tells what a program was given. A stack that is more than a few hundred
bytes means that sums wait in memory; shared memory must fit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # Read when Triton is imported: interpreted kernels cannot be compiled.

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.reporting import Report
from motet.attention.kernels import triton_kernels
from motet.attention.kernels.flash import settings_of

KERNELS = {
    "forward": (triton_kernels.forward_kernel, 1),
    "gradient of queries": (triton_kernels.query_gradient_kernel, 1),
    "gradients of keys and values": (triton_kernels.key_value_gradient_kernel, 2),
}
"""By name; and how many sums they hold."""
ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that one program may have."""
DATA = ("Q", "K", "V", "OUT", "D_OUT", "D_Q", "D_K", "D_V")
INTEGERS = ("LO", "HI", "POSITION", "KEY_CLASS", "TASKS", "COLUMNS", "ROWS")
SCALARS = {"num_queries": "i32", "num_keys": "i32", "scale": "fp32", "CLASSES_SEEN": "*i64"}
HEADS, KEY_HEADS = 32, 8


def type_of(name: str, dtype: str, settings: dict[str, int]) -> str:
    if name in settings:
        return "constexpr"
    if name in SCALARS:
        return SCALARS[name]
    if name in DATA:
        return f"*{dtype}"
    return "*i32" if name in INTEGERS else "*fp32"


def resources(name: str, dtype: str, head_dim: int, block: int, capability: int) -> dict[str, Any]:
    kernel, num_sums = KERNELS[name]
    settings = settings_of(HEADS, KEY_HEADS, head_dim, ELEMENT_SIZE[dtype], block, num_sums)
    options = {"num_warps": settings.pop("num_warps", 4)}
    signature = {argument: type_of(argument, dtype, settings) for argument in kernel.arg_names}
    places = {argument: place for place, argument in enumerate(kernel.arg_names)}
    aligned = {(places[a],): [["tt.divisibility", 16]] for a, kind in signature.items() if kind.startswith("*")}
    source = ASTSource(kernel, signature, {(places[key],): value for key, value in settings.items()}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = _usage(compiled.asm["cubin"])
    return {
        "kernel": name,
        "dtype": dtype,
        "head_dim": head_dim,
        "capability": capability,
        "warps": options["num_warps"],
        "registers": usage["REG"],
        "stack_bytes": usage["STACK"],
        "shared_bytes": compiled.metadata.shared,
        "fits": compiled.metadata.shared <= SHARED_BYTES[capability],
    }


def _usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pairs = (word.split(":") for word in text.split() if word.startswith(("REG:", "STACK:")))
    return {key: int(value) for key, value in pairs}


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90, 100], choices=list(SHARED_BYTES))
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"], choices=list(ELEMENT_SIZE))
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="of a head")
    parser.add_argument("--block", type=int, default=128, help="tokens of a tile's side")
    parser.add_argument("--json", action="store_true", help="print JSON and write no report")
    args = parser.parse_args(arguments)
    found = []
    for capability in args.capabilities:
        for dtype in args.dtypes:
            for dim in args.dims:
                for name in KERNELS:
                    found.append(resources(name, dtype, dim, args.block, capability))
                    print(found[-1], file=sys.stderr)
    if args.json:
        print(json.dumps(found))
        return found
    report = Report("attention-kernel-resources", "What the attention kernels need of a GPU")
    report.add(f"Triton {triton.__version__}, {HEADS} heads, {KEY_HEADS} key heads, blocks of {args.block} tokens.")
    report.table([key.replace("_", " ") for key in found[0]], [list(each.values()) for each in found])
    report.write()
    return found


if __name__ == "__main__":
    main()
