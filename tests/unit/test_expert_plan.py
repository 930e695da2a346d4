"""Plans of balanced experts: equal work, bounded and few redundant experts, every copy sent and computed once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from k3train.parallel.expert_plan import ExpertPlan, balance, chunk_order, fair_shares, most_redundant


def redundant(hosted: np.ndarray) -> list[int]:
    """Redundant experts of each rank."""
    ranks, experts = hosted.shape
    home = np.arange(experts) // (experts // ranks)
    return [int(((row > 0) & (home != rank)).sum()) for rank, row in enumerate(hosted)]


def some_loads(ranks: int, per_rank: int, total: int) -> list[np.ndarray]:
    """Even, random, heavy-tailed, adversarial and degenerate loads, each of `total` copies."""
    experts, chance = ranks * per_rank, np.random.default_rng(ranks * 100 + per_rank)
    shares = [np.ones(experts), np.eye(experts)[experts - 1], np.eye(experts)[0]]
    shares += [chance.exponential(size=experts) for _ in range(4)]
    shares += [chance.permutation(1.0 / np.arange(1, experts + 1) ** power) for power in (1, 2, 3)]
    shares += [chance.exponential(size=experts) * (chance.random(experts) < 0.3) + np.eye(experts)[1] for _ in range(4)]
    of_rank = np.arange(experts) // per_rank
    shares += [(of_rank == 0) * 1.0, (of_rank < ranks - 1) * 1.0, (of_rank >= ranks // 2) * 1.0]
    shares += [(of_rank == 0) * 10.0 + 1, np.where(np.arange(experts) % per_rank == 0, 5.0, 0.1)]
    loads = []
    for share in shares:
        whole = np.floor(total * share / share.sum()).astype(np.int64)
        whole[int(share.argmax())] += total - whole.sum()
        loads.append(whole)
    return loads


SHAPES = [(2, 1), (2, 2), (2, 7), (3, 1), (3, 5), (4, 2), (5, 3), (8, 4), (8, 14), (64, 14)]


@pytest.mark.parametrize(("ranks", "per_rank"), SHAPES)
def test_ranks_compute_the_same_number_of_copies_with_few_redundant_experts(ranks: int, per_rank: int) -> None:
    bound = most_redundant(ranks * per_rank, ranks)
    assert bound <= per_rank
    for total in (ranks * 960, ranks * 7, ranks):
        for loads in some_loads(ranks, per_rank, total):
            hosted = balance(loads.tolist(), ranks)
            assert (hosted >= 0).all()
            assert (hosted.sum(axis=0) == loads).all()
            assert (hosted.sum(axis=1) == total // ranks).all()
            assert max(redundant(hosted)) <= bound, loads
    # What the proof says of the bound: these loads leave no method with less.
    unit = ranks * per_rank * (ranks - 1)
    worst = [unit if e < (ranks - 1) * per_rank else 0 for e in range(ranks * per_rank)]
    assert max(redundant(balance(worst, ranks))) == bound


@pytest.mark.parametrize(("ranks", "per_rank"), SHAPES[:-1])
def test_copies_that_do_not_divide_differ_by_one(ranks: int, per_rank: int) -> None:
    for total in (1, ranks - 1, ranks + 1, ranks * 100 + ranks // 2):
        for loads in some_loads(ranks, per_rank, total):
            hosted = balance(loads.tolist(), ranks)
            assert (hosted.sum(axis=0) == loads).all()
            assert set(hosted.sum(axis=1).tolist()) <= {total // ranks, -(-total // ranks)}
            assert max(redundant(hosted)) <= per_rank
    assert not balance([0] * ranks * per_rank, ranks).any()
    assert fair_shares([5, 0, 9]) == [5, 4, 5]


def fewest_redundant(loads: list[int], ranks: int, most: int) -> int:
    """The least total of redundant experts, by trying every set of them in order of size, up to `most`.

    A set will do if, by Hall's theorem, no group of ranks is left with more copies that only it may compute than its
    fair share; and if no rank has more than E / R of them.
    """
    per_rank = len(loads) // ranks
    totals = [sum(loads[r * per_rank : (r + 1) * per_rank]) for r in range(ranks)]
    groups = range(1 << ranks)
    room = [sum(share for r, share in enumerate(fair_shares(totals)) if group >> r & 1) for group in groups]
    used = [e for e, load in enumerate(loads) if load]
    pairs = [(e, r) for e in used for r in range(ranks) if r != e // per_rank]
    for number in range(most):
        for chosen in itertools.combinations(pairs, number):
            hosts = {e: 1 << e // per_rank for e in used}
            for expert, rank in chosen:
                hosts[expert] |= 1 << rank
            held = [rank for _, rank in chosen]
            if any(held.count(rank) > per_rank for rank in set(held)):
                continue
            if all(sum(loads[e] for e in used if hosts[e] | group == group) <= room[group] for group in groups):
                return number
    return most


def test_few_more_redundant_experts_than_the_exact_minimum() -> None:
    """Never more than one more than the best of all plans, and hardly ever that."""
    chance = np.random.default_rng(7)
    found = []
    for case in range(240):
        ranks, per_rank = [(2, 2), (2, 4), (3, 2), (3, 3), (4, 1), (4, 2)][case % 6]
        experts = ranks * per_rank
        loads = [
            chance.integers(0, 13, experts),
            chance.permutation(60 // np.arange(1, experts + 1)),
            chance.choice([0, 0, 5, 20], experts),
            np.where(np.arange(experts) < per_rank, 10, chance.integers(0, 4, experts)),
        ][case // 6 % 4].tolist()
        ours = sum(redundant(balance(loads, ranks)))
        found.append((ours, fewest_redundant(loads, ranks, ours)))
    worse = [ours - best for ours, best in found]
    print("redundant experts:", sum(ours for ours, _ in found), "exact:", sum(best for _, best in found))
    assert max(worse) <= 1
    assert sum(worse) <= 0.02 * sum(best for _, best in found)
    assert sum(best for _, best in found) > 400  # the cases are no empty ones


@pytest.mark.parametrize(("ranks", "per_rank"), [(2, 3), (4, 2), (8, 14)])
def test_every_copy_is_sent_and_computed_once(ranks: int, per_rank: int) -> None:
    """What ranks send each other and expect of each other agree, and add up to the counts."""
    experts, chance = ranks * per_rank, np.random.default_rng(3)
    for popularity in (np.ones(experts), chance.exponential(size=experts) ** 3, np.eye(experts)[per_rank]):
        chosen = [chance.multinomial(240, popularity / popularity.sum()) for _ in range(ranks)]
        for plan in (ExpertPlan.balanced(np.stack(chosen)), ExpertPlan.at_home(np.stack(chosen))):
            sent = np.stack([plan.sent(rank) for rank in range(ranks)])  # [source, host, expert]
            assert (sent >= 0).all()
            assert (sent.sum(axis=1) == plan.counts).all()
            assert (sent.sum(axis=0) == plan.hosted).all()
            for rank in range(ranks):
                held = [*range(rank * per_rank, (rank + 1) * per_rank), *plan.redundant[rank]]
                received = plan.received(rank)
                assert received.shape == (ranks, per_rank + plan.slots)
                assert (received[:, : len(held)] == sent[:, rank, held]).all()
                assert not received[:, len(held) :].any()
                # A rank's own copies stay as far as it computes any of that expert.
                assert (sent[rank, rank] == np.minimum(plan.counts[rank], plan.hosted[rank])).all()
                by_home = [plan.lent(home)[rank] for home in range(ranks)]
                assert [home * per_rank + e for home, es in enumerate(by_home) for e in es] == plan.redundant[rank]
                assert [len(es) for es in by_home] == plan.borrowed(rank)
    even = ExpertPlan.balanced(np.ones((ranks, experts), dtype=np.int64))
    assert not any(even.redundant)
    assert even.slots == most_redundant(experts, ranks)  # shapes are those of any other routing


def test_a_plan_depends_on_the_counts_alone() -> None:
    chance = np.random.default_rng(0)
    counts = chance.integers(0, 50, (8, 32))
    first = ExpertPlan.balanced(counts)
    assert (ExpertPlan.balanced(counts.copy()).hosted == first.hosted).all()
    assert (ExpertPlan.balanced(counts.astype(np.int32)).hosted == first.hosted).all()


def test_chunks_are_laid_out_in_another_order() -> None:
    values = np.array([0, 0, 0, 1, 3, 3])  # chunk 2 is empty
    order = chunk_order(np.array([3, 1, 0, 2]), np.array([3, 2, 0, 1]))
    assert values[order].tolist() == [3, 3, 0, 0, 0, 1]
    assert order.tolist() == [4, 5, 0, 1, 2, 3]


def test_loads_are_pooled_over_a_step_and_begin_anew(single_rank: None) -> None:
    """Two ranks of two experts; the first layer sends 9 of 12 copies to rank 0, the second 6 of 12."""
    from k3train.parallel.dispatch_load import DispatchLoad, pool_loads

    skewed, even = np.array([[3, 2, 1, 0], [4, 0, 1, 1]]), np.array([[3, 0, 1, 2], [3, 0, 2, 1]])
    first, second = DispatchLoad(), DispatchLoad()
    first.add(ExpertPlan.balanced(skewed))
    second.add(ExpertPlan.balanced(even))
    pooled = pool_loads([first, second], torch.device("cpu"))
    assert pooled["redundant_experts"] == 0.25  # one expert on one of two ranks, in one of two plans
    assert pooled["redundant_experts_max"] == 1
    assert pooled["max_over_mean"] == pooled["max_over_mean_max"] == 1.0
    assert pooled["plain_max_over_mean"] == (9 / 6 + 1) / 2
    assert pooled["plain_max_over_mean_max"] == 9 / 6
    second.add(ExpertPlan.at_home(skewed))
    pooled = pool_loads([first, second], torch.device("cpu"))
    assert pooled["max_over_mean"] == pooled["plain_max_over_mean"] == 9 / 6
    assert pooled["redundant_experts"] == pooled["redundant_experts_max"] == 0


@pytest.mark.parametrize("counts", [[2, 0, 3, 1, 2], [2, 0, 3, 0, 0], [0, 0, 0, 4, 1]], ids=str)
def test_grouped_products_equal_the_loop_over_own_and_borrowed_experts(counts: list[int], single_rank: None) -> None:
    """bf16; the borrowed stack idle, and only that one busy, too."""
    from k3train.model.experts import multiply

    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(counts), 16), (3, 8, 16), (2, 8, 16))
    values = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    upstream = torch.randn(sum(counts), 8, generator=generator).bfloat16()
    results = []
    for grouped in (False, True):
        rows, own, borrowed = (value.clone().requires_grad_() for value in values)
        out = multiply(rows, [own, borrowed], torch.tensor(counts), grouped)
        out.backward(upstream)
        assert own.grad is not None  # even of experts without rows: other ranks may return gradients to them
        results.append([out.detach(), rows.grad, own.grad, borrowed.grad])
    matrices = torch.cat(values[1:]).repeat_interleave(torch.tensor(counts), dim=0)
    expected = torch.stack([row @ matrix.t() for row, matrix in zip(values[0], matrices)])
    torch.testing.assert_close(results[0][0], expected)
    for looped, at_once in zip(*results):
        if looped is None or at_once is None:
            assert not any(counts[3:])
            continue
        torch.testing.assert_close(at_once, looped)


@pytest.mark.parametrize("frozen", ["", "rows", "own", "borrowed"])
def test_products_in_turn_equal_plain_autograd(frozen: str, single_rank: None) -> None:
    """To the last bit, with an idle expert in each stack, and where one input learns nothing."""
    from k3train.model.experts import multiply

    counts, generator = [4, 0, 7, 3, 0], torch.Generator().manual_seed(0)
    shapes = {"rows": (14, 16), "own": (3, 8, 16), "borrowed": (2, 8, 16)}
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    upstream = torch.randn(8, 14, generator=generator).t()

    def plain(rows: torch.Tensor, own: torch.Tensor, borrowed: torch.Tensor) -> torch.Tensor:
        matrices = [*own.unbind(0), *borrowed.unbind(0)]
        return torch.cat([part @ matrix.t() for part, matrix in zip(rows.split(counts), matrices)])

    results = []
    for product in (lambda r, o, b: multiply(r, [o, b], torch.tensor(counts), False), plain):
        leaves = {name: value.clone().requires_grad_(name != frozen) for name, value in values.items()}
        out = product(*leaves.values())
        out.backward(upstream)
        results.append([out, *(leaf.grad for leaf in leaves.values())])
    for found, wanted in zip(*results):
        assert (found is None) == (wanted is None)
        assert found is None or torch.equal(found, wanted)
