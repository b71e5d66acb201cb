"""The time limits of a session, in seconds, and how often it tries again."""

IMPORT_LIMIT_S = 120  # importing torch and the submission
COMPILE_LIMIT_S = 120  # the first call of a process, which may compile; and compile checks, per artefact set
PREPARE_LIMIT_S = 60
CALL_LIMIT_S = 30
CHECKER_LIMIT_S = 600  # a reference is slow on purpose
CANARY_LIMIT_S = 60  # for the device to answer after a runner was lost; the kernel ends a hung one by then
GIVE_UP_AFTER = 3  # processes that a submission may lose in one phase
SETTLE_S = 0.05  # between looks at processes that are about to end
SETTLES = 5  # such looks before a process counts as left behind
MOST_PROCESSES = 1000  # of each of two that are compared
