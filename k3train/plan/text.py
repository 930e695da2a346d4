"""A plan as text, and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from k3train.config.parameters import parameter_count
from k3train.config.schema import RecipeConfig
from k3train.plan import balancing
from k3train.plan.links import Links
from k3train.plan.memory import GIB, MIB
from k3train.plan.plan import Plan
from k3train.plan.storage import VISION_PARAMETERS, export_bytes


def layout_name(config: RecipeConfig, world_size: int) -> str:
    """`TP1 CP1 PP16 VPP2 DP64 EP64 ETP1, recomputed`, without what is 1 (but always DP)."""
    p = config.parallel
    data = world_size // (p.tensor * p.context * p.pipeline)
    sizes = [("TP", p.tensor), ("CP", p.context), ("PP", p.pipeline), ("VPP", p.virtual_pipeline)]
    words = [f"{name}{size}" for name, size in sizes if size > 1] + [f"DP{data}"]
    words += [f"{name}{size}" for name, size in (("EP", p.expert), ("ETP", p.expert_tensor)) if size > 1]
    return " ".join(words) + (", recomputed" if p.recompute == "full" else "")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, numbers to the right; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def memory_table(plan: Plan) -> list[list[str]]:
    """Memory of every pipeline rank, part by part; ranks that are alike share a column."""
    size, unit = _unit(plan)
    of_ranks = [{**rank.bars(), "peak": rank.total} for rank in plan.memory]
    return _by_rank(f"{unit} on pipeline rank", of_ranks, lambda value: f"{value / size:,.2f}", last="peak")


def optimizer_table(plan: Plan) -> list[list[str]]:
    """What the optimizer needs beside the training state, when activations are gone."""
    size, unit = _unit(plan)
    of_ranks = [{**rank.step, "all of it": sum(rank.step.values()), "for passes": rank.passes} for rank in plan.memory]
    shown = _by_rank(f"{unit}, optimizer's step", of_ranks, lambda value: f"{value / size:,.2f}")
    if any(rank.muon_round for rank in plan.memory):
        rounds = {rank.muon_round for rank in plan.memory}
        shown[0][0] += f" (rounds of {max(rounds) / size:,.2f})"
    return shown


def parameter_table(plan: Plan) -> list[list[str]]:
    """How many parameters a device of every pipeline rank and its stage hold, by virtual chunk where there are more."""
    of_ranks = []
    for rank in plan.memory:
        held, counts = rank.held, {}
        for name, each in (("a device", held.parameters), ("its stage", held.stage_parameters)):
            counts[name] = sum(each)
            if len(each) > 1:
                counts |= {f"{name}, chunk {number}": count for number, count in enumerate(each)}
        of_ranks.append(counts)
    return _by_rank("parameters of pipeline rank", of_ranks, _count)


def _unit(plan: Plan) -> tuple[float, str]:
    return (GIB, "GiB") if plan.fullest.total >= GIB else (MIB, "MiB")


def _by_rank(
    head: str, of_ranks: list[dict[str, float]], shown: Callable[[float], str], last: str | None = None
) -> list[list[str]]:
    """A row a name, a column a pipeline rank; ranks that are alike share one."""
    names = [name for name in dict.fromkeys(name for rank in of_ranks for name in rank) if name != last]
    names += [last] if last else []
    columns: dict[tuple, list[int]] = {}
    for number, rank in enumerate(of_ranks):
        columns.setdefault(tuple(shown(rank.get(name, 0.0)) for name in names), []).append(number)
    body = [[name, *(cells[i] for cells in columns)] for i, name in enumerate(names)]
    return [[head, *(_ranges(ranks) for ranks in columns.values())], *body]


def _ranges(numbers: list[int]) -> str:
    """`0-3,5` for 0, 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def time_table(plan: Plan) -> list[list[str]]:
    """Seconds of a step: parts of the slowest rank's passes, waiting, and what follows."""
    step = plan.step
    rows = [["milliseconds", "forward", "backward", "a step"]]
    for name, seconds in sorted(step.parts.items(), key=lambda item: -item[1].forward - item[1].backward):
        whole = (seconds.forward + seconds.backward) * step.micro_batches
        rows.append([name, *(f"{1e3 * s:,.2f}" for s in (seconds.forward, seconds.backward, whole))])
    busy = sum(s.forward + s.backward for s in step.parts.values()) * step.micro_batches
    rows.append(["waiting for other stages", "", "", f"{1e3 * max(0.0, step.timeline.total - busy):,.2f}"])
    rows += [[name, "", "", f"{1e3 * seconds:,.2f}"] for name, seconds in step.after.items()]
    return [*rows, ["step", "", "", f"{1e3 * step.seconds:,.2f}"]]


def volume_table(plan: Plan) -> list[list[str]]:
    """What the busiest rank sends in a step."""
    most = max(max(volume.fast, volume.network) for volume in plan.step.volumes.values())
    size, unit = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    fast = f"inside {Links(plan.cluster, plan.config.parallel, plan.world_size).domain} devices"
    rows = [[f"{unit} sent by a rank in a step", fast, "over the network"]]
    for name, volume in plan.step.volumes.items():
        rows.append([name, f"{volume.fast / size:,.3f}", f"{volume.network / size:,.3f}"])
    return rows


def summary(plan: Plan) -> str:
    """The whole plan."""
    config, step, store, cluster = plan.config, plan.step, plan.storage, plan.cluster
    count, tokens = parameter_count(config.model), step.tokens_per_step * step.steps
    saved = f", written in {_duration(store.seconds)} at {cluster.storage_gbs:g} GB/s" if store.seconds else ""
    room = f"{plan.fullest.total / GIB:,.1f} of {plan.room / GIB:,.1f} GiB on pipeline rank {plan.fullest.rank}"
    lines = [
        f"{config.recipe_name} on {plan.world_size:,} x {cluster.device} ({cluster.name}): predicted, not measured",
        f"layout      {layout_name(config, plan.world_size)}; {step.micro_batches} micro-batches of "
        f"{config.train.micro_batch_size} x {config.train.seq_length:,} tokens a step",
        *_placement(plan),
        *_load(plan),
        f"model       {_count(count['total'])} parameters, {_count(count['active'])} active",
        f"memory      {room}: {'fits' if plan.fits else 'DOES NOT FIT'}",
        *(["passes      of measured stage times; all else is modelled"] if step.measured else []),
        f"step        {_duration(step.seconds)} for {step.tokens_per_step:,} tokens; pipeline ranks wait "
        f"{step.timeline.bubble:.1%} of the passes",
        f"throughput  {step.tokens_per_second:,.0f} tokens/s, "
        f"{step.tokens_per_second / plan.world_size:,.0f} a device; "
        f"{step.flops_per_device / 1e12:,.1f} TFLOP/s a device, MFU {step.mfu:.1%}",
        f"budget      {step.steps:,} steps = {_count(tokens)} tokens: {step.device_days(tokens):,.1f} device-days, "
        f"{_duration(tokens / step.tokens_per_second)} on these",
        f"checkpoint  {store.checkpoint / GIB:,.1f} GiB ({store.weights / GIB:,.1f} weights){saved}",
        f"export      {store.export_mxfp4 / GIB:,.1f} GiB with MXFP4 experts",
        f"not counted {'; '.join(plan.not_counted)}",
        *(f"assumed     {said}" for said in plan.teachers.assumed),
        "",
        table(memory_table(plan)),
        "",
        *([table(optimizer_table(plan)), ""] if any(rank.step for rank in plan.memory) else []),
        table(parameter_table(plan)),
        "",
        f"Passes of one micro-batch on pipeline rank {step.slowest}, the slowest, all its chunks:",
        table(time_table(plan)),
    ]
    if step.volumes:
        lines += ["", table(volume_table(plan))]
    return "\n".join(lines)


def _placement(plan: Plan) -> list[str]:
    """Where ranks leave devices idle so that groups lie within domains."""
    links = Links(plan.cluster, plan.config.parallel, plan.world_size)
    if not links.idle:
        return []
    domains, size = -(-plan.world_size // links.domain), plan.cluster.fast_domain
    return [
        f"placement   {links.domain} ranks in each of {domains:,} domains of {size} devices, {links.idle} of them idle"
    ]


def _load(plan: Plan) -> list[str]:
    """Where the load of experts is taken as uneven."""
    skew = balancing.skew(plan.config, plan.cluster)
    if skew == 1:
        return []
    return [f"load        the busiest expert-parallel rank has {skew:g} times the mean (cluster.max_over_mean)"]


def _count(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:,.4g}{unit}"
    return f"{number:,.0f}"


def _duration(seconds: float) -> str:
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * size or (unit == "s" and seconds >= 1):
            return f"{seconds / size:,.1f} {unit}"
    return f"{1e3 * seconds:,.2f} ms"


def plain(plan: Plan) -> dict[str, Any]:
    """The plan as plain values; bytes, seconds, counts."""
    step, p = plan.step, plan.config.parallel
    return {
        "recipe": plan.config.recipe_name,
        "cluster": plan.cluster.name,
        "device": plan.cluster.device,
        "devices": plan.world_size,
        "idle_devices_a_domain": Links(plan.cluster, p, plan.world_size).idle,
        "layout": {
            **{k: getattr(p, k) for k in ("tensor", "context", "pipeline", "virtual_pipeline", "expert")},
            "expert_tensor": p.expert_tensor,
            "data": step.data_parallel,
            "recompute": p.recompute,
        },
        "max_over_mean": balancing.skew(plan.config, plan.cluster),
        "parameters": parameter_count(plan.config.model),
        "not_counted": plan.not_counted,
        "assumed": list(plan.teachers.assumed),
        "fits": plan.fits,
        "room_bytes": plan.room,
        "memory": [
            {
                "rank": r.rank,
                "peak_bytes": r.total,
                "bytes": r.bars(),
                "passes_bytes": r.passes,
                "optimizer_step_bytes": r.step,
                "muon_round_bytes": r.muon_round,
                "in_flight": list(r.in_flight),
                "parameters": list(r.held.parameters),
                "stage_parameters": list(r.held.stage_parameters),
            }
            for r in plan.memory
        ],
        "step": {
            "seconds": step.seconds,
            "micro_batches": step.micro_batches,
            "bubble": step.timeline.bubble,
            "passes_seconds": step.timeline.total,
            "stages": [asdict(times) for times in step.stages],
            "stages_are": "measured" if step.measured else "modelled",
            "after_seconds": step.after,
            "hidden_seconds": step.hidden,
            "parts_seconds": {n: {"forward": s.forward, "backward": s.backward} for n, s in step.parts.items()},
            "sent_bytes": {n: {"fast": v.fast, "network": v.network} for n, v in step.volumes.items()},
        },
        "tokens_per_second": step.tokens_per_second,
        "flops_per_token": step.flops_per_token,
        "mfu": step.mfu,
        "device_days": step.device_days(step.tokens_per_step * step.steps),
        "checkpoint_bytes": plan.storage.checkpoint,
        "checkpoint_seconds": plan.storage.seconds,
        "export_bytes": plan.storage.export_mxfp4,
        "export_with_vision_bytes": export_bytes(plan.inventory, VISION_PARAMETERS),
    }
