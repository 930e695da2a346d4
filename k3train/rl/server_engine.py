"""The engine `openai` of a run, as its recipe describes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from k3train.config.quant import policy_in_force
from k3train.config.schema import RecipeConfig
from k3train.rl.shared_engine import SharedEngine
from k3train.rl.weights import largest_sent
from k3train.rollout.client import CompletionClient
from k3train.rollout.remote import OpenAIEngine
from k3train.rollout.servers import ServerSettings


def server_engine(config: RecipeConfig, trainer: Any, restore: Callable[[], None]) -> SharedEngine:
    """Connect to the server that `rl.rollout` names. Every rank calls this.

    `restore` gives the server anew the weights that it was given last; it is called on every rank.

    Raises:
        UserError: the server does not answer, or cannot do what the recipe asks of it.
    """
    rollout = config.rl.rollout
    quant = policy_in_force(config.quant, config.stage.name)
    largest = 0
    if rollout.refresh == "in_place":
        largest = largest_sent(trainer.models, config.model.vocab_size, rollout.bucket_mib << 20)
    settings = ServerSettings(
        rollout.server, rollout.refresh, quant and quant.policy(), 60 * rollout.outage_minutes, largest
    )

    def connect() -> OpenAIEngine:
        client = CompletionClient(rollout.url, rollout.model, rollout.timeout_seconds)
        return OpenAIEngine(client, rollout.concurrency, rollout.retries, settings=settings)

    def tell(sentence: str) -> None:
        # With the time: what is said twice in the same words is told once only, and each outage is another.
        now = time.strftime("%H:%M:%S")
        trainer.telemetry.event(f"{now} rl.rollout.url={rollout.url}: {sentence}", "warning")

    return SharedEngine(
        connect,
        restore=None if rollout.refresh == "none" else restore,
        beat=trainer.watchdog.beat,
        tell=tell,
    )
