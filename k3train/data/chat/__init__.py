"""Conversations: reading them, writing them as a chat template does, and which of their tokens are trained on."""
