"""The draft in training: what it begins as, what its steps see, which proposals count, and its loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from saved_weights import VOCAB, recipe

from k3train.config.schema import RecipeConfig
from k3train.config.validate import validate
from k3train.errors import UserError

STEPS = 4
LENGTH = 24
IDS = [[0] * 9 + [1] * 11 + [2] * 4, [0] * 24]


def draft_config(blocks: tuple[int, ...] = (1,), layers: int = 6, **draft: Any) -> RecipeConfig:
    config = recipe(mtp=True)
    config.model.num_layers, config.model.full_attention_layers = layers, [3, layers]
    config.stage.name, config.stage.update_router_bias = "draft", False
    config.draft.blocks, config.draft.steps = list(blocks), STEPS
    for key, value in draft.items():
        setattr(config.draft, key, value)
    config.checkpoint.load = "target"
    return config


def built(config: RecipeConfig, seed: int = 0) -> torch.nn.Module:
    """With a fusion that reads everything, unless `seed` is 0."""
    from k3train.model.build import build_chunks

    (model,), _ = build_chunks(config)
    if seed:
        weight = model.mtp.fusion.weight
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * 0.2)
    return model


def tokens_of(ids: list[list[int]], seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (len(ids), len(ids[0])), generator=torch.Generator().manual_seed(seed))


def packed(ids: list[list[int]], padding: torch.Tensor | None = None) -> Any:
    from k3train.model.packing import Packing

    return Packing(torch.tensor(ids, dtype=torch.int32), padding)


def label_mask(ids: list[list[int]]) -> torch.Tensor:
    """As pretraining's rows have it: the last label of a row, whose document nobody knows, counts."""
    rows = torch.tensor(ids)
    mask = torch.ones(rows.shape)
    mask[:, :-1] = (rows[:, 1:] == rows[:, :-1]).float()
    return mask


def losses(model: torch.nn.Module, tokens: torch.Tensor, packing: Any, mask: torch.Tensor) -> Any:
    return model(tokens, packing, tokens.roll(-1, 1), mask).draft


def test_it_begins_as_the_layer_that_it_was(single_rank: None) -> None:
    """With [0 0 I], the first step's proposals are bit for bit the multi-token prediction of the same weights."""
    from k3train.model.build import build_chunks

    config = draft_config(blocks=(1, 2))
    draft = built(config)
    before = copy.deepcopy(config)
    before.stage.name = "pretrain"
    (model,), _ = build_chunks(before)
    named = dict(model.named_parameters())
    assert {n for n, _ in draft.named_parameters()} - named.keys() == {"mtp.fusion.weight"}
    assert all(torch.equal(p, named[n]) for n, p in draft.named_parameters() if n in named)
    tokens, packing, mask = tokens_of(IDS), packed(IDS), label_mask(IDS)
    head = model._logits
    seen: dict[str, list] = {"model": [], "draft": []}
    for name, m in (("model", model), ("draft", draft)):
        # Copies: Megatron-Core's cross-entropy writes over the logits that it is given.
        m._logits = lambda x, at=None, name=name: seen[name].append(head(x, at)) or seen[name][-1].clone()
    with torch.no_grad():
        out = model(tokens, packing, tokens.roll(-1, 1), mask)
        found = losses(draft, tokens, packing, mask)
    assert torch.equal(found.mask[0], out.mtp_mask)
    where = out.mtp_mask.t() > 0
    # The target's own, then each step's.
    assert torch.equal(seen["model"][0], seen["draft"][0])
    assert torch.equal(seen["model"][1][where], seen["draft"][1][where])
    # And a fusion that reads more proposes something else.
    other = losses(built(config, seed=5), tokens, packing, mask)
    assert (other.loss[0] - found.loss[0]).abs().max() > 0.01


def test_the_published_shape(single_rank: None) -> None:
    """Report section 4.1.4: of K3's eight blocks the outputs of the first and the fourth and the last feature, joined
    and projected without bias from [0 0 I]; seven steps; one loss, the acceptance's, over all of them."""
    from k3train.config.load import load_recipe

    k3 = load_recipe(["recipe=pretrain/k3"])
    assert -(-k3.model.num_layers // k3.model.attention_residual.block_size) == 8
    published = k3.draft
    assert (published.blocks, published.steps, published.loss) == ([1, 4], 7, "acceptance")
    assert published.step_weights == []
    model = built(draft_config(tuple(published.blocks), layers=16, steps=published.steps))  # blocks of two
    after: dict[str, torch.Tensor] = {}  # each layer: the running sum of its block
    for name, module in [*model.decoder.layers.items(), ("features", model.decoder), ("fusion", model.mtp.fusion)]:
        module.register_forward_hook(lambda _, given, out, name=name: after.update({name: out, f"to {name}": given[0]}))
    tokens = tokens_of(IDS)
    found = losses(model, tokens, packed(IDS), label_mask(IDS))
    first, fourth, last = after["to fusion"].split(32, dim=-1)
    assert torch.equal(first, after["1"])
    assert torch.equal(fourth, after["7"])
    assert torch.equal(last, after["features"])
    ((name, weight),) = model.mtp.fusion.named_parameters()
    assert name == "weight"
    assert torch.equal(weight, torch.cat([torch.zeros(32, 64), torch.eye(32)], dim=1))
    assert len(found.loss) == 7
    counts = found.mask > 0
    torch.testing.assert_close(found.loss[counts], -found.acceptance[counts].log())


def test_steps_are_those_of_generation(single_rank: None) -> None:
    """Every proposal over the whole row equals that of a draft with a cache, which reads the target up to one position
    and then goes on by itself."""
    from k3train.model.packing import Packing
    from k3train.model.state import SequenceStates

    model = built(draft_config(blocks=(1, 2)), seed=3).eval()
    ids = [[0] * 14]
    tokens, packing = tokens_of(ids), packed(ids)
    sums: list[torch.Tensor] = []
    with torch.no_grad():
        model(tokens, packing, sums=sums)
        *blocks, features = sums
        fused = model.mtp.fused(blocks, features)
        valid = [torch.ones(1, 14, dtype=torch.bool)] + [torch.arange(14)[None] >= k for k in range(1, STEPS)]
        unrolled = model.mtp.unroll(fused, model._embed(tokens.roll(-1, 1)), packing, valid)
        worst = 0.0
        for start in range(14 - STEPS):
            states = SequenceStates(model.config, [model.config.num_layers], page_size=4)
            (row,) = states.add()
            given, upto = fused[: start + 1], tokens[:, 1 : start + 2]
            for step in range(STEPS):
                view = states.extend([row], [upto.shape[1]])
                whole = Packing.whole_rows(*upto.shape)
                own = model.mtp.advance(given, model._embed(upto), whole, view.layer(model.config.num_layers))[-1:]
                worst = max(worst, float((own[0] - unrolled[step][start + step]).abs().max()))
                given, upto = own, tokens[:, start + step + 2 : start + step + 3]
    assert worst < 2e-5
    assert float((unrolled[1] - unrolled[0]).abs().max()) > 0.1


def test_proposals_that_count() -> None:
    """Against the definition, position by position: documents, filler, labels that do not count, rows' ends."""
    from k3train.model.draft import step_masks

    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2], [0] * 8 + [1] * 4])
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 8:] = True
    mask = (torch.rand(2, 12, generator=torch.Generator().manual_seed(1)) > 0.3).float()
    valid, found = step_masks(packed(ids.tolist(), padding), mask, 3)
    for k in range(1, 4):
        for b in range(2):
            for i in range(12):
                start = i - k + 1
                since = slice(max(start, 0), i + 1)
                inside = start >= 0 and len(set(ids[b, since].tolist())) == 1 and not padding[b, since].any()
                counts = inside and i + 1 < 12 and ids[b, i + 1] == ids[b, i] and not padding[b, i + 1]
                assert bool(valid[k - 1][b, i]) == inside, (k, b, i)
                assert float(found[k - 1, b, i]) == float(counts and mask[b, i + 1] > 0), (k, b, i)
    assert found.sum(dim=(1, 2)).tolist() == sorted(found.sum(dim=(1, 2)).tolist(), reverse=True)


def test_nothing_crosses_between_documents(single_rank: None) -> None:
    """Another middle document, or another filler, changes no bit of what counts elsewhere, gradients included."""
    model = built(draft_config(), seed=2)
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[1, 20:] = True
    ids = [IDS[0], [0] * 20 + [1] * 4]
    packing, mask = packed(ids, padding), label_mask(ids) * ~padding
    tokens, changed = tokens_of(ids), tokens_of(ids)
    changed[0, 9:20] = (changed[0, 9:20] + 7) % VOCAB
    changed[1, 20:] = (changed[1, 20:] + 7) % VOCAB
    elsewhere = torch.ones(2, LENGTH)
    elsewhere[0, 9:20] = 0
    results = []
    for given in (tokens, changed):
        model.zero_grad()
        found = losses(model, given, packing, mask)
        counted = found.mask * elsewhere
        (found.loss * counted).sum().backward()
        results.append((found.loss[counted > 0].detach(), model.mtp.join_proj.weight.grad.clone()))
        assert counted[-1].sum() > 10
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-6, rtol=1e-5)
    assert not torch.equal(losses(model, tokens, packing, mask).loss, losses(model, changed, packing, mask).loss)


@pytest.mark.parametrize("kind", ["acceptance", "kl"])
def test_loss_and_gradient(kind: str) -> None:
    """Two tokens by hand, and gradients against finite differences."""
    from k3train.model.draft import token_losses

    p = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.9, 0.1, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.4, 0.1, 0.4, 0.1]], dtype=torch.float64)
    loss, acceptance = token_losses(q.log().float(), p.log().float(), kind)
    torch.testing.assert_close(acceptance, torch.tensor([0.75, 0.5]))
    by_hand = {
        "acceptance": torch.tensor([0.75, 0.5]).log().neg(),
        "kl": torch.tensor([0.5 * 0.693147 + 0.25 * -0.693147, 0.9 * 0.810930]),
    }
    torch.testing.assert_close(loss, by_hand[kind], atol=1e-5, rtol=0)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 7, generator=generator)
    log_p = torch.log_softmax(torch.randn(5, 7, generator=generator), -1)
    logits.requires_grad_()
    token_losses(logits, log_p, kind)[0].sum().backward()
    for i in range(5):
        for v in range(7):
            moved = torch.zeros(5, 7)
            moved[i, v] = 1e-2
            with torch.no_grad():
                up, down = (token_losses(logits + s * moved, log_p, kind)[0].sum() for s in (1, -1))
            assert float(logits.grad[i, v]) == pytest.approx(float(up - down) / 2e-2, abs=2e-3)


def test_a_draft_that_is_far_off_still_learns() -> None:
    """The acceptance is 0 in fp32, and its logarithm and gradient are not lost."""
    from k3train.model.draft import token_losses

    logits = torch.tensor([[300.0, 0.0]], requires_grad=True)
    loss, acceptance = token_losses(logits, torch.tensor([[-400.0, 0.0]]), "acceptance")
    loss.sum().backward()
    assert float(acceptance) == 0.0
    assert float(loss) == pytest.approx(300.0)
    assert logits.grad.tolist() == [[pytest.approx(1.0), pytest.approx(-1.0)]]


def test_chain_lengths() -> None:
    from k3train.model.draft import DraftLosses

    generator = torch.Generator().manual_seed(0)
    acceptance = torch.rand(3, 2, 8, generator=generator)
    mask = (torch.rand(3, 2, 8, generator=generator) > 0.2).float()
    mask[:, :, -1] = 0
    lengths, whole = DraftLosses(acceptance, acceptance, mask).chain_lengths()
    for b in range(2):
        for n in range(8):
            complete = n + 2 < 8 and all(mask[k, b, n + k] for k in range(3))
            assert bool(whole[b, n]) == complete
            if complete:
                a = [float(acceptance[k, b, n + k]) for k in range(3)]
                assert float(lengths[b, n]) == pytest.approx(1 + a[0] + a[0] * a[1] + a[0] * a[1] * a[2])


def test_only_the_draft_learns(single_rank: None) -> None:
    """Every parameter of the draft has a gradient, and nothing of the target; the routers that are watched are its."""
    from k3train.parallel.balance import update_router_bias

    model = built(draft_config(), seed=2).train()
    tokens = tokens_of(IDS)
    found = losses(model, tokens, packed(IDS), label_mask(IDS))
    (found.loss * found.mask).sum().backward()
    assert not found.acceptance.requires_grad
    have = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert have == {n for n, _ in model.named_parameters() if n.startswith("mtp.")}
    balance = update_router_bias([model])
    assert list(balance) == [7]
    # Positions without a start are not counted: of step k, each document's first k - 1.
    positions = sum(max(0, n - k) for k in range(STEPS) for n in (9, 11, 4, 24))
    assert sum(balance[7].tokens_per_expert) == 2 * positions


def test_quantized_training_stays_on(single_rank: None) -> None:
    """The draft's experts and the target's are rounded (report section 4.1.4), and those of the draft still learn."""
    from k3train.model.experts import LatentExperts

    tokens, found = tokens_of(IDS), {}
    for enabled in (False, True):
        config = draft_config()
        config.quant.enabled = enabled
        config.model.moe.latent_size = config.model.moe.expert_hidden_size = 32  # a block of the formats
        model = built(config, seed=2).train()
        found[enabled] = losses(model, tokens, packed(IDS), label_mask(IDS))
        (found[enabled].loss * found[enabled].mask).sum().backward()
        experts = {n: m for n, m in model.named_modules() if isinstance(m, LatentExperts)}
        assert any(n.startswith("mtp.") for n in experts)
        assert any(n.startswith("decoder.") for n in experts)
        for name, module in experts.items():
            # w13 and w2 once, whatever the number of unrolled steps.
            assert (module.fake_quant.times_rounded if enabled else module.fake_quant) == (2 if enabled else None), name
            learns = [p.grad is not None and float(p.grad.abs().sum()) > 0 for p in (module.w13, module.w2)]
            assert learns == [name.startswith("mtp.")] * 2, name
    counts = found[True].mask > 0
    assert float((found[True].loss - found[False].loss)[counts].abs().max()) > 1e-4


REFUSED = [
    ({"checkpoint": {"load": None}}, "checkpoint.load=null names no target"),
    ({"draft": {"loss": "l2"}}, "draft.loss=l2 does not exist"),
    ({"draft": {"start": "old"}}, "draft.start=old does not exist"),
    ({"draft": {"data": "text"}}, "draft.data=text does not exist"),
    ({"draft": {"steps": 0}}, "draft.steps=0"),
    ({"draft": {"steps": 33}}, "draft.steps=33"),
    ({"draft": {"step_weights": [1.0]}}, "draft.step_weights=[1.0] does not weigh"),
    ({"draft": {"step_weights": [0.0] * 4}}, "draft.step_weights="),
    ({"draft": {"blocks": [1, 4]}}, "draft.blocks=[1,4] does not name blocks before the last of this model's 3"),
    ({"draft": {"blocks": [2, 1]}}, "draft.blocks=[2,1]"),
    ({"draft": {"blocks": [3]}}, "try 'draft.blocks=[1,2]'"),
    ({"train": {"seq_length": 5}}, "train.seq_length=5"),
    ({"model": {"mtp": {"num_layers": 0}}}, "model.mtp.num_layers=0"),
    ({"model": {"mtp": {"mixer": "kda"}}}, "model.mtp.mixer=kda"),
    ({"model": {"attention_residual": {"enabled": False}}}, "model.attention_residual.enabled=false"),
    ({"parallel": {"tensor": 2}}, "parallel.tensor=2 is no layout that a draft is trained in"),
    ({"parallel": {"pipeline": 2}}, "parallel.pipeline=2 is no layout"),
    ({"parallel": {"context": 2}}, "parallel.context=2 is no layout"),
    ({"lora": {"enabled": True}, "model": {"mtp": {"num_layers": 1}}}, "model.mtp.num_layers=1 would change"),
    ({"optim": {"qk_clip": {"enabled": True}}}, "optim.qk_clip.enabled=true"),
    ({"engine": "deepspeed"}, "stage.name=draft"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    from k3train.config.load import recipe_from_dict
    from k3train.config.schema import to_plain

    def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        both = {k: merged(old[k], v) if isinstance(v, dict) else v for k, v in new.items()}
        return {**old, **both}

    config = draft_config()
    config.train.eval_samples = 0
    config.data.train = [{"path": "x", "weight": 1.0}]
    plain = to_plain(config)
    validate(recipe_from_dict(plain))
    with pytest.raises(UserError) as refused:
        validate(recipe_from_dict(merged(plain, changes)))
    assert said in str(refused.value)
    assert "try " in str(refused.value)
