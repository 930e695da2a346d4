"""A step of reinforcement learning on other experts than the recorded ones, and its loss by hand, on pool ranks."""

from __future__ import annotations

from typing import Any


def replayed_step(rank: int, world_size: int, recipe: dict[str, Any], shift: int) -> tuple[float, float] | None:
    """Train one step on samples whose recorded experts are `shift` further than those that they went to.

    Returns, of one rank, what K2.5's loss and the mean of |log rho| are by hand with these experts; else None.
    """
    import torch

    from k3train.config.load import recipe_from_dict
    from k3train.platform import Platform
    from k3train.stages.rl import RLStage
    from k3train.train import loop

    by_hand: list[tuple[float, float]] = []

    class Shifted(RLStage):
        def _batches(self, groups: list[Any], version: int) -> list[Any]:
            count = self.config.model.moe.num_experts
            for group in groups:
                for sample in group.samples:
                    sample.experts = (sample.experts + shift) % count
            if world_size == 1:
                by_hand.append(loss_by_hand(self._model, groups, self.config.rl.objective))
            return super()._batches(groups, version)

    here = Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size)
    assert loop.run_training(recipe_from_dict(recipe), Shifted, here) == 0
    return by_hand[0] if by_hand else None


def loss_by_hand(model: Any, groups: list[Any], objective: Any) -> tuple[float, float]:
    """One sample at a time, with routers that take the sample's experts whatever their scores say."""
    import torch

    from k3train.model.packing import Packing

    routers = [module for module in model.modules() if hasattr(module, "replayed")]
    taken: list[torch.Tensor] = []  # of each router, [tokens, top_k]

    def forced(number: int) -> Any:
        def routing(logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
            moe, scores = routers[number].moe, logits.view(-1, routers[number].moe.num_experts).sigmoid()
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, taken[number], True)
            weights = scores * chosen
            if moe.renormalize:
                weights = weights / weights.sum(dim=1, keepdim=True)
            return weights * moe.routed_scaling_factor, chosen

        return routing

    total, apart, tokens = 0.0, 0.0, 0
    model.eval()
    for number, router in enumerate(routers):
        router.routing = forced(number)
    for group in groups:
        mean = sum(sample.reward for sample in group.samples) / len(group.samples)
        for sample in group.samples:
            text = torch.tensor([[*group.prompt, *sample.tokens]])
            taken[:] = [sample.experts[: text.shape[1] - 1, n].long() for n in range(len(routers))]
            with torch.no_grad():
                logits = model(text[:, :-1], Packing.whole_rows(1, text.shape[1] - 1))[0].float()
            logprobs = logits.log_softmax(-1).gather(1, text[0, 1:, None])[-len(sample.tokens) :, 0]
            log_ratio = logprobs - torch.tensor(sample.logprobs)
            ratio = log_ratio.exp().clamp(objective.clip_low, objective.clip_high)
            total += (objective.regularizer * log_ratio**2 - ratio * (sample.reward - mean)).sum().item()
            apart, tokens = apart + log_ratio.abs().sum().item(), tokens + len(sample.tokens)
    for router in routers:
        del router.routing
    model.train()
    return total / tokens, apart / tokens
