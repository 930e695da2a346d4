"""What each engine refuses, in one sentence before any rank starts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from k3train.config import rules_engine
from k3train.config.load import load_recipe
from k3train.config.validate import validate, validate_machine
from k3train.errors import UserError

TINY = ["recipe=pretrain/k3-tiny", "parallel=single", "optim=adamw-tiny"]
ZERO = ["engine=deepspeed"]
# Overrides of a recipe that fits one rank | what the sentence says | the override that cures it.
WRONG = [
    (["engine=fsdp"], "engine=fsdp does not exist; allowed: megatron, deepspeed", "engine=megatron"),
    ([*ZERO, "parallel.tensor=2"], "parallel.tensor=2 is not for engine=deepspeed", "parallel.tensor=1"),
    ([*ZERO, "parallel.pipeline=2"], "parallel.pipeline=2 is not for engine=deepspeed", "parallel.pipeline=1"),
    ([*ZERO, "parallel.context=2"], "parallel.context=2 is not for engine=deepspeed", "parallel.context=1"),
    ([*ZERO, "parallel.expert=2"], "parallel.expert=2 is not for engine=deepspeed", "parallel.expert=1"),
    ([*ZERO, "parallel.overlap_grad_reduce=true"], "grad_reduce=true is not", "parallel.overlap_grad_reduce=false"),
    ([*ZERO, "parallel.distributed_optimizer=false"], "=false is not", "parallel.distributed_optimizer=true"),
    ([*ZERO, "optim=per-head-muon"], "optim.name=muon is not for engine=deepspeed", "optim=adamw"),
    ([*ZERO, "optim.qk_clip.enabled=true"], "qk_clip.enabled=true is not for", "optim.qk_clip.enabled=false"),
    ([*ZERO, "deepspeed.zero_stage=4"], "deepspeed.zero_stage=4 is out of range", "deepspeed.zero_stage=2"),
    ([*ZERO, "deepspeed.persistence_threshold=-1"], "is out of range", "deepspeed.persistence_threshold=100000"),
    ([*ZERO, "deepspeed.offload_parameters=true"], "needs sharded parameters", "deepspeed.zero_stage=3"),
    (
        [*ZERO, "train.precision=bf16", "deepspeed.zero_stage=3"],
        "train.precision=bf16 is not for deepspeed.zero_stage=3",
        "deepspeed.zero_stage=2",
    ),
    (["deepspeed.zero_stage=3"], "zero_stage=3 has no effect with engine=megatron", "engine=deepspeed"),
    (["deepspeed.offload_optimizer=true"], "has no effect with engine=megatron", "engine=deepspeed"),
    ([*ZERO, "deepspeed.zero=3"], "deepspeed.zero=3: there is no such key", "deepspeed.zero_stage=3"),
]


@pytest.mark.parametrize(("overrides", "says", "cure"), WRONG, ids=[" ".join(row[0]) for row in WRONG])
def test_refused_in_one_sentence(overrides: list[str], says: str, cure: str) -> None:
    with pytest.raises(UserError) as told:
        validate(load_recipe([*TINY, *overrides]), 2)
    sentence = str(told.value)
    assert says in sentence
    assert cure in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_data_parallel_recipes_are_taken_as_they_are(stage: int) -> None:
    validate(load_recipe([*TINY, *ZERO, f"deepspeed.zero_stage={stage}", "deepspeed.offload_optimizer=true"]), 2)


def test_transformer_engine_is_refused() -> None:
    config = load_recipe([*TINY, *ZERO, "parallel.transformer_impl=te", "train.precision=bf16"])
    with pytest.raises(UserError, match=r"parallel.transformer_impl=te is not for engine=deepspeed.*try .*=local"):
        validate(config, 1)


def test_stages_that_generate_are_refused() -> None:
    config = load_recipe([*TINY, *ZERO])
    config.stage.name = "rl"
    with pytest.raises(UserError, match=r"stage.name=rl is not for engine=deepspeed.*allowed: pretrain, sft.*megatron"):
        rules_engine.check_engine(config)


def test_without_the_package_its_installation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_engine, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"engine=deepspeed needs the package deepspeed.*pip install.*engine=megatron"):
        validate_machine(load_recipe([*TINY, *ZERO]), gpus=0)
    validate_machine(load_recipe(TINY), gpus=0)


def test_deepspeed_is_imported_by_what_uses_it_alone() -> None:
    """It is optional and slow to import, and reads its environment when it is: no module imports it at its head."""
    root = Path(rules_engine.__file__).parents[1]
    importers = {}
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for scope, nodes in (("head", tree.body), ("anywhere", ast.walk(tree))):
            for node in nodes:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                if any(name.partition(".")[0] == "deepspeed" for name in names):
                    importers.setdefault(scope, set()).add(path.relative_to(root).as_posix())
    assert importers == {"anywhere": {"engine/library.py"}}


def test_a_run_under_muon_is_not_converted(tmp_path: Path) -> None:
    """In one sentence, and with nothing written."""
    from k3train.checkpoint import directory
    from k3train.config.schema import to_plain
    from k3train.engine.convert import convert

    plain = to_plain(load_recipe([*TINY, "optim=per-head-muon"]))
    directory.partial_of(tmp_path / "run", 3).mkdir(parents=True)
    source = directory.commit(tmp_path / "run", 3, {"config": plain, "state": {}, "versions": {}})
    with pytest.raises(UserError, match=r"optim.name=muon, which engine=deepspeed does not have.*checkpoint.load"):
        convert(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()
