"""sm90_mma: weights in units, through a ring a warp to mma.sync with tokens as columns; each is read once for 32. More
tokens: wgmma on e4m3 or bf16 values (sm90_prefill.cu).

It also has prepare_expert and expert, norms and with_norm, which problems/linear_decode/in_model.py describes.
"""

import math
from ctypes import Array, Structure, addressof, c_float, c_int, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from task import (
    BLOCK,
    FEW_TOKENS,
    FORMATS,
    MOST_TOKENS,
    Matrix,
    Weights,
    input_t,
    output_t,
    parts,
    unpack_call,
    unpack_expert,
    unpack_weights,
)

from problems.common import build, early, fp8, load, nvfp4

TARGETS = ("sm90", "sm100")  # sm100: compiled, with the same instructions
SOURCE = Path(__file__).with_suffix(".cu")
PREFILL = SOURCE.with_name("sm90_prefill.cu")
PREFILL_TOKENS = 256  # a multiple of the tokens of any tile there: tokens' scales lie in rows of so many
NVFP4_UNIT, REST = 1152, 256.0  # bytes; what a product of units lacks, see nvfp4_units.cuh
# As in sm90_mma_formats.cuh: rows and columns of a unit, warps of a block, matrices of a link, blocks of a cluster (of
# 4 only 31 fit on an H200 at once, and the 32nd cluster doubled the time), parts of k, links of a chain in one launch.
BLOCK_N, BLOCK_K, WARPS, MAX_OUTPUTS, MAX_CLUSTER, MAX_SECTIONS, MAX_LINKS = 32, 64, 16, 4, 2, 8, 4
CHAIN_TOKENS = 8  # of a chain in one launch
MAX_CHUNKS = 32
BLOCK_COLUMNS = 2048  # that a block can hold of 32 tokens
PREFETCH_LINES = 32  # of 128 bytes of the next link, that each warp asks for to L2
# Values that a block takes without much delay: 16 tokens of 2048 columns, and half of that where each is divided twice.
EASY, EASY_NVFP4 = 2**15, 2**14
CLUSTER_FP8 = 8  # tokens of fp8 up to which a cluster shares the tiles of a matrix with sections
IN_BLOCK, IN_BLOCK_NVFP4 = 16, 2  # tokens that each block quantises itself; more are quantised once, by another kernel
# Of inputs that are normed: tokens, and values that a block has in registers; columns of a warp.
NORMED_TOKENS, MAX_NORMED, NORMED_COLUMNS = 8, 8192, 256
PASS = 0.5  # what adding the chunks' sums costs, in blocks of 128 that a warp multiplies by
# Of the GPU that chunks are chosen for. Sums are added by chunks, so bits would depend on the GPU if it were asked; the
# grid is chosen by the one that runs.
MULTIPROCESSORS = 132


class Link(NamedTuple):
    """What prepare keeps of a link, its matrices one below the other.

    units    uint8 or bf16, units as sm90_mma.cu describes them, [tiles][k / 64]
    scales   uint8 (tiles, ceil(k / 128)) of fp8, else None
    factors  fp32 (tiles,) of nvfp4, else None
    inputs   fp32 (groups,) of nvfp4 that quantises, the input scales; else None
    groups   each has as many tiles, and an input of its own: a part of x, or all of x with another input scale
    gated    whether the link is gates and ups, a tile of each in turn
    """

    units: torch.Tensor
    scales: torch.Tensor | None
    factors: torch.Tensor | None
    inputs: torch.Tensor | None
    quantise: bool
    groups: int
    sizes: tuple[tuple[int, int, int], ...]
    chunks: int
    gated: bool = False

    @property
    def fewest(self) -> int:
        """Blocks that share a tile at least: a block has a chunk a warp, or a gate's chunks and its up's."""
        return max(1, self.chunks // (WARPS // 2 if self.gated else WARPS))

    @property
    def sections(self) -> int:
        """Parts of k, by shapes alone, whose chunks' sums are added up by themselves first: as many as blocks that
        share a tile of 32 tokens, where these are too many for a cluster, else 1.
        """
        blocks = max(self.fewest, _blocks_of(self.sizes[0][2]))
        return blocks if blocks > MAX_CLUSTER else 1

    @property
    def exchanged(self) -> int:
        """Words of 8 bytes in which blocks exchange the sections' sums of 32 tokens; 0: they never do."""
        if self.sections == 1:
            return 0
        tiles = sum(g * n for g, n, _ in self.sizes) // BLOCK_N // self.groups  # of a group
        at_once = WARPS * self.sections // self.chunks
        return 2 + self.groups * -(-tiles // at_once) * at_once * self.sections * BLOCK_N * FEW_TOKENS


class State(NamedTuple):
    """What prepare keeps in the weights' place, for one call at a time.

    met       int32 (), what blocks count at between links
    exchange  int64 (words,), zero at first: Exchange of sm90_mma_reduce.cuh, for any of the links
    many      for more than FEW_TOKENS, the matrices by link; where codes are not multiplied they are decoded, in bf16,
              with neither scales; () of a State without them
    """

    format: str
    links: tuple[Link, ...]
    met: torch.Tensor
    exchange: torch.Tensor
    many: tuple[tuple[Matrix, ...], ...] = ()

    @property
    def sizes(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """(groups, n, k) of each matrix, by link."""
        return tuple(link.sizes for link in self.links)


class _Output(Structure):
    _fields_ = (("out", c_void_p), ("columns", c_int), ("first_tile", c_int))


class _Link(Structure):
    """Link of sm90_mma_formats.cuh."""

    _fields_ = (
        *((name, c_void_p) for name in ("units", "scales", "factors", "input_scales", "x", "quantised")),
        *((name, c_void_p) for name in ("quantised_scales", "norm_weights", "exchange")),
        *((name, c_int) for name in ("tokens", "quantise", "x_stride", "group_stride", "tiles", "group_tiles")),
        *((name, c_int) for name in ("k_units", "num_chunks", "num_splits", "section_chunks", "prefetch_lines")),
        ("gated", c_int),
        ("limit", c_float),
        ("eps", c_float),
        ("num_outputs", c_int),
        ("outputs", _Output * MAX_OUTPUTS),
    )


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(source, target) for source in (SOURCE, PREFILL)]


def prepare(weights: Weights) -> State:
    """Units of all matrices, in as many bytes, and values in bf16 of all but FP8's that quantise. ValueError as
    unpack_weights says, more than 4 matrices of one input, or k over 16384; RuntimeError: the launch.
    """
    state, fmt = prepare_few(weights), weights.format
    return state._replace(many=tuple(tuple(_decoded(fmt, matrix) for matrix in link) for link in weights.links))


def prepare_few(weights: Weights) -> State:
    """As prepare, with no more bytes than units take: then only FP8 that quantises has more than FEW_TOKENS at once."""
    fmt, links = unpack_weights(weights)
    state = _state(fmt, *(_link(fmt, *pair) for pair in zip(weights.links, links, strict=True)))
    codes = fmt == "fp8" and all(matrix.quantise for link in weights.links for matrix in link)  # are multiplied
    return state._replace(many=weights.links if codes else ())


def custom_kernel(data: input_t) -> output_t:
    """Write data.outputs.out and return it; data.weights is what prepare returned.

    ValueError as unpack_call says; RuntimeError: the launch.
    """
    state, (x,), (out,) = data
    sizes = unpack_call(data.inputs, data.outputs, state.format, state.sizes)
    given = parts(out, sizes)
    if len(x) > FEW_TOKENS and state.many and load.device_target(out.device) == "sm90":
        _multiply_many(state, x, given)
        return out
    for first in range(0, len(x), FEW_TOKENS):
        some = slice(first, first + FEW_TOKENS)
        _multiply_few(state, x[some], [[part[some] for part in link] for link in given])
    return out


def _multiply_few(state: State, x: torch.Tensor, parts: list[list[torch.Tensor]]) -> None:
    """Write the parts, (T, G n) of each matrix by link; T is at most FEW_TOKENS."""
    made = (_Link * len(state.links))()
    for link, to, given in zip(state.links, made, parts, strict=True):
        _fill(to, link, x, given)
        x = given[0]
    _launch(state, made, x)


def many(state: State, tokens: int) -> bool:
    """Whether custom_kernel takes so many tokens at once, more than FEW_TOKENS."""
    return bool(state.many) and tokens <= MOST_TOKENS


def _multiply_many(state: State, x: torch.Tensor, parts: list[list[torch.Tensor]]) -> None:
    """As _multiply_few, for any number of tokens: a launch a matrix, and one that quantises a link's input, in nvfp4 a
    matrix' input.
    """
    run = build.cuda(PREFILL, "sm90").function("prefill", *[c_void_p] * 8, *[c_int] * 8)
    rooms, tokens, before = [], len(x), early.allowed()
    stride = -(-tokens // PREFILL_TOKENS) * PREFILL_TOKENS
    for link, shapes, given in zip(state.many, state.sizes, parts, strict=True):
        for i, (matrix, (groups, n, k), out) in enumerate(zip(link, shapes, given, strict=True)):
            quantise, decoded = matrix.quantise and (i == 0 or matrix.scales is None), matrix.scales is None
            if quantise:
                scales = x.new_empty(groups * -(-k // BLOCK) * stride, dtype=torch.float32)
                rooms.append((x.new_empty(x.shape, dtype=matrix.codes.dtype), scales))
            room = rooms[-1] if matrix.quantise else (None, None)
            tensors = (x, matrix.codes, *room, matrix.scales, matrix.factor, matrix.input_scale, out)
            places = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
            build.check(run(*places, tokens, groups, n, k, stride, decoded, quantise, before), "prefill")
            before = True
        x = given[0]


def _decoded(fmt: str, matrix: Matrix) -> Matrix:
    if fmt == "bf16" or (fmt == "fp8" and matrix.quantise):
        return matrix
    if fmt == "fp8":
        values = fp8.dequantise_blocks(matrix.codes, matrix.scales, torch.bfloat16)
    else:
        values = nvfp4.decode(matrix.codes).unflatten(-1, (-1, nvfp4.BLOCK))
        values = values.mul_(matrix.scales.float().unsqueeze(-1)).flatten(-2).bfloat16()  # exactly
    return matrix._replace(codes=values, scales=None)


def norms(state: State, tokens: int) -> bool:
    """Whether with_norm takes so many tokens: all of one input that each block quantises, in registers."""
    link = state.links[0]
    k, quantised = link.sizes[0][2], link.inputs is not None or link.scales is not None
    one = len(state.links) == link.groups == 1 and quantised and k % NORMED_COLUMNS == 0
    few = tokens <= NORMED_TOKENS and tokens * k <= MAX_NORMED
    return one and few and splits_of(link, tokens) == 1


def with_norm(data: input_t, weight: torch.Tensor, eps: float) -> output_t:
    """Do as custom_kernel with x normed: x / sqrt(mean of its squares + eps) * weight, in fp32, rounded to bf16.

    weight: bf16 (k,), contiguous, which no kernel just ahead writes; of calls that `norms` takes.
    """
    state, (x,), (out,) = data
    sizes = unpack_call(data.inputs, data.outputs, state.format, state.sizes)
    made = (_Link * 1)()
    _fill(made[0], state.links[0], x, parts(out, sizes)[0])
    made[0].norm_weights, made[0].eps = weight.data_ptr(), eps
    _launch(state, made, out)
    return out


def prepare_expert(w13: Weights, w2: Weights) -> State:
    """Units of both matrices, of w13 tiles of gates and ups in turn. ValueError as unpack_expert and prepare."""
    fmt, (first, second) = unpack_expert(w13, w2)
    return _state(fmt, _gated(_link(fmt, w13.links[0], first)), _link(fmt, w2.links[0], second))


def expert(state: State, limit: float, x: torch.Tensor, out: torch.Tensor) -> None:
    """Write out = w2 (silu(min(gate, limit)) * clip(up, -limit, limit)); state: prepare_expert's. x:
    bf16 (T, k), out: bf16 (T, n), both contiguous. RuntimeError: a launch.
    """
    between = torch.empty(len(x), state.links[1].sizes[0][2], dtype=torch.bfloat16, device=x.device)
    made = (_Link * 2)()
    _fill(made[0], state.links[0], x, [between], limit)
    _fill(made[1], state.links[1], between, [out])
    _launch(state, made, out)


def splits_of(link: Link, tokens: int) -> int:
    """Blocks that share a tile, by how much the input is: a cluster, or more, which exchange sums through memory."""
    k, splits = link.sizes[0][2], link.fewest
    if link.scales is not None and tokens > CLUSTER_FP8 and link.sections > 1:
        return link.sections
    easy = EASY if link.inputs is None else EASY_NVFP4
    while splits < link.chunks and (
        tokens * k > FEW_TOKENS * BLOCK_COLUMNS * splits or (splits < MAX_CLUSTER and tokens * k > easy * splits)
    ):
        splits *= 2
    return splits if splits <= MAX_CLUSTER else link.sections


def chunks_of(tiles: int, k: int) -> int:
    """Into how many chunks k is cut, by shapes alone: as many as keep all warps of a GPU busy, and no more."""
    granules = -(-k // BLOCK)
    least = _blocks_of(k)
    found = [chunks for chunks in (1, 2, 4, 8, 16, 32) if least <= chunks <= max(least, min(granules, MAX_CHUNKS))]

    def cost(chunks: int) -> float:
        passes = -(-tiles * chunks // WARPS)
        return -(-passes // MULTIPROCESSORS) * (-(-granules // chunks) + PASS)

    return min(found, key=lambda chunks: (cost(chunks), chunks))


def _blocks_of(k: int) -> int:
    """Blocks, a power of two, that hold 32 tokens of k columns."""
    return 2 ** (-(-k // BLOCK_COLUMNS) - 1).bit_length()


def _state(fmt: str, *links: Link) -> State:
    device = links[0].units.device
    exchange = torch.zeros(max(link.exchanged for link in links), dtype=torch.int64, device=device)
    return State(fmt, links, torch.zeros((), dtype=torch.int32, device=device), exchange)


def _launch(state: State, made: Array, out: torch.Tensor) -> None:
    chain, num_prequantised, rooms = _arrange(state, made, out.device)
    run = build.cuda(SOURCE, load.device_target(out.device)).function("launch", c_void_p, *[c_int] * 3, c_void_p, c_int)
    counter = state.met.data_ptr() if chain else None
    code = run(addressof(made), len(made), num_prequantised, FORMATS.index(state.format), counter, early.allowed())
    del rooms  # until here
    build.check(code, "launch")


def _arrange(state: State, made: Array, device: torch.device) -> tuple[bool, int, list[torch.Tensor]]:
    """Split links. -> whether all are one launch; how many inputs separate kernels quantise; memory to be held."""
    for link, to in zip(state.links, made, strict=True):
        to.num_splits = splits_of(link, to.tokens)
        to.exchange = state.exchange.data_ptr() if to.num_splits > MAX_CLUSTER else None
    # A chain of few tokens is one launch in nvfp4; in fp8 launches that begin early were as good.
    chain = state.format == "nvfp4" and 1 < len(made) <= MAX_LINKS and made[0].tokens <= CHAIN_TOKENS
    chain = chain and max(to.num_splits for to in made) <= MAX_CLUSTER
    rooms, num_prequantised = [], 0
    for i, (link, to) in enumerate(zip(state.links, made, strict=True)):
        nvfp4 = link.inputs is not None
        by_previous = nvfp4 and i > 0 and len(state.links) > 1
        needed = by_previous if chain else to.tokens > (IN_BLOCK_NVFP4 if nvfp4 else IN_BLOCK) and not to.norm_weights
        if needed and (link.quantise or link.scales is not None):
            rooms += _room_for_quantised(link, to, device)
            num_prequantised += not by_previous
    return chain, num_prequantised, rooms


def _room_for_quantised(link: Link, to: _Link, device: torch.device) -> list[torch.Tensor]:
    """Memory for `quantised` of the link, see sm90_mma_formats.cuh; to be held until the launch."""
    rows, k = to.tokens * link.groups, link.sizes[0][2]
    rooms = [torch.empty(rows, k, dtype=torch.bfloat16, device=device)]
    to.quantised = rooms[0].data_ptr()
    if link.scales is not None:
        rooms.append(torch.empty(rows, -(-k // BLOCK), dtype=torch.float32, device=device))
        to.quantised_scales = rooms[1].data_ptr()
    return rooms


def _fill(to: _Link, link: Link, x: torch.Tensor, given: list[torch.Tensor], limit: float = 0.0) -> None:
    groups, _, k = link.sizes[0]
    tiles = sum(g * n for g, n, _ in link.sizes) // BLOCK_N
    to.units, to.x = link.units.data_ptr(), x.data_ptr()
    to.scales = None if link.scales is None else link.scales.data_ptr()
    to.factors = None if link.factors is None else link.factors.data_ptr()
    to.input_scales = None if link.inputs is None else link.inputs.data_ptr()
    to.tokens, to.quantise, to.tiles, to.group_tiles = len(x), link.quantise, tiles, tiles // link.groups
    to.x_stride, to.group_stride = groups * k, k if groups > 1 else 0
    to.k_units, to.num_chunks, to.section_chunks = k // BLOCK_K, link.chunks, link.chunks // link.sections
    to.prefetch_lines, to.gated, to.limit = PREFETCH_LINES, link.gated, limit
    to.num_outputs, tile = len(given), 0
    for output, out in zip(to.outputs, given, strict=False):
        output.out, output.columns, output.first_tile = out.data_ptr(), out.shape[1], tile
        tile += out.shape[1] // BLOCK_N


def _link(fmt: str, matrices: tuple[Matrix, ...], sizes: tuple[tuple[int, int, int], ...]) -> Link:
    if len(matrices) > MAX_OUTPUTS:
        raise ValueError(f"links must have at most {MAX_OUTPUTS} matrices, got {len(matrices)}")
    k = sizes[0][2]
    if k > MAX_SECTIONS * BLOCK_COLUMNS:
        raise ValueError(f"k must be at most {MAX_SECTIONS * BLOCK_COLUMNS}, got {k}")
    tiles = sum(g * n for g, n, _ in sizes) // BLOCK_N
    units = torch.cat([_units(fmt, matrix, *size) for matrix, size in zip(matrices, sizes, strict=True)])
    scales, factors, inputs, groups = None, None, None, sizes[0][0]
    if fmt == "fp8":
        scales = torch.cat([_tile_scales(matrix, n) for matrix, (_, n, _) in zip(matrices, sizes, strict=True)])
    if fmt == "nvfp4":
        factors = _by_tile([matrix.factor for matrix in matrices], sizes) * REST
    if fmt == "nvfp4" and matrices[0].quantise:
        of_tiles = _by_tile([matrix.input_scale for matrix in matrices], sizes)
        if len(matrices) > 1 and not bool((of_tiles == of_tiles[0]).all()):
            groups = tiles // math.gcd(*(n // BLOCK_N for _, n, _ in sizes))
        factors, inputs = factors * of_tiles, of_tiles[:: tiles // groups].contiguous()
    return Link(units, scales, factors, inputs, matrices[0].quantise, groups, sizes, chunks_of(tiles, k))


def _gated(link: Link) -> Link:
    """The same with a tile of the first half of its rows and one of the second half in turn."""
    tiles = link.sizes[0][1] // BLOCK_N

    def ordered(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.view(2, tiles // 2, -1).transpose(0, 1).reshape(tensor.shape)

    units, scales, factors = (ordered(tensor) for tensor in (link.units, link.scales, link.factors))
    return link._replace(units=units, scales=scales, factors=factors, gated=True)


def _by_tile(values: list[torch.Tensor], sizes: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
    """fp32 (tiles,), of values by group of each matrix."""
    return torch.cat([one.repeat_interleave(n // BLOCK_N) for one, (_, n, _) in zip(values, sizes, strict=True)])


def _units(fmt: str, matrix: Matrix, groups: int, n: int, k: int) -> torch.Tensor:
    """uint8 (bytes,): units of all groups, one row of units below the other."""
    tiles, across = groups * n // BLOCK_N, k // BLOCK_K
    if fmt == "nvfp4":
        made = torch.empty(tiles * across * NVFP4_UNIT, dtype=torch.uint8, device=matrix.codes.device)
        run = build.cuda(SOURCE, load.device_target(made.device))
        run = run.function("repack_nvfp4", *[c_void_p] * 3, *[c_int] * 3)
        code = run(matrix.codes.data_ptr(), matrix.scales.data_ptr(), made.data_ptr(), groups, n, k)
        build.check(code, "repack_nvfp4")
        return made
    if fmt == "fp8":  # tile, row / 8, row % 8, unit, lane % 4, its 16 columns
        lanes = matrix.codes.view(torch.uint8).view(tiles, 4, 8, across, 4, 16).permute(0, 3, 1, 2, 4, 5)
    else:  # the same, and halves of its 16 columns
        lanes = matrix.codes.view(tiles, 4, 8, across, 4, 2, 8).permute(0, 3, 5, 1, 2, 4, 6)
    return lanes.contiguous().view(-1).view(torch.uint8)


def _tile_scales(matrix: Matrix, n: int) -> torch.Tensor:
    """uint8 (tiles, ceil(k / 128)): the scales of each tile's blocks."""
    rows = matrix.scales.repeat_interleave(BLOCK // BLOCK_N, 1)[:, : n // BLOCK_N]
    return rows.reshape(-1, rows.shape[2])
