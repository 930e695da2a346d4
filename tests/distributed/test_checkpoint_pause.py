"""What a save beside the training asks of other ranks while training stands still."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from small_run import make_corpus, small_recipe, train

COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "gather", "all_gather", "all_gather_into_tensor", "scatter", "barrier"),
    *(
        "send",
        "recv",
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "all_to_all_single",
        "reduce_scatter_tensor",
    ),
)
MADE = {
    "model__num_layers": 2,
    "model__full_attention_layers": [2],
    "train__steps": 6,
    "train__eval_samples": 0,
    "checkpoint": {"interval": 0, "milestones": [1, 2, 4], "async_save": True},
}


def counting(rank: int, world_size: int, recipe: dict[str, Any]) -> list[tuple[str, dict[str, int]]]:
    """Train; what the third save, and the first look at it while it is written, call of torch.distributed."""
    from k3train.checkpoint.saver import Saver
    from k3train.checkpoint.writing import Writing

    plain = {name: getattr(dist, name) for name in COLLECTIVES}
    begin, poll, write = Saver._begin, Saver.poll, Writing._write
    called: dict[str, int] = {}
    found: list[tuple[str, dict[str, int]]] = []
    looked = threading.Event()

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called[name] = called.get(name, 0) + 1
            return plain[name](*args, **kwargs)

        return call

    def noted(what: str, action: Any) -> Any:
        def call(self: Saver, *args: Any, **kwargs: Any) -> None:
            called.clear()
            action(self, *args, **kwargs)
            if self.pending_step == 4:
                found.append((what, dict(called)))
                if what == "poll":
                    looked.set()

        return call

    def slow(self: Writing) -> None:
        looked.wait(60.0 if self.partial.name.startswith("step_00000004") else 0.0)
        write(self)

    for name in COLLECTIVES:
        setattr(dist, name, counted(name))
    Saver._begin, Saver.poll, Writing._write = noted("begin", begin), noted("poll", poll), slow
    try:
        assert train(rank, world_size, recipe)[0] == 0
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)
        Saver._begin, Saver.poll, Writing._write = begin, poll, write
    return found[:2]


def test_a_save_beside_the_training_asks_the_other_ranks_for_little(pool: Any, tmp_path: Path) -> None:
    """Every question is a wait for the slowest rank, and part of the pause. One message opens a save that is not
    planned anew, the optimizer's state is gathered, and whether all is written is part of what every step asks anyway.
    """
    recipe = small_recipe(make_corpus(tmp_path), tmp_path / "run", **MADE)
    first, second = pool.run(counting, 2, recipe)
    for moves, ((begin, opened), (poll, looked)) in (("recv", first), ("send", second)):
        assert (begin, poll) == ("begin", "poll")
        assert opened.pop(moves) % 3 == 0  # main weights and two moments of each bucket
        assert opened == {"all_reduce": 1}
        assert looked == {}
