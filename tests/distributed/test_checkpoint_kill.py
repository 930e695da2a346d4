"""SIGKILL at named places and at random moments around saves: the run always goes on from what was committed last, and
ends as if nothing had happened. `K3_TEST_LONG=1` tries each place in both ways of saving, and twice 20 random moments
around one of the next twelve saves each (with `-o faulthandler_timeout=0`: it takes long).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import lines, make_corpus
from stored import assert_same, newest

HERE = Path(__file__).resolve().parent
PLACES = ("planned", "accumulation", "written", "evaluation", "unmarked", "marked", "committed", "pruning")
LONG = bool(os.environ.get("K3_TEST_LONG"))
# Seed, random moments, places to die at, and the most saves before a random moment.
RUNS = [(7, 0, PLACES, 12), (8, 20, (), 12), (9, 20, (), 12)] if LONG else [(7, 4, PLACES, 1)]


@pytest.mark.parametrize(("seed", "moments", "places", "most_saves"), RUNS)
def test_kill_9_of_any_rank_at_any_moment(
    tmp_path: Path, seed: int, moments: int, places: tuple[str, ...], most_saves: int
) -> None:
    corpus = make_corpus(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(HERE / "kill_runner.py"),
        str(corpus),
        str(tmp_path),
        str(seed),
        str(moments),
        ",".join(places),
        str(most_saves),
    ]
    timeout = 5400 if LONG else 1500
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    clean, *attempts = json.loads((tmp_path / "report.json").read_text())
    assert clean["codes"] == {"0": 0, "1": 0}, clean
    *killed, last = attempts
    assert last["codes"] == {"0": 0, "1": 0}, (last, _logs(tmp_path, len(killed)))
    for number, report in enumerate(killed):
        assert not report["timed_out"], (report, _logs(tmp_path, number))
        kill = report["kill"]
        if "place" in kill:  # it died by our hand, there
            assert report["codes"][str(kill["rank"])] == -9, (report, _logs(tmp_path, number))
    for number, report in enumerate(attempts):
        assert report["began"] in (report["expected"], None), report
        assert report["damage"] == [], report
        if "place" not in (report["kill"] or {}):
            continue
        assert report["began"] == report["expected"], (report, _logs(tmp_path, number))
    assert any(name.endswith(".partial") for report in killed for name in report["left"])
    assert not any("." in name for name in last["left"]), last["left"]  # all of it was cleaned up
    assert last["began"] > moments // 4  # kills did not hit one spot
    if most_saves > 1 and moments:
        begun = {report["began"] for report in killed if report["began"] is not None}
        assert len(begun) > moments // 2  # nor a few: they are spread over the run
        assert max(begun) > lines(tmp_path / "clean", "train")[-1]["step"] // 2
    ways = {(report["kill"]["place"], report["kill"]["beside"]) for report in killed if "place" in report["kill"]}
    assert len(ways) == len(places) * (2 if most_saves > 1 else 1)
    for kind in ("train", "eval"):
        assert lines(tmp_path / "killed", kind) == lines(tmp_path / "clean", kind)
    assert_same(newest(tmp_path / "killed"), newest(tmp_path / "clean"))


def _logs(folder: Path, number: int) -> str:
    return "\n".join(path.read_text()[-1500:] for path in sorted((folder / f"attempt-{number}").glob("*.log")))
