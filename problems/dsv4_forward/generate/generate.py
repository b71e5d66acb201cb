"""Continue texts, or token ids, with a model: tokens are printed as they come, then tokens a second and memory.

    .venv/bin/python problems/dsv4_forward/generate/generate.py --checkpoint FOLDER --text "Once" --text "Twice"
    .venv/bin/python problems/dsv4_forward/generate/generate.py --config tiny --prompt 1,2,3 --tokens 50

A checkpoint's folder holds safetensors, config.json and tokenizer.json. A text, from --text or standard input, is
continued as it is, or with --chat answered, until --tokens, a --stop, an end token of generation_config.json or
config.json, or the end of the context. Without a checkpoint, weights are random. What is generated goes to standard
output, everything else to standard error. Several prompts are decoded together; each is printed behind a line that
numbers it. Exit codes: 0; 2, an argument, a file, memory or another process is at fault; 130, Ctrl-C.
"""

import argparse
import contextlib
import dataclasses
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from problems.common import terminal, venv
from problems.dsv4_forward.generate import streams

if __name__ == "__main__":
    streams.prepare()
    venv.enter("problems/dsv4_forward/generate/generate.py")

import torch
from rich.console import Console

from problems.common import load
from problems.dsv4_forward import ops
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.cache.token_ids import checked
from problems.dsv4_forward.checkpoint import checkpoint
from problems.dsv4_forward.generate import text
from problems.dsv4_forward.generate.decoding import CONTEXT, END, LENGTH, Limits, Told, decode
from problems.dsv4_forward.generate.mtp import Speculative
from problems.dsv4_forward.generate.printing import Printer
from problems.dsv4_forward.generate.sampler import Sampler
from problems.dsv4_forward.model import Model, no_memory
from problems.dsv4_forward.parallel import launch
from problems.dsv4_forward.parallel.exchange import PeerLostError
from problems.dsv4_forward.weights import config, partition, tree
from problems.dsv4_forward.weights.config import Config

NAME = "generate.py"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = terminal.Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number = terminal.Value(lambda given: float(_plain(given)), "a number")
    some, any_number, seed = (
        terminal.Value(_integer, f"an integer, {wanted}") for wanted in ("1 or more", "0 or more", "0 to 2^64 - 1")
    )
    p.add_argument("--checkpoint", metavar="FOLDER", type=Path, help="safetensors with config.json and tokenizer.json")
    p.add_argument("--text", action="append", help="a text to continue; may be given several times")
    p.add_argument(
        "--prompt", metavar="IDS", action="append", help="token ids with commas in place of --text; likewise (1)"
    )
    p.add_argument("--chat", action="store_true", help="each text is a user's, in the checkpoint's chat template")
    p.add_argument("--stop", metavar="TEXT", action="append", help="end ahead of this text; may be given several times")
    p.add_argument("--tokenizer", metavar="FILE", type=Path, help="a tokenizer.json other than the checkpoint's")
    p.add_argument("--tokens", type=some, default=64, help="how many to generate for each prompt (64)")
    p.add_argument("--ignore-end", action="store_true", help="go on after an end token")
    p.add_argument("--temperature", type=number, default=0.0, help="0, the default: the most likely token")
    p.add_argument("--top-k", type=any_number, default=0, help="0: all")
    p.add_argument("--top-p", type=number, default=1.0)
    p.add_argument("--seed", type=seed, default=0, help="of the sampler and of random weights")
    p.add_argument("--draft", action="store_true", help="guess a token ahead, with a prediction layer (greedy only)")
    p.add_argument(
        "--config", help="without a checkpoint: tiny (the default), tiny-k, flash, pro, or such as flash-4l32e"
    )
    p.add_argument("--format", choices=config.FORMATS, help="number format (default: bf16, or the checkpoint's)")
    p.add_argument("--kernels", default="winners", help="reference, winners, or NAME=VARIANT,...")
    p.add_argument("--verbose", action="store_true", help="say which kernel computes what")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--gpus", type=some, default=1, help="that share the model, a process each (with --device cpu too)")
    p.add_argument("--chunk", type=some, default=128, help="tokens of a prompt in a pass (128)")
    args = p.parse_args(argv)
    least = {"tokens": 1, "gpus": 1, "chunk": 2 if args.draft else 1}
    for name, value in least.items():
        if getattr(args, name) < value:
            p.error(f"--{name} must be {value} or more, got {getattr(args, name)}")
    if args.checkpoint and args.config is not None:
        p.error("--config is for random weights: leave it out, or --checkpoint, which has its own config.json")
    if not args.temperature and (args.top_k > 0 or 0 < args.top_p < 1):
        p.error("--top-k and --top-p limit what is drawn: they need a --temperature above 0")
    if args.text and args.prompt:
        p.error("--text and --prompt cannot be mixed: give all prompts as texts, or all as ids")
    if args.text and not (args.checkpoint or args.tokenizer):
        p.error("--text needs a --checkpoint with a tokenizer.json, or a --tokenizer")
    if not (args.text or args.prompt) and (args.checkpoint or args.tokenizer):
        if sys.stdin is None or sys.stdin.isatty():
            p.error("there is nothing to continue: give --text, --prompt, or a text on standard input")
        args.text = [sys.stdin.read()]
    if not (args.text or args.prompt) and _waits():
        p.error("a text on standard input needs a --checkpoint or --tokenizer; ids are given as --prompt 1,2,3")
    if (args.chat or args.stop) and not args.text:
        p.error("--chat and --stop are about texts: give --text, or a text on standard input")
    if args.chat and not args.checkpoint:
        p.error("--chat needs a --checkpoint, which has the template")
    if not all(args.stop or ["one"]):
        p.error("--stop must hold a letter or more, got an empty text")
    if args.draft and (args.temperature or len(args.text or args.prompt or [1]) > 1):
        p.error("--draft decodes one prompt greedily: it needs --temperature 0 and one --text or --prompt")
    return args


def _waits() -> bool:
    """Whether something stands on standard input. A pipe that may yet get something is not waited for."""
    try:
        return not sys.stdin.isatty() and bool(select.select([sys.stdin], [], [], 0)[0]) and bool(sys.stdin.read(1))
    except (AttributeError, OSError, ValueError):  # there is none
        return False


def _integer(given: str) -> int:
    """An integer. ValueError: int() would take it, but it is written otherwise."""
    return int(_plain(given))


def _plain(given: str) -> str:
    if not given.isascii() or "_" in given:
        raise ValueError(f"a number must be of ASCII digits, got {given!r}")
    return given


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    errors, say, mine = Console(stderr=True), Console(stderr=True), launch.Mine()
    try:
        with _of_option("--device"):
            target = load.device_target(args.device)
        if args.gpus > 1 and not launch.started():
            return _shared(args, sys.argv[1:] if argv is None else argv)
        mine = launch.joined(args.device)
        args.device = mine.device
        if mine.rank:  # the first process says it for all
            say, sys.stdout = Console(quiet=True), open(os.devnull, "w")  # noqa: SIM115  as long as the process lives
        ops.kernels(args.kernels, target)
        if args.checkpoint and args.checkpoint.is_file():
            raise ValueError(f"--checkpoint must be a folder, got the file {args.checkpoint}")
        cfg = _config(args)
        tokenizer = None
        if args.text or args.tokenizer:
            tokenizer = text.tokenizer(args.checkpoint, args.tokenizer)
        if args.chat:
            args.text = [text.chat(args.checkpoint, one) for one in args.text]
        prompts = _prompts(args, tokenizer, cfg)
        _say_of_context(args.tokens, prompts, cfg, say)
        ends = frozenset()
        if args.checkpoint and not args.ignore_end:
            ends = text.end_tokens(args.checkpoint, cfg.vocab_size)
        limits = Limits(args.tokens, ends)
        with _of_option("--temperature", "--top-k", "--top-p", "--seed"):
            sampler = Sampler(args.temperature, args.top_k, args.top_p, args.seed)
        model, blocks = _model(args, cfg, mine, say), _blocks(cfg, prompts, args.tokens)
        cfg = model.config  # without the prediction layers that were left out
        # A longer chunk than the context would only take memory.
        chunk = min(args.chunk, max(cfg.max_position_embeddings, 2))
        state = State(cfg, model.weights.format, len(prompts), blocks, chunk, args.device, snapshots=0)
        mine.meet()
        with torch.inference_mode():
            if args.draft:
                found = _drafted(model, state, prompts[0], limits, say)
            else:
                found = decode(model, state, prompts, limits, sampler)
            _run(found, prompts, Printer(len(prompts), tokenizer, args.stop or ()), args.device, say)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        full = no_memory(error)
        if isinstance(error, BrokenPipeError) or not (isinstance(error, ValueError | OSError | PeerLostError) or full):
            raise
        smaller = "a larger GPU" if args.checkpoint else "a smaller --config"
        said = f"no memory: use {smaller}, a shorter prompt or fewer --tokens ({error})" if full else error
        who = f"{NAME}, rank {mine.rank}" if mine.rank else NAME
        errors.print(terminal.visible(f"{who}: {said}"), markup=False, highlight=False, soft_wrap=True)
        if launch.started():
            errors.file.flush()
            os._exit(2)  # the group of processes is broken, and its end would wait for those that hang
        return 2
    say.print(f"memory: {_memory(args.device) / 2**20:.0f} MiB{' a process' * (mine.gpus > 1)}")
    return 0


@contextlib.contextmanager
def _of_option(*options: str) -> Iterator[None]:
    """Within: an error about a parameter is one about its option."""
    try:
        yield
    except ValueError as error:
        raise terminal.of_option(error, *options) from error


def _shared(args: argparse.Namespace, argv: list[str]) -> int:
    """Run this command in a process for each GPU. ValueError: so many cannot share the model, or are not there."""
    cfg = _config(args)
    with _of_option("--gpus"):
        partition.local(cfg, args.format or "bf16", args.gpus)  # a checkpoint's own, loading sees to
        launch.check(args.gpus, args.device)
    given = [] if args.text is None or "--text" in argv else [f"--text={one}" for one in args.text]  # standard input
    return launch.start(args.gpus, [__file__, *argv, *given])


def _config(args: argparse.Namespace) -> Config:
    if args.checkpoint:
        return checkpoint.config_from_json(args.checkpoint)
    with _of_option("--config"):
        return config.find(args.config or "tiny")


def _model(args: argparse.Namespace, cfg: Config, mine: launch.Mine, say: Console) -> Model:
    part = {"device": args.device, "gpus": mine.gpus, "rank": mine.rank}
    if args.checkpoint:
        weights = checkpoint.load(args.checkpoint, cfg, fmt=args.format, progress=not mine.rank, **part)
    else:
        weights = tree.quick(cfg, args.format or "bf16", seed=args.seed, **part)
    # With a variant for one op, another one may need the experts as they are.
    weights = dataclasses.replace(weights, disposable="=" not in args.kernels)
    chosen = ops.choose(args.kernels, load.device_target(args.device), weights)
    tuned = sum(name != "reference" for name in chosen.names.values())
    source = args.checkpoint or "random weights"
    draft = "with a layer to draft" if weights.mtp else "no layer to draft"
    head = f"{cfg.name} in {weights.format}, {source}, {draft}, {tuned} of {len(chosen.names)} ops by tuned kernels"
    head += f", shared by {mine.gpus} processes" * (mine.gpus > 1)
    for line in (head, *(chosen.report if args.verbose else ())):
        say.print(line, markup=False, highlight=False, soft_wrap=True)
    return Model(weights, chosen.ops, exchange=mine.exchange)


def _prompts(args: argparse.Namespace, tokenizer: text.Tokenizer | None, cfg: Config) -> list[list[int]]:
    """ValueError: no ids, one outside the vocabulary, or more than the context takes."""
    named = [("--text", tokenizer.encode(one)) for one in args.text or ()]
    named = named or [("--prompt", _ids(one)) for one in args.prompt or ["1"]]
    most = cfg.max_position_embeddings
    for number, (name, ids) in enumerate(named, 1):
        checked(f"tokens of {name} {number}", ids, cfg.vocab_size)
        if len(ids) > most:
            raise ValueError(f"{name} {number} must be within the context of {most} tokens, got {len(ids)}: shorten it")
    return [ids for _, ids in named]


def _say_of_context(tokens: int, prompts: list[list[int]], cfg: Config, say: Console) -> None:
    """Say how many tokens a prompt can get, if the context ends before --tokens."""
    most, longest = cfg.max_position_embeddings, max(map(len, prompts))
    room = most - longest + 1  # the last token takes no place
    if tokens > room:
        said = f"--tokens {tokens}: the context of {most} tokens ends after {room}, behind a prompt of {longest}"
        say.print(said, markup=False, highlight=False, soft_wrap=True)


def _ids(given: str) -> list[int]:
    try:
        return [_integer(part) for part in given.split(",")]
    except ValueError as error:
        raise ValueError(f"--prompt must be token ids with commas between, got {given!r}") from error


def _blocks(cfg: Config, prompts: list[list[int]], tokens: int) -> int:
    """What the state needs for all prompts and as many tokens for each, as far as the context reaches."""
    lengths = (min(len(ids) + tokens, cfg.max_position_embeddings) for ids in prompts)
    return sum(-(-length // config.BLOCK_TOKENS) for length in lengths)


def _drafted(model: Model, state: State, prompt: list[int], limits: Limits, say: Console) -> Iterator[Told]:
    """As decode(), for one prompt: greedily, a guess ahead."""
    with _of_option("--draft"):
        speculative = Speculative(model, state, state.open()[0])
    count, passes, hits, reason = 0, 0, 0, ""
    found, steps = [speculative.prefill(prompt)], speculative.steps()
    while not reason:
        for token in found:
            count += 1
            full = LENGTH if count == limits.most else CONTEXT if len(prompt) + count > state.capacity else ""
            reason = END if token in limits.end else full
            yield Told(0, None if reason == END else token, reason)
            if reason:
                break
        if not reason:
            step = next(steps)
            found, passes, hits = step.tokens, passes + 1, hits + step.accepted
    say.print(f"guesses: {hits} of {passes} right")


def _run(found: Iterator[Told], prompts: list[list[int]], printer: Printer, device: str, say: Console) -> None:
    """Print the tokens as they come, then how fast they came and why each prompt got no more."""
    start = first = last = time.perf_counter()
    reasons, count = [""] * len(prompts), 0
    for told in found:
        count += told.token is not None
        first, last = (told.at if count <= 1 else first), told.at
        reasons[told.prompt] = reasons[told.prompt] or printer.take(told)
        if all(reasons) and not told.reason:  # a stop text ended the last one
            break
    # Only the passes count: the first one of each prompt fed all of it.
    decoded, seconds, fed = max(count - len(prompts), 0), last - first, sum(map(len, prompts))
    say.print(f"prompt: {fed} tokens in {first - start:.2f} s, {fed / (first - start):.1f} tokens/s")
    if decoded:
        say.print(f"decode: {decoded} tokens in {seconds:.2f} s, {decoded / seconds:.1f} tokens/s")
    for number, reason in enumerate(reasons, 1):
        say.print(f"{f'prompt {number} ' if len(prompts) > 1 else ''}ended: {reason}")


def _memory(device: str) -> int:
    """Bytes at their highest: of the GPU, or of this process."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


if __name__ == "__main__":
    try:
        streams.catch_interrupts()
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(streams.INTERRUPTED_EXIT)
    except BrokenPipeError:  # the reader of the output closed it
        terminal.lead_nowhere(sys.stdout.fileno())
        sys.exit(141)
