"""harness/run.py refuses an option that has no effect in a run of the kind that is asked for."""

import pytest

from harness import run
from harness.results import output


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("nvfp4_gemv --lint --case m=16 --seed 1", "--lint does not go with --case, --seed"),
        ("nvfp4_gemv --check-only --seed 0", "--check-only does not go with --seed"),
        ("nvfp4_gemv --sanitize --timeout 5", "--sanitize does not go with --timeout"),
        ("nvfp4_gemv --mode test --processes 4", "--mode test does not go with --processes"),
        ("nvfp4_gemv --mode benchmark --seed 0", "--mode benchmark does not go with --seed"),
        ("nvfp4_gemv --mode benchmark --resume", "--mode benchmark does not go with --resume"),
        ("nvfp4_gemv --mode profile --all", "--mode profile does not go with --all"),
        ("dsv4_forward --mode latency --variant composed", "--mode latency does not go with --variant"),
        ("nvfp4_gemv --fail-on-regression 0", "--fail-on-regression goes with --against"),
        ("--list --json -", "--list does not go with --json"),
        ("--print-completion bash --case m=16", "--print-completion does not go with --case"),
    ],
)
def test_option_without_effect_is_refused(words, refused, capsys):
    assert run.main(words.split()) == output.USAGE_EXIT
    assert refused in capsys.readouterr().err
