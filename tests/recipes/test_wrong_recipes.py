"""Wrong recipes stop in one sentence that names the key, its value, what is allowed and the override that cures it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from k3train.config.load import load_recipe, recipe_from_dict
from k3train.config.validate import validate, validate_machine
from k3train.errors import UserError

TINY = "recipe=pretrain/k3-tiny"
PP1 = ["parallel.pipeline=1", "parallel.pipeline_layout=null"]
# Overrides of pretrain/k3-tiny | what the sentence says is wrong | overrides that cure it, which it has to offer.
WRONG = [
    (["model.num_layer=3"], "model.num_layer=3: there is no such key", "model.num_layers=3"),
    (["num_layers=9"], "num_layers=9: there is no such key", "model.num_layers=9"),
    (["optim.learning_rate=1e-3"], "optim.learning_rate=1e-3: there is no such key", "optim.lr=1e-3"),
    (["train.max_steps=7"], "train.max_steps=7: there is no such key", "train.steps=7"),
    (["tp=2"], "tp=2: there is no such key", "parallel.tensor=2"),
    (["model=k3-small"], "model=k3-small does not exist", "model=k3-mini"),
    (["train.steps=abc"], "train.steps has the wrong type", "train.steps=160"),
    (["train.steps=abc", "optim.lr=foo"], "train.steps has the wrong type", "train.steps=160"),
    (["data.train=path"], "data.train has the wrong type", "'data.train=[{path: data/demo/train,weight: 1.0}]'"),
    (["data.train=[{path: a, weight: x}]"], "weight has the wrong type", None),
    (["optim.policy=[{match: a, optimzer: muon}]"], "optimzer is no key of a rule of optim.policy", None),
    (["optim.policy=[{match: a, lr_mult: x}]"], "lr_mult has the wrong type", None),
    (["model.moe=3"], "model.moe is a group of keys", None),
    (["+optim.lrr=1e-3"], "optim.lrr=1e-3: there is no such key", "optim.lr=1e-3"),
    (
        ["telemetry.wandb.mod=offline"],
        "telemetry.wandb.mod=offline: there is no such key",
        "telemetry.wandb.mode=offline",
    ),
    (["optim.lr.value=1"], "optim.lr.value=1: there is no such key", "optim.lr=1"),
    (["model.num_layers=abc"], "model.num_layers has the wrong type (Value 'abc'", "model.num_layers=9"),
    (["optim.lr=fast"], "optim.lr has the wrong type (Value 'fast'", "optim.lr=0.01"),
    (["optim.lr=null"], "optim.lr has the wrong type", "optim.lr=0.01"),
    (["parallel.sequence=maybe"], "parallel.sequence has the wrong type (Value 'maybe'", "parallel.sequence=true"),
    (["optim.betas=0.9"], "optim.betas has the wrong type", "optim.betas=[0.9,0.95]"),
    (["train.steps=1.5"], "train.steps has the wrong type (Value '1.5'", "train.steps=160"),
    (["data.train=[{pat: a}]"], "pat is no key of a corpus of data.train or data.valid", None),
    (["data.train=[{weight: 2.0}]"], "data.train[0].path has no value (???)", None),
    (["data.tokenizer=???"], "data.tokenizer has no value (???)", None),
    (["run.dir='${run.nam}'"], "run.dir refers to another key that does not exist", None),
    (["~optim.lr"], "~optim.lr would delete a key", None),
    (["optim.lr=1e-3,2e-3"], "optim.lr=1e-3,2e-3 names several values", None),
    (["model=k4"], "model=k4 does not exist; allowed: k3, k3-48b, k3-8layers, k3-mini, k3-tiny", "model=k3"),
    (["optim=sgd"], "optim=sgd does not exist; allowed: adamw, adamw-tiny, muon, muon-tiny, per", "optim=adamw"),
    (["parallel.pipeline_layout=E(t|)*8tL"], "cannot read the override", None),
    (["optim.name=muonn"], "optim.name=muonn does not exist", "optim.name=muon"),
    (["optim=adamw", "optim.name=muon"], "optim.policy has no rule that puts a parameter under muon", None),
    (["optim=per-head-muon", "optim.name=adamw"], "optim.policy puts parameters under muon", "optim.name=muon"),
    (["optim=per-head-muon", "optim.policy.3.split=head"], "3.split=head does not", "optim.policy.3.split=whole"),
    (["optim=per-head-muon", "optim.policy.0.split=heads"], "has no effect with opt", "optim.policy.0.split=whole"),
    (["optim=per-head-muon", "optim.policy.0.lr_mult=0"], "lr_mult=0 is out of", "optim.policy.0.lr_mult=1.0"),
    (["optim.muon.momentum=1.0"], "optim.muon.momentum=1.0 is out of range", "optim.muon.momentum=0.95"),
    (["optim.muon.coefficients=[1.5]"], "are not the three numbers", "optim.muon.coefficients=[3.4445,-4.775,2.0315]"),
    (["optim.decay_fraction=1.5"], "optim.decay_fraction=1.5 is out of range", "optim.decay_fraction=0.2"),
    (
        ["optim.schedule=wsd", "optim.warmup_fraction=0.9"],
        "optim.decay_fraction=0.2 and optim.warmup_fraction=0.9 are more than the whole run",
        "optim.decay_fraction=0.1",
    ),
    (
        ["train.precision=bf16", "parallel.distributed_optimizer=false"],
        "parallel.distributed_optimizer=false cannot save checkpoints with train.precision=bf16",
        "parallel.distributed_optimizer=true",
    ),
    (["optim.qk_clip.tau=0"], "optim.qk_clip.tau=0.0 is out of range", "optim.qk_clip.tau=100"),
    (["optim.schedule=cosin"], "optim.schedule=cosin does not exist", "optim.schedule=cosine"),
    (["train.precision=fp16"], "train.precision=fp16 does not exist", "train.precision=bf16"),
    (["model.kda.gate=flored"], "model.kda.gate=flored does not exist", "model.kda.gate=floored"),
    (["model.moe.balancing=aux"], "model.moe.balancing=aux does not exist", "model.moe.balancing=quantile"),
    (["model.mtp.mixer=gqa"], "model.mtp.mixer=gqa does not exist", "model.mtp.mixer=mla"),
    (["stage.name=pretraining"], "stage.name=pretraining does not exist", "stage.name=pretrain"),
    (["run.device=gpu"], "run.device=gpu does not exist", "run.device=cpu"),
    (["checkpoint.async_busy=drop"], "checkpoint.async_busy=drop does not exist", "checkpoint.async_busy=wait"),
    (["checkpoint.keep_every=-1"], "checkpoint.keep_every=-1 is out of range", "checkpoint.keep_every=1000"),
    (["checkpoint.milestones=[5,9999]"], "names step 9999, which train.steps=160", "checkpoint.milestones=[160]"),
    (["checkpoint.resume=always"], "checkpoint.resume=always does not exist", "checkpoint.resume=auto"),
    (["telemetry.wandb.mode=off"], "telemetry.wandb.mode=off does not exist", "telemetry.wandb.mode=offline"),
    (["parallel.recompute=selective"], "parallel.recompute=selective does not exist", "parallel.recompute=none"),
    (["parallel.tensor=3"], "parallel.tensor=3 does not divide model.kda.num_heads=4", "parallel.tensor=2"),
    (
        ["parallel.tensor=2", "model.mla.num_heads=5"],
        "parallel.tensor=2 does not divide model.mla.num_heads=5; allowed: 1;",
        "parallel.tensor=1",
    ),
    (
        ["parallel.tensor=4", "model.ffn_hidden_size=390"],
        "parallel.tensor=4 does not divide model.ffn_hidden_size=390; allowed: 1, 2;",
        "parallel.tensor=2",
    ),
    (
        ["parallel.tensor=4", "model.moe.expert_hidden_size=90"],
        "parallel.tensor=4 does not divide the width of the shared experts",
        "parallel.tensor=1",
    ),
    (["parallel.tensor=2", "parallel.sequence=false"], "parallel.sequence=false", "parallel.sequence=true"),
    (["parallel.tensor=2", "train.seq_length=255"], "train.seq_length=255 is not divisible", "train.seq_length=256"),
    (["parallel.context=2", "train.seq_length=255"], "train.seq_length=255 is not divisible", "train.seq_length=256"),
    (
        ["parallel.context=2", "parallel.world_size=4", "train.seq_length=4"],
        "train.seq_length=4 gives each of parallel.context=2 ranks 2 tokens, fewer than the 3",
        "train.seq_length=6",
    ),
    (["parallel.context=0"], "parallel.context=0 is out of range", "parallel.context=1"),
    (["parallel.expert=3"], "parallel.expert=3 does not divide model.moe.num_experts=16", "parallel.expert=2"),
    (
        ["parallel.expert_tensor=5"],
        "parallel.expert_tensor=5 does not divide parallel.tensor=1",
        "parallel.expert_tensor=1",
    ),
    (
        ["parallel.expert_tensor=2"],
        "parallel.expert_tensor=2 does not divide parallel.tensor=1",
        "parallel.expert_tensor=1",
    ),
    (
        ["parallel.balanced_experts=true", "parallel.expert=1"],
        "parallel.balanced_experts=true has nothing to balance",
        "parallel.expert=2",
    ),
    (
        ["parallel.balanced_experts=true", "parallel.tensor=2", "parallel.expert_tensor=2"],
        "parallel.balanced_experts=true is not for parallel.expert_tensor=2",
        "parallel.expert_tensor=1",
    ),
    (
        ["parallel.balanced_experts=true", "model.moe.dispatcher=allgather"],
        "parallel.balanced_experts=true plans an exchange of its own",
        "model.moe.dispatcher=alltoall",
    ),
    (
        ["parallel.balanced_experts=true", "model.moe.num_experts=0", "parallel.expert=1"],
        "parallel.balanced_experts=true needs experts",
        "parallel.balanced_experts=false",
    ),
    (["parallel.pipeline_layout=null"], "model.num_layers=9 is not divisible", "parallel.pipeline_layout='Et*4|t*5L'"),
    (
        ["parallel.pipeline_layout='Et*4|t*4L'"],
        "holds 8 decoder layers but model.num_layers=9",
        "parallel.pipeline_layout='Et*4|t*5L'",
    ),
    (
        ["parallel.pipeline_layout='Et*3|t*3|t*3L'"],
        "has 3 stages but parallel.pipeline=2 x parallel.virtual_pipeline=1 needs 2",
        "parallel.pipeline_layout='Et*4|t*5L'",
    ),
    (["parallel.pipeline_layout='Et*5|x*4L'"], "is malformed: 'x' is none of E, t, m, L, |", None),
    (["parallel.pipeline_layout='t*5|t*4L'"], "does not start with its only E", None),
    (["parallel.pipeline_layout='Et*5|t*4mL'"], "holds 1 m but model.mtp.num_layers=0", None),
    (
        ["parallel.virtual_pipeline=2", "parallel.pipeline_layout='Et*9||t*0L|L'"],
        "parallel.pipeline_layout=Et*9||t*0L|L leaves stage 1 empty",
        None,
    ),
    (["model.mtp.num_layers=1"], "holds 0 m but model.mtp.num_layers=1", "parallel.pipeline_layout='Et*4|t*5mL'"),
    ([*PP1, "parallel.virtual_pipeline=3"], "parallel.virtual_pipeline=3 interleaves", "parallel.virtual_pipeline=1"),
    (
        ["parallel.virtual_pipeline=2", "parallel.pipeline_layout='Et*2|t*2|t*2|t*3L'", "train.global_batch_size=24"],
        "train.global_batch_size=24 makes 3 micro-batches",
        "train.global_batch_size=32",
    ),
    (["parallel.world_size=3"], "parallel.world_size=3 is not divisible by", "parallel.world_size=4"),
    (["parallel.world_size=2"], "parallel.world_size=2 is not divisible by", "parallel.expert=1"),
    (["parallel.world_size=0"], "parallel.world_size=0 is out of range", "parallel.world_size=null"),
    (["parallel.pipeline=0"], "parallel.pipeline=0 is out of range", "parallel.pipeline=1"),
    (["train.global_batch_size=18"], "train.global_batch_size=18 is not divisible by", "train.global_batch_size=16"),
    (["train.micro_batch_size=3"], "train.global_batch_size=16 is not divisible by", "train.global_batch_size=18"),
    (["train.eval_samples=9"], "train.eval_samples=9 is not divisible by", "train.eval_samples=8"),
    (
        ["parallel.overlap_param_gather=true"],
        "parallel.overlap_param_gather=true needs",
        "parallel.overlap_grad_reduce=true",
    ),
    (["model.moe.top_k=16"], "model.moe.top_k=16 leaves none", "model.moe.top_k=4"),
    (["model.full_attention_layers=[4,8,10]"], "names layer 10", "model.full_attention_layers=[4,8]"),
    (["model.full_attention_layers=[0,4]"], "names layer 0", "model.full_attention_layers=[4]"),
    (["model.full_attention_layers=[4,4,8]"], "names layer 4 twice", "model.full_attention_layers=[4,8]"),
    (["model.full_attention_layers=[8,4]"], "is not in increasing order", "model.full_attention_layers=[4,8]"),
    (["model.mtp.num_layers=2"], "model.mtp.num_layers=2 is out of range", "model.mtp.num_layers=1"),
    (["model.hidden_size=0"], "model.hidden_size=0 is out of range", "model.hidden_size=128"),
    (["model.kda.gate_lower_bound=-8"], "model.kda.gate_lower_bound=-8.0 is out", "model.kda.gate_lower_bound=-5.0"),
    (["model.tie_word_embeddings=true"], "model.tie_word_embeddings=true", "model.tie_word_embeddings=false"),
    (["model.moe.latent_size=null"], "model.moe.latent_norm=true", "model.moe.latent_norm=false"),
    (["model.moe.latent_size=256"], "model.moe.latent_size=256 is wider", "model.moe.latent_size=64"),
    (["model.moe.sign_rate=0.01"], "model.moe.sign_rate=0.01 has no effect", "model.moe.balancing=sign"),
    (["model.moe.balancing=sign", "model.moe.quantile_ema=0.5"], "model.moe.quantile_ema=0.5 has no effect", None),
    (["model.moe.quantile_ema=1.0"], "model.moe.quantile_ema=1.0 is out of range", "model.moe.quantile_ema=0.0"),
    (["optim.lr=0"], "optim.lr=0.0 is out of range; allowed: more than 0", "optim.lr=0.003"),
    (["optim.lr=nan"], "optim.lr=nan is out of range", "optim.lr=0.003"),
    (["optim.min_lr=0.1"], "optim.min_lr=0.1 is above optim.lr=0.01", "optim.min_lr=0.001"),
    (["optim.warmup_fraction=1.0"], "optim.warmup_fraction=1.0 is out of range", "optim.warmup_fraction=0.01"),
    (["optim.betas=[0.9,1.0]"], "optim.betas=[0.9,1.0] is not a pair", "optim.betas=[0.9,0.95]"),
    (["optim.betas=[0.9]"], "optim.betas=[0.9] is not a pair", "optim.betas=[0.9,0.95]"),
    (["train.steps=-1"], "train.steps=-1 is out of range", "train.steps=300"),
    (["run.timeout_minutes=0"], "run.timeout_minutes=0.0 is out of range", "run.timeout_minutes=30"),
    (["run.timeout_minutes=inf"], "run.timeout_minutes=inf is out of range", "run.timeout_minutes=30"),
    (["run.timeout_minutes=1e300"], "run.timeout_minutes=1e+300 is out of range", "run.timeout_minutes=30"),
    (["run.threads_per_rank=100000"], "run.threads_per_rank=100000 is out of range", "run.threads_per_rank=null"),
    (["data.num_workers=100000"], "data.num_workers=100000 is out of range", "data.num_workers=0"),
    (["optim.lr=inf"], "optim.lr=inf is out of range; allowed: more than 0 and at most 2147483647", "optim.lr=0.003"),
    (["optim=muon", "optim.muon.coefficients=[nan,1,2]"], "optim.muon.coefficients=[nan,1.0,2.0] are not", None),
    (
        ["train.seed=99999999999999999999"],
        "is out of range; allowed: at least 0 and at most 2147483647",
        "train.seed=1234",
    ),
    (["train.steps=3000000000"], "train.steps=3000000000 is out of range", "train.steps=300"),
    (["model.moe.quantile_bins=1000000000"], "is out of range; allowed: at least 2 and at most 1000000", None),
    (["parallel.pipeline=2", 'parallel.pipeline_layout="Et*99999999999|tL"'], "*99999999999 repeats more than", None),
    (["run.name=''"], "run.name= is empty", "run.name=k3-tiny"),
    (["data.train=[]"], "data.train=[] names no corpus", None),
    (["data.valid=[]"], "data.valid=[] names no corpus", "train.eval_samples=0"),
    (["data.train.0.weight=0"], "data.train.0.weight=0 is out of range", "data.train.0.weight=1.0"),
]


def sentence(overrides: list[str]) -> str:
    """What a wrong recipe is answered with."""
    with pytest.raises(UserError) as caught:
        validate(load_recipe([TINY, *overrides]))
    return str(caught.value)


@pytest.mark.parametrize(("overrides", "wrong", "cure"), WRONG, ids=[" ".join(case[0]) for case in WRONG])
def test_wrong_recipe_is_one_sentence_with_the_cure(overrides: list[str], wrong: str, cure: str | None) -> None:
    said = sentence(overrides)
    assert wrong in said
    assert cure is None or cure in said
    assert "\n" not in said


CURED = [case for case in WRONG if case[2] is not None]


@pytest.mark.parametrize(("overrides", "wrong", "cure"), CURED, ids=[f"{' '.join(o)} -> {c}" for o, _, c in CURED])
def test_the_cure_cures(overrides: list[str], wrong: str, cure: str) -> None:
    """With the offered override the recipe works, or the next sentence is about another key."""
    cured = cure.partition("=")[0]
    kept = [override for override in overrides if override.partition("=")[0] != cured]
    if "no such key" in wrong:
        kept = kept[1:]
    complaint = ""
    try:
        validate(load_recipe([TINY, *kept, cure]))
    except UserError as error:
        complaint = str(error)
    assert wrong not in complaint
    assert not complaint.startswith(f"{cured}="), complaint


def test_no_recipe_chosen() -> None:
    with pytest.raises(UserError, match=r"recipe is not chosen; allowed: .*pretrain/k3, .*try recipe=pretrain/k3-tiny"):
        load_recipe(["optim.lr=1e-3"])


@pytest.mark.parametrize("name", ["k3-tiny", "tiny/k3-tiny", "pretrain/k3-tny"])
def test_recipe_that_does_not_exist(name: str) -> None:
    with pytest.raises(UserError, match=rf"recipe={name} does not exist; .*try recipe=pretrain/k3-tiny"):
        load_recipe([f"recipe={name}"])


def test_world_of_a_launcher_counts() -> None:
    config = load_recipe([TINY])
    validate(config, 8)
    with pytest.raises(UserError, match="the number of ranks=2 is not divisible"):
        validate(config, 2)


def test_cuda_where_there_is_none() -> None:
    config = load_recipe([TINY, "run.device=cuda"])
    with pytest.raises(UserError, match=r"run\.device=cuda, but .*try run\.device=cpu"):
        validate_machine(config, gpus=0)
    config = load_recipe([TINY, "model.kda.backend=fla"])
    with pytest.raises(UserError, match=r"model\.kda\.backend=fla needs .*try model\.kda\.backend=auto"):
        validate_machine(config, gpus=0)
    validate_machine(config, gpus=1)


def test_saved_recipe_with_a_wrong_key() -> None:
    with pytest.raises(UserError, match=r"model\.num_layer: there is no such key; .*try model\.num_layers=VALUE"):
        recipe_from_dict({"model": {"num_layer": 3}})
    with pytest.raises(UserError, match="has the wrong type"):
        recipe_from_dict({"model": {"num_layers": "many"}})


def test_user_recipe_with_a_wrong_key(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\noptim:\n  lrr: 1.0\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"optim\.lrr: there is no such key; .*try optim\.lr=VALUE"):
        load_recipe(["recipe=mine"], tmp_path)
    (tmp_path / "recipe" / "broken.yaml").write_text("# @package _global_\noptim: [\n", encoding="utf-8")
    with pytest.raises(UserError, match="the recipe cannot be composed"):
        load_recipe(["recipe=broken"], tmp_path)


def test_config_dir_that_does_not_exist() -> None:
    with pytest.raises(UserError, match="--config-dir=nowhere is not a directory"):
        load_recipe([TINY], "nowhere")


def test_checks_need_no_torch() -> None:
    """The refusal is quick because nothing heavy is imported for it."""
    import subprocess

    program = (
        "import sys; from k3train.cli import main;"
        f" code = main(['{TINY}', 'parallel.tensor=3']);"
        " sys.exit(code if 'torch' not in sys.modules else 99)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == (
        "k3train: parallel.tensor=3 does not divide model.kda.num_heads=4; allowed: 1, 2, 4; try parallel.tensor=2\n"
    )
