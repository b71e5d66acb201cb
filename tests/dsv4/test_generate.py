"""generate.py: a checkpoint's user gets the model's own tokens, as text, as they come, and one line where it cannot."""

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.checkpoint import checkpoint
from problems.dsv4_forward.generate import decoding, generate
from problems.dsv4_forward.generate.decoding import CONTEXT, END, LENGTH, Limits, Steps, Told, decode
from problems.dsv4_forward.generate.printing import Printer
from problems.dsv4_forward.generate.sampler import Sampler
from problems.dsv4_forward.generate.text import Tokenizer
from problems.dsv4_forward.model import Model
from problems.dsv4_forward.weights import tree
from tests.dsv4.models import greedy
from tests.support import ROOT, tiny_checkpoint
from tests.support.tiny_checkpoint import CFG

TEXTS = ("Once upon a time", "Grüße 🙂", "x")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint with a tokenizer; not to be changed."""
    return tiny_checkpoint.write(tmp_path_factory.mktemp("generate") / "small")


@pytest.fixture
def copy(folder, tmp_path) -> Callable[..., Path]:
    """A copy of the checkpoint with other contents of JSON files: copy(config={...}) changes keys of config.json."""

    def make(**changes: dict) -> Path:
        path = shutil.copytree(folder, tmp_path / "copy")
        for name, fields in changes.items():
            file = path / f"{name}.json"
            known = json.loads(file.read_text()) if file.is_file() else {}
            file.write_text(json.dumps(known | fields))
        return path

    return make


@pytest.fixture(scope="module")
def model(folder) -> Model:
    return Model(checkpoint.load(folder, progress=False))


@pytest.fixture(scope="module")
def known(folder) -> Tokenizer:
    return Tokenizer(folder / "tokenizer.json")


def run(capsys, *words: object) -> tuple[str, str]:
    """Standard output and error of a call that ends well."""
    code = generate.main([*map(str, words), "--device", "cpu", "--kernels", "reference"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out, err


def texts(*given: str) -> list[str]:
    return [word for text in given for word in ("--text", text)]


def test_a_batch_gives_what_each_text_gives_by_itself(folder, model, known, capsys):
    want = [known.decode(greedy(model, known.encode(text), 9)) for text in TEXTS]
    out, err = run(capsys, "--checkpoint", folder, *texts(*TEXTS), "--tokens", 9, "--chunk", 10**12)
    assert out == "".join(f"[{n} of 3]\n{text}\n" for n, text in enumerate(want, 1))
    said = f"prompt: {sum(len(known.encode(text)) for text in TEXTS)} tokens"
    assert all(one in err for one in ("prompt 3 ended: length", "tokens/s", said))


@pytest.mark.parametrize("form", ["one", "list", "config"])
def test_an_end_token_ends_its_prompt_only(copy, model, known, capsys, form):
    want = [greedy(model, known.encode(text), 10) for text in TEXTS]
    last = next(token for token in want[0][3:] if all(token not in row for row in want[1:]))
    fields = {"eos_token_id": [last, 511] if form == "list" else last}
    other = None if form == "config" else {"eos_token_id": 511}  # what generation_config.json says counts before it
    path = copy(config=other or fields, generation_config=fields if other else {"eos_token_id": None})
    out, err = run(capsys, "--checkpoint", path, *texts(*TEXTS), "--tokens", 10)
    cut = [want[0][: want[0].index(last)], *want[1:]]
    assert out == "".join(f"[{n} of 3]\n{known.decode(ids)}\n" for n, ids in enumerate(cut, 1))
    assert "prompt 1 ended: end token" in err and "prompt 2 ended: length" in err
    out, err = run(capsys, "--checkpoint", path, *texts(TEXTS[0]), "--tokens", 10, "--ignore-end")
    assert out == known.decode(want[0]) + "\n" and "ended: length" in err


def test_the_context_ends_a_prompt(folder, model, capsys):
    ids = list(range(40, 82))
    want = greedy(model, ids, 64)
    assert len(want) == 48 - len(ids) + 1
    out, err = run(capsys, "--checkpoint", folder, "--prompt", ",".join(map(str, ids)), "--prompt", "7")
    first, second = out.split("[2 of 2]\n")
    assert first == f"[1 of 2]\n{','.join(map(str, want))}\n" and second.count(",") == 47
    assert "prompt 1 ended: context full" in err and "prompt 2 ended: context full" in err


@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_drafting_gives_the_same(folder, model, known, capsys, tokens):
    out, err = run(capsys, "--checkpoint", folder, "--text", TEXTS[1], "--tokens", tokens, "--draft")
    want = greedy(model, known.encode(TEXTS[1]), tokens)
    assert out == known.decode(want) + "\n" and ("ends after" in err) == (len(want) < tokens)
    assert "right" in err and f"ended: {'length' if len(want) == tokens else 'context full'}" in err


def test_what_is_drawn_depends_on_the_seed_and_not_on_the_others(folder, capsys):
    words = ("--checkpoint", folder, "--temperature", "1", "--tokens", "8")
    alone, _ = run(capsys, *words, "--prompt", "5,6")
    both, _ = run(capsys, *words, "--prompt", "5,6", "--prompt", "9")
    assert both.splitlines()[1] == alone.strip() and run(capsys, *words, "--prompt", "5,6", "--seed", "1")[0] != alone


def test_a_text_begins_as_the_tokenizer_says(copy, model, known, capsys):
    path = copy(tokenizer_config={"add_bos_token": True}, config={"bos_token_id": 0})
    out, _ = run(capsys, "--checkpoint", path, "--text", "x", "--tokens", 5)
    assert out == known.decode(greedy(model, [0, *known.encode("x")], 5)) + "\n"


def test_tokens_are_read_while_the_next_pass_is_computed(model, monkeypatch):
    """And each token is drawn for its own place."""
    happened, places = [], []

    class Seen(Sampler):
        def sample(self, logits, sequence, position):
            places.append(position.tolist())
            return super().sample(logits, sequence, position)

    class Logged(decoding.Late):
        def read(self) -> list[int]:
            happened.append("read")
            return super().read()

    forward = Model.forward
    monkeypatch.setattr(decoding, "Late", Logged)
    monkeypatch.setattr(Model, "forward", lambda *args: happened.append("pass") or forward(*args))
    state = State(CFG, "fp32", sequences=2, blocks=2, chunk=2)
    told = list(decode(model, state, [[1, 2, 3], [4]], Limits(4), Seen()))
    assert places == [[3, 1], [4, 2], [5, 3], [6, 4]]
    assert happened == ["pass"] * 3 + ["read", "pass", "read", "pass", "read", "read"]
    assert [one.reason for one in told] == [""] * 6 + [LENGTH] * 2
    assert [[one.token for one in told if one.prompt == p] for p in (0, 1)] == [
        greedy(model, ids, 4) for ids in ([1, 2, 3], [4])
    ]
    assert state.pool.free == 2 and state.lengths == [0, 0]


def test_the_decoded_tokens_time_is_that_of_their_passes(model, capsys, monkeypatch):
    clock, forward, passes = 0.0, Model.forward, 0

    def counted(*args):
        nonlocal clock, passes
        clock, passes = clock + 10.0, passes + 1
        return forward(*args)

    monkeypatch.setattr(decoding.time, "perf_counter", lambda: clock)
    monkeypatch.setattr(Model, "forward", counted)
    state = State(CFG, "fp32", sequences=1, blocks=1)
    told = list(decode(model, state, [[1, 2, 3]], Limits(3), Sampler()))
    assert passes == 3 and [one.at for one in told] == [10.0, 20.0, 30.0]
    generate._run(iter(told), [[1, 2, 3]], Printer(1, None), "cpu", generate.Console(stderr=True))
    assert "decode: 2 tokens in 20.00 s" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--draft",), ("--temperature", "1")])
def test_a_model_that_computes_no_numbers_is_named(copy, capsys, more):
    """Finite weights and numbers, whose products are not."""
    path = copy(config={"routed_scaling_factor": 1e38})
    assert "must be finite, got NaN" in refused(capsys, "--checkpoint", path, "--prompt", "1,2,3", *more)


def test_too_little_memory_gets_one_line(capsys, monkeypatch):
    def none(*args, **named):
        torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr(tree, "quick", none)
    assert "allocate memory" in refused(capsys, "--config", "tiny")


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0, seed=5)], ids=["greedy", "drawn"])
def test_a_prompt_that_ends_leaves_the_batch(model, monkeypatch, sampler):
    """And the others' tokens do not depend on who has ended."""
    step, sizes = State.step, []
    monkeypatch.setattr(State, "step", lambda self, who, *args: sizes.append(len(who)) or step(self, who, *args))

    def told(*ends: int) -> list[Told]:
        state = State(CFG, "fp32", sequences=3, blocks=3)
        return list(decode(model, state, [[1, 2, 3], [4], [5, 6]], Limits(9, frozenset(ends)), sampler))

    def tokens(told: list[Told]) -> list[list[int]]:
        return [[one.token for one in told if one.prompt == p and one.token is not None] for p in range(3)]

    want = tokens(told())
    last = next(token for token in want[1] if token not in want[0] + want[2])
    place = want[1].index(last)
    sizes.clear()
    found = told(last)
    assert sizes == [3] * (place + 1) + [2] * (8 - place - 1), "it is one pass late, and no more"
    assert Told(1, None, END) in found and tokens(found) == [want[0], want[1][:place], want[2]]


def test_what_cannot_run_is_refused_before_anything_does(model):
    state = State(CFG, "fp32", sequences=1, blocks=1)
    for prompts, limits, error in (
        ([], Limits(1), ValueError),
        ([[]], Limits(1), ValueError),
        ([[1]], Limits(0), ValueError),
        ([[512]], Limits(1), ValueError),
        ([[1] * 49], Limits(1), ValueError),
        ([[1], [2]], Limits(1), RuntimeError),
    ):
        with pytest.raises(error):
            list(decode(Model(model.weights, object()), state, prompts, limits, Sampler()))
        assert state.pool.free == 1 and state.lengths == [0]


@pytest.mark.gpu
def test_recorded_steps_give_the_tokens_of_steps_launched_one_by_one(monkeypatch):
    """Over bounds that are reached, and prompts of which one ends first."""
    record, graphs, found = Steps._record, [], []
    monkeypatch.setattr(decoding, "AHEAD", 5)
    monkeypatch.setattr(Steps, "_record", lambda self: graphs.append(record(self)) or graphs[-1])
    weights = tree.random(CFG, "nvfp4", seed=2, device="cuda")
    for replayed in (True, False):
        monkeypatch.setattr(decoding, "Steps", lambda *args, how=replayed: Steps(*args, how))
        state = State(CFG, "nvfp4", sequences=2, blocks=2, device="cuda")
        with torch.inference_mode():
            told = list(decode(Model(weights), state, [[1, 2, 3], [4] * 39], Limits(20), Sampler(0.7, 5)))
        found.append([(one.prompt, one.token) for one in told])
    assert found[0] == found[1] and len(found[0]) == 20 + CFG.max_position_embeddings + 1 - 39
    assert len(graphs) > 3, "one for each bound, and for the sequence that is left"


@pytest.mark.gpu
def test_no_pass_on_a_gpu_waits_for_the_host():
    weights = tree.random(CFG, "nvfp4", seed=2, device="cuda")
    model, state = Model(weights), State(CFG, "nvfp4", sequences=2, blocks=2, device="cuda")
    with torch.inference_mode():
        found = decode(model, state, [[1, 2, 3], [4]], Limits(20), Sampler(0.7, 5))
        told = [next(found) for _ in range(4)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            told += list(found)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(told) == 40


def shown(capsys, printer: Printer, told: list[Told]) -> list[str]:
    found = []
    for one in told:
        printer.take(one)
        found.append(capsys.readouterr().out)
    return found


def test_a_character_is_printed_when_its_last_byte_is_there(known, capsys):
    ids = known.encode("é🙂z")
    assert len(ids) == 7, "a token a byte"
    printer = Printer(1, known)
    told = [Told(0, token, LENGTH if n == 6 else "") for n, token in enumerate(ids)]
    assert shown(capsys, printer, told) == ["", "é", "", "", "", "🙂", "z\n"]


def test_any_tokens_print_what_they_decode_to(known, capsys):
    gen = torch.Generator().manual_seed(5)
    for _ in range(50):
        ids = torch.randint(2, 300, (30,), generator=gen).tolist()
        told = [Told(0, token, LENGTH if n == 29 else "") for n, token in enumerate(ids)]
        assert "".join(shown(capsys, Printer(1, known), told)) == known.decode(ids) + "\n"
    assert shown(capsys, Printer(1, known), [Told(0, 500), Told(0, None, END)]) == ["", "\n"], "no token of its own"


def test_prompts_are_printed_one_after_the_other(known, capsys):
    printer = Printer(3, None)
    assert capsys.readouterr().out == "[1 of 3]\n"
    told = [Told(0, 7), Told(1, 8), Told(2, None, END), Told(1, 9), Told(0, 6, LENGTH), Told(1, 5), Told(1, 4, CONTEXT)]
    found = shown(capsys, printer, told)
    assert found == ["7", "", "", "", ",6\n[2 of 3]\n8,9", ",5", ",4\n[3 of 3]\n\n"]


def test_stop_text_ends_its_prompt_and_is_not_printed(known, capsys):
    ids, printer = known.encode("one stop two"), Printer(1, known, ("stop", "sto!"))
    reasons = [printer.take(Told(0, token)) for token in ids]
    assert capsys.readouterr().out == "one \n" and next(filter(None, reasons)) == "stop text"
    assert "".join(
        shown(capsys, Printer(1, known, ("oz",)), [*map(Told, [0] * len(ids), ids), Told(0, None, END)])
    ) == ("one stop two\n")
    ids, printer = [known.encode(letter)[-1] for letter in "xaab"], Printer(1, known, ("aab",))
    assert [printer.take(Told(0, token)) for token in ids][-1] == "stop text" and capsys.readouterr().out.strip() == "x"


def test_text_comes_from_standard_input_and_chat_through_the_template(copy, known, capsys, monkeypatch):
    path = copy(tokenizer_config={"chat_template": "{{ bos_token }}{{ messages[0].content }}!", "bos_token": "<"})
    assert generate.text.chat(path, "Hi") == "<Hi!"
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
    piped, said = run(capsys, "--checkpoint", path, "--chat", "--tokens", 3)
    assert piped == run(capsys, "--checkpoint", path, "--text", "<Hi!", "--tokens", 3)[0]
    assert "ops by tuned kernels" in said and len(list(filter(None, said.splitlines()))) == 5
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "nothing to continue" in refused(capsys, "--checkpoint", path)
    reading, writing = os.pipe()
    os.write(writing, b"1,2")
    os.close(writing)
    with os.fdopen(reading) as piped:
        monkeypatch.setattr(sys, "stdin", piped)
        assert "ids are given as --prompt 1,2,3" in refused(capsys), "without a checkpoint it is not left unread"


def refused(capsys, *words: object) -> str:
    """The one line that says what is wrong."""
    try:
        code, most = generate.main(["--device", "cpu", *map(str, words)]), 99
    except SystemExit as ended:  # of the parser
        code, most = ended.code, 1
    out, err = capsys.readouterr()
    assert code == 2 and not out and "Traceback" not in err and err.count("\n") <= most
    return err.strip().splitlines()[-1]


def test_what_is_wrong_with_a_text_is_said(folder, capsys):
    words = ["--checkpoint", folder, "--text"]
    assert "must hold a token or more, got ''" in refused(capsys, *words, "")
    assert "must be Unicode text" in refused(capsys, *words, "\udcff")
    long = refused(capsys, *words, "x", "--text", "z" * 49)
    assert "--text 2 must be within the context of 48 tokens, got 49" in long
    assert "none.json is not there" in refused(capsys, *words, "x", "--tokenizer", folder / "none.json")
    assert "is a directory, not a file" in refused(capsys, *words, "x", "--tokenizer", folder)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("generation_config", '{"eos_token_id": [1, 512]}', "eos_token_id must be tokens below 512, one or a list"),
        ("tokenizer_config", '{"add_bos_token": true}', "bos_token_id must be a token, got None"),
        ("tokenizer", "{", "tokenizer.json cannot be read as a tokenizer"),
        ("tokenizer", None, "tokenizer.json is not there: name a tokenizer.json with --tokenizer"),
        ("tokenizer", "a directory", "tokenizer.json is a directory, not a file: name a tokenizer.json"),
        *((name, "a directory", f"{name}.json: cannot be read") for name in ("generation_config", "tokenizer_config")),
    ],
)
def test_what_is_wrong_with_a_file_is_said(copy, capsys, name, content, said):
    file = copy() / f"{name}.json"
    file.unlink(missing_ok=True)
    file.mkdir() if content == "a directory" else file.write_text(content) if content else None
    assert said in refused(capsys, "--checkpoint", file.parent, "--text", "x")


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(folder, copy, capsys):
    cfg = dataclasses.replace(CFG, vocab_size=80, num_nextn_predict_layers=0, compress_ratios=(0,))
    path = copy()
    for file in path.glob("*.safetensors"):
        file.unlink()
    checkpoint.save(tree.random(cfg, "fp32", seed=2), path, "plain")
    assert "tokens of --text 1 must be integers from 0 to 79, got " in refused(
        capsys, "--checkpoint", path, "--text", "🙂"
    )


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--text", "x"], "--text needs a --checkpoint"),
        (["--prompt", "1,x"], "--prompt must be token ids"),
        (["--oops"], "generate.py: "),
        (["--checkpoint", "x", "--config", "tiny"], "--config is for random weights: leave it out, or --checkpoint"),
        (["--top-k", "5"], "they need a --temperature above 0"),
        (["--prompt", "-1"], "must be integers from 0 to 511, got -1"),
        (["--prompt", "1", "--text", "x"], "cannot be mixed"),
        (["--tokens", "0"], "--tokens must be 1 or more"),
        (["--gpus", "0"], "--gpus must be 1 or"),
        (["--gpus", "3"], "--gpus must divide o_groups of tiny"),
        (["--config", "pro"], "(weights of pro in bf16 take 3198 GB, "),
        (["--chunk", "0"], "--chunk must be 1 or more"),
        (["--draft", "--prompt", "1", "--prompt", "2"], "--draft decodes one prompt greedily"),
        (["--draft"], "--draft: tiny has no prediction layer"),
        (["--checkpoint", "nowhere", "--prompt", "1"], "cannot be read"),
        (["--chat", "--prompt", "1"], "--chat and --stop are about texts"),
        (["--stop", "", "--text", "x", "--tokenizer", "x"], "--stop must hold a letter or more"),
        (["--kernels", "fast"], "generate.py: --kernels must be"),
        (["--checkpoint", __file__, "--prompt", "1"], "must be a folder"),
        (["--config", "flash-61l256e"], "--config: a slice of flash must have 1 to 43 layers and 6 to 256 experts"),
        (["--config", "tiny-2l0e"], "2 to 8 experts, got 2 and 0"),
    ],
)
def test_wrong_arguments_get_one_line(words, match, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert match in refused(capsys, *words)


PREPARED = "from problems.dsv4_forward.generate import streams; streams.prepare(); "


def script(words: list[str], **more: object) -> subprocess.Popen:
    """A process of this interpreter, whose streams are not those of pytest."""
    environment = {**os.environ, **more.pop("env", {})}
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, text=True, **more)


@pytest.mark.parametrize("stderr", ["/dev/full", "closed", "pipe"])
def test_standard_error_that_takes_nothing_ends_nothing(stderr):
    closed = {"preexec_fn": lambda: os.close(2)} if stderr == "closed" else {}
    said = "import sys; print('x' * 9999, file=sys.stderr); sys.stderr.flush(); sys.stderr.write('y'); print('ü')"
    more = {"stdout": subprocess.PIPE, "env": {"PYTHONIOENCODING": "ascii"}}  # which has not that character
    read, write = os.pipe()
    os.close(read)  # no process reads what is written to the pipe
    with open(stderr if stderr.startswith("/") else write, "w") as to:
        one = script(["-c", PREPARED + said], stderr=None if closed else to, **more, **closed)
        assert (one.communicate()[0], one.returncode) == ("\\xfc\n", 0)


def test_an_interrupt_while_it_imports_is_quiet(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": {"PYTHONPATH": str(tmp_path)}}
    # A job that a shell has put into the background ignores interrupts, and its children do.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    one = script([generate.__file__], **pipes)
    assert (one.communicate(), one.returncode) == (("", ""), 130)
    raised = "streams.catch_interrupts()\nimport os\ntry: os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt: print(1)"
    one = script(["-c", PREPARED + raised], **pipes)
    assert (one.communicate(), one.returncode) == (("1\n", ""), 0)


def test_without_the_package_ids_still_work(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    said = refused(capsys, "--checkpoint", folder, "--text", "x")
    assert "needs the package tokenizers, which `make setup` installs" in said
    assert run(capsys, "--checkpoint", folder, "--prompt", "1,2", "--tokens", "2")[0].count(",") == 1
