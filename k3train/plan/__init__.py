"""What a recipe needs and how fast it could be on a cluster, without the cluster (docs/planner.md)."""
