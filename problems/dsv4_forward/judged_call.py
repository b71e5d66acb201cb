"""One call of the judged problem, as every submission to it makes it: the weights become a model once, then each call
runs it on a state where that lies.

Nothing here waits for the device: the host's side of the state, lengths and blocks, comes with the inputs on the CPU.
Data, Weights and Inputs are task.py's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from problems.common import load
from problems.dsv4_forward import ops
from problems.dsv4_forward.cache.batch import Batch, Planner
from problems.dsv4_forward.cache.state_layout import LayerState, Slab
from problems.dsv4_forward.kernels import fused
from problems.dsv4_forward.model import Model
from problems.dsv4_forward.weights import config, layout
from problems.dsv4_forward.weights import tree as trees

Regions = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layers:
    """What a forward pass sees of a state."""

    layers: tuple[LayerState, ...]


@dataclass(frozen=True)
class Prepared:
    """The model over the weights; and by the sizes of a state what plans its calls, constants on the device."""

    model: Model
    planners: dict[Slab, Planner] = field(default_factory=dict)

    def planner(self, sizes: Slab, regions: Regions) -> Planner:
        """Plans a call on the state whose regions are given, with a table of its own: states come and go."""
        if sizes not in self.planners:
            tables = (torch.empty_like(regions[name]) for name in ("length", "table"))
            self.planners[sizes] = Planner(*tables, sizes.ring, self.model.config.ratios, unread=sizes.blocks)
        planner = self.planners[sizes]
        planner.table.copy_(regions["table"])
        return planner


def prepare(weights: NamedTuple, text: str, **slots: Callable) -> Prepared:
    """weights: task.Weights. text: what fills the slots, as ops.choose takes it; slots: functions of single ones.

    Copies no weights but what the kernels' adapters lay out anew. ValueError as ops.choose and weights.assemble.
    """
    cfg = config.find(weights.config)
    tensors = layout.views(weights.bytes, layout.layout(cfg, weights.format))
    tree = trees.assemble(cfg, weights.format, tensors)
    chosen = ops.choose(text, load.device_target(weights.bytes.device), tree)
    return Prepared(Model(tree, replace(chosen.kernels, **slots)))


@torch.inference_mode()
def run(data: NamedTuple) -> tuple[torch.Tensor, torch.Tensor]:
    """data: task.Data with what prepare returned as its weights. Writes outputs and state; -> the outputs.

    ValueError: a shape is not task.Inputs'.
    """
    prepared, inputs, outputs = data
    sizes = state_sizes(prepared, inputs)
    regions = sizes.views(inputs.state)
    batch = plan(prepared.planner(sizes, regions), inputs)
    logits = prepared.model.forward(batch, Layers(sizes.layers(regions)[: sizes.config.num_hidden_layers])).logits
    regions["length"].index_add_(0, batch.slot, batch.advance)
    outputs.logits.copy_(logits)
    torch.argmax(logits, dim=1, out=outputs.next)
    return tuple(outputs)


def state_sizes(prepared: Prepared, inputs: NamedTuple) -> Slab:
    """Of the state in task.Inputs."""
    weights = prepared.model.weights
    return Slab(weights.config, weights.format, len(inputs.tokens), inputs.blocks.numel(), inputs.chunk, snapshots=0)


def plan(planner: Planner, inputs: NamedTuple) -> Batch:
    """Every sequence gets its row of tokens; its blocks are there already."""
    count, new = inputs.tokens.shape
    return planner.planned(
        tuple(range(count)), inputs.tokens.flatten(), [new] * count, inputs.lengths.tolist(), inputs.blocks.tolist(),
        stamps=(),
    )  # fmt: skip


def compile_for(problems: tuple[str, ...], target: str) -> list:
    """Artefacts of the winners of `problems`, and of this folder's own kernels, for `target`."""
    artefacts = fused.compile_for(target) if target in fused.TARGETS else []
    for name in problems:
        folder = load.PROBLEMS / name
        winners = load.constants(folder / "submission.py", "WINNERS")["WINNERS"]
        artefacts += load.variant(name, load.winner(folder, winners, target)).compile_for(target)
    return artefacts
