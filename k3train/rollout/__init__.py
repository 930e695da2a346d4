"""Reading and writing text with a model: generation and scoring from a checkpoint."""

from k3train import platform  # noqa: F401  (silences the libraries before they are imported)
