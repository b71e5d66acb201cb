"""A model of sm_90a and sm_100a that executes PTX on a CPU: what a kernel computes, and where it breaks a rule.

    import ptx_model
    ptx_model.run(ptx_text, "kernel", grid=4, block=128, arguments=(x, y, 7), shared_bytes=1024, policy="lazy")

It executes the text that ptxas receives: warps, shared memory, mbarriers, bulk copies and tensor maps, mma.sync, wgmma,
tensor memory and tcgen05, clusters. README.md says what it checks and what it cannot see. No time is modelled.
"""

from ptx_model.execute import run, run_launch
from ptx_model.faults import KINDS, Fault
from ptx_model.policies import NAMES as POLICIES
from ptx_model.tensor_map import TensorMap

__all__ = ["KINDS", "POLICIES", "Fault", "TensorMap", "run", "run_launch"]
