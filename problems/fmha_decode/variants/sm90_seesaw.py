"""sm90_seesaw: sm90_wgmma with two warpgroups that score in turn wherever tiles have 48 entries."""

from task import input_t, output_t

from problems.common import build, load

TARGETS = ("sm90",)


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return load.variant("fmha_decode", "sm90_wgmma").compile_for(target)


def custom_kernel(data: input_t) -> output_t:
    """Write data.out, bf16 (B, S, H, 512), and data.lse, fp32 (B, S, H), and return them. Errors as sm90_wgmma's."""
    return load.variant("fmha_decode", "sm90_wgmma").attend(data, seesaw_tiles=1)
