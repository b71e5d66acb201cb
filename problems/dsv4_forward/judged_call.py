"""Make one call of the judged problem, as every submission does: `prepare` builds the model once, `run` is one call.

A call reads and writes the state where it lies. It never waits for the device: the host's side of the state, lengths
and blocks, comes with the inputs on the CPU. Data, Weights and Inputs are task.py's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from problems.common import load
from problems.dsv4_forward import ops
from problems.dsv4_forward.cache.batch import Batch, Planner
from problems.dsv4_forward.cache.state_layout import LayerState, StateLayout
from problems.dsv4_forward.model import Model
from problems.dsv4_forward.weights import config, layout, tree

Regions = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layers:
    """The part of a state that a forward pass reads and writes."""

    layout: StateLayout
    planner: Planner
    layers: tuple[LayerState, ...]


@dataclass(frozen=True)
class Prepared:
    """The model over the weights; and the planner of calls for each state layout, with its constants on the device."""

    model: Model
    planners: dict[StateLayout, Planner] = field(default_factory=dict)

    def planner(self, sizes: StateLayout, regions: Regions) -> Planner:
        """Return the planner for a state. The planner keeps a copy of the table, since the state may go."""
        if sizes not in self.planners:
            tables = (torch.empty_like(regions[name]) for name in ("length", "table"))
            cfg = self.model.config
            self.planners[sizes] = Planner(*tables, sizes.ring, cfg.ratios, unread=sizes.blocks, topk=cfg.index_topk)
        planner = self.planners[sizes]
        planner.table.copy_(regions["table"])
        return planner


def prepare(weights: NamedTuple, text: str, **functions: Callable) -> Prepared:
    """Build the model over task.Weights. text: what fills the ops, as ops.choose takes it; functions: of single ops.

    Copies no weights but what the winners lay out anew. ValueError as ops.choose and tree.assemble.
    """
    cfg = config.find(weights.config)
    tensors = layout.views(weights.bytes, layout.layout(cfg, weights.format))
    made = tree.assemble(cfg, weights.format, tensors)
    chosen = ops.choose(text, load.device_target(weights.bytes.device), made, functions)
    return Prepared(Model(made, chosen.ops))


def with_functions(**functions: Callable) -> Callable[[NamedTuple], Prepared]:
    """Return the `prepare` of a submission: the reference with these functions in place of single ops."""
    return lambda weights: prepare(weights, "reference", **functions)


@torch.inference_mode()
def run(data: NamedTuple) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one call and write outputs and state. data: task.Data with what prepare returned as its weights.

    -> the outputs. ValueError: a shape is not task.Inputs'.
    """
    prepared, inputs, outputs = data
    sizes = state_sizes(prepared, inputs)
    regions = sizes.views(inputs.state)
    planner = prepared.planner(sizes, regions)
    batch = plan(planner, inputs)
    layers = Layers(sizes, planner, sizes.layers(regions)[: sizes.config.num_hidden_layers])
    logits = prepared.model.forward(batch, layers).logits
    regions["length"].index_add_(0, batch.plan.sequence_ids, batch.advance)
    outputs.logits.copy_(logits)
    torch.argmax(logits, dim=1, out=outputs.next)
    return tuple(outputs)


def state_sizes(prepared: Prepared, inputs: NamedTuple) -> StateLayout:
    """Return the layout of the state in task.Inputs."""
    weights = prepared.model.weights
    return StateLayout(
        weights.config, weights.format, len(inputs.tokens), inputs.blocks.numel(), inputs.chunk, snapshots=0
    )


def plan(planner: Planner, inputs: NamedTuple) -> Batch:
    """Plan the call: every sequence gets its row of tokens; its blocks are there already."""
    count, new = inputs.tokens.shape
    return planner.planned(
        tuple(range(count)), inputs.tokens.flatten(), [new] * count, inputs.lengths.tolist(), stamps=()
    )


def compile_for(problems: tuple[str, ...], target: str) -> list:
    """Compile the winners of `problems`, and this folder's kernels, for `target`."""
    kernels = [module for module in ops.KERNELS if target in module.TARGETS]
    artefacts = [artefact for module in kernels for artefact in module.compile_for(target)]
    for name in problems:
        winner = load.variant(name, load.winner(load.PROBLEMS / name, target))
        artefacts += winner.compile_for(target) if hasattr(winner, "compile_for") else []  # torch alone has none
    return artefacts
