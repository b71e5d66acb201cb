"""Check end to end that the model says the same with these kernels in it; if it does not, name where it begins.

    .venv/bin/python -m harness check dsv4_forward [--kernels winners]
    .venv/bin/python -m problems.dsv4_forward.check --config tiny --format nvfp4

Three passes over the same tokens, a ragged prefill and greedy decode steps, on the same weights: the oracle (reference
kernels, activations in fp32), the reference kernels in the model's dtype, and the composition. Then:

* each kernel call of the oracle's pass is repeated with the composed kernel and with the reference, on equal inputs:
  the first one past its budget (trace.CHECKS) is named with its layer. So are calls behind long random contexts of
  three sequences, where entries end that are not the first, index keys tie, and what no token wrote is NaN, and those
  of a token for each of 40 and of 65 sequences. There each op is also called with inputs in which its constants
  matter: eps, floors, clamps, sinks, ties (edges.py);
* what each layer by itself makes of the oracle's hc copies, the copies after each layer of a free pass, and the logits
  may be off the oracle's by 1.5 times what the reference kernels in the model's dtype are off (independent errors of
  one size add up to 1.4 of it), since quantised activations turn a rounding error into a step of the format, and later
  layers that into more: no tighter bound holds end to end;
* greedy tokens are equal, or the two logits are closer in the oracle than six times the size of the reference kernels'
  error: those tokens are listed, and no fault;
* decisions (experts of a token, entries of the indexer) follow the oracle's; each that would have been another is
  listed with the oracle's margin;
* on a GPU, decode steps wait for nothing, and a recorded step's replays have the same logits, bit for bit.

With --gpus the composition on so many GPUs is held against that on one, in the same way, and all GPUs' copies after
each layer must have equal bits. Each of them holds the whole model as well, so it must fit one.

Exit status: 0 if all of it holds, 1 if not, 2 for bad arguments and where memory does not suffice.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence

from problems.common import terminal, venv

if __name__ == "__main__":
    venv.enter("problems.dsv4_forward.check")

import torch

from problems.common import load
from problems.dsv4_forward import check_of_gpus, ops, passes
from problems.dsv4_forward.model import no_memory
from problems.dsv4_forward.parallel import launch
from problems.dsv4_forward.passes import Case, Count
from problems.dsv4_forward.trace import BrokenKernelError, Follower, Recorder, blame
from problems.dsv4_forward.weights import config, partition, tree

CASES = {  # what is checked where nothing is named
    "cpu": tuple(("tiny-512", fmt) for fmt in config.FORMATS),
    "cuda": (("tiny-k", "bf16"), ("tiny-k", "nvfp4"), ("flash-4l32e", "bf16"), ("flash-4l32e", "nvfp4")),
}
PROMPTS = (600, 37)  # tokens, each in one pass: past the window, blocks of 128, and what kernels for few tokens take
STEPS = 6  # greedy tokens of each sequence
LATE = "late "  # ahead of a layer's name: behind random contexts


def checks(device: str, gpus: int = 1) -> int:
    """How many checks there are of one configuration: six passes, or three pairs, and on a GPU recorded steps."""
    return (6 if gpus == 1 else 3) + (device != "cpu")


class Arguments(terminal.Parser):
    hint = "see .venv/bin/python -m problems.dsv4_forward.check --help"  # harness/run.py has another --help


class Refused(ValueError):
    """Arguments that name no configuration or no kernel, or too large a one. A ValueError of a kernel is none of these:
    it is a fault.
    """


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        target = _target(args.device)
        if args.gpus > 1 and not launch.started():
            _see_gpus(args)
            return launch.start(args.gpus, ["-m", __spec__.name, *(sys.argv[1:] if argv is None else argv)])
        mine = launch.joined(args.device)
        args.device = mine.device
        if mine.rank:  # the first process says it for all
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  as long as the process lives
        # One configuration after the other: their weights need not fit the device together.
        cases = _cases(args)
        _see_kernels(args.kernels, target)
        count = Count(len(cases) * checks(torch.device(args.device).type, mine.gpus))
        right = [_checked(name, fmt, args, target, count, mine) for name, fmt in cases]
    except Refused as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    print(f"end-to-end check: {sum(right)} of {len(right)} configurations right")
    return 0 if all(right) else 1


def _checked(name: str, fmt: str, args: argparse.Namespace, target: str, count: Count, mine: launch.Mine) -> bool:
    """Make and check one configuration. Refused also where it is too large."""
    try:
        return check(make(name, fmt, args.device, args.steps), args.kernels, target, count, mine)
    except (RuntimeError, MemoryError) as error:  # in a kernel too
        if not no_memory(error):
            raise
        said = str(error).strip().partition("\n")[0]
        raise Refused(
            f"no memory for {name} in {fmt} on {args.device}: give a smaller --config, such as flash-4l32e, or a "
            f"larger device ({said})"
        ) from error


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    p = Arguments(prog="check", description=__doc__, formatter_class=form, allow_abbrev=False)
    p.add_argument("--kernels", default="winners", help="reference, winners, or NAME=VARIANT,... (op or problem)")
    p.add_argument("--config", help="one configuration instead of the device's list, such as tiny or flash-4l32e")
    p.add_argument("--format", choices=config.FORMATS, help="one number format")
    steps = terminal.Value(int, "1 or more")
    p.add_argument("--steps", type=steps, default=STEPS, help="greedy tokens of each sequence")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--gpus", type=steps, default=1, help="that share the model, a process each (with --device cpu too)")
    args = p.parse_args(argv)
    for name in ("steps", "gpus"):
        if vars(args)[name] < 1:
            p.error(f"--{name} must be 1 or more, got {vars(args)[name]}")
    return args


def _see_gpus(args: argparse.Namespace) -> None:
    """Refused: so many GPUs cannot share a configuration, or are not there."""
    try:
        launch.check(args.gpus, args.device)
        for name, fmt in _cases(args):
            partition.local(config.find(name), fmt, args.gpus)
    except ValueError as error:
        raise Refused(terminal.of_option(error, "--gpus")) from error


def _target(device: str) -> str:
    """The kernels' target. Refused: no such device."""
    try:
        return load.device_target(device)
    except ValueError as error:
        raise Refused(terminal.of_option(error, "--device")) from error


def _see_kernels(text: str, target: str) -> None:
    """Refused: a part of --kernels that names nothing."""
    try:
        ops.kernels(text, target)
    except ValueError as error:
        raise Refused(str(error)) from error


def _cases(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """(configuration, format) of each. Refused: no such configuration."""
    known = CASES[torch.device(args.device).type]
    if args.config is not None:
        try:
            config.find(args.config)
        except ValueError as error:
            raise Refused(terminal.of_option(error, "--config")) from error
        return tuple((args.config, fmt) for fmt in ([args.format] if args.format else ("bf16", "nvfp4")))
    found = tuple(case for case in known if args.format in (None, case[1]))
    if not found:
        listed = ", ".join(dict.fromkeys(fmt for _, fmt in known))
        raise Refused(f"--format must be one of {listed} without --config on this device, got {args.format}")
    return found


def make(name: str, fmt: str, device: str, steps: int = STEPS, seed: int = 1) -> Case:
    """A case with random weights and prompts."""
    cfg = config.find(name)
    if (most := cfg.max_position_embeddings - max(PROMPTS)) < steps:
        raise Refused(f"--steps must be at most {most} in {name}, whose context the prompts begin, got {steps}")
    gen = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(cfg.vocab_size, (length,), generator=gen).tolist() for length in PROMPTS]
    return Case(cfg, fmt, tree.random(cfg, fmt, seed=seed, device=device), prompts, steps, device)


@torch.inference_mode()
def check(case: Case, text: str, target: str, count: Count | None = None, mine: launch.Mine | None = None) -> bool:
    """Check one configuration with the kernels that `text` names, print the report. -> whether all of it holds.

    count: of the checks of all configurations. mine: this process's place, where several GPUs share the model. Refused:
    `text`. A kernel that cannot be loaded, or that raises, is a fault.
    """
    mine = mine or launch.Mine()
    count = count or Count(checks(torch.device(case.device).type, mine.gpus))
    print(f"\n{case.cfg.name} in {case.fmt}, prompts of {PROMPTS} tokens, {case.steps} steps")
    try:
        chosen = ops.choose(text, target, case.weights)
        if mine.exchange:
            part = tree.shard(case.weights, mine.gpus, mine.rank)
            table = ops.choose(text, target, part).ops
    except ValueError as error:
        raise Refused(str(error)) from error
    except (Exception, SystemExit) as error:
        if no_memory(error):
            raise
        return passes.verdict([f"--kernels {text}: {blame(error)}"])
    for line in chosen.report:
        print(f"  {line}")
    try:
        if mine.exchange:
            several = dataclasses.replace(case, cfg=part.config, weights=part, exchange=mine.exchange)
            return passes.verdict(check_of_gpus.faults(case, chosen.ops, several, table, count, mine))
        return _checks(case, chosen, count)
    except BrokenKernelError as error:
        return passes.verdict([str(error)])


def _checks(case: Case, chosen: ops.Chosen, count: Count) -> bool:
    """All checks of one configuration with these kernels."""
    working = torch.float32 if case.fmt == "fp32" else torch.bfloat16
    recorder = Recorder(chosen.ops, working)
    oracle = case.run(recorder.ops(), torch.float32, recorder, None)
    count.done("each kernel on the oracle's inputs")
    late = Recorder(chosen.ops, working, edges=True)
    case.late(late.ops(), late)
    late.edges = False
    case.wide(late.ops(), late)
    for (layer, name), worst in late.worst.items():
        recorder.worst[LATE + layer, name] = dataclasses.replace(worst, layer=LATE + layer)
    count.done("each kernel behind long random contexts")
    forced = oracle.logits.argmax(-1)
    tables = {"the reference kernels": ops.REFERENCE, "the composition": chosen.ops}
    alone, free = [], []
    for name, table in tables.items():
        alone.append(passes.follow(case, Follower(table, recorder.decisions, recorder.residuals), forced))
        count.done(f"each layer on the oracle's copies, with {name}")
    composed = Follower(chosen.ops, recorder.decisions)
    for name, follower in zip(tables, (Follower(ops.REFERENCE, recorder.decisions), composed), strict=True):
        free.append(passes.follow(case, follower, forced))
        count.done(f"a whole pass with {name}")
    faults = passes.say_kernels(recorder)
    layers = passes.layers(oracle, alone, free)
    faults += passes.say_layers(layers)
    faults += passes.say_logits(oracle, *free)
    passes.say_decisions(composed)
    if case.device != "cpu":
        faults += passes.say_recorded(case, chosen.ops)
        count.done("recorded decode steps")
    return passes.verdict(faults)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
