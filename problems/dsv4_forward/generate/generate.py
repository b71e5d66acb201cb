"""Generate tokens: token ids (or text, with a tokenizer) in, token ids out, with progress, tokens/s and memory.

    .venv/bin/python problems/dsv4_forward/generate/generate.py --config tiny --prompt 1,2,3 --tokens 50
    .venv/bin/python problems/dsv4_forward/generate/generate.py --checkpoint FOLDER --tokenizer FILE --text "Once"

Weights are random unless --checkpoint names a folder. Tokens go to standard output, everything else to standard error.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from problems.common import venv

if __name__ == "__main__":
    venv.enter("problems/dsv4_forward/generate/generate.py")

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from problems.common import load
from problems.dsv4_forward import ops
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.checkpoint import checkpoint
from problems.dsv4_forward.generate.mtp import Speculative
from problems.dsv4_forward.generate.sampler import Sampler
from problems.dsv4_forward.model import Model, feed
from problems.dsv4_forward.weights import config, tree


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", default="tiny", help="tiny, tiny-k, flash, pro, or a part such as flash-4l32e")
    p.add_argument("--format", choices=config.FORMATS, help="number format (default: bf16, or the checkpoint's)")
    p.add_argument("--checkpoint", metavar="FOLDER", help="safetensors with their config.json, in place of --config")
    p.add_argument("--kernels", default="reference", help="reference, winners, or NAME=VARIANT,...")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--prompt", metavar="IDS", help="token ids with commas (default: 1)")
    p.add_argument("--text", help="a prompt for --tokenizer")
    p.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json; its text is printed as well")
    p.add_argument("--tokens", type=int, default=64, help="how many to generate")
    p.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token")
    p.add_argument("--top-k", type=int, default=0, help="0: all")
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0, help="of the sampler and of random weights")
    p.add_argument("--draft", action="store_true", help="guess a token ahead with the prediction layer (greedy only)")
    p.add_argument("--chunk", type=int, default=128, help="tokens of the prompt in a pass")
    args = p.parse_args(argv)
    if args.tokens < 1:
        p.error(f"--tokens must be 1 or more, got {args.tokens}")
    if args.text is not None and not args.tokenizer:
        p.error("--text needs a --tokenizer")
    if args.draft and args.temperature:
        p.error("--draft decodes greedily: it needs --temperature 0")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    say = Console(stderr=True)
    tokenizer = _tokenizer(args.tokenizer)
    try:
        loaded = _weights(args)
        cfg = loaded.config
        ids = _prompt(args, tokenizer, cfg.vocab_size)
        chosen = ops.choose(args.kernels, load.device_target(args.device), loaded)
    except (ValueError, OSError) as error:
        say.print(f"generate: {error}")
        return 2
    for line in chosen.report:
        say.print(line)
    blocks = -(-(len(ids) + args.tokens + 1) // config.BLOCK_TOKENS)
    state = State(cfg, loaded.format, sequences=1, blocks=blocks, chunk=args.chunk, device=args.device)
    model = Model(loaded, chosen.ops)
    sequence, _ = state.open()
    with torch.inference_mode(), _progress(say) as progress:
        tokens, seconds = (_drafted if args.draft else _sampled)(args, model, state, sequence, ids, progress)
    print(",".join(map(str, tokens)))
    if tokenizer:
        print(tokenizer.decode(tokens))
    for line in seconds:
        say.print(line)
    say.print(f"memory: {_memory(args.device) / 2**20:.0f} MiB")
    return 0


def _sampled(
    args: argparse.Namespace, model: Model, state: State, sequence: int, ids: list[int], progress: Progress
) -> tuple[list[int], list[str]]:
    """-> the tokens, and lines about the time that they took."""
    sampler = Sampler(args.temperature, args.top_k, args.top_p, args.seed)
    row = torch.tensor([sequence], device=args.device)
    bar, start = progress.add_task("prompt", total=len(ids)), time.perf_counter()
    logits = feed(model, state, {sequence: ids}, after=lambda batch, _: progress.advance(bar, len(batch.tokens)))
    found: list[int] = []
    bar = progress.add_task("tokens", total=args.tokens)
    first = 0.0
    while len(found) < args.tokens:
        position = torch.tensor([state.lengths[sequence]], device=args.device)
        found.append(int(sampler.sample(logits, row, position)))
        first = first or time.perf_counter()
        progress.advance(bar)
        if len(found) < args.tokens:
            logits = feed(model, state, {sequence: found[-1:]})
    return found, _rates(len(ids), first - start, len(found) - 1, time.perf_counter() - first)


def _drafted(
    args: argparse.Namespace, model: Model, state: State, sequence: int, ids: list[int], progress: Progress
) -> tuple[list[int], list[str]]:
    speculative, start = Speculative(model, state, sequence), time.perf_counter()
    found = [speculative.prefill(ids)]
    first = time.perf_counter()
    bar = progress.add_task("tokens", total=args.tokens, completed=1)
    passes = hits = 0
    for step in speculative.steps():
        if len(found) >= args.tokens:
            break
        found += step.tokens
        passes, hits = passes + 1, hits + step.accepted
        progress.update(bar, completed=min(len(found), args.tokens))
    lines = _rates(len(ids), first - start, len(found) - 1, time.perf_counter() - first)
    found = found[: args.tokens]
    return found, lines + [f"guesses: {hits} of {passes} right"]


def _rates(prompt: int, prompt_s: float, tokens: int, tokens_s: float) -> list[str]:
    lines = [f"prompt: {prompt} tokens in {prompt_s:.2f} s, {prompt / prompt_s:.1f} tokens/s"]
    if tokens:
        lines.append(f"decode: {tokens} tokens in {tokens_s:.2f} s, {tokens / tokens_s:.1f} tokens/s")
    return lines


def _weights(args: argparse.Namespace) -> tree.ModelWeights:
    if args.checkpoint:
        return checkpoint.load(Path(args.checkpoint), fmt=args.format, device=args.device)
    cfg, fmt = config.find(args.config), args.format or "bf16"
    return tree.random(cfg, fmt, seed=args.seed, device=args.device)


def _prompt(args: argparse.Namespace, tokenizer: object, vocab: int) -> list[int]:
    """ValueError: no ids, or one outside the vocabulary."""
    if args.text is not None:
        ids = tokenizer.encode(args.text).ids
    else:
        ids = [int(part) for part in (args.prompt or "1").split(",")]
    if not ids or not all(0 <= i < vocab for i in ids):
        raise ValueError(f"--prompt must be ids from 0 to {vocab - 1} with commas, got {args.prompt or args.text!r}")
    return ids


def _tokenizer(path: str | None) -> object:
    if path is None:
        return None
    from tokenizers import Tokenizer  # only who names a file needs the package

    return Tokenizer.from_file(path)


def _memory(device: str) -> int:
    """Bytes at their highest: of the GPU, or of this process."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
