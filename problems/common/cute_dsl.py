"""Share code between CuTe DSL variants: PTX instructions, pointer arguments, and machine code without a GPU."""

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cutlass import Float32, Int16, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_ptr
from cutlass.cutlass_dsl import T, dsl_user_op

from problems.common import build

# ---------------------------------------------------------------- instructions


@dsl_user_op
def prmt(low: Int32, high: Int32, selector: Int32, *, loc=None, ip=None) -> Int32:
    """Return the 4 bytes that the low 4 nibbles of `selector` name: 0 to 3 of `low`, 4 to 7 of `high`.

    A nibble with bit 3 set gives the sign bit of the byte that it names, eight times.
    """
    values = [Int32(v).ir_value(loc=loc, ip=ip) for v in (low, high, selector)]
    return Int32(llvm.inline_asm(T.i32(), values, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", loc=loc, ip=ip))


@dsl_user_op
def mul_bf16x2(a: Int32, b: Int32, *, loc=None, ip=None) -> Int32:
    """Return the products of two bf16 pairs. Subnormal factors and products are kept."""
    values = [Int32(v).ir_value(loc=loc, ip=ip) for v in (a, b)]
    return Int32(llvm.inline_asm(T.i32(), values, "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", loc=loc, ip=ip))


@dsl_user_op
def pack_bf16x2(low: Float32, high: Float32, *, loc=None, ip=None) -> Int32:
    """Return two floats as a pair of bf16, rounded to nearest."""
    values = [Float32(v).ir_value(loc=loc, ip=ip) for v in (high, low)]
    return Int32(llvm.inline_asm(T.i32(), values, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", loc=loc, ip=ip))


@dsl_user_op
def bits_to_float(bits: Int32, *, loc=None, ip=None) -> Float32:
    """Return the float whose bits are `bits`."""
    return Float32(llvm.bitcast(T.f32(), Int32(bits).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def float_to_bits(value: Float32, *, loc=None, ip=None) -> Int32:
    """Return the bits of `value`."""
    return Int32(llvm.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def e4m3_pair(pair: Int16, *, loc=None, ip=None) -> tuple[Float32, Float32]:
    """Return the e4m3 values in the low and the high byte of `pair`, exactly; a NaN stays one."""
    text = """{
        .reg .b32 both;
        .reg .b16 low, high;
        cvt.rn.f16x2.e4m3x2 both, $2;
        mov.b32 {low, high}, both;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $1, high;
    }"""
    result = llvm.StructType.get_literal([T.f32(), T.f32()])
    both = llvm.inline_asm(result, [Int16(pair).ir_value(loc=loc, ip=ip)], text, "=f,=f,h", loc=loc, ip=ip)
    return tuple(Float32(llvm.extractvalue(T.f32(), both, [i], loc=loc, ip=ip)) for i in range(2))


@dsl_user_op
def load_no_allocate(address: Int64, *, loc=None, ip=None) -> tuple[Int32, ...]:
    """Load the 4 words at `address` in global memory and keep them out of L1, because nothing reads them again."""
    text = "ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];"
    result = llvm.StructType.get_literal([T.i32()] * 4)
    values = [Int64(address).ir_value(loc=loc, ip=ip)]
    words = llvm.inline_asm(result, values, text, "=r,=r,=r,=r,l", has_side_effects=True, loc=loc, ip=ip)
    return tuple(Int32(llvm.extractvalue(T.i32(), words, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def prefetch_l2(address: Int64, *, loc=None, ip=None) -> None:
    """Ask L2 for the line at `address` in global memory; nothing waits for it."""
    values = [Int64(address).ir_value(loc=loc, ip=ip)]
    llvm.inline_asm(None, values, "prefetch.global.L2 [$0];", "l", has_side_effects=True, loc=loc, ip=ip)


# ---------------------------------------------------------------- tensors and arguments


def vector(tensor: cute.Tensor, words: int, what: str) -> cute.Tensor:
    """Return `tensor` itself. ValueError, while tracing, unless it is `words` neighbouring words at an address that one
    access of 4 * words bytes may use: a slice through the wrong mode, or a stride that breaks the alignment, is
    otherwise right on some shapes and slow or wrong on others.
    """
    known = all(isinstance(extent, int) for extent in (*tensor.shape, *tensor.stride))
    if not known or tensor.shape != (words,) or tensor.stride != (1,):
        raise ValueError(f"{what} must be a slice of {words} words of stride 1, got {tensor.shape}:{tensor.stride}")
    if tensor.iterator.alignment % (4 * words):
        raise ValueError(f"{what} must be aligned to {4 * words} bytes, got {tensor.iterator.alignment}")
    return tensor


def pointers(views: Iterable[tuple[type, int]], addresses: Iterable[int]) -> list[cute.Pointer]:
    """Return a launch's pointer arguments, in its order. views: dtype and alignment in bytes of each; addresses: on
    the device.
    """
    memory = cute.AddressSpace.gmem
    return [make_ptr(dtype, at, memory, align) for (dtype, align), at in zip(views, addresses, strict=True)]


# ---------------------------------------------------------------- machine code


def check_target(target: str, targets: tuple[str, ...]) -> None:
    """ValueError unless `target` is one of `targets`. RuntimeError unless CUTE_DSL_ARCH, which the DSL reads when it is
    first imported, names the architecture of `target`.
    """
    if target not in targets:
        raise ValueError(f"target must be one of {targets}, got {target!r}")
    if os.environ.get("CUTE_DSL_ARCH") != build.ARCH[target]:
        raise RuntimeError(
            f"CUTE_DSL_ARCH must be {build.ARCH[target]!r} before cutlass is imported, "
            f"got {os.environ.get('CUTE_DSL_ARCH')!r}"
        )


def cubin(compiled: Callable[[str], Any], stem: str, target: str) -> build.Artefact:
    """Write what `compiled(options)`, a call of cute.compile, makes to build.directory() as a cubin named `stem`.

    The artefact's log is ptxas' report on its kernels. build.BuildError: the DSL kept no cubin or no report.
    """
    build.directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build.directory(), prefix="tmp-") as scratch:
        report = io.StringIO()
        options = f"--keep-cubin --keep-ptx --dump-dir {shlex.quote(scratch)} --ptxas-options '-v' remarks{{ptx}}"
        with contextlib.redirect_stderr(report):
            artefacts = compiled(options).artifacts
        if not artefacts.CUBIN:
            raise build.BuildError(f"{stem}: the DSL kept no cubin:\n{report.getvalue()}")
        Path(scratch, "cubin").write_bytes(artefacts.CUBIN)
        path = build.directory() / f"{stem}.cubin"
        os.replace(Path(scratch, "cubin"), path)
    return build.Artefact(path, target, ptxas_report(report.getvalue(), stem, build.ARCH[target]))


def ptxas_report(text: str, stem: str, arch: str) -> str:
    """Return what ptxas -v said of each kernel in `text`, in ptxas' own form. The DSL wraps and colours the text, and
    mangled names are long: a kernel is called `stem` and its function's name, which has no underscore.

    build.BuildError: the numbers are not there.
    """
    flat = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    found = re.findall(
        r"entry function 'kernel_cutlass_([a-z]+).*?(\d+ bytes stack frame, \d+ bytes spill stores, "
        r"\d+ bytes spill loads).*?(Used \d+ registers[^.]*?)(?= ptxas| -->|$)",
        flat,
    )
    if not found:
        raise build.BuildError(f"{stem}: no report of ptxas in\n{text}")
    lines = [(f"Compiling entry function '{stem}-{name}' for '{arch}'", *said) for name, *said in found]
    return "".join(f"ptxas info    : {line}\n" for kernel in lines for line in kernel)
