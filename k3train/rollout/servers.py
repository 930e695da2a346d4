"""What the kinds of completion servers do each in their own way: other weights, and saying which they have.

Only `k3train serve` was ever run with this. The rest follows vLLM's and SGLang's documentation and sources as of summer
2026 (docs/rl.md), and is tested against stand-ins that hold requests to those.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k3train.errors import UserError
from k3train.rollout.client import CompletionClient, ServerFailedError, ServerRefusedError, WrongWeightsError
from k3train.rollout.protocol import BUCKET_NUMBER, LAST_BUCKET, MOST_CHOICES, QUANT, WEIGHTS

_EXISTS = 405  # what GET of an endpoint that only takes POST is answered with; 404: there is none


@dataclass(frozen=True)
class ServerSettings:
    """What kind of server it is and what is asked of it.

    `refresh`: in_place, disk or none. `quant`: the policy that the trainer rounds experts by, None without.
    `outage_seconds`: how long it may stay away. `largest_bucket`: bytes.
    """

    kind: str = "k3train"
    refresh: str = "in_place"
    quant: dict[str, Any] | None = None
    outage_seconds: float = 0.0
    largest_bucket: int = 0


class Server:
    """One kind of server, behind a client that is connected.

    Args:
        client: of the server.
        quant: the policy that the trainer rounds routed experts by (`QuantConfig.policy`), None without.
        load_seconds: the longest that reading new weights from disk may take.
    """

    kind: str
    tells_weights = False  # whether it says with every token under which weights that was drawn
    choices_a_request = MOST_CHOICES  # samples that one request may ask for
    most_bucket_bytes: int | None = None  # None: takes no buckets

    def __init__(self, client: CompletionClient, quant: dict[str, Any] | None, load_seconds: float) -> None:
        self.client, self.quant, self.load_seconds = client, quant, load_seconds

    def check(self, refresh: str) -> None:
        """Refuse a server that cannot do what the run needs of it. `refresh`: in_place, disk or none.

        Raises:
            UserError: it is of another kind, or lacks what `refresh` uses.
            ServerFailedError, ServerRefusedError: it does not answer.
        """
        owner = self.client.listed.get("owned_by")
        if owner != self.kind and (owner in KINDS or self.kind == "k3train"):
            cure = f"rl.rollout.server={owner}" if owner in KINDS else "rl.rollout.server=vllm or sglang"
            raise UserError(
                f"rl.rollout.server={self.kind}, and the server at {self.client.address} is {owner or 'another'}'s;"
                f" try {cure}"
            )
        if refresh == "in_place" and self.most_bucket_bytes is None:
            raise UserError(
                f"rl.rollout.refresh=in_place: the server at {self.client.address} takes no buckets, which only"
                " k3train serve does; try rl.rollout.refresh=disk"
            )
        if refresh != "none":
            self._check_updates()

    def _check_updates(self) -> None:
        """Refuse a server that cannot change its weights."""

    def weights(self) -> str | None:
        """What the server calls the weights it has; None where it cannot say, or has a part of them.

        Raises:
            ServerFailedError: it does not answer.
            WrongWeightsError: it no longer says, so it is another than before.
        """
        raise NotImplementedError

    def _named(self, path: str) -> str | None:
        try:
            found = self.client.json("GET", path).get("weight_version")
        except ServerRefusedError as error:
            raise WrongWeightsError(str(error)) from error
        return None if found is None else str(found)

    def load(self, folder: Path, label: str) -> None:
        """Have the server read its weights from a folder that it sees, and call them `label`."""
        raise NotImplementedError

    def send_bucket(self, bucket: dict[str, torch.Tensor], number: int, label: str, is_last: bool) -> None:
        """Overwrite some rows of the weights (`refresh.buckets`), numbered from 0; with the last they are `label`."""
        raise NotImplementedError

    def _need(self, path: str, cure: str) -> None:
        status = self.client.status_of(path)
        if status is None:
            raise ServerFailedError(f"{self.client.address} does not answer")
        if status not in (200, _EXISTS):
            raise UserError(
                f"rl.rollout.refresh: the server at {self.client.address} has no {path} (it answers {status}), by which"
                f" {self.kind} changes its weights; {cure}, or set rl.rollout.server to what it is"
            )


class K3TrainServer(Server):
    """`k3train serve`: says with each token which weights drew it, and takes them in buckets too."""

    kind = "k3train"
    tells_weights = True

    @property
    def most_bucket_bytes(self) -> int | None:  # as the server says
        return self._said.get("most_bucket_bytes")

    @property
    def _said(self) -> dict[str, Any]:
        return self.client.listed.get("k3train") or {}

    def check(self, refresh: str) -> None:
        super().check(refresh)
        served = self._said.get("quant")
        if served != self.quant:
            raise UserError(
                f"quant: the trainer computes {said_policy(self.quant)}, and the server at {self.client.address}"
                f" {said_policy(served)}, so they are not the same policy; start k3train serve from a checkpoint that"
                " was trained as this run trains, or with --quant k3 or none, or change the run's quant section"
            )

    def _check_updates(self) -> None:
        if not self._said.get("updates"):
            raise UserError(
                f"rl.rollout.refresh: the server at {self.client.address} keeps its weights; start it with"
                " --allow-updates"
            )

    def weights(self) -> str | None:
        return self.client.json("GET", "/health").get("k3train_version")

    def load(self, folder: Path, label: str) -> None:
        body = {"model_path": str(folder), "weight_version": label, QUANT: self.quant}
        self.client.json("POST", "/update_weights_from_disk", body, timeout=self.load_seconds)

    def send_bucket(self, bucket: dict[str, torch.Tensor], number: int, label: str, is_last: bool) -> None:
        from safetensors.torch import save

        content = save({name: rows.cpu() for name, rows in bucket.items()})
        headers = {WEIGHTS: label, BUCKET_NUMBER: str(number), LAST_BUCKET: str(int(is_last))}
        headers["K3train-Quant"] = json.dumps(self.quant)
        self.client.json("POST", "/update_weights_from_bucket", content, headers)


class SGLangServer(Server):
    """SGLang: `POST /update_weights_from_disk` with a text as `weight_version`, which `GET /model_info` repeats."""

    kind = "sglang"
    choices_a_request = 1  # whether samples of one request with a seed differ is not documented; the prefix is shared

    def _check_updates(self) -> None:
        self._need("/update_weights_from_disk", "start a recent SGLang")

    def weights(self) -> str | None:
        return self._named("/model_info")

    def load(self, folder: Path, label: str) -> None:
        body = {"model_path": str(folder), "weight_version": label}
        answer = self.client.json("POST", "/update_weights_from_disk", body, timeout=self.load_seconds)
        if answer.get("success") is not True:
            raise ServerRefusedError(f"{self.client.address}/update_weights_from_disk: {answer.get('message')}")


class VLLMServer(Server):
    """vLLM in development mode: pause, `reload_weights` on every worker, a name for the weights, resume."""

    kind = "vllm"
    _PATHS = ("/collective_rpc", "/pause", "/resume", "/update_weight_version", "/weight_info")
    _has_names: bool | None = None  # whether it says which weights it has

    def _check_updates(self) -> None:
        for path in self._PATHS:
            self._need(path, "start a recent vLLM with VLLM_SERVER_DEV_MODE=1 in its environment")

    def weights(self) -> str | None:
        if self._has_names is None:  # not without development mode, which refresh=none does not need
            status = self.client.status_of("/weight_info")
            if status is None:
                raise ServerFailedError(f"{self.client.address} does not answer")
            self._has_names = status != 404
        return self._named("/weight_info") if self._has_names else None

    def load(self, folder: Path, label: str) -> None:
        self.client.json("POST", "/pause?mode=abort")  # forgets the prefix cache, which the old weights filled
        try:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self.client.json("POST", "/collective_rpc", body, timeout=self.load_seconds)
            self.client.json("POST", "/update_weight_version", {"new_version": label})
        except BaseException:
            with contextlib.suppress(ServerFailedError, ServerRefusedError):
                self.client.json("POST", "/resume")  # its weights have their old name, and are not sampled from
            raise
        self.client.json("POST", "/resume")


KINDS: dict[str, type[Server]] = {server.kind: server for server in (K3TrainServer, SGLangServer, VLLMServer)}


def said_policy(policy: dict[str, Any] | None) -> str:
    """A policy in a few words."""
    from k3train.config.quant import QuantConfig

    if policy is None:
        return "without quantization"
    try:
        return f"with {QuantConfig(enabled=True, **policy).describe()}"
    except TypeError:
        return f"with {policy}"
