"""Tokenizers, corpora and the data sets that training reads."""

from k3train.quiet import quiet_libraries

quiet_libraries()  # before the libraries are imported
