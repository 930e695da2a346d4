"""Weights & Biases: the same numbers as metrics.jsonl, and never a reason for training to stop."""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from k3train.config.schema import WandbConfig
from k3train.errors import UserError
from k3train.telemetry.console import worst_layer
from k3train.telemetry.load_map import wandb_load
from k3train.telemetry.wandb_file import last_step

RUN_ID_FILE = "wandb_run_id"
MODES = ("auto", "online", "offline", "disabled")
INIT_TIMEOUT_SECONDS = 30.0
FINISH_TIMEOUT_SECONDS = 120.0
_WITHOUT = "training goes on without it"
_DEFAULT_URL = "https://api.wandb.ai"

# Where each metric of a step or an evaluation stands in W&B: the part before the slash is the panel's
# section.
_STEP_NAMES = {
    "loss": "loss/train",
    "mtp_loss": "loss/mtp",
    "grad_norm": "optim/grad_norm",
    "lr": "optim/lr",
    "tokens": "throughput/tokens",
    "tokens_per_second": "throughput/tokens_per_second",
    "step_time": "throughput/step_time",
    "model_flops": "throughput/model_flops",
    "tflops_per_second": "throughput/tflops_per_second",
    "mfu": "throughput/mfu",
    "memory_bytes": "memory/peak_bytes",
    "pipeline_bytes": "throughput/pipeline_bytes",
    "trainer_tokens_per_second": "throughput/trainer_tokens_per_second",
    "reward": "rl/reward",
    "response_length": "rl/response_length",
    "response_length_max": "rl/response_length_max",
    "sampled_entropy": "rl/sampled_entropy",
    "policy_ratio": "rl/policy_ratio",
    "policy_masked": "rl/policy_masked",
    "policy_kl": "rl/policy_kl",
    "rollout_kl": "rl/rollout_kl",
    "rollout_logprob_difference": "rl/rollout_logprob_difference",
    "fresh_share": "rl/fresh_share",
    "staleness": "rl/staleness",
    "staleness_max": "rl/staleness_max",
    "teacher_kl": "distill/teacher_kl",
    "teacher_clipped": "distill/teacher_clipped",
    "teacher_seconds": "distill/teacher_seconds",
    "teacher_tokens": "distill/teacher_tokens",
    "teacher_loads": "distill/teacher_loads",
    "teacher_dropped": "distill/teacher_dropped",
    "teacher_failures": "distill/teacher_failures",
    "cross_entropy": "distill/cross_entropy",
    "acceptance_length": "draft/acceptance_length",
    **{f"acceptance_{step}": f"draft/acceptance_{step}" for step in range(1, 33)},
}
_EVAL_NAMES = {
    "loss": "loss/heldout",
    "perplexity": "loss/heldout_perplexity",
    "bits_per_byte": "loss/heldout_bits_per_byte",
    "eval_time": "throughput/eval_time",
    "accuracy": "rl/heldout_accuracy",
    "teacher_kl": "distill/heldout_teacher_kl",
    "cross_entropy": "distill/heldout_cross_entropy",
}


@dataclass
class WandbSettings(WandbConfig):
    """How to record to W&B: the recipe's `telemetry.wandb`, and the run's name."""

    name: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(
                f"telemetry.wandb.mode={self.mode} is not known: choose one of {', '.join(MODES)}, "
                "for example telemetry.wandb.mode=offline"
            )


def has_key() -> bool:
    """Whether W&B's key is in WANDB_API_KEY or the netrc file; a netrc that cannot be read holds no key."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    host = urlparse(os.environ.get("WANDB_BASE_URL") or _DEFAULT_URL).hostname
    try:
        return host is not None and netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def resolve_mode(mode: str) -> str:
    """online, offline or disabled. `auto` follows WANDB_MODE where it is set, else whether there is a key."""
    if mode != "auto":
        return mode
    from_environment = os.environ.get("WANDB_MODE")
    if from_environment in ("online", "offline", "disabled"):
        return from_environment
    return "online" if has_key() else "offline"


def persistent_run_id(run_dir: Path, given: str | None) -> str:
    """The run's W&B id: the given one, else the one kept in the run directory, else a new one.

    Whatever is chosen is written to `run_dir/wandb_run_id`, before W&B hears of it: a process that is killed before its
    first step has begun the run. Who gives the directory to another recipe calls `forget_run`.
    """
    path = run_dir / RUN_ID_FILE
    run_id = given
    if run_id is None and path.exists():
        run_id = path.read_text(encoding="utf-8").strip() or None
    if run_id is None:
        run_id = secrets.token_hex(4)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(run_id + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return run_id


def forget_run(run_dir: Path) -> None:
    """Have the next process in this directory begin a W&B run of its own."""
    (run_dir / RUN_ID_FILE).unlink(missing_ok=True)


_PER_LAYER = ("balance", "qk_clip")  # {name: {layer: value}}


def panel_metrics(metrics: dict[str, Any], kind: str) -> dict[str, Any]:
    """Step ("train") or evaluation ("eval") metrics under W&B's names, flat; values None are left out."""
    names = _STEP_NAMES if kind == "train" else _EVAL_NAMES
    flat: dict[str, Any] = {}
    for key, value in metrics.items():
        if value is None or key in ("step", "paths", *_PER_LAYER, "tokens_per_expert", "timings"):
            continue
        if isinstance(value, dict):
            flat.update({f"{key}/{name}": item for name, item in value.items()})
        else:
            flat[names.get(key, f"{'other' if kind == 'train' else 'heldout'}/{key}")] = value
    for phase, seconds in (metrics.get("timings") or {}).items():
        flat[f"throughput/seconds_{phase}"] = seconds
    layered = [(key, name, per_layer) for key in _PER_LAYER for name, per_layer in (metrics.get(key) or {}).items()]
    for key, name, per_layer in layered:
        if not per_layer:
            continue
        flat[f"{key}/{name}_worst"] = worst_layer(per_layer)[1]
        flat[f"{key}/{name}_mean"] = sum(per_layer.values()) / len(per_layer)
        flat.update({f"{key}_{name}/layer_{int(layer):03d}": item for layer, item in per_layer.items()})
    return flat


def _stop_service() -> None:
    import wandb

    wandb.teardown()


class WandbSink:
    """One W&B run. Calls into W&B are guarded: the first failure is told to `on_event` and ends the sink."""

    def __init__(
        self,
        run_dir: Path,
        config: dict[str, Any],
        settings: WandbSettings,
        *,
        run_id: str,
        code_version: str,
        last_sent_step: int,
        on_event: Callable[[str, str], None],
    ) -> None:
        """`last_sent_step` is the last one that earlier processes sent, as far as the run directory knows; -1: none.

        What W&B itself says it holds counts more, where it says anything: see `held`.
        """
        self._run_dir = run_dir
        self._config = {**config, "code_version": code_version}
        self._settings = settings
        self._run_id = run_id
        self._on_event = on_event
        self._last_sent_step = last_sent_step
        self._paths: dict[str, Any] = {}
        self._run: Any = None
        self.mode = resolve_mode(settings.mode)
        if self.mode == "online":
            instead = f"the run is recorded under {run_dir / 'wandb'}: upload it later with `wandb sync`"
            self._run = self._guard("start online", self._go_online, instead)
            if self._run is None:
                self.mode = "offline"
                # W&B's service keeps the id of the run that failed to start; only a new service forgets it.
                self._guard("stop", _stop_service)
        if self.mode == "offline":
            self._run = self._guard("start", lambda: self._init("offline"))

    @property
    def active(self) -> bool:
        """Whether metrics still reach W&B."""
        return self._run is not None

    @property
    def held(self) -> int:
        """The last step that W&B holds of this run, -1 without any; it is sent none up to there."""
        return self._last_sent_step

    def send_missing(self, records: Iterable[dict[str, Any]], last: int) -> list[int]:
        """Send those steps and evaluations of metrics.jsonl up to `last` that W&B does not hold; the steps sent."""
        sent: list[int] = []
        for record in records:
            kind, step = record.get("kind"), record["step"]
            if kind in ("train", "eval") and self._last_sent_step < step <= last:
                self.log(step, {key: value for key, value in record.items() if key not in ("kind", "time")}, kind)
                sent.append(step)
        self._last_sent_step = max(self._last_sent_step, last)
        return sent

    def log(self, step: int, metrics: dict[str, Any], kind: str, late: bool = False) -> None:
        """Send metrics of a step. W&B's steps only grow: a step the run already holds is not sent again.

        `late` metrics are of a step whose others the run has: they go into the row of the next one.
        """
        row = self._last_sent_step + 1 if late else step
        if self._run is None or row <= self._last_sent_step:
            return
        paths = metrics.get("paths") or {}
        if paths != self._paths:
            self._paths = dict(paths)
            self._guard(
                "record the paths taken", lambda: self._run.config.update({"paths": paths}, allow_val_change=True)
            )
        loads = metrics.get("tokens_per_expert")
        pictures = self._guard("draw the experts' load", lambda: wandb_load(loads)) if loads else None
        self._log(row, {"step": step, **panel_metrics(metrics, kind), **(pictures or {})})

    def table(self, step: int, name: str, rows: list[dict[str, Any]]) -> None:
        """Send rows as a table."""
        if self._run is None or step <= self._last_sent_step:
            return

        def make() -> Any:
            import wandb

            columns = list(rows[0])
            return wandb.Table(columns=columns, data=[[str(row[name]) for name in columns] for row in rows])

        made = self._guard("make a table", make)
        if made is not None:
            self._log(step, {f"tables/{name}": made})

    def event(self, step: int, text: str, level: str) -> None:
        """Send an event's text at the step where it happened."""
        if step > self._last_sent_step:
            self._log(step, {f"events/{level}": text})

    def checkpoint(self, path: Path, step: int) -> None:
        """Record a committed checkpoint as an artifact that refers to its directory, where that is asked for."""
        if self._run is None or not self._settings.log_checkpoints:
            return

        def send() -> None:
            import wandb

            artifact = wandb.Artifact(f"checkpoint-{self._run_id}", type="model", metadata={"step": step})
            # Without a checksum W&B neither reads nor copies the files.
            artifact.add_reference(path.resolve().as_uri(), name=path.name, checksum=False)
            self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

        self._guard("record a checkpoint", send)

    def alert(self, text: str) -> None:
        """Notify whoever watches the run in W&B (mail, Slack: as they have set it there)."""
        if self._run is not None:
            self._guard("send an alert", lambda: self._run.alert(title="k3train", text=text, level="WARN"))

    def finish(self, status: str, pictures: list[Path], step: int) -> None:
        """Send the pictures, close the run. `status` other than "finished" marks it failed."""
        if self._run is None:
            return

        def close() -> None:
            import wandb

            images = {f"pictures/{path.stem}": wandb.Image(str(path)) for path in pictures}
            if images and step > self._last_sent_step:
                self._run.log(images, step=step)
            self._run.summary["status"] = status
            self._run.finish(exit_code=0 if status == "finished" else 1)

        self._guard("finish", close)
        self._run = None

    def _log(self, step: int, flat: dict[str, Any]) -> None:
        if self._run is not None and flat:
            self._guard("log", lambda: self._run.log({"step": step, **flat}, step=step))

    def _go_online(self) -> Any:
        """The run that earlier processes began has to be there; where it is not, that is said and it begins here."""
        if self._last_sent_step < 0:
            return self._init("online", "allow")  # which finds a run that came to no step
        import wandb

        try:
            return self._init("online", "must")
        except wandb.errors.UsageError:
            self._on_event(
                f"W&B has no run {self._run_id} in project {self._settings.project} to resume: it begins there with "
                f"this step. If its first part was recorded offline, `wandb sync` {self._run_dir / 'wandb'}; "
                "otherwise telemetry.wandb.project, .entity or the login differ, or the run was deleted",
                "warning",
            )
            _stop_service()
            return self._init("online", "allow", is_new=True)

    def _init(self, mode: str, resume: str | None = None, is_new: bool = False) -> Any:
        folder = (self._run_dir / "wandb").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no crash reports over the network
        os.environ.setdefault("WANDB_SILENT", "true")  # logging in speaks before the settings below count
        # W&B's service logs go here rather than to the home directory, which a job may not be able to write.
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "cache"))
        import wandb

        resumed = self._last_sent_step >= 0
        if mode == "offline" and (written := last_step(folder, self._run_id)) is not None:
            # A killed process may have told its service more than the disk got.
            self._last_sent_step, resumed = written, True
        run = wandb.init(
            dir=str(self._run_dir),
            mode=mode,
            project=self._settings.project,
            entity=self._settings.entity,
            group=self._settings.group,
            tags=list(self._settings.tags) or None,
            name=self._settings.name,
            id=self._run_id,
            resume=resume,
            config=self._config,
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,  # code_version is in the config
                disable_code=True,
                save_code=False,
                symlink=False,
                init_timeout=INIT_TIMEOUT_SECONDS,
                login_timeout=INIT_TIMEOUT_SECONDS,
                finish_timeout=FINISH_TIMEOUT_SECONDS,
                # Part of the machine information is asked of a cloud's metadata service over the network.
                x_disable_machine_info=mode == "offline",
            ),
        )
        if mode == "online" and not is_new:
            self._last_sent_step = run.starting_step - 1
        if resumed or run.starting_step > 0:  # the recipe may have changed where it may: layout, guards, telemetry
            run.config.update(self._config, allow_val_change=True)
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run

    def _guard(self, what: str, call: Callable[[], Any], instead: str = _WITHOUT) -> Any:
        """The result of a call into W&B; if it fails, None after an event that tells what happens instead."""
        try:
            return call()
        # W&B fails in many ways (network, service process, a broken install, a full disk) with no common base
        # class, and none of them may end a training run.
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            self._run = None
            self._on_event(f"W&B failed to {what} ({type(error).__name__}: {reason}); {instead}", "warning")
            return None
