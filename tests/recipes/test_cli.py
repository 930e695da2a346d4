"""The command line: exit codes, help, verbs, launchers' environments, sweeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3train import cli, machine, sweep
from k3train.config.schema import RecipeConfig
from k3train.environment import Place, address_of, expand_counts, first_host, meeting_port, place
from k3train.errors import StorageError, UserError

TINY = "recipe=pretrain/k3-tiny"


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


def started(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """`python -m k3train` in a process of its own."""
    import os

    command = [sys.executable, "-m", "k3train", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_help_lists_verbs_and_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    told = capsys.readouterr().out
    verbs = ("generate", "score", "serve", "import", "export", "inspect", "report")
    for word in (*verbs, "pretrain/k3-tiny", "pretrain/k3-48b", "--multirun", "torchrun"):
        assert word in told
    assert cli.main([]) == 2


def test_help_and_cfg_need_no_torch() -> None:
    program = (
        "import sys; from k3train.cli import main; main(['--help']); main([sys.argv[1], '--cfg', 'job']);"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, TINY], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["genrate"],
            f"genrate is neither a verb nor key=value; allowed verbs: {', '.join(cli.VERBS)}; try `k3train gene",
        ),
        (["k3-mini"], "try `k3train recipe=pretrain/k3-mini`"),
        (["pretrain/k3"], "try `k3train recipe=pretrain/k3`"),
        (["generate"], "the following arguments are required: --checkpoint; `k3train generate --help`"),
        ([TINY, "--frobnicate"], "unrecognized arguments: --frobnicate"),
        ([TINY, "--cfg", "all"], "invalid choice"),
        ([TINY, "oops"], "oops is neither a verb nor key=value"),
        ([TINY, "optim.lr=0"], "optim.lr=0.0 is out of range"),
        ([TINY, "run.device=cuda", "parallel.expert=3"], "parallel.expert=3 does not divide"),
        (
            [
                TINY,
                "parallel=single",
                "parallel.world_size=100",
                "train.global_batch_size=400",
                "train.eval_samples=400",
            ],
            "parallel.world_size=100 is more than the 64 CPU ranks of one machine",
        ),
    ],
)
def test_bad_input_exits_with_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


@pytest.mark.parametrize("override", ["model.num_layer=3", "train.global_batch_size=17"])
def test_exit_code_of_the_process(override: str) -> None:
    ended = started(TINY, override)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"k3train: {override}")
    assert ended.stderr.count("\n") == 1


def test_ctrl_c_while_the_command_is_being_read(tmp_path: Path) -> None:
    """Before any handler stands: 130 and no traceback."""
    (tmp_path / "hydra.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "-m", "k3train", "--help"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (130, "")


def test_only_the_first_rank_of_a_launcher_speaks() -> None:
    for rank, told in (("0", "k3train: the number of ranks=2 is not divisible by"), ("1", "")):
        ended = started(TINY, RANK=rank, WORLD_SIZE="2")
        assert ended.returncode == 2
        assert ended.stderr.startswith(told)
        assert bool(ended.stderr) == bool(told)


@pytest.fixture
def _inputs_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's corpus counts as prepared."""
    monkeypatch.setattr(machine, "check_inputs", lambda config: None)


@pytest.mark.usefixtures("_inputs_are_there")
def test_ranks_are_started_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(cli, "launch", lambda *given: calls.append(given) or 0)
    assert cli.main([TINY, "run.dir=somewhere", "run.threads_per_rank=3"]) == 0
    assert calls == [([TINY, "run.dir=somewhere", "run.threads_per_rank=3"], 4, Path("somewhere/logs"), 3)]


def test_files_that_are_missing_are_told_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "launch", lambda *given: pytest.fail("ranks were started"))
    assert cli.main([TINY]) == 2
    assert capsys.readouterr().err.startswith("k3train: No tokenizer at data/demo/tokenizer.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_inputs_are_there")
def test_one_rank_runs_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import k3train.stages

    ran: list[RecipeConfig] = []
    monkeypatch.setattr(k3train.stages, "run_stage", lambda config: ran.append(config) or 5)
    assert cli.main([TINY, "parallel=single", "train.steps=9"]) == 5
    assert ran[0].train.steps == 9


def test_a_rank_with_bad_data_says_so_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import k3train.stages

    def refuse(config: RecipeConfig) -> int:
        raise UserError("the corpus is not here")

    monkeypatch.setattr(k3train.stages, "run_stage", refuse)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main([TINY]) == 2
    assert capsys.readouterr().err == "k3train: rank 1: the corpus is not here\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_disk_that_fails_has_an_exit_code_of_its_own(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm's jobs are requeued after it, and not after 2."""
    import k3train.stages

    def full(config: RecipeConfig) -> int:
        raise StorageError("the disk is full")

    monkeypatch.setattr(k3train.stages, "run_stage", full)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main([TINY]) == 74
    assert capsys.readouterr().err.endswith("the disk is full\n")


@pytest.mark.usefixtures("_inputs_are_there")
def test_multirun_gives_each_run_a_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(sweep, "launch", lambda *given: calls.append(given) or (3 if len(calls) == 2 else 0))
    varied = ["optim.lr=1e-3,2e-3", "recipe=pretrain/k3-tiny", "parallel=single,tiny-pp2-ep2", "run.name=a"]
    assert cli.main([*varied, "--multirun"]) == 3
    names = [
        f"optim.lr={lr},parallel={parallel}" for lr in ("0.001", "0.002") for parallel in ("single", "tiny-pp2-ep2")
    ]
    assert [str(call[2]) for call in calls] == [f"runs/a-sweep/{name}/logs" for name in names]
    assert [call[1] for call in calls] == [1, 4, 1, 4]
    assert calls[1][0] == [
        "optim.lr=0.001",
        "recipe=pretrain/k3-tiny",
        "parallel=tiny-pp2-ep2",
        "run.name=a",
        f"run.dir='runs/a-sweep/{names[1]}'",
    ]
    assert capsys.readouterr().out.count("sweep run") == 4
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "runs/a-sweep/multirun.yaml"
    ]


@pytest.mark.usefixtures("_inputs_are_there")
def test_multirun_refuses_before_the_first_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []
    monkeypatch.setattr(sweep, "launch", lambda *given: calls.append(given) or 0)
    assert cli.main([TINY, "-m", "parallel.tensor=1,3"]) == 2
    assert cli.main([TINY, "-m", "optim.lrr=1,3"]) == 2
    assert "does not divide model.kda.num_heads=4" in capsys.readouterr().err
    assert calls == []


@pytest.mark.usefixtures("_inputs_are_there")
def test_ctrl_c_ends_a_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(sweep, "launch", lambda *given: calls.append(given) or 130)
    with pytest.raises(SystemExit) as ended:
        cli.main([TINY, "-m", "optim.lr=1e-3,2e-3"])
    assert ended.value.code == 130
    assert len(calls) == 1


def test_long_run_names_stay_distinct() -> None:
    long = [sweep.run_name([f"model.name={'x' * 300}{end}"]) for end in "ab"]
    assert long[0] != long[1]
    assert all(len(name) <= sweep.LONGEST_NAME for name in long)
    assert sweep.run_name(["recipe=pretrain/k3", "data.tokenizer='a b'"]) == "recipe=pretrain-k3,data.tokenizer=-a-b-"


SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "1234",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


def test_srun_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    environment = dict(SRUN)
    assert place(environment) == Place(rank=5, world_size=6)
    adopted = {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    assert adopted == {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert environment["MASTER_ADDR"] == "gpu003"
    other = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    place(other)
    assert other["MASTER_PORT"] == environment["MASTER_PORT"]
    assert other["LOCAL_WORLD_SIZE"] == "4"


def test_no_launcher() -> None:
    assert place({}) is None
    assert place({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert place({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None  # an interactive `srun --pty` in a larger allocation
    assert place({"RANK": "1", "WORLD_SIZE": "2"}) == Place(1, 2)


def test_sbatch_without_srun_would_wait_forever() -> None:
    with pytest.raises(UserError, match=r"SLURM_NTASKS=8, but k3train runs outside srun.*try `srun k3train"):
        place({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "3"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-006,9],login1", "gpu003"),
        ("a,b", "a"),
        ("n12", "n12"),
        ("x[1,4]y[2-3]", "x1y2"),
        ("r[07]-ib", "r07-ib"),
        ("rack-1-node[2-3].cluster.example,a", "rack-1-node2.cluster.example"),
        ("login,gpu[1-2]", "login"),
        ("fd00::12", "fd00::12"),
        ("fd00::12,fd00::13", "fd00::12"),
    ],
)
def test_first_host_without_scontrol(nodes: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert first_host(nodes) == first


def scontrol_says(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for scontrol that always prints `text`."""
    (folder / "scontrol").write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n", encoding="utf-8")
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_scontrol_is_asked_for_the_first_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol_says(tmp_path, "odd-7\nodd-9", monkeypatch)
    assert first_host("odd-[7,9]") == "odd-7"


def test_a_node_whose_name_does_not_resolve_is_reached_by_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol_says(tmp_path, "NodeName=gpu7 Arch=x86_64 NodeAddr=fd00::7 NodeHostName=gpu7 Port=0", monkeypatch)
    assert address_of("gpu7.invalid") == "fd00::7"
    assert address_of("localhost") == "localhost"
    assert address_of("::1") == "::1"
    monkeypatch.setenv("PATH", "")
    assert address_of("gpu7.invalid") == "gpu7.invalid"


def test_ranks_meet_elsewhere_in_each_step_and_start() -> None:
    ports = {
        meeting_port({"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": step, "SLURM_RESTART_COUNT": restart})
        for step in "012"
        for restart in "012"
    }
    assert len(ports) == 9
    assert all(20000 <= port < 30000 for port in ports)


def test_a_chosen_meeting_place_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    environment = {**SRUN, "MASTER_ADDR": "fd00::1", "MASTER_PORT": "29501"}
    place(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("fd00::1", "29501")


def test_tasks_per_node() -> None:
    assert expand_counts("4(x2),1") == [4, 4, 1]
    assert expand_counts("8") == [8]
