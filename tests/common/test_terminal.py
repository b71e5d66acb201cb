"""Text of unknown origin on a terminal, and what commands say of their arguments."""

import argparse

import pytest

from problems.common import terminal


def test_text_from_elsewhere_cannot_steer_the_terminal():
    assert terminal.visible("a\x1b[2Jb\u202ec\td\ne é\u2028") == "a\\x1b[2Jb\\u202ec\td\ne é\\u2028"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "x"], "--number must be 1 or more, got 'x'"),
        (["--name"], "argument --name: expected one argument"),
        (["--nmae=x"], "unknown option --nmae; did you mean --name? ("),
        (["--oops"], "unknown option --oops (one of -h, --help"),
        (["--kind", "Secnd"], "--kind got 'Secnd'; did you mean second? (one of first, second)"),
    ],
)
def test_wrong_arguments_are_one_line(words, said, capsys):
    parser = terminal.Parser("command")
    parser.add_argument("-n", "--number", type=terminal.Value(int, "1 or more"))
    parser.add_argument("--name")
    parser.add_argument("--kind", choices=("first", "second"))
    assert parser.parse_args(["-n", "3"]).number == 3
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.startswith(f"command: {said}") and err.endswith(" (see --help)\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [["--numb", "3"], ["--numb=3"], ["--k", "a"]])
def test_a_shortened_option_is_unknown(words, capsys):
    parser = terminal.Parser("command")
    parser.add_argument("-n", "--number", type=int)
    parser.add_argument("--kind")
    assert parser.parse_known_args(words)[1] == words
    assert parser.parse_args(["-n3", "--kind=a"]) == argparse.Namespace(number=3, kind="a")
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert capsys.readouterr().err.startswith(f"command: unknown option {words[0].partition('=')[0]}")


def test_an_error_about_a_parameter_names_its_option():
    texts = "top_k must be 0", "config must be one of a", "a slice must be whole"
    said = {str(terminal.of_option(ValueError(text), "--config", "--top-k")) for text in texts}
    assert said == {"--top-k must be 0", "--config must be one of a", "--config: a slice must be whole"}
