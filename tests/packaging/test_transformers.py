"""transformers.py: a deepseek_v4 model computes the same with our functions, and goes on with its own where it must."""

import copy
import functools
import gc
import re

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, which `make setup` installs")

import compare_transformers as compare

from dsv4_kernels import operators
from dsv4_kernels import transformers as ours
from tests.dsv4 import oracle

ALL = compare.PARTS["experts, norms, attention"]


@pytest.mark.parametrize("name", oracle.CONFIGS)
@torch.no_grad()
def test_logits_and_tokens_in_fp32_are_transformers(name, caplog, monkeypatch):
    model = copy.deepcopy(oracle.hf_model(name))
    tokens = torch.randint(model.config.vocab_size, (2, 40))
    mask = (torch.arange(80).view(2, 40) % 40 > 6).long()
    mask[0] = 1
    eager = ours.theirs.eager_attention_forward
    found = []
    for parts in (compare.OWN, ALL):
        compare.switch(model, parts)
        found.append(model(tokens, attention_mask=mask).logits[mask == 1])
        found.append(model.generate(tokens, attention_mask=mask, max_new_tokens=20, do_sample=False))
        for_more = functools.partial(lambda *given, **named: given[1].shape[2] > 1 and eager(*given, **named))
        monkeypatch.setattr(ours.theirs, "eager_attention_forward", for_more)
    assert (found[2] - found[0]).abs().max() < 1e-5 and torch.equal(found[3], found[1]) and "dsv4" not in caplog.text


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tokens_in_bf16_are_transformers_and_the_comparison_says_so(device, monkeypatch, capsys):
    def experts(*given, ops=ours._ops):
        assert ours.gpu_experts.serves(*given[:5], given[6])
        return ops(given[0].device)["experts"](*given)

    monkeypatch.setattr(ours, "_ops", lambda device, ops=ours._ops: {**ops(device), "experts": experts})
    compare.main(device, compare.TINY)
    said = capsys.readouterr().out
    *apart, nvfp4 = (float(value) for value in re.findall(r"logits apart (\S+)", said))
    assert apart[0] == 0 and max(apart) < 0.3 < nvfp4 < 2 and len(apart) == 5 and said.count("tokens a second") == 6
    assert device == "cuda" or said.count("all 20, first 20") == 5  # on a GPU transformers' own two ways differ too


@torch.no_grad()
def test_weights_in_nvfp4_are_held_until_they_change_or_die():
    gc.collect()  # models of other tests
    module = compare.made("cpu", torch.bfloat16, compare.TINY).model.layers[3].mlp.experts
    zero = torch.nn.Parameter(torch.zeros_like(module.gate_up_proj))
    given = torch.randn(2, 128).bfloat16(), torch.tensor([[0, 1], [7, 2]]), torch.ones(2, 2)
    want, rounded = (ours.compute_experts(module, *given, kind=kind).float() for kind in ours.KINDS)
    assert 0.05 < float((rounded - want).norm() / want.norm()) < 0.25
    found = []
    for change in (int, int, lambda: module.down_proj.mul_(2), lambda: setattr(module, "gate_up_proj", zero)):
        change()
        out = ours.compute_experts(module, given[0], given[1] + 6, given[2], kind="nvfp4")  # from 8 on: no expert
        found.append((out, [name for _, name in operators._held if name.startswith("transformers")]))
    (one, name), (same, kept), (double, other), (none, last) = found
    assert torch.equal(one, same) and torch.equal(2 * one, double) and one.any() and not none.any()
    assert name == kept != other != last and len(name) == len(other) == len(last) == 1


def test_what_is_not_served_is_computed_by_transformers_or_refused(caplog, monkeypatch, tmp_path):
    ours._warn_once.cache_clear()
    compare.made("cpu", torch.bfloat16, compare.TINY).save_pretrained(tmp_path)
    model = compare.DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, part in model.named_modules():
        if name.endswith("norm"):
            part.bfloat16()  # as packaging/README.md says
    tokens = torch.randint(96, (1, 9))
    found = []
    monkeypatch.setattr(ours, "_ops", lambda device: {"experts": lambda *given: NotImplemented})
    for parts, grad in ((compare.OWN, True), (ALL, True), (compare.PARTS["experts"], False)):
        compare.switch(model, parts)
        found.append(torch.set_grad_enabled(grad)(model)(tokens).logits)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert all(part in caplog.text for part in ("experts with gradients", "norms with gradients", "256 pairs"))
    for call, given in ((ours.register, 0), (ours.replace_norms, 0), (ours.compute_experts, 3), (ours.attend, 5)):
        with pytest.raises(ValueError, match=r"^(experts|model|module) must .*, got .*Linear"):
            call(torch.nn.Linear(1, 1), *[tokens] * given)
