"""Compile the kernels of Triton variants to machine code, without a GPU."""

import os
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from problems.common import build


def cubin(source: ASTSource, options: dict[str, int], stem: str, target: str) -> build.Artefact:
    """Write the kernel of `source` to build.directory() as a cubin whose name begins with `stem` and `target`.

    options: num_warps, num_stages. The artefact's log is ptxas' report. build.BuildError: ptxas refused the kernel.
    """
    arch = build.ARCH[target]
    capability = int(arch.removeprefix("sm_").removesuffix("a"))
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    build.directory().mkdir(parents=True, exist_ok=True)
    path = build.directory() / f"{stem}-{target}-{made.metadata.hash[:20]}.cubin"
    with tempfile.TemporaryDirectory(dir=build.directory(), prefix="tmp-") as scratch:
        Path(scratch, "ptx").write_text(made.asm["ptx"])
        Path(scratch, "cubin").write_bytes(made.asm["cubin"])
        command = ["ptxas", "-v", f"-arch={arch}", f"{scratch}/ptx", "-o", f"{scratch}/again"]
        report = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if report.returncode:
            raise build.BuildError(f"{' '.join(command)}\n{report.stdout}")
        os.replace(f"{scratch}/cubin", path)
    return build.Artefact(path, target, report.stdout)
