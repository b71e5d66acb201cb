"""compat.py: FlashMLA's and DeepGEMM's functions compute what they say, refuse the rest, and vLLM calls them."""

import re
import sys
from types import ModuleType

import compare  # packaging/compare.py
import pytest
import torch

from dsv4_kernels import compat, vllm
from tests.problems import cases

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def decode_call(device, **changes):
    """Data of fmha_decode, and what flash_mla_with_kvcache takes of them."""
    data = cases.made("fmha_decode", device, **{"batch": 5, "page_window": 4, "content": "ragged", **changes})
    return data, compare.decode_call(data) | {"tile_scheduler_metadata": compat.get_mla_metadata()[0]}


def sparse_call(device, **changes):
    """Data of fmha_decode without compressed entries, and what flash_mla_sparse_fwd takes for the same attention."""
    data, _ = decode_call(device, queries=1, **changes)
    data = data._replace(compressed_length=torch.zeros_like(data.compressed_length))
    per_page = cases.task("fmha_decode").unpack(data).page_window
    entries = torch.arange(len(data.window) * per_page, device=device)  # those that no list names are anything
    rows = cases.reference("fmha_decode").decoded(data.window, per_page, entries).bfloat16().unsqueeze(1)
    call = {"q": data.q[:, 0], "kv": rows, "indices": data.window_index, "sm_scale": 512**-0.5}
    return data, call | {"attn_sink": data.sink, "topk_length": data.window_length}


def logits_call(device, queries=2, lengths=((200, 1), (0, 70), (191, 190))):
    """Data of indexer of FP8 keys in pages of 64, and what fp8_paged_mqa_logits takes of them."""
    changes = {"batch": len(lengths), "queries": queries, "heads": 64, "entries": 200, "kind": "fp8", "per_page": 64}
    data = cases.made("indexer", device, **changes, content="plain")
    visible = torch.tensor(lengths, dtype=torch.int32, device=device)
    data = data._replace(visible=visible, q=data.q.to(torch.float8_e4m3fn).bfloat16())
    return data, compare.logits_call(data, 200)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [3, 16])
def test_flash_mla_with_kvcache_is_the_problems_attention(heads, device):
    data, arguments = decode_call(device, heads=heads)
    arguments["q"] = torch.cat([data.q, data.q], 3)[..., 512:]  # not contiguous
    out, lse = compat.flash_mla_with_kvcache(**arguments, out=torch.empty_like(data.q))
    assert cases.reference("fmha_decode").check_implementation(data, (out, lse.transpose(1, 2))) == (True, "")
    alone = data._replace(compressed_length=torch.zeros_like(data.compressed_length), sink=data.sink.fill_(-torch.inf))
    out, lse = compat.flash_mla_with_kvcache(**{k: v for k, v in arguments.items() if not re.search("extra|sink", k)})
    assert cases.reference("fmha_decode").check_implementation(alone, (out, lse.transpose(1, 2))) == (True, "")


def test_flash_mla_with_kvcache_refuses():
    arguments = decode_call("cpu")[1]
    for name, value, said in (
        ("indices", None, "dense attention"),
        ("indices", arguments["indices"][:, 0], r"^indices must be int32 \(batch, s_q, topk\), here \(5, 2, any\)"),
        ("is_fp8_kvcache", False, "bf16 caches"),
        ("causal", True, "causal must be False"),
        ("softmax_scale", 0.1, r"softmax_scale must be 512\^-0.5"),
        ("q", arguments["q"].repeat(1, 1, 1, 2)[..., :576], r"q must be \(B, S, H, 512\), got .*576"),
        ("q", None, "^q must be .*, got None"),
        *(
            ("k_cache", torch.zeros(pages, 64, 1, size, dtype=torch.uint8), f"^k_cache must {said}")
            for pages, size, said in ((2, 656, "be of bytes"), (3, 584, ".*strides.*37440"), (1, 584, ".*last page"))
        ),
        ("extra_indices_in_kvcache", None, "extra_k_cache must be given where"),
        ("attn_sink", arguments["attn_sink"][:1], "^attn_sink must be"),
    ):
        with pytest.raises(ValueError, match=said):
            compat.flash_mla_with_kvcache(**arguments | {name: value})


def test_errors_of_operators_name_the_callers_tensors_where_they_are_the_subject():
    def refuse(said):
        raise ValueError(said)

    for said, wanted in (
        ("q and window_index must not be empty, as a window is", "q and indices must not be empty, as a window is"),
        ("no winner computes keys", "no winner computes keys"),
    ):
        with pytest.raises(ValueError, match=f"^{wanted}$"):
            compat._call(refuse, compat.NAMES, said)


@pytest.mark.parametrize("device", DEVICES)
def test_flash_mla_sparse_fwd_attends_to_rows_of_fp8_values(device):
    data, call = sparse_call(device)
    out, _, lse = (part if part is None else part.unsqueeze(1) for part in compat.flash_mla_sparse_fwd(**call))
    assert cases.reference("fmha_decode").check_implementation(data, (out, lse)) == (True, "")
    wrong = ("kv", torch.randn_like, "of values of FP8"), ("indices", torch.squeeze, ".*h_kv")
    for name, change, said in (*wrong, ("q", lambda q: q[:0], ".*T from")):
        with pytest.raises(ValueError, match=f"^{name} must be {said}"):
            compat.flash_mla_sparse_fwd(**call | {name: change(call[name])})


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_paged_mqa_logits_are_the_indexers_scores(device):
    (data, call), reference = logits_call(device), cases.reference("indexer")
    want = reference.answer(data, reference.ref_kernel(data)).score
    seen = want.isfinite()
    logits = compat.fp8_paged_mqa_logits(**call)
    assert compare.apart(logits[seen], want[seen]) < 3e-4
    cleaned = compat.fp8_paged_mqa_logits(**call | {"clean_logits": True})
    assert torch.equal(cleaned, logits.masked_fill(~seen, -torch.inf))
    arguments = (*data[:4], call["context_lens"])
    torch.library.opcheck(compat.indexer_scores, arguments, test_utils=["test_schema", "test_faketensor"])
    wrong = ("q", None), ("indices", data.table), ("context_lens", call["context_lens"][0]), ("max_context_len", 0)
    wrong += ("block_table", data.table[:, :1]), ("q", call["q"][:, :, :16])
    outside = [("block_table", data.table + at) for at in (-99, 99) if device == "cpu"]  # on a GPU no kernel looks
    for name, value in (*wrong, *outside):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            compat.fp8_paged_mqa_logits(**call | {name: value})


@pytest.mark.gpu
def test_public_kernels_compute_the_same(capsys, monkeypatch):
    pytest.importorskip("flash_mla")
    pytest.importorskip("deep_gemm")
    monkeypatch.setattr(compare, "REPLAYS", 10)
    compare.main()
    found = re.findall(r"^(\w+),.* apart (\S+)", capsys.readouterr().out, re.MULTILINE)
    limit = {"fp8_paged_mqa_logits": 3e-4}  # else both round P and the answer to bf16: 2.5e-3 at most on an H200
    assert found and all(float(apart) < limit.get(name, 2.8e-3) for name, apart in found)


@pytest.fixture
def flashmla(monkeypatch):
    """A stub of vLLM's module, whose function answers "theirs"."""
    vllm._warn_once.cache_clear()
    module = ModuleType(vllm.MODULE)
    monkeypatch.setitem(sys.modules, vllm.MODULE, module)
    exec(f"def {vllm.NAME}({', '.join(f'{name}=None' for name in vllm.KNOWN[0])}): return 'theirs'", vars(module))
    return module


def test_vllms_function_is_replaced_and_keeps_what_is_not_served(flashmla, caplog):
    vllm.register()
    vllm.register()
    data, arguments = decode_call("cpu")
    out, lse = flashmla.flash_mla_with_kvcache(**arguments)
    assert cases.reference("fmha_decode").check_implementation(data, (out, lse.transpose(1, 2))) == (True, "")
    assert not caplog.records
    assert [flashmla.flash_mla_with_kvcache(**arguments | {"indices": None}) for _ in range(2)] == ["theirs"] * 2
    assert ["dense attention is not served" in record.getMessage() for record in caplog.records] == [True]


def test_vllms_function_stays_if_it_is_another(flashmla, caplog, monkeypatch):
    other = flashmla.flash_mla_with_kvcache = lambda q, cache: "theirs"
    vllm.register()
    assert flashmla.flash_mla_with_kvcache is other
    monkeypatch.setitem(sys.modules, vllm.MODULE, None)
    vllm.register()
    assert ["FlashMLA stays" in record.getMessage() for record in caplog.records] == [True, True]
