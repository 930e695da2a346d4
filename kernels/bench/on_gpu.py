"""Everything that is to be known of the kernels on a GPU, in one go: that they are right, then how fast they are.

    python kernels/bench/on_gpu.py            # print
    python kernels/bench/on_gpu.py --write    # and put the tables into kernels/README.md

Stops with the first part that fails.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch

BENCH = Path(__file__).resolve().parent
TESTS = BENCH.parents[1] / "tests" / "kernels"
ON_A_GPU = ("test_triton.py", "test_mx_triton.py", "test_quantile_balancing_triton.py")


def parts(write: bool) -> list[list[str]]:
    """Command lines, without the interpreter."""
    note = ["--write"] if write else []
    return [
        ["-m", "pytest", "-q", *(str(TESTS / name) for name in ON_A_GPU), "-k", "on_a_gpu"],
        ["-m", "pytest", "-q", str(TESTS / "test_compiled.py")],
        ["-m", "pytest", "-q", str(TESTS / "test_kda_fla.py")],
        [str(BENCH / "compile_table.py"), *note],
        [str(BENCH / "bench_kernels.py"), "--device", "cuda", *note],
        [str(BENCH / "bench_attention_residual.py"), "--device", "cuda", "--tokens", "8192", "--hidden", "7168"],
        [str(BENCH / "bench_quantile_balancing.py"), "--device", "cuda"],
        [str(BENCH / "bench_kda.py"), "--device", "cuda"],
        [str(BENCH / "bench_muon.py"), "--device", "cuda", "--shape", "k3-layer", "--rounds", "3"],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into kernels/README.md")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine shows no CUDA device; the other scripts of this folder run on a CPU as well")
    print(torch.cuda.get_device_name(), flush=True)
    for part in parts(args.write):
        print(f"\n$ python {' '.join(part)}", flush=True)
        done = subprocess.run([sys.executable, *part], cwd=BENCH.parents[1], check=False)
        if done.returncode:
            print(f"on_gpu.py: stopped, this part failed with {done.returncode}", file=sys.stderr)
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
