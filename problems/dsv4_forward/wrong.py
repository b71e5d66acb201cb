"""Ops with a mistake, as edits of right ones (problems/wrong.py). `--kernels fmha=fmha_window_of_127` puts one into the
check, and each is a submission of the judged problem.
"""

from problems.wrong import Mistake, mistake

HEAD = """
import dataclasses

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.ops import REFERENCE
from problems.dsv4_forward.torch_ops import indexer, mhc, norm, router
from problems.dsv4_forward.torch_ops import linear as products

TARGETS = ("cpu", "sm90", "sm100")
"""
WHOLE = """
from problems.dsv4_forward import judged_call

TARGETS = ("cpu", "sm90", "sm100")


def prepare(weights):
    return judged_call.prepare(weights, "reference")


def custom_kernel(data):
    return judged_call.run(data)
"""


def _call(name: str, parameters: str) -> str:
    given = (one.partition("=")[0] for one in parameters.split(", "))
    return f"REFERENCE.{name}({', '.join(f'{one}={one}' for one in given)})"


def _ops(steps: str = "", **parameters: str) -> str:
    """A carrier that has these ops, by `steps` or, without, as the reference does them. parameters: of each op."""
    made = [f"def {name}({said}):\n    {steps or _call(name, said)}\n" for name, said in parameters.items()]
    named = ", ".join(f"{name}={name}" for name in parameters)
    tail = f"prepare = judged_call.with_functions({named})\ncustom_kernel = judged_call.run\n"
    return "\n\n".join([HEAD, *made, tail])


NEW = "\n    "  # a line of an op
EMBED = {"embed": "tokens, weight, position, freqs, copies, cos, sin"}
START = {"start": "given, numbers, lists, tokens, weight, freqs, copies, cos, sin"}
LAYER_ROWS = _ops(layer_rows="queries, key, compressed, index")
FMHA = _ops(fmha="q, window, window_index, cache, index, sink, scale, cos, sin, out, lse, chunk")
CHOOSE = _ops(
    NEW.join(
        [
            "scores = torch.empty(*out.shape[:2], entries, device=out.device)",
            "indexer.index_scores(q, weights, scale, keys, table, entries, scores)",
            "ids = torch.empty_like(out)",
            "indexer.select(scores, visible, ids)",
            "indexer.locate(ids, table, keys.per_page, out)",
        ]
    ),
    choose="q, weights, scale, keys, table, visible, entries, out",
)
MHC_PRE = _ops(mhc_pre="copies, fn, base, scale, cfg, out, post, comb")
MHC_POST = _ops(mhc_post="y, copies, post, comb, out, second=None")
MHC_SITE = _ops(
    NEW.join(
        [
            "mhc.post(y, copies, post, comb, new_copies, second)",
            "u = torch.empty_like(out)",
            "mhc.pre(new_copies, fn, base, scale, cfg, u, new_post, new_comb)",
            "norm.rms_norm(u, weight, cfg.rms_norm_eps, out)",
        ]
    ),
    mhc_site="y, second, copies, post, comb, fn, base, scale, weight, cfg, new_copies, out, new_post, new_comb",
)
RMS_NORM = _ops(
    NEW.join(
        [
            "size = (x.float().square().mean(-1, keepdim=True) + eps).sqrt()",
            "scaled = x.float() / size",
            "out.copy_(scaled if weight is None else scaled * weight.float())",
        ]
    ),
    rms_norm="x, weight, eps, out",
)
MATMULS = _ops(
    f"for weight, out in zip(weights, outs, strict=True):{NEW}    products.matmul(x, weight, out)",
    matmuls="x, weights, outs",
)
LINEAR = _ops(
    f"values = products.input_values(x, w).float(){NEW}out.copy_(torch.matmul(values, w.dequantise().T))",
    linear="x, w, out",
)
ALL_EXPERTS = _ops(
    NEW.join(
        [
            "routed, one = (torch.empty(out.shape, device=out.device) for _ in range(2))",
            "REFERENCE.experts(x, ids, weights, w13, w2, limit, routed)",
            "REFERENCE.shared(x, shared_w13, shared_w2, limit, one)",
            "out.copy_(routed + one)",
        ]
    ),
    all_experts="x, ids, weights, w13, w2, shared_w13, shared_w2, limit, out",
)


def _mistake(says: str, carrier: str, *edits: tuple[str, str]) -> Mistake:
    """In one case in fp32, whose bound is tight: three sequences of unlike length, where an entry is about to end."""
    return mistake(says, "config=tiny format=fp32 batch=3 context=127 phase=decode new=1", carrier, *edits)


def _zero_angle(of: str) -> str:
    return f"""{{"cos": torch.ones_like({of}["cos"]), "sin": torch.zeros_like({of}["sin"])}}"""


def _each(change: str) -> tuple[str, str]:
    """The edit of layer_rows that changes something of each compressor."""
    return "compressed=compressed", f"compressed=[one | {{{change}}} for one in compressed]"


WRONG = {
    "all_experts_shared_is_routed": _mistake(
        "the shared expert counts with the weight of a token's first expert, not with 1.",
        ALL_EXPERTS,
        ("routed + one", "routed + one * weights[:, :1]"),
    ),
    "blocks_in_order": _mistake(
        "takes the blocks of a sequence to lie in order, whatever the table says.",
        WHOLE,
        ("from problems.dsv4_forward import", "import torch\n\nfrom problems.dsv4_forward import"),
        (
            "return judged_call.run(data)",
            "sizes = judged_call.state_sizes(data.weights, data.inputs)"
            f'{NEW}table = sizes.views(data.inputs.state)["table"]{NEW}count, width = data.inputs.blocks.shape'
            f"{NEW}order = torch.arange(count * width, dtype=table.dtype, device=table.device)"
            f"{NEW}table[:, :width] = order.view(count, width){NEW}return judged_call.run(data)",
        ),
    ),
    "choose_by_the_first_table": _mistake(
        "all sequences take the places of the first.", CHOOSE, ("(ids, table,", "(ids, table[:1].expand_as(table),")
    ),
    "compress_ape_forgotten": _mistake(
        "the position bias of the gate is left out.", LAYER_ROWS, _each('"ape": torch.zeros_like(one["ape"])')
    ),
    "compress_rope_at_the_entry_number": _mistake(
        "entry i is rotated as token i, not as token i * ratio, the first of its window.",
        LAYER_ROWS,
        _each('"freqs": one["freqs"] / one["ratio"]'),
    ),
    "embed_first_copy_only": _mistake(
        "only the first hc copy gets the embedding.",
        _ops(**EMBED, **START),
        (_call("embed", EMBED["embed"]), _call("embed", EMBED["embed"]) + NEW + "copies[:, 1:].zero_()"),
        (_call("start", START["start"]), _call("start", START["start"]) + NEW + "copies[:, 1:].zero_()"),
    ),
    "experts_without_clamp": _mistake(
        "SwiGLU's inputs are not clamped.",
        _ops(experts="x, ids, weights, w13, w2, limit, out"),
        ("limit=limit", "limit=1e30"),
    ),
    "fmha_one_tile_lost": _mistake(
        "one of the window's two tiles of 64 keys is never loaded.",
        FMHA,
        ("REFERENCE.fmha", f"seen = window_index.clone(){NEW}seen[..., :64] = -1{NEW}REFERENCE.fmha"),
        ("window_index=window_index", "window_index=seen"),
    ),
    "fmha_rotate_forwards": _mistake(
        "what attention returns is rotated by the query's position once more, not back.", FMHA, ("sin=sin", "sin=-sin")
    ),
    "fmha_window_of_127": _mistake(
        "a query sees 127 tokens of the window, not 128.",
        FMHA,
        ("window_index=window_index", "window_index=window_index[..., 1:]"),
    ),
    "groups_swapped": _mistake(
        "each group of wo_a is multiplied with its neighbour's heads.",
        _ops(grouped_linear="x, w, out"),
        ("x=x", "x=x.roll(1, 1)"),
    ),
    "index_query_unrotated": _mistake(
        "the indexer's queries are not rotated.",
        LAYER_ROWS,
        ("index=index", f"index=index and index | {_zero_angle('index')}"),
    ),
    "index_without_relu": _mistake(
        "scores are signed: the ReLU is left out.",
        CHOOSE,
        (
            "indexer.index_scores(q, weights, scale, keys, table, entries, scores)",
            "page, place = keys.per_page, torch.arange(entries, device=q.device)"
            f"{NEW}rows = table[:, place // page] * page + place % page"
            f'{NEW}products = torch.einsum("bshd,bed->bshe", q.float(), keys.read(rows))'
            f'{NEW}scores = torch.einsum("bshe,bsh->bse", products, scale * weights.float())',
        ),
    ),
    "length_of_the_first_sequence": _mistake(
        "takes all sequences to be as long as the first.",
        WHOLE,
        (
            "return judged_call.run(data)",
            "lengths = data.inputs.lengths[:1].expand(len(data.inputs.lengths))"
            f"{NEW}return judged_call.run(data._replace(inputs=data.inputs._replace(lengths=lengths)))",
        ),
    ),
    "linear_last_block_lost": _mistake(
        "the last 16 columns of a matrix are never added.",
        LINEAR,
        ("(values, w.dequantise()", "(values[:, :-16], w.dequantise()[:, :-16]"),
    ),
    "matmuls_first_matrix_twice": _mistake(
        "the first rows of every output are those of the first matrix.",
        MATMULS,
        (
            "products.matmul(x, weight, out)",
            f"products.matmul(x, weight, out){NEW}    rows = min(len(weight), len(weights[0])) // 2"
            f"{NEW}    products.matmul(x, weights[0][rows : 2 * rows], out[:, :rows])",
        ),
    ),
    "mhc_columns_unbalanced": _mistake(
        "the combination is sharpened by another softmax after Sinkhorn, so its columns no longer sum to 1.",
        MHC_PRE,
        ("comb=comb)", f"comb=comb){NEW}comb.copy_(torch.softmax(comb.log() * 1.5, -1))"),
    ),
    "mhc_not_transposed": _mistake(
        "mixes the copies with M instead of its transpose.",
        MHC_POST,
        ("comb=comb", "comb=comb.transpose(1, 2).contiguous()"),
    ),
    "mhc_post_without_shared": _mistake("the shared expert is left out.", MHC_POST, ("second=second", "second=None")),
    "mhc_site_reads_too_early": _mistake(
        "between sublayers the next input is mixed of the copies before the output is written to them.",
        MHC_SITE,
        ("mhc.pre(new_copies", "mhc.pre(copies"),
    ),
    "norm_by_mean_magnitude": _mistake(
        "RMSNorm divides by the mean of magnitudes instead of the root of the mean square.",
        RMS_NORM,
        ("(x.float().square().mean(-1, keepdim=True) + eps).sqrt()", "x.float().abs().mean(-1, keepdim=True) + eps"),
    ),
    "norm_linears_without_norm_weight": _mistake(
        "the input of the matrices is normed without its weights.",
        _ops(norm_linears="x, weight, eps, matrices, outs"),
        ("weight=weight", "weight=None"),
    ),
    "norm_rotate_backwards": _mistake(
        "queries are rotated by the negative angle.",
        LAYER_ROWS,
        ("queries=queries", 'queries=queries | {"sin": -queries["sin"]}'),
    ),
    "plan_key_in_the_next_place": _mistake(
        "a token's key goes to the place of the next token.",
        _ops(**START),
        (
            "sin=sin)",
            f"sin=sin){NEW}out = given.views(numbers, lists){NEW}place = (out.position + 1) % given.ring"
            f"{NEW}torch.add(place, given.sequence, alpha=given.ring, out=out.window_target)",
        ),
    ),
    "product_in_bf16": _mistake(
        "multiplies in bf16 where fp32 is asked for.",
        MATMULS,
        ("products.matmul(x, weight, out)", "out.copy_(torch.matmul(x.bfloat16(), weight.bfloat16().T))"),
    ),
    "rope_half_split": _mistake(
        "rotates halves of the queries' trailing values (Llama's pairs) instead of neighbours.",
        LAYER_ROWS,
        (
            "index=index)",
            f'index=index){NEW}x, r = queries["out"], 2 * queries["cos"].shape[-1]'
            f'{NEW}norm.rms_norm(queries["x"], queries["weight"], queries["eps"], x)'
            f"{NEW}a, b = x[..., -r:].float().chunk(2, -1)"
            f'{NEW}c, s = (queries[name].unsqueeze(1) for name in ("cos", "sin"))'
            f"{NEW}x[..., -r:] = torch.cat([a * c - b * s, a * s + b * c], -1)",
        ),
    ),
    "route_weights_with_bias": _mistake(
        "routing weights are taken from the scores with the bias that is for selection only.",
        _ops(route="u, weight, bias, table, tokens, cfg, out_ids, out_weights"),
        (
            "out_weights=out_weights)",
            f"out_weights=out_weights){NEW}shifted = router.scores(u, weight) + (0.1 if bias is None else bias)"
            f"{NEW}gates = shifted.gather(1, out_ids.long())"
            f"{NEW}out_weights.copy_(gates / gates.sum(1, keepdim=True) * cfg.routed_scaling_factor)",
        ),
    ),
    "select_the_newest": _mistake(
        "takes the newest visible entries instead of the best.",
        CHOOSE,
        (
            "indexer.select(scores, visible, ids)",
            "ids = visible.unsqueeze(-1) - 1 - torch.arange(out.shape[-1], dtype=torch.int32, device=q.device)",
        ),
        ("(ids, table,", "(ids.clamp(min=-1), table,"),
    ),
    "shared_gate_and_up_swapped": _mistake(
        "the shared expert takes the up rows for the gate's.",
        _ops(shared="x, w13, w2, limit, out"),
        (
            "REFERENCE.shared",
            'none = dict.fromkeys(("scale", "scale_2", "input_scale"))'
            f"{NEW}weight = w13.dequantise().roll(w13.n // 2, 1)"
            f'{NEW}swapped = dataclasses.replace(w13, kind="plain", weight=weight, **none)'
            f"{NEW}REFERENCE.shared",
        ),
        ("w13=w13", "w13=swapped"),
    ),
    "start_one_position_late": _mistake(
        "angles are those of the next position.",
        _ops(**START),
        (
            "sin=sin)",
            f"sin=sin){NEW}late = given.views(numbers, lists).position + 1"
            f"{NEW}REFERENCE.embed(tokens, weight, late, freqs, copies, cos, sin)",
        ),
    ),
    "two_linears_of_the_first": _mistake(
        "both outputs are those of the first matrix.",
        _ops(two_linears="x, first, second, first_out, second_out"),
        (
            "second_out=second_out)",
            f"second_out=second_out){NEW}row = torch.arange(second_out.shape[1], device=x.device) % first_out.shape[1]"
            f"{NEW}second_out.copy_(first_out[:, row])",
        ),
    ),
    "write_entry_without_norm_weight": _mistake(
        "the weight of the norm of compressed entries is left out.",
        LAYER_ROWS,
        _each('"norm_weight": torch.ones_like(one["norm_weight"])'),
    ),
    "write_into_the_neighbour": _mistake(
        "each key is written to the row beside its place.",
        LAYER_ROWS,
        ("key=key", 'key=key | {"index": key["index"] ^ 1}'),
    ),
    "write_key_unrotated": _mistake(
        "keys of the window are not rotated.", LAYER_ROWS, ("key=key", f"key=key | {_zero_angle('key')}")
    ),
}
