"""Problem folders of the judge's own tests, and which rows of the taxonomy no submission can act out."""

# Of the taxonomy of cheats and mis-measurements that tests/exploits follows. From 55 on, against the judge's clock on a
# CPU: 55 says "done" early; 56 starts before "go"; 57 is not to be stopped; 58 plays with the memory that it shares; 59
# returns tensors of its own (GPU MODE); 60 malformed replies; 61 a process that should not be started again.
ROWS = 61
# Row -> why there is no file for it, and what holds it instead.
UNACTED = {
    3: "launches on the legacy default queue are recorded like the rest (tests/harness/judge/test_gpu_judge.py)",
    28: "torch is allowed in a submission, so calling a library is no offence; docs/rules.md says so",
    34: "the judge's flush, not a submission's doing: its size follows the device's cache (harness/player/player.cu)",
    36: "clocks and throttling: recorded with each case, and pairs cancel them (tests/harness/results/test_stats.py)",
    37: "drift between two measurements: pairs are interleaved (tests/harness/results/test_stats.py)",
    38: "first-call effects: the control that compiles lazily has them, and they stay out of its samples",
    41: "best of many: a confirmation run and the count of attempts (tests/harness/judge/test_recorded.py)",
    42: "a missing case leaves a variant unranked (tests/leaderboard/test_board.py)",
    43: "a failed case has no time at all (tests/leaderboard/test_board.py)",
}
