"""The verdicts, and their exit codes."""

from typing import Literal

# Verdicts and their exit codes, the gravest first: where a submission failed in several ways, the first is its verdict.
EXIT_CODES = {
    "RULE_BROKEN": 3,
    "CHEAT_SUSPECTED": 3,
    "COMPILE_ERROR": 4,
    "RUNTIME_ERROR": 4,
    "TIMEOUT": 5,
    "INCORRECT": 1,
    "INVALID_MEASUREMENT": 6,
    "UNSUPPORTED": 7,
    "COMPILED": 0,
    "MODEL_CHECKED": 0,
    "PASSED": 0,
}
STATUSES = tuple(EXIT_CODES)
Status = Literal[STATUSES]  # ty: ignore[invalid-type-form]
