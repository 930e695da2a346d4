"""Reinforcement learning: objectives, rollouts that outlive an iteration, environments, rewards."""
