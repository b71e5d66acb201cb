"""The judge. One direction: runner <- results <- problem <- sandbox <- checker <- judge <- lint, tools <- run.py.

runner     all that enters the sandbox: runs a submission; the wire, the shared buffers, the clocks
results    records, statistics, ranking, what the machine is, text made safe
problem    problem folders, cases, what a submission is made of, the scan
sandbox    what a submission may reach, its folder, the reaper, stopping its processes
checker    makes inputs, knows the reference, judges outputs
judge      a run: sessions, phases, confirmation, journal, verdicts, what is printed
lint       what a problem's check lets through
tools      compile, profile, sanitize, the end-to-end check
"""
