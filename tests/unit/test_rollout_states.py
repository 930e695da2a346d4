"""Decoding states: equal to whole forwards however the tokens come, and as small as they should be."""

from __future__ import annotations

import pytest
import torch
from test_model import build, small_model

from k3train.config.model import AttentionResidualConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig

LENGTH = 24


def kimi_linear_like() -> ModelConfig:
    """Softplus decay, low-rank gate, SwiGLU, plain residuals, no query or expert latent, no gate on MLA."""
    return small_model(
        kda=KDAConfig(num_heads=2, head_dim=16, gate="softplus", output_gate="low_rank"),
        mla=MLAConfig(
            num_heads=4,
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=24,
            output_gate=False,
        ),
        activation="swiglu",
        attention_residual=AttentionResidualConfig(enabled=False),
        moe=MoEConfig(num_experts=8, top_k=2, latent_size=None, latent_norm=False, expert_hidden_size=24),
    )


def with_mla(**changes: object) -> ModelConfig:
    config = small_model()
    for key, value in changes.items():
        setattr(config.mla, key, value)
    return config


CONFIGS = {
    "small": small_model,
    "kimi-linear": kimi_linear_like,
    "no-q-lora": lambda: with_mla(q_lora_rank=None),
    "no-gate": lambda: with_mla(output_gate=False),
    "odd-widths": lambda: with_mla(num_heads=3, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=4),
    "all-mla": lambda: small_model(full_attention_layers=[1, 2, 3, 4, 5, 6]),
    "all-kda": lambda: small_model(full_attention_layers=[]),
    "two-taps": lambda: small_model(kda=KDAConfig(num_heads=3, head_dim=8, conv_size=2)),
}


def ids(rows: int = 1, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def whole(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [s, vocab] of one sequence [s], without states."""
    from k3train.model.packing import Packing

    with torch.no_grad():
        return model(tokens[None], Packing.whole_rows(1, len(tokens)))[0]


def states_of(model: torch.nn.Module, page_size: int = 4) -> object:
    from k3train.model.state import SequenceStates

    return SequenceStates.of(model, page_size)


def feed(model: torch.nn.Module, states: object, rows: list[int], pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits [count, vocab] of each row's next tokens, in one forward pass."""
    from k3train.model.packing import Packing

    counts = [len(piece) for piece in pieces]
    with torch.no_grad():
        flat = torch.cat(pieces)[None]
        logits = model(flat, Packing.whole_rows(*flat.shape), states=states.extend(rows, counts))
    return list(logits[0].split(counts))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", ["chunk", "naive"])
def test_any_split_equals_the_whole_forward(single_rank: None, name: str, backend: str) -> None:
    """All at once, a stretch and then single tokens, stretches, and token by token: every position's logits agree."""
    config = CONFIGS[name]()
    config.kda.backend = backend
    model = build(config).eval()
    tokens = ids()[0]
    expected = whole(model, tokens)
    assert expected.std() > 0.1  # the bound below means something
    splits = ([LENGTH], [1] * LENGTH, [7, 1, 1, 9, 1, 5], [2, 20, 1, 1], [23, 1], [1, 4, 4, 4, 4, 4, 3])
    for split in splits:
        states = states_of(model)
        [row] = states.add()
        found = torch.cat([feed(model, states, [row], [piece])[0] for piece in tokens.split(split)])
        close(found, expected)


def test_reference_kernels_are_kept_to_behind_states(single_rank: None) -> None:
    """KDA token by token in front of states as well: to the last bit what the whole forward computes."""
    config = small_model(full_attention_layers=[], kernels="reference")
    model = build(config).eval()
    tokens = ids()[0]
    expected = whole(model, tokens)
    states = states_of(model)
    [row] = states.add()
    # In one piece: matrix products of other shapes may round otherwise.
    assert torch.equal(feed(model, states, [row], [tokens])[0], expected)


def test_what_is_cached_is_what_decides(single_rank: None) -> None:
    """A different past changes the logits by far more than the bound: the comparison above can fail."""
    model = build().eval()
    tokens, other = ids(seed=1)[0], ids(seed=2)[0]
    states = states_of(model)
    rows = states.add(2)
    feed(model, states, rows, [tokens[:10], other[:10]])
    first, second = feed(model, states, rows, [tokens[10:11], tokens[10:11]])
    assert (first - second).abs().max() > 1e-2


def test_rows_of_different_lengths_equal_single_ones(single_rank: None) -> None:
    """Prefilled together at lengths 1 to 19, then decoded together, some of them in stretches."""
    model = build().eval()
    lengths = [5, 1, 19, 8, 2]
    sequences = [ids(length=n + 6, seed=n)[0] for n in lengths]
    states = states_of(model)
    rows = states.add(len(lengths))
    parts = [feed(model, states, rows, [s[:n] for s, n in zip(sequences, lengths)])]
    for step in range(2):
        parts.append(feed(model, states, rows, [s[n + step : n + step + 1] for s, n in zip(sequences, lengths)]))
    # Some rows get one token and others three, in another order than their slots'.
    order = [3, 0, 4, 2, 1]
    take = [1, 3, 1, 3, 1]
    mixed = feed(
        model, states, [rows[i] for i in order], [sequences[i][lengths[i] + 2 :][:t] for i, t in zip(order, take)]
    )
    found = [torch.cat([part[i] for part in parts]) for i in range(len(rows))]
    for i, logits in zip(order, mixed):
        found[i] = torch.cat([found[i], logits])
    for sequence, logits in zip(sequences, found):
        close(logits, whole(model, sequence)[: len(logits)])


def test_rows_come_and_go(single_rank: None) -> None:
    """A removed row's slot and pages serve the next one, whose past they must not remember."""
    model = build().eval()
    states = states_of(model)
    first, second = states.add(2)
    feed(model, states, [first, second], [ids(length=11, seed=3)[0], ids(length=6, seed=4)[0]])
    states.remove([first])
    [third] = states.add()
    assert third == first
    tokens = ids(length=9, seed=5)[0]
    found = [feed(model, states, [third], [tokens[:5]])[0]]
    kept = torch.cat([ids(length=6, seed=4)[0], tokens[5:]])
    last = []
    for t in range(5, 9):
        one, other = feed(model, states, [third, second], [tokens[t : t + 1], kept[t + 1 : t + 2]])
        found.append(one)
        last.append(other)
    close(torch.cat(found), whole(model, tokens))
    close(torch.cat(last), whole(model, kept)[6:])


@pytest.mark.parametrize("shared", [3, 8, 9])
def test_forks_share_full_pages_and_go_their_own_ways(single_rank: None, shared: int) -> None:
    """Pages of four tokens: no, two full, and two full and one begun page of prefix."""
    model = build().eval()
    states = states_of(model)
    [row] = states.add()
    prefix = ids(length=shared, seed=6)[0]
    feed(model, states, [row], [prefix])
    used = states.pool.in_use
    rows = [row, *states.fork(row, 2)]
    assert states.pool.in_use == used + 2 * (shared % 4 > 0)
    ends = [ids(length=6, seed=10 + i)[0] for i in range(3)]
    found = [[], [], []]
    for t in range(6):
        for i, logits in enumerate(feed(model, states, rows, [end[t : t + 1] for end in ends])):
            found[i].append(logits)
    for end, logits in zip(ends, found):
        close(torch.cat(logits), whole(model, torch.cat([prefix, end]))[shared:])
    states.remove(rows)
    assert states.pool.in_use == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes(single_rank: None, precision: str) -> None:
    """A row costs the same in KDA layers at any length; a token costs latent and shared key in each MLA layer."""
    config = small_model()
    model = build(config, precision=precision).eval()
    size = {"fp32": 4, "bf16": 2}[precision]
    width = config.kda.num_heads * config.kda.head_dim
    per_row = 3 * (width * config.kda.head_dim * 4 + 3 * width * (config.kda.conv_size - 1) * size)
    per_token = 3 * (config.mla.kv_lora_rank + config.mla.qk_rope_head_dim) * size
    states = states_of(model, page_size=1)
    rows = states.add(2)
    seen = {}
    for length in (1, 2, 33, 100):
        grown = [ids(length=length - states.tokens[row])[0] for row in rows]
        feed(model, states, rows, grown)
        seen[length] = states.bytes_in_use()
        tensors = [t for buffers in states.layers.values() for t in vars(buffers).values()]
        assert states.bytes_allocated() == sum(t.untyped_storage().nbytes() for t in tensors)
        # Doubling: never more than twice what is needed.
        assert seen[length] <= states.bytes_allocated() <= 2 * seen[length]
    assert seen == {n: 2 * (per_row + n * per_token) for n in seen}
    kda = [b for i, b in states.layers.items() if not config.is_full_attention(i)]
    assert all(b.memory.shape[0] == 2 and b.memory.dtype == torch.float32 for b in kda)


def test_single_tokens_expand_nothing(single_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step never runs the projection that makes keys and values of latents."""
    from k3train.model.gated_mla import GatedMLA

    model = build().eval()
    states = states_of(model)
    rows = states.add(2)
    tokens = ids(2, 12)
    expanded = []
    real = GatedMLA._keys_values

    def spy(self: GatedMLA, latent: torch.Tensor, shared_key: torch.Tensor) -> tuple:
        expanded.append(latent.shape[0])
        return real(self, latent, shared_key)

    monkeypatch.setattr(GatedMLA, "_keys_values", spy)
    feed(model, states, rows, list(tokens[:, :10]))
    assert expanded == [10, 10] * 3
    expanded.clear()
    feed(model, states, rows, list(tokens[:, 10:11]))
    assert expanded == []


def test_bf16_stays_near_fp32(single_rank: None) -> None:
    """On the same bf16 weights, decoding in pieces is no further from the whole forward than rounding."""
    model = build(precision="bf16").eval()
    tokens = ids()[0]
    expected = whole(model, tokens).float()
    states = states_of(model)
    [row] = states.add()
    found = torch.cat([feed(model, states, [row], [piece])[0] for piece in tokens.split([10] + [1] * 14)]).float()
    assert (found - expected).abs().mean() < 0.02 * expected.std()


def test_wrong_use_is_refused(single_rank: None) -> None:
    states = states_of(build())
    [row] = states.add()
    for rows, counts in (([row, row], [1, 1]), ([row], [0]), ([row], [1, 2])):
        with pytest.raises(ValueError, match="distinct rows"):
            states.extend(rows, counts)
    with pytest.raises(KeyError):
        states.extend([row + 1], [1])


def test_the_convolution_step_equals_the_convolution() -> None:
    from k3kernels.short_conv import short_conv, short_conv_step

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 9, 5, generator=generator), torch.randn(5, 4, generator=generator)
    expected, final = short_conv(x, weight, output_final_state=True)
    state, found = torch.zeros(3, 5, 3), []
    for token in x.unbind(1):
        y, state = short_conv_step(token, weight, state)
        found.append(y)
    torch.testing.assert_close(torch.stack(found, 1), expected)
    assert torch.equal(state, final)
    with pytest.raises(ValueError, match="taps - 1"):
        short_conv_step(x[:, 0], weight, state[:2])
