"""Native batched MuJoCo backend."""
