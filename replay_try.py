import sys, time, os, json, statistics, traceback
from pathlib import Path
sys.path.insert(0, os.getcwd())
from harness.problem import folders
from harness.judge.handle import CheckerHandle
from harness.judge import replies
from harness.sandbox.process import Child
from harness.player import player as P
from problems.common import build, load

T0 = time.monotonic()
def note(*a): print(f"[{time.monotonic()-T0:6.2f}]", *a, flush=True)

def ask(child, message, fds=(), limit=120):
    reply, got = child.request(message, limit, tuple(fds))
    if "failed" in reply: raise RuntimeError(f"{message.get('op')}: {reply.get('failed')}: {reply['text'][:1500]}")
    return reply, got

def one(problem_name, variant, pick, samples=48):
    problem = folders.find(problem_name)
    case = [c for c in problem.benchmarks["cuda"] if pick in str(c)] or problem.benchmarks["cuda"]
    case = case[0]
    checker = CheckerHandle(problem, "cuda")
    t = time.monotonic()
    for child in CHILDREN: child.kill()
    CHILDREN.clear()
    player = Child("harness.player.player"); CHILDREN.append(player); CHILDREN.append(checker.child)
    hello, _ = ask(player, {"library": str(P.artefact("sm90").path)})
    note("player", hello, f"{time.monotonic()-t:.2f} s")
    runner = Child("harness.runner.runner", {"CUDA_MODULE_LOADING": "LAZY"})
    CHILDREN.append(runner)
    file = problem.folder / "variants" / f"{variant}.py"
    runner.send({"device": "cuda", "folder": str(problem.folder), "file": str(file), "files": None, "compile": False, "common": None, "records": "sm90"})
    made = checker.ask({"op": "new_weights", "case": case.params, "seed": 5})
    content = checker.ask({"op": "content", "case": case.params, "seed": 7})
    sizes = {**content["parts"], "weights": made["bytes"]}
    note(case, sizes)
    scratch_bytes = (2 << 30) + 2 * made["bytes"]
    scratch, sfd = ask(player, {"op": "scratch", "bytes": scratch_bytes})
    memory, fds = ask(player, {"op": "memory", "number": 1, **sizes})
    dup = [os.dup(fd) for fd in fds]
    attached, _ = checker.request({"op": "attach", "runner": "x", "sizes": sizes, "copies": P.COPIES}) if False else (None, None)
    checker.child.send({"op": "attach", "runner": "x", "sizes": sizes, "copies": P.COPIES}, tuple(fds))
    attached, _ = checker.child.receive(60)
    if "failed" in attached: raise RuntimeError(attached["text"])
    checker.ask({"op": "fill", "runner": "x", "buffer": 0})
    started, _ = runner.receive(120)
    if "failed" in started: raise RuntimeError(started["text"])
    note("runner started")
    ask(runner, {"op": "scratch", "address": scratch["address"], "bytes": scratch_bytes // P.PAGE * P.PAGE}, sfd)
    count = (1 if sizes["inputs"] else 0) + (1 if sizes["outputs"] else 0)
    first = dup[:count] + dup[P.COPIES * count:]
    t = time.monotonic()
    raw, images = ask(runner, {"op": "record", "number": 1, "address": memory["address"], "weights_address": memory["address"] + P.WEIGHTS,
        "sizes": sizes, "weights": attached["weights"], "baseline": variant.startswith("peer"), **content["open"]}, first)
    for fd in dup: os.close(fd)
    note(f"record {time.monotonic()-t:.2f} s, images {len(images)}")
    got = replies.read(replies.Recorded, raw)
    if got.unrecorded:
        note("UNRECORDED", got.unrecorded); return
    note("nodes", [(n.kind, getattr(n, "name", "")[:40], getattr(n, "early", None)) for n in got.nodes][:8], len(got.nodes), "variables", [(v.name[:30], len(v.value)//2) for v in got.variables], "used", got.used)
    verdict = checker.ask({"op": "judge", "runner": "x", "buffer": 0, "claims": [c.model_dump() for c in got.claims], "baseline": False, "fixed": False})
    note("in the runner:", verdict["status"], verdict["reason"][:200])
    t = time.monotonic(); runner.kill(); note(f"killed {time.monotonic()-t:.2f} s")
    t = time.monotonic()
    ask(player, {"op": "load", "number": 1, "before": [n.model_dump(by_alias=True) for n in got.before], "nodes": [n.model_dump(by_alias=True) for n in got.nodes], "variables": [v.model_dump() for v in got.variables], "used": got.used}, images)
    note(f"loaded {time.monotonic()-t:.3f} s")
    ask(player, {"op": "wake", "seconds": 0.05})
    times, hosts, bad, spent, empties = [], [], [], [0, 0, 0, 0], []
    for i in range(samples):
        a = time.monotonic()
        content = checker.ask({"op": "content", "case": case.params, "seed": 1000 + i})
        b = time.monotonic()
        checker.ask({"op": "fill", "runner": "x", "buffer": i % 2})
        c = time.monotonic()
        said, _ = ask(player, {"op": "play", "number": 1, "copy": i % 2, "what": 0, "limit_s": 5})
        d = time.monotonic()
        verdict = checker.ask({"op": "judge", "runner": "x", "buffer": i % 2, "claims": None, "baseline": False, "fixed": True})
        e = time.monotonic()
        for k, v in enumerate((b - a, c - b, d - c, e - d)): spent[k] += v / samples * 1e3
        times.append(said["us"]); hosts.append(said["host_us"])
        if verdict["status"] != "PASSED": bad.append(verdict["reason"][:150])
        checker.ask({"op": "fill", "runner": "x", "buffer": (i + 1) % 2})
        if i % 3 == 0: ask(player, {"op": "play", "number": 1, "copy": i % 2, "what": 1, "limit_s": 5})
        empties.append(ask(player, {"op": "play", "number": 1, "copy": i % 2, "what": 1, "limit_s": 5})[0] | {"odd": 0})
    med = statistics.median
    e_us, q = med(e["us"] for e in empties), statistics.quantiles(times, n=4)
    # turns alternate: of call i the turn is odd or even
    turns, t = [], 0
    for i in range(samples):
        t += 1; call = t
        if i % 3 == 0: t += 1
        t += 1; turns.append((call % 2, t % 2))
    out = []
    for odd in (0, 1):
        h = [hosts[i] for i in range(samples) if turns[i][0] == odd]
        e = [empties[i]["host_us"] for i in range(samples) if turns[i][1] == odd]
        out.append(f"flag{odd}: host-empty {med(h) - med(e):.2f} empty {med(e):.2f}")
    print(f"ROW {problem_name}/{variant} {str(case)[:40]} | event {q[1]:.2f} ({q[0]:.2f}-{q[2]:.2f}) event-empty {q[1]-e_us:.2f} empty {e_us:.2f} | {out} | wrong {len(bad)} {bad[:1]} | ms content {spent[0]:.1f} fill {spent[1]:.1f} play {spent[2]:.1f} judge {spent[3]:.1f}", flush=True)
    reads = []
    nbytes = min(content["bytes"] or 0 or case.bytes or 0, sizes["inputs"] + sizes["outputs"])
    for k in range(hello["readers"]):
        reads.append(statistics.median(ask(player, {"op": "play", "number": 1, "copy": 0, "what": 2 + k, "bytes": nbytes // 16 * 16, "limit_s": 5})[0]["us"] for _ in range(5)))
    note("readers", [round(r, 1) for r in reads])
    player.close(); checker.close()

CASES = [("moe_gemm", "sm90_grouped", "tokens=64"), ("fmha_decode", "peer_flashmla", "batch=8"), ("nvfp4_gemv", "peer_torch_fp16", ""), ("nvfp4_gemv", "sm90_dp4a", ""), ("mhc_site", "sm90_columns", ""), ("fmha_decode", "sm90_wgmma", "batch=8"), ("mhc_site", "sm90_triton", ""), ("linear_decode", "sm90_mma", ""), ("indexer", "sm90_join", ""), ("moe_gemm", "sm90_grouped", "tokens=1 "), ("linear_decode", "peer_torch", ""), ("nvfp4_gemv", "sm90_cute", ""), ("mhc_site", "torch_eager", "")]
words = sys.argv[1:]
CHILDREN = []
for p, v, pick in CASES:
    if words and not any(w in f"{p}/{v}" for w in words): continue
    try: one(p, v, pick)
    except Exception:
        for child in CHILDREN: child.kill()
        note("FAILED", p, v); print(traceback.format_exc()[-1500:])
        if "--go" not in words: break
