# What harness/tools/remote.py does on a host: `sh -c` there gets this text, and behind it the folder and a call.
# The folder has root/ (see checkout.py), in it the checkout at $tree with the host's own .venv and .build; and job/, the
# run: arguments, pid, log, code (its exit code), json, events, and fetched, once the client has all that the run made.
set -eu

processes() { # of the run, also those that have left its session
    grep -lzxF "KERNEL_JOB=$PWD/job" /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3
}

running() { [ -s job/pid ] && processes | grep -qx "$(cat job/pid)"; }

kill_all() { while left=$(processes) && [ "$left" ]; do kill -9 $left || :; sleep 0.1; done; }

state() { # running, ended, or idle where nothing is left to fetch; on the next line the arguments
    if running; then echo running; elif [ ! -d job ] || [ -f job/fetched ]; then echo idle; else echo ended; fi
    cat job/arguments 2>/dev/null || :
}

begin() { # ARGUMENTS NAME=VALUE NAME=VALUE ARGUMENT ...: for `python -m harness`, as one text and one by one
    [ ! -f job/fetched ] || rm -r job
    mkdir job
    kill_all # what an earlier run has left
    mkdir -p "$tree/leaderboard/results" "$tree/leaderboard/out"
    echo "$1" >job/arguments
    # Not with `&`, for which the run would ignore SIGINT. A login shell, for its PATH.
    env KERNEL_JOB="$PWD/job" TREE="$tree" "$2" "$3" setsid --fork sh -lc '
        trap : INT
        echo $$ >job/pid
        shift 3
        cd "$TREE"
        export PATH="$PATH:/usr/local/cuda/bin"
        make --no-print-directory setup && .venv/bin/python -m harness "$@"
        echo $? >"$KERNEL_JOB/code"
    ' sh "$@" >job/log 2>&1 </dev/null
    until [ -s job/pid ]; do sleep 0.1; done
}

follow() { # the whole log, until the run ends
    tail -n +1 -s 0.2 -f --pid="$(cat job/pid)" job/log
    [ -f job/code ] || echo "the run was killed, or the host restarted"
}

stop() { # as Ctrl-C does, and after 10 s by force
    ! running || kill -s INT -- "-$(cat job/pid)"
    for _ in $(seq 50); do ! running || sleep 0.2; done
    kill_all
    [ -f job/code ] || echo 130 >job/code
}

code() { cat job/code 2>/dev/null || echo 2; }

made() { cat "job/$1" 2>/dev/null || :; } # json or events
