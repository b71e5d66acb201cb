"""Compare dsv4_kernels.transformers with transformers' own functions on a GPU: python packaging/compare_transformers.py

Four layers of V4-Flash with random bf16 weights, 55 GB, and 15 GB more for experts in NVFP4. A line for each choice of
parts: of 20 decode steps of one sequence that are given the same tokens, how far logits are from those of transformers
as it is, and at how many of them, and of the first of them, the largest is the same; and tokens a second, the median of
rounds in which all take turns, for at most 50 s. --tiny: a small model on the CPU, to try the script.
"""

import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:] = [str(ROOT), *sys.path[1:], str(ROOT / "packaging")]  # last: an installed wheel is before it

from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache  # noqa: E402

from dsv4_kernels import transformers as ours  # noqa: E402

TOKENS, ROUNDS, SECONDS = 20, 9, 50
SEED = 1106  # of the prompt: of the tiny model's first tokens each is ahead of all others by more than roundings
OWN = ("grouped_mm", "eager", False, "bf16")  # experts, attention, norms of ours, weights of our experts
PARTS = {
    "transformers": OWN,
    "transformers, experts one by one": ("eager", "eager", False, "bf16"),  # its own other way
    "experts": (ours.NAME, "eager", False, "bf16"),
    "experts, norms": (ours.NAME, "eager", True, "bf16"),
    "experts, norms, attention": (ours.NAME, ours.NAME, True, "bf16"),
    "experts in NVFP4, norms, attention": (ours.NAME, ours.NAME, True, "nvfp4"),
}
YARN = {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}
SLICE = {"compress_ratios": [0, 0, 4, 128], "num_hidden_layers": 4, "rope_parameters": YARN, "eos_token_id": None}
TINY = {"vocab_size": 96, "hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 64}
TINY |= {"q_lora_rank": 64, "num_experts_per_tok": 3, "n_routed_experts": 8, "o_groups": 2, "o_lora_rank": 32}
TINY |= {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 64, "sliding_window": 16, "initializer_range": 0.1}
TINY |= {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
TINY |= {"mlp_layer_types": ["hash_moe"] * 4, "hc_sinkhorn_iters": 3}  # no choice of experts depends on a rounding


def main(device: str, changes: dict) -> None:
    """Print the table, of the slice, or with changes of a small model."""
    model = made(device, torch.bfloat16, changes)
    size = 1, 40 if changes else 300
    prompt = torch.randint(model.config.vocab_size, size, generator=torch.manual_seed(SEED)).to(device)
    print(f"{device}, torch {torch.__version__}, {ours.__file__}", flush=True)
    switch(model, OWN)
    tokens, logits, _ = decode(model, prompt)
    for name, parts in PARTS.items():
        switch(model, parts)
        _, found, _ = decode(model, prompt, tokens)
        alike = (found.argmax(1) == tokens).int()  # where all before are alike, greedy decoding goes the same way
        far = f"logits apart {float((found - logits).abs().max()):.1e} of {float(logits.std()):.2f}"
        print(f"{name:36}{far}, greedy tokens alike: all {int(alike.sum())}, first {int(alike.cumprod(0).sum())}")
    times: dict[str, list[float]] = {name: [] for name in PARTS}
    start = time.perf_counter()
    for _ in range(1 if changes else ROUNDS):
        if time.perf_counter() - start < SECONDS:
            for name, parts in PARTS.items():
                switch(model, parts)
                times[name].append(decode(model, prompt)[2])
    for name, found in times.items():
        spread = f"{1 / max(found):.1f} to {1 / min(found):.1f} in {len(found)} rounds"
        print(f"{name:36}{1 / statistics.median(found):8.1f} tokens a second ({spread})")


def made(device: str, dtype: torch.dtype, changes: dict) -> DeepseekV4ForCausalLM:
    """The slice, or with changes a small model, with random weights made on the device. Seeded."""
    config = DeepseekV4Config(**SLICE | changes, num_hash_layers=3, max_position_embeddings=1048576)
    torch.manual_seed(1)
    with torch.device(device):
        model = DeepseekV4ForCausalLM._from_config(config, dtype=dtype).eval()
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # else all tokens have expert 0, several times
                buffer.copy_(torch.rand(len(buffer), config.n_routed_experts).argsort(1)[:, : buffer.shape[1]])
    return model


def switch(model: DeepseekV4ForCausalLM, parts: tuple[str, str, bool, str]) -> None:
    """Let these parts compute."""
    experts, attention, norms, kind = parts
    ours.register(kind)
    model.set_experts_implementation(experts)
    model.set_attn_implementation(attention)
    ours.replace_norms(model, back=not norms)


@torch.inference_mode()
def decode(model: DeepseekV4ForCausalLM, prompt: torch.Tensor, given: torch.Tensor | None = None) -> tuple:
    """Decode TOKENS steps behind a prompt, greedily, or of the tokens given -> tokens, logits, seconds of a step."""
    cache = DynamicCache(config=model.config)
    out = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    tokens, logits = [], []
    out.argmax().item()  # waits for the GPU
    start = time.perf_counter()
    for step in range(TOKENS):
        logits.append(out.float())
        tokens.append(out.argmax(1) if given is None else given[step : step + 1])
        out = model(tokens[-1].unsqueeze(1), past_key_values=cache, use_cache=True).logits[:, -1]
    out.argmax().item()
    return torch.cat(tokens), torch.cat(logits), (time.perf_counter() - start) / TOKENS


if __name__ == "__main__":
    tiny = sys.argv[1:] == ["--tiny"]
    if not tiny and (sys.argv[1:] or not torch.cuda.is_available()):
        sys.exit("compare_transformers.py: needs an NVIDIA GPU that torch can use, or --tiny")
    main("cpu" if tiny else "cuda", TINY if tiny else {})
