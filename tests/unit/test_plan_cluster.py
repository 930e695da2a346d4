"""Cluster files: every shipped one loads, and what is wrong in one names the key and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3train.config.rules_cluster import available_clusters, load_cluster
from k3train.errors import UserError

GOOD = """
name: mine
device: some GPU
memory_gib: 80
memory_gbs: 3000
peak_tflops: {bf16: 900}
fast_gbs: 400
network_gbs: 50
"""


def test_shipped_clusters_load() -> None:
    assert len(available_clusters()) >= 4
    for name in available_clusters():
        cluster = load_cluster(name, {})
        assert cluster.name == name
        assert cluster.memory_gib > cluster.reserved_gib


def test_a_file_of_the_users_own_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    cluster = load_cluster(str(path), {"memory_gib": "40", "efficiency.matmul": "0.5", "devices": "16"})
    assert (cluster.memory_gib, cluster.efficiency.matmul, cluster.devices, cluster.peak_tflops.bf16) == (
        40,
        0.5,
        16,
        900,
    )


@pytest.mark.parametrize(
    ("change", "overrides", "said"),
    [
        ("", {"memory_gb": "80"}, r"cluster\.memory_gb in the command line is no key; .*try cluster\.memory_gib"),
        ("memory_gib: lots", {}, r"cluster\.memory_gib=lots in .*mine\.yaml has the wrong type; allowed: a number"),
        ("memory_gbs: -1", {}, r"cluster\.memory_gbs=-1\.0 is out of range; allowed: more than 0; try"),
        ("", {"efficiency.matmul": "1.5"}, r"cluster\.efficiency\.matmul=1\.5 is out of range; .* at most 1"),
        ("", {"reserved_gib": "99"}, r"cluster\.reserved_gib=99.* leaves nothing of cluster\.memory_gib=80"),
        ("kind: tpu", {}, r"cluster\.kind=tpu does not exist; allowed: cuda, cpu"),
        ("devices: 1.5", {}, r"cluster\.devices=1\.5 in .* wrong type; allowed: a whole number or null"),
        ("peak_tflops: 900", {}, r"cluster\.peak_tflops=900 in .* has the wrong type: .* fp32, bf16, fp8 under it"),
        ("efficiency: null", {}, r"cluster\.efficiency=null in .* matmul, grouped, .* each a number; try"),
        ("peak_tflops: [900]", {}, r"cluster\.peak_tflops=\[900\] in .* it is a section"),
        (
            "",
            {"efficiency": "0.5"},
            r"cluster\.efficiency=0\.5 in the command line .*try cluster.efficiency.matmul=",
        ),
        ("fast_domain: null", {}, r"cluster\.fast_domain=null in .* wrong type; allowed: a whole number"),
        ("- a\n- b", {}, r"cannot be read as YAML|holds no mapping"),
    ],
)
def test_a_wrong_cluster_names_key_and_cure(tmp_path: Path, change: str, overrides: dict[str, str], said: str) -> None:
    path = tmp_path / "mine.yaml"
    key = change.partition(":")[0]
    kept = [line for line in GOOD.splitlines() if not line.startswith(f"{key}:") or not change]
    path.write_text("\n".join([*kept, change]) + "\n")
    with pytest.raises(UserError, match=said):
        load_cluster(str(path), overrides)


def test_a_missing_value_and_an_unknown_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace("device: some GPU\n", ""))
    with pytest.raises(UserError, match=r"cluster\.device has no value in .*; add a line `device: \.\.\.`"):
        load_cluster(str(path), {})
    with pytest.raises(UserError, match=r"cluster=h100 is neither a shipped cluster nor a file; .*try cluster=h100-8x"):
        load_cluster("h100", {})
