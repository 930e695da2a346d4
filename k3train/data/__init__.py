"""Tokenizers, corpora and the data sets that training reads."""

from k3train import platform  # noqa: F401  (silences the libraries before they are imported)
