"""The judge. Where what lives:

what is asked          run, problem, plan, task_yml, sources, scan, endtoend
how a run goes         judging, phases, session, entrant, confirm, beside (compile, profile, sanitize), solo, profiling
three roles            session (the parent's side), checker, runner; between them process, guard, wire, slots, tree
what a runner may      sandbox, confine, private (its folder), compiling, device_lock
the clock and audits   clock, flush, native with judge.cu and judge.cpp, queues, tamper
what comes out         verdict, journal, record, ranking, stats, console, environment
problems themselves    lint, trivial, values
"""
