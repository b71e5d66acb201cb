"""sm90_few_heads: what sm90_wgmma does with up to 32 heads, for any number: mma.sync, 16 heads a block."""

from task import input_t, output_t, unpack

from problems.common import build, load

TARGETS = ("sm90",)


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return load.variant("fmha_decode", "sm90_wgmma").compile_for(target)


def custom_kernel(data: input_t) -> output_t:
    """Write data.out, bf16 (B, S, H, 512), and data.lse, fp32 (B, S, H), and return them. Errors as sm90_wgmma's."""
    winner = load.variant("fmha_decode", "sm90_wgmma")
    launch, _ = winner.cluster_for(unpack(data), winner.clusters_that_fit())
    return winner.attend_few_heads(data, launch)
