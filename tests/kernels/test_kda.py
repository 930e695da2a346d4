"""Kimi Delta Attention: the chunked backend against the token loop in fp64, causality, documents, decoding."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from k3kernels.kda import backend as backend_module
from k3kernels.kda import chunk_kda, kda_attention, kda_decode_step, kda_gate, l2_normalise, naive_kda, resolve_backend
from packaging.version import Version
from torch import Tensor

NAMES = ("q", "k", "v", "f", "b", "A_log", "dt_bias", "initial_state")


@dataclass(frozen=True)
class Case:
    """Shapes and gates of one comparison; ``f_mean`` of 6 puts all decays at the floor, -8 all near 1."""

    lengths: tuple[int, ...]
    heads: int = 2
    key_dim: int = 16
    value_dim: int = 24
    packed: bool = True
    gate: str = "floored"
    lower_bound: float = -5.0
    f_mean: float = 0.0
    f_std: float = 1.0
    A_log: float = 0.0
    with_state: bool = True
    same_keys: bool = False

    def cu_seqlens(self) -> Tensor | None:
        return torch.tensor([0, *itertools.accumulate(self.lengths)]) if self.packed else None

    def shape(self) -> tuple[int, int]:
        return (1, sum(self.lengths)) if self.packed else (len(self.lengths), self.lengths[0])

    def inputs(self) -> list[Tensor]:
        """fp64 inputs that fp32 holds exactly."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape).double()

        torch.manual_seed(len(self.lengths) + self.key_dim)
        batch, seq_length = self.shape()
        qk_shape = (batch, seq_length, self.heads, self.key_dim)
        k = normal(*qk_shape)
        if self.same_keys:
            k = (k[:, :1] + 1e-3 * k).float().double()
        return [
            normal(*qk_shape),
            k,
            normal(batch, seq_length, self.heads, self.value_dim),
            (normal(*qk_shape) * self.f_std + self.f_mean).float().double(),
            normal(batch, seq_length, self.heads) + (4 if self.same_keys else 0),
            (normal(self.heads) * 0.3 + self.A_log).float().double(),
            normal(self.heads * self.key_dim),
            normal(len(self.lengths), self.heads, self.key_dim, self.value_dim),
        ]

    def options(self) -> dict:
        return {"gate": self.gate, "lower_bound": self.lower_bound, "cu_seqlens": self.cu_seqlens()}


def outputs_and_gradients(case: Case, dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """``o``, the final state and the gradient of every input under a fixed random weighting of both."""
    leaves = [x.to(dtype).requires_grad_() for x in case.inputs()]
    state = leaves[-1] if case.with_state else None
    o, final = kda_attention(
        *leaves[:-1], **case.options(), initial_state=state, output_final_state=True, backend=backend
    )
    torch.manual_seed(1)
    loss = (o * torch.randn(o.shape).to(dtype)).sum() + (final * torch.randn(final.shape).to(dtype)).sum()
    used = leaves if case.with_state else leaves[:-1]
    gradients = torch.autograd.grad(loss, used)
    return {"o": o.detach(), "final_state": final.detach(), **dict(zip(NAMES, gradients))}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    difference = (found.double() - wanted.double()).norm()
    return float(difference / wanted.double().norm()) if wanted.norm() > 0 else float(difference)


def raw_inputs(seq_length: int, heads: int = 2, key_dim: int = 16, value_dim: int = 8, seed: int = 0) -> list[Tensor]:
    """fp32 ``q k v f b A_log dt_bias`` of one row."""
    torch.manual_seed(seed)
    qkf = [torch.randn(1, seq_length, heads, key_dim) for _ in range(3)]
    v = torch.randn(1, seq_length, heads, value_dim)
    b = torch.randn(1, seq_length, heads)
    return [qkf[0], qkf[1], v, qkf[2], b, torch.randn(heads) * 0.3, torch.randn(heads * key_dim)]


CASES = {
    "one document": Case((100,), key_dim=32, value_dim=32),
    "multiple of the chunk": Case((64,), heads=1),
    "one token": Case((1,)),
    "batch of rows": Case((37, 37, 37), packed=False),
    "lengths around the chunk": Case((1, 2, 15, 16, 17, 33, 31, 32)),
    "an empty document in the middle": Case((5, 0, 20)),
    "many short documents": Case((1, 3, 2, 1, 1, 4, 1, 2) * 4),
    "no initial state": Case((40, 9), with_state=False),
    "wide values": Case((50,), key_dim=8, value_dim=64),
    "all at the floor": Case((70, 50), f_mean=6.0, f_std=0.3),
    "all near one": Case((150,), f_mean=-8.0),
    "floor and one mixed": Case((150,), f_std=20.0),
    "steep gate": Case((60,), A_log=1.5),
    "low floor": Case((60, 3), lower_bound=-20.0),
    "high floor": Case((60, 3), lower_bound=-0.5),
    "softplus": Case((60, 3), gate="softplus"),
    "softplus, decays of thousands": Case((60, 3), gate="softplus", f_std=30.0, A_log=3.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_chunk_agrees_with_fp64_token_loop(case: Case) -> None:
    wanted = outputs_and_gradients(case, torch.float64, "naive")
    found = outputs_and_gradients(case, torch.float32, "chunk")
    errors = {name: relative_error(found[name], wanted[name]) for name in wanted}
    assert max(errors.values()) < 1e-5, errors
    exact = outputs_and_gradients(case, torch.float64, "chunk")
    errors = {name: relative_error(exact[name], wanted[name]) for name in wanted}
    assert max(errors.values()) < 1e-12, errors


def test_nearly_equal_keys_stay_stable() -> None:
    """The delta rule's hardest system: one key again and again, little decay, beta near 1."""
    case = Case((100,), key_dim=32, f_mean=-8.0, same_keys=True)
    wanted = outputs_and_gradients(case, torch.float64, "naive")
    found = outputs_and_gradients(case, torch.float32, "chunk")
    errors = {name: relative_error(found[name], wanted[name]) for name in wanted}
    assert max(errors.values()) < 1e-4, errors


def test_first_token_written_out() -> None:
    """From a zero state: o = scale * beta * (q . k) * v, whatever the gate."""
    q, k, v, f, b, A_log, dt_bias = raw_inputs(1)
    o, state = kda_attention(q, k, v, f, b, A_log, dt_bias, output_final_state=True, backend="naive")
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    beta = torch.sigmoid(b).unsqueeze(-1)
    torch.testing.assert_close(o, 16**-0.5 * beta * (q * k).sum(-1, keepdim=True) * v)
    torch.testing.assert_close(state, torch.einsum("nhk,nhv->nhkv", (beta * k)[:, 0], v[:, 0]))


def test_decay_comes_before_the_delta_correction() -> None:
    """Second token by hand, fp64: S = (I - beta k k^T) Diag(alpha) S + beta k v^T, then read."""
    torch.manual_seed(0)
    q, k, v, g, beta = (torch.rand(1, 2, 1, 4, dtype=torch.float64) for _ in range(5))
    g, beta = -g, beta[..., 0]
    o, _ = naive_kda(q, k, v, g, beta, scale=1.0)
    state = torch.zeros(4, 4, dtype=torch.float64)
    for t in range(2):
        key, value, bt = k[0, t, 0], v[0, t, 0], beta[0, t, 0]
        transition = (torch.eye(4, dtype=torch.float64) - bt * torch.outer(key, key)) @ torch.diag(g[0, t, 0].exp())
        state = transition @ state + bt * torch.outer(key, value)
    torch.testing.assert_close(o[0, 1, 0], state.T @ q[0, 1, 0])


def test_gates_as_written() -> None:
    f, A_log, dt_bias = torch.randn(3, 2, 4), torch.tensor([0.0, 1.0]), torch.randn(8)
    z = f + dt_bias.view(2, 4)
    rate = torch.tensor([1.0, torch.e]).view(2, 1)
    torch.testing.assert_close(kda_gate(f, A_log, dt_bias), -5 * torch.sigmoid(rate * z))
    torch.testing.assert_close(kda_gate(f, A_log, dt_bias.view(2, 4), "softplus"), -rate * torch.log1p(torch.exp(z)))


def test_norm_and_gate_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 4, dtype=torch.float64, requires_grad=True)
    A_log, dt_bias = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (2, 8))
    assert torch.autograd.gradcheck(l2_normalise, (x,))
    assert torch.autograd.gradcheck(kda_gate, (x, A_log, dt_bias))


def test_naive_agrees_with_flash_linear_attention() -> None:
    fla_naive = pytest.importorskip("fla.ops.kda.naive")
    torch.manual_seed(0)
    q, k = (l2_normalise(torch.randn(2, 20, 3, 8)) for _ in range(2))
    v, g, beta = torch.randn(2, 20, 3, 6), -5 * torch.rand(2, 20, 3, 8), torch.rand(2, 20, 3)
    state = torch.randn(2, 3, 8, 6)
    wanted = fla_naive.naive_recurrent_kda(q, k, v, g, beta, initial_state=state.clone(), output_final_state=True)
    found = naive_kda(q, k, v, g, beta, initial_state=state, output_final_state=True)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gate", ["floored", "softplus"])
@pytest.mark.parametrize("prefix", [1, 7, 16, 23, 40])
def test_the_future_does_not_touch_the_past(gate: str, prefix: int) -> None:
    state = torch.randn(1, 2, 16, 8)

    def run(future_seed: int) -> list[Tensor]:
        inputs, other = raw_inputs(53), raw_inputs(53, seed=future_seed)
        for x, y in zip(inputs[:5], other[:5]):
            x[:, prefix:] = 3 * y[:, prefix:]
        leaves = [x.requires_grad_() for x in inputs]
        o, _ = kda_attention(*leaves, gate=gate, initial_state=state, backend="chunk")
        past = o[:, :prefix]
        gradients = torch.autograd.grad(past.square().sum(), leaves[:5])
        return [past, *(x[:, :prefix] for x in gradients)]

    first, second = run(1), run(2)
    for name, a, b in zip(("o", *NAMES), first, second):
        assert torch.equal(a, b), name
        assert a.abs().sum() > 0, name


@pytest.mark.parametrize("gate", ["floored", "softplus"])
@pytest.mark.parametrize("lengths", [(20, 33), (33, 20), (1, 16), (40, 3)])
def test_documents_do_not_touch_each_other(gate: str, lengths: tuple[int, int]) -> None:
    first, total = lengths[0], sum(lengths)
    cu_seqlens = torch.tensor([0, first, total])
    state = torch.randn(2, 2, 16, 8)

    def run(changed: slice, seed: int) -> list[Tensor]:
        inputs, other = raw_inputs(total), raw_inputs(total, seed=seed)
        for x, y in zip(inputs[:5], other[:5]):
            x[:, changed] = 3 * y[:, changed]
        leaves = [x.requires_grad_() for x in inputs]
        o, final = kda_attention(
            *leaves,
            gate=gate,
            cu_seqlens=cu_seqlens,
            initial_state=state,
            output_final_state=True,
            backend="chunk",
        )
        gradients = torch.autograd.grad(o.square().sum() + final.square().sum(), leaves[:5])
        return [o, *gradients]

    for changed, kept in (
        (slice(0, first), slice(first, total)),
        (slice(first, total), slice(0, first)),
    ):
        for name, a, b in zip(("o", *NAMES), run(changed, 1), run(changed, 2)):
            assert torch.equal(a[:, kept], b[:, kept]), name
            assert not torch.equal(a, b), name


def test_packed_documents_equal_each_alone() -> None:
    lengths = (5, 18, 1, 33)
    inputs = raw_inputs(sum(lengths))
    edges = [0, *itertools.accumulate(lengths)]
    o, state = kda_attention(*inputs, cu_seqlens=torch.tensor(edges), output_final_state=True, backend="chunk")
    for document, (start, end) in enumerate(itertools.pairwise(edges)):
        alone = [x[:, start:end] for x in inputs[:5]]
        alone_o, alone_state = kda_attention(*alone, *inputs[5:], output_final_state=True, backend="chunk")
        torch.testing.assert_close(o[:, start:end], alone_o, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state[document], alone_state[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gate", ["floored", "softplus"])
def test_prefill_and_decode_equal_the_whole(gate: str) -> None:
    inputs = raw_inputs(40)
    whole, whole_state = kda_attention(*inputs, gate=gate, output_final_state=True, backend="chunk")
    sequence, parameters = inputs[:5], inputs[5:]
    prefill = [x[:, :29] for x in sequence]
    o, state = kda_attention(*prefill, *parameters, gate=gate, output_final_state=True, backend="chunk")
    pieces = [o]
    for t in range(29, 40):
        token = [x[:, t] for x in sequence]
        step, state = kda_decode_step(*token, *parameters, state, gate=gate)
        pieces.append(step.unsqueeze(1))
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, whole_state, rtol=1e-5, atol=1e-6)


def test_state_carries_over_a_cut() -> None:
    """What context parallelism and chunked prefill rest on: two halves with the state handed on are the whole."""
    inputs = raw_inputs(50)
    whole, whole_state = kda_attention(*inputs, output_final_state=True, backend="chunk")
    halves = [[x[:, :21] for x in inputs[:5]], [x[:, 21:] for x in inputs[:5]]]
    first, state = kda_attention(*halves[0], *inputs[5:], output_final_state=True, backend="chunk")
    second, state = kda_attention(
        *halves[1], *inputs[5:], initial_state=state, output_final_state=True, backend="chunk"
    )
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, whole_state, rtol=1e-5, atol=1e-6)


def test_bf16_is_fp32_inside() -> None:
    inputs = [x.bfloat16() for x in raw_inputs(40)[:5]] + raw_inputs(40)[5:]
    leaves = [x.clone().requires_grad_() for x in inputs]
    o, state = kda_attention(*leaves, output_final_state=True, backend="chunk")
    wanted, wanted_state = kda_attention(*(x.float() for x in inputs), output_final_state=True, backend="chunk")
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert torch.equal(o, wanted.bfloat16())
    assert torch.equal(state, wanted_state)
    gradients = torch.autograd.grad(o.float().square().sum(), leaves)
    assert [x.dtype for x in gradients] == [x.dtype for x in inputs]


def test_autocast_does_not_reach_inside() -> None:
    def gradients() -> list[Tensor]:
        leaves = [x.requires_grad_() for x in raw_inputs(40)]
        o, _ = kda_attention(*leaves, backend="chunk")
        return [o, *torch.autograd.grad(o.square().sum(), leaves)]

    wanted = gradients()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients()
    for a, b in zip(found, wanted):
        assert torch.equal(a, b)


def test_training_after_a_rollout_of_the_same_lengths() -> None:
    inputs = raw_inputs(41)
    cu_seqlens = torch.tensor([0, 13, 41])
    with torch.inference_mode():
        rolled, _ = kda_attention(*inputs, cu_seqlens=cu_seqlens, backend="chunk")
    leaves = [x.requires_grad_() for x in inputs]
    o, _ = kda_attention(*leaves, cu_seqlens=cu_seqlens, backend="chunk")
    o.sum().backward()
    assert torch.equal(o, rolled)


@pytest.mark.parametrize("backend", ["naive", "chunk"])
def test_no_tokens(backend: str) -> None:
    inputs = [x.requires_grad_() for x in raw_inputs(0)]
    state = torch.randn(1, 2, 16, 8)
    o, final = kda_attention(*inputs, initial_state=state, output_final_state=True, backend=backend)
    assert o.shape == (1, 0, 2, 8)
    assert torch.equal(final, state)


def test_scale_and_default_state() -> None:
    inputs = raw_inputs(20)
    default, none = kda_attention(*inputs, backend="chunk")
    explicit, _ = kda_attention(*inputs, scale=3 * 16**-0.5, backend="chunk")
    assert none is None
    torch.testing.assert_close(explicit, 3 * default)


def test_chunk_without_a_promised_floor_equals_with_one() -> None:
    q, k, v, f, b, A_log, dt_bias = raw_inputs(40)
    args = (l2_normalise(q), l2_normalise(k), v, kda_gate(f, A_log, dt_bias), torch.sigmoid(b))
    with_floor, _ = chunk_kda(*args, lower_bound=-5.0)
    without, _ = chunk_kda(*args)
    torch.testing.assert_close(with_floor, without, rtol=1e-5, atol=1e-6)


def test_resolve_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_backend("auto", "cpu") == "chunk"
    assert resolve_backend("naive", "cpu") == "naive"
    assert resolve_backend("chunk", "cuda") == "chunk"
    with pytest.raises(ValueError, match="runs on CUDA only and the tensors are on cpu"):
        resolve_backend("fla", "cpu")
    with pytest.raises(ValueError, match="'flash'; it must be one of chunk, naive, fla, auto"):
        resolve_backend("flash", "cpu")
    for version, automatic in ((Version("0.6.0"), "fla"), (Version("0.5.2"), "chunk"), (None, "chunk")):
        monkeypatch.setattr(backend_module, "_installed_fla", lambda version=version: version)
        assert resolve_backend("auto", "cuda:0") == automatic
        if automatic == "fla":
            assert resolve_backend("fla", "cuda") == "fla"
        else:
            with pytest.raises(ValueError, match=r"needs fla-core >= 0\.6\.0"):
                resolve_backend("fla", "cuda")


def _without(**changes: Callable[[Tensor], Tensor]) -> list[Tensor]:
    inputs = dict(zip(NAMES, raw_inputs(6)))
    return [changes[name](x) if name in changes else x for name, x in inputs.items()]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (_without(k=lambda x: x[..., :3]), {}, r"k has shape \[1, 6, 2, 3\]; it must be \[1, 6, 2, 16\]"),
        (_without(b=lambda x: x[..., :1]), {}, r"b has shape \[1, 6, 1\]; it must be \[1, 6, 2\]"),
        (_without(A_log=lambda x: x[:1]), {}, r"A_log has shape \[1\]; it must be \[2\]"),
        (_without(dt_bias=lambda x: x[:5]), {}, r"dt_bias has shape \[5\]; it must be \[2, 16\]"),
        (_without(), {"cu_seqlens": torch.tensor([0, 4])}, "end at the sequence length 6"),
        (_without(), {"cu_seqlens": torch.tensor([0, 4, 3, 6])}, "never decrease"),
        (_without(), {"cu_seqlens": torch.tensor([0.0, 6.0])}, "one vector of integers"),
        (_without(), {"initial_state": torch.zeros(1, 2, 8, 16)}, r"initial_state has shape \[1, 2, 8, 16\]"),
        (_without(), {"lower_bound": 0.5}, "lower_bound is 0.5; the floor of a log-decay must be negative"),
        (_without(), {"gate": "relu"}, "gate is 'relu'; it must be one of floored, softplus"),
        ([x.expand(2, *x.shape[1:]) if x.dim() > 2 else x for x in _without()], {"cu_seqlens": torch.tensor([0, 6])},
         "cu_seqlens was given with a batch of 2"),
    ],
)  # fmt: skip
def test_refusals(inputs: list[Tensor], options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kda_attention(*inputs, **options, backend="chunk")
