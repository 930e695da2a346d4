"""Draw what Per-Head Muon is for: heads whose gradients differ by 100 times, orthogonalized together and each alone.

    python tools/plot_per_head_muon.py --picture docs/images/per-head-muon.png

Eight heads of 32 x 128, the gradient of head h scaled by 100^(h / 7). Shown for each head of the update: the RMS, and
the singular values from smallest to largest, both over 0.2 * sqrt(128), the update scale.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from k3kernels.newton_schulz import orthogonalize

HEADS, ROWS, COLUMNS = 8, 32, 128
RATIO = 100.0


def updates() -> dict[str, torch.Tensor]:
    """Orthogonalized gradients [heads, rows, columns] by name."""
    gradient = torch.randn(HEADS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    gradient = gradient * RATIO ** (torch.arange(HEADS) / (HEADS - 1))[:, None, None]
    together = orthogonalize(gradient.flatten(0, 1)[None])[0].view_as(gradient)
    return {"whole matrix": together, "per head": orthogonalize(gradient)}


def draw(found: dict[str, torch.Tensor], picture: Path) -> None:
    """Two panels: RMS by head, singular values by head."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), dpi=120)
    scales = RATIO ** (torch.arange(HEADS) / (HEADS - 1))
    for name, update in found.items():
        rms = update.square().mean(dim=(1, 2)).sqrt()
        values = torch.linalg.svdvals(update)
        (line,) = left.plot(scales, rms / rms.max(), marker="o", label=name)
        colour = line.get_color()
        right.plot(scales, values.median(dim=1).values, marker="o", color=colour, label=name)
        right.fill_between(scales, values.amin(dim=1), values.amax(dim=1), color=colour, alpha=0.2, linewidth=0)
    for axes, title in ((left, "RMS of the head's update / largest"), (right, "singular values: range and median")):
        axes.set_xscale("log")
        axes.set_xlabel("gradient of the head / smallest")
        axes.set_title(title, fontsize=11)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


def main() -> None:
    """Print the numbers and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("docs/images/per-head-muon.png"))
    found = updates()
    for name, update in found.items():
        rms = update.square().mean(dim=(1, 2)).sqrt()
        values = torch.linalg.svdvals(update)
        ratio, heads = float(rms.max() / rms.min()), ", ".join(f"{x:.4f}" for x in rms.tolist())
        print(f"{name}: RMS of heads {heads}, largest / smallest {ratio:.2f}")
        print(f"  singular values {float(values.min()):.3f} to {float(values.max()):.3f}")
    draw(found, parser.parse_args().picture)


if __name__ == "__main__":
    main()
