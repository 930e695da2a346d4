"""Distillation from a teacher's stored logits."""
