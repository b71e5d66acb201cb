"""Write what variants for sm90 compute in the model, and compare it later with what an H100 or H200 computes.

    .venv/bin/python -m ptx_model.tools.outputs write FOLDER          # the cases of CASES, a file each
    .venv/bin/python -m ptx_model.tools.outputs write FOLDER moe_gemm sm90_grouped "tokens=1 experts=8"
    .venv/bin/python -m ptx_model.tools.outputs compare FOLDER/* --out ptx_model/tools/outputs.jsonl
    .venv/bin/python -m ptx_model.tools.outputs table                 # ptx_model/README.md's, from that file

`write` needs no GPU; PROBLEM VARIANT WORDS name test cases of one variant, and the word `exact` makes their sums exact
(see `_exact_attention`). `compare` runs on the machine with the GPU: it makes the same inputs, runs the variant, prints
for each output how many elements have equal bits, and with --out appends that to a file as a line of JSON. Its exit
code is 1 if a variant failed or an output that should be equal is not. `table` renders the lines of
ptx_model/tools/outputs.jsonl.
"""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.problem import folders, sources
from harness.results import environment, hashes, output, record, text
from harness.tools import model_check
from problems.common import load
from ptx_model.tools import check

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = Path(__file__).with_suffix(".jsonl"), ROOT / "ptx_model" / "README.md"
_MARKS = ("<!-- outputs:begin -->", "<!-- outputs:end -->")
TARGET = "sm90"  # of which there are GPUs to compare with
# (problem, variant, words of its test case). fmha_decode without `exact` shows how far the model's approximate
# instructions are from the hardware's, all others are to be equal.
CASES = (
    ("nvfp4_gemv", "sm90_dp4a", "m=33 k=64 l=3"),
    ("nvfp4_gemv", "sm90_plain", "m=33 k=64 l=3"),
    ("nvfp4_gemv", "sm90_classic_tma", "m=33 k=64 l=3"),
    ("nvfp4_gemv", "sm90_cute", "m=33 k=64 l=3"),
    ("moe_gemm", "sm90_grouped", "tokens=3 experts=8"),
    ("moe_gemm", "sm90_grouped", "tokens=2 experts=8 activation=nvfp4"),
    ("fmha_decode", "sm90_wgmma", "batch=3 queries=1 heads=20 window=64 compressed=0 exact"),
    ("fmha_decode", "sm90_wgmma", "heads=128 content=cancelling exact"),
    ("fmha_decode", "sm90_wgmma", "batch=3 queries=1 heads=20 window=64 compressed=0"),
    ("fmha_decode", "sm90_wgmma", "batch=1 queries=3 content=maxima"),
)


def main(argv: list[str]) -> int:
    """See the top of this file. Return the exit code: 2 for a wrong command."""
    parser = output.Parser(prog="outputs", description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    write = verbs.add_parser("write", help="run variants in the model and keep their outputs")
    write.add_argument("folder", type=Path, metavar="FOLDER")
    write.add_argument("of", nargs="*", metavar="PROBLEM VARIANT WORDS", help="default: the list CASES")
    compare = verbs.add_parser("compare", help="run the variants on this GPU and compare")
    compare.add_argument("files", nargs="+", type=Path, metavar="FILE")
    compare.add_argument("--out", type=Path, metavar="FILE", help="append a line of JSON for each output")
    verbs.add_parser("table", help="render ptx_model/README.md's table")
    options = parser.parse_args(argv)
    if options.verb == "table":
        render()
        return 0
    if options.verb == "write" and len(options.of) not in (0, 3):
        parser.error(f"write FOLDER needs PROBLEM VARIANT WORDS or nothing behind it, got {options.of}")
    try:
        if options.verb == "compare":
            return _compare_all(options.files, options.out)
        options.folder.mkdir(parents=True, exist_ok=True)
        return _write(options.folder, *options.of) if options.of else _write_all(options.folder)
    except OSError as error:
        print(f"FOLDER must be a folder that can be made and written, got {options.folder}: {error}", file=sys.stderr)
        return 2
    except folders.UsageError as error:
        print(error, file=sys.stderr)
        return 2


# ---------------------------------------------------------------- in the model


def _write_all(folder: Path) -> int:
    """Each in a separate process, since the model takes CUDA's place in a whole process."""
    command = [sys.executable, "-m", "ptx_model.tools.outputs", "write", str(folder)]
    return max(subprocess.run([*command, *case], cwd=ROOT).returncode for case in CASES)


def _write(folder: Path, problem_name: str, variant: str, words: str) -> int:
    import torch

    from ptx_model import driver

    problem = folders.find(problem_name)
    chosen = problem.variant(variant, "VARIANT")
    model_check.target_of(chosen)
    if TARGET not in chosen.targets:
        raise folders.UsageError(f"VARIANT must be for {TARGET}, got {variant}, which is for {chosen.targets}")
    exact = "exact" in words.split()
    if exact and problem.name not in EXACT:
        raise folders.UsageError(f"exact sums are made for {', '.join(EXACT)}, got {problem.name}")
    words = " ".join(word for word in words.split() if word != "exact")
    cases = [{**c.params, "seed": c.seed} for c in problem.tests if folders.has_words(str(c), words)]
    if not cases:
        raise folders.UsageError(f"no test case of {problem_name} has the words {words!r}")
    model = driver.install(TARGET)
    for case in cases:
        outputs = _run(problem.name, variant, case, exact, "cpu")
        model.check()
        named = f"{problem.name}-{variant}-{'exact-' * exact}{case['seed']}.pt"
        kept = {
            "problem": problem.name,
            "variant": variant,
            "target": TARGET,
            "case": case,
            "exact": exact,
            "sources": _sources(problem.name, variant),
            "commit": environment.commit()[0],
            "outputs": outputs,
        }
        torch.save(kept, folder / named)
        print(f"{folder / named}: {text.label(case)}{', exact sums' * exact}", flush=True)
    return 0


def _sources(problem: str, variant: str) -> str:
    """Hash of what the variant is compiled from."""
    folder = load.PROBLEMS / problem
    return hashes.source_hash(sources.files_of(folder / "variants" / f"{variant}.py"))


def _run(problem: str, variant: str, case: dict, exact: bool, device: str) -> list[Any]:
    """The outputs of a call, on the CPU. Inputs are made on the CPU too, so that they are the same everywhere."""
    import torch

    from harness.runner import tree

    folder = load.PROBLEMS / problem
    task, reference = load.module(folder, "task"), load.module(folder, "reference")
    module = load.module(folder, f"variants/{variant}")
    data = tree.clone(check.make_inputs(task, reference, case))
    if exact:
        data = EXACT[problem](data, case["seed"])
    if device != "cpu":
        data = _moved(data, device)
    if hasattr(module, "prepare"):
        data = data._replace(weights=module.prepare(data.weights))
    made = module.custom_kernel(data)
    return [tensor.detach().cpu().contiguous() for tensor in (made if not isinstance(made, torch.Tensor) else (made,))]


def _moved(data: Any, device: str) -> Any:
    """A NamedTuple of tensors on another device, strides kept."""
    import torch

    if isinstance(data, torch.Tensor):
        made = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=device)
        made.copy_(data)
        return made
    if isinstance(data, tuple):
        parts = [_moved(part, device) for part in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    return data


def _exact_attention(data: Any, seed: int) -> Any:
    """fmha_decode's inputs, with queries, sinks and named entries changed so that the right answer needs no rounding
    but its last, in any order of sums.

    Every second head has the query 0: all probabilities are 1 / n, and sums are of small integers. The others have 8
    dims, for which one entry is made to score 2^13, and every other entry less by so much that its probability is 0.
    Sinks are -inf. n, the entries of a list, must be a power of two, without holes.
    """
    import torch

    from problems.common import kv_pages

    caches = (
        (data.window, data.window_index, data.window_length),
        (data.compressed, data.compressed_index, data.compressed_length),
    )
    count = sum(index.shape[2] for _, index, _ in caches)
    full = all(bool((index >= 0).all()) and bool((length == index.shape[2]).all()) for _, index, length in caches)
    if count & (count - 1) or not full:
        raise folders.UsageError(f"exact sums need full lists whose entries are a power of two together, got {count}")
    attention = load.module(load.PROBLEMS / "fmha_decode", "task")
    gen, nope = torch.Generator().manual_seed(seed), attention.NOPE
    batch, queries, heads, dims = data.q.shape
    q = torch.zeros(batch, queries, heads, dims)
    wanted = []  # (cache, index in it, dims, signs)
    for b, s, h in ((b, s, h) for b in range(batch) for s in range(queries) for h in range(1, heads, 2)):
        chosen = torch.randperm(dims, generator=gen)[:8]
        signs = torch.randint(2, (8,), generator=gen) * 2.0 - 1
        q[b, s, h, chosen] = signs * 256
        place = int(torch.randint(count, (), generator=gen))
        first = data.window_index.shape[2]
        cache, index = (0, data.window_index) if place < first else (1, data.compressed_index)
        wanted.append((cache, int(index[b, s, place - first * cache]), chosen, signs))
    for n, (pages, index, _) in enumerate(caches):
        if not index.numel():
            continue
        ids = index.long().flatten().unique()
        values = torch.randint(-1, 2, (len(ids), dims), generator=gen).float()
        for cache, at, chosen, signs in wanted:
            if cache == n:
                values[int((ids == at).nonzero()), chosen] = 4 * signs
        scales = torch.randint(125, 130, (len(ids), nope // kv_pages.GROUP), generator=gen)
        codes = values[:, :nope] / torch.exp2(scales.float() - 127).repeat_interleave(kv_pages.GROUP, 1)
        rope = values[:, nope:].bfloat16()
        kv_pages.write(
            pages, attention.page_entries(pages.shape[1]), ids, codes.to(torch.float8_e4m3fn), scales.byte(), rope
        )
    return data._replace(q=q.bfloat16(), sink=torch.full_like(data.sink, -torch.inf))


EXACT = {"fmha_decode": _exact_attention}


# ---------------------------------------------------------------- on the GPU


def _compare_all(files: list[Path], out: Path | None) -> int:
    right = True
    for file in files:
        try:
            found = _compare(file)
        except Exception as error:
            print(f"{file}: {type(error).__name__}: {error}")
            right = False
            continue
        for one in found:
            print(
                f"{one['problem']}/{one['variant']} {text.label(one['case'])}{', exact sums' * one['exact']}: "
                f"{one['output']}: {one['equal']} of {one['elements']} elements have equal bits, "
                f"largest difference {_distance(one['max_ulp'])}",
                flush=True,
            )
            right &= one["equal"] == one["elements"] or (one["problem"] in EXACT and not one["exact"])
        if out:
            with out.open("a") as kept:
                kept.writelines(json.dumps(one) + "\n" for one in found)
    return 0 if right else 1


def _compare(file: Path) -> list[dict]:
    """A line for each output. ValueError: the file is not of this tool, or of other sources than are here."""
    import torch

    try:
        kept = torch.load(file, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError("it is no file that write made") from error
    if "exact" not in kept:
        raise ValueError("an older file: write it again")
    problem, variant, case = kept["problem"], kept["variant"], kept["case"]
    if kept["sources"] != _sources(problem, variant):
        raise ValueError(f"the sources of {problem}/{variant} have changed since it was written: write it again")
    if not torch.cuda.is_available():
        raise ValueError("comparing needs an NVIDIA GPU and a torch that was built with CUDA: there is none here")
    names = load.module(load.PROBLEMS / problem, "task").OUTPUTS
    return [
        {
            "problem": problem,
            "variant": variant,
            "target": kept["target"],
            "case": case,
            "exact": kept["exact"],
            "output": name,
            "elements": want.numel(),
            "equal": equal,
            "max_ulp": ulp,
            "device": environment.machine("cuda"),
            "date": record.now(),
            "commit": kept["commit"],
            "sources": kept["sources"],
        }
        for name, got, want in zip(
            names, _run(problem, variant, case, kept["exact"], "cuda"), kept["outputs"], strict=True
        )
        for equal, ulp in [differences(got, want)]
    ]


def differences(got: Any, want: Any) -> tuple[int, float | None]:
    """-> (elements with equal bits, largest difference in units of the last place of `want`'s format).

    The unit is that of the element, or of 2^-8 of the largest finite element of its row (last axis) where that is more:
    the bits of what cancels to nearly 0 say nothing. None: an element is infinite or NaN in one of them only.
    ValueError: the shapes or dtypes differ.
    """
    import torch

    if got.shape != want.shape or got.dtype != want.dtype:
        raise ValueError(f"want {want.dtype} {tuple(want.shape)}, got {got.dtype} {tuple(got.shape)}")
    bits = {2: torch.int16, 4: torch.int32}[want.element_size()]
    same = got.contiguous().view(bits) == want.contiguous().view(bits)
    size = want.double().abs().nan_to_num(0, 0, 0)
    size = torch.maximum(size, size.amax(-1, keepdim=True) / 256).clamp(min=torch.finfo(want.dtype).tiny)
    unit = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent - 1) * torch.finfo(want.dtype).eps
    # Equal infinities differ by NaN.
    apart = ((got.double() - want.double()).abs() / unit).masked_fill(same, 0)
    return int(same.sum()), round(float(apart.max()), 1) if bool(apart.isfinite().all()) else None


# ---------------------------------------------------------------- the table


def table(lines: list[dict]) -> str:
    """The table of ptx_model/README.md: of each output the last line of each case, added up."""
    rows = ["| variant | output | cases | equal bits | largest difference | GPU |", "|---|---|---|---|---|---|"]
    last = {(one["variant"], one["problem"], str(one["case"]), one["exact"], one["output"]): one for one in lines}
    groups: dict[tuple[str, str, str], list[dict]] = {}
    for one in last.values():
        name = f"{one['problem']}/{one['variant']}{', exact sums' * one['exact']}"
        groups.setdefault((name, one["output"], one["device"]), []).append(one)
    for (name, what, device), cases in groups.items():
        equal, elements = (sum(one[key] for one in cases) for key in ("equal", "elements"))
        ulps = [one["max_ulp"] for one in cases]
        worst = _distance(None if None in ulps else max(ulps))
        rows.append(f"| {name} | {what} | {len(cases)} | {equal:,} of {elements:,} | {worst} | {device} |")
    return "\n".join(rows)


def _distance(ulp: float | None) -> str:
    return "infinite" if ulp is None else f"{ulp:g} ulp"


def rendered(page: str) -> str:
    """The page with the table of RESULTS in it."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []
    return output.spliced(page, _MARKS, table(lines), PAGE.name)


def render() -> None:
    """Write the table into ptx_model/README.md."""
    output.write_whole(PAGE, rendered(PAGE.read_text()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
